"""From a frame that is entering a ``with`` to the text and the place of that ``with``'s body."""

from __future__ import annotations

import ast
import dis
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import CO_OPTIMIZED
from types import CodeType, FrameType

from endoscope.errors import NoSourceError, UsageError
from endoscope.tracing.block import Code
from endoscope.tracing.enclosing import Enclosing, enclosing
from endoscope.tracing.flow import names_of
from endoscope.tracing.handlers import handlers
from endoscope.tracing.syntax import check
from endoscope.tracing.target import Target
from endoscope.tracing.text import FUTURE_FLAGS, texts, why_missing
from endoscope.tracing.verify import agrees

Position = tuple[int | None, int | None, int | None, int | None]
"""First line, last line, first column, column after the last; as ``code.co_positions()`` gives them."""

_WITH_OPCODES = ("BEFORE_WITH",)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """One ``with`` item in a user's code whose body is a block. Found once, used at each pass.

    Attributes:
        code: the text of the block and what is needed to compile it.
        line: the line of the ``with`` itself.
        outside: names that the block may read before it binds them, so they come from outside.
        binds: names that the block binds; true where the enclosing function declares the name ``global``.
        inside: offsets of the block's instructions in the code that it is written in; none for ``pass``.
        stops: offsets at which skipping may begin: what is raised there goes straight to the ``with``.
        by_instruction: a new line does not announce a stop, so that every instruction has to be watched.
        target: what stands after ``as``, where skipping begins before Python stores it.
        variables: names that are the enclosing function's own variables, never looked up among its globals.
        global_names: names that the enclosing function declares ``global``.
    """

    code: Code
    line: int
    outside: tuple[str, ...]
    binds: dict[str, bool]
    inside: frozenset[int]
    stops: frozenset[int]
    by_instruction: bool
    target: Target | None
    variables: frozenset[str]
    global_names: frozenset[str]


@dataclass(slots=True)
class _Known:
    """The places known in one code object, which the weak reference tells apart from a later one at its address."""

    owner: weakref.ref[CodeType]
    places: dict[int, Place] = field(default_factory=dict)


_known: dict[int, _Known] = {}


def find_with(frame: FrameType) -> Place:
    """Return the place of the ``with`` item whose ``__enter__`` the frame is executing.

    The instruction that the frame stands at says exactly which item of which ``with`` it is, however many stand on
    the line. The first call for an instruction reads and parses the source; later ones cost about a microsecond.

    Raises:
        UsageError: the frame is not at a ``with``, as when ``__enter__`` is called by hand or by an ``ExitStack``.
        NoSourceError: the text cannot be had, or is not the text of the code that runs.
        BlockSyntaxError: the body holds a statement that cannot stand in a block.
    """
    code = frame.f_code
    known = _known.get(id(code))
    if known is not None and known.owner() is code:
        place = known.places.get(frame.f_lasti)
        if place is not None:
            return place
    place = _find(frame)
    if known is None or known.owner() is not code:
        key = id(code)

        def forget(owner: weakref.ref[CodeType]) -> None:
            entry = _known.get(key)
            if entry is not None and entry.owner is owner:
                del _known[key]

        known = _known[key] = _Known(weakref.ref(code, forget))
    known.places[frame.f_lasti] = place
    return place


def _find(frame: FrameType) -> Place:
    code, offset = frame.f_code, frame.f_lasti
    where = f"{code.co_filename}:{frame.f_lineno}"
    if dis.opname[code.co_code[offset]] not in _WITH_OPCODES:
        raise UsageError(
            f"{where}: the trace is entered by a call, not by a with statement. A block is the body of a with "
            "statement: write `with model.trace(...) as tracer:` with the trace itself after `with`, and neither call "
            "__enter__ nor hand the trace to an ExitStack."
        )
    positions = list(code.co_positions())
    matched_nothing = False
    for text in texts(frame):
        tree = _parsed(text)
        if tree is None:
            matched_nothing = True
            continue
        found = _item(tree, code, positions, offset, where)
        if found is None:
            matched_nothing = True
            continue
        place = _place(text, code, positions, offset, *found)
        if place is not None:
            return place
        matched_nothing = True
    if matched_nothing:
        raise NoSourceError(
            f"{where}: the text of this file is not the text of the code that runs; the file has changed since it was "
            "imported. Import it again: restart the program, or importlib.reload() the module."
        )
    raise NoSourceError(f"{where}: the text of this block cannot be had. {why_missing(code.co_filename)}")


