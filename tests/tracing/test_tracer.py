"""The life of a trace: invokes, misuse, errors, and nothing left over."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from typing import Any

import pytest
from tracing_support import FakeBackend, NoBackend, trace

from endoscope.errors import EngineClosedError, PromptError, SerializationError, UnsupportedError, UsageError
from endoscope.tracing import Backend, Invoke, Tracer


def test_invokes_are_in_order_and_their_sampling_is_merged() -> None:
    backend = NoBackend()
    with trace(backend=backend, max_tokens=5, temperature=0.0) as tracer:
        prompts = []
        for prompt in ("a", "b"):
            prompts.append(prompt)
            with tracer.invoke(prompt, temperature=1.0):
                x = prompt
        with tracer.invoke("c"):
            y = 1
    assert prompts == ["a", "b"]
    assert [invoke.prompt for invoke in tracer.invokes] == ["a", "b", "c"]
    assert [invoke.index for invoke in tracer.invokes] == [0, 1, 2]
    assert tracer.invokes[0].sampling == {"max_tokens": 5, "temperature": 1.0}
    assert tracer.invokes[2].sampling == {"max_tokens": 5, "temperature": 0.0}
    assert backend.tracer is tracer
    assert tracer.file == __file__
    assert tracer.line == test_invokes_are_in_order_and_their_sampling_is_merged.__code__.co_firstlineno + 2


def test_an_invoke_in_a_helper_binds_there() -> None:
    def helper(tracer: Tracer) -> Any:
        with tracer.invoke("p"):
            in_helper = 1
        return lambda: in_helper

    with trace() as tracer:
        read = helper(tracer)
    assert read() == 1
    assert "in_helper" not in locals()


def test_names_of_several_invokes_are_bound_each_in_its_frame() -> None:
    class Once(Backend):
        def __call__(self, tracer: Tracer) -> None:
            tracer.bind({"x": 5, "model.logits": 6, "not a name": 7})

    with trace(backend=Once()) as tracer:
        with tracer.invoke("a"):
            x = 1
        with tracer.invoke("b"):
            x = 2
    assert x == 5
    assert "model.logits" not in locals()


def test_bind_only_while_the_trace_is_left() -> None:
    with trace("p", NoBackend()) as tracer:
        x = 1
    with pytest.raises(UsageError, match="names can be bound only while"):
        tracer.bind({"x": 1})
    assert "x" not in locals()


def test_an_error_in_the_glue_submits_nothing() -> None:
    backend = NoBackend()
    with pytest.raises(ZeroDivisionError) as caught:
        with trace(backend=backend) as tracer:
            with tracer.invoke("p"):
                x = 1
            1 / 0  # noqa: B018
    assert backend.tracer is None
    assert caught.value.__context__ is None


def test_misuse() -> None:
    with pytest.raises(UsageError, match="neither a prompt nor an invoke"):
        with trace():
            pass
    with trace("p", NoBackend()) as tracer:
        x = 1
    with pytest.raises(UsageError, match="a prompt of its own"):
        tracer.invoke("q")
    with trace(backend=NoBackend()) as tracer:
        with tracer.invoke("p"):
            x = 1
    with pytest.raises(UsageError, match="has ended"):
        tracer.invoke("q")
    with pytest.raises(UsageError, match="not entered yet"):
        trace().invoke("q")
    with pytest.raises(UsageError, match="used once"):
        with tracer:
            x = 2
    with pytest.raises(UsageError, match="called 1 times and entered 0 times"):
        with trace() as tracer:
            tracer.invoke("p")
    with pytest.raises(UsageError, match="this invoke was already entered"):
        with trace() as tracer:
            once = tracer.invoke("p")
            with once:
                x = 1
            with once:
                x = 2
    assert "x" not in locals()


def test_an_invoke_inside_another_cannot_be_entered() -> None:
    with pytest.raises(UsageError, match="cannot stand inside another invoke"):
        with trace() as tracer:
            with tracer.invoke("p") as tracer.result, tracer.invoke("q"):
                x = 1
            tracer._current = tracer.invokes[0]
            tracer.invoke("q")
    assert "x" not in locals()


@pytest.mark.parametrize("name", ["iter", "all", "next", "stop", "cache", "emit"])
def test_what_means_something_only_in_a_block(name: str) -> None:
    with pytest.raises(UsageError, match=rf"tracer\.{name} means something only inside a block"):
        getattr(trace("p"), name)


def test_barrier_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"tracer\.barrier.*independently"):
        trace("p").barrier  # noqa: B018
    with pytest.raises(AttributeError, match="'Tracer' object has no attribute 'nonsense'"):
        trace("p").nonsense  # noqa: B018


def test_references_travel_as_keys() -> None:
    class Model:
        pass

    model, engine_model = Model(), object()
    backend = FakeBackend({("model",): engine_model})
    with Tracer(backend, "p", {}, lambda: {id(model): ("model",)}) as tracer:
        got = (model, tracer)
    assert got == (engine_model, tracer)
    assert Invoke(tracer, "p", {}).reference() == trace("p").reference() == ("tracer",)


def test_the_tracer_of_a_trace_that_has_ended_does_not_stand_for_another() -> None:
    with trace("p") as old:
        x = 1
    with pytest.raises(SerializationError, match="the tracer of another trace") as caught:
        with trace("p"):
            y = old.result
    assert "'old'" in str(caught.value)


def test_a_backend_without_a_call_says_so() -> None:
    with pytest.raises(NotImplementedError, match="define __call__"):
        with trace("p", Backend()):
            pass


class Failing(Backend):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self, tracer: Tracer) -> None:
        self.deeper()

    def deeper(self) -> None:
        raise self.error


def shown(error: BaseException) -> list[str]:
    return [entry.filename for entry in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("several", [False, True])
def test_tracebacks_show_the_user_only(several: bool) -> None:
    for error in (PromptError("bad prompt"), EngineClosedError("closed")):
        with pytest.raises(type(error)) as caught:
            if several:
                with trace(backend=Failing(error)) as tracer:
                    with tracer.invoke("p"):
                        x = 1
            else:
                with trace("p", Failing(error)):
                    x = 1
        assert shown(caught.value) == [__file__]
        assert caught.value.__context__ is None
    assert "x" not in locals()


def test_a_traceback_that_comes_with_the_error_is_shown() -> None:
    try:
        exec(compile("1 / 0", "block.py", "exec"))
    except ZeroDivisionError as made:
        error: Any = made
    inner = error.__traceback__.tb_next
    error.__endoscope_traceback__ = inner
    with pytest.raises(ZeroDivisionError) as caught:
        with trace("p", Failing(error)):
            pass
    assert shown(caught.value) == [__file__, "block.py"]
    assert caught.value.__context__ is None


def test_other_errors_keep_their_traceback_but_not_the_machinery_as_context() -> None:
    with pytest.raises(KeyError) as caught:
        with trace("p", Failing(KeyError("x"))):
            y = 1
    assert caught.value.__context__ is None
    assert shown(caught.value)[-1] == __file__
    assert len(shown(caught.value)) > 2
    assert "y" not in locals()


def test_errors_on_entering_are_clean_too() -> None:
    with pytest.raises(UsageError) as caught:
        trace("p").__enter__()
    assert shown(caught.value) == [__file__]
    with pytest.raises(UsageError) as caught:
        trace().invoke("p")
    assert len(shown(caught.value)) <= 2


class Marked:
    """A value in a frame whose death can be seen."""


@pytest.mark.parametrize("fails", [False, True])
def test_no_frame_is_kept(fails: bool) -> None:
    kept: list[Any] = []

    class Plain(Backend):
        def __call__(self, tracer: Tracer) -> None:
            if fails:
                raise PromptError("no")

    backend = Plain()

    def run() -> weakref.ref[Marked]:
        marked = Marked()
        tracer = trace("p", backend)
        kept.append(tracer)
        try:
            with tracer:
                x = 1
        except PromptError:
            pass
        several = trace(backend=backend)
        kept.append(several)
        try:
            with several as glue:
                with glue.invoke("p"):
                    y = 2
        except PromptError:
            pass
        return weakref.ref(marked)

    gc.collect()
    gc.disable()
    try:
        reference = run()
        if sys.gettrace() is None:  # coverage and debuggers may keep frames
            assert reference() is None
    finally:
        gc.enable()
    assert len(kept) == 2


def test_a_finished_trace_is_freed_without_the_collector() -> None:
    class Plain(Backend):
        def __call__(self, tracer: Tracer) -> None:
            tracer.bind({"x": 1})

    def run() -> weakref.ref[Tracer]:
        with trace("p", Plain()) as tracer:
            x = 1
        return weakref.ref(tracer)

    gc.collect()
    gc.disable()
    try:
        reference = run()
        assert reference() is None
    finally:
        gc.enable()
