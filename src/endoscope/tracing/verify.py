"""Whether a text is what a code object was compiled from, as far as one ``with`` goes.

A file can be edited after it was imported. The whole file is not compiled again to compare: import hooks (pytest's
rewritten asserts) change code on purpose. What a hook leaves alone is compared: each constant, name, attribute and
operator that an instruction of the block was made from must stand in the text at the very place that the instruction
names.
"""

from __future__ import annotations

import ast
import dis
from collections import defaultdict
from types import CodeType

_NAME_OPCODES = frozenset(
    f"LOAD_{kind}" for kind in ("FAST", "FAST_CHECK", "NAME", "GLOBAL", "DEREF", "CLASSDEREF")
)  # not STORE: the end of `except E as e:` stores to `e` at whatever place came before
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.MatMult: "@",
    ast.Div: "/",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.BitAnd: "&",
    ast.FloorDiv: "//",
}


def agrees(code: CodeType, inside: frozenset[int], node: ast.With) -> bool:
    """Return whether the instructions at the offsets ``inside`` can come from the text that ``node`` is of."""
    nodes: defaultdict[tuple[int, int | None, int, int | None], list[ast.expr]] = defaultdict(list)
    for part in ast.walk(node):
        if isinstance(part, ast.Constant | ast.Name | ast.Attribute | ast.BinOp):
            nodes[part.lineno, part.end_lineno, part.col_offset, part.end_col_offset].append(part)
    for instruction in dis.get_instructions(code):
        at = instruction.positions
        if instruction.offset not in inside or at is None or at.lineno is None or at.col_offset is None:
            continue
        here = nodes.get((at.lineno, at.end_lineno, at.col_offset, at.end_col_offset), [])
        if not _fits(instruction, here):
            return False
    return True


def _fits(instruction: dis.Instruction, here: list[ast.expr]) -> bool:
    """Whether one of the expressions at the instruction's place, if there are such, gives the instruction."""
    value = instruction.argval
    if instruction.opname == "LOAD_CONST" and value is not None:  # None is also loaded for Python's own ends
        constants = [_exact(part.value) for part in here if isinstance(part, ast.Constant)]
        return not constants or _exact(value) in constants
    if instruction.opname in _NAME_OPCODES:
        return _one_of(value, [part.id for part in here if isinstance(part, ast.Name)])
    if instruction.opname in ("LOAD_ATTR", "STORE_ATTR", "LOAD_METHOD"):
        return _one_of(value, [part.attr for part in here if isinstance(part, ast.Attribute)])
    if instruction.opname == "BINARY_OP":
        return _one_of(instruction.argrepr, [_OPERATORS[type(part.op)] for part in here if isinstance(part, ast.BinOp)])
    return True


def _one_of(value: object, names: list[str]) -> bool:
    return not names or any(value == name or (name.startswith("__") and str(value).endswith(name)) for name in names)


def _exact(value: object) -> tuple[type, str]:
    """A constant in a form in which ``1``, ``1.0`` and ``True`` differ."""
    return type(value), repr(value)
