"""Whether a block is known to skip, in every step, all that it ever skips: ``module.skip`` in a loop over all steps.

A module with attention then need not run for it: no later step reads the keys and values that it would have written.
It is read from the text of the block, where a list of forms is known, as in ``reads``. What is not on it counts as a
skip of some steps only, which is right in any case and costs no more than the module's run.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from endoscope.tracing import pure
from endoscope.tracing.outside import MODEL, MODULES, NO_REFERENCES, PLAIN, TRACER, kind_of
from endoscope.tracing.scopes import bound_names

if TYPE_CHECKING:
    from endoscope.tracing.block import Code

_STEADY = frozenset({"stop", "emit", "cache", "result"})
"""What of a tracer goes to no other step."""
_VALUES = frozenset({"input", "inputs", "output", "resid_pre", "resid_post", "logits", "samples"})
"""What of a module differs from step to step."""
_BUILTINS = frozenset({"len", "range"})
_ITERATORS = frozenset({"enumerate", "reversed", "zip"})
"""Functions whose results are used up by a loop, and so are fixed only where the loop itself calls them."""
_MADE_OF_PARTS = (
    *(ast.Subscript, ast.Slice, ast.Tuple, ast.List),
    *(ast.BinOp, ast.UnaryOp, ast.JoinedStr, ast.FormattedValue),
)


def skips_throughout(
    code: Code, values: Mapping[str, Any], references: Mapping[int, tuple[str, ...]] = NO_REFERENCES
) -> bool:
    """Return whether a block skips something, and whatever it skips in one step surely in every later one too.

    What functions from outside skip does not count.

    Args:
        code: the block.
        values: its outside values by name.
        references: what of them travels by reference: ``id(object)`` to key.
    """
    if ".skip" not in code.source:
        return False
    return _known(code, tuple([(name, kind_of(value, references)) for name, value in values.items()]))


@lru_cache(maxsize=4096)
def _known(code: Code, outside: tuple[tuple[str, str], ...]) -> bool:
    try:
        return _Skips(code.rewritten(), dict(outside)).known
    except RecursionError:
        return False


class _Skips:
    """Goes through one block.

    Args:
        body: the statements as they run.
        outside: what their names from outside are.

    Attributes:
        known: whether all its skips are known to be of every step.
    """

    def __init__(self, body: list[ast.stmt], outside: Mapping[str, str]) -> None:
        self.outside = outside
        nodes = [node for statement in body for node in ast.walk(statement)]
        self.bound = Counter(name for node in nodes for name in bound_names(node))
        self.changed = {name for node in nodes for name in _changed(node)}
        self.found: set[ast.AST] = set()
        """The skips that are of every step, and the tracers that go to no step but in their order."""
        fixed: frozenset[str] = frozenset()
        for statement in body:
            match statement:
                case ast.For(_, steps, inner) if self.is_every_step(steps):
                    if not any(map(_leaves, ast.walk(statement))):
                        self.loop(inner, fixed)
                case _:
                    fixed |= self.fixed_by(statement, fixed)
        for node in nodes:
            match node:
                case ast.Attribute(ast.Name() as tracer, name) if name in _STEADY:
                    self.found.add(tracer)
        skips = [node for node in nodes if _names_skip(node)]
        tracers = [node for node in nodes if isinstance(node, ast.Name) and outside.get(node.id) == TRACER]
        self.known = bool(skips) and self.found.issuperset([*skips, *tracers])

    def is_every_step(self, node: ast.expr) -> bool:
        """Whether this goes over every step from some step on."""
        match node:
            case ast.Subscript(ast.Attribute(ast.Name() as tracer, "iter"), ast.Slice(start, None, by)):
                if not (start is None or _is_number(start)) or not (by is None or _is_number(by, 1)):
                    return False
            case ast.Attribute(ast.Name() as tracer, "iter"):
                pass
            case ast.Call(ast.Attribute(ast.Name() as tracer, "all"), [], []):
                pass
            case _:
                return False
        if self.outside.get(tracer.id) != TRACER or self.bound[tracer.id]:
            return False
        self.found.add(tracer)
        return True

    def loop(self, body: list[ast.stmt], fixed: frozenset[str]) -> None:
        """Find the skips of statements that all run, in each step as in any other."""
        for statement in body:
            match statement:
                case ast.Expr(ast.Call(ast.Attribute(module, "skip") as skip)) if self.is_fixed(module, fixed):
                    self.found.add(skip)
                case ast.For(target, source, inner) if self.is_fixed(source, fixed, _BUILTINS | _ITERATORS):
                    self.loop(inner, fixed | self.once(target))
                case _:
                    fixed |= self.fixed_by(statement, fixed)

    def fixed_by(self, statement: ast.stmt, fixed: frozenset[str]) -> frozenset[str]:
        """The names that the statement, which always runs, makes stand for the same in every step."""
        match statement:
            case ast.Assign([ast.Name() as target], value) if self.is_fixed(value, fixed):
                return self.once(target)
        return frozenset()

    def once(self, target: ast.expr) -> frozenset[str]:
        """The names that the target binds, and nothing else in the block."""
        names = {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}
        return frozenset(name for name in names if self.bound[name] == 1 and name not in self.changed)

    def is_fixed(self, node: ast.AST, fixed: frozenset[str], functions: frozenset[str] = _BUILTINS) -> bool:
        """Whether an expression gives the same in every step."""
        match node:
            case ast.Constant() | ast.expr_context() | ast.operator() | ast.unaryop():
                return True
            case ast.Name(name):
                kind = self.outside.get(name)
                steady = not self.bound[name] and name not in self.changed and kind in (PLAIN, MODULES, MODEL)
                return steady or name in fixed
            case ast.Attribute(value, name):
                return name not in _VALUES and self.is_fixed(value, fixed)
            case ast.Call(ast.Name(name), parts, []) if name in functions:
                built_in = not self.bound[name] and name not in self.outside
                return built_in and all(self.is_fixed(part, fixed) for part in parts)
            case ast.Call(ast.Attribute(value, "get_submodule"), parts, []):
                return all(self.is_fixed(part, fixed) for part in (value, *parts))
        return isinstance(node, _MADE_OF_PARTS) and all(
            self.is_fixed(part, fixed) for part in ast.iter_child_nodes(node)
        )


def _changed(node: ast.AST) -> list[str]:
    """The name of a container that the node changes."""
    match node:
        case ast.Subscript(ast.Name(name), ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.Attribute(ast.Name(name), method) if method in pure.CHANGES:
            return [name]
    return []


def _leaves(node: ast.AST) -> bool:
    """Whether a loop that the node is in may be left, or one of its passes."""
    return isinstance(node, ast.Break | ast.Continue | ast.Return)


def _names_skip(node: ast.AST) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "skip") or (
        isinstance(node, ast.Constant) and node.value == "skip"
    )


def _is_number(node: ast.expr, number: int | None = None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and number in (None, node.value)
