"""``module.skip`` on vLLM: as a hook that replaces the module's result, for one request of many and for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_support import GREEDY, NOTHING_LEFT, PROMPTS, held, layers_of, parts_of, tokens_of
from oracle import TOLERANCE, Edit, assert_steps_close, distance

from endoscope.errors import MissingStateError, NeverRanError, ReplacementError

STEPS = 5
NAMES = ("tiny-llama", "tiny-gpt2")
LAYER = 1
PLACES = {
    "mlp": ("mlp_input", "mlp"),
    "attention": ("attention_input", "attention"),
    "layer": ("resid_pre", "resid_post"),
}
WHEN = {"every step": range(STEPS), "the first step": range(1), "two steps": range(1, 3)}


def expected_of(its: Any, prompt: str, part: str, steps: Any) -> Any:
    """What plain hooks give that put half of what a part is called with in the place of its result."""
    before, after = PLACES[part]
    kept: list[torch.Tensor] = []

    def keep(rows: torch.Tensor) -> torch.Tensor:
        kept.append(rows.clone())
        return rows

    edits = [Edit(before, LAYER, keep, steps), Edit(after, LAYER, lambda _: kept[-1] / 2, steps)]
    run = its.run(prompt, STEPS, [("resid_post", its.depth - 1), ("logits", None)], edits)
    untouched = its.run(prompt, STEPS, [("resid_post", its.depth - 1), ("logits", None)])
    changed = [distance(*pair) for pair in zip(run["logits", None], untouched["logits", None], strict=True)]
    assert max(changed) > 100 * TOLERANCE, "the skip changes nothing, so it proves nothing"
    return run


def agree(run: Any, depth: int, stream: Any, logits: Any, output: Any, what: str) -> None:
    assert tokens_of(output) == run.tokens, what
    assert_steps_close(stream, run["resid_post", depth - 1], f"{what}: the stream")
    assert_steps_close(logits, run["logits", None], f"{what}: the logits")


def skipped(model: Any, part: str) -> Any:
    """The module that a part is."""
    layer = layers_of(model)[LAYER]
    return {"layer": layer, "mlp": layer["mlp"], "attention": layer[parts_of(model)[1]]}[part]


def half(module: Any, part: str) -> Any:
    """Half of what the part adds to, or is called with: read at its beginning, as a user would."""
    if part == "layer":
        return module.resid_pre / 2
    args, kwargs = module.inputs
    return kwargs.get("hidden_states", args[0] if args else None) / 2


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("part", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_one_request_of_many(name: str, part: str, when: str, sync_model: Any, oracle: Any) -> None:  # contract: C4
    """Beside it: a reader of the same module, of another length, a twin, and a request with no block."""
    model, its, steps = sync_model(name), oracle(name), WHEN[when]
    module, last = skipped(model, part), layers_of(model)[its.depth - 1]
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[3]):
            seen, stream, logits = [].save(), [].save(), [].save()
            for _ in tracer.iter[:]:
                seen.append(module.resid_post if part == "layer" else module.output)
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            seen, stream, logits = [].save(), [].save(), [].save()
            for step in tracer.iter[:]:
                if step in steps:
                    value = half(module, part)
                    module.skip(value)
                    after = module.resid_post if part == "layer" else module.output
                    seen.append(torch.equal(after, value))
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            seen, stream, logits = [].save(), [].save(), [].save()
            for _ in tracer.iter[:]:
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            pass
    reads = [("resid_post", its.depth - 1), ("logits", None)]
    reader = its.run(PROMPTS[3], STEPS, [*reads, (PLACES[part][1], LAYER)])
    twin = its.run(PROMPTS[0], STEPS, reads)
    agree(reader, its.depth, stream[0], logits[0], tracer.result[0], "the reader")
    assert_steps_close(seen[0], reader[PLACES[part][1], LAYER], "the reader's module")
    agree(expected_of(its, PROMPTS[0], part, steps), its.depth, stream[1], logits[1], tracer.result[1], "the skipper")
    assert seen[1] == [True] * len(steps)
    agree(twin, its.depth, stream[2], logits[2], tracer.result[2], "the twin")
    assert tokens_of(tracer.result[3]) == twin.tokens
    assert held(model.debug()) == NOTHING_LEFT


@pytest.mark.parametrize("part", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_every_request(name: str, part: str, sync_model: Any, oracle: Any) -> None:  # contract: C4
    """The module does not run, as the hook of a block shows that counts how often a module inside of it does."""
    model, its = sync_model(name), oracle(name)
    module, layers = skipped(model, part), layers_of(model)
    last = layers[its.depth - 1]
    inside = {"mlp": "mlp.c_fc" if "gpt2" in name else "mlp.gate_up_proj", "attention": f"{parts_of(model)[1]}.attn"}
    counted = inside.get(part, inside["attention"])
    # The first pass that a block takes part in is the one in which the model is learned.
    with model.trace(PROMPTS[2], max_tokens=1, **GREEDY):
        model.logits  # noqa: B018
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        for prompt in PROMPTS[:3]:
            with tracer.invoke(prompt):
                stream, logits, here, elsewhere = [].save(), [].save(), [].save(), [].save()
                hooks = [
                    layers[LAYER].get_submodule(counted).register_forward_hook(lambda *_, runs=here: runs.append(1)),
                    layers[2].get_submodule(counted).register_forward_hook(lambda *_, runs=elsewhere: runs.append(1)),
                ]
                for _ in tracer.iter[:]:
                    module.skip(half(module, part))
                    stream.append(last.resid_post)
                    logits.append(model.logits)
                for hook in hooks:
                    hook.remove()
    for index, prompt in enumerate(PROMPTS[:3]):
        run = expected_of(its, prompt, part, None)
        agree(run, its.depth, stream[index], logits[index], tracer.result[index], f"request {index}")
        assert (len(here[index]), len(elsewhere[index])) == (0, STEPS)
    assert held(model.debug()) == NOTHING_LEFT


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_left_out(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C4
    """The plain words for it, alone and twice beside an untraced request; the first layer and the last."""
    model, its = sync_model(name), oracle(name)
    for number in (0, its.depth - 1):
        layer = layers_of(model)[number]
        kept: list[torch.Tensor] = []

        def keep(rows: torch.Tensor, kept: Any = kept) -> torch.Tensor:
            kept.append(rows.clone())
            return rows

        edits = [Edit("resid_pre", number, keep), Edit("resid_post", number, lambda _, kept=kept: kept[-1])]
        run = its.run(PROMPTS[0], STEPS, [("logits", None)], edits)
        for others in (0, 1):
            with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
                with tracer.invoke(PROMPTS[0]):
                    logits = [].save()
                    for _ in tracer.iter[:]:
                        layer.skip(layer.resid_pre)
                        logits.append(model.logits)
                for _ in range(others):
                    with tracer.invoke(PROMPTS[3]):
                        pass
            assert tokens_of(tracer.result[0]) == run.tokens
            assert_steps_close(logits, run["logits", None], "the logits")


@pytest.mark.parametrize("beside", ["nobody", "one that does so too", "one that always skips", "others"])
@pytest.mark.parametrize("part", ["attention", "layer"])
@pytest.mark.parametrize("name", NAMES)
def test_later_steps_read_what_a_skipped_step_has_kept(
    name: str, part: str, beside: str, sync_model: Any, oracle: Any
) -> None:  # contract: C4
    """Skipped in the step over the prompt, and then as ever: its keys and values are those that a plain hook leaves."""
    model, its = sync_model(name), oracle(name)
    module = skipped(model, part)
    # Of two that are skipped in a batch, one goes on without a block and one with.
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            module.skip(half(module, part))
            first = model.logits.save()
        if beside == "one that does so too":
            with tracer.invoke(PROMPTS[2]):
                module.skip(half(module, part))
                logits = [].save()
                for _ in tracer.iter[:]:
                    logits.append(model.logits)
        if beside in ("one that always skips", "others"):
            with tracer.invoke(PROMPTS[2]):
                logits = [].save()
                for _ in tracer.iter[:]:
                    module.skip(half(module, part))
                    logits.append(model.logits)
        if beside == "others":
            with tracer.invoke(PROMPTS[3]):
                pass
    # Alone, the trace is of one invoke, and its result is its output.
    outputs = tracer.result if isinstance(tracer.result, list) else [tracer.result]
    run = expected_of(its, PROMPTS[0], part, range(1))
    assert tokens_of(outputs[0]) == run.tokens
    assert_steps_close([first], run["logits", None][:1], "the first logits")
    if beside != "nobody":
        run = expected_of(its, PROMPTS[2], part, range(1) if beside == "one that does so too" else None)
        assert tokens_of(outputs[1]) == run.tokens
        assert_steps_close(logits, run["logits", None], "the other's logits")
    if beside == "others":
        assert tokens_of(outputs[2]) == its.run(PROMPTS[3], STEPS).tokens
    assert held(model.debug()) == NOTHING_LEFT


@pytest.mark.parametrize("name", NAMES)
def test_logits_after_a_skipped_step(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C4
    """Alone in its batch, in which each row of a step is skipped; the attention runs all the same, but for the last."""
    model, its = sync_model(name), oracle(name)
    layer = layers_of(model)[LAYER]
    attention = f"{parts_of(model)[1]}.attn"
    for steps in WHEN.values():
        with model.trace(PROMPTS[0], max_tokens=STEPS, **GREEDY) as tracer:
            logits, runs = [].save(), [].save()
            hook = layer.get_submodule(attention).register_forward_hook(lambda *_, runs=runs: runs.append(1))
            for step in tracer.iter[:]:
                if step in steps:
                    layer.skip(layer.resid_pre / 2)
                logits.append(model.logits)
            hook.remove()
        run = expected_of(its, PROMPTS[0], "layer", steps)
        assert tokens_of(tracer.result) == run.tokens
        assert_steps_close(logits, run["logits", None], "the logits")
        # No step comes behind the last, so nothing is kept of that.
        assert len(runs) == STEPS - (STEPS - 1 in steps)
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        runs = [].save()
        hook = layer.get_submodule(attention).register_forward_hook(lambda *_, runs=runs: runs.append(1))
        layer.skip(layer.resid_pre / 2)
        hook.remove()
        logits = model.logits.save()
    assert runs == []
    assert_steps_close([logits], expected_of(its, PROMPTS[0], "layer", range(1))["logits", None][:1], "the logits")


def test_a_block_that_only_seems_to_skip_in_every_step(sync_model: Any) -> None:  # contract: C4, D1
    """A function from outside changes what it skips."""
    model = sync_model("tiny-llama")
    layers, which, use_up = model.model.layers, [LAYER], list.clear
    with pytest.raises(MissingStateError, match=r"self_attn\.attn runs in step 1 of this request") as caught:
        with model.trace(PROMPTS[0], max_tokens=STEPS, **GREEDY) as tracer:
            for step in tracer.iter[:]:
                for number in which:
                    layers[number].skip(layers[number].resid_pre)
                if step == 0:
                    first = model.logits.save()
                use_up(which)
    assert list(caught.value.output.saves) == ["first"]
    assert len(tokens_of(caught.value.output)) <= 2
    assert held(model.debug()) == NOTHING_LEFT


@pytest.mark.parametrize("others", [0, 1])
def test_errors(others: int, sync_model: Any, oracle: Any) -> None:  # contract: C4, C8, D1
    """A value that does not fit, and a site inside: errors of that block only."""
    model, its = sync_model("tiny-llama"), oracle("tiny-llama")
    layer = model.model.layers[LAYER]
    with pytest.raises(ReplacementError, match=r"layers\.1\.mlp\.skip takes a tensor of shape") as caught:
        with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
            with tracer.invoke(PROMPTS[0]):
                layer.mlp.skip(layer.mlp.input[:, 1:])
            with tracer.invoke(PROMPTS[2]):
                layer.skip(layer.resid_pre)
                layer.mlp.skip(0)
            for _ in range(others):
                with tracer.invoke(PROMPTS[3]):
                    pass
    assert any(NeverRanError.__name__ in note for note in caught.value.__notes__)
    if others:
        assert tokens_of(tracer.result[2]) == its.run(PROMPTS[3], STEPS).tokens
    assert held(model.debug()) == NOTHING_LEFT
