"""The asynchronous path: what the stream yields, what it carries home, and every way of leaving it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held, python, script, tokens_of
from oracle import assert_close, assert_steps_close

from endoscope import AsyncVLLMBackend, Backend
from endoscope.errors import BlockError, EventLoopError, UsageError
from tests.conftest import options_of, path_of

LONG = 400  # tokens: more than any test waits for


@pytest.fixture
async def model(async_model: Any) -> Any:
    """The asynchronous tiny Llama, with nothing left over in it after the test."""
    model = async_model("tiny-llama")
    if model._engine is None:
        model.start()
    yield model
    await nothing_left(model)


@pytest.fixture
def its(oracle: Any) -> Any:
    """The oracle of the tiny Llama."""
    return oracle("tiny-llama")


def unfinished(model: Any) -> int:
    """How many requests the client's side of the engine follows."""
    return int(model.engine.llm.output_processor.get_num_unfinished_requests())


def texts_of(outputs: list[Any]) -> list[str]:
    """The text of each. vLLM's outputs of one request share the list of its tokens, which grows on; texts stay."""
    return [output.outputs[0].text for output in outputs]


async def nothing_left(model: Any) -> None:
    """Wait until nothing is left in the engine, for as many of its answers as a few steps make."""
    for _ in range(50):
        counts = held(await model.debug())
        if counts == NOTHING_LEFT and not unfinished(model):
            break
    assert counts == NOTHING_LEFT
    assert unfinished(model) == 0
    assert model.engine.inbox.arrivals == {}


def long_trace(model: Any, prompt: str = PROMPTS[0]) -> Any:
    """A trace that would run on for hundreds of steps, keeping a value of each."""
    with model.trace(prompt, max_tokens=LONG, **GREEDY) as tracer:
        streams = [].save()
        for _ in tracer.iter[:]:
            streams.append(model.model.layers[1].resid_post)
    return tracer


# What the stream is


async def test_async_runs_on_async_llm(model: Any) -> None:  # contract: A1, A13
    """The engine is `AsyncLLM`; leaving the `with` returns nothing, and the tracer's backend is the stream."""
    from vllm.v1.engine.async_llm import AsyncLLM

    assert isinstance(model.engine.llm, AsyncLLM)
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        pass
    assert tracer.result is None
    assert type(tracer.backend) is AsyncVLLMBackend
    assert (await tracer.backend).finished


async def test_the_body_never_runs_in_the_caller(model: Any) -> None:  # contract: A2
    """The request is submitted when the block is left, before anybody asks for an output."""
    ran = []
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        ran.append("in the engine")
        ran.save()
    assert ran == []
    assert unfinished(model) == 1
    output = await tracer.backend
    assert output.saves["ran"] == ["in the engine"]
    assert ran == []


async def test_the_stream_outlives_the_frame(model: Any, its: Any) -> None:  # contract: A2
    """The function that wrote the block has returned, and its variables have changed, when the stream is read."""

    def write() -> Any:
        scale = 2.0
        with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
            doubled = (model.logits * scale).save()
        scale = 100.0
        return tracer.backend

    backend = write()
    output = await backend
    assert_close(output.saves["doubled"], its.run(PROMPTS[0], 1, [("logits", None)])["logits", None][0] * 2)


async def test_an_output_for_every_step(model: Any, its: Any) -> None:  # contract: A3, A4
    """vLLM's own `RequestOutput` for each step; `saves` is there on all and filled on the finished one only."""
    from vllm import RequestOutput

    with model.trace(PROMPTS[0], max_tokens=6, **GREEDY) as tracer:
        logits = model.logits.save()
    outputs = [output async for output in tracer.backend]
    run = its.run(PROMPTS[0], 6, [("logits", None)])
    assert all(type(output) is RequestOutput for output in outputs)
    assert tokens_of(outputs[-1]) == run.tokens
    assert texts_of(outputs) == [its.text(run.tokens[: count + 1]) for count in range(6)]
    assert [output.finished for output in outputs] == [False] * 5 + [True]
    assert [output.saves for output in outputs[:-1]] == [{}] * 5
    assert set(outputs[-1].saves) == {"logits"}
    assert_close(outputs[-1].saves["logits"], run["logits", None][0])