@lru_cache(maxsize=4)
def _parsed(text: str) -> tuple[tuple[ast.With, Enclosing], ...] | None:
    """Return every ``with`` of the text, each with what it stands in; ``None`` if the text is not Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    return tuple(enclosing(tree))


def _item(
    withs: tuple[tuple[ast.With, Enclosing], ...], code: CodeType, positions: list[Position], offset: int, where: str
) -> tuple[ast.With, Enclosing, int] | None:
    """Return the ``with``, what it stands in, and the number of the item that the instruction enters."""
    at = positions[offset // 2]
    if at[2] is None:
        return _item_by_line(withs, at[0], where)
    for node, around in withs:
        for number, item in enumerate(node.items):
            if _span(item.context_expr) == at:  # CPython 3.13 marks the item
                return node, around, number
        if _span(node) == at:  # CPython 3.11 and 3.12 mark the whole statement
            # The items are entered in order. A `finally` is compiled twice, and so are the withs in it.
            entries = [i for i in _entries(code) if positions[i // 2] == at]
            return node, around, entries.index(offset) % len(node.items)
    return None


def _item_by_line(
    withs: tuple[tuple[ast.With, Enclosing], ...], line: int | None, where: str
) -> tuple[ast.With, Enclosing, int] | None:
    """As :func:`_item`, for code without columns (``python -X no_debug_ranges``)."""
    found = [
        (node, around, number)
        for node, around in withs
        for number, item in enumerate(node.items)
        if line in (node.lineno, item.context_expr.lineno)
    ]
    if len(found) > 1 or (found and found[0][0].body[0].lineno <= _header_end(found[0][0])):
        raise NoSourceError(
            f"{where}: this code was compiled without column numbers, so a with statement that shares its line with "
            "another, or with its body, cannot be told apart. Run without -X no_debug_ranges, or write it on lines of "
            "its own."
        )
    return found[0] if found else None


def _entries(code: CodeType) -> Iterator[int]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _WITH_OPCODES:
            yield instruction.offset


def _span(node: ast.expr | ast.stmt) -> Position:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def _header_end(node: ast.With) -> int:
    ends = [item.optional_vars or item.context_expr for item in node.items]
    return max(end.end_lineno or end.lineno for end in ends)


def _place(
    text: str, code: CodeType, positions: list[Position], offset: int, node: ast.With, around: Enclosing, number: int
) -> Place | None:
    """Return the place of the item's body, or ``None`` if the text there is not what the code was made from."""
    left_out = number + 1
    last = left_out == len(node.items)
    first_line, column = _start(text, node) if last else (node.lineno, node.col_offset)
    final = node.body[-1]
    end_line, end_column = final.end_lineno or final.lineno, final.end_col_offset or 0
    if last:
        begin = (first_line, column)
    else:
        next_item = node.items[left_out].context_expr
        begin = (next_item.lineno, next_item.col_offset)
    inside = _inside(code, positions, begin, (end_line, end_column))
    if not agrees(code, inside, node):
        return None
    unit = Code.make(
        source=_cut(text, first_line, column, end_line, end_column),
        filename=code.co_filename,
        line=first_line,
        column=column,
        class_name=around.class_name,
        flags=code.co_flags & FUTURE_FLAGS,
        first_argument=around.first_argument,
        items=0 if last else left_out,
    )
    check(unit.written(), unit.filename)
    outside, binds = names_of(unit.rewritten())
    own = frozenset(code.co_varnames + code.co_cellvars + code.co_freevars)
    variables = own - _read_as_globals(code) if code.co_flags & CO_OPTIMIZED else own
    if code.co_flags & CO_OPTIMIZED and not own.union(code.co_names, around.global_names, _global_in(unit)) >= set(
        binds
    ):
        return None  # the text binds a name that the function does not have
    after = offset + 2  # the first instruction that the with's own handler covers
    caught_by = handlers(code)
    early = bool(inside) and caught_by.get(min(inside)) != caught_by[after]
    written = node.items[number].optional_vars
    target = Target.of(written, unit.filename, around.class_name, around.first_argument) if early and written else None
    return Place(
        code=unit,
        line=node.lineno,
        outside=outside,
        binds={name: name in around.global_names for name in binds},
        inside=inside,
        stops=frozenset({after}) if early else frozenset(i for i in inside if caught_by.get(i) == caught_by[after]),
        by_instruction=early or begin[0] <= _header_end(node) or not _announced(code, positions, inside),
        target=target,
        variables=variables,
        global_names=around.global_names,
    )


def _start(text: str, node: ast.With) -> tuple[int, int]:
    """Return the line and column where the first statement of the body begins, decorators included."""
    first = node.body[0]
    line = first.lineno
    if isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and first.decorator_list:
        lines = text.split("\n")
        line = first.decorator_list[0].lineno
        while not lines[line - 1].lstrip().startswith("@"):  # `@(` may stand above its expression
            line -= 1
    return line, first.col_offset


def _cut(text: str, line: int, column: int, end_line: int, end_column: int) -> str:
    """Return the text between two places, with the first line's indentation if it has nothing before it but that."""
    lines = text.split("\n")[line - 1 : end_line]
    lines[-1] = lines[-1].encode()[:end_column].decode()
    before = lines[0].encode()[:column].decode()
    if before.strip():
        lines[0] = lines[0][len(before) :]
    return "\n".join(lines)


def _read_as_globals(code: CodeType) -> set[str]:
    """Return the names that a function, or one inside it, takes from the globals.

    From CPython 3.12 on the target of a comprehension is among the variables of the function around it, even where
    that function knows the name as a global.
    """
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return names.union(*(_read_as_globals(part) for part in code.co_consts if isinstance(part, CodeType)))


def _global_in(unit: Code) -> set[str]:
    """Return the names that functions defined in the block declare ``global``."""
    nodes = (node for statement in unit.rewritten() for node in ast.walk(statement))
    return {name for node in nodes if isinstance(node, ast.Global) for name in node.names}


def _announced(code: CodeType, positions: list[Position], inside: frozenset[int]) -> bool:
    """Whether the first instruction of a body is the first of its line; a ``NOP`` may stand for a ``try`` before it."""
    if not inside:
        return True
    first = min(inside)
    return code.co_code[first - 2] != dis.opmap["NOP"] or positions[first // 2 - 1][0] != positions[first // 2][0]


def _inside(code: CodeType, positions: list[Position], begin: tuple[int, int], end: tuple[int, int]) -> frozenset[int]:
    """Return the offsets of the instructions that lie between two places of the text and do anything."""
    found = set()
    nop = dis.opmap["NOP"]
    for index, (line, end_line, column, end_column) in enumerate(positions):
        if line is None or end_line is None or code.co_code[index * 2] == nop:
            continue
        if column is None or end_column is None:
            within = begin[0] <= line and end_line <= end[0]
        else:
            within = begin <= (line, column) and (end_line, end_column) <= end
        if within:
            found.add(index * 2)
    return frozenset(found)
