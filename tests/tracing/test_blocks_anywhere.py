"""A body is skipped and its names come back, in every kind of code and every shape of ``with``."""

# ruff: noqa: E701, E702

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from typing import Any

import pytest
from tracing_support import FakeBackend, trace

from endoscope.errors import NoSourceError, UsageError

ran: list[str] = []

NAMED_LINE = sys._getframe().f_lineno + 1
with trace("p") as module_level:
    module_name = 1 + 1


class InClassBody:
    before = 20
    with trace("p"):
        bound = before + 1
    after = bound + 1


def fail() -> None:
    raise AssertionError("the body of a with was run where it is written")


# contract: A2
def test_the_body_is_never_executed_here() -> None:
    here: list[int] = []
    with trace("p", FakeBackend(write=False)):
        here.append(1)
    assert here == []


# contract: B2
def test_module() -> None:
    assert module_name == 2
    assert module_level.line == NAMED_LINE


# contract: B2
def test_function() -> None:
    outside = 4
    with trace("p") as tracer:
        inside = outside * 10
    assert inside == 40
    assert tracer.invokes[0].prompt == "p"


# contract: B2
def test_method() -> None:
    class Holder:
        def __init__(self) -> None:
            self.value = 3

        def method(self) -> int:
            with trace("p"):
                got = self.value + 1
            return got

    assert Holder().method() == 4


# contract: B2
def test_nested_function_sees_and_binds_cells() -> None:
    outer = 5

    def inner() -> tuple[int, Any]:
        nonlocal outer
        with trace("p"):
            outer = outer + 1
            mine = outer
        return mine, lambda: mine

    mine, read = inner()
    assert (outer, mine, read()) == (6, 6, 6)


# contract: B2
def test_a_name_used_by_a_nested_function_is_bound_in_its_cell() -> None:
    def read() -> int:
        return bound

    with trace("p"):
        bound = 7
    assert read() == 7


# contract: B2
async def coroutine() -> tuple[int, int]:
    await asyncio.sleep(0)
    with trace("p"):
        first = 1
    await asyncio.sleep(0)
    with trace("p"):
        second = first + 1
    return first, second


def test_coroutine() -> None:
    async def many() -> list[tuple[int, int]]:
        return await asyncio.gather(*(coroutine() for _ in range(5)))

    assert asyncio.run(many()) == [(1, 2)] * 5


def test_generator_and_async_generator() -> None:
    def generator() -> Any:
        for number in range(3):
            with trace("p"):
                doubled = number * 2
            yield doubled

    async def asynchronous() -> Any:
        for number in range(3):
            with trace("p"):
                doubled = number * 2
            yield doubled

    async def collect() -> list[int]:
        return [each async for each in asynchronous()]

    assert list(generator()) == [0, 2, 4]
    assert asyncio.run(collect()) == [0, 2, 4]


def test_class_body() -> None:
    assert (InClassBody.bound, InClassBody.after) == (21, 22)


def test_class_body_in_a_function_sees_the_functions_variables() -> None:
    local = 3

    class Inner:
        with trace("p"):
            bound = local + 1

    assert Inner.bound == 4


def test_global_declaration() -> None:
    global declared
    with trace("p"):
        declared = 12
    assert globals()["declared"] == 12


def test_other_thread() -> None:
    got: list[int] = []

    def work(number: int) -> None:
        for _ in range(50):
            with trace("p"):
                doubled = number * 2
            got.append(doubled)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted([number * 2 for number in range(4)] * 50)


def test_recursion_through_the_same_with() -> None:
    def recurse(depth: int) -> int:
        with trace("p"):
            here = depth + 1
        return here if depth == 3 else recurse(depth + 1)

    assert recurse(0) == 4


# fmt: off
def test_bodies_on_the_header_line() -> None:
    with trace("p"): one = 1
    with trace("p") as tracer: two = one + 1; three = two + 1
    with trace("p"): fail() if one == 2 else None
    assert (one, two, three) == (1, 2, 3)
    assert tracer.invokes[0].block.code.source == "two = one + 1; three = two + 1"


