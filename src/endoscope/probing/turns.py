"""The turns of blocks on the model's thread: what a block sets for the thread is put aside until its next turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import is_inference_mode_enabled
from torch._C import _InferenceMode, _set_grad_enabled

from endoscope.probing import state, streams

if TYPE_CHECKING:
    from endoscope.probing.probe import Probe


class Aside:
    """What one block has set for the thread while another has it."""

    __slots__ = ("draws", "state", "streams")

    def __init__(self) -> None:
        self.state = state.FRESH
        self.streams: streams.Streams | None = None
        self.draws: state.Draws | None = None


class Turns:
    """``with Turns() as turns:`` gives turns to blocks, and leaves the thread as it found it.

    Within it there is no inference mode, so that tensors count their versions.
    """

    __slots__ = ("_blocks", "_draws", "_engine", "_guards", "_own", "_tracked")

    def __enter__(self) -> Turns:
        self._engine = streams.Streams.now()
        self._blocks = streams.of_blocks(self._engine)
        self._blocks.put()
        self._tracked = state.tracked()
        self._tracked.__enter__()
        self._guards: list[Any] = []
        self._own = state.Own.now()
        self._draws: state.Draws | None = None
        return self

    def __exit__(self, *error: Any) -> None:
        while self._guards:
            self._guards.pop().__exit__(None, None, None)
        self._tracked.__exit__(*error)
        self._engine.put()

    def give(self, probe: Probe, run: Callable[[Any], object], argument: Any) -> None:
        """Give a block the turn by ``run(argument)``, which returns when the block parks or ends."""
        aside = probe.aside
        outer, streams.Turn.probe = streams.Turn.probe, probe
        if aside.streams is not None:
            aside.streams.put()
        if not probe.reads_only:
            # Only a block of known operations is known to draw no random number.
            if self._draws is None:
                self._draws = state.Draws.now()
            aside.draws = aside.draws or state.Draws.seeded()
            aside.draws.put()
        try:
            if aside.state is not state.FRESH:
                aside.state = state.resume(aside.state, self._own, run, argument)
            else:
                run(argument)
                if not state.untouched(self._own):
                    self._take(aside)
        finally:
            streams.Turn.probe = outer
            if self._draws is not None and not probe.reads_only:
                aside.draws = state.Draws.now()
                self._draws.put()
            if streams.untouched(self._blocks):
                aside.streams = None
            else:
                aside.streams = streams.taken()
                self._blocks.put()

    def _take(self, aside: Aside) -> None:
        aside.state = state.taken(self._own)
        if is_inference_mode_enabled():
            self._guards.append(_InferenceMode(False))
            self._guards[-1].__enter__()
        _set_grad_enabled(False)
