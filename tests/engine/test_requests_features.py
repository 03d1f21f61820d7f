"""What a request can ask of vLLM is as without a trace, for blocks that read; and what a block changes takes effect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held, tokens_of
from oracle import TOLERANCE, Edit, Oracle, assert_close, assert_steps_close, distance

from endoscope import VLLM
from endoscope.errors import BlockError, PromptError, ReplacementError
from tests.conftest import options_of, path_of

PROMPT = PROMPTS[0]
STEPS = 6
LAYER = 1
NEAR = 1e-3
"""Between two log-probabilities: the rounding of logits that are some tens large."""

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}, "old": {"type": "boolean"}},
    "required": ["city", "old"],
    "additionalProperties": False,
}


@dataclass
class Feature:
    """Something that a request asks for."""

    sampling: dict[str, Any]
    holds: Callable[[Any, list[int], str], bool] = lambda output, tokens, text: True
    """What is true of the finished output, and of each of its sequences, whatever a block did before the sampling."""
    argmax: bool = False
    """Whether each token is the one with the largest logit."""


def structured(its: Oracle, **what: Any) -> dict[str, Any]:
    """Sampling arguments for structured output. A model of random weights would go on with blanks for ever."""
    from vllm.sampling_params import StructuredOutputsParams

    blanks = [token for token in range(len(its.tokenizer)) if its.tokenizer.decode([token]).isspace()]
    bias = dict.fromkeys(blanks, -100.0)
    params = StructuredOutputsParams(**what)
    return {"temperature": 0.0, "max_tokens": 40, "structured_outputs": params, "logit_bias": bias}


def is_city(output: Any, tokens: list[int], text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"city", "old"} and value["city"] in ("Paris", "Rome", "Oslo") and value["old"] in (True, False)
    )


def feature(name: str, its: Oracle) -> Feature:
    """A feature by its name, with tokens in it that the oracle says come up."""
    free = its.run(PROMPT, STEPS).tokens
    third = its.text(free[2:3])
    greedy = {"max_tokens": STEPS, **GREEDY}
    random = {"max_tokens": STEPS, "temperature": 1.0, "ignore_eos": True}
    few = free[:2] + its.tokens(" red green blue")
    match name:
        case "ignore_eos":
            return Feature(greedy, lambda output, tokens, text: len(tokens) == STEPS, argmax=True)
        case "n":
            return Feature({**random, "n": 3, "seed": 11}, lambda output, tokens, text: len(output.outputs) == 3)
        case "seed":
            return Feature({**random, "temperature": 1.3, "seed": 3, "top_p": 0.95, "top_k": 500, "min_p": 0.001})
        case "stop":
            return Feature({**greedy, "stop": [third]}, lambda output, tokens, text: third not in text, argmax=True)
        case "include_stop_str_in_output":
            ends = {**greedy, "max_tokens": 4 * STEPS, "stop": [third], "include_stop_str_in_output": True}
            return Feature(ends, lambda output, tokens, text: third not in text[: -len(third)], argmax=True)
        case "stop_token_ids":
            ends = {**greedy, "stop_token_ids": [free[2]]}
            return Feature(ends, lambda output, tokens, text: free[2] not in tokens[:-1], argmax=True)
        case "min_tokens":
            late = {**greedy, "stop_token_ids": free, "min_tokens": 4}
            return Feature(late, lambda output, tokens, text: len(tokens) >= 4 and not set(tokens[:4]) & set(free))
        case "logprobs":
            return Feature({**greedy, "logprobs": 3}, argmax=True)
        case "prompt_logprobs":
            return Feature({**greedy, "prompt_logprobs": 2, "logprobs": 0}, argmax=True)
        case "logit_bias":
            biased = {**greedy, "logit_bias": {free[0]: -100.0, few[-1]: 100.0}}
            return Feature(biased, lambda output, tokens, text: set(tokens) == {few[-1]})
        case "allowed_token_ids":
            return Feature(
                {**random, "seed": 5, "allowed_token_ids": few}, lambda output, tokens, text: set(tokens) <= set(few)
            )
        case "bad_words":
            return Feature(
                {**greedy, "bad_words": [its.text(free[:1])]}, lambda output, tokens, text: free[0] not in tokens
            )
        case "penalties":
            return Feature({**greedy, "repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0})
        case "json":
            return Feature(structured(its, json=CITY), is_city)
        case "regex":
            made = structured(its, regex=r"[0-9]{3}-[a-f]{2}")
            return Feature(made, lambda output, tokens, text: len(text) == 6 and text[3] == "-" and text[:3].isdigit())
        case "choice":
            made = {**structured(its, choice=["yes", "no"]), "temperature": 1.0, "seed": 4, "logprobs": 1}
            return Feature(made, lambda output, tokens, text: text in ("yes", "no"))
    raise ValueError(name)


FEATURES = (
    "ignore_eos", "n", "seed", "stop", "include_stop_str_in_output", "stop_token_ids", "min_tokens", "logprobs",
    "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "penalties", "json", "regex", "choice",
)  # fmt: skip


def numbers(logprobs: Any) -> list[dict[int, float]]:
    """The log-probabilities of each position, by token."""
    return [{token: each.logprob for token, each in (position or {}).items()} for position in logprobs or ()]


def assert_alike(mine: list[dict[int, float]], its: list[dict[int, float]]) -> None:
    assert [set(position) for position in mine] == [set(position) for position in its]
    for one, other in zip(mine, its, strict=True):
        # Those of masked tokens are minus infinity.
        assert all(one[token] == other[token] or abs(one[token] - other[token]) < NEAR for token in one)


def assert_same(traced: Any, plain: Any) -> None:
    """A finished output says the same as that of the request without a trace."""
    assert traced.prompt_token_ids == plain.prompt_token_ids
    assert traced.prompt == plain.prompt
    assert (traced.prompt_logprobs is None) == (plain.prompt_logprobs is None)
    assert_alike(numbers(traced.prompt_logprobs), numbers(plain.prompt_logprobs))
    assert len(traced.outputs) == len(plain.outputs)
    for mine, its in zip(traced.outputs, sorted(plain.outputs, key=lambda each: each.index), strict=True):
        assert list(mine.token_ids) == list(its.token_ids)
        assert mine.text == its.text
        assert (mine.finish_reason, mine.stop_reason) == (its.finish_reason, its.stop_reason)
        assert_alike(numbers(mine.logprobs), numbers(its.logprobs))
        if its.cumulative_logprob is not None:
            assert abs(mine.cumulative_logprob - its.cumulative_logprob) < NEAR * len(mine.token_ids)


def assert_logprobs(logprobs: Any, logits: list[torch.Tensor]) -> None:
    """The log-probabilities of each position are those of the oracle's logits ``[1, vocabulary]`` there."""
    if logprobs is not None:
        for position, expected in zip(numbers(logprobs), logits, strict=True):
            expected = expected.log_softmax(-1)[0]
            assert all(abs(value - float(expected[token])) < NEAR for token, value in position.items())