async def test_outputs_that_hold_only_what_is_new(model: Any, its: Any) -> None:  # contract: A3
    """vLLM's `output_kind` is the user's to choose."""
    from vllm.sampling_params import RequestOutputKind

    with model.trace(PROMPTS[0], max_tokens=4, output_kind=RequestOutputKind.DELTA, **GREEDY) as tracer:
        logits = model.logits.save()
    outputs = [output async for output in tracer.backend]
    assert [token for output in outputs for token in tokens_of(output)] == its.run(PROMPTS[0], 4).tokens
    assert set(outputs[-1].saves) == {"logits"}


async def test_await_returns_the_finished_output(model: Any, its: Any) -> None:  # contract: A5
    """One output, with its saves and its number."""
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        stream = model.model.layers[2].resid_post.save()
    output = await tracer.backend
    run = its.run(PROMPTS[0], 3, [("resid_post", 2)])
    assert output.finished
    assert output.invoke == 0
    assert tokens_of(output) == run.tokens
    assert_close(output.saves["stream"], run["resid_post", 2][0])


async def test_a_saved_name_stays_unbound(model: Any) -> None:  # contract: A6
    """Neither a new name nor one that was bound before is written in the caller's frame."""
    kept = "before"
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        logits = model.logits.save()
        kept = logits.argmax().save()
    output = await tracer.backend
    assert set(output.saves) == {"logits", "kept"}
    assert kept == "before"
    with pytest.raises(UnboundLocalError):
        print(logits)


