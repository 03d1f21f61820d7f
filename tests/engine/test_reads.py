"""What a block reads agrees with the oracle: every kind of site, at every step, alone and in mixed batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_support import GREEDY, NAMES, PROMPTS, final_norm_of, layers_of, parts_of, tokens_of
from oracle import assert_close, assert_steps_close

STEPS = 4
PARTS = ("resid_pre", "norm", "attention", "mlp", "resid_post")


def chosen_layers(depth: int) -> list[int]:
    """The first, a middle and the last layer."""
    return [0, depth // 2, depth - 1]


def places(depth: int) -> list[tuple[str, int | None]]:
    layers: list[tuple[str, int | None]] = [(part, layer) for layer in chosen_layers(depth) for part in PARTS]
    return [*layers, ("final_norm", None), ("logits", None)]


def first(value: Any) -> Any:
    """The value of a module that hands the residual stream on beside it."""
    return value[0] if isinstance(value, tuple) else value


def agree(run: Any, seen: dict[Any, list[Any]], tokens: list[int]) -> None:
    """Every place of the run was seen in every step with the oracle's value, and the tokens are the oracle's."""
    assert tokens == run.tokens
    assert set(seen) == set(run.values)
    for place, values in run.values.items():
        assert_steps_close(seen[place], values, f"{place[0]} of layer {place[1]}")


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("name", NAMES)
def test_every_site_alone(name: str, prompt: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """Residual stream, norms, attention, MLP and logits, with all rows at the first step and one at each later one."""
    model, its = sync_model(name), oracle(name)
    layers, final, (norm, attention), chosen = (
        layers_of(model),
        final_norm_of(model),
        parts_of(model),
        chosen_layers(its.depth),
    )
    with model.trace(prompt, max_tokens=STEPS, **GREEDY) as tracer:
        seen = {}.save()

        def see(part, layer, value):
            seen.setdefault((part, layer), []).append(value)

        for _ in tracer.iter[:]:
            for i in chosen:
                see("resid_pre", i, layers[i].resid_pre)
                see("norm", i, first(layers[i].get_submodule(norm).output))
                see("attention", i, first(layers[i].get_submodule(attention).output))
                see("mlp", i, first(layers[i].mlp.output))
                see("resid_post", i, layers[i].resid_post)
            see("final_norm", None, first(final.output))
            see("logits", None, model.logits)
    run = its.run(prompt, STEPS, places(its.depth))
    agree(run, seen, tokens_of(tracer.result))
    assert [value.shape[0] for value in seen["resid_post", 0]] == [len(run.prompt), 1, 1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_every_site_in_a_mixed_batch(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2, B3
    """Each of several requests sees its own rows, whatever the lengths and the sites of the others."""
    model, its = sync_model(name), oracle(name)
    layers, (norm, attention), chosen = layers_of(model), parts_of(model), chosen_layers(its.depth)
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                seen = {}.save()
                for _ in tracer.iter[:]:
                    for i in chosen:
                        seen.setdefault(("norm", i), []).append(first(layers[i].get_submodule(norm).output))
                        seen.setdefault(("attention", i), []).append(first(layers[i].get_submodule(attention).output))
                        seen.setdefault(("resid_post", i), []).append(layers[i].resid_post)
                    seen.setdefault(("logits", None), []).append(model.logits)
            # Between those that see everything, one that asks for a single site, and one that asks for nothing.
            with tracer.invoke(prompt, max_tokens=STEPS + 2):
                one = layers[chosen[1]].resid_pre.save()
            with tracer.invoke(prompt, max_tokens=1):
                pass
    assert len(seen) == len(one) == len(PROMPTS)
    for number, prompt in enumerate(PROMPTS):
        wanted = [p for p in places(its.depth) if p[0] in ("norm", "attention", "resid_post", "logits")]
        run = its.run(prompt, STEPS + 2, [*wanted, ("resid_pre", chosen[1])])
        full, single, bare = (tokens_of(output) for output in tracer.result[3 * number : 3 * number + 3])
        assert full == run.tokens[:STEPS]
        assert single == run.tokens
        assert bare == run.tokens[:1]
        assert_close(one[number], run["resid_pre", chosen[1]][0])
        assert set(seen[number]) == set(wanted)
        for place in wanted:
            assert_steps_close(seen[number][place], run[place][:STEPS], f"{place} of prompt {number}")


@pytest.mark.parametrize("name", NAMES)
def test_case_11_output_is_vllms_own_and_the_stream_has_a_name(name: str, sync_model: Any, oracle: Any) -> None:
    """A Llama's layer gives the pair whose sum is the stream, a GPT-2's the stream; `resid_post` is it in both."""
    model, its = sync_model(name), oracle(name)
    layers, middle = layers_of(model), its.depth // 2
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        outputs, streams = [].save(), [].save()
        for _ in tracer.iter[:]:
            outputs.append(layers[middle].output)
            streams.append(layers[middle].resid_post)
    run = its.run(PROMPTS[0], 2, [("resid_post", middle), ("mlp", middle), ("resid_mid", middle)])
    assert_steps_close(streams, run["resid_post", middle])
    for step, output in enumerate(outputs):
        if name == "tiny-gpt2":
            assert_close(output, run["resid_post", middle][step])
        else:
            hidden, residual = output
            assert_close(hidden, run["mlp", middle][step])
            assert_close(residual, run["resid_mid", middle][step])


@pytest.mark.parametrize("name", NAMES)
def test_input_and_inputs(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """`inputs` is `(args, kwargs)` as vLLM gives them, `input` the first of them."""
    model, its = sync_model(name), oracle(name)
    layers, (_, attention) = layers_of(model), parts_of(model)
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        for prompt in PROMPTS[:2]:
            with tracer.invoke(prompt):
                args, kwargs = layers[1].get_submodule(attention).inputs
                named = {"args": args, "kwargs": kwargs}.save()
                fed = layers[1].mlp.input.save()
                again = layers[1].mlp.inputs[0][0].save()
                same = (fed is again).save()
    for number, prompt in enumerate(PROMPTS[:2]):
        run = its.run(prompt, 1, [("mlp_input", 1), ("attention_input", 1)])
        assert same[number] is True
        assert_close(fed[number], run["mlp_input", 1][0])
        assert_close(again[number], run["mlp_input", 1][0])
        given = [*named[number]["args"], *named[number]["kwargs"].values()]
        hidden = [value for value in given if value.is_floating_point()]
        assert len(hidden) == 1
        assert_close(hidden[0], run["attention_input", 1][0])
        positions = [value for value in given if not value.is_floating_point()]
        for value in positions:
            assert value.tolist() == list(range(len(run.prompt)))
        assert bool(positions) == (name != "tiny-gpt2")


@pytest.mark.parametrize("name", NAMES)
def test_case_20_a_read_per_step_runs_once_a_token(name: str, sync_model: Any) -> None:  # contract: C5
    """As many visits as generated tokens, the prompt's pass counted once, also with others in the batch."""
    model = sync_model(name)
    layers = layers_of(model)
    with model.trace(**GREEDY) as tracer:
        for prompt, count in zip(PROMPTS, (1, 5, 3, 8), strict=True):
            with tracer.invoke(prompt, max_tokens=count):
                rows, steps = [].save(), [].save()
                for step in tracer.iter[:]:
                    rows.append(layers[0].output[0].shape[0])
                    steps.append(step)
    for number, count in enumerate((1, 5, 3, 8)):
        assert len(tokens_of(tracer.result[number])) == count
        assert steps[number] == list(range(count))
        assert len(rows[number]) == count


