"""Whatever the scheduler does with a batch, the numbers stay true: splits, cached prefixes, preemptions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_support import GREEDY, NOTHING_LEFT, held, tokens_of
from oracle import Edit, assert_close, assert_steps_close

from endoscope import VLLM
from endoscope.errors import BlockError, PreemptionError, PromptError
from endoscope.tracing.block import Code
from endoscope.tracing.messages import Submission, encode
from endoscope.tracing.serialize import dumps
from endoscope.vllm.engine.probes import EngineProbes, Rows
from endoscope.vllm.sync_backend import VLLMBackend
from tests.conftest import path_of

BUDGET = 512
BLOCK = 128
LAYER = 1
VECTOR = 3.0 * torch.randn(128, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Iterator[VLLM]:
    """An engine whose steps take 512 tokens, and that has space for six blocks of 128 tokens."""
    # Keys and values of four layers with two heads of 32 float32 numbers; vLLM keeps one block for itself.
    space = 7 * BLOCK * 4 * 2 * 2 * 32 * 4
    options: dict[str, Any] = {"max_model_len": 600, "kv_cache_memory_bytes": space, "disable_log_stats": False}
    with VLLM(
        path_of("tiny-llama"), dtype="float32", max_num_batched_tokens=BUDGET, max_num_seqs=8, **options
    ) as model:
        yield model
        assert held(model.debug()) == NOTHING_LEFT


@pytest.fixture(autouse=True)
def fresh(model: VLLM) -> None:
    """Every test begins with an empty prefix cache."""
    model.start()
    model.engine.llm.reset_prefix_cache()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of that many random tokens."""
    return torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def preemptions(model: VLLM) -> int:
    """How many there have been."""
    (counter,) = [each for each in model.engine.llm.get_metrics() if each.name == "vllm:num_preemptions"]
    return int(counter.value)


class Together(VLLMBackend):
    """Runs a trace's requests and untraced ones so that all of them are there before the first step begins.

    Args:
        model: the model.
        before, after: prompts of untraced requests that are submitted before the trace's and after them.
        sampling: of the untraced ones.
    """

    def __init__(self, model: VLLM, before: Any = (), after: Any = (), **sampling: Any) -> None:
        super().__init__(model)
        self.before, self.after = [[(prompt, sampling, None) for prompt in some] for some in (before, after)]
        self.outputs: list[Any] = []
        """Those of the untraced requests."""

    def __call__(self, tracer: Any) -> None:
        engine = self.model.start().engine
        traced = [(invoke.prompt, invoke.sampling, invoke.block) for invoke in tracer.invokes]
        core, step = engine.llm.llm_engine.engine_core, engine.llm.llm_engine.step

        def first_step() -> Any:
            del engine.llm.llm_engine.step
            core.call_utility("resume_scheduler")
            return step()

        core.call_utility("pause_scheduler", "keep", False)
        engine.llm.llm_engine.step = first_step
        requests = engine.run([*self.before, *traced, *self.after], self.model.resolve)
        middle = requests[len(self.before) : len(self.before) + len(traced)]
        self.outputs = [request.output for request in requests if request not in middle]
        tracer.result = [request.output for request in middle]
        self.errors = [request.error for request in middle]
        tracer.saves = {}
        self.saves = [request.saves for request in middle]


def numbers(output: Any) -> tuple[Any, ...]:
    """Everything that a request with logprobs tells of the model, as exact numbers."""
    made = output.outputs[0]
    steps = [{token: each.logprob for token, each in step.items()} for step in made.logprobs]
    return list(made.token_ids), steps


# The prefill.


