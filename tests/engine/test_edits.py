"""What a block changes: the request goes on as the oracle does under the same change, and no other notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_support import GREEDY, NAMES, NOTHING_LEFT, PROMPTS, held, layers_of, parts_of, tokens_of
from oracle import TOLERANCE, Edit, assert_close, assert_steps_close, distance

from endoscope.errors import BlockError, ReplacementError

STEPS = 4
# The site in a block, with the module below a layer that has it, and the oracle's name of the place.
SITES = {
    "resid_pre": ("", "resid_pre", "resid_pre"),
    "resid_post": ("", "resid_post", "resid_post"),
    "mlp.output": ("mlp", "output", "mlp"),
    "mlp.input": ("mlp", "input", "mlp_input"),
    "mlp.inputs": ("mlp", "inputs", "mlp_input"),
    "attention.output": ("attention", "output", "attention"),
}
WHEN = {"the first step": (0,), "every step": None, "the steps after the first": (1, 2, 3)}


def vector_of(width: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    """A direction to steer in, strong enough to be seen in the next layers and weak enough to leave them finite."""
    return scale * torch.randn(width, generator=torch.Generator().manual_seed(seed))


def edit(module: Any, site: str, how: str, change: Any) -> None:
    """What a user writes by hand for one site, in place or by assignment."""
    value = getattr(module, site)
    if site == "inputs":
        args, kwargs = value
        if how == "in place":
            args[0].copy_(change(args[0]))
        else:
            module.inputs = (change(args[0]), *args[1:]), kwargs
    elif how == "in place":
        value.copy_(change(value))
    else:
        setattr(module, site, change(value))


def check(its: Any, edits: list[Edit], edited: tuple[Any, Any, Any], others: list[tuple[str, Any, Any, Any]]) -> None:
    """The edited request equals the oracle under the edits; the others equal the oracle without them."""
    reads = [("resid_post", its.depth - 1), ("logits", None)]
    touched, untouched = its.run(PROMPTS[0], STEPS, reads, edits), its.run(PROMPTS[0], STEPS, reads)
    changed = [distance(new, old) for p in reads for new, old in zip(touched[p], untouched[p], strict=True)]
    assert max(changed) > 100 * TOLERANCE, "the edit changes nothing, so it proves nothing"
    stream, logits, output = edited
    assert tokens_of(output) == touched.tokens
    assert_steps_close(stream, touched["resid_post", its.depth - 1], "the edited request's stream")
    assert_steps_close(logits, touched["logits", None], "the edited request's logits")
    for prompt, stream, logits, output in others:
        run = its.run(prompt, STEPS, reads)
        assert tokens_of(output) == run.tokens
        if stream is not None:
            assert_steps_close(stream, run["resid_post", its.depth - 1], "another request's stream")
            assert_steps_close(logits, run["logits", None], "another request's logits")


def run_mixed(model: Any, its: Any, places: list[tuple[int, str]], how: str, steps: Any, change: Any) -> None:
    """Edit one request amid an untraced twin, a twin that only reads, and a reader of another length."""
    layers = layers_of(model)
    last, attention = layers[its.depth - 1], parts_of(model)[1]
    targets = []
    for number, key in places:
        below, site, _ = SITES[key]
        path = {"": "", "mlp": "mlp", "attention": attention}[below]
        targets.append((number, path, site))
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[3]):
            stream, logits = [].save(), [].save()
            for _ in tracer.iter[:]:
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            stream, logits = [].save(), [].save()
            for step in tracer.iter[:]:
                if steps is None or step in steps:
                    for number, path, site in targets:
                        edit(layers[number].get_submodule(path), site, how, change)
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            stream, logits = [].save(), [].save()
            for _ in tracer.iter[:]:
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            pass
    edits = [Edit(SITES[key][2], number, change, steps) for number, key in places]
    results = tracer.result
    others = [
        (PROMPTS[3], stream[0], logits[0], results[0]),
        (PROMPTS[0], stream[2], logits[2], results[2]),
        (PROMPTS[0], None, None, results[3]),
    ]
    check(its, edits, (stream[1], logits[1], results[1]), others)


@pytest.mark.parametrize("how", ["in place", "by assignment"])
@pytest.mark.parametrize("key", SITES)
@pytest.mark.parametrize("name", NAMES)
# contract: C2, C3
def test_case_12_every_site_takes_both_kinds_of_edit(
    name: str, key: str, how: str, sync_model: Any, oracle: Any
) -> None:
    """An edit in a middle layer at every step, of one request in a mixed batch."""
    its = oracle(name)
    vector = vector_of(its.width)
    run_mixed(sync_model(name), its, [(its.depth // 2, key)], how, None, lambda rows: rows + vector)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("layer", ["first", "last"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2"])
# contract: C2, C5
def test_edits_at_chosen_steps_of_the_outer_layers(
    name: str, layer: str, when: str, sync_model: Any, oracle: Any
) -> None:
    """An edit at the prompt's pass changes the keys and values that later steps read; one at a later step does not."""
    its = oracle(name)
    vector = vector_of(its.width, seed=1)
    number = 0 if layer == "first" else its.depth - 1
    # The last layer's own end is where the check reads, so its beginning is edited.
    run_mixed(sync_model(name), its, [(number, "resid_pre")], "in place", WHEN[when], lambda rows: rows + vector)


