"""How a block reaches the output of a module: by a call that says how much of it is read.

``X.output[0]`` of a decoder layer reads one of two tensors, and no other need be copied for it. So ``X.output`` becomes
a call of a function that the namespace provides, and ``X.output[0]`` a call that names the item as well. For an object
that is no module of the model, that function does what the text says.
"""

from __future__ import annotations

import ast
from typing import TypeGuard

OUTPUT = "__endoscope_output__"
"""The name under which a block finds the function that gives an output: ``output(owner)``, ``output(owner, item)``."""


def name_items(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a block's statements, changed in place, with the calls in them. Lines and columns stay."""
    rewriter = _Rewriter()
    return [rewriter.visit(statement) for statement in body]


class _Rewriter(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        owner, item = node.value, node.slice
        named = isinstance(node.ctx, ast.Load) and isinstance(item, ast.Constant) and type(item.value) is int
        if named and _is_output(owner):
            return self._call(node, owner.value, [item])
        self.generic_visit(node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if _is_output(node):
            return self._call(node, node.value, [])
        self.generic_visit(node)
        return node

    # In a pattern, a dotted name may be nothing else.

    def visit_MatchValue(self, node: ast.MatchValue) -> ast.pattern:
        return node

    def visit_MatchMapping(self, node: ast.MatchMapping) -> ast.pattern:
        node.patterns = [self.visit(pattern) for pattern in node.patterns]
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.pattern:
        node.patterns = [self.visit(pattern) for pattern in node.patterns]
        node.kwd_patterns = [self.visit(pattern) for pattern in node.kwd_patterns]
        return node

    def _call(self, node: ast.expr, owner: ast.expr, items: list[ast.expr]) -> ast.expr:
        function = ast.copy_location(ast.Name(OUTPUT, ast.Load()), node)
        return ast.copy_location(ast.Call(function, [self.visit(owner), *items], []), node)


def _is_output(node: ast.expr) -> TypeGuard[ast.Attribute]:
    return isinstance(node, ast.Attribute) and node.attr == "output" and isinstance(node.ctx, ast.Load)
