"""Handoffs: a model gives a site's value to the probes that wait there, and takes back what they did to it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from endoscope.errors import NeverRanError, OutOfOrderError, ReplacementError, SiteError
from endoscope.probing.limits import Limits
from endoscope.probing.probe import NOTHING, Probe
from endoscope.probing.rows import NO_TENSORS, READS_ONLY, Copy, Edit, Layout, Span, Step, matched
from endoscope.probing.site import Site, Station, Stream
from endoscope.probing.skip import Skips
from endoscope.probing.state import no_modes, tracked
from endoscope.probing.turns import Turns
from endoscope.probing.wrappers import Arguments, Wrappers


class Handoffs:
    """The sites of one model, the probes of its current step, and the exchange between them.

    An engine calls, for each step: :meth:`begin`, runs the model, :meth:`visit` for its logits and its
    samples, and :meth:`end`.

    Args:
        model: any module; its own tree gives the names of the sites.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stations: dict[str, Station] = {}
        for path, module in model.named_modules(remove_duplicate=False):
            outer = self.stations.get(path.rpartition(".")[0]) if path else None
            self.stations[path] = Station(path, module, outer)
        self.skips = Skips(self)
        self.wrappers = Wrappers(self.stations, self._enter, self._leave, self.skips)
        self.logits = Site("logits", "logits")
        self.samples = Site("samples", "samples")
        self.next_step = Site("the next step", "step")
        self.limits = Limits.given()
        self.step = Step(0, 0)
        self.probes: tuple[Probe, ...] = ()
        self.stateful: set[Station] = set()
        """Modules that keep something for the requests between calls, or hold one that does."""
        self.served: frozenset[Site] | None = None
        """The sites of modules that the current step comes by; ``None`` for all of them."""
        self.running = False
        """Whether modules run in the current step, rather than what comes behind them."""
        self.item: OneItem | None = None
        """What the probes of the visit under way are handed, if that is one item of a tuple."""
        self._last_layout: tuple[list[Probe], Layout] = ([], Layout([Span(0, 0, 0)], self.step))

    def begin(
        self,
        probes: Iterable[tuple[Probe, Span, bool]],
        tokens: int,
        requests: int,
        rows: int | None = None,
        served: frozenset[Site] | None = None,
    ) -> None:
        """A step begins: tell each probe its rows, start the new ones and wake those that wait for it.

        Args:
            probes: those whose requests are in the step, with their rows, and whether the step makes a token
                for them, as all but the first parts of a prompt do.
            tokens: rows of the step's token tensors.
            requests: rows of its logits.
            rows: how many of the rows of its token tensors are requests'; ``None`` for all of them.
            served: the sites of modules that the step comes by, where the model runs as compiled code; what a block
                can ask for in it has to be among them. ``None`` where the modules run as Python.
        """
        self.served = served
        self.step = Step(tokens, requests)
        self._last_layout = [], self._last_layout[1]
        self.item = None
        self.skips.begin(tokens if rows is None else rows)
        pairs = tuple(probes)
        self.probes = tuple(probe for probe, _, _ in pairs)
        self.running = True
        with Turns() as turns:
            for probe, span, samples in pairs:
                probe.span = span
                probe.samples = samples
                probe.position = -1
                probe.in_step = True
                if probe.lacks:
                    self.skips.watch(probe)
                if probe.dead:
                    continue
                if not probe:
                    probe.turn(turns=turns)
                elif probe.site is self.next_step:
                    probe.leave()
                    if probe.reads_only:
                        probe.read(True)
                    else:
                        probe.turn(True, turns=turns)
                elif (site := probe.site) is not None and probe not in site.waiting:
                    self._wanted_still(probe, site)
        # Compiled code does not come by any wrapper, so these stay as they are where it runs.
        if served is None and self.probes and not self.wrappers.recorded:
            self.wrappers.record()
        elif served is None and len(self.wrappers):
            self.wrappers.keep(self._awaited())

    @contextlib.contextmanager
    def learning(self, rows: int) -> Iterator[None]:
        """Around a pass of so many rows that no request is in, to learn in which order the modules run."""
        self.served = None
        self.step = Step(rows, rows)
        self.skips.begin(rows)
        self.wrappers.record()
        self.running = True
        try:
            yield
            self.wrappers.recording_ends()
        finally:
            self.running = False
            self.wrappers.clock = None
            self.wrappers.keep(())

    def end(self) -> None:
        """The step is over: a probe that still waits for one of its sites gets an error."""
        if self.wrappers.clock is not None:
            self.wrappers.recording_ends()
        for probe in self.probes:
            probe.in_step = False
            if probe.kept:
                probe.check_kept()
            if probe.samples:
                while not probe.dead and (site := probe.site) is not None and site is not self.next_step:
                    probe.fail(self._missed(probe, site))
                probe.step += 1
            elif (site := probe.site) is not None and site is not self.next_step and probe in site.waiting:
                # It keeps its place for the next part of the prompt, and takes no part in steps without it.
                site.waiting.remove(probe)
        self.probes = ()
        self.skips.end()
        self._last_layout = [], self._last_layout[1]

    def visit(self, site: Site, value: Any) -> Any:
        """The pass is at a site: hand its value to all who wait there.

        Returns:
            The value, or one in its place with the rows in it that blocks changed.
        """
        if site is self.logits:
            self._forward_ends()
        return value if (edit := self._visit(site, value)) is None else edit.result(value)

    def _forward_ends(self) -> None:
        """No module runs any more in this step: who waits for one gets an error, and may go on to the logits."""
        self.running = False
        if self.wrappers.clock is not None:
            self.wrappers.recording_ends()
        for probe in self.probes:
            if probe.samples:
                while not probe.dead and (site := probe.site) is not None and site.station is not None:
                    probe.fail(self._missed(probe, site))

    def _visit(self, site: Site, value: Any) -> Edit | None:
        edit: Edit | None = None
        while site.waiting:
            probes, site.waiting = site.waiting, []
            position = site.position
            with Turns() as turns:
                source, layout = value if edit is None else edit.result(value), self._layout(probes)
                self.item = item = OneItem.of(source, layout, probes)
                copy = Copy(source if item is None else source[item.number], layout)
                nobodys, one = None in copy.cuts, isinstance(copy.value, torch.Tensor)
                written_in: list[tuple[Probe, Any, Sequence[torch.Tensor]]] = []
                together = site.limit is None and not nobodys
                for probe, (view, parts) in zip(probes, copy.views(), strict=True):
                    if position is not None:
                        probe.position = position
                    probe.partial = item is not None
                    probe.fixed = copy.nobodys(parts) if nobodys else NO_TENSORS
                    if probe.reads_only:
                        probe.read(view)
                    else:
                        probe.turn(view, turns=turns)
                    if item is not None and not probe.partial:
                        # It has asked for the rest as well.
                        view = parts = probe.shown
                        written = any(map(_version, parts))
                    else:
                        written = view._version if one else any(map(_version, parts))
                    if not written and probe.replacement is NOTHING:
                        continue
                    if probe.error is not None or probe.reads_only or (item is not None and not probe.partial):
                        together = False  # rows of the copy are not what is to flow on, or the copy is not all
                    if probe.error is None:
                        edit = edit or Edit(value, self.step)
                        if probe.replacement is NOTHING:
                            written_in.append((probe, view, parts))
                        else:
                            self._collect(probe, site, view, parts, edit)
                            together = False
                if edit is not None and not (together and self._collect_all(site, copy, written_in, edit)):
                    for probe, view, parts in written_in:
                        self._collect(probe, site, view, parts, edit)
                self.item = None
        return edit if edit is not None and edit.fresh else None

    def _layout(self, probes: list[Probe]) -> Layout:
        """Where the probes' rows lie; they are brought into the order of the batch."""
        known, layout = self._last_layout
        if probes != known:
            probes.sort(key=_row)
            layout = Layout([probe.span for probe in probes], self.step)
            self._last_layout = list(probes), layout
        return layout

    def _collect_all(
        self, site: Site, copy: Copy, written: list[tuple[Probe, Any, Sequence[torch.Tensor]]], edit: Edit
    ) -> bool:
        """Write what several probes have written in place, all at once; ``False`` if it is to be done one by one."""
        if len(written) < 2:
            return False
        edges: list[list[tuple[int, int]]] = [[] for _ in copy.bases]
        for probe, _, parts in written:
            for index, part in enumerate(parts):
                if part._version:
                    edge = copy.edge_of(index, part, probe.span)
                    if edge is None:
                        return False
                    edges[index].append(edge)
        first = self.item.number if self.item is not None else 0
        for index, of_tensor in enumerate(edges):
            if of_tensor:
                edit.write_all(first + index, copy, index, of_tensor)
        for probe, _, _ in written:
            probe.edited = True
            probe.edited_pass = probe.edited_pass or site.station is not None
        return True

    def _collect(self, probe: Probe, site: Site, view: Any, parts: Sequence[torch.Tensor], edit: Edit) -> None:
        """Write what a probe did during its turn into the step's value."""
        try:
            if probe.reads_only:
                raise ReplacementError(READS_ONLY.format(site.name))
            # Matched anew: what was assigned may have been changed in place since.
            rows = parts if probe.replacement is NOTHING else matched(site.name, view, probe.replacement)
            site.check(rows)
            first = self.item.number if self.item is not None and probe.partial else 0
            pairs = enumerate(zip(parts, rows, strict=True), first)
            edit.write(probe.span, [(index, new) for index, (part, new) in pairs if new is not part or part._version])
            probe.edited = True
            # What is done to logits or samples is in the request's tokens, and is not lost with its keys and values.
            probe.edited_pass = probe.edited_pass or site.station is not None
        except Exception as error:
            # Whatever a block made of its value is its own failure, never that of the engine's step.
            text = str(error) if isinstance(error, ReplacementError) else f"{type(error).__name__}: {error}"
            failure = ReplacementError(text if text.startswith(site.name) else f"{site.name}: {text}")
            if probe.dead:
                probe.error = failure
            else:
                probe.fail(failure)

    # What probes ask.

    def wanted(self, probe: Probe, site: Site) -> None:
        """A probe has parked at the site: make the pass come by.

        Raises:
            SiteError: if it cannot any more.
        """
        station = site.station
        if station is not None:
            if self.served is not None:
                if self.running and probe.in_step and site not in self.served:
                    raise SiteError(NOT_SERVED.format(site.name))
            elif station not in self.wrappers.wanted:
                self.wrappers.want(station)
            site.waiting.append(probe)
        elif probe.samples or site is self.next_step:
            site.waiting.append(probe)

    def _wanted_still(self, probe: Probe, site: Site) -> None:
        """As :meth:`wanted`, for a probe that has parked in an earlier step."""
        try:
            self.wanted(probe, site)
        except SiteError as error:
            probe.fail(error)

    def check(self, probe: Probe, site: Site) -> None:
        """Refuse a site that the current step has already left.

        Raises:
            OutOfOrderError: if it has.
            NeverRanError: if it lies inside a module that the block has skipped in this step.
            SiteError: for the residual stream of a module that is no decoder layer.
        """
        if probe.finished:
            raise NeverRanError(f"{site.name} was asked for, but the request had ended after {_steps(probe.step)}")
        if site.residual and (station := site.station) is not None and station.stream is None:
            raise SiteError(
                f"{station.path or 'the model'} ({type(station.module).__name__}) is no decoder layer: only an "
                f"element of the model's list of layers that takes hidden states has {site.kind}"
            )
        position = site.position
        if position is not None and position > probe.position:
            return
        if self.skips.done:
            self.skips.refuse(probe, site)
        if position is None:
            return
        if self.wrappers.clock is not None and site.station is not None:
            # The first pass is under way, and nobody knows yet whether it runs the module again.
            return
        if position == probe.position and probe.last is not None and probe.last is not site:
            return
        raise self._out_of_order(probe, site)

    def _out_of_order(self, probe: Probe, site: Site) -> OutOfOrderError:
        last = probe.last.name if probe.last is not None else "the start"
        return OutOfOrderError(
            f"{site.name} was asked for in step {probe.step}, which has already left it: the block had last stopped "
            f"at {last}. Within one step, ask for sites in the order in which the model runs "
            f"({site.name} comes first), and for each of them once"
        )

    def _missed(self, probe: Probe, site: Site) -> SiteError:
        station, position = site.station, site.position
        if station is None:
            return NeverRanError(f"{site.name} was asked for in step {probe.step}, which came to an end without it")
        if station.entered is not None and probe.position >= 0 and (position is None or position <= probe.position):
            return self._out_of_order(probe, site)
        last = "" if probe.last is None else f"; the block had last stopped at {probe.last.name}"
        return NeverRanError(
            f"{site.name} was asked for in step {probe.step}, but {station.path or 'the model'} did not run in that "
            f"step{last}. vLLM may use the module's weights without calling it; the modules that do run are those of "
            f"the model's forward pass"
        )

    # What wrappers call.

    def _awaited(self) -> list[Station]:
        return [
            station
            for module in self.wrappers.on
            for station in self.wrappers.stations[module]
            if station.enters or station.leaves
        ]

    def _enter(self, station: Station, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        while station.inputs.waiting or station.resid_pre.waiting:
            if station.inputs.waiting:
                args, kwargs = self.visit(station.inputs, (args, kwargs))
            stream = station.stream
            if station.resid_pre.waiting and stream is not None:
                hidden = Stream.argument(stream.hidden, args, kwargs)
                residual = None if stream.residual is None else Stream.argument(stream.residual, args, kwargs)
                pair = self._stream(station.resid_pre, hidden, residual)
                args, kwargs = Stream.put(stream.hidden, pair[0], args, kwargs)
                if stream.residual is not None and residual is not None:
                    args, kwargs = Stream.put(stream.residual, pair[1], args, kwargs)
        return args, kwargs

    def tap(self, station: Station, output: Any) -> Any:
        """Compiled code comes by the output of a module: hand it to all who wait for it, unless it runs as Python."""
        return output if self.served is None else self._leave(station, output)

    def _leave(self, station: Station, output: Any) -> Any:
        while station.output.waiting or station.resid_post.waiting:
            if station.output.waiting:
                output = self.visit(station.output, output)
            stream = station.stream
            if station.resid_post.waiting and stream is not None:
                if stream.residual is not None and isinstance(output, tuple):
                    output = (*self._stream(station.resid_post, output[0], output[1]), *output[2:])
                elif isinstance(output, tuple):
                    output = (self._stream(station.resid_post, output[0], None)[0], *output[1:])
                else:
                    output = self._stream(station.resid_post, output, None)[0]
        # Behind the logits, modules run for single requests (logits of prompts, say) and not for the step.
        under = self.skips.under
        caches = [c for c in station.caches if c.probe.in_step and self.running and c.probe not in under]
        if caches:
            # One block may have several caches.
            probes = sorted({cache.probe for cache in caches}, key=_row)
            with tracked():
                copy = Copy(output, self._layout(probes))
            for cache in caches:
                cache.add(station.path, copy, probes.index(cache.probe))
        return output

    def _stream(self, site: Site, hidden: torch.Tensor, residual: Any) -> tuple[torch.Tensor, Any]:
        """A visit to the residual stream: the sum of the pair, written back as ``(sum, 0)`` where it was changed."""
        whole = hidden if residual is None else hidden + residual
        edit = self._visit(site, whole)
        if edit is None:
            return hidden, residual
        if residual is None:
            return edit.result(hidden), None
        hidden, residual = hidden.clone(), residual.clone()
        for start, stop in edit.rows:
            hidden[start:stop] = edit.fresh[0][start:stop]
            residual[start:stop] = 0
        return hidden, residual


NOT_SERVED = (
    "{} was asked for in a step that runs as compiled code, since the text of the block was taken to ask for no such "
    "site there. This is a fault of endoscope: please report it, with the block. Until it is mended, build the engine "
    "with enforce_eager=True"
)


class OneItem:
    """A visit to a site whose value is a tuple of tensors, of which all who wait there want the same one."""

    __slots__ = ("_layout", "_probes", "_rest", "_source", "number")

    def __init__(self, source: tuple[torch.Tensor, ...], number: int, layout: Layout, probes: list[Probe]) -> None:
        self.number = number
        self._source = source
        self._layout = layout
        self._probes = probes
        self._rest: Copy | None = None

    @classmethod
    def of(cls, value: Any, layout: Layout, probes: list[Probe]) -> OneItem | None:
        """The visit of these probes, or ``None`` if it is none of this kind."""
        number = probes[0].item
        if number is None or type(value) is not tuple or number >= len(value):
            return None
        if not all(isinstance(each, torch.Tensor) for each in value) or any(p.item != number for p in probes):
            return None
        return cls(value, number, layout, probes)

    def whole(self, probe: Probe) -> tuple[torch.Tensor, ...]:
        """The whole value for a probe that has the turn, with the item that it was handed in it."""
        with no_modes(), tracked():
            if self._rest is None:
                self._rest = Copy((*self._source[: self.number], *self._source[self.number + 1 :]), self._layout)
            rest = self._rest.view(self._probes.index(probe))
        probe.fixed = probe.fixed + (self._rest.nobodys(rest) if None in self._rest.cuts else NO_TENSORS)
        return (*rest[: self.number], probe.value, *rest[self.number :])


_version = operator.attrgetter("_version")


def _row(probe: Probe) -> int:
    return probe.span.row


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
