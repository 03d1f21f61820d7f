"""``module.skip``: a value in the place of a module's result, which need not run where every request gives one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from endoscope.errors import MissingStateError, NeverRanError, ReplacementError
from endoscope.probing.probe import NOTHING, Probe
from endoscope.probing.rows import NOBODYS, READS_ONLY, Edit, Span, Step, matched, walk
from endoscope.probing.site import Site, Station
from endoscope.probing.state import tracked
from endoscope.probing.turns import Turns

if TYPE_CHECKING:
    from endoscope.probing.handoff import Handoffs


class Form:
    """What a module returned, without the numbers: its structure, widths and dtypes, and whose its rows are."""

    __slots__ = ("_leaves", "_one", "_plain", "_value", "_varies")

    def __init__(self, output: Any, step: Step, before: Form | None = None) -> None:
        self._leaves: list[tuple[str | None, torch.device]] = []
        self._value = walk(output, lambda tensor: self._leaf(tensor, step))
        # Where each request has one row, it cannot be told whether rows are those of tokens or of requests.
        self._one = step.tokens == step.requests
        self._plain = _plain(output) and all(rows is not None for rows, _ in self._leaves)
        self._varies: bool = before is not None and (before._varies or self._differs(before))
        if before is not None and self._one and not before._one and not self._varies:
            self._one, self._leaves = False, before._leaves

    def _leaf(self, tensor: torch.Tensor, step: Step) -> torch.Tensor:
        length = tensor.shape[0] if tensor.dim() else None
        rows = "tokens" if length == step.tokens else "requests" if length == step.requests else None
        self._leaves.append((rows, tensor.device))
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def _differs(self, before: Form) -> bool:
        if not (self._plain and before._plain):
            return True
        if not (self._one or before._one) and self._leaves != before._leaves:
            return True
        mine, its = (walk(form._value, lambda leaf: (leaf.shape[1:], leaf.dtype)) for form in (self, before))
        return bool(mine != its)

    def lasting(self) -> Form:
        """What can be kept of this: nothing that holds on to objects of the model, which may hold values."""
        if self._plain:
            return self
        form = Form(None, Step(0, 0))
        form._varies = True
        return form

    def makes(self, step: Step) -> bool:
        """Whether a result can be made from this alone, in a step of that shape.

        Not where it holds values that no request gives, nor where the module was seen to return now this
        and now that.
        """
        return self._plain and not self._varies and (not self._one or step.tokens == step.requests)

    def fit(self, station: Station, value: Any, span: Span) -> list[torch.Tensor]:
        """The tensors of a request's value for :meth:`Station.skip`, in the order of :func:`walk`.

        Raises:
            ReplacementError: if the value does not fit.
        """
        leaves = iter(self._leaves)

        def part(tensor: torch.Tensor) -> torch.Tensor:
            rows, device = next(leaves)
            if rows is None:
                raise ReplacementError(f"{station.skip.name}: {NOBODYS.format(tuple(tensor.shape))}")
            count = span.stop - span.start if rows == "tokens" else 1
            return torch.empty((), dtype=tensor.dtype, device=device).expand(count, *tensor.shape[1:])

        expected = walk(self._value, part)
        return matched(station.skip.name, expected, _of_stream(station, expected, value))

    def filled(self, step: Step, parts: list[tuple[Span, list[torch.Tensor]]]) -> Any:
        """A result that holds these rows of these requests, and zeros elsewhere."""
        leaves = iter(enumerate(self._leaves))

        def whole(tensor: torch.Tensor) -> torch.Tensor:
            index, (rows, device) = next(leaves)
            count = step.tokens if rows == "tokens" else step.requests
            made = torch.zeros(count, *tensor.shape[1:], dtype=tensor.dtype, device=device)
            for span, values in parts:
                start, stop = (span.start, span.stop) if rows == "tokens" else (span.row, span.row + 1)
                made[start:stop].copy_(values[index])
            return made

        return walk(self._value, whole)


def _plain(value: Any) -> bool:
    """Whether a value is made of tensors and of what is the same in every step."""
    if isinstance(value, (tuple, list)):
        return all(map(_plain, value))
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def _of_stream(station: Station, expected: Any, value: Any) -> Any:
    """What a decoder layer returns, where a block has given the residual stream behind it.

    One tensor is the whole stream. In a pair, ``None`` for the residual is one of zeros, as in the call of
    the first layer.
    """
    stream = station.stream
    if stream is None or not isinstance(expected, tuple) or len(expected) != (1 if stream.residual is None else 2):
        return value
    if isinstance(value, torch.Tensor):
        value = (value,) if stream.residual is None else (value, None)
    if stream.residual is not None and isinstance(value, (tuple, list)) and len(value) == 2 and value[1] is None:
        rows = expected[1]
        value = (value[0], torch.zeros(rows.shape, dtype=rows.dtype, device=rows.device))
    return value


class Skipping:
    """One call of a module that some requests skip.

    Attributes:
        probes: those whose blocks skip it.
        output: the result, if it is put together from their values and the module does not run; otherwise
            ``NOTHING``.
    """

    __slots__ = ("output", "probes", "station")

    def __init__(self, station: Station, probes: list[Probe], output: Any) -> None:
        self.station = station
        self.probes = probes
        self.output = output

    @property
    def runs(self) -> bool:
        """Whether the module runs all the same, for other requests or for its keys and values."""
        return self.output is NOTHING


class Skips:
    """The skips of the current step.

    A block that skips a module is parked from before the module until after it, so that nothing of what
    the module does inside reaches the block, whether or not it runs.

    A module that keeps something for the requests runs as ever, so that later steps find the keys and values of this
    one; only its result is thrown away. But if no later step reads them, since the request has none or the module is
    skipped in each of them, the request's rows do not matter inside of it, and if that is so for every row, it does
    not run. Whether it does can be told from the request alone, and so its numbers are the same in any batch.

    Attributes:
        under: the probes whose blocks skip a module that is being passed, and whether their rows matter inside of it.
        done: what each block has skipped in this step.
    """

    def __init__(self, host: Handoffs) -> None:
        self.host = host
        self.under: dict[Probe, bool] = {}
        self.done: dict[Probe, list[Station]] = {}
        self._rows = 0
        self._values: dict[Probe, Any] = {}
        self._throughout: set[Probe] = set()
        self._watched: list[Station] = []

    def begin(self, rows: int) -> None:
        """A step begins, of which so many rows of tokens are requests'."""
        self._rows = rows
        self.under.clear()
        self.end()

    def end(self) -> None:
        """The step is over."""
        self.done.clear()
        for station in self._watched:
            station.lacking.clear()
        self._watched.clear()

    # In the block.

    def ask(self, probe: Probe, station: Station, value: Any, throughout: bool = False) -> None:
        """Park until the pass is behind the module, and give the value as its result.

        Args:
            probe: whose block skips it.
            station: the module.
            value: its result.
            throughout: whether the block is known to skip it in every later step too.
        """
        site = station.skip
        if probe.reads_only:
            raise ReplacementError(READS_ONLY.format(site.name))
        self.host.check(probe, site)
        self._values[probe] = value
        if throughout:
            self._throughout.add(probe)
        try:
            probe.park(site)
        finally:
            probe.last = site
            del self._values[probe]
            self._throughout.discard(probe)

    def refuse(self, probe: Probe, site: Site) -> None:
        """Refuse a site inside a module that the block has skipped in this step.

        Raises:
            NeverRanError: if it is one.
        """
        for skipped in self.done.get(probe, ()):
            if site.station is not None and skipped in site.station.outer:
                raise NeverRanError(
                    f"{site.name} was asked for in step {probe.step}, in which the block has skipped "
                    f"{skipped.path or 'the model'}: after {skipped.skip.name}(...) nothing inside of it runs for this "
                    f"request. Ask for the site in a step that does not skip the module"
                )

    # Around the module.

    def note(self, station: Station, output: Any) -> Form:
        """Remember what the module returns, so that its result can be made without it."""
        form = Form(output, self.host.step, station.form)
        station.form = form.lasting()
        return form

    def enter(self, station: Station) -> Skipping:
        """The module is about to run: find out whether it has to."""
        probes, station.skip.waiting = station.skip.waiting, []
        output = NOTHING
        form, step = station.form, self.host.step
        keeps = station in self.host.stateful
        # Rows are computed for their keys and values, if for nothing else.
        matter = {probe: keeps and not self._is_last(probe) for probe in probes}
        # Those of requests that skip a module around this one may matter here as well.
        free = [probe for probe, matters in (*matter.items(), *self.under.items()) if not matters]
        skipped = sum(probe.span.stop - probe.span.start for probe in free)
        recording = self.host.wrappers.clock is not None
        if skipped == self._rows and not recording and form is not None and form.makes(step):
            try:
                with tracked():
                    parts = [(each.span, form.fit(station, self._values[each], each.span)) for each in probes]
                    output = form.filled(step, parts)
            except Exception:
                # A value that does not fit. Its block hears of it behind the module, as it does in any batch.
                output = NOTHING
        self.under.update(matter)
        return Skipping(station, probes, output)

    def _is_last(self, probe: Probe) -> bool:
        """Whether no later step of the request reads what a module that its block skips would keep of this one."""
        if probe in self._throughout:
            return True
        return probe.samples and probe.last_step is not None and probe.step >= probe.last_step

    def leave(self, skipping: Skipping, output: Any) -> Any:
        """The pass is behind the module: the values take their rows of its result, and the blocks go on."""
        station, probes = skipping.station, skipping.probes
        failures: dict[Probe, ReplacementError] = {}
        if skipping.runs:
            form = self.note(station, output)
            edit = Edit(output, self.host.step)
            with tracked():
                for probe in probes:
                    try:
                        rows = form.fit(station, self._values[probe], probe.span)
                        edit.write(probe.span, list(enumerate(rows)))
                    except ReplacementError as error:
                        failures[probe] = error
                    except Exception as error:
                        failures[probe] = ReplacementError(f"{station.skip.name}: {type(error).__name__}: {error}")
            output = edit.result(output)
        position = station.output.position
        for probe in probes:
            del self.under[probe]
            probe.edited = probe.edited_pass = True
            if position is not None:
                probe.position = position
        keepers = self._keepers(station)
        with Turns() as turns:
            for probe in probes:
                if (failure := failures.get(probe)) is not None:
                    probe.fail(failure)
                    continue
                self.done.setdefault(probe, []).append(station)
                if probe in self._throughout:
                    probe.lacks = probe.lacks.union(keepers)
                probe.turn(turns=turns)
        return output

    # Keys and values, which a module that did not run has not written. No step reads them, if all is as the text of the
    # block tells. But it may call code that goes to another step, or change what it skips behind the text's back.

    def _keepers(self, station: Station) -> list[Station]:
        """The innermost modules in one, or itself, that keep something for the requests between steps."""
        stateful = self.host.stateful
        if station not in stateful:
            return []
        inside = [each for each in stateful if each is station or station in each.outer]
        around = {outer for each in inside for outer in each.outer}
        return [each for each in inside if each not in around]

    def watch(self, probe: Probe) -> None:
        """The probe takes part in a step, and there are modules that lack what they keep for it."""
        for station in probe.lacks:
            station.lacking.append(probe)
            self._watched.append(station)
            self.host.wrappers.want(station)

    def needed(self, station: Station) -> None:
        """The module is about to run: end the requests that it has not everything for."""
        for probe in station.lacking[:]:
            if probe in self.under:
                continue
            station.lacking.remove(probe)
            error = MissingStateError(
                f"{station.path or 'the model'} runs in step {probe.step} of this request, but it, or a module around "
                f"it, was skipped in an earlier step by a block that reads as if it did so in every step, and so the "
                f"keys and values of that step's tokens are missing. In a loop over all steps, skip the same modules "
                f"in each pass and call nothing that goes to the next step; or put the skip under an if: then it may "
                f"stand for some steps only"
            )
            if not probe.dead:
                probe.fail(error)
                # A block that has caught it cannot go on either.
                probe.kill()
            probe.error = probe.error or error
