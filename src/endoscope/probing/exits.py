"""Refuses a block what would end or split the process that the model runs in."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from endoscope.errors import UsageError
from endoscope.probing.streams import in_turn

ENDS = ("_exit", "abort", "execv", "execve", "fork", "forkpty")
"""Functions of ``os`` that end this process, put another in its place, or make a second one of it."""

AIMED = ("kill", "killpg")
"""Functions of ``os`` that may be aimed at this process."""


def refuse_exits() -> None:
    """Let these functions raise where a block calls them; everybody else has them as they were."""
    system = __import__(os.name)  # what pickle knows them by
    for name in (*ENDS, *AIMED):
        function = getattr(os, name, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            guarded = _guarded(name, function)
            setattr(os, name, guarded)
            setattr(system, name, guarded)
    if not hasattr(signal.raise_signal, "__wrapped__"):
        signal.raise_signal = _guarded("raise_signal", signal.raise_signal)


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    process = os.getpid()

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # A child that was forked is no longer the engine.
        if in_turn() and os.getpid() == process and (name not in AIMED or _hits(name, *args)):
            raise UsageError(
                f"{function.__module__}.{name}() was called in a block: it would end the engine, or make another of "
                f"it, with every request in it. Use tracer.stop() to end this request"
            )
        return function(*args, **kwargs)

    return guarded


def _hits(name: str, target: int, *_: Any) -> bool:
    own = os.getpgrp() if name == "killpg" else os.getpid()
    return target in (own, 0, -1, -os.getpgrp())
