"""Interrupts a block that does not give its turn back, so that the requests beside it go on."""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import GreenletExit

from endoscope.errors import BlockError, StepTimeoutError
from endoscope.probing.limits import Held, Limits, too_much
from endoscope.probing.streams import Turn, in_turn
from endoscope.tracing.failure import PACKAGE

if TYPE_CHECKING:
    from endoscope.probing.probe import Probe

SIGNAL = signal.SIGURG
"""Means nothing to a process that has no handler for it."""

POLL = 0.1
"""Seconds between two looks."""

IDLE = 5.0
"""Seconds without a turn after which nobody looks any more."""

PATIENCE = 3
"""How often a block is interrupted before it is made to end."""


class _Seen(NamedTuple):
    """What tells one turn from the next of the same probe."""

    probe: Probe
    shown: Any
    step: int


def _now() -> _Seen | None:
    probe = Turn.probe
    return None if probe is None else _Seen(probe, probe.shown, probe.step)


def _same(one: _Seen | None, other: _Seen | None) -> bool:
    return one is not None and other is not None and all(map(lambda a, b: a is b, one, other))


class Watchdog:
    """Looks at the turns of blocks from a thread of its own, which runs while there are blocks.

    A turn costs nothing for it. A block is interrupted by a signal, whose handler raises in the block: that ends
    loops, sleeps and waits, but not one long call of native code. It needs the model to run on the main thread of its
    process, as vLLM's does; where it does not, nothing is interrupted.

    Args:
        limits: how long a turn may take, and what a block may keep.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._able = threading.current_thread() is threading.main_thread()
        self._ident = threading.get_ident()
        self._running = False
        self._lock = threading.Lock()
        self._times = 0
        if self._able and signal.getsignal(SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(SIGNAL, _interrupted)

    def watch(self) -> None:
        """There are blocks, or will soon be."""
        if not self._running and self._able:
            with self._lock:
                if not self._running:
                    self._running = True
                    threading.Thread(target=self._look, name="endoscope watchdog", daemon=True).start()

    def _look(self) -> None:
        seen, since, active = None, 0.0, time.monotonic()
        while True:
            time.sleep(POLL)
            now, at = _now(), time.monotonic()
            if not _same(seen, now):
                seen, since, self._times = now, at, 0
                if now is not None:
                    active = at
                elif at - active > IDLE:
                    with self._lock:
                        self._running = False
                        return
                continue
            assert now is not None
            active = at
            error = self._complaint(now.probe, at - since)
            if error is not None:
                _wanted[:] = [self, now, error]
                signal.pthread_kill(self._ident, SIGNAL)
            del now

    def _complaint(self, probe: Probe, seconds: float) -> BlockError | None:
        if seconds > self.limits.step_timeout:
            return StepTimeoutError(
                f"the block has had the turn for {seconds:.1f} s without coming to a site of the model, and may have "
                f"it for {self.limits.step_timeout:g} s (step_timeout): every request of the step waits for it. Move "
                f"long work out of the block, or build the model with a larger step_timeout"
            )
        held = Held()
        try:
            if held.grown(list(probe.kept), self.limits.save_limit):
                return too_much(held.total, self.limits.save_limit)
        except RuntimeError:  # something changed while it was counted
            pass
        return None

    def raise_in(self, seen: _Seen, error: BlockError, frame: FrameType | None) -> None:
        """Called in the thread of the model: raise the error, if the block still has that turn."""
        probe = seen.probe
        if not _same(seen, _now()) or not in_turn() or _is_ours(frame):
            return
        self._times += 1
        if self._times > PATIENCE:
            probe.error = error
            _end(probe, frame)
            raise GreenletExit
        raise error


_wanted: list[Any] = []
"""The watchdog that has sent a signal, the turn that it means, and the error."""


def _interrupted(number: int, frame: FrameType | None) -> None:
    if _wanted:
        watchdog, seen, error = _wanted
        _wanted.clear()
        watchdog.raise_in(seen, error, frame)


def _is_ours(frame: FrameType | None) -> bool:
    """Whether the block is in the middle of something of this package, which an error could leave half done."""
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def _end(probe: Probe, frame: FrameType | None) -> None:
    """Raise at every further line of a block that catches whatever is raised in it."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if probe.dead or Turn.probe is not probe or not in_turn():
            sys.settrace(None)
            return None
        if event == "line" and not frame.f_code.co_filename.startswith(PACKAGE):
            raise GreenletExit
        return trace

    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame.f_trace = trace
        frame = frame.f_back
    sys.settrace(trace)
