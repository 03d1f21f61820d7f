"""Which names a function, lambda, comprehension or class binds for itself, and which it takes from around it."""

from __future__ import annotations

import ast
from collections.abc import Iterable

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def bound_in(node: Function) -> set[str]:
    """Return the names that are a function's own: its arguments and what its body binds."""
    names = {argument.arg for argument in arguments(node.args)}
    names.update(type_parameters(node))
    outer: set[str] = set()
    body: Iterable[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
    for part in body:
        _collect(part, names, outer)
    return names - outer


def arguments(args: ast.arguments) -> list[ast.arg]:
    """Return every argument of a signature."""
    extra = [argument for argument in (args.vararg, args.kwarg) if argument is not None]
    return [*args.posonlyargs, *args.args, *args.kwonlyargs, *extra]


def type_parameters(node: ast.AST) -> list[str]:
    """Return the names of ``def f[T](...)``'s type parameters (CPython 3.12)."""
    return [parameter.name for parameter in getattr(node, "type_params", [])]


def bound_names(node: ast.AST) -> list[str]:
    """Return the names that this node by itself binds, not looking into its parts."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
        case ast.MatchMapping(rest=str(name)):
            return [name]
        case ast.Import() | ast.ImportFrom():
            return [alias.asname or alias.name.split(".")[0] for alias in node.names]
    return []


def _collect(node: ast.AST, names: set[str], outer: set[str]) -> None:
    """Add what a function's statement binds to ``names``, and what it declares to be another scope's to ``outer``."""
    names.update(bound_names(node))
    if isinstance(node, ast.Global | ast.Nonlocal):
        outer.update(node.names)
    if isinstance(node, Comprehension):
        # A comprehension's targets are its own; a walrus inside binds in the function around it.
        names.update(part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
        return
    if isinstance(node, Function | ast.ClassDef):
        for evaluated in evaluated_around(node):
            _collect(evaluated, names, outer)
        return
    for child in ast.iter_child_nodes(node):
        _collect(child, names, outer)


def evaluated_around(node: Function | ast.ClassDef) -> list[ast.expr]:
    """Return the parts of a definition that are evaluated where it stands: decorators, defaults, bases, annotations."""
    if isinstance(node, ast.ClassDef):
        return [*node.decorator_list, *node.bases, *(keyword.value for keyword in node.keywords)]
    defaults = [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]
    if isinstance(node, ast.Lambda):
        return defaults
    notes = [argument.annotation for argument in arguments(node.args)] + [node.returns]
    return [*node.decorator_list, *defaults, *(note for note in notes if note is not None)]


def free_names(node: ast.AST) -> tuple[set[str], set[str]]:
    """Return the names that a nested scope reads and those that it binds in the scopes around it.

    The order of statements plays no part: a function may be called at any time after it is made.
    """
    reads: set[str] = set()
    binds: set[str] = set()
    _free(node, frozenset(), reads, binds)
    return reads, binds


def _free(node: ast.AST, own: frozenset[str], reads: set[str], binds: set[str]) -> None:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in own:
        reads.add(node.id)
    if isinstance(node, ast.Global):
        binds.update(node.names)
        reads.update(node.names)
    if isinstance(node, Function):
        inner = own | bound_in(node)
        for evaluated in evaluated_around(node):
            _free(evaluated, own | frozenset(type_parameters(node)), reads, binds)
        body: Iterable[ast.AST] = [node.body] if isinstance(node, ast.Lambda) else node.body
        for part in body:
            _free(part, inner, reads, binds)
        return
    if isinstance(node, Comprehension):
        targets = {
            target.id
            for generator in node.generators
            for target in ast.walk(generator.target)
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
        }
        _free(node.generators[0].iter, own, reads, binds)
        binds.update(part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr))
        own |= targets
    elif isinstance(node, ast.ClassDef) or hasattr(node, "type_params"):
        own |= frozenset(type_parameters(node))
    for child in ast.iter_child_nodes(node):
        _free(child, own, reads, binds)
