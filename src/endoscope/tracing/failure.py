"""An exception of a block, taken apart where it happened and raised again where the trace was written."""

from __future__ import annotations

import linecache
import os
import sys
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tblib import Traceback

import endoscope
from endoscope.errors import BlockError, SerializationError
from endoscope.tracing.messages import Failure, Frame
from endoscope.tracing.serialize import dumps, loads

PACKAGE = os.path.dirname(os.path.abspath(endoscope.__file__)) + os.sep
"""Where the files of this package lie."""


def take_apart(error: BaseException, depth: int = 0) -> Failure:
    """What has to travel of an exception, and of those that it came from.

    The traceback begins at the block and leaves out the frames of this package.
    """
    try:
        bare = error.with_traceback(error.__traceback__)
        # An OSError keeps the name of its file apart from its arguments.
        args = OSError.__reduce__(bare)[1] if isinstance(bare, OSError) else bare.args
        pickled: bytes | None = dumps((type(bare), args, _state(bare)), home=True)
    except SerializationError:
        pickled = None
    cause, context = error.__cause__, error.__context__
    return Failure(
        module=type(error).__module__,
        name=type(error).__qualname__,
        message=clean_text(_text(error)),
        pickled=pickled,
        frames=_frames(error.__traceback__),
        notes=tuple(clean_text(str(note)) for note in getattr(error, "__notes__", ())),
        cause=take_apart(cause, depth + 1) if cause is not None and depth < 8 else None,
        context=take_apart(context, depth + 1) if context is not None and cause is None and depth < 8 else None,
        suppress=error.__suppress_context__,
    )


def _state(error: BaseException) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if not name.startswith("__")}


def clean_text(text: str) -> str:
    """The text as it can be sent: half a surrogate pair, as in the name of an odd file, is written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failure:  # the user's own __str__
        return f"<its __str__ raised {type(failure).__name__}>"


def _frames(traceback: TracebackType | None) -> tuple[Frame, ...]:
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            frames.append(Frame(clean_text(code.co_filename), traceback.tb_lineno, clean_text(code.co_qualname)))
        traceback = traceback.tb_next
    starts = [index for index, frame in enumerate(frames) if frame.name == "<block>"]
    return tuple(frames[starts[0] :] if starts else frames)


def put_together(
    failure: Failure, resolve: Callable[[tuple[str, ...]], Any], lines: dict[str, list[str]]
) -> BaseException:
    """The exception as it is raised to the caller: of the original's class and of :class:`BlockError`.

    Args:
        failure: what :func:`take_apart` made.
        resolve: finds what references in the exception's arguments stand for.
        lines: text of files that ``linecache`` cannot read, such as ``python -c``, by name.
    """
    error = _whole(failure, resolve) or _plain(failure)
    for note in failure.notes:
        error.add_note(note)
    trace = _traceback(failure.frames, lines)
    error.__traceback__ = trace
    error.__endoscope_traceback__ = trace  # type: ignore[attr-defined]
    if failure.cause is not None:
        error.__cause__ = put_together(failure.cause, resolve, lines)
    if failure.context is not None:
        error.__context__ = put_together(failure.context, resolve, lines)
    error.__suppress_context__ = failure.suppress
    return error


def _whole(failure: Failure, resolve: Callable[[tuple[str, ...]], Any]) -> BaseException | None:
    if failure.pickled is None:
        return None
    try:
        kind, args, state = loads(failure.pickled, resolve)
        # One that is not an Exception (SystemExit, say) would end the caller's program, not the trace.
        if not issubclass(kind, Exception):
            return None
        # These two mean something to whatever iterates, and cannot leave a coroutine.
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            return None
        both = joined(kind)
        # The user's own __init__ may take something else; the built-in one below it takes the arguments that it kept.
        # Of several, it is the one that keeps most in the object itself.
        builtin: Any = max(
            (base for base in kind.__mro__ if base.__module__ == "builtins"), key=lambda base: base.__basicsize__
        )
        error: BaseException = builtin.__new__(both, *args)
        builtin.__init__(error, *args)
        for name, value in state.items():
            setattr(error, name, value)
        if _text(error) != failure.message:
            # The class keeps something for its message that its arguments do not give back, or that is other here.
            error.__class__ = _saying(both, failure.message)
    except Exception:  # whatever the user's class does, the failure itself must arrive
        return None
    return error


def _saying(kind: type[Exception], message: str) -> type[Exception]:
    told: type[Exception] = type(kind.__name__, (kind,), {"__str__": lambda self: message, "__doc__": kind.__doc__})
    told.__module__, told.__qualname__ = kind.__module__, kind.__qualname__
    return told


def _plain(failure: Failure) -> BaseException:
    builtin = getattr(sys.modules["builtins"], failure.name, None) if failure.module == "builtins" else None
    stops = (StopIteration, StopAsyncIteration)
    if isinstance(builtin, type) and issubclass(builtin, Exception) and not issubclass(builtin, stops):
        try:
            both: type[BaseException] = joined(builtin)
            error: BaseException = both.__new__(both, failure.message)
            error.args = (failure.message,)
            return error
        except Exception:  # a class that cannot be made from a message alone, such as UnicodeDecodeError
            pass
    name = failure.name if failure.module == "builtins" else f"{failure.module}.{failure.name}"
    return BlockError(f"{name}: {failure.message}")


_joined: weakref.WeakKeyDictionary[type[Exception], type[Exception]] = weakref.WeakKeyDictionary()


def joined(kind: type[Exception]) -> type[Exception]:
    """The class that is both ``kind`` and :class:`BlockError`, under the name of ``kind``."""
    if issubclass(kind, BlockError):
        return kind
    if kind in _joined:
        return _joined[kind]
    both: type[Exception] = type(kind.__name__, (BlockError, kind), {"__doc__": kind.__doc__, "__str__": kind.__str__})
    both.__module__ = kind.__module__
    both.__qualname__ = kind.__qualname__
    _joined[kind] = both
    return both


def _traceback(frames: tuple[Frame, ...], lines: dict[str, list[str]]) -> TracebackType | None:
    trace: dict[str, Any] | None = None
    for frame in reversed(frames):
        if frame.filename in lines and not linecache.getline(frame.filename, frame.line):
            text = lines[frame.filename]
            linecache.cache[frame.filename] = (sum(map(len, text)), None, text, frame.filename)
        trace = {
            "tb_frame": {
                "f_globals": {"__name__": "?", "__file__": frame.filename},
                "f_locals": {},
                "f_code": {"co_filename": frame.filename, "co_name": frame.name.rpartition(".")[2]},
                "f_lineno": frame.line,
            },
            "tb_lineno": frame.line,
            "tb_next": trace,
        }
    if trace is None:
        return None
    made: TracebackType = Traceback.from_dict(trace).as_traceback()
    return made