async def test_an_error_comes_out_where_the_end_would_be(model: Any, its: Any) -> None:  # contract: A7, D1
    """The outputs before it are yielded; then it is raised, with what was saved on it."""
    with model.trace(PROMPTS[0], max_tokens=8, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            logits = model.logits.save()
            token = model.samples.save()
            if step == 2:
                {}["missing"]
    outputs = []
    with pytest.raises(KeyError) as caught:
        async for output in tracer.backend:
            outputs.append(output)
    run = its.run(PROMPTS[0], 3, [("logits", None)])
    assert isinstance(caught.value, BlockError)
    texts = [its.text(run.tokens[: count + 1]) for count in range(3)]
    assert texts_of(outputs)[:2] == texts[:2]
    assert texts_of(outputs)[2:] in ([], texts[2:])
    assert not any(output.finished for output in outputs)
    assert caught.value.output.finished
    assert tokens_of(caught.value.output) == run.tokens
    assert_close(caught.value.output.saves["logits"], run["logits", None][2])
    assert caught.value.output.saves["token"].tolist() == [run.tokens[2:]]


async def test_an_error_comes_out_of_await(model: Any, its: Any) -> None:  # contract: A7
    """The same for `await`; a twin without the error is not touched."""
    with model.trace(PROMPTS[0], max_tokens=4, **GREEDY) as failing:
        rows = model.model.layers[0].resid_post.shape[0]
        rows.save()
        raise ValueError("no")
    with model.trace(PROMPTS[0], max_tokens=4, **GREEDY) as twin:
        pass
    with pytest.raises(ValueError, match="no") as caught:
        await failing.backend
    assert caught.value.output.saves == {"rows": len(its.tokens(PROMPTS[0]))}
    assert tokens_of(await twin.backend) == its.run(PROMPTS[0], 4).tokens


@pytest.mark.parametrize("first", ["iterated", "awaited", "broken off"])
async def test_a_stream_is_consumed_once(first: str, model: Any) -> None:  # contract: A8
    """A second iteration ends at once and a second `await` gives `None`; both warn with the trace's place."""
    line = sys._getframe().f_lineno + 1
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        pass
    if first == "iterated":
        assert len([output async for output in tracer.backend]) == 3
    elif first == "awaited":
        assert (await tracer.backend).finished
    else:
        async for _ in tracer.backend:
            break
    place = f"{__file__}:{line}"
    with pytest.warns(RuntimeWarning) as warned:
        assert [output async for output in tracer.backend] == []
    assert len(warned) == 1
    assert place in str(warned[0].message)
    assert warned[0].filename == __file__
    with pytest.warns(RuntimeWarning) as warned:
        assert await tracer.backend is None
    assert len(warned) == 1
    assert place in str(warned[0].message)


async def test_a_backend_that_the_user_builds(model: Any, its: Any) -> None:  # contract: A13
    """It is constructed with the model, called with the tracer on exit, and carries one trace."""
    assert issubclass(AsyncVLLMBackend, Backend)

    class Counting(AsyncVLLMBackend):
        calls = 0

        def __call__(self, tracer: Any) -> None:
            self.calls += 1
            super().__call__(tracer)

    backend = Counting(model)
    with model.trace(PROMPTS[0], backend=backend, max_tokens=2, **GREEDY) as tracer:
        logits = model.logits.save()
    assert tracer.backend is backend
    assert backend.calls == 1
    output = await backend
    assert tokens_of(output) == its.run(PROMPTS[0], 2).tokens
    assert set(output.saves) == {"logits"}
    with pytest.raises(UsageError, match="one trace"), model.trace(PROMPTS[0], backend=backend):
        pass
    with pytest.warns(RuntimeWarning, match="never submitted"):
        assert await AsyncVLLMBackend(model) is None


# Several prompts


async def test_case_03_several_prompts_interleaved(model: Any, its: Any) -> None:  # contract: A11
    """The outputs of all come as they are made, each with its number, and the values of its own prompt."""
    counts = (6, 2, 4)
    with model.trace(**GREEDY) as tracer:
        for prompt, count in zip(PROMPTS, counts, strict=False):
            with tracer.invoke(prompt, max_tokens=count):
                logits = [].save()
                for _ in tracer.iter[:]:
                    logits.append(model.logits)
    outputs = [output async for output in tracer.backend]
    order = [output.invoke for output in outputs]
    assert order != sorted(order), "the outputs of one prompt came all before those of the next"
    for number, count in enumerate(counts):
        mine = [output for output in outputs if output.invoke == number]
        run = its.run(PROMPTS[number], count, [("logits", None)])
        assert texts_of(mine) == [its.text(run.tokens[: n + 1]) for n in range(count)]
        assert tokens_of(mine[-1]) == run.tokens
        assert [output.finished for output in mine] == [False] * (count - 1) + [True]
        assert [output.saves for output in mine[:-1]] == [{}] * (count - 1)
        assert_steps_close(mine[-1].saves["logits"], run["logits", None])


async def test_await_of_several_prompts_is_a_list(model: Any, its: Any) -> None:  # contract: A11
    """In the order of the invokes, though they finish in another; also when there is a single invoke."""
    with model.trace(**GREEDY) as tracer:
        for prompt, count in zip(PROMPTS, (5, 3, 1), strict=False):
            with tracer.invoke(prompt, max_tokens=count):
                rows = model.model.layers[0].resid_pre.shape[0]
                rows.save()
    outputs = await tracer.backend
    assert [output.invoke for output in outputs] == [0, 1, 2]
    assert [tokens_of(output) for output in outputs] == [
        its.run(prompt, count).tokens for prompt, count in zip(PROMPTS, (5, 3, 1), strict=False)
    ]
    assert [output.saves["rows"] for output in outputs] == [len(its.tokens(prompt)) for prompt in PROMPTS[:3]]
    with model.trace(max_tokens=1, **GREEDY) as tracer, tracer.invoke(PROMPTS[0]):
        pass
    assert [output.invoke for output in await tracer.backend] == [0]


async def test_case_19_an_error_in_one_of_several_prompts(model: Any, its: Any) -> None:  # contract: A7, A11, D1
    """The others are yielded to their end, and then the error is raised."""
    with model.trace(max_tokens=4, **GREEDY) as tracer:
        for number in range(3):
            with tracer.invoke(PROMPTS[number]):
                logits = model.logits.save()
                1 / (number - 1)
    finished = {}
    with pytest.raises(ZeroDivisionError) as caught:
        async for output in tracer.backend:
            if output.finished:
                finished[output.invoke] = output
    assert set(finished) == {0, 2}
    for number, output in finished.items():
        run = its.run(PROMPTS[number], 4, [("logits", None)])
        assert tokens_of(output) == run.tokens
        assert_close(output.saves["logits"], run["logits", None][0])
    assert caught.value.output.invoke == 1
    assert set(caught.value.output.saves) == {"logits"}


async def test_case_01_stop_in_one_of_several_requests(model: Any, its: Any) -> None:  # contract: C6
    """That request ends; the others of the batch run to their end."""
    with model.trace(max_tokens=6, **GREEDY) as tracer:
        for number in range(3):
            with tracer.invoke(PROMPTS[number]):
                for step in tracer.iter[:]:
                    token = model.samples.save()
                    if number == 1 and step == 2:
                        tracer.stop()
    outputs = await tracer.backend
    for number, count in enumerate((6, 3, 6)):
        run = its.run(PROMPTS[number], count)
        assert tokens_of(outputs[number]) == run.tokens
        assert outputs[number].outputs[0].text == its.text(run.tokens)
        assert outputs[number].saves["token"].tolist() == [run.tokens[-1:]]


async def test_case_10_a_loop_that_outruns_the_request(model: Any, its: Any) -> None:  # contract: C5
    """Every save is kept, and the code after the loop runs."""
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        seen = [].save()
        for _ in tracer.iter[:]:
            seen.append(model.logits)
        after = len(seen).save()
    output = await tracer.backend
    assert output.saves["after"] == 3
    assert_steps_close(output.saves["seen"], its.run(PROMPTS[0], 3, [("logits", None)])["logits", None])


async def test_case_26_n_sequences(model: Any) -> None:  # contract: B3
    """With `n=3` the finished output has three values for each name, in the order of its sequences."""
    with model.trace(PROMPTS[0], max_tokens=3, n=3, temperature=1.0, seed=7, ignore_eos=True) as tracer:
        tokens = [].save()
        for _ in tracer.iter[:]:
            tokens.append(int(model.samples))
    output = await tracer.backend
    assert output.saves["tokens"] == [list(sequence.token_ids) for sequence in output.outputs]
    assert len(output.outputs) == 3


async def test_case_37_a_stop_string_while_the_block_waits(model: Any, its: Any) -> None:
    """The front end ends the request; what was saved comes home without an error."""
    run = its.run(PROMPTS[0], 5)
    stop = its.text(run.tokens[2:3])
    ends = next(n for n in range(1, 6) if stop in its.text(run.tokens[:n]))
    with model.trace(PROMPTS[0], max_tokens=LONG, stop=[stop], **GREEDY) as tracer:
        seen = [].save()
        for _ in tracer.iter[:]:
            seen.append(int(model.samples))
        after = "ran".save()
    output = await tracer.backend
    assert stop.strip()
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason == stop
    assert stop not in output.outputs[0].text
    assert output.saves["seen"][:ends] == run.tokens[:ends]
    assert output.saves["after"] == "ran"


async def test_generate_without_a_block(model: Any, its: Any) -> None:  # contract: B4
    """A stream of the same kind, awaited for the list of outputs."""
    outputs = await model.generate(list(PROMPTS), max_tokens=2, **GREEDY)
    assert [tokens_of(output) for output in outputs] == [its.run(prompt, 2).tokens for prompt in PROMPTS]
    assert [output.saves for output in outputs] == [{}] * len(PROMPTS)


# Leaving early (A9, and cases 24 and 25)


async def test_case_24_aclose_of_the_backend(model: Any) -> None:  # contract: A9
    """Before it returns, the engine has freed the request and its probe."""
    tracer = long_trace(model)
    await tracer.backend.aclose()
    assert held(await model.debug()) == NOTHING_LEFT
    assert unfinished(model) == 0
    await tracer.backend.aclose()


async def test_case_24_aclose_of_the_iterator(model: Any) -> None:  # contract: A9
    """In the middle of the stream; what is asked for afterwards ends at once."""
    stream = aiter(long_trace(model).backend)
    await anext(stream)
    assert (await model.debug())["probes"] == 1
    await stream.aclose()
    assert held(await model.debug()) == NOTHING_LEFT
    assert unfinished(model) == 0
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_case_24_break(model: Any) -> None:  # contract: A9
    """A bare `break`; nothing else holds the stream."""
    async for output in long_trace(model).backend:
        assert not output.finished
        break
    await nothing_left(model)


async def test_case_24_an_exception_in_the_body_of_the_loop(model: Any) -> None:  # contract: A9
    """The exception is the caller's own, and the request is aborted."""

    async def consume() -> str:
        try:
            async for _ in long_trace(model).backend:
                raise LookupError("the caller's own")
        except LookupError as error:
            return str(error)
        return ""

    assert await consume() == "the caller's own"
    await nothing_left(model)


@pytest.mark.parametrize("how", ["iterating", "awaiting"])
async def test_case_24_a_task_cancelled_while_it_waits(how: str, model: Any) -> None:  # contract: A9
    """The task ends as cancelled, and the request is aborted."""
    begun = asyncio.Event()

    async def consume() -> None:
        tracer = long_trace(model)
        begun.set()
        if how == "awaiting":
            await tracer.backend
        async for _ in tracer.backend:
            pass

    task = asyncio.create_task(consume())
    await begun.wait()
    while (await model.debug())["requests"] == 0:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    await nothing_left(model)


@pytest.mark.parametrize("taken", [True, False])
async def test_case_24_dropped_without_being_iterated(taken: bool, model: Any) -> None:  # contract: A9
    """The iterator, or the backend itself, is dropped before anybody asked it for an output."""
    tracer = long_trace(model)
    stream = aiter(tracer.backend) if taken else tracer.backend
    assert unfinished(model) == 1
    del tracer, stream
    await nothing_left(model)


async def test_leaving_early_leaves_the_others_alone(model: Any, its: Any) -> None:  # contract: A9
    """A twin in the same batch runs to its end with the oracle's values."""
    leaving = aiter(long_trace(model).backend)
    with model.trace(PROMPTS[2], max_tokens=12, **GREEDY) as tracer:
        logits = [].save()
        for _ in tracer.iter[:]:
            logits.append(model.logits)
    staying = aiter(tracer.backend)
    await anext(leaving)
    await anext(staying)
    await leaving.aclose()
    async for output in staying:
        last = output
    run = its.run(PROMPTS[2], 12, [("logits", None)])
    assert tokens_of(last) == run.tokens
    assert_steps_close(last.saves["logits"], run["logits", None])


async def test_case_24_waiting_for_one_output_is_cancelled(model: Any) -> None:  # contract: A9
    """A limit on the time of one step ends the stream, as it would end any generator, and aborts the request."""
    stream = aiter(long_trace(model).backend)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # lets it begin to wait
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert [output async for output in stream] == []
    await nothing_left(model)


async def test_case_25_a_waiting_coroutine_wakes_when_the_stream_is_closed(model: Any) -> None:  # contract: A9
    """Somebody else closes the stream: the loop that waits for its next output ends."""
    stream = aiter(long_trace(model).backend)
    await anext(stream)

    async def consume() -> str:
        async for _ in stream:
            pass
        return "woken"

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)  # lets it begin to wait
    await stream.aclose()
    async with asyncio.timeout(30):
        assert await task == "woken"