def test_body_begins_on_the_last_header_line() -> None:
    with trace(
        "p"
    ) as tracer: bound = (1 +
                          2)
    assert bound == 3
    assert tracer.saves == {}


def test_target_on_a_later_line_is_bound() -> None:
    with (
        trace("p")
        as
        tracer
    ):
        bound = 1
    assert bound == 1
    assert tracer.invokes[0].prompt == "p"


def test_two_in_one_line_of_a_lambda_and_a_conditional() -> None:
    if True:
        with trace("p"): a = 1
    else:
        with trace("p"): a = 2
    assert a == 1


def test_bodies_without_code() -> None:
    with trace("p") as tracer: pass
    with trace("p"): ...
    with trace("p"):
        "a lone string"
    with trace("p"):
        ...
    with trace("p"):
        pass
    with trace("p"):
        if 0:
            fail()
    assert len(tracer.invokes) == 1
    assert sys.gettrace() is None or sys.gettrace() is not tracer
# fmt: on


def test_first_statements_of_every_kind() -> None:
    with trace("p"):

        @(lambda f: f)
        def function() -> int:
            return 1

        called = function()
    with trace("p"):
        for item in [1, 2]:
            last = item
    with trace("p"), contextlib.nullcontext(9) as nine:
        tenth = nine + 1
    with trace("p"):
        try:
            1 / 0  # noqa: B018
        except ZeroDivisionError:
            caught = True
    with trace("p"):
        while True:
            counted = 1
            break
    with trace("p"):
        import math
    with trace("p"):
        assert math.pi > 3
    with trace("p"):

        class Made:
            x = 1

    assert (called, last, tenth, caught, counted, Made.x) == (1, 2, 10, True, 1, 1)


def test_items_after_the_trace_belong_to_the_block() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def noted(name: str) -> Any:
        entered.append(name)
        yield name

    backend = FakeBackend(write=False)
    with noted("before") as first, trace("p", backend) as tracer, noted("inside") as second, noted("last"):
        joined = first + second
        order = list(entered)
    assert entered == ["before"]
    assert backend.namespaces[0]["order"] == ["before", "inside", "last"]
    assert backend.namespaces[0]["joined"] == "beforeinside"
    assert tracer.invokes[0].block.code.items == 2
    with (
        trace("p"),
        contextlib.nullcontext(1) as one,
        contextlib.nullcontext(2) as two,
    ):
        both = one + two
    assert both == 3


def test_trace_and_its_invoke_in_one_with() -> None:
    with trace() as tracer, tracer.invoke("p"):
        bound = 5
    assert bound == 5


def test_nested_withs_each_find_their_own() -> None:
    with contextlib.nullcontext(), contextlib.nullcontext():
        with trace() as tracer:
            with tracer.invoke("a"):
                a = 1
            with tracer.invoke("b"):
                b = 2
        with trace("c"):
            c = 3
    assert (a, b, c) == (1, 2, 3)


def test_in_a_finally_which_is_compiled_twice() -> None:
    def run(error: bool) -> int:
        try:
            if error:
                raise KeyError
        except KeyError:
            pass
        finally:
            with contextlib.nullcontext(), trace("p"), contextlib.nullcontext(1) as one:
                bound = one + 1
        return bound

    def raising() -> None:
        try:
            raise KeyError
        finally:
            with contextlib.nullcontext(), trace("p"), contextlib.nullcontext(1) as one:
                seen.append(one)

    seen: list[int] = []
    assert run(False) == run(True) == 2
    with pytest.raises(KeyError):
        raising()


def test_in_an_except_and_a_loop_with_break_after() -> None:
    for number in range(5):
        try:
            raise ValueError(number)
        except ValueError as error:
            value = error.args[0]
            with trace("p"):
                got = value
        if got == 3:
            break
    assert got == 3


def test_errors_of_the_header_come_out_untouched() -> None:
    before = sys.gettrace()
    with pytest.raises(ZeroDivisionError), trace(1 / 0):
        fail()
    target: list[Any] = []
    with pytest.raises(IndexError):
        with trace("p") as target[5]:
            fail()
    assert sys.gettrace() is before
    with trace("p"):
        fine = 1
    assert fine == 1