@pytest.mark.parametrize("how", ["in place", "by assignment"])
@pytest.mark.parametrize("name", NAMES)
def test_edits_at_several_layers_in_one_step(name: str, how: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """Edits at several sites of several layers add up."""
    its = oracle(name)
    vector = vector_of(its.width, seed=2)
    places = [(0, "mlp.input"), (1, "resid_pre"), (1, "attention.output"), (1, "mlp.output"), (2, "resid_post")]
    run_mixed(sync_model(name), its, places, how, None, lambda rows: rows + vector)


@pytest.mark.parametrize("name", NAMES)
def test_ablation_of_an_mlp(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """Zeros in place of what an MLP adds."""
    its = oracle(name)
    run_mixed(sync_model(name), its, [(1, "mlp.output")], "by assignment", None, torch.zeros_like)


@pytest.mark.parametrize("name", NAMES)
def test_edit_of_one_row_in_place(name: str, sync_model: Any, oracle: Any) -> None:  # contract: C3
    """An indexed write changes that row of the prompt and no other."""
    its = oracle(name)
    vector = vector_of(its.width, seed=3)

    def third_row(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.clone()
        rows[2] = vector
        return rows

    run_mixed(sync_model(name), its, [(1, "resid_post")], "in place", (0,), third_row)


@pytest.mark.parametrize("name", ["smollm2", "tiny-qwen3"])
def test_case_12_both_parts_of_a_layers_pair(name: str, sync_model: Any, oracle: Any) -> None:
    """A layer that gives a pair takes an edit of either part, in place and as a new pair."""
    model, its = sync_model(name), oracle(name)
    layer, last = model.model.layers[1], model.model.layers[its.depth - 1]
    vector = vector_of(its.width, seed=4)
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            stream, logits = [].save(), [].save()
            for _ in tracer.iter[:]:
                layer.output[0].add_(vector)
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            stream, logits = [].save(), [].save()
            for _ in tracer.iter[:]:
                layer.output[1][:] += vector
                stream.append(last.resid_post)
                logits.append(model.logits)
        with tracer.invoke(PROMPTS[0]):
            stream, logits = [].save(), [].save()
            for _ in tracer.iter[:]:
                hidden, residual = layer.output
                layer.output = (hidden + vector / 2, residual + vector / 2)
                stream.append(last.resid_post)
                logits.append(model.logits)
    for number in range(3):
        edited = stream[number], logits[number], tracer.result[number]
        check(its, [Edit("resid_post", 1, lambda rows: rows + vector)], edited, [])


@pytest.mark.parametrize("name", NAMES)
def test_case_04_the_clone_has_the_old_numbers_and_the_model_the_new(name: str, sync_model: Any, oracle: Any) -> None:
    """A clone from before an edit in place keeps the old values; the value itself has what the model gets."""
    model, its = sync_model(name), oracle(name)
    layer, last = layers_of(model)[1], layers_of(model)[its.depth - 1]
    vector = vector_of(its.width, seed=5)
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        value = layer.resid_post
        before = value.clone().save()
        value += vector
        after = value.save()
        end = last.resid_post.save()
    reads = [("resid_post", 1), ("resid_post", its.depth - 1)]
    run = its.run(PROMPTS[0], 1, reads, [Edit("resid_post", 1, lambda rows: rows + vector)])
    assert_close(before, run["resid_post", 1][0])
    assert_close(after, run["resid_post", 1][0] + vector)
    assert_close(end, run["resid_post", its.depth - 1][0])
    assert tokens_of(tracer.result) == run.tokens


@pytest.mark.parametrize("how", ["in place", "by assignment"])
@pytest.mark.parametrize("name", NAMES)
def test_case_40_logits(name: str, how: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """A token whose logit is minus infinity at every step is never taken; other requests take it."""
    model, its = sync_model(name), oracle(name)
    free = its.run(PROMPTS[0], STEPS)
    banned = sorted(set(free.tokens))
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for _ in tracer.iter[:]:
                if how == "in place":
                    model.logits[:, banned] = float("-inf")
                else:
                    rows = model.logits.clone()
                    rows[:, banned] = float("-inf")
                    model.logits = rows
        with tracer.invoke(PROMPTS[0]):
            logits = model.logits.save()
        with tracer.invoke(PROMPTS[0]):
            pass

    def ban(rows: torch.Tensor) -> torch.Tensor:
        rows[:, banned] = float("-inf")
        return rows

    run = its.run(PROMPTS[0], STEPS, [], [Edit("logits", None, ban)])
    assert not set(run.tokens) & set(banned)
    assert tokens_of(tracer.result[0]) == run.tokens
    assert tokens_of(tracer.result[1]) == tokens_of(tracer.result[2]) == free.tokens
    assert_close(logits, its.run(PROMPTS[0], 1, [("logits", None)])["logits", None][0])


@pytest.mark.parametrize("how", ["in place", "by assignment", "as a number"])
@pytest.mark.parametrize("name", NAMES)
def test_case_39_a_forced_token(name: str, how: str, sync_model: Any, oracle: Any) -> None:  # contract: C2
    """Generation goes on from a token that a block puts in the sampled one's place, and the text shows it."""
    model, its = sync_model(name), oracle(name)
    token = its.tokens(" purple")[0]
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            for step in tracer.iter[:]:
                if step == 1:
                    sampled = model.samples.clone().save()
                    if how == "in place":
                        model.samples[0, 0] = token
                    elif how == "by assignment":
                        model.samples = torch.full_like(model.samples, token)
                    else:
                        model.samples = token
        with tracer.invoke(PROMPTS[0]):
            pass
    free, forced = its.run(PROMPTS[0], STEPS), its.run(PROMPTS[0], STEPS, forced={1: token})
    assert free.tokens != forced.tokens
    assert sampled.tolist() == [[free.tokens[1]]]
    assert tokens_of(tracer.result[0]) == forced.tokens
    assert tracer.result[0].outputs[0].text == its.text(forced.tokens)
    assert tokens_of(tracer.result[1]) == free.tokens


def test_case_36_two_prompts_exactly_alike_and_one_edited(sync_model: Any, oracle: Any) -> None:
    """Of two equal prompts in one batch only the edited one changes, and so for the same prompt afterwards."""
    model, its = sync_model("smollm2"), oracle("smollm2")
    vector = vector_of(its.width, seed=6, scale=8.0)
    # Longer than a block of the engine's key and value cache, so that a shared one would be found.
    prompt = PROMPTS[3] * 5
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        for steered in (True, False):
            with tracer.invoke(prompt):
                if steered:
                    model.model.layers[3].resid_post += vector
                logits = model.logits.save()
    after = model.generate(prompt, max_tokens=2, **GREEDY)
    touched = its.run(prompt, 2, [("logits", None)], [Edit("resid_post", 3, lambda rows: rows + vector, (0,))])
    plain = its.run(prompt, 2, [("logits", None)])
    assert len(plain.prompt) > 128
    assert distance(touched["logits", None][0], plain["logits", None][0]) > 100 * TOLERANCE
    assert_close(logits[0], touched["logits", None][0])
    assert_close(logits[1], plain["logits", None][0])
    assert tokens_of(tracer.result[0]) == touched.tokens
    assert tokens_of(tracer.result[1]) == plain.tokens
    assert tokens_of(after[0]) == plain.tokens


def test_case_35_one_block_with_different_outside_values_in_flight(sync_model: Any, oracle: Any) -> None:
    """The same lines, run for several requests at once, each with the values that its name had there."""
    model, its = sync_model("tiny-llama"), oracle("tiny-llama")
    vectors = [vector_of(its.width, seed) for seed in range(4)]
    with model.trace(max_tokens=STEPS, **GREEDY) as tracer:
        for vector in vectors:
            with tracer.invoke(PROMPTS[0]):
                for _ in tracer.iter[:]:
                    model.model.layers[1].resid_post += vector
                    logits = model.logits
                logits.save()
    for number, vector in enumerate(vectors):
        change = Edit("resid_post", 1, lambda rows, vector=vector: rows + vector)
        run = its.run(PROMPTS[0], STEPS, [("logits", None)], [change])
        assert tokens_of(tracer.result[number]) == run.tokens
        assert_close(logits[number], run["logits", None][-1])


def test_case_16_a_steering_vector_changed_between_two_calls(sync_model: Any, oracle: Any) -> None:
    """The same source line uses the vector of its own call, also where the vector was changed in place."""
    model, its = sync_model("tiny-qwen3"), oracle("tiny-qwen3")
    vector = torch.zeros(its.width)

    def steered() -> Any:
        with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
            model.model.layers[1].resid_post += vector
            logits = model.logits.save()
        return logits

    found = [steered()]
    for seed in (7, 8):
        vector.copy_(vector_of(its.width, seed))
        found.append(steered())
    for logits, change in zip(
        found,
        (
            torch.zeros(its.width),
            vector_of(its.width, 7),
            vector,
        ),
        strict=True,
    ):
        edit = Edit("resid_post", 1, lambda rows, change=change: rows + change)
        assert_close(logits, its.run(PROMPTS[0], 1, [("logits", None)], [edit])["logits", None][0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("what", "make", "said"),
    [
        ("rows", lambda rows: rows[:-1], "shape"),
        ("width", lambda rows: torch.cat([rows, rows], dim=1), "shape"),
        ("dimensions", lambda rows: rows[None], "shape"),
        ("dtype", lambda rows: rows.to(torch.complex64), "complex64"),
        ("kind", lambda rows: rows.tolist(), "list"),
    ],
)
# contract: C3
def test_a_replacement_that_does_not_fit(
    name: str, what: str, make: Any, said: str, sync_model: Any, oracle: Any
) -> None:
    """It is that block's error, raised at its line; the others of the batch and the engine go on."""
    model, its = sync_model(name), oracle(name)
    layer = layers_of(model)[1]
    with pytest.raises(ReplacementError) as caught, model.trace(max_tokens=2, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            layer.mlp.output = make(layer.mlp.output)
        with tracer.invoke(PROMPTS[0]):
            logits = model.logits.save()
        with tracer.invoke(PROMPTS[1]):
            pass
    assert isinstance(caught.value, BlockError)
    assert isinstance(caught.value, ValueError)
    assert f"{layer._path}.mlp.output" in str(caught.value)
    assert said in str(caught.value)
    if what in ("rows", "width"):
        shape = make(torch.zeros(len(its.tokens(PROMPTS[0])), its.width)).shape
        assert str(tuple(shape)) in str(caught.value)
        assert str((len(its.tokens(PROMPTS[0])), its.width)) in str(caught.value)
    run = its.run(PROMPTS[0], 2, [("logits", None)])
    assert_close(tracer.saves["logits"], run["logits", None][0])
    assert_close(logits, run["logits", None][0])
    assert tokens_of(tracer.result[1]) == run.tokens
    assert tokens_of(tracer.result[2]) == its.run(PROMPTS[1], 2).tokens
    assert held(model.debug()) == NOTHING_LEFT


# contract: C3
def test_a_replacement_that_does_not_fit_can_be_caught_in_the_block(sync_model: Any, oracle: Any) -> None:
    """The error is raised where the value is assigned, before the engine's memory is touched."""
    model, its = sync_model("tiny-llama"), oracle("tiny-llama")
    with model.trace(PROMPTS[0], max_tokens=2, **GREEDY) as tracer:
        try:
            model.model.layers[1].resid_post = torch.zeros(1, 3)
            refused = None
        except ValueError as error:
            refused = str(error)
        refused.save()
        logits = model.logits.save()
    run = its.run(PROMPTS[0], 2, [("logits", None)])
    assert "(1, 3)" in refused
    assert_close(logits, run["logits", None][0])
    assert tokens_of(tracer.result) == run.tokens


def test_a_replacement_of_another_dtype_is_cast(sync_model: Any, oracle: Any) -> None:  # contract: C3
    """A double fits a float32 site."""
    model, its = sync_model("tiny-llama"), oracle("tiny-llama")
    vector = vector_of(its.width, seed=9).double()
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        model.model.layers[1].resid_post = model.model.layers[1].resid_post.double() + vector
        logits = model.logits.save()
    edit = Edit("resid_post", 1, lambda rows: (rows.double() + vector).float())
    assert_close(logits, its.run(PROMPTS[0], 1, [("logits", None)], [edit])["logits", None][0])


async def test_edits_on_the_stream(async_model: Any, oracle: Any) -> None:  # contract: A10
    """The asynchronous path takes the same edits, beside a twin without one."""
    model, its = async_model("tiny-llama"), oracle("tiny-llama")
    vector = vector_of(its.width, seed=10)
    with model.trace(PROMPTS[0], max_tokens=STEPS, **GREEDY) as edited:
        for _ in edited.iter[:]:
            model.model.layers[1].mlp.output += vector
    with model.trace(PROMPTS[0], max_tokens=STEPS, **GREEDY) as twin:
        logits = model.logits.save()
    first, second = await edited.backend, await twin.backend
    run = its.run(PROMPTS[0], STEPS, [], [Edit("mlp", 1, lambda rows: rows + vector)])
    plain = its.run(PROMPTS[0], STEPS, [("logits", None)])
    assert tokens_of(first) == run.tokens != plain.tokens
    assert tokens_of(second) == plain.tokens
    assert_close(second.saves["logits"], plain["logits", None][0])
