"""What a block may ask for, in which order, and what it is told when it asks wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import HIDDEN, Engine, Request, Small, failing, gpt, line_of, llama, made, plain, run, same
from torch import nn

from endoscope.errors import NeverRanError, OutOfOrderError, SiteError, UnknownModuleError, UsageError


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        ("model.model.layers[0].output", "model.model.layers[1].output"),
        ("model.model.layers[1].input", "model.model.layers[1].mlp.output"),
        ("model.model.layers[1].resid_pre", "model.model.layers[1].resid_post"),
        ("model.model.layers[1].mlp.output", "model.model.layers[1].output"),
        ("model.model.embed_tokens.output", "model.logits"),
        ("model.output", "model.logits"),
        ("model.logits", "model.samples"),
        ("model.model.layers[1].self_attn.rotary_emb.output", "model.model.layers[2].self_attn.rotary_emb.output"),
    ],
)
def test_out_of_order(earlier: str, later: str, warm: bool) -> None:
    # contract: C8
    engine = Engine(llama())
    if warm:
        engine.run(Request([1], "model.logits"))
    right = Request([3, 1], f"{earlier}\n{later}\ndone = True\ndone.save()")
    assert engine.run(right) == {"done": True}
    wrong = Request([3, 1], f"{later}\n{earlier}")
    engine.run(wrong, check=False)
    error = wrong.error
    assert type(error) is OutOfOrderError
    assert line_of(error) == 2
    name = earlier.removeprefix("model.").replace("[", ".").replace("]", "").replace(".input", ".inputs")
    last = later.removeprefix("model.").replace("[", ".").replace("]", "")
    assert f"{name} was asked for in step 0" in str(error)
    assert f"last stopped at {last}" in str(error)


def test_out_of_order_in_a_later_step() -> None:
    # contract: C8
    error = failing(
        llama(),
        """
        for step in tracer.iter[:]:
            model.model.layers[0].output
            if step == 2:
                model.model.embed_tokens.output
        """,
        tokens=5,
    )
    assert isinstance(error, OutOfOrderError)
    assert "embed_tokens.output was asked for in step 2" in str(error)
    assert line_of(error) == 4


def test_after_an_out_of_order_error_the_block_can_go_on() -> None:
    # contract: C8
    saves = run(
        llama(),
        """
        model.model.layers[1].output
        try:
            model.model.layers[0].output
        except OutOfOrder:
            logits = model.logits.save()
        """,
        OutOfOrder=OutOfOrderError,
    )
    assert same(saves["logits"], plain(llama(), [3, 1, 4]).logits[0])


def test_outer_modules_after_inner_ones() -> None:
    # contract: C2
    model = llama()
    paths = ("model.layers.1.mlp.down", "model.layers.1.mlp", "model.layers.1", "model.norm")
    expected = plain(model, [3, 1, 4], 3, paths)
    block = """
        values = [].save()
        for step in tracer.iter[:]:
            values.append(model.model.layers[1].mlp.down.output)
            values.append(model.model.layers[1].mlp.output)
            values.append(model.model.layers[1].output)
            values.append(model.model.output)
            values.append(model.output)
        """
    found = run(model, block, tokens=3)["values"]
    for step in range(3):
        inner = [expected.seen[step, path, "output"] for path in paths[:3]]
        final = expected.seen[step, "model.norm", "output"][0]
        assert same(found[step * 5 : step * 5 + 5], [*inner, final, final])


def test_an_outer_module_is_asked_for_only_after_its_inner_one_was_stopped_at() -> None:
    # contract: C2
    model = llama()
    engine = Engine(model)
    engine.run(Request([1], "model.logits", 2))
    expected = plain(model, [3, 1], 2, ("model.layers.2",))
    request = Request(
        [3, 1],
        """
        model.model.layers[2].mlp.up.output
        pair = model.model.layers[2].output.save()
        """,
    )
    engine.run(request)
    assert same(request.saves["pair"], expected.seen[0, "model.layers.2", "output"])


@pytest.mark.parametrize("warm", [False, True])
def test_a_module_with_several_names_is_known_by_where_it_runs(warm: bool) -> None:
    # contract: C2
    model = llama()
    engine = Engine(model)
    if warm:
        engine.run(Request([1], "model.logits", 2))
    for layer in range(3):
        path = f"model.layers.{layer}.self_attn.qkv_proj"
        expected = plain(model, [3, 1], 1, (path,))
        request = Request([3, 1], f"q, k = model.model.layers[{layer}].self_attn.rotary_emb.output\nq.save(); k.save()")
        engine.run(request)
        q, k, _ = expected.seen[0, path, "output"].chunk(3, -1)
        with torch.inference_mode():
            wanted = model.model.layers[0].self_attn.rotary_emb(torch.arange(2), q, k)
        assert same((request.saves["q"], request.saves["k"]), wanted)


def test_an_edit_under_one_of_several_names() -> None:
    # contract: C3
    model = llama()
    path = "model.layers.1.self_attn.qkv_proj"
    zero = {(0, path, "output"): lambda h: torch.cat([h[:, :HIDDEN] * 0, h[:, HIDDEN:]], -1)}
    expected = plain(model, [3, 1, 4], 1, (), zero)
    saves = run(
        model,
        "model.model.layers[1].self_attn.rotary_emb.output[0][:] = 0\nlogits = model.logits.save()",
    )
    assert same(saves["logits"], expected.logits[0])


@pytest.mark.parametrize("warm", [False, True])
def test_a_name_under_which_a_module_does_not_run(warm: bool) -> None:
    # contract: C8
    engine = Engine(llama())
    if warm:
        engine.run(Request([1], "model.logits", 2))
    request = Request([3, 1], "head = model.lm_head.output.save()")
    engine.run(request, check=False)
    assert isinstance(request.error, NeverRanError)
    assert "lm_head.output was asked for in step 0, but lm_head did not run in that step" in str(request.error)
    assert line_of(request.error) == 1


def odd() -> Any:
    """A model with modules that run twice, never, and only for long prompts."""

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = model.twice(hidden)
        hidden = model.between(hidden)
        hidden = model.twice(hidden)
        if positions.shape[0] > 1:
            hidden = model.sometimes(hidden)
        return model.last(hidden)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        names = ("twice", "between", "never", "sometimes", "last")
        return Small(body, **{name: nn.Linear(HIDDEN, HIDDEN) for name in names})

    return made(build)


def chain(model: Any, ids: list[int], *names: str) -> torch.Tensor:
    """What the modules of these names make of an embedding, one after the other."""
    with torch.inference_mode():
        hidden: torch.Tensor = model.embed(torch.tensor(ids))
        for name in names:
            hidden = getattr(model, name)(hidden)
        return hidden


@pytest.mark.parametrize("warm", [False, True])
def test_a_module_that_runs_twice(warm: bool) -> None:
    # contract: C2
    model = odd()
    engine = Engine(model)
    if warm:
        engine.run(Request([1, 1], "model.logits"))
    both = Request(
        [3, 1],
        """
        first = model.twice.output.save()
        between = model.between.output.save()
        second = model.twice.output.save()
        last = model.last.output
        """,
    )
    engine.run(both)
    assert same(both.saves["first"], chain(model, [3, 1], "twice"))
    assert same(both.saves["second"], chain(model, [3, 1], "twice", "between", "twice"))
    second = Request([3, 1], "model.between.output\nsecond = model.twice.output.save()")
    engine.run(second)
    assert same(second.saves["second"], both.saves["second"])


def test_a_third_visit_to_a_module_that_runs_twice() -> None:
    # contract: C8
    error = failing(
        odd(),
        """
        model.twice.output
        model.between.output
        model.twice.output
        model.sometimes.output
        model.twice.output
        """,
    )
    assert isinstance(error, OutOfOrderError)
    assert line_of(error) == 5


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("before", ["", "model.between.output"])
def test_a_module_that_never_runs(warm: bool, before: str) -> None:
    # contract: C8
    engine = Engine(odd())
    if warm:
        engine.run(Request([1, 1], "model.logits"))
    request = Request([3, 1], f"{before or 'x = 1'}\nmodel.never.output")
    engine.run(request, check=False)
    assert type(request.error) is NeverRanError
    assert "never.output was asked for in step 0, but never did not run in that step" in str(request.error)
    assert line_of(request.error) == 2
    if before:
        assert "last stopped at between.output" in str(request.error)


@pytest.mark.parametrize("before", ["", "model.between.output"])
def test_a_module_that_does_not_run_in_every_step(before: str) -> None:
    # contract: C8
    model = odd()
    request = Request(
        [3, 1],
        f"""
        values = [].save()
        for step in tracer.iter[:]:
            {before or "pass"}
            values.append(model.sometimes.output)
        """,
        3,
    )
    Engine(model).run(request, check=False)
    assert same(request.saves["values"], [chain(model, [3, 1], "twice", "between", "twice", "sometimes")])
    assert type(request.error) is NeverRanError
    assert "sometimes.output was asked for in step 1" in str(request.error)
    assert line_of(request.error) == 4


def test_a_module_that_did_not_run_in_the_first_step_may_run_later() -> None:
    # contract: C2
    model = odd()
    engine = Engine(model)
    engine.run(Request([1], "model.logits"))
    request = Request([3, 1], "value = model.sometimes.output.save()\nmodel.last.output")
    engine.run(request)
    assert same(request.saves["value"], chain(model, [3, 1], "twice", "between", "twice", "sometimes"))


def test_a_block_told_of_its_mistake_may_go_on_to_the_next_step() -> None:
    # contract: C8
    model = llama()
    saves = run(
        model,
        """
        try:
            model.lm_head.output
        except NeverRan:
            step = tracer.next()
        logits = model.logits.save()
        step.save()
        """,
        tokens=3,
        NeverRan=NeverRanError,
    )
    assert saves["step"] == 1
    assert same(saves["logits"], plain(model, [3, 1, 4], 2).logits[1])


@pytest.mark.parametrize(
    ("code", "asked", "nearest"),
    [
        ("model.model.layer", "model.layer", "model.layers"),
        ("model.layers", "layers", "model.layers"),
        ("model.model.layers[0].mpl.output", "model.layers.0.mpl", "model.layers.0.mlp"),
        ("model.model.layers[0].attn", "model.layers.0.attn", "self_attn"),
        ("model.transformer.h", "transformer", "Llama"),
        ("model.model.get_submodule('layers.7')", "model.layers.7", "LAYERS"),
        ("model.model.layers[0].mlp.output_", "model.layers.0.mlp.output_", "up, down"),
    ],
)
def test_an_unknown_module(code: str, asked: str, nearest: str) -> None:
    # contract: C8
    error = failing(llama(), f"x = 1\n{code}")
    assert type(error) is UnknownModuleError
    assert isinstance(error, AttributeError)
    assert f"the model has no {asked}" in str(error)
    assert nearest.lower() in str(error).lower()
    assert line_of(error) == 2


def test_an_index_that_there_is_not() -> None:
    # contract: C8
    error = failing(llama(), "model.model.layers[12].output")
    assert isinstance(error, UnknownModuleError)
    assert "model.layers[12] was asked for, but it has 3 modules" in str(error)


def test_hasattr_and_getattr_work_on_the_model() -> None:
    # contract: C1
    saves = run(
        llama(),
        """
        found = [hasattr(model, "model"), hasattr(model, "transformer"), getattr(model, "lm_haed", None)].save()
        """,
    )
    assert saves["found"] == [True, False, None]


@pytest.mark.parametrize("kind", ["resid_pre", "resid_post"])
@pytest.mark.parametrize("where", ["model.model.norm", "model.model.layers[0].mlp", "model"])
def test_only_decoder_layers_have_a_residual_stream(kind: str, where: str) -> None:
    # contract: C8
    error = failing(llama(), f"{where}.{kind}")
    assert type(error) is SiteError
    assert "is no decoder layer" in str(error)
    assert line_of(error) == 1


def test_a_site_outside_a_block() -> None:
    # contract: C8
    engine = Engine(llama())
    with pytest.raises(UsageError, match=r"model\.norm\.output has a value only inside a block"):
        engine.model.model.norm.output  # noqa: B018 (reading it is the test)
    with pytest.raises(UsageError, match="logits has a value only inside a block"):
        engine.model.logits = torch.zeros(1)


def test_a_request_that_ends_while_its_block_waits() -> None:
    # contract: C8
    engine = Engine(llama())
    probe = engine.probe("saved = 1\nsaved.save()\nmodel.logits")
    probe.turn()
    probe.finish()
    assert isinstance(probe.error, NeverRanError)
    assert "logits was asked for, but the request ended in step 0" in str(probe.error)
    assert line_of(probe.error) == 3
    assert probe.saves() == {"saved": 1}


def test_asking_after_the_request_has_ended() -> None:
    # contract: C8
    error = failing(llama(), "for step in tracer.iter[:]: pass\nx = 1\nmodel.logits", tokens=3)
    assert isinstance(error, NeverRanError)
    assert "logits was asked for, but the request had ended after 3 steps" in str(error)
    assert line_of(error) == 3


def test_two_blocks_wait_at_sites_of_one_module() -> None:
    # contract: C2
    model = gpt()
    blocks = {
        "inputs": "value = model.transformer.h[1].inputs.save()",
        "output": "value = model.transformer.h[1].output.save()",
        "resid_pre": "value = model.transformer.h[1].resid_pre.save()",
        "resid_post": "value = model.transformer.h[1].resid_post.save()",
    }
    requests = [Request([n, n + 1], block) for n, block in enumerate(blocks.values())]
    Engine(model).run(*requests)
    for kind, request in zip(blocks, requests, strict=True):
        expected = plain(model, request.prompt, 1, ("transformer.h.1",))
        assert same(request.saves["value"], expected.seen[0, "transformer.h.1", kind])


def test_one_block_stops_at_all_sites_of_one_module() -> None:
    # contract: C2
    model = gpt()
    saves = run(
        model,
        """
        layer = model.transformer.h[1]
        values = [layer.inputs, layer.resid_pre, layer.inputs, layer.output, layer.resid_post, layer.output].save()
        """,
    )
    seen = plain(model, [3, 1, 4], 1, ("transformer.h.1",)).seen
    kinds = ("inputs", "resid_pre", "inputs", "output", "resid_post", "output")
    assert same(saves["values"], [seen[0, "transformer.h.1", kind] for kind in kinds])


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("code", ["model.lm_head.output", "model.model.layers[0].output"])
def test_a_block_told_of_its_mistake_can_still_have_the_logits_of_the_step(code: str, warm: bool) -> None:
    # contract: C8
    model = llama()
    engine = Engine(model)
    if warm:
        engine.run(Request([1], "model.logits"))
    request = Request(
        [3, 1, 4],
        f"""
        model.model.layers[1].mlp.output
        try:
            {code}
        except Exception as error:
            text = type(error).__name__.save()
        logits = model.logits.save()
        """,
    )
    engine.run(request)
    assert request.saves["text"] == ("NeverRanError" if "head" in code else "OutOfOrderError")
    assert same(request.saves["logits"], plain(model, [3, 1, 4]).logits[0])


def test_a_request_that_waits_and_sits_out_a_step_is_not_given_anothers_rows() -> None:
    # contract: C2
    model = odd()
    waits = Request(
        [3, 1, 4], "value = model.sometimes.output.save()", parts=[1, 2], pauses=frozenset({1})
    )  # its first part has one row, for which the module does not run
    other = Request([7, 7, 7], None, 2, joins=1)
    Engine(model).run(waits, other)
    assert same(waits.saves["value"], chain(model, [1, 4], "twice", "between", "twice", "sometimes"))
