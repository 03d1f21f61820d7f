"""Whether a block is known to only read: to change nothing of the model or of the engine, whatever happens.

The keys and values of such a request are the model's own, so other requests may use them. The text of the block is
proof enough if all that it does is on a list (``pure``): what is not known there, or cannot be told from the text,
counts as a change. So the answer can be wrong in one direction only.

For every expression it is worked out what its value may be, as a set of bits; a name has those of all that is ever
bound to it, wherever that stands. Three things are kept apart:

- What somebody else may hold is never changed in place. ``x = h`` is ``h`` itself; ``x = h + 1``, ``h.clone()`` and
  ``[h]`` are new, and the block may write into them.
- A method that is harmless on a tensor may change a module (``module.float()`` converts its weights), so it is not
  called on what may be a module.
- An object from outside may have operators and attributes of its own. Only plain values are taken (``outside``).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from endoscope.tracing import pure
from endoscope.tracing.expressions import FOREIGN, SHARED, Doubt, Expressions
from endoscope.tracing.outside import NO_REFERENCES, kind_of
from endoscope.tracing.rewrite import SAVE
from endoscope.tracing.scopes import bound_names

if TYPE_CHECKING:
    from endoscope.tracing.block import Code


def reads_only(
    code: Code, values: Mapping[str, Any], references: Mapping[int, tuple[str, ...]] = NO_REFERENCES
) -> bool:
    """Return whether a block surely changes nothing.

    The text is looked at once for each ``code`` and kinds of outside values; after that a call costs some microseconds.

    Args:
        code: the block.
        values: its outside values by name.
        references: what of them travels by reference: ``id(object)`` to key.
    """
    return _proven(code, tuple([(name, kind_of(value, references)) for name, value in values.items()]))


@lru_cache(maxsize=4096)
def _proven(code: Code, outside: tuple[tuple[str, str], ...]) -> bool:
    try:
        body = code.rewritten()
        _Statements(body, dict(outside)).settle(body)
    except (Doubt, RecursionError):
        return False
    return True


class _Statements(Expressions):
    """Goes through the statements of one block.

    Args:
        body: the statements as they run.
        outside: what their names from outside are.
    """

    def __init__(self, body: list[ast.stmt], outside: Mapping[str, str]) -> None:
        super().__init__(outside)
        for node in (node for statement in body for node in ast.walk(statement)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
            else:
                self.names.update(dict.fromkeys(bound_names(node), 0))
        if self.names.keys() & {*self.known, SAVE} or SAVE in outside:
            raise Doubt

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            module = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if (isinstance(node, ast.ImportFrom) and node.level) or module not in pure.FUNCTIONS:
                raise Doubt
            name = alias.asname or alias.name
            if alias.asname is None and isinstance(node, ast.Import):
                name = module = module.partition(".")[0]  # `import torch.nn` binds `torch`
            if self.known.setdefault(name, module) != module or name in self.plain:
                raise Doubt

    def settle(self, body: list[ast.stmt]) -> None:
        """Go through the statements until nothing new is found.

        Raises:
            Doubt: if one of them may change something.
        """
        before: Any = None
        while before != (self.names, self.stored):
            before = dict(self.names), self.stored
            self.run(body)

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value):
                self.value(value)
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Import() | ast.ImportFrom():
                pass
            case ast.Assign(targets, value):
                kind = self.value(value)
                for target in targets:
                    self.assign(target, value, kind)
            case ast.AugAssign(ast.Name(name), _, value):
                # In place, if it is a tensor or a container.
                if self.load(name) & SHARED or self.value(value) & FOREIGN:
                    raise Doubt
            case ast.Delete(targets):
                if not all(isinstance(target, ast.Name) for target in targets):
                    raise Doubt
            case ast.For(target, source, body, orelse):
                self.bind(target, self.element(self.value(source)))
                self.run([*body, *orelse])
            case ast.If(test, body, orelse) | ast.While(test, body, orelse):
                self.value(test)
                self.run([*body, *orelse])
            case ast.With(items, body):
                if not all(item.optional_vars is None and self.is_no_grad(item.context_expr) for item in items):
                    raise Doubt
                self.run(body)
            case ast.Try(body, handlers, orelse, final):
                self.run(body)
                for handler in handlers:
                    if handler.type is not None:
                        self.value(handler.type)
                    if handler.name is not None:
                        self.names[handler.name] |= SHARED
                    self.run(handler.body)
                self.run([*orelse, *final])
            case ast.Raise(first, second) | ast.Assert(first, second):
                self.values(first, second)
            case _:
                raise Doubt

    def assign(self, target: ast.expr, value: ast.expr, kind: int) -> None:
        match target, value:
            case ((ast.Tuple(targets) | ast.List(targets)), (ast.Tuple(values) | ast.List(values))) if len(
                targets
            ) == len(values) and not any(isinstance(each, ast.Starred) for each in [*targets, *values]):
                for one, other in zip(targets, values, strict=True):
                    self.assign(one, other, self.value(other))
            case _:
                self.bind(target, kind)
