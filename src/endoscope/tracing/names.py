"""Reading and writing the variables of a running frame."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from inspect import CO_OPTIMIZED
from types import FrameType
from typing import Any

_MISSING: Any = object()


def lookup(frame: FrameType, names: Iterable[str], variables: frozenset[str]) -> dict[str, Any]:
    """Return the values that the names have in the frame, without those that have none there.

    Args:
        frame: the frame to read from: its variables, then its globals. Builtins are left out.
        names: the names to look for.
        variables: the names of the frame's own variables, which are not looked for among its globals.
    """
    own: Mapping[str, Any] = frame.f_locals
    outer = frame.f_globals
    found: dict[str, Any] = {}
    for name in names:
        value = own.get(name, _MISSING)
        if value is _MISSING:
            value = _of_class_around(frame, name) if name in variables else outer.get(name, _MISSING)
        if value is not _MISSING:
            found[name] = value
    if "__name__" in outer:
        # Classes and functions that the block makes are named after their module by it.
        found.setdefault("__name__", outer["__name__"])
    return found


def _of_class_around(frame: FrameType, name: str) -> Any:
    """The value of a variable of the function around a class body, which the body's frame does not show."""
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED or name not in code.co_freevars or frame.f_back is None:
        return _MISSING
    return frame.f_back.f_locals.get(name, _MISSING)


def bind(frame: FrameType, values: Mapping[str, Any], global_names: frozenset[str] = frozenset()) -> None:
    """Bind names in a frame, as assignments written there would.

    A key that is not a variable of the frame is ignored.

    Args:
        frame: the frame of a module, function, class body or notebook cell.
        values: the names and their values.
        global_names: the names that the frame's function declares ``global``.
    """
    code = frame.f_code
    if code.co_flags & CO_OPTIMIZED:
        variables = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        own = {name: value for name, value in values.items() if name in variables and name not in global_names}
        if own:
            _write(frame, own)
    else:
        for name, value in values.items():
            if name.isidentifier() and name not in global_names:
                frame.f_locals[name] = value
    for name in global_names:
        if name in values:
            frame.f_globals[name] = values[name]


def _write_through(frame: FrameType, values: dict[str, Any]) -> None:
    frame.f_locals.update(values)


def _write_back(frame: FrameType, values: dict[str, Any]) -> None:
    # Up to CPython 3.12 f_locals is a copy, made afresh when it is asked for; this call carries it back.
    import ctypes

    frame.f_locals.update(values)
    ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


_write: Callable[[FrameType, dict[str, Any]], None] = _write_through if sys.version_info >= (3, 13) else _write_back
