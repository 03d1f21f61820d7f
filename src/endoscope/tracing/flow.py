"""Which names a block takes from outside: those that it may read before it has bound them.

Only these travel, so that a block which binds ``x`` first does not drag along a large outside ``x``. The analysis errs
on the side of taking a name along: a name counts as bound only where every way to that point binds it. ``del`` counts
too, since after it Python does not fall back to the outside value either.
"""

from __future__ import annotations

import ast

from endoscope.tracing.rewrite import SAVE
from endoscope.tracing.scopes import Comprehension, Function, bound_names, evaluated_around, free_names


def names_of(body: list[ast.stmt]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that the statements may read from outside, and the names that they bind, each in order met.

    Args:
        body: the statements of a block, rewritten for a flat namespace.
    """
    flow = _Flow()
    flow.run(body)
    flow.reads.pop(SAVE, None)
    return tuple(flow.reads), tuple(flow.stored)


class _Flow(ast.NodeVisitor):
    """Walks the statements in the order in which they run."""

    def __init__(self, around: set[str] | None = None) -> None:
        self.around = around  # in a class body: what is bound around it, which is all that its functions see
        self.bound: set[str] = set(around or ())  # names that are surely bound here
        self.reads: dict[str, None] = {}  # a dict keeps the order
        self.stored: dict[str, None] = {}

    def run(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self.visit(statement)

    def read(self, name: str) -> None:
        if name not in self.bound:
            self.reads[name] = None

    def store(self, name: str) -> None:
        self.bound.add(name)
        self.stored[name] = None

    def branch(self, *parts: ast.AST | list[ast.stmt] | None) -> set[str]:
        """Visit the parts as something that may not happen; return what is bound after them if it does."""
        before = set(self.bound)
        for part in parts:
            if isinstance(part, list):
                self.run(part)
            elif part is not None:
                self.visit(part)
        after, self.bound = self.bound, before
        return after

    # Names

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read(node.id)
        elif isinstance(node.ctx, ast.Store):
            self.store(node.id)
        else:
            self.read(node.id)
            self.bound.add(node.id)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self.visit(target)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)
            self.visit(node.target)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.read(node.target.id)
        self.visit(node.value)
        self.visit(node.target)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self.visit(node.target)

    def _visit_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for name in bound_names(node):
            self.store(name)
        if isinstance(node, ast.ImportFrom) and node.level:
            self.read("__package__")  # a relative import starts from it

    visit_Import = _visit_import
    visit_ImportFrom = _visit_import

    # Branches

    def visit_If(self, node: ast.If | ast.IfExp) -> None:
        self.visit(node.test)
        self.bound = self.branch(_body(node.body)) & self.branch(_body(node.orelse))

    visit_IfExp = visit_If

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.visit(node.values[0])
        self.branch(*node.values[1:])

    def visit_Compare(self, node: ast.Compare) -> None:
        self.visit(node.left)
        self.visit(node.comparators[0])
        self.branch(*node.comparators[1:])

    def visit_Assert(self, node: ast.Assert) -> None:
        self.branch(node.test, node.msg)  # `python -O` leaves it out

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self.branch(node.target, node.body)
        self.branch(node.orelse)

    def visit_While(self, node: ast.While) -> None:
        self.visit(node.test)
        self.branch(node.body)
        self.branch(node.orelse)

    def _visit_try(self, node: ast.Try | ast.TryStar) -> None:
        ends = [self.branch(node.body, node.orelse)]
        # A handler starts with what was bound before the try: its body may fail at once.
        ends += [self.branch(handler) for handler in node.handlers]
        before = self.bound
        self.run(node.finalbody)
        final = self.bound
        self.bound = set.intersection(*ends) | before | final

    visit_Try = _visit_try
    visit_TryStar = _visit_try

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name is not None:
            self.store(node.name)
        self.run(node.body)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item)
        self.branch(node.body)  # the context may swallow an exception of the body

    def visit_Match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        for case in node.cases:
            self.branch(case.pattern, case.guard, case.body)

    def _visit_pattern(self, node: ast.MatchAs | ast.MatchStar | ast.MatchMapping) -> None:
        self.generic_visit(node)
        for name in bound_names(node):
            self.store(name)

    visit_MatchAs = _visit_pattern
    visit_MatchStar = _visit_pattern
    visit_MatchMapping = _visit_pattern

    # Scopes

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        for part in evaluated_around(node):
            self.branch(part)
        self._visit_scope(node)
        for name in bound_names(node):
            self.store(name)

    visit_FunctionDef = _visit_function
    visit_AsyncFunctionDef = _visit_function
    visit_Lambda = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in evaluated_around(node):
            self.visit(part)
        inner = _Flow(self.bound if self.around is None else self.around)
        inner.bound |= self.bound
        inner.run(node.body)
        for name in inner.reads:
            if name not in {parameter.name for parameter in getattr(node, "type_params", [])}:
                self.read(name)
        self.store(node.name)

    def _visit_comprehension(self, node: Comprehension) -> None:
        self.visit(node.generators[0].iter)
        self._visit_scope(node)

    visit_ListComp = _visit_comprehension
    visit_SetComp = _visit_comprehension
    visit_DictComp = _visit_comprehension
    visit_GeneratorExp = _visit_comprehension

    def _visit_scope(self, node: Function | Comprehension) -> None:
        reads, binds = free_names(node)
        bound = self.bound if self.around is None else self.around
        for name in sorted(reads - bound):
            self.reads[name] = None
        for name in sorted(binds):
            self.stored[name] = None  # it may, at some time

    def generic_visit(self, node: ast.AST) -> None:
        if hasattr(node, "type_params"):  # `type X = ...`: its value is evaluated when it is asked for
            reads, _ = free_names(node)
            for name in sorted(reads):
                self.read(name)
        super().generic_visit(node)


def _body(part: ast.expr | list[ast.stmt]) -> ast.AST | list[ast.stmt]:
    return part
