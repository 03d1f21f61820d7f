"""The changes that let a block's syntax tree run outside of the function that it was written in.

The block runs as top-level code over one flat namespace. What Python resolves by the surroundings of the text is
written out: private names, ``super()`` without arguments, ``nonlocal`` of a name of the block. A call ``X.save()``
becomes a call of a function that the namespace provides, together with the text of ``X`` and the names that the
statement binds the result to.
"""

from __future__ import annotations

import ast
from typing import TypeVar

from endoscope.tracing.enclosing import first_argument
from endoscope.tracing.scopes import bound_in

SAVE = "__endoscope_save__"
"""The name under which a block finds the function that saves: ``save(value, text_of_its_expression, names)``."""

_NodeT = TypeVar("_NodeT", bound=ast.AST)


def rewrite(body: list[ast.stmt], class_name: str | None, first: str | None) -> list[ast.stmt]:
    """Return the block's statements, changed in place, as top-level code. Lines and columns stay.

    Args:
        body: the statements as written.
        class_name: the class around the block, which its private names are mangled for.
        first: the first argument of the function around the block.
    """
    rewriter = _Rewriter(class_name, first)
    return [rewriter.top(statement) for statement in body]


class _Rewriter(ast.NodeTransformer):
    def __init__(self, class_name: str | None, first: str | None) -> None:
        self.class_name = class_name
        self.first = first
        self.in_class = False  # inside a class of the block, where super() means that class
        self.functions: list[set[str]] = []  # the names of each function around, outermost first
        self.bound_to: dict[int, tuple[str, ...]] = {}  # by a call: the names of the block that its value gets

    def top(self, statement: ast.stmt) -> ast.stmt:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            # At the top of a module a lone string would be bound to __doc__.
            return ast.copy_location(ast.Pass(), statement)
        changed = self.visit(statement)
        assert isinstance(changed, ast.stmt)
        return changed

    # Names

    def mangled(self, name: str) -> str:
        if self.class_name is None or not name.startswith("__") or name.endswith("__") or "." in name:
            return name
        owner = self.class_name.lstrip("_")
        return f"_{owner}{name}" if owner else name

    def generic_visit(self, node: _NodeT) -> _NodeT:
        for field in ("id", "attr", "name", "arg", "rest", "asname"):
            name = getattr(node, field, None)
            if isinstance(name, str) and not isinstance(node, ast.keyword):
                setattr(node, field, self.mangled(name))
        super().generic_visit(node)
        return node

    def visit_Global(self, node: ast.Global) -> ast.stmt:
        node.names = [self.mangled(name) for name in node.names]
        return node

    def visit_Nonlocal(self, node: ast.Nonlocal) -> ast.stmt | list[ast.stmt]:
        names = [self.mangled(name) for name in node.names]
        outer = set[str]().union(*self.functions[:-1])
        statements: list[ast.stmt] = []
        if kept := [name for name in names if name in outer]:
            statements.append(ast.copy_location(ast.Nonlocal(kept), node))
        if flat := [name for name in names if name not in outer]:
            statements.append(ast.copy_location(ast.Global(flat), node))
        return statements

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if self.functions or self.in_class:
            return self.generic_visit(node)
        # Inside a function Python does not evaluate these annotations; at the top of a module it would.
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        self._binds(node.value, node.targets)
        return self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> ast.expr:
        self._binds(node.value, [node.target])
        return self.generic_visit(node)

    def _binds(self, value: ast.expr, targets: list[ast.expr] | list[ast.Name]) -> None:
        if not self.functions and not self.in_class:
            names = tuple(self.mangled(target.id) for target in targets if isinstance(target, ast.Name))
            self.bound_to[id(value)] = names

    # Scopes

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return self._function(node)

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        outer_first, self.first = self.first, first_argument(node)
        decorators, node.decorator_list = node.decorator_list, []
        self.functions.append({self.mangled(name) for name in bound_in(node)})
        self.generic_visit(node)
        self.functions.pop()
        node.decorator_list = decorators
        self.first = outer_first
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        self.functions.append({self.mangled(name) for name in bound_in(node)})
        self.generic_visit(node)
        self.functions.pop()
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.stmt:
        own_name = node.name
        node.name = self.mangled(own_name)
        node.decorator_list = [self.visit(part) for part in node.decorator_list]
        node.bases = [self.visit(part) for part in node.bases]
        node.keywords = [self.visit(part) for part in node.keywords]
        outer = self.class_name, self.in_class
        self.class_name, self.in_class = own_name, True
        changed: list[ast.stmt] = []
        for statement in node.body:
            result = self.visit(statement)
            changed.extend(result if isinstance(result, list) else [result])
        node.body = changed
        self.class_name, self.in_class = outer
        return node

    # Calls

    def visit_Call(self, node: ast.Call) -> ast.expr:
        bare = not node.args and not node.keywords
        if bare and isinstance(node.func, ast.Attribute) and node.func.attr == "save":
            text = ast.copy_location(ast.Constant(ast.unparse(node.func.value)), node)
            value = self.visit(node.func.value)
            function = ast.copy_location(ast.Name(SAVE, ast.Load()), node)
            names: list[ast.expr] = [ast.Constant(name) for name in self.bound_to.get(id(node), ())]
            bound = ast.Tuple(names, ast.Load())
            return ast.fix_missing_locations(ast.copy_location(ast.Call(function, [value, text, bound], []), node))
        self.generic_visit(node)
        if bare and isinstance(node.func, ast.Name) and node.func.id == "super" and not self.in_class and self.first:
            node.args = [ast.copy_location(ast.Name(name, ast.Load()), node) for name in ("__class__", self.first)]
        return node