def sequences(output: Any) -> list[dict[str, Any]]:
    """What the block of each sequence saved."""
    count = len(output.outputs)
    return [{name: value[i] if count > 1 else value for name, value in output.saves.items()} for i in range(count)]


def assert_true(output: Any, its: Oracle, wanted: Feature, edits: list[Edit]) -> None:
    """What blocks saw, and what vLLM reports, is what the oracle computes for these very tokens under the edits."""
    for completion, saved in zip(output.outputs, sequences(output), strict=True):
        tokens, seen = list(completion.token_ids), saved["seen"]
        assert seen[: len(tokens)] == tokens
        # Only where the front end finds a stop string can the engine have gone on for a while.
        assert len(seen) == len(tokens) or "stop" in wanted.sampling
        reads = [("resid_post", its.depth - 1), ("logits", None), ("all_logits", None)]
        run = its.run(PROMPT, len(seen), reads, edits, forced=dict(enumerate(seen)))
        assert_steps_close(saved["stream"], run["resid_post", its.depth - 1], "the stream")
        assert_steps_close(saved["logits"], run["logits", None], "the logits")
        if "structured_outputs" not in wanted.sampling:  # vLLM reports them of the masked logits
            assert_logprobs(completion.logprobs, run["logits", None][: len(tokens)])
        if output.prompt_logprobs is not None:
            rows = run["all_logits", None][0]
            assert_logprobs(output.prompt_logprobs[1:], [rows[i : i + 1] for i in range(len(run.prompt) - 1)])
        if wanted.argmax:
            assert seen == [int(logits.argmax()) for logits in run["logits", None]]
        assert wanted.holds(output, tokens, completion.text), completion.text


