"""A block that fails: its own request ends, the caller gets the error as if raised at home, and nobody else notices."""

from __future__ import annotations

import asyncio
import traceback
import warnings
from typing import Any

import pytest
import torch
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held, layers_of, tokens_of
from oracle import assert_steps_close

from endoscope.errors import BlockError, EndoscopeError, EngineError, TraceError


@pytest.fixture
def model(sync_model: Any) -> Any:
    """The synchronous tiny Llama, with nothing left over in it after the test."""
    model = sync_model("tiny-llama")
    yield model
    assert held(model.debug()) == NOTHING_LEFT


class OwnError(Exception):
    """A user's own exception."""


class OwnInitError(Exception):
    """One whose arguments are not those of its base, and that keeps more than a message."""

    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{reason} ({code})")
        self.code = code
        self.reason = reason


class UnpicklableError(Exception):
    """One that holds what cannot travel."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.generator = (number for number in range(3))


def failing_helper(value: Any) -> Any:
    ratio = value.shape[0] / 0
    return ratio


# D1: nobody else notices


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "smollm2"])
@pytest.mark.parametrize("at", [0, 2])
# contract: D1
def test_sync_case_19_the_rest_of_the_batch_is_bit_for_bit_the_same(
    name: str, at: int, sync_model: Any, oracle: Any
) -> None:
    """Beside a failing block, the others give bit for bit what they give where that block stops instead.

    The comparison has the same requests in the same batches, since other batches sum in another order.
    """
    model, its = sync_model(name), oracle(name)
    layer = layers_of(model)[1]
    found = []
    for fails in (False, True):
        try:
            with model.trace(max_tokens=5, **GREEDY) as tracer:
                with tracer.invoke(PROMPTS[0]):
                    values = [].save()
                    for _ in tracer.iter[:]:
                        values.extend([layer.resid_post, model.logits])
                with tracer.invoke(PROMPTS[2]):
                    for step in tracer.iter[:]:
                        layer.resid_pre.mul_(2.0)
                        if step == at:
                            if fails:
                                raise OwnError
                            tracer.stop()
                with tracer.invoke(PROMPTS[3]):
                    values = [].save()
                    for _ in tracer.iter[:]:
                        values.extend([layer.resid_post, model.logits])
                with tracer.invoke(PROMPTS[1]):
                    pass
            assert not fails
        except OwnError:
            assert fails
        found.append((tracer.saves["values"], [tokens_of(output) for output in tracer.result]))
    (calm, calm_tokens), (beside, beside_tokens) = found
    assert beside_tokens == calm_tokens
    for mine, its_own in zip(beside, calm, strict=True):
        assert len(mine) == 2 * 5
        assert all(torch.equal(one, other) for one, other in zip(mine, its_own, strict=True))
    run = its.run(PROMPTS[0], 5, [("logits", None)])
    assert beside_tokens[0] == run.tokens
    assert_steps_close(beside[0][1::2], run["logits", None])
    assert held(model.debug()) == NOTHING_LEFT


def test_sync_the_engine_serves_on_after_many_errors(model: Any, oracle: Any) -> None:  # contract: D1
    """Every request of a batch fails, each in its own way; the next trace is served as ever."""
    with pytest.raises(BlockError) as caught, model.trace(max_tokens=4, **GREEDY) as tracer:
        for number in range(8):
            with tracer.invoke(PROMPTS[number % 4]):
                for step in tracer.iter[:]:
                    if step == number % 3:
                        {0: 1}[number + 1]
                    model.logits.sum()
    assert isinstance(caught.value, KeyError)
    assert len(caught.value.__notes__) == 7
    assert len(tracer.result) == 8
    assert held(model.debug()) == NOTHING_LEFT
    (output,) = model.generate(PROMPTS[0], max_tokens=3, **GREEDY)
    assert tokens_of(output) == oracle("tiny-llama").run(PROMPTS[0], 3).tokens


def test_sync_saves_from_before_an_error_are_kept(model: Any) -> None:  # contract: D1
    """They are bound in the frame, and stand on the error's finished output."""
    logits = None
    with pytest.raises(OwnError) as caught, model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        logits = model.logits.save()
        raise OwnError("later")
    assert logits is not None
    assert caught.value.output is tracer.result
    assert caught.value.output.finished
    assert torch.equal(caught.value.output.saves["logits"], logits)
    assert caught.value.request == tracer.result.request_id


# D2: what it is raised as


