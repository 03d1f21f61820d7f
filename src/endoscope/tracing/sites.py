"""How a block reads one item of a module's output: by a call that names the item.

``X.output[0]`` of a decoder layer reads one of two tensors, and the other need not be copied for it. So it becomes a
call of a function that the namespace provides. For an object that is no module of the model, that function does what
the text says.
"""

from __future__ import annotations

import ast

OUTPUT = "__endoscope_output__"
"""The name under which a block finds the function that gives an item of an output: ``output(owner, item)``."""


def name_items(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return a block's statements, changed in place, with the calls in them. Lines and columns stay."""
    rewriter = _Rewriter()
    return [rewriter.visit(statement) for statement in body]


class _Rewriter(ast.NodeTransformer):
    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.Subscript(ast.Attribute(owner, "output"), ast.Constant(number) as item, ast.Load()):
                if type(number) is int:
                    function = ast.copy_location(ast.Name(OUTPUT, ast.Load()), node)
                    return ast.copy_location(ast.Call(function, [owner, item], []), node)
        return node