def test_case_21_hidden_states_and_the_text_of_one_request(sync_model: Any, oracle: Any) -> None:
    """One trace gives the states of any layer and the text that was generated."""
    model, its = sync_model("smollm2"), oracle("smollm2")
    with model.trace(PROMPTS[0], max_tokens=3, **GREEDY) as tracer:
        state = model.model.layers[7].resid_post.save()
    run = its.run(PROMPTS[0], 3, [("resid_post", 7)])
    assert_close(state, run["resid_post", 7][0])
    assert tracer.result.outputs[0].text == its.text(run.tokens)
    assert "Paris" in tracer.result.outputs[0].text


@pytest.mark.parametrize("name", NAMES)
def test_case_02_a_saved_value_is_what_was_computed_there(name: str, sync_model: Any, oracle: Any) -> None:
    """vLLM's fused operations write into the buffers of earlier layers; what a block saved there stays."""
    model, its = sync_model(name), oracle(name)
    layers, depth = layers_of(model), its.depth
    with model.trace(PROMPTS[3], max_tokens=1, **GREEDY):
        outputs = [layers[i].mlp.output for i in range(depth)].save()
    run = its.run(PROMPTS[3], 1, [("mlp", layer) for layer in range(depth)])
    for layer in range(depth):
        assert_close(outputs[layer], run["mlp", layer][0], f"the MLP of layer {layer}")


@pytest.mark.parametrize("name", NAMES)
def test_a_value_held_over_later_steps_never_changes(name: str, sync_model: Any) -> None:  # contract: C3
    """A value that a block holds is the same at the end as when it was taken, though the engine reuses its memory."""
    model = sync_model(name)
    layers = layers_of(model)
    with model.trace(**GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt, max_tokens=6):
                held, clones = [].save(), [].save()
                for _ in tracer.iter[:]:
                    for value in (
                        layers[0].inputs,
                        layers[0].output,
                        layers[1].mlp.output,
                        model.logits,
                        model.samples,
                    ):
                        tensors = [value] if isinstance(value, torch.Tensor) else flat(value)
                        held.extend(tensors)
                        clones.extend([tensor.clone() for tensor in tensors])
    for mine, copies in zip(held, clones, strict=True):
        assert len(mine) == len(copies) >= 6 * 5
        for value, copy in zip(mine, copies, strict=True):
            assert torch.equal(value, copy)


def flat(value: Any) -> list[Any]:
    """The tensors of nested tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    return [tensor for item in value for tensor in flat(item)] if not isinstance(value, (int, type(None))) else []


# contract: A10
async def test_reads_on_the_stream_are_those_of_the_synchronous_path(
    async_model: Any, sync_model: Any, oracle: Any
) -> None:
    """The same block gives bit for bit the same values on both engines."""
    its = oracle("tiny-llama")
    streamed, direct = async_model("tiny-llama"), sync_model("tiny-llama")
    layers = streamed.model.layers
    with streamed.trace(PROMPTS[0], max_tokens=STEPS, **GREEDY) as tracer:
        values = [].save()
        for _ in tracer.all():
            values.append(layers[2].resid_post)
    output = await tracer.backend
    layers = direct.model.layers
    with direct.trace(PROMPTS[0], max_tokens=STEPS, **GREEDY) as tracer:
        values = [].save()
        for _ in tracer.all():
            values.append(layers[2].resid_post)
    run = its.run(PROMPTS[0], STEPS, [("resid_post", 2)])
    assert_steps_close(output.saves["values"], run["resid_post", 2])
    assert tokens_of(output) == tokens_of(tracer.result) == run.tokens
    assert all(torch.equal(mine, its) for mine, its in zip(output.saves["values"], values, strict=True))
