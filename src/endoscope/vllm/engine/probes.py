"""The probes of one engine: admitted with their requests, run in its steps, sent home when they end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

import torch
from greenlet import getcurrent
from torch import nn

from endoscope.errors import BlockError, PreemptionError, ReplacementError
from endoscope.probing import BlockTracer, Handoffs, ModelView, Probe, Span
from endoscope.probing.exits import refuse_exits
from endoscope.probing.limits import too_much
from endoscope.probing.saves import tensor_save
from endoscope.probing.site import Site
from endoscope.probing.steps import caches_close
from endoscope.probing.watchdog import Watchdog
from endoscope.tracing.failure import clean_text, take_apart
from endoscope.tracing.messages import Emitted, Ended, Printed, Submission, Warned, decode_submission
from endoscope.tracing.reach import HIDDEN
from endoscope.tracing.serialize import dumps, loads
from endoscope.vllm import internals
from endoscope.vllm.engine.gears import Gear, Gears
from endoscope.vllm.engine.outbox import Outbox
from endoscope.vllm.engine.taps import chosen, install

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Rows:
    """One request's part of a step.

    Attributes:
        request: vLLM's id of it.
        first: position in the sequence of the first token that the step computes.
        count: how many tokens it computes.
        known: how many tokens the sequence has; a step that reaches this many samples the next one.
    """

    request: str
    first: int
    count: int
    known: int


@dataclass(slots=True)
class Traced:
    """A traced request in this engine."""

    submission: Submission
    sequence: int
    probe: Probe
    seen: int = 0
    """How many positions of the sequence the block has been shown."""
    settled: bool = False
    """Whether the block has ended, or has nothing more to do with the steps to come."""
    reported: bool = False


class EngineProbes:
    """Everything that one rank knows of traces.

    Args:
        model: the loaded model.
        tokenizer: returns its tokenizer.
        reports: whether this rank sends values home; the others run the same blocks and keep quiet.
        taps: what compiled code is to be tapped for, as for :func:`taps.chosen`; ``None`` where nothing is compiled.
    """

    def __init__(self, model: nn.Module, tokenizer: Callable[[], Any], reports: bool = True, taps: Any = None) -> None:
        self.handoffs = Handoffs(model)
        served = None if taps is None else install(chosen(self.handoffs, taps), self.handoffs.tap)
        self.gears = Gears(self.handoffs, served)
        self.gear = Gear.GRAPH
        """The one of the current step."""
        self.handoffs.stateful = {s for s in self.handoffs.stations.values() if internals.keeps_state(s.module)}
        self.handoffs.samples.limit = internals.vocabulary(model)
        self.watchdog = Watchdog(self.handoffs.limits)
        refuse_exits()
        self.model = ModelView(self.handoffs, tokenizer)
        self.tracer = BlockTracer(self.handoffs)
        self.tokenizer = tokenizer
        self.outbox = Outbox() if reports else None
        self.traced: dict[str, Traced] = {}
        self.current: list[Traced] = []
        self.due: list[Traced] = []
        """Requests whose blocks have ended, and whose values are still to be sent."""
        self.over: dict[str, bool] = {}
        """Requests that their blocks end in this step; true where the token of the step counts."""
        self.quiet: list[str] = []
        """Requests that go on, and whose blocks have ended in this step."""
        if not hasattr(torch.Tensor, "save"):
            torch.Tensor.save = tensor_save  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return bool(self.traced)

    # A request's life.

    def admit(self, request: str, data: bytes, tokens: int | None = None) -> None:
        """A traced request arrives: make its probe.

        What goes wrong here is the block's failure, and goes home as that.

        Args:
            request: vLLM's id of it.
            data: its submission.
            tokens: how many it generates at most.
        """
        if request in self.traced:
            # Some of vLLM's runners are told of a resumed request as of a new one.
            self.resumed(request)
            return
        self.watchdog.watch()
        submission = decode_submission(data)
        prefix = request.partition("_")[0]
        sequence = int(prefix) if prefix.isdigit() else 0
        send = self._sender(submission, sequence) if self.outbox is not None else _quiet
        namespace: dict[str, Any] = {}
        probe = Probe(_NOTHING, namespace, self.handoffs, request, send)
        probe.reads_only = submission.reads_only
        probe.skips_throughout = submission.skips_throughout
        probe.reach = submission.reach
        probe.last_step = None if tokens is None else tokens - 1
        self.traced[request] = Traced(submission, sequence, probe)
        try:
            namespace.update(loads(submission.values, self.resolve, own_classes=True))
            namespace.pop(HIDDEN, None)
            probe.code = submission.code.compile()
        except BaseException as error:
            probe.error = _unloadable(error)
            probe.kill()

    def resolve(self, key: tuple[str, ...]) -> Any:
        """What a reference stands for in this process."""
        match key:
            case ("model",):
                return self.model
            case ("module", path):
                return self.model.get_submodule(path)
            case ("tracer",):
                return self.tracer
            case ("tokenizer",):
                return self.tokenizer()
        raise BlockError(f"the block refers to {key!r}, which this engine does not know")

    def resumed(self, request: str) -> None:
        """The request was preempted and its keys and values are computed anew, without what its block did to them."""
        traced = self.traced.get(request)
        if traced is None or traced.reported or not traced.probe.edited_pass:
            return
        error = PreemptionError(
            "the engine ran out of space for keys and values and preempted this request, whose block had changed "
            "the model's values; what it changed in earlier steps is lost, so the request cannot go on. Give the "
            "engine more space (kv_cache_memory_bytes), or fewer requests at once (max_num_seqs)"
        )
        self._end_with(traced, error)

    def _end_with(self, traced: Traced, error: BlockError) -> None:
        """End a block with an error of the engine's, and its request with it; the step's token is none of its text."""
        if not traced.probe.dead:
            traced.probe.fail(error)
        # Even if it catches the error.
        traced.probe.kill()
        traced.probe.error = traced.probe.error or error
        traced.settled = False
        # The step has computed it without what the block has done, or would have done.
        self.over[traced.probe.request] = False
        self._settle(traced)

    def finish(self, requests: Iterable[str]) -> None:
        """Requests have ended: so do their blocks, and what these saved goes home."""
        finished = [traced for request in requests if (traced := self.traced.pop(request, None)) is not None]
        for traced in finished:
            traced.probe.finish()
            self._report(traced)
        # Behind all reports: a client waits for these.
        for traced in finished:
            traced.probe.clear()
        if finished:
            self._rest()
            gc.collect(0)

    def release(self, requests: Iterable[str]) -> None:
        """Nobody waits for these requests any more: end their blocks and send nothing."""
        wanted = set(requests)
        for request, traced in list(self.traced.items()):
            if request in wanted or traced.submission.key in wanted:
                del self.traced[request]
                traced.settled = traced.reported = True
                traced.probe.kill()
                caches_close(traced.probe)
                traced.probe.clear()
        self._rest()

    def missing(self, request: str, key: str, sequence: int, home: str) -> None:
        """A client waits for the block of a finished request: if it never began, say so.

        If it did and has ended, its own message is on its way, and arrives before this one.
        """
        if self.outbox is not None and request not in self.traced:
            error = BlockError(
                "the request ended before the model ran any of it, so its block never began; the finish_reason of "
                "its output says why (vLLM's log says more of an error)"
            )
            self.outbox.send(home, Ended(key, sequence, dumps({}, buffers=[]), take_apart(error)))

    def _rest(self) -> None:
        # Steps without a traced request do not come by here, and run without a wrapper.
        if not self.traced:
            self.handoffs.wrappers.keep(())

    # A step.

    def choose(self, requests: Iterable[str]) -> Gear:
        """The gear for a step with these requests in it."""
        here = [traced for request in requests if (traced := self.traced.get(request)) is not None]
        self.gear = self.gears.choose([traced.probe for traced in here if not traced.settled])
        return self.gear

    def begin(self, rows: Sequence[Rows], tokens: int) -> None:
        """The model is about to run.

        Args:
            rows: the requests of the step in the order of the batch.
            tokens: rows of its token tensors.
        """
        pairs: list[tuple[Probe, Span, bool]] = []
        self.current = []
        start = 0
        for index, row in enumerate(rows):
            stop = start + row.count
            traced = self.traced.get(row.request)
            if traced is not None and not traced.settled:
                if not traced.seen and row.count < row.known:
                    self._end_with(traced, BlockError(_SPLIT.format(row.known, row.first, row.first + row.count - 1)))
                    start = stop
                    continue
                # Positions computed again after a preemption were shown before.
                again = max(0, traced.seen - row.first)
                if again < row.count:
                    samples = row.first + row.count >= row.known
                    pairs.append((traced.probe, Span(start + again, stop, index), samples))
                    self.current.append(traced)
                    traced.seen = row.first + row.count
            start = stop
        served = {Gear.GRAPH: frozenset[Site](), Gear.SPLIT: self.gears.taps}.get(self.gear)
        self.handoffs.begin(pairs, tokens, len(rows), start, served)

    def logits(self, value: torch.Tensor) -> torch.Tensor:
        """The step's logits, ``[requests, vocabulary]``."""
        return self.handoffs.visit(self.handoffs.logits, value)  # type: ignore[no-any-return]

    def samples(self, value: torch.Tensor) -> torch.Tensor:
        """The step's sampled tokens, ``[requests, 1]``."""
        before = [traced for traced in self.current if traced.probe.dead]
        value = self.handoffs.visit(self.handoffs.samples, value)
        for traced in before:
            if traced.probe.stopped or traced.probe.error is not None:
                self.over.setdefault(traced.probe.request, False)
        return value

    def editing(self) -> list[str]:
        """The requests of the step whose blocks may change something."""
        return [traced.probe.request for traced in self.current if not traced.probe.reads_only]

    def refuse(self, request: str, token: int) -> None:
        """End a request whose token its structured output does not allow, which only its block can bring about."""
        probe = self.traced[request].probe
        error = ReplacementError(
            f"samples has token {token} in step {probe.step}, which the request's structured output does not allow "
            f"there, so that it cannot go on: assign a token that fits, or leave a fitting one a finite logit"
        )
        if not probe.dead:
            probe.fail(error)
        probe.error = probe.error or error
        self.over[request] = False

    @staticmethod
    def turn_of() -> str | None:
        """The request whose block has the turn; ``None`` while it is the model's own."""
        probe = getcurrent()
        return probe.request if isinstance(probe, Probe) else None

    def end(self) -> tuple[dict[str, bool], list[str]]:
        """The step is over: report the blocks that ended in it.

        Returns:
            The requests that end with their blocks, true where the step's token belongs to the text; and those that
            go on without them.
        """
        self.handoffs.end()
        for traced in self.current:
            self._settle(traced)
        self.current = []
        over, self.over = self.over, {}
        quiet, self.quiet = self.quiet, []
        return over, quiet

    def _settle(self, traced: Traced) -> None:
        probe = traced.probe
        if not probe.dead or traced.settled:
            return
        if probe.stopped or probe.error is not None:
            self.over.setdefault(probe.request, True)
        elif probe.caches or probe.lacks:
            # The block is over, but its caches go on to the end of the request, and so does what it has skipped.
            return
        else:
            self.quiet.append(probe.request)
        traced.settled = True
        if probe.request in self.over or not probe.edited_pass:
            self.due.append(traced)
        # Else the request can still be preempted, and then ends with an error: its values go home with its end.

    # The way home.

    def send(self) -> None:
        """Send what blocks saved that ended in the last step: only now, so that nobody's token waits for it."""
        due, self.due = self.due, []
        for traced in due:
            self._report(traced)
        for traced in due:
            traced.probe.clear()

    def _report(self, traced: Traced) -> None:
        if traced.reported:
            return
        traced.reported = True
        probe = traced.probe
        for lines in probe.lines.values():
            lines.close()
        caches_close(probe)
        if self.outbox is None:
            return
        buffers: list[PickleBuffer] = []
        error = probe.error
        try:
            saves = dumps(probe.saves(), buffers=buffers)
        except BaseException as failure:  # an object may raise anything when it is pickled
            saves, buffers, unsent = self._those_that_travel(probe.saves())
            error = error or BlockError(f"{unsent} was saved but cannot be sent home: {failure}")
        # The block's last lines may have added to what it keeps.
        total, limit = len(saves) + sum(buffer.raw().nbytes for buffer in buffers), self.handoffs.limits.save_limit
        if total > limit + OVERHEAD:
            error, buffers = error or too_much(total, limit), []
            saves = dumps({}, buffers=buffers)
        try:
            failed = None if error is None else take_apart(error)
        except BaseException as failure:
            failed = take_apart(BlockError(f"{type(error).__name__}, which cannot be sent home: {failure}"))
        message = Ended(traced.submission.key, traced.sequence, saves, failed)
        self.outbox.send(traced.submission.home, message, buffers)

    @staticmethod
    def _those_that_travel(saves: dict[str, Any]) -> tuple[bytes, list[PickleBuffer], str]:
        good: dict[str, Any] = {}
        bad: list[str] = []
        for name, value in saves.items():
            try:
                dumps(value)
                good[name] = value
            except BaseException:
                bad.append(f"{name} ({type(value).__name__})")
        buffers: list[PickleBuffer] = []
        return dumps(good, buffers=buffers), buffers, ", ".join(bad)

    def _sender(self, submission: Submission, sequence: int) -> Callable[[str, Any], None]:
        outbox, home, key, limits = self.outbox, submission.home, submission.key, self.handoffs.limits
        assert outbox is not None

        def send(stream: str, content: Any) -> None:
            if stream == "warning":
                text, category, filename, line = content
                outbox.send(
                    home, Warned(key, sequence, clean_text(text), category.__name__, clean_text(filename), line)
                )
            elif stream == "emit":
                # Copied at once: the block may go on to change what it has emitted.
                step, values = content
                data = dumps(values, home=True)
                if len(data) > limits.save_limit + OVERHEAD:
                    raise too_much(len(data), limits.save_limit)
                outbox.send(home, Emitted(key, sequence, step, data))
            else:
                outbox.send(home, Printed(key, sequence, stream, clean_text(content)))

        return send

    def counts(self) -> dict[str, int]:
        """What this rank holds for traces: probes, wrapped modules, and bytes of tensors that blocks keep."""
        running = [traced.probe for traced in self.traced.values() if not traced.reported]
        held = sum(map(_bytes, running))
        return {"probes": len(running), "hooks": len(self.handoffs.wrappers), "bytes": held}


OVERHEAD = 1 << 16
"""Bytes of names and shapes that a save may have beside its values."""

_NOTHING = compile("", "<nothing>", "exec")

_SPLIT = (
    "the engine split this prompt of {} tokens, and its first step runs positions {} to {} alone; a block is shown a "
    "prompt whole or not at all, so the request cannot go on. vLLM does so for some models, such as those with Mamba "
    "layers: there, enable_prefix_caching=False helps"
)


def _quiet(stream: str, content: Any) -> None:
    pass


def _unloadable(error: BaseException) -> BaseException:
    if isinstance(error, BlockError):
        return error
    wrapped = BlockError(f"the block cannot be made in the engine: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped


def _bytes(probe: Probe) -> int:
    # A cache is among what is kept. What a user keeps may hold one tensor twice, or itself.
    seen: set[int] = set()
    values: list[Any] = [kept.value for kept in probe.kept]
    total = 0
    while values:
        value = values.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            total += value.nbytes
        elif isinstance(value, dict):
            values += value.values()
        elif isinstance(value, (tuple, list)):
            values += value
    return total
