"""Bad input: each kind has an error of its own, nothing is submitted, and the engine serves on."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held, tokens_of

from endoscope import VLLM
from endoscope.errors import (
    BlockSyntaxError,
    EngineArgumentError,
    ModeError,
    ModelNotFoundError,
    NoSourceError,
    PromptError,
    SamplingError,
    SecondEngineError,
    SerializationError,
    TraceError,
    UnknownModuleError,
    UnsupportedError,
    UsageError,
)
from endoscope.vllm import internals
from tests.conftest import options_of, path_of


@pytest.fixture
def model(sync_model: Any, oracle: Any) -> Any:
    """The synchronous tiny Llama. After each test nothing was submitted, and it still serves."""
    model = sync_model("tiny-llama")
    model.start()
    submitted: list[Any] = []
    core = model.engine.llm.llm_engine.engine_core
    original = core.add_request
    core.add_request = lambda request: (submitted.append(request), original(request))
    try:
        yield model
        assert submitted == []
    finally:
        core.add_request = original
    assert held(model.debug()) == NOTHING_LEFT
    assert model.engine.inbox.arrivals == {}
    assert model.engine.llm.llm_engine.get_num_unfinished_requests() == 0
    (output,) = model.generate(PROMPTS[0], max_tokens=1, **GREEDY)
    assert tokens_of(output) == oracle("tiny-llama").run(PROMPTS[0], 1).tokens


# Prompts


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "empty"),
        ([], "empty"),
        ({"prompt": ""}, "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"input_ids": []}, "empty"),
        (None, "NoneType"),
        (3.5, "float"),
        ([1.5, 2.5], "float"),
        (["one", "two"], "tracer.invoke"),
        ([[1, 2], [3]], "tracer.invoke"),
        ([True, False], "bool"),
        ([-1, 5], "negative"),
        ({"text": "hello"}, "prompt_token_ids"),
        ([10**9], "vocabulary"),
    ],
)
def test_prompts_that_are_none(prompt: Any, said: str, model: Any) -> None:
    """A prompt of the wrong kind, or an empty one, is named with its kind."""
    with pytest.raises(PromptError, match=said) as caught, model.trace(prompt, max_tokens=1):
        model.logits.save()
    assert isinstance(caught.value, (ValueError, TraceError))


def test_case_14_a_prompt_longer_than_the_model_takes(model: Any) -> None:
    """It is refused with both numbers."""
    with pytest.raises(PromptError) as caught, model.trace([5] * 600, max_tokens=1):
        model.logits.save()
    assert "600" in str(caught.value)
    assert str(options_of("tiny-llama")["max_model_len"]) in str(caught.value)


def test_one_bad_prompt_of_several(model: Any) -> None:
    """None of the trace's requests is submitted."""
    with pytest.raises(PromptError), model.trace(max_tokens=1) as tracer:
        for prompt in (*PROMPTS, ""):
            with tracer.invoke(prompt):
                model.logits.save()


async def test_bad_prompts_on_the_stream(async_model: Any) -> None:
    """The asynchronous path refuses them when the block is left."""
    model = async_model("tiny-llama")
    await model.generate(PROMPTS[0], max_tokens=1)
    with pytest.raises(PromptError, match="empty"), model.trace("", max_tokens=1):
        model.logits.save()
    with pytest.raises(PromptError), model.trace(max_tokens=1) as tracer:
        for prompt in (PROMPTS[0], 5):
            with tracer.invoke(prompt):
                model.logits.save()
    with pytest.raises(SamplingError), model.trace(PROMPTS[0], max_token=1):
        model.logits.save()
    with pytest.raises(PromptError):
        model.generate([PROMPTS[0], ""])
    assert model.engine.llm.output_processor.get_num_unfinished_requests() == 0
    assert model.engine.inbox.arrivals == {}
    assert held(await model.debug()) == NOTHING_LEFT


