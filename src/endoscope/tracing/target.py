"""The ``as`` target of a ``with`` whose header is cut short.

A body that begins with ``try`` leaves no instruction at which its skipping could be seen by nobody but the ``with``
itself: the first one belongs to the ``try``, and its handlers would run. Such a ``with`` is skipped one step earlier,
before Python stores the target, and the target is stored from here.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from endoscope.tracing.flow import names_of
from endoscope.tracing.names import bind, lookup
from endoscope.tracing.rewrite import rewrite

_VALUE = "__endoscope_value__"


@dataclass(frozen=True, slots=True)
class Target:
    """What stands after ``as``, as an assignment that can be made in a frame."""

    code: CodeType
    outside: tuple[str, ...]
    binds: tuple[str, ...]

    @classmethod
    def of(cls, target: ast.expr, filename: str, class_name: str | None, first: str | None) -> Target:
        """Make it from the syntax tree of the target."""
        value = ast.copy_location(ast.Name(_VALUE, ast.Load()), target)
        statement = ast.copy_location(ast.Assign([target], value), target)
        body = rewrite([statement], class_name, first)
        outside, binds = names_of(body)
        code: CodeType = compile(ast.Module(body, []), filename, "exec", dont_inherit=True)
        return cls(code, outside, binds)

    def assign(self, frame: FrameType, value: object, variables: frozenset[str], global_names: frozenset[str]) -> None:
        """Assign the value in the frame. Whatever the target raises (``as x[5]``) comes out as it is."""
        names: dict[str, Any] = lookup(frame, self.outside, variables)
        names[_VALUE] = value
        exec(self.code, names)
        bind(frame, {name: names[name] for name in self.binds if name in names}, global_names)