def test_case_13_the_last_token_of_a_prompt_is_one_row(model: VLLM, oracle: Any) -> None:
    # contract: F2
    its = oracle("tiny-llama")
    prompt, long = prompt_of(300), prompt_of(400, seed=1)
    together = Together(model, before=[long], after=[long[:390]], max_tokens=4, **GREEDY)
    with model.trace(prompt, backend=together, max_tokens=3, **GREEDY) as tracer:
        last, whole = [].save(), [].save()
        for _ in tracer.iter[:]:
            rows = model.model.layers[LAYER].resid_post
            last.append(rows[-1:])
            whole.append(rows)
    run = its.run(prompt, 3, [("resid_post", LAYER)])
    (saves,) = together.saves
    assert [rows.shape[0] for rows in saves["last"]] == [1, 1, 1]
    assert_steps_close(saves["whole"], run["resid_post", LAYER], "the stream")
    assert_close(saves["last"][0], run["resid_post", LAYER][0][-1:], "the last token's row")
    assert tokens_of(tracer.result[0]) == run.tokens
    assert [tokens_of(output) for output in together.outputs] == [its.run(p, 4).tokens for p in (long, long[:390])]


def test_case_14_a_prompt_longer_than_a_step_is_refused_with_both_numbers(model: VLLM) -> None:
    # contract: F2
    with pytest.raises(PromptError, match=r"\b513\b.*\b512\b"):
        with model.trace(prompt_of(BUDGET + 1), max_tokens=1):
            pass
    with model.trace(prompt_of(BUDGET), max_tokens=2, **GREEDY):
        rows = model.model.layers[LAYER].resid_post.save()
    assert rows.shape[0] == BUDGET
    # Untraced ones are split as ever.
    (output,) = model.generate(prompt_of(BUDGET + 1), max_tokens=2, **GREEDY)
    assert len(tokens_of(output)) == 2


def test_case_22_all_rows_of_a_prompt_whose_beginning_is_cached(model: VLLM, oracle: Any) -> None:
    # contract: F1, F2
    its = oracle("tiny-llama")
    prompt = prompt_of(300)
    run = its.run(prompt, 2, [("resid_post", LAYER)])
    for cached in (0, 2 * BLOCK):
        (output,) = model.generate(prompt, max_tokens=2, **GREEDY)
        assert output.num_cached_tokens == cached
        assert tokens_of(output) == run.tokens
    with model.trace(prompt, max_tokens=2, **GREEDY) as tracer:
        rows = model.model.layers[LAYER].resid_post.save()
    assert_close(rows, run["resid_post", LAYER][0], "the prompt's rows")
    assert tokens_of(tracer.result) == run.tokens
    assert not tracer.result.num_cached_tokens


# The prefix cache.


def steer(model: VLLM, prompt: list[int], vector: torch.Tensor = VECTOR) -> list[int]:
    """Steer a prompt at every step; returns the tokens."""
    with model.trace(prompt, max_tokens=3, **GREEDY) as tracer:
        for _ in tracer.iter[:]:
            model.model.layers[LAYER].output[0][:] += vector
    return tokens_of(tracer.result)


def plain(model: VLLM, prompt: list[int]) -> tuple[Any, int]:
    """Run a prompt without a block: its numbers, and how many of its tokens came from the cache."""
    (output,) = model.generate(prompt, max_tokens=3, logprobs=20, **GREEDY)
    return numbers(output), output.num_cached_tokens


def rows_of(model: VLLM, prompt: list[int]) -> torch.Tensor:
    """What a block that only reads sees of a prompt, layer by layer."""
    with model.trace(prompt, max_tokens=1, **GREEDY):
        streams = [].save()
        for number in range(4):
            streams.append(model.model.layers[number].resid_post)
    return torch.stack(streams)