async def test_case_25_a_waiting_coroutine_wakes_when_vllm_aborts(model: Any) -> None:
    """The request is aborted by its id: the stream ends with vLLM's aborted output, and the saves are kept."""
    stream = aiter(long_trace(model).backend)
    first = await anext(stream)
    last = first

    async def consume() -> Any:
        nonlocal last
        async for output in stream:
            last = output
        return last

    task = asyncio.create_task(consume())
    await asyncio.sleep(0)  # lets it begin to wait
    await model.engine.llm.abort(first.request_id)
    async with asyncio.timeout(30):
        output = await task
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.saves["streams"]) >= 1


# Event loops


async def test_another_event_loop_is_refused_at_once(model: Any) -> None:  # contract: A14
    """A trace, a plain generation and a question from a loop in another thread; nothing is submitted."""

    async def elsewhere() -> list[str]:
        said = []
        for use in (lambda: long_trace(model), lambda: model.generate(PROMPTS[0])):
            with pytest.raises(EventLoopError) as caught:
                use()
            said.append(str(caught.value))
        with pytest.raises(EventLoopError) as caught:
            await model.debug()
        return [*said, str(caught.value)]

    said = await asyncio.to_thread(lambda: asyncio.run(elsewhere()))
    assert len(said) == 3
    for text in said:
        assert "event loop" in text
        assert "VLLM for each loop" in text
    assert unfinished(model) == 0


