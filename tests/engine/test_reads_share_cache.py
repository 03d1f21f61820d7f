"""Who may use whose keys and values: what a block may have changed is private, what it only read is everybody's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from engine_support import GREEDY, layers_of, tokens_of

from endoscope.vllm import internals

# Longer than two blocks of the key-value cache, which have 128 tokens on a CPU.
LONG = {"prompt_token_ids": [(7 * i) % 90 + 3 for i in range(300)]}
PLAIN: dict[str, Any] = {**GREEDY, "max_tokens": 3, "logprobs": 5}


def after(model: Any, trace: Callable[[], None]) -> Any:
    """What an untraced request gives right after a trace of the same prompt that is the first of all."""
    model.engine.llm.reset_prefix_cache()
    trace()
    (output,) = model.generate(LONG, **PLAIN)
    return output


def told(output: Any) -> Any:
    """All that a finished output says of its tokens, to the bit."""
    completion = output.outputs[0]
    return list(completion.token_ids), [
        {token: each.logprob for token, each in step.items()} for step in completion.logprobs
    ]


def test_a_block_that_only_reads_leaves_its_keys_and_values_to_others(sync_model: Any) -> None:  # contract: F1, F3
    model = sync_model("tiny-llama")
    layers, rows = layers_of(model), []

    def untraced() -> None:
        model.generate(LONG, **PLAIN)

    def reading() -> None:
        with model.trace(LONG, max_tokens=3, **GREEDY) as tracer:
            seen = [].save()
            for step in tracer.iter[:]:
                own = layers[1].resid_post.clone()
                own[0] = step
                seen.append(own)
        rows.extend(each.shape[0] for each in seen)

    def nothing() -> None:
        with model.trace(LONG, max_tokens=1, **GREEDY):
            pass

    cold = after(model, lambda: None)
    warm = after(model, untraced)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == 256
    for trace in (reading, nothing):
        shared = after(model, trace)
        assert shared.num_cached_tokens == 256
        assert told(shared) == told(warm)
    assert tokens_of(cold) == tokens_of(warm)
    # The trace itself sees its prompt whole, though by now it is in the cache.
    rows.clear()
    reading()
    assert rows == [300, 1, 1]


def test_case_23_a_steered_prompt_is_nobody_elses(sync_model: Any) -> None:  # contract: F3
    model = sync_model("tiny-llama")
    layers = layers_of(model)
    steered: list[list[int]] = []

    def editing() -> None:
        with model.trace(LONG, max_tokens=3, **GREEDY) as tracer:
            for _ in tracer.iter[:]:
                layers[0].resid_post[:] *= -3
        steered.append(tokens_of(tracer.result))

    def calling() -> None:
        with model.trace(LONG, max_tokens=1, **GREEDY):
            model.model.norm(layers[1].resid_post)  # changes nothing, but who knows

    cold = after(model, lambda: None)
    for trace in (editing, calling):
        alone = after(model, trace)
        assert alone.num_cached_tokens == 0
        assert told(alone) == told(cold)
    assert steered[0] != tokens_of(cold)
    # Nor is it another steered one's.
    editing()
    assert steered[1] == steered[0]


async def test_the_same_on_the_stream(async_model: Any) -> None:  # contract: F3
    model = async_model("tiny-llama")
    layers = layers_of(model)
    cached = []
    for change in (False, True):
        # A prompt that no other test has: the asynchronous engine keeps its cache.
        prompt = {"prompt_token_ids": [(11 * i + change) % 80 + 5 for i in range(300)]}
        if change:
            with model.trace(prompt, max_tokens=2, **GREEDY) as tracer:
                layers[0].resid_post[-1] = 0
        else:
            with model.trace(prompt, max_tokens=2, **GREEDY) as tracer:
                last = layers[0].resid_post[-1].save()
        await tracer.backend
        (output,) = await model.generate(prompt, **PLAIN)
        cached.append(output.num_cached_tokens)
    assert cached == [256, 0]


def test_the_scheduler_is_told_without_reading_the_block(sync_model: Any) -> None:
    model = sync_model("tiny-llama")
    layers = layers_of(model)
    put, internals_put = [], internals.put_submission

    def keep(params: Any, submission: bytes) -> None:
        internals_put(params, submission)
        put.append(params)

    internals.put_submission = keep
    try:
        with model.trace(max_tokens=1) as tracer:
            with tracer.invoke("Water"):
                read = layers[0].output
            with tracer.invoke("Water"):
                layers[0].output[0][:] = 0
    finally:
        internals.put_submission = internals_put
    found = [internals.may_edit(SimpleNamespace(sampling_params=params)) for params in put]
    assert found == [False, True]
    untraced = SimpleNamespace(sampling_params=internals.sampling_params({"max_tokens": 1}))
    assert not internals.may_edit(untraced)