@pytest.mark.parametrize("order", ["steered first", "steered in between", "steered last"])
def test_case_23_nobody_gets_the_keys_and_values_of_a_steered_prompt(order: str, model: VLLM, oracle: Any) -> None:
    # contract: F3, F1
    its = oracle("tiny-llama")
    prompt, other = prompt_of(200), prompt_of(200)[:180] + prompt_of(20, seed=9)
    # The same requests without any that is steered.
    first, second, beginning = plain(model, prompt), plain(model, prompt), plain(model, other)
    rows = rows_of(model, prompt)
    assert [cached for _, cached in (first, second, beginning)] == [0, BLOCK, BLOCK]
    model.engine.llm.reset_prefix_cache()

    steered = []
    if order == "steered first":
        steered.append(steer(model, prompt))
    assert plain(model, prompt) == first
    if order == "steered in between":
        steered.append(steer(model, prompt))
    assert torch.equal(rows_of(model, prompt), rows)
    assert plain(model, prompt) == second
    if order == "steered last":
        steered.append(steer(model, prompt))
    assert plain(model, other) == beginning
    assert plain(model, prompt) == second
    expected = its.run(prompt, 3, edits=[Edit("mlp", LAYER, lambda rows: rows + VECTOR)]).tokens
    assert steered == [expected]
    assert expected != first[0][0], "steering changes nothing, so it proves nothing"


@pytest.mark.parametrize("place", ["before", "after"])
def test_case_23_nobody_gets_them_in_the_same_batch(place: str, model: VLLM) -> None:
    # contract: F3
    prompt = prompt_of(150)
    other = prompt[:140] + prompt_of(10, seed=9)

    def run(vector: torch.Tensor) -> tuple[Any, ...]:
        model.engine.llm.reset_prefix_cache()
        together = Together(model, **{place: [other]}, max_tokens=3, logprobs=20, **GREEDY)
        with model.trace(backend=together, max_tokens=3, logprobs=20, **GREEDY) as tracer:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    model.model.layers[LAYER].output[0][:] += vector
            with tracer.invoke(prompt):
                streams = [].save()
                for _ in tracer.iter[:]:
                    for number in range(4):
                        streams.append(model.model.layers[number].resid_post)
        (untraced,), (steered, reading) = together.outputs, tracer.result
        again = plain(model, other)
        return numbers(steered), numbers(reading), numbers(untraced), together.saves[1]["streams"], again

    clean, mixed = run(torch.zeros(128)), run(VECTOR)
    assert mixed[0] != clean[0], "steering changes nothing, so it proves nothing"
    assert mixed[1:3] == clean[1:3]
    assert all(map(torch.equal, mixed[3], clean[3]))
    assert mixed[4] == clean[4]
    assert mixed[4][1] == BLOCK


# Preemption.


def readers(model: VLLM, prompts: list[list[int]], steps: int, together: Together) -> Any:
    """Read the stream of each prompt at each step."""
    with model.trace(backend=together, max_tokens=steps, **GREEDY) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                stream = [].save()
                for _ in tracer.iter[:]:
                    stream.append(model.model.layers[LAYER].resid_post)
    return tracer.result


def test_a_preempted_reader_gives_the_same_numbers(model: VLLM, oracle: Any) -> None:
    # contract: F4
    its = oracle("tiny-llama")
    # Each takes one block, and a second one soon.
    prompts = [prompt_of(118 + number, seed=number) for number in range(5)]
    before, together = preemptions(model), Together(model)
    outputs = readers(model, prompts, 16, together)
    assert preemptions(model) > before, "nothing was preempted, so it proves nothing"
    assert together.errors == [None] * 5
    for prompt, output, saves in zip(prompts, outputs, together.saves, strict=True):
        run = its.run(prompt, 16, [("resid_post", LAYER)])
        assert tokens_of(output) == run.tokens
        assert_steps_close(saves["stream"], run["resid_post", LAYER], "a preempted request's stream")