# Sampling arguments


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"max_token": 5}, "max_tokens"),
        ({"temprature": 0.0}, "temperature"),
        ({"entirely_unknown": 1}, "entirely_unknown"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 7.0}, "top_p"),
        ({"n": 0}, "n must be"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "hot"}, "refuses"),
        ({"sampling_params": 5}, "SamplingParams"),
    ],
)
def test_sampling_arguments(sampling: dict[str, Any], said: str, model: Any) -> None:
    """An unknown one is named with the nearest that there are, a wrong value as vLLM says it."""
    with pytest.raises(SamplingError, match=said) as caught, model.trace(PROMPTS[0], **sampling):
        model.logits.save()
    assert isinstance(caught.value, ValueError)


# Blocks


def test_no_source_to_be_had(model: Any) -> None:
    """Code without a file says that its text cannot be had, and why."""
    code = compile("with model.trace('hello'):\n    model.logits.save()\n", "<nowhere>", "exec")
    with pytest.raises(NoSourceError, match="cannot be had"):
        exec(code, {"model": model})


def test_case_34_what_cannot_travel(model: Any, tmp_path: Path) -> None:  # contract: C1
    """Open file, lock, generator, socket of this process: named, with the type, before anything is submitted."""
    file = (tmp_path / "file").open("w")
    lock = threading.Lock()
    generator = (number for number in range(3))
    nested = {"deep": [lock]}
    try:
        with pytest.raises(SerializationError, match=r"'file'.*TextIOWrapper"), model.trace(PROMPTS[0]):
            file.write("x")
        with pytest.raises(SerializationError, match=r"'lock'.*lock"), model.trace(PROMPTS[0]):
            lock.acquire()
        with pytest.raises(SerializationError, match=r"'generator'.*generator"), model.trace(PROMPTS[0]):
            next(generator)
        with pytest.raises(SerializationError, match=r"'nested'.*dict.*lock"), model.trace(PROMPTS[0]):
            nested["deep"].append(1)
    finally:
        file.close()


def test_statements_that_cannot_stand_in_a_block(model: Any) -> None:
    """`return` would leave the caller's function."""

    def returning() -> Any:
        with model.trace(PROMPTS[0]):
            return model.logits

    with pytest.raises(BlockSyntaxError, match="return"):
        returning()


def test_an_unknown_module(model: Any) -> None:  # contract: C8
    """Once the tree is known, a wrong path is refused where it is written, with the nearest."""
    assert "model.layers.0.mlp" in model.modules()
    with pytest.raises(UnknownModuleError, match=r"model\.layers\.0\.mlp"):
        _ = model.model.layers[0].mpl
    with pytest.raises(UnknownModuleError, match=r"model\.layers\.9"):
        _ = model.model.layers[9]


def test_values_outside_a_block(model: Any) -> None:
    """A site has a value only where the model runs."""
    for read in (lambda: model.logits, lambda: model.samples, lambda: model.model.layers[0].output):
        with pytest.raises(UsageError, match="outside a block"):
            read()


def test_misuse_of_a_trace(model: Any) -> None:
    """Neither a prompt nor an invoke; an invoke in a trace with a prompt; steps outside of a block."""
    with pytest.raises(UsageError, match="neither a prompt nor an invoke"), model.trace():
        pass
    with pytest.raises(UsageError, match="outside a block"), model.trace():
        model.logits  # noqa: B018
    with pytest.raises(UsageError, match="only inside a block"), model.trace(max_tokens=1) as tracer:
        for _ in tracer.iter[:]:
            pass


# Engines


@pytest.mark.parametrize("mode", ["asynch", "", None, "SYNC", 1])
def test_a_wrong_mode(mode: Any) -> None:
    """It is named, with the two that there are."""
    with pytest.raises(ModeError, match='"sync" or "async"') as caught:
        VLLM(path_of("tiny-llama"), mode=mode)
    assert isinstance(caught.value, ValueError)
    assert repr(mode) in str(caught.value)