async def test_no_event_loop_is_refused_at_once(model: Any) -> None:  # contract: A14
    """Where no loop runs the error says what to do."""

    def nowhere() -> str:
        with pytest.raises(EventLoopError) as caught:
            long_trace(model)
        return str(caught.value)

    said = await asyncio.to_thread(nowhere)
    assert "running event loop" in said
    assert 'mode="sync"' in said
    assert unfinished(model) == 0


# An engine of its own that ends


SCRIPT = f"""
import asyncio, json, signal, warnings
import psutil
from vllm.v1.engine.exceptions import EngineDeadError
from endoscope import VLLM
from endoscope.errors import EventLoopError, EngineClosedError

warnings.simplefilter("error", RuntimeWarning)
seen = {{}}


def children():
    # Python's own helper for shared memory stays until the program ends.
    return [c for c in psutil.Process().children(recursive=True) if "resource_tracker" not in "".join(c.cmdline())]


def new():
    return VLLM({path_of("tiny-llama")!r}, mode="async", **{options_of("tiny-llama")!r})


def trace(model):
    with model.trace("hello there", max_tokens=400, temperature=0.0, ignore_eos=True) as tracer:
        for step in tracer.iter[:]:
            model.logits.sum()
    return tracer.backend


def several(model):
    with model.trace(max_tokens=400, temperature=0.0, ignore_eos=True) as tracer:
        for prompt in ("one", "two"):
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    model.model.layers[1].output
    return tracer.backend


async def iterate(backend, begun):
    async for _ in backend:
        begun.set()


async def wait(backend):
    await backend


async def ends(task):
    try:
        await asyncio.wait_for(task, 60)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


async def killed():
    model = new()
    begun = [asyncio.Event() for _ in range(2)]
    tasks = [
        asyncio.create_task(iterate(trace(model), begun[0])),
        asyncio.create_task(iterate(several(model), begun[1])),
        asyncio.create_task(wait(trace(model))),
        asyncio.create_task(wait(several(model))),
        asyncio.create_task(wait(model.generate("plain", max_tokens=400, ignore_eos=True))),
    ]
    for event in begun:
        await event.wait()
    started = children()
    for child in started:
        child.send_signal(signal.SIGKILL)
    seen["killed"] = [await ends(task) for task in tasks]
    try:
        await wait(trace(model))
    except Exception as error:
        seen["later"] = type(error).__name__
    model.close()
    seen["left after the kill"] = len(psutil.wait_procs(started, timeout=30)[1])


async def closed():
    async with new() as model:
        begun = asyncio.Event()
        task = asyncio.create_task(iterate(trace(model), begun))
        await begun.wait()
        started = children()
    seen["closed"] = await ends(task)
    seen["left after the close"] = len(psutil.wait_procs(started, timeout=30)[1])
    return model


asyncio.run(killed())
model = asyncio.run(closed())
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def script_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script saw whose engines end under it."""
    done = python(script(tmp_path_factory.mktemp("stream"), SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


def test_script_a_dead_engine_wakes_every_consumer(script_run: dict[str, Any]) -> None:  # contract: D6
    """Whoever iterates or awaits, one prompt or several, gets vLLM's `EngineDeadError`; so does who comes later."""
    assert script_run["killed"] == ["EngineDeadError"] * 5
    assert script_run["later"] == "EngineDeadError"
    assert script_run["left after the kill"] == 0


def test_script_async_with_ends_every_process(script_run: dict[str, Any]) -> None:  # contract: B4
    """`async with VLLM(...)` ends the engine, and a consumer that still waits is told that the model was closed."""
    assert script_run["left after the close"] == 0
    assert script_run["closed"] == "EngineClosedError"


async def test_what_was_emitted_is_on_the_output_of_its_step(model: Any) -> None:
    """Also when the request is over before anybody looks at its outputs."""
    with model.trace(PROMPTS[0], max_tokens=5, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            logits = model.logits
            tracer.emit(step=step, top=logits.argmax().item())
            tracer.emit(step=-step)
    while unfinished(model):
        await asyncio.sleep(0)
    steps = []
    async for output in tracer.backend:
        steps.append(output.emits["step"])
        assert output.emits["top"] == output.outputs[0].token_ids[-1]
    assert steps == [[step, -step] for step in range(5)]