@pytest.mark.parametrize("number", range(6))
def test_sync_an_error_is_of_its_own_class_and_a_block_error(number: int, model: Any) -> None:  # contract: D2
    """Built-in classes and the user's own, also one whose arguments are not its base's."""
    kind, said = [
        (ZeroDivisionError, "division by zero"),
        (KeyError, "'no such key'"),
        (OSError, "[Errno 2] not here: 'file'"),
        (OwnError, "('own', 3)"),
        (OwnInitError, "too much (7)"),
        (UnicodeDecodeError, "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
    ][number]
    with pytest.raises(kind) as caught, model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        model.logits.sum()
        if number == 0:
            _ = 1 / 0
        elif number == 1:
            {}["no such key"]
        elif number == 2:
            raise FileNotFoundError(2, "not here", "file")
        elif number == 3:
            raise OwnError("own", 3)
        elif number == 4:
            raise OwnInitError(7, reason="too much")
        else:
            b"\xff".decode()
    error = caught.value
    for base in (BlockError, RuntimeError, EndoscopeError, Exception):
        assert isinstance(error, base)
    assert not isinstance(error, (TraceError, EngineError))
    assert str(error) == said
    assert type(error).__name__ == (kind.__name__ if number != 2 else "FileNotFoundError")
    if number == 2:
        assert (error.errno, error.strerror, error.filename) == (2, "not here", "file")
    if number == 4:
        assert (error.code, error.reason) == (7, "too much")


@pytest.mark.parametrize("number", range(3))
def test_sync_errors_that_cannot_be_raised_again_as_they_are(number: int, model: Any) -> None:  # contract: D2
    """An error that cannot travel, and those that would end the caller's program, arrive as `BlockError`."""
    with pytest.raises(BlockError) as caught, model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        model.logits.sum()
        if number == 0:
            raise UnpicklableError("holds a generator")
        if number == 1:
            raise SystemExit("leave")
        raise KeyboardInterrupt
    said = str(caught.value)
    assert ("UnpicklableError", "SystemExit", "KeyboardInterrupt")[number] in said
    assert ("holds a generator", "leave", "")[number] in said
    assert not isinstance(caught.value, (SystemExit, KeyboardInterrupt))


def test_sync_case_33_a_name_that_is_nowhere(model: Any) -> None:  # contract: C1, D2
    """`NameError` at the user's line, also for a name that is bound only behind the block."""
    with pytest.raises(NameError, match="nowhere_at_all") as caught, model.trace(PROMPTS[0], max_tokens=1):
        model.logits.sum()
        nowhere_at_all  # noqa: B018, F821
    assert isinstance(caught.value, BlockError)
    with pytest.raises(NameError, match="bound_later"), model.trace(PROMPTS[0], max_tokens=1):
        model.logits.sum() + bound_later  # noqa: F821
    bound_later = 1
    assert bound_later == 1


# D3: what its traceback shows


def lines_of(error: BaseException) -> str:
    """The traceback as it is printed, checked for what must not be in it."""
    text = "".join(traceback.format_exception(error))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        assert "/endoscope/" not in frame.f_code.co_filename
    assert "src/endoscope" not in text
    assert "importlib" not in text
    assert "greenlet" not in text
    return text


def fail_in_block(model: Any, how: str) -> Any:
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        value = model.model.layers[0].output[0]
        if how == "at once":
            value @ torch.zeros(3, 3)  # the line that fails
        elif how == "in a helper":
            failing_helper(value)
        elif how == "in a later step":
            for step in tracer.iter[:]:
                if step == 1:
                    [][step]
        else:
            try:
                {}["inner"]
            except KeyError as error:
                raise OwnError("outer") from error
    return tracer


FAILURES = {
    "at once": (RuntimeError, ["value @ torch.zeros(3, 3)  # the line that fails"]),
    "in a helper": (ZeroDivisionError, ["failing_helper(value)", "ratio = value.shape[0] / 0", "failing_helper"]),
    "in a later step": (IndexError, ["[][step]"]),
    "raised from": (
        OwnError,
        ['raise OwnError("outer") from error', '{}["inner"]', "KeyError: 'inner'", "direct cause"],
    ),
}


@pytest.mark.parametrize("how", FAILURES)
def test_sync_case_09_the_traceback_shows_the_users_lines(how: str, model: Any) -> None:  # contract: D3
    """File, line and text of the block and of what it called; nothing of the machinery."""
    kind, shown = FAILURES[how]
    with pytest.raises(kind) as caught:
        fail_in_block(model, how)
    text = lines_of(caught.value)
    for line in shown:
        assert line in text
    assert f'File "{__file__}"' in text
    assert "with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:" in text
    with open(__file__) as file:
        source = file.read().split("\n")
    innermost = [entry for entry in traceback.extract_tb(caught.value.__traceback__) if entry.name == "<block>"][-1]
    assert innermost.filename == __file__
    assert source[innermost.lineno - 1].strip() == innermost.line
    assert any(innermost.line == line for line in shown)
    if how == "raised from":
        assert isinstance(caught.value.__cause__, KeyError)
        lines_of(caught.value.__cause__)


@pytest.mark.parametrize("consumed", ["awaited", "iterated"])
@pytest.mark.parametrize("how", FAILURES)
# contract: D2, D3
async def test_stream_case_09_the_traceback_shows_the_users_lines(how: str, consumed: str, async_model: Any) -> None:
    """The same on the stream, where it is consumed long after the block's frame."""
    kind, shown = FAILURES[how]
    tracer = fail_in_block(async_model("tiny-llama"), how)
    with pytest.raises(kind) as caught:
        if consumed == "awaited":
            await tracer.backend
        else:
            async for _ in tracer.backend:
                pass
    assert isinstance(caught.value, BlockError)
    text = lines_of(caught.value)
    for line in shown:
        assert line in text
    assert f'File "{__file__}"' in text


async def test_stream_many_errors_at_once(async_model: Any, oracle: Any) -> None:  # contract: D1
    """Failing and succeeding traces in flight together: each consumer gets its own."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")

    async def one(number: int) -> Any:
        with model.trace(PROMPTS[number % 4], max_tokens=4, **GREEDY) as tracer:
            for step in tracer.iter[:]:
                token = model.samples.save()
                if number % 2 and step == 1:
                    raise OwnError(number)
        return await tracer.backend

    results = await asyncio.gather(*[one(number) for number in range(16)], return_exceptions=True)
    for number, result in enumerate(results):
        run = its.run(PROMPTS[number % 4], 4)
        if number % 2:
            assert isinstance(result, OwnError)
            assert isinstance(result, BlockError)
            assert result.args == (number,)
            assert result.output.saves["token"].tolist() == [run.tokens[1:2]]
        else:
            assert tokens_of(result) == run.tokens
    for _ in range(50):
        if (counts := held(await model.debug())) == NOTHING_LEFT:
            break
    assert counts == NOTHING_LEFT


# D4: prints and warnings


def test_sync_prints_arrive_marked(model: Any, capsys: pytest.CaptureFixture[str]) -> None:  # contract: D4
    """Each line of standard output and of standard error reaches the caller's, marked with its request."""
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        for number in range(2):
            with tracer.invoke(PROMPTS[number]):
                import sys as system

                print("hello from", number)
                print("two\nlines", end="")
                print("to errors", number, file=system.stderr)
                model.logits.sum()
                print(" and the rest")
    out, err = capsys.readouterr()
    marks = [output.request_id.removeprefix("trace-") for output in tracer.result]
    for number, mark in enumerate(marks):
        mine = [line for line in out.split("\n") if line.startswith(f"[request {mark}] ")]
        assert [line.partition("] ")[2] for line in mine] == [f"hello from {number}", "two", "lines and the rest"]
        assert f"[request {mark}] to errors {number}" in err.split("\n")


def test_sync_warnings_arrive_marked(model: Any) -> None:  # contract: D4
    """With their class, the user's file and line, and the mark of the request."""

    def trace() -> None:
        with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
            warnings.warn("old ways", DeprecationWarning, stacklevel=1)
            model.logits.sum()

    with pytest.warns(DeprecationWarning, match="old ways") as warned:
        trace()
    assert len(warned) == 1
    assert str(warned[0].message).startswith("[request ")
    assert warned[0].filename == __file__
    with open(__file__) as file:
        line = file.read().split("\n")[warned[0].lineno - 1]
    assert 'warnings.warn("old ways", DeprecationWarning' in line


# contract: D4
async def test_stream_prints_and_warnings_arrive(async_model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """By the time the stream has ended, all of it is there."""
    model = async_model("tiny-llama")
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        for step in tracer.iter[:]:
            print("step", step)
            model.logits.sum()
        warnings.warn("careful", stacklevel=1)
    with pytest.warns(UserWarning, match="careful"):
        await tracer.backend
    lines = capsys.readouterr().out.strip().split("\n")
    assert [line.partition("] ")[2] for line in lines] == ["step 0", "step 1"]


# contract: D1, D4
async def test_stream_a_warning_that_the_caller_makes_an_error(async_model: Any, oracle: Any) -> None:
    """It comes out of the stream of the request that warned, at its end, and out of no other."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")

    def start(number: int) -> Any:
        with model.trace(PROMPTS[number], max_tokens=3, **GREEDY) as tracer:
            if number % 2:
                warnings.warn(f"careful {number}", stacklevel=1)
            logits = model.logits.save()
        return tracer.backend

    async def consume(backend: Any) -> Any:
        return await backend

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backends = [start(number) for number in range(4)]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*map(consume, backends), return_exceptions=True)
    for number, result in enumerate(results):
        run = its.run(PROMPTS[number], 3)
        output = result
        if number % 2:
            assert isinstance(result, UserWarning)
            assert str(result).endswith(f"careful {number}")
            output = result.output
        assert tokens_of(output) == run.tokens
        assert set(output.saves) == {"logits"}


@pytest.mark.parametrize("site", ["layer", "logits", "samples", "later"])
def test_an_error_that_torch_raises_in_cpp_does_not_end_the_engine(model: Any, site: str) -> None:  # contract: D1
    for repeat in range(5):
        with pytest.raises(RuntimeError, match="size of tensor") as caught:
            with model.trace(PROMPTS[repeat % len(PROMPTS)], max_tokens=4, **GREEDY) as tracer:
                if site == "layer":
                    value = model.model.layers[1].mlp.output
                elif site == "logits":
                    value = model.logits
                elif site == "samples":
                    value = model.samples
                else:
                    for step in tracer.iter[1:2]:
                        value = model.model.layers[2].output[0]
                torch.zeros(2) + torch.zeros(3)
        assert isinstance(caught.value, BlockError)
