"""What a ``with`` stands in: the parts of its surroundings that change what its body means."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Enclosing:
    """The surroundings of a ``with``.

    Attributes:
        class_name: the innermost class around it, which names like ``__x`` are mangled for.
        first_argument: the enclosing function's first argument, which ``super()`` with no arguments uses.
        global_names: the names that the enclosing function or class declares ``global``.
    """

    class_name: str | None = None
    first_argument: str | None = None
    global_names: frozenset[str] = frozenset()


def enclosing(tree: ast.AST, around: Enclosing | None = None) -> Iterator[tuple[ast.With, Enclosing]]:
    """Yield every ``with`` statement under ``tree`` together with its surroundings."""
    around = around or Enclosing()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.With):
            yield node, around
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = replace(around, first_argument=first_argument(node), global_names=_declared(node.body))
        elif isinstance(node, ast.ClassDef):
            inner = Enclosing(class_name=node.name, global_names=_declared(node.body))
        else:
            inner = around
        yield from enclosing(node, inner)


def first_argument(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return the name of the function's first positional argument, if it has one."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    return arguments[0].arg if arguments else None


def _declared(body: list[ast.stmt]) -> frozenset[str]:
    """Return the names that a function's or class's own statements declare ``global``."""
    names: set[str] = set()
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Global):
            names.update(node.names)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
    return frozenset(names)
