"""A ``with`` whose body is not run.

Python has no way to leave out the body of a ``with``. A trace function can: set on the frame around it when the
``with`` is entered, it raises at the first instruction of the body, and ``__exit__`` swallows what it raised. What
stands before the body, such as the ``as`` target, runs as usual. Whatever trace function was there before (coverage, a
debugger) is put back when the ``with`` is left, and misses only what was not run. A body that begins with ``try``
would catch what is raised in it, so there the trace function raises one step before: see ``target``.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from endoscope.tracing.source import Place


class Skipped(BaseException):
    """Raised in place of a body. Not an ``Exception``, so that other contexts on the way do not take it for one."""


class Skip:
    """Skips the body of one ``with`` once: ``start`` as it is entered, ``stop`` as it is left."""

    __slots__ = ("_by_instruction", "_frame", "_local", "_opcodes", "_previous", "_stops")

    def __init__(self, frame: FrameType, place: Place) -> None:
        self._frame: FrameType | None = frame
        self._stops = place.stops
        self._by_instruction = place.by_instruction

    def start(self) -> None:
        """Set the trace function on the frame. Its next instruction inside the body raises :class:`Skipped`."""
        frame = self._frame
        assert frame is not None
        self._local = frame.f_trace
        self._opcodes = frame.f_trace_opcodes
        self._previous = sys.gettrace()
        frame.f_trace = self._watch
        if self._by_instruction:
            # Every instruction is reported, where a new line would not tell the body from the header. CPython 3.12
            # looks at this only in sys.settrace, so it comes first.
            frame.f_trace_opcodes = True
        sys.settrace(self._watch)

    def stop(self) -> None:
        """Put back the trace functions that were there before, and let go of the frame."""
        frame = self._frame
        if frame is None:
            return
        self._frame = None
        if self._by_instruction:
            frame.f_trace_opcodes = self._opcodes
        frame.f_trace = self._local
        sys.settrace(None)
        if self._previous is not None:
            _announce(self._previous, frame)
            sys.settrace(self._previous)
        self._local = self._previous = None

    def _watch(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame is not self._frame:
            return None
        if event in ("line", "opcode") and frame.f_lasti in self._stops:
            raise Skipped
        return self._watch


def _announce(function: Any, frame: FrameType) -> None:
    """Tell a trace function of the calls between ``frame`` and the caller, which were made while it was away.

    It will see them return, and one that keeps count (coverage's) would end up some frames off.
    """
    missed = []
    inner: FrameType | None = sys._getframe(1)
    while inner is not None and inner is not frame:
        missed.append(inner)
        inner = inner.f_back
    for each in reversed(missed):
        each.f_trace = function(each, "call", None)
    sys.settrace(None)  # coverage's sets itself as soon as it is told of a call, and must not see this function return
