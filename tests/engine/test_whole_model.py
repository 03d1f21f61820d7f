"""What is asked of the whole model at once: logits of every position, every layer's stream, attention patterns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_support import GREEDY, NAMES, NOTHING_LEFT, PROMPTS, held, layers_of, parts_of, tokens_of
from oracle import TOLERANCE, Edit, assert_close, assert_steps_close, distance


def attention_pattern(attention: Any, keys: Any) -> Any:
    """The weights ``[heads, rows, tokens]`` of the step's rows over all tokens so far, whose keys are in the list."""
    queries, new = attention.inputs[0][:2]
    keys.append(new)
    heads, groups = attention.num_heads, attention.num_kv_heads
    q = queries.unflatten(-1, (heads, -1)).transpose(0, 1)
    k = torch.cat(keys).unflatten(-1, (groups, -1)).transpose(0, 1).repeat_interleave(heads // groups, 0)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    rows, tokens = scores.shape[1:]
    seen = torch.ones(rows, tokens, dtype=torch.bool).tril(tokens - rows)
    return scores.masked_fill(~seen, float("-inf")).softmax(-1)


@pytest.mark.parametrize("name", NAMES)
def test_case_07_logits_of_every_prompt_position(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """`model.compute_logits(model.output)`, in a mixed batch, at every step, and after an edit."""
    model, its = sync_model(name), oracle(name)
    layers = layers_of(model)
    vector = 2 * torch.randn(its.width, generator=torch.Generator().manual_seed(0))
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                everywhere, next_token = [].save(), [].save()
                for _ in tracer.iter[:]:
                    everywhere.append(model.compute_logits(model.output))
                    next_token.append(model.logits)
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    layers[1].resid_post += vector
                    edited = model.compute_logits(model.output)
                edited.save()
            with tracer.invoke(prompt, prompt_logprobs=0):
                pass
    edit = Edit("resid_post", 1, lambda rows: rows + vector)
    for number, prompt in enumerate(PROMPTS):
        run = its.run(prompt, 3, [("all_logits", None)])
        assert_steps_close(everywhere[number], run["all_logits", None], "the logits of every position")
        for every, last in zip(everywhere[number], next_token[number], strict=True):
            assert distance(every[-1:], last) < TOLERANCE
        changed = its.run(prompt, 3, [("all_logits", None)], [edit])
        assert_close(edited[number], changed["all_logits", None][-1])
        read, steered, plain = tracer.result[3 * number : 3 * number + 3]
        assert tokens_of(read) == tokens_of(plain) == run.tokens
        assert tokens_of(steered) == changed.tokens
        # vLLM's own way to say less of the same.
        logprobs = run["all_logits", None][0].log_softmax(-1)
        for position, each in enumerate((plain.prompt_logprobs or [None])[1:]):
            token = run.prompt[position + 1]
            assert abs(each[token].logprob - float(logprobs[position, token])) < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_case_11_the_stream_of_every_layer_is_read(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """`resid_pre` and `resid_post` of each layer, at every step, of requests in one batch."""
    model, its = sync_model(name), oracle(name)
    layers, depth = layers_of(model), its.depth
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                before, after = [].save(), [].save()
                for _ in tracer.iter[:]:
                    for layer in layers:
                        before.append(layer.resid_pre)
                        after.append(layer.resid_post)
    for number, prompt in enumerate(PROMPTS):
        run = its.run(prompt, 2, [(part, i) for part in ("resid_pre", "resid_post") for i in range(depth)])
        for i in range(depth):
            assert_steps_close(before[number][i::depth], run["resid_pre", i], f"the stream before layer {i}")
            assert_steps_close(after[number][i::depth], run["resid_post", i], f"the stream after layer {i}")


@pytest.mark.parametrize("name", NAMES)
def test_case_11_the_stream_of_every_layer_is_written(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """One request for each layer and end, that changes the stream there; each goes on as the oracle does."""
    model, its = sync_model(name), oracle(name)
    layers, steps = layers_of(model), 2
    # All layers of the tiny models; of the real one some, for its logits are large.
    numbers = range(0, its.depth, 7 if name == "smollm2" else 1)
    vector = 2 * torch.randn(its.width, generator=torch.Generator().manual_seed(1))
    with model.trace(max_tokens=steps, **GREEDY) as tracer:
        for number in numbers:
            with tracer.invoke(PROMPTS[0]):
                logits = [].save()
                for _ in tracer.iter[:]:
                    layers[number].resid_pre += vector
                    logits.append(model.logits)
            with tracer.invoke(PROMPTS[0]):
                logits = [].save()
                for _ in tracer.iter[:]:
                    layers[number].resid_post = layers[number].resid_post + vector
                    logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            logits = [].save()
            for _ in tracer.iter[:]:
                logits.append(model.logits)
    reads = [("logits", None)]
    plain = its.run(PROMPTS[0], steps, reads)
    assert_steps_close(logits[-1], plain["logits", None])
    assert tokens_of(tracer.result[-1]) == plain.tokens
    edits = [(site, number) for number in numbers for site in ("resid_pre", "resid_post")]
    for (site, number), mine, output in zip(edits, logits[:-1], tracer.result[:-1], strict=True):
        run = its.run(PROMPTS[0], steps, reads, [Edit(site, number, lambda rows: rows + vector)])
        assert distance(run["logits", None][0], plain["logits", None][0]) > 100 * TOLERANCE
        assert_steps_close(mine, run["logits", None], f"the logits after an edit of {site} of layer {number}")
        assert tokens_of(output) == run.tokens


@pytest.mark.parametrize("name", NAMES)
def test_case_27_attention_patterns(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """From the queries and keys that attention is called with, rotated and grouped as they are, at every step."""
    model, its = sync_model(name), oracle(name)
    layers, attention, chosen = layers_of(model), parts_of(model)[1], [0, its.depth - 1]
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                patterns, keys = {i: [] for i in chosen}.save(), {i: [] for i in chosen}
                for _ in tracer.iter[:]:
                    for i in chosen:
                        module = layers[i].get_submodule(attention).attn
                        patterns[i].append(attention_pattern(module, keys[i]))
    for number, prompt in enumerate(PROMPTS):
        run = its.run(prompt, 3, [("pattern", i) for i in chosen])
        assert tokens_of(tracer.result[number]) == run.tokens
        for i in chosen:
            for mine, expected in zip(patterns[number][i], run["pattern", i], strict=True):
                assert mine.shape == expected.shape
                assert float((mine - expected).abs().max()) < 1e-4
                assert mine.shape[-1] == 1 or float(expected.std()) > 0.01


@pytest.mark.parametrize(
    "where", ["comprehension", "generator", "past except", "past finally", "function of the block"]
)
# contract: C6
def test_case_08_stop_in_helpers_and_inner_loops(where: str, sync_model: Any, oracle: Any) -> None:
    """The block ends and not just the loop or the helper; the twin beside it and the caller's loop go on."""
    model, its = sync_model("tiny-llama"), oracle("tiny-llama")

    def end_in(tracer: Any, where: str, notes: Any) -> None:
        def stopping() -> Any:
            yield 1
            tracer.stop()
            yield 2

        if where == "comprehension":
            [tracer.stop() for _ in range(3)]
        elif where == "generator":
            for _ in stopping():
                notes.append("yielded")
        elif where == "past except":
            try:
                tracer.stop()
            except Exception:
                notes.append("caught")
        else:
            try:
                tracer.stop()
            finally:
                notes.append("finally")

    turns = []
    for turn in range(2):
        with model.trace(max_tokens=5, **GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                notes = [].save()

                def end() -> None:
                    for _ in range(3):
                        while True:
                            tracer.stop()

                for step in tracer.iter[:]:
                    notes.append(step)
                    for layer in model.model.layers:
                        stream = layer.resid_post
                        if step == 2:
                            end() if where == "function of the block" else end_in(tracer, where, notes)
                notes.append("after the loop")
            with tracer.invoke(PROMPTS[0]):
                logits = model.logits.save()
        turns.append(turn)
        run = its.run(PROMPTS[0], 5, [("logits", None)])
        stopped, twin = tracer.result
        more = {"generator": ["yielded"], "past finally": ["finally"]}.get(where, [])
        assert notes == [0, 1, 2, *more]
        assert tokens_of(stopped) == run.tokens[:2]
        assert tokens_of(twin) == run.tokens
        assert_close(logits, run["logits", None][0])
    assert turns == [0, 1]
    assert held(model.debug()) == NOTHING_LEFT
