"""Statements that cannot stand in a block are refused when the trace is entered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tracing_support import NoBackend, trace

from endoscope.errors import BlockSyntaxError


def compiled(folder: Path, lines: list[str]) -> dict[str, Any]:
    path = folder / "refused.py"
    path.write_text("\n".join(lines) + "\n")
    names: dict[str, Any] = {"trace": trace}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return names


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("return 1", "return"),
        ("if x: return", "return"),
        ("break", "break"),
        ("if x: continue", "continue"),
        ("nonlocal x", "nonlocal"),
        ("yield 1", "yield"),
        ("y = yield from x", "yield"),
        ("for i in x: pass\n            else: break", "break"),
        ("@(yield)\n            def g(): pass", "yield"),
    ],
)
def test_refused(tmp_path: Path, body: str, kind: str) -> None:
    lines = ["def outer():", "    x = 1", "    def f():"]
    lines += ["        nonlocal x", "        for _ in [1]:", "          with trace('p'):", f"            {body}"]
    lines += ["    return f"]
    if body == "nonlocal x":
        del lines[3]
    run: Callable[[], Any] = compiled(tmp_path, lines)["outer"]()
    with pytest.raises(BlockSyntaxError) as caught:
        list(run() or [])
    text = str(caught.value)
    line = next(n for n, each in enumerate("\n".join(lines).split("\n"), 1) if kind.split()[-1] in each and n > 4)
    assert f"refused.py:{line}: {kind!r} cannot stand in a block" in text
    assert caught.value.lineno == line
    assert isinstance(caught.value, SyntaxError)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("await x", "await"),
        ("async for i in x: pass", "async for"),
        ("async with x: pass", "async with"),
        ("y = [i async for i in x]", "async comprehension"),
        ("y = [await i for i in x]", "await"),
    ],
)
def test_refused_in_a_coroutine(tmp_path: Path, body: str, kind: str) -> None:
    names = compiled(tmp_path, ["async def f(x):", "    with trace('p'):", f"        {body}"])
    with pytest.raises(BlockSyntaxError, match=f"refused.py:3: '{kind}' cannot stand") as caught:
        asyncio.run(names["f"](None))
    assert "Await before the with" in str(caught.value)


def test_import_star(tmp_path: Path) -> None:
    with pytest.raises(BlockSyntaxError, match="Import the names one by one"):
        compiled(tmp_path, ["with trace('p'):", "    from math import *"])


def test_what_a_nested_function_may_hold() -> None:
    with trace("p"):

        def gen() -> Any:
            while True:
                if (yield 1):
                    continue
                return

        async def co(x: Any) -> Any:
            async with x:
                async for each in x:
                    await each
                    break
            return [y async for y in x]

        for i in range(3):
            if i == 1:
                break
        else:
            i = 9
        make = lambda: (yield)  # noqa: E731
    assert i == 1


def test_global_is_fine() -> None:
    backend = NoBackend()
    with trace("p", backend):
        global somewhere
        somewhere = 1
    assert backend.tracer is not None
    assert backend.tracer.invokes[0].block.binds == {"somewhere": True}
