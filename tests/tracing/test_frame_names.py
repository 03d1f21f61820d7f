"""Names are written into the frame of whoever wrote the block."""

from __future__ import annotations

import sys
from typing import Any

from endoscope.tracing.names import bind, lookup


def test_function_variables_cells_and_free_variables() -> None:
    cell = 0

    def inner() -> tuple[Any, ...]:
        nonlocal cell
        fast: Any = None
        own_cell: Any = None

        def read() -> Any:
            return own_cell

        bind(sys._getframe(), {"fast": 1, "own_cell": 2, "cell": 3, "stranger": 4, "a.b": 5})
        return fast, own_cell, read(), cell, "stranger" in globals()

    assert inner() == (1, 2, 2, 3, False)
    assert cell == 3


def test_the_other_variables_are_left_as_they_are() -> None:
    values = []
    counter = 0
    for number in range(3):
        counter += number
        bind(sys._getframe(), {"number": number + 10})
        values.append((number, counter))
    assert values == [(10, 0), (11, 1), (12, 3)]


def test_unbound_variables_stay_unbound() -> None:
    if False:
        never = 1
    bound: Any = 0
    bind(sys._getframe(), {"bound": 1})
    assert bound == 1
    assert "never" not in locals()


def test_global_names() -> None:
    global written
    bind(sys._getframe(), {"written": 3, "local": 4}, frozenset({"written"}))
    assert written == 3
    assert "local" not in globals()


def test_class_body_and_module() -> None:
    class Body:
        bind(sys._getframe(), {"x": 1, "not.a.name": 2})

    assert Body.x == 1  # type: ignore[attr-defined]
    assert "not.a.name" not in vars(Body)
    names: dict[str, Any] = {"bind": bind, "sys": sys}
    exec("bind(sys._getframe(), {'y': 1})", names)
    assert names["y"] == 1


def test_a_frame_that_has_returned() -> None:
    def run() -> Any:
        x = 1
        return sys._getframe(), lambda: x

    frame, read = run()
    bind(frame, {"x": 2})
    assert read() in (1, 2)


def test_lookup_prefers_variables_and_leaves_out_builtins() -> None:
    local = 1
    frame = sys._getframe()
    found = lookup(frame, ["local", "bind", "len", "missing"], frozenset(frame.f_code.co_varnames))
    assert found == {"local": local, "bind": bind, "__name__": __name__}