@pytest.mark.parametrize("at", ["the prompt", "every step"])
def test_a_preempted_request_that_has_edited_ends_with_the_named_error(at: str, model: VLLM, oracle: Any) -> None:
    # contract: F4
    its = oracle("tiny-llama")
    prompts = [prompt_of(118 + number, seed=number) for number in range(5)]
    before, together = preemptions(model), Together(model)
    with model.trace(backend=together, max_tokens=16, **GREEDY) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                # Of a block that is over after the prompt, the engine has heard the last long before it preempts.
                seen = [].save()
                for _ in tracer.iter[:] if at == "every step" else tracer.iter[:1]:
                    model.model.layers[LAYER].output[0][:] += VECTOR
                    seen.append(model.model.layers[LAYER + 1].resid_post)
    assert preemptions(model) > before, "nothing was preempted, so it proves nothing"
    steps = None if at == "every step" else (0,)
    failed = 0
    for prompt, output, error, saves in zip(prompts, tracer.result, together.errors, together.saves, strict=True):
        edits = [Edit("mlp", LAYER, lambda rows: rows + VECTOR, steps)]
        run = its.run(prompt, 16, [("resid_post", LAYER + 1)], edits)
        made = tokens_of(output)
        expected = run["resid_post", LAYER + 1][: len(made) if at == "every step" else 1]
        assert_steps_close(saves["seen"], expected, "what was saved")
        if error is None:
            assert made == run.tokens
        else:
            failed += 1
            assert isinstance(error, PreemptionError)
            assert len(made) < 16
            assert made == run.tokens[: len(made)]
            assert "kv_cache_memory_bytes" in str(error)
    assert 0 < failed < 5


def test_requests_that_edit_are_preempted_behind_all_others(model: VLLM, oracle: Any) -> None:
    # contract: F4
    its = oracle("tiny-llama")
    prompts = [prompt_of(118 + number, seed=number) for number in range(5)]
    before, together = preemptions(model), Together(model, before=prompts[:3], max_tokens=16, **GREEDY)
    with model.trace(backend=together, max_tokens=16, **GREEDY) as tracer:
        for prompt in prompts[3:]:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    model.model.layers[LAYER].output[0][:] += VECTOR
    assert preemptions(model) > before, "nothing was preempted, so it proves nothing"
    assert together.errors == [None, None]
    edits = [Edit("mlp", LAYER, lambda rows: rows + VECTOR)]
    assert [tokens_of(output) for output in tracer.result] == [its.run(p, 16, edits=edits).tokens for p in prompts[3:]]
    assert [tokens_of(output) for output in together.outputs] == [its.run(p, 16).tokens for p in prompts[:3]]


def test_a_preempted_request_keeps_its_forced_tokens(model: VLLM, oracle: Any) -> None:
    # contract: F4
    its = oracle("tiny-llama")
    prompts = [prompt_of(118 + number, seed=number) for number in range(5)]
    before, together = preemptions(model), Together(model)
    with model.trace(backend=together, max_tokens=16, **GREEDY) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for step in tracer.iter[:]:
                    if step % 2 == 0:
                        model.samples = 5 + step
    assert preemptions(model) > before, "nothing was preempted, so it proves nothing"
    assert together.errors == [None] * 5
    for prompt, output in zip(prompts, tracer.result, strict=True):
        assert tokens_of(output) == its.run(prompt, 16, forced={step: 5 + step for step in range(0, 16, 2)}).tokens


# What vLLM splits in spite of all.


def test_a_block_is_not_run_on_a_part_of_its_prompt() -> None:
    # contract: F2
    code = Code.make("seen = 1", "block.py", 1, 0)
    probes = EngineProbes(torch.nn.Sequential(torch.nn.Linear(2, 2)), lambda: None, reports=False)
    probes.admit("0_a", encode(Submission(False, "nowhere", "a", code, dumps({}), False)))
    probes.begin([Rows("0_a", first=0, count=3, known=5)], tokens=3)
    probe = probes.traced["0_a"].probe
    assert probes.end() == ({"0_a": False}, [])
    assert isinstance(probe.error, BlockError)
    assert "5 tokens" in str(probe.error)
    probes.release(["0_a"])
