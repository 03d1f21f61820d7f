"""The statements that cannot stand in a block, and what to write instead."""

from __future__ import annotations

import ast

from endoscope.errors import BlockSyntaxError

_AWAITING = (
    "the block runs inside the model's forward, where there is no event loop. Await before the with and use the value "
    "inside, or save what you need and await after it"
)
_INSTEAD = {
    "return": "the block runs in the engine and cannot return from the function around it. Save the value and return "
    "it after the with",
    "yield": "the block runs in the engine and cannot yield from the function around it. Save the value and yield it "
    "after the with",
    "await": _AWAITING,
    "async for": _AWAITING,
    "async with": _AWAITING,
    "async comprehension": _AWAITING,
    "break": "the loop is outside the block, which runs in the engine. Save a flag and break after the with",
    "continue": "the loop is outside the block, which runs in the engine. Save a flag and continue after the with",
    "nonlocal": "the block runs in the engine, away from the functions around it. Assign the name and save its value; "
    "it is bound after the with",
    "import *": "the names that it binds cannot be known before the block runs. Import the names one by one",
}

_Functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def check(body: list[ast.stmt], filename: str) -> None:
    """Raise :class:`BlockSyntaxError` for the first statement that cannot stand in a block.

    Functions that the block defines may hold anything that a function may hold.
    """
    for statement in body:
        _look(statement, filename, in_loop=False)


def _look(node: ast.AST, filename: str, *, in_loop: bool) -> None:
    kind = _kind(node, in_loop)
    if kind is not None:
        assert isinstance(node, ast.stmt | ast.expr | ast.comprehension)
        _refuse(kind, node.target if isinstance(node, ast.comprehension) else node, filename)
    if isinstance(node, ast.ClassDef):
        # A loop around a class is not a loop for its body; Python itself refuses what would need it.
        in_loop = False
    for name, value in ast.iter_fields(node):
        if isinstance(node, _Functions) and name == "body":
            continue
        inner = in_loop or (isinstance(node, ast.For | ast.While) and name == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                _look(child, filename, in_loop=inner)


def _kind(node: ast.AST, in_loop: bool) -> str | None:
    """Return the key of what is wrong with the node by itself, or ``None``."""
    match node:
        case ast.Return():
            return "return"
        case ast.Yield() | ast.YieldFrom():
            return "yield"
        case ast.Await():
            return "await"
        case ast.AsyncFor():
            return "async for"
        case ast.AsyncWith():
            return "async with"
        case ast.comprehension(is_async=1):
            return "async comprehension"
        case ast.Break() if not in_loop:
            return "break"
        case ast.Continue() if not in_loop:
            return "continue"
        case ast.Nonlocal():
            return "nonlocal"
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return "import *"
    return None


def _refuse(kind: str, node: ast.stmt | ast.expr, filename: str) -> None:
    written = ast.unparse(node).split("\n")[0]
    error = BlockSyntaxError(
        f"{filename}:{node.lineno}: {kind!r} cannot stand in a block (found `{written}`): {_INSTEAD[kind]}."
    )
    error.filename, error.lineno, error.offset = filename, node.lineno, node.col_offset + 1
    error.end_lineno, error.end_offset = node.end_lineno, (node.end_col_offset or 0) + 1
    raise error
