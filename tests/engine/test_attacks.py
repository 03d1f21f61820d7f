"""Blocks and arguments that would end the engine, or mix one request's things with another's, if they were let."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held

from endoscope import VLLM
from endoscope.errors import BlockError, ReplacementError, SamplingError, SerializationError, SiteError


@pytest.fixture
def model(sync_model: Any) -> Any:
    """The synchronous tiny Llama, which still serves and has nothing left over after the test."""
    model = sync_model("tiny-llama")
    yield model
    assert held(model.debug()) == NOTHING_LEFT
    assert model.generate(PROMPTS[0], max_tokens=1, **GREEDY)[0].finished


class Settings:
    """A class of the user's own, with an attribute that changes between traces."""

    scale = 1.0


def test_a_class_is_to_a_block_what_it_was_when_that_was_read(model: Any) -> None:  # contract: C1, C3
    Settings.scale = 1.0
    with model.trace(max_tokens=3, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPTS[0]):
            seen = [].save()
            for step in tracer.iter[:]:
                seen.append(Settings.scale)
        Settings.scale = 100.0
        with tracer.invoke(PROMPTS[1]):
            seen = [].save()
            for step in tracer.iter[:]:
                seen.append(Settings.scale)
    assert seen == [[1.0] * 3, [100.0] * 3]


def test_what_comes_home_leaves_the_callers_class_alone(model: Any) -> None:  # contract: C1
    Settings.scale = 2.0
    method = Settings.__init__
    with model.trace(PROMPTS[0], max_tokens=1):
        Settings.scale = 55.0
        made = Settings().save()
    assert type(made) is Settings
    assert Settings.scale == 2.0
    assert Settings.__init__ is method


@pytest.mark.parametrize("token", [-1, 49152, 2**31 - 1])
def test_a_token_that_does_not_exist_is_refused(model: Any, token: int) -> None:  # contract: C3
    with pytest.raises(ReplacementError, match="samples takes numbers from 0 to 49151"):
        with model.trace(PROMPTS[0], max_tokens=3, **GREEDY):
            model.samples = token
    with pytest.raises(ReplacementError, match="samples takes numbers from 0 to 49151"):
        with model.trace(PROMPTS[0], max_tokens=3, **GREEDY):
            model.samples[:] = token


def test_an_index_that_an_embedding_does_not_have_is_refused(model: Any) -> None:  # contract: C3
    with pytest.raises(ReplacementError, match=r"model\.embed_tokens\.inputs takes numbers from 0"):
        with model.trace(PROMPTS[0], max_tokens=3, **GREEDY):
            ids = model.model.embed_tokens.input
            model.model.embed_tokens.input = ids + 10**6


def test_a_module_with_attention_cannot_be_called_in_a_block(model: Any) -> None:  # contract: D1
    with pytest.raises(SiteError, match=r"model\.layers\.1\.self_attn .* cannot be called in a block"):
        with model.trace(PROMPTS[0], max_tokens=3, **GREEDY):
            _, named = model.model.layers[1].self_attn.inputs
            model.model.layers[1].self_attn(named["positions"], named["hidden_states"])


def test_another_models_modules_are_refused(model: Any) -> None:  # contract: C2
    other = VLLM(model._name, max_model_len=64)
    layer = other.model.layers[0]
    with pytest.raises(SerializationError, match=r"'other'.*it belongs to VLLM"):
        with model.trace(PROMPTS[0], max_tokens=1):
            hidden = other.model.layers[0].output.save()
    with pytest.raises(SerializationError, match=r"'layer'.*it belongs to VLLM"):
        with model.trace(PROMPTS[0], max_tokens=1):
            hidden = layer.output.save()


@pytest.mark.parametrize("sampling", [{"ignore_eos": 1}, {"max_tokens": True}, {"seed": 2**70}, {"extra_args": 5}])
def test_a_value_that_the_engine_cannot_read_is_refused(model: Any, sampling: dict[str, Any]) -> None:
    with pytest.raises(SamplingError):
        with model.trace(PROMPTS[0], **{"max_tokens": 2, **sampling}):
            logits = model.logits.save()


def test_numbers_of_numpy_are_numbers(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=np.int64(2), temperature=np.float32(0.0), ignore_eos=True) as tracer:
        logits = model.logits.save()
    assert len(tracer.result.outputs[0].token_ids) == 2


@pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
async def test_the_end_of_an_iteration_is_an_error_of_the_block(async_model: Any, kind: type[Exception]) -> None:
    model = async_model("tiny-llama")  # contract: A7
    for awaited in (True, False):
        with model.trace(PROMPTS[0], max_tokens=2) as tracer:
            logits = model.logits.save()
            raise kind("over")
        with pytest.raises(BlockError, match="over") as caught:
            if awaited:
                await tracer.backend
            else:
                async for output in tracer.backend:
                    pass
        assert list(caught.value.output.saves) == ["logits"]


def test_half_a_surrogate_pair_comes_home(model: Any, capsys: pytest.CaptureFixture[str]) -> None:  # contract: D1, D4
    with pytest.raises(ValueError, match=r"\\udcff"):
        with model.trace(PROMPTS[0], max_tokens=2):
            print("odd \udcff", end="")
            raise ValueError("\udcff")
    assert "odd \\udcff" in capsys.readouterr().out


class MutteringError(Exception):
    """Its message cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no message")


class CountingError(Exception):
    """Its message is other in every process."""

    def __str__(self) -> str:
        return f"object at {id(self)}"


@pytest.mark.parametrize("kind", [MutteringError, CountingError])
def test_an_error_with_an_odd_message_keeps_its_class(model: Any, kind: type[Exception]) -> None:  # contract: D2
    with pytest.raises(kind) as caught:
        with model.trace(PROMPTS[0], max_tokens=2):
            logits = model.logits.save()
            raise kind()
    assert isinstance(caught.value, BlockError)
    assert list(caught.value.output.saves) == ["logits"]


def test_a_module_is_true_and_keeps_nothing(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=1):
        truth = bool(model.model.layers[0].mlp).save()
    assert truth is True
    with pytest.raises(AttributeError, match="cannot be assigned"):
        with model.trace(PROMPTS[0], max_tokens=1):
            model._kept = 1


def test_the_logits_of_another_requests_prompt_stay_out_of_a_cache(model: Any) -> None:  # contract: C2, C7
    with model.trace(max_tokens=2, ignore_eos=True, temperature=0.0) as tracer:
        with tracer.invoke(PROMPTS[0]):
            cache = tracer.cache("logits_processor")
        with tracer.invoke(PROMPTS[1], prompt_logprobs=1):
            logits = model.logits.save()
    assert [each.shape[0] for each in cache["logits_processor"]] == [1, 1]