def test_a_model_that_does_not_exist(tmp_path: Path) -> None:
    """A path is refused at once, a directory without a model too, a name when the engine starts."""
    for name in (str(tmp_path / "nothing"), "./nothing", ""):
        with pytest.raises(ModelNotFoundError) as caught:
            VLLM(name)
        assert isinstance(caught.value, FileNotFoundError)
        assert repr(name) in str(caught.value)
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        VLLM(str(tmp_path))
    if "HF_HUB_OFFLINE" in os.environ:
        with pytest.raises(ModelNotFoundError, match="nobody/has-this"):
            VLLM("nobody/has-this").start()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"max_model_lenn": 5}, EngineArgumentError, "max_model_len"),
        ({"pipeline_parallel_size": 2}, UnsupportedError, "pipeline_parallel_size=2"),
        ({"data_parallel_size": 2}, UnsupportedError, "data_parallel_size=2"),
        ({"spec_tokens": 3}, UnsupportedError, "spec_tokens=3"),
        ({"enable_dbo": True}, UnsupportedError, "enable_dbo=True"),
        ({"kv_sharing_fast_prefill": True}, UnsupportedError, "kv_sharing_fast_prefill=True"),
        ({"scheduler_cls": "a.B"}, UnsupportedError, "scheduler_cls"),
        ({"runner": "pooling"}, UnsupportedError, "runner='pooling'"),
        ({"additional_config": 3}, EngineArgumentError, "additional_config takes a dict"),
        ({"dtype": "float33"}, EngineArgumentError, "float33"),
    ],
)
def test_case_06_engine_arguments(options: dict[str, Any], error: type[Exception], said: str) -> None:  # contract: F5
    """What vLLM does not take, and what cannot be traced, is refused by name when the engine is built."""
    with pytest.raises(error) as caught:
        VLLM(path_of("tiny-llama"), **{**options_of("tiny-llama"), **options}).start()
    assert said in str(caught.value)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_speculative_decoding_is_refused_by_name(mode: Any) -> None:  # contract: F5
    """Before an engine starts, and saying what to do."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
    model = VLLM(path_of("tiny-llama"), mode=mode, speculative_config=config, **options_of("tiny-llama"))
    with pytest.raises(UnsupportedError, match=r"speculative_config=.*ngram.*leave it out"):
        model.start()
    assert model._engine is None


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_case_06_pipeline_parallelism_is_refused_by_name(mode: Any) -> None:  # contract: F5
    """Also by the first trace of a model that was not started: before the trace is submitted."""
    model = VLLM(path_of("tiny-llama"), mode=mode, pipeline_parallel_size=2, **options_of("tiny-llama"))
    with pytest.raises(UnsupportedError, match="pipeline_parallel_size=2"), model.trace(PROMPTS[0], max_tokens=1):
        model.logits.save()
    assert model._engine is None


def test_case_18_a_runner_that_is_not_known_is_refused_by_name() -> None:  # contract: F5
    class Runner:
        pass

    with pytest.raises(UnsupportedError, match=r"test_bad_input\..*Runner"):
        internals.runner_kind(Runner())


@pytest.mark.skipif(os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0", reason="needs the engine in this process")
def test_one_engine_in_a_process(sync_model: Any) -> None:
    """vLLM can have one in-process engine; a second one is refused, and the first serves on."""
    model = sync_model("tiny-llama").start()
    with pytest.raises(SecondEngineError, match="VLLM_ENABLE_V1_MULTIPROCESSING") as caught:
        VLLM(path_of("tiny-gpt2"), **options_of("tiny-gpt2")).start()
    assert repr(model) in str(caught.value)
    assert len(tokens_of(model.generate(PROMPTS[0], max_tokens=2, **GREEDY)[0])) == 2
    assert "vllm" in sys.modules


def test_an_engine_that_does_not_start_says_what_it_may_lack() -> None:
    said = "Engine core initialization failed. See root cause above."
    with pytest.raises(RuntimeError, match="initialization failed") as caught:
        with internals.starting("tiny-llama", {"model": path_of("tiny-llama"), "enforce_eager": True}):
            raise RuntimeError(said)
    assert any("kv_cache_memory_bytes" in note for note in caught.value.__notes__)
    given = {"model": path_of("tiny-llama"), "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}
    with pytest.raises(RuntimeError, match="initialization failed") as caught:
        with internals.starting("tiny-llama", given):
            raise RuntimeError(said)
    assert not hasattr(caught.value, "__notes__")