def test_targets_that_are_not_names() -> None:
    class Holder:
        tracer: Any = None

    holder, places = Holder(), [None]
    with trace("p") as holder.tracer:
        one = 1
    with trace("p") as places[0]:
        two = 2
    assert (one, two) == (1, 2)
    assert holder.tracer is not None
    assert places[0] is not None


def test_a_body_that_begins_with_try_catches_nothing_of_ours() -> None:
    class Holder:
        tracer: Any = None

    holder = Holder()
    with trace("p", FakeBackend(write=False)) as tracer:
        try:
            fail()
        except BaseException:
            ran.append("except")
        finally:
            ran.append("finally")
    assert tracer.invokes[0].prompt == "p"
    with trace("p", FakeBackend(write=False)) as holder.tracer:
        "a lone string"
        try: fail()  # fmt: skip
        except: ran.append("except")  # fmt: skip # noqa: E722
    assert holder.tracer.invokes[0].prompt == "p"
    with trace("p"):
        while True:
            try:
                got = 1
                break
            finally:
                fine = 2
    assert (got, fine) == (1, 2)
    with pytest.raises(IndexError):
        with trace("p") as [][5]:
            try:
                fail()
            finally:
                ran.append("finally")
    assert ran == []


def test_entered_by_hand_or_by_an_exit_stack() -> None:
    with pytest.raises(UsageError, match="entered by a call, not by a with statement"):
        trace("p").__enter__()
    with pytest.raises(UsageError, match="ExitStack"), contextlib.ExitStack() as stack:
        stack.enter_context(trace("p"))
    with (
        pytest.raises(UsageError, match="not by a with statement"),
        contextlib.ExitStack() as stack,
        stack.enter_context(trace("p")),
    ):
        fail()


def test_previous_trace_functions_are_put_back() -> None:
    events: list[str] = []

    def tracing(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "traced":
            events.append(f"{event} {frame.f_lineno - frame.f_code.co_firstlineno}")
            return tracing
        return None

    def traced() -> Any:
        with trace("p"):
            bound = 1
        after = bound + 1
        with trace("p"): bound = 2  # fmt: skip
        return sys.gettrace(), sys._getframe().f_trace, sys._getframe().f_trace_opcodes, after

    previous = sys.gettrace()
    sys.settrace(tracing)
    try:
        got = traced()
    finally:
        sys.settrace(previous)
    assert got == (tracing, tracing, False, 2)
    assert events[:2] == ["call 0", "line 1"]
    assert "line 2" not in events
    assert {"line 3", "line 5", "return 5"} <= set(events)


def test_a_trace_function_taken_away_is_an_error_not_a_silent_run() -> None:
    class Meddling(list[Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            sys.settrace(None)

    places = Meddling()
    before = sys.gettrace()
    try:
        with pytest.raises(UsageError, match="the body of the trace ran here"):
            with trace("p") as places[0]:
                ran.append("body")
        with pytest.raises(UsageError, match="the body of the trace ran here"):
            with trace("p") as places[0]:
                raise KeyError
    finally:
        sys.settrace(before)


def test_code_without_any_text() -> None:
    with pytest.raises(NoSourceError, match=r"exec\(\) or eval\(\)") as caught:
        exec("with trace('p'):\n    x = 1\n", {"trace": trace})
    assert "<string>:1" in str(caught.value)
    assert "Write the code to a file" in str(caught.value)
    with pytest.raises(NoSourceError, match="made-up filename '<made>'"):
        exec(compile("with trace('p'):\n    x = 1\n", "<made>", "exec"), {"trace": trace})


def test_separate_locals_of_exec(tmp_path: Any) -> None:
    path = tmp_path / "text.py"
    path.write_text("with trace('p'):\n    x = y + 1\n")
    own = {"y": 1}
    exec(compile(path.read_text(), str(path), "exec"), {"trace": trace}, own)
    assert own["x"] == 2
