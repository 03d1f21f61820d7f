"""Random programs give the same names through a trace as in place."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tracing_support import trace

NAMES = st.sampled_from("abcde")
count = itertools.count()


@st.composite
def expression(draw: Any, depth: int = 2) -> str:
    kinds = ["number", "name"] + (["sum", "walrus", "comp", "if", "and", "call", "lambda", "fstring"] if depth else [])
    kind = draw(st.sampled_from(kinds))
    inner = lambda: draw(expression(depth - 1))  # noqa: E731
    name = draw(NAMES)
    match kind:
        case "number":
            return str(draw(st.integers(0, 9)))
        case "name":
            return name
        case "sum":
            return f"({inner()} + {inner()})"
        case "walrus":
            return f"({name} := {inner()})"
        case "comp":
            return f"sum([{inner().replace(':=', '+')} for {name} in range(3)])"
        case "if":
            return f"({inner()} if {inner()} else {inner()})"
        case "and":
            return f"({inner()} and {inner()})"
        case "call":
            return f"max({inner()}, {inner()})"
        case "lambda":
            return f"(lambda {name}={inner().replace(':=', '+')}: {name} + 1)()"
    return f"len(f'{{{name}}}x')"


@st.composite
def statements(draw: Any, depth: int = 2, in_loop: bool = False) -> list[str]:
    lines: list[str] = []
    for _ in range(draw(st.integers(1, 4))):
        lines += draw(statement(depth, in_loop))
    return lines


@st.composite
def statement(draw: Any, depth: int, in_loop: bool) -> list[str]:
    kinds = ["assign", "assign", "augment", "unpack", "del"] + (["break"] if in_loop else [])
    if depth:
        kinds += ["if", "for", "while", "try", "finally", "with", "def", "class", "match", "global"]
    kind = draw(st.sampled_from(kinds))
    name, other = draw(NAMES), draw(NAMES)
    body = lambda loop=in_loop: ["    " + line for line in draw(statements(depth - 1, loop))]  # noqa: E731
    value = draw(expression())
    match kind:
        case "assign":
            return [f"{name} = {value}"]
        case "augment":
            return [f"{name} += {value}"]
        case "unpack":
            return [f"{name}, *{other} = [{value}, 1]", f"{other} = 1"]
        case "del":
            return [f"del {name}"]
        case "break":
            return [draw(st.sampled_from(["break", "continue"]))]
        case "if":
            return [f"if {value}:", *body(), "else:", *body()]
        case "for":
            return [f"for {name} in range(2):", *body(True), "else:", *body()]
        case "while":
            return [f"while {value}:", *body(False), "    break"]  # no `continue`, so that it ends
        case "try":
            return ["try:", *body(), f"except (NameError, TypeError) as {name}:", f"    {other} = 7", "else:", *body()]
        case "finally":
            return ["try:", *body(), "finally:", *body(False)]
        case "with":
            return ["with suppress(NameError):", *body()]
        case "def":
            head = f"def {name}({other}={value.replace(':=', '+')}):"
            return [head, *body(False), f"    return {other}", f"{name} = {name}()"]
        case "class":
            # A class attribute called as a name outside is left out: at the top of a module it reads that name first,
            # inside a function it is unbound.
            return [f"class {name}:", f"    inner = {value.replace(':=', '+')}", f"{name} = {name}.inner"]
        case "match":
            cases = [[f"case {pattern}:", *body()] for pattern in (f"1 | 2 as {name}", "_")]
            return [f"match {value}:", *("    " + line for case in cases for line in case)]
    return [f"{name} = 1"]


def outcome(text: str) -> tuple[Any, ...]:
    """Run ``f`` of the program; return its variables, or the kind and line of its error."""
    filename = f"<random {next(count)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    try:
        names: dict[str, Any] = {"trace": trace, "e": 4}
        exec(compile(text, filename, "exec"), names)
        try:
            got = names["f"](1, 2)
        except Exception as error:
            kind = NameError if isinstance(error, NameError) else type(error)
            trace_ = error.__traceback__
            while trace_ is not None and trace_.tb_next is not None:
                trace_ = trace_.tb_next
            return kind, trace_.tb_lineno if trace_ else None
        return (
            "fine",
            {
                key: repr(value).partition(" at ")[0].replace("f.<locals>.", "")
                for key, value in got.items()
                if key in "abcde"
            },
        )
    finally:
        del linecache.cache[filename]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(statements())
def test_random_blocks_give_what_plain_python_gives(lines: list[str]) -> None:
    head = "from contextlib import suppress\ndef f(a, b):\n    c = 3\n    {}:\n"
    body = "".join(f"        {line}\n" for line in lines)
    plain = head.format("if 1") + body + "    return locals()\n"
    traced = head.format("with trace('p')") + body + "    return locals()\n"
    expected = outcome(plain)
    # Names that the block deletes are not deleted in the caller's frame; a trace brings names home, nothing else.
    got = outcome(traced)
    if expected[0] == "fine" and got[0] == "fine":
        assert {key: got[1].get(key) for key in expected[1]} == expected[1], traced
    else:
        assert got == expected, traced