def trace(model: Any, prompt: Any, vector: torch.Tensor | None = None, **sampling: Any) -> Any:
    """A trace that keeps what it sees at each step, and adds the vector in the middle of the model if one is given."""
    layers = model.model.layers
    with model.trace(prompt, **sampling) as tracer:
        stream, logits, seen = [].save(), [].save(), [].save()
        for _ in tracer.iter[:]:
            if vector is not None:
                layers[LAYER].resid_post += vector
            stream.append(layers[3].resid_post)
            logits.append(model.logits)
            seen.append(int(model.samples))
    return tracer.backend


def vector_of(its: Oracle, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(its.width, generator=torch.Generator().manual_seed(seed))


def steered(vector: torch.Tensor) -> list[Edit]:
    return [Edit("resid_post", LAYER, lambda rows: rows + vector)]


@pytest.mark.parametrize("name", FEATURES)
# contract: A10, C2, D1
async def test_case_38_a_request_is_as_without_the_trace(name: str, async_model: Any, oracle: Any) -> None:
    """Beside each other: the request untraced, read and edited, and an untraced stranger."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    wanted, vector = feature(name, its), vector_of(its)
    plain = model.generate(PROMPT, **wanted.sampling)
    reading = trace(model, PROMPT, **wanted.sampling)
    stranger = model.generate(PROMPTS[3], max_tokens=STEPS, **GREEDY)
    editing = trace(model, PROMPT, vector, **wanted.sampling)
    (untraced,), read, (other,), edited = await plain, await reading, await stranger, await editing
    assert tokens_of(other) == its.run(PROMPTS[3], STEPS).tokens
    assert_same(read, untraced)
    assert_true(read, its, wanted, [])
    assert_true(edited, its, wanted, steered(vector))
    first, changed = sequences(read)[0]["logits"][0], sequences(edited)[0]["logits"][0]
    assert distance(changed, first) > 100 * TOLERANCE, "the edit changes nothing, so it proves nothing"
    assert held(await model.debug()) == NOTHING_LEFT


@pytest.mark.parametrize("name", ["n", "json", "prompt_logprobs", "stop"])
def test_case_38_sync_a_request_is_as_without_the_trace(
    name: str, sync_model: Any, oracle: Any
) -> None:  # contract: B1
    """The same on `vllm.LLM`, for a few of them."""
    model, its = sync_model("tiny-llama"), oracle("tiny-llama")
    wanted, vector = feature(name, its), vector_of(its)
    (untraced,) = model.generate(PROMPT, **wanted.sampling)
    layers = model.model.layers
    with model.trace(**wanted.sampling) as tracer:
        with tracer.invoke(PROMPT):
            stream, logits, seen = [].save(), [].save(), [].save()
            for _ in tracer.iter[:]:
                stream.append(layers[3].resid_post)
                logits.append(model.logits)
                seen.append(int(model.samples))
        with tracer.invoke(PROMPT):
            stream, logits, seen = [].save(), [].save(), [].save()
            for _ in tracer.iter[:]:
                layers[LAYER].resid_post += vector
                stream.append(layers[3].resid_post)
                logits.append(model.logits)
                seen.append(int(model.samples))
    read, edited = tracer.result
    assert_same(read, untraced)
    assert_true(read, its, wanted, [])
    assert_true(edited, its, wanted, steered(vector))


# Structured output and what blocks do to it


async def test_structured_output_holds_whatever_a_block_does_to_logits(async_model: Any, oracle: Any) -> None:
    """A token that the schema forbids is not sampled, however large a block makes its logit."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    forbidden = model.tokenizer.encode(" purple")[0]
    with model.trace(PROMPT, **structured(its, json=CITY)) as tracer:
        for _ in tracer.iter[:]:
            model.logits[:, forbidden] = 1e4
    output = await tracer.backend
    assert forbidden not in tokens_of(output)
    assert is_city(output, tokens_of(output), output.outputs[0].text)


async def test_case_39_a_forced_token_that_the_structured_output_allows(async_model: Any, oracle: Any) -> None:
    """Of the choices that are left, the block takes the one that would not have come up."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    choices = {name: model.tokenizer.encode(name)[0] for name in ("yes", "no")}
    (plain,) = await model.generate(PROMPT, **structured(its, choice=list(choices)))
    (other,) = set(choices) - {plain.outputs[0].text}
    token = choices[other]
    with model.trace(PROMPT, **structured(its, choice=list(choices))) as tracer:
        model.samples = token
    assert (await tracer.backend).outputs[0].text == other


@pytest.mark.parametrize("how", ["a token", "all logits"])
async def test_case_39_a_token_that_the_structured_output_refuses(how: str, async_model: Any, oracle: Any) -> None:
    """It is that block's error, which names the token; the rest of the batch and the engine go on."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    token = its.tokens(" purple")[0]
    stranger = model.generate(PROMPT, max_tokens=STEPS, **GREEDY)
    with model.trace(PROMPT, **structured(its, json=CITY)) as tracer:
        before = model.logits.argmax().save()
        if how == "a token":
            model.samples = token
        else:
            model.logits[:] = float("-inf")
        for _ in tracer.iter[1:]:
            later = "reached".save()
    twin = trace(model, PROMPT, **structured(its, json=CITY))
    with pytest.raises(ReplacementError, match="structured output") as caught:
        await tracer.backend
    assert isinstance(caught.value, BlockError)
    if how == "a token":
        assert str(token) in str(caught.value)
    assert int(caught.value.output.saves["before"]) == its.run(PROMPT, 1).tokens[0]
    assert "later" not in caught.value.output.saves
    assert tokens_of(caught.value.output) == []
    assert is_city(None, [], (await twin).outputs[0].text)
    assert tokens_of((await stranger)[0]) == its.run(PROMPT, STEPS).tokens
    assert held(await model.debug()) == NOTHING_LEFT


# Log-probabilities of what blocks change


async def test_logprobs_are_those_of_edited_logits(async_model: Any, oracle: Any) -> None:  # contract: C2
    """They are of the logits that the tokens are sampled from; the same request beside it has its own."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    best = its.run(PROMPT, 1).tokens[0]
    sampling = {"max_tokens": 2, "logprobs": 2, **GREEDY}
    twin = model.generate(PROMPT, **sampling)
    with model.trace(PROMPT, **sampling) as tracer:
        model.logits[0, best] -= 50.0
    edited, (plain,) = await tracer.backend, await twin

    def lower(rows: torch.Tensor) -> torch.Tensor:
        rows[0, best] -= 50.0
        return rows

    reads = [("logits", None)]
    clean = its.run(PROMPT, 2, reads)
    run = its.run(PROMPT, 2, reads, [Edit("logits", None, lower, (0,))])
    assert tokens_of(edited) == run.tokens != tokens_of(plain) == clean.tokens
    assert_logprobs(edited.outputs[0].logprobs, [lower(clean["logits", None][0].clone()), run["logits", None][1]])
    assert_logprobs(plain.outputs[0].logprobs, clean["logits", None])


@pytest.mark.parametrize("mode", ["sync", "stream"])
async def test_case_39_logprobs_of_a_forced_token(mode: str, async_model: Any, sync_model: Any, oracle: Any) -> None:
    """vLLM reports the log-probability and the rank of the token that is in the text, not of the one it sampled."""
    its, token = oracle("tiny-llama"), oracle("tiny-llama").tokens(" purple")[0]
    sampling = {"max_tokens": 3, "logprobs": 1, **GREEDY}
    model = (async_model if mode == "stream" else sync_model)("tiny-llama")
    with model.trace(PROMPT, **sampling) as tracer:
        for step in tracer.iter[:]:
            if step == 1:
                model.samples = token
    output = await tracer.backend if mode == "stream" else tracer.result
    run = its.run(PROMPT, 3, [("logits", None)], forced={1: token})
    assert tokens_of(output) == run.tokens
    assert output.outputs[0].text == its.text(run.tokens)
    assert_logprobs(output.outputs[0].logprobs, run["logits", None])
    logits = run["logits", None][1][0]
    of_step = output.outputs[0].logprobs[1]
    assert set(of_step) == {token, int(logits.argmax())}
    assert of_step[token].rank == int((logits >= logits[token]).sum()) > 1
    expected = sum(
        float(rows.log_softmax(-1)[0, its]) for rows, its in zip(run["logits", None], run.tokens, strict=True)
    )
    assert abs(output.outputs[0].cumulative_logprob - expected) < 3 * NEAR


async def test_case_39_a_forced_token_that_stops(async_model: Any, oracle: Any) -> None:  # contract: C2
    """A stop token and an end of text that a block puts there end the request, as sampled ones do."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    purple, end = its.tokens(" purple")[0], its.tokenizer.eos_token_id
    found = []
    for token, sampling in ((purple, {"stop_token_ids": [purple]}), (end, {})):
        with model.trace(PROMPT, max_tokens=STEPS, temperature=0.0, **sampling) as tracer:
            for step in tracer.iter[:]:
                if step == 2:
                    model.samples = token
            after = "ran".save()
        found.append((token, await tracer.backend))
    for token, output in found:
        assert tokens_of(output) == [*its.run(PROMPT, 2).tokens, token]
        assert output.outputs[0].finish_reason == "stop"
        assert output.saves["after"] == "ran"


@pytest.mark.parametrize("how", ["greedy", "sampling", "top_k"])
async def test_case_40_banned_tokens_never_appear(how: str, async_model: Any, oracle: Any) -> None:  # contract: C2
    """With all but a few logits at minus infinity at every step, only those few come up, in each of three sequences."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    left = its.tokens(" red green blue yellow")
    sampling = {
        "greedy": {"temperature": 0.0},
        "sampling": {"temperature": 2.0, "n": 3, "seed": 2},
        "top_k": {"temperature": 2.0, "n": 3, "seed": 2, "top_k": 3, "top_p": 0.99},
    }[how]
    twin = model.generate(PROMPT, max_tokens=12, ignore_eos=True, **sampling)
    with model.trace(PROMPT, max_tokens=12, ignore_eos=True, **sampling) as tracer:
        for _ in tracer.iter[:]:
            kept = model.logits[:, left].clone()
            model.logits[:] = float("-inf")
            model.logits[:, left] = kept
    output, (plain,) = await tracer.backend, await twin
    for sequence in output.outputs:
        assert len(sequence.token_ids) == 12
        assert set(sequence.token_ids) <= set(left)
    for sequence in plain.outputs:
        assert not set(sequence.token_ids) <= set(left)


# Requests that never run


async def test_case_25_a_request_that_is_aborted_in_the_queue(async_model: Any, oracle: Any) -> None:
    """Its block never began: whoever waits for it is told so, with vLLM's own output, and nothing is left."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    await model.generate(PROMPT, max_tokens=1)
    seats = model.engine.llm.vllm_config.scheduler_config.max_num_seqs
    taken = model.generate(["Water"] * seats, max_tokens=400, ignore_eos=True)
    with model.trace(PROMPT, max_tokens=3, n=2) as tracer:
        logits = model.logits.save()
    (request,) = tracer.backend._stream._requests
    await model.engine.llm.abort(request.made.external_req_id)
    async with asyncio.timeout(60):
        with pytest.raises(BlockError, match="never began") as caught:
            await tracer.backend
    await taken.aclose()
    assert {each.finish_reason for each in caught.value.output.outputs} == {"abort"}
    assert caught.value.output.saves == {}
    assert held(await model.debug()) == NOTHING_LEFT
    assert model.engine.inbox.arrivals == {}
    assert tokens_of((await model.generate(PROMPT, max_tokens=3, **GREEDY))[0]) == its.run(PROMPT, 3).tokens


def test_a_request_that_ends_in_the_queue_of_the_synchronous_engine(sync_model: Any, oracle: Any) -> None:
    """vLLM finishes a request with an error where its grammar, looked at in the engine only, cannot be compiled."""
    from vllm.sampling_params import StructuredOutputsParams

    model, its = sync_model("tiny-llama").start(), oracle("tiny-llama")
    broken = StructuredOutputsParams(grammar="root ::= nothing")
    broken._backend = "xgrammar"
    core = model.engine.llm.llm_engine.engine_core
    original = core.add_request

    def add_with_grammar(request: Any) -> None:
        if request.prompt_token_ids == its.tokens(PROMPT):
            request.sampling_params.structured_outputs = broken
        original(request)

    core.add_request = add_with_grammar
    try:
        with pytest.raises(BlockError, match="never began") as caught, model.trace(max_tokens=2, **GREEDY) as tracer:
            with tracer.invoke(PROMPT):
                model.logits.save()
            with tracer.invoke(PROMPTS[2]):
                model.logits.save()
    finally:
        core.add_request = original
    assert caught.value.output.outputs[0].finish_reason == "error"
    run = its.run(PROMPTS[2], 2, [("logits", None)])
    assert tokens_of(tracer.result[1]) == run.tokens
    assert_close(tracer.saves["model.logits"], run["logits", None][0])
    assert held(model.debug()) == NOTHING_LEFT


# Prompts


async def test_prompts_of_every_kind_read_and_edited(async_model: Any, oracle: Any) -> None:  # contract: C2
    """Text, tokens, what a tokenizer returns and vLLM's own dicts, each untraced, read and edited."""
    from vllm.inputs import TextPrompt, TokensPrompt

    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    ids, vector = its.tokens(PROMPT), vector_of(its)
    kinds = (
        PROMPT,
        ids,
        its.tokenizer(PROMPT),
        TextPrompt(prompt=PROMPT),
        TokensPrompt(prompt_token_ids=ids),
        TokensPrompt(prompt_token_ids=ids, prompt=PROMPT),
        TextPrompt(prompt=PROMPT, cache_salt="of the user"),
    )
    wanted = feature("ignore_eos", its)
    started = [
        (
            model.generate([kind if not hasattr(kind, "input_ids") else kind["input_ids"]], **wanted.sampling),
            trace(model, kind, **wanted.sampling),
            trace(model, kind, vector, **wanted.sampling),
        )
        for kind in kinds
    ]
    for plain, reading, editing in started:
        (untraced,), read, edited = await plain, await reading, await editing
        assert_same(read, untraced)
        assert_true(read, its, wanted, [])
        assert_true(edited, its, wanted, steered(vector))


async def test_prompt_embeds_are_refused_where_the_engine_does_not_take_them(async_model: Any) -> None:
    """The error says which argument of the engine makes it take them."""
    model = async_model("tiny-llama")
    with pytest.raises(PromptError, match="enable-prompt-embeds"):
        trace(model, {"prompt_embeds": torch.zeros(3, 128)}, max_tokens=1)


# An engine with adapters


@pytest.fixture(scope="module")
async def lora_model() -> AsyncIterator[Any]:
    """A tiny Llama that takes adapters, and prompts as embeddings."""
    # One slot more than adapters: vLLM's CPU kernels give rows without an adapter the last slot.
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    options |= {"enable_prompt_embeds": True, "max_num_batched_tokens": 256}
    model = VLLM(path_of("tiny-llama"), mode="async", **options_of("tiny-llama"), **options)
    yield model
    model.close()


@pytest.fixture(scope="module")
def adapter() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("tiny-llama-lora", 1, path_of("tiny-llama-lora"))


@pytest.fixture(scope="module")
def merged() -> Oracle:
    """The oracle of the model with the adapter."""
    return Oracle(path_of("tiny-llama"), path_of("tiny-llama-lora"))


@pytest.mark.parametrize("name", ["ignore_eos", "n", "logprobs", "json", "everything"])
async def test_case_38_lora(name: str, lora_model: Any, adapter: Any, merged: Oracle, oracle: Any) -> None:
    """With an adapter, beside the same requests without it: each sees and gets its own model's values."""
    model, its, vector = lora_model, oracle("tiny-llama"), vector_of(merged)
    if name == "everything":
        seeded = {"temperature": 0.8, "seed": 3, "logprobs": 2, "min_tokens": 5, "n": 2}
        wanted = Feature({**structured(its, json=CITY), **seeded}, is_city)
    else:
        wanted = feature(name, merged)
    plain = model.generate(PROMPT, lora_request=adapter, **wanted.sampling)
    reading = trace(model, PROMPT, lora_request=adapter, **wanted.sampling)
    without = trace(model, PROMPT, **wanted.sampling)
    editing = trace(model, PROMPT, vector, lora_request=adapter, **wanted.sampling)
    edited_without = trace(model, PROMPT, vector, **wanted.sampling)
    (untraced,), read, edited = await plain, await reading, await editing
    base, base_edited = await without, await edited_without
    assert_same(read, untraced)
    assert_true(read, merged, wanted, [])
    assert_true(edited, merged, wanted, steered(vector))
    assert_true(base, its, wanted, [])
    assert_true(base_edited, its, wanted, steered(vector))
    assert held(await model.debug()) == NOTHING_LEFT


async def test_lora_the_tree_is_vllms_and_a_module_gives_what_it_adds(
    lora_model: Any, adapter: Any, oracle: Any
) -> None:
    """A wrapped projection stands under its own name, and its output has the adapter's part in it."""
    model, ids = lora_model, oracle("tiny-llama").tokens(PROMPT)
    tree = await model.modules()
    assert "WithLoRA" in tree["model.layers.0.mlp.down_proj"]
    assert "model.layers.0.mlp.down_proj.base_layer" in tree
    runs = []
    for options in ({}, {"lora_request": adapter}):
        with model.trace(ids, max_tokens=1, **options) as tracer:
            given = model.model.layers[0].mlp.down_proj.input.save()
            made = model.model.layers[0].mlp.down_proj.output[0].save()
        runs.append((await tracer.backend).saves)
    weights = merged_weights(0, "mlp.down_proj")
    for saves, weight in zip(runs, weights, strict=True):
        assert_close(saves["made"], saves["given"] @ weight.T)


def merged_weights(layer: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A module's weight without and with the adapter."""
    models = Oracle(path_of("tiny-llama")), Oracle(path_of("tiny-llama"), path_of("tiny-llama-lora"))
    plain, changed = (each.model.model.layers[layer].get_submodule(name).weight.detach() for each in models)
    assert distance(changed, plain) > 100 * TOLERANCE
    return plain, changed


# contract: C2
async def test_case_07_lora_modules_that_a_block_calls(
    lora_model: Any, adapter: Any, merged: Oracle, oracle: Any
) -> None:
    """Called on any number of rows, a module applies the adapter of the block's own request to all of them."""
    model, its = lora_model, oracle("tiny-llama")
    started = []
    for prompt in PROMPTS:
        for options, expected in (({}, its), ({"lora_request": adapter}, merged)):
            with model.trace(prompt, max_tokens=2, **GREEDY, **options) as tracer:
                fed = model.model.layers[2].mlp.input
                again = model.model.layers[2].mlp(torch.cat([fed, fed])).save()
                everywhere = model.compute_logits(model.output).save()
            started.append((tracer.backend, prompt, expected))
    for backend, prompt, expected in started:
        output = await backend
        run = expected.run(prompt, 2, [("mlp", 2), ("all_logits", None)])
        assert tokens_of(output) == run.tokens
        assert_close(output.saves["again"], run["mlp", 2][0].repeat(2, 1))
        assert_close(output.saves["everywhere"], run["all_logits", None][0])


async def test_prompt_embeds(lora_model: Any, oracle: Any) -> None:  # contract: C2
    """A prompt given as embeddings is read and edited as one of tokens; one too long is refused with both numbers."""
    model, its = lora_model, oracle("tiny-llama")
    ids, vector = its.tokens(PROMPT), vector_of(its)
    rows = its.model.model.embed_tokens.weight[ids].detach()
    wanted = feature("ignore_eos", its)
    plain = model.generate([{"prompt_embeds": rows}], **wanted.sampling)
    reading = trace(model, {"prompt_embeds": rows}, **wanted.sampling)
    editing = trace(model, {"prompt_embeds": rows}, vector, **wanted.sampling)
    (untraced,), read, edited = await plain, await reading, await editing
    assert_same(read, untraced)
    assert_true(read, its, wanted, [])
    assert_true(edited, its, wanted, steered(vector))
    with pytest.raises(PromptError, match=r"300 tokens.*takes 256"):
        trace(model, {"prompt_embeds": torch.zeros(300, its.width)}, max_tokens=1)
