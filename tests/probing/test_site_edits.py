"""In-place edits and assignments land where a plain hook's would, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import (
    HIDDEN,
    VOCABULARY,
    Engine,
    Gives,
    Request,
    Small,
    copied,
    failing,
    gpt,
    line_of,
    llama,
    made,
    plain,
    run,
    same,
)
from torch import nn

from endoscope.errors import BlockError, ReplacementError

MASK = torch.arange(3 * HIDDEN).reshape(3, HIDDEN) % 3 == 0

# What a block does to the tensor ``h``, and a function that gives the same from a tensor.
IN_PLACE: dict[str, tuple[str, Any]] = {
    "whole": ("h[:] = 2.5", lambda h: torch.full_like(h, 2.5)),
    "slice": (
        "h[1:, 2:5] = -1",
        lambda h: torch.cat([h[:1], torch.cat([h[1:, :2], -1 + h[1:, 2:5] * 0, h[1:, 5:]], 1)]),
    ),
    "row": ("h[-1] *= 3", lambda h: torch.cat([h[:-1], h[-1:] * 3])),
    "masked": ("h[mask] = 0", lambda h: torch.where(MASK, 0.0, h)),
    "masked_fill": ("h.masked_fill_(mask, 4)", lambda h: torch.where(MASK, 4.0, h)),
    "index_put": (
        "h.index_put_((torch.tensor([0, 2]), torch.tensor([1, 1])), torch.tensor(9.0, dtype=h.dtype))",
        lambda h: h + torch.eye(HIDDEN)[1] * (9 - h) * torch.tensor([[1.0], [0.0], [1.0]], dtype=h.dtype),
    ),
    "add_": ("h.add_(1)", lambda h: h + 1),
    "operator": ("h *= 0.5", lambda h: h * 0.5),
    "out": ("torch.mul(h, 2, out=h)", lambda h: h * 2),
    "views_of_views": ("h[:2][1].view(-1)[3:5].zero_()", lambda h: h * (1 - _ones(1, 3, 5))),
    "transposed": ("h.t()[2].fill_(1)", lambda h: torch.cat([h[:, :2], torch.ones_like(h[:, :1]), h[:, 3:]], 1)),
    "detached": ("h.detach().mul_(2)", lambda h: h * 2),
    "copy_": ("h.copy_(torch.ones(8))", lambda h: torch.ones_like(h)),
    "in_inference_mode": ("with torch.inference_mode(): h.add_(1)", lambda h: h + 1),
    "with_gradients": ("with torch.enable_grad(): h.add_(1)", lambda h: h + 1),
    "in_a_helper": ("(lambda x: x.neg_())(h)", lambda h: -h),
    "swapped": ("h[[0, 2]] = h[[2, 0]]", lambda h: h.flip(0)),
    "nan": ("h[0, 0] = float('nan')", None),
}


def _ones(row: int, start: int, stop: int) -> torch.Tensor:
    ones = torch.zeros(3, HIDDEN, dtype=torch.float64)
    ones[row, start:stop] = 1
    return ones


@pytest.mark.parametrize("name", [name for name in IN_PLACE if IN_PLACE[name][1] is not None])
@pytest.mark.parametrize("others", [False, True])
def test_case_12_an_edit_in_place_lands(name: str, others: bool) -> None:
    # contract: C3
    model = llama()
    code, function = IN_PLACE[name]
    path = "model.layers.1.self_attn.o_proj"
    expected = plain(model, [3, 1, 4], 1, ("model.layers.2",), {(0, path, "output"): function})
    block = f"""
        h = model.get_submodule(path).output
        {code}
        later = model.model.layers[2].output.save()
        logits = model.logits.save()
        """
    request = Request([3, 1, 4], block, values={"path": path, "mask": MASK})
    beside = [Request([7, 7], None, 2), Request([1, 2, 3, 4], "x = model.logits", 2)] if others else []
    untouched = [plain(model, other.prompt, 2).generated for other in beside]
    Engine(model).run(*beside[:1], request, *beside[1:])
    assert same(request.saves["later"], expected.seen[0, "model.layers.2", "output"])
    assert same(request.saves["logits"], expected.logits[0])
    assert [other.generated for other in beside] == untouched


def test_a_not_a_number_reaches_the_logits_of_its_own_request_only() -> None:
    # contract: C3
    model = llama()
    block = "model.model.layers[0].mlp.output[-1] = float('nan')\nlogits = model.logits.save()"
    first, second = Request([3, 1], block), Request([3, 1], "logits = model.logits.save()")
    Engine(model).run(first, second)
    assert bool(first.saves["logits"].isnan().all())
    assert same(second.saves["logits"], plain(model, [3, 1]).logits[0])


EVERYWHERE = {
    "llama": [
        ("model.embed_tokens", "output"),
        ("model.layers.0", "resid_pre"),
        ("model.layers.1", "resid_pre"),
        ("model.layers.1", "resid_post"),
        ("model.layers.1.mlp", "inputs"),
        ("model.layers.1.mlp", "output"),
        ("model.layers.2.input_layernorm", "inputs"),
        ("model.layers.2", "output"),
        ("model.norm", "output"),
    ],
    "gpt": [
        ("transformer.wte", "output"),
        ("transformer.h.0", "inputs"),
        ("transformer.h.1", "resid_pre"),
        ("transformer.h.1", "resid_post"),
        ("transformer.h.1", "output"),
        ("transformer.h.1.ln_1", "inputs"),
        ("transformer.h.1.mlp.1", "inputs"),
        ("transformer.ln_f", "output"),
        ("lm_head", "inputs"),
        ("lm_head", "output"),
    ],
}
SITES = [(name, path, kind) for name, sites in EVERYWHERE.items() for path, kind in sites]


def first_changed(value: Any, change: Any) -> Any:
    """The value with its first floating tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if len(value) == 2 and isinstance(value[1], dict):
        return (change(value[0][0]), *value[0][1:]), value[1]
    return (change(value[0]), *value[1:])


@pytest.mark.parametrize(("name", "path", "kind"), SITES)
@pytest.mark.parametrize("how", ["in place", "assigned"])
def test_case_12_both_ways_work_at_every_kind_of_site(name: str, path: str, kind: str, how: str) -> None:
    # contract: C3
    model = llama() if name == "llama" else gpt()
    edits = {
        (step, path, kind): lambda value, step=step: first_changed(value, lambda h: h * 2 + step) for step in range(3)
    }
    expected = plain(model, [3, 1, 4], 3, (), edits)
    block = f"""
        logits = [].save()
        for step in tracer.iter[:]:
            site = model.get_submodule(path)
            value = site.{kind}
            h = value
            while not isinstance(h, torch.Tensor):
                h = h[0]
            if in_place:
                h.mul_(2).add_(step)
            else:
                site.{kind} = changed(value, lambda h: h * 2 + step)
            logits.append(model.logits)
        """
    values = {"path": path, "in_place": how == "in place", "changed": first_changed}
    mine = Request([3, 1, 4], block, 3, values=values)
    Engine(model).run(Request([5, 5], None, 4), mine, Request([8], None, 2))
    assert same(mine.saves["logits"], expected.logits)
    assert mine.generated == expected.generated
    assert mine.probe.edited


def test_case_04_a_clone_made_before_the_edit_holds_the_old_numbers() -> None:
    # contract: C3
    model = llama()
    path = "model.layers.1.mlp"
    expected = plain(model, [3, 1, 4], 1, (path,), {(0, path, "output"): torch.zeros_like})
    saves = run(
        model,
        """
        old = model.model.layers[1].mlp.output.clone().save()
        new = model.model.layers[1].mlp.output.save()
        new[:] = 0
        logits = model.logits.save()
        """,
    )
    assert same(saves["old"], expected.seen[0, path, "output"])
    assert saves["new"].abs().sum() == 0
    assert same(saves["logits"], expected.logits[0])


def test_both_halves_of_a_pair() -> None:
    # contract: C3
    model = llama()
    edit = {(0, "model.layers.0", "output"): lambda pair: (pair[0] * 2, pair[1] - 1)}
    expected = plain(model, [3, 1, 4], 1, (), edit)
    in_place = run(
        model,
        """
        hidden, residual = model.model.layers[0].output
        hidden *= 2
        residual -= 1
        logits = model.logits.save()
        """,
    )
    assigned = run(
        model,
        """
        hidden, residual = model.model.layers[0].output
        model.model.layers[0].output = hidden * 2, residual - 1
        logits = model.logits.save()
        """,
    )
    half_and_half = run(
        model,
        """
        hidden, residual = model.model.layers[0].output
        residual -= 1
        model.model.layers[0].output = [hidden * 2, residual]
        logits = model.logits.save()
        """,
    )
    for saves in (in_place, assigned, half_and_half):
        assert same(saves["logits"], expected.logits[0])


def test_an_edited_input_that_is_also_the_residual_leaves_the_residual() -> None:
    # contract: C3
    model = gpt()
    path = "transformer.h.1.ln_1"
    expected = plain(
        model, [3, 1], 1, ("transformer.h.1",), {(0, path, "inputs"): lambda value: ((value[0][0] * 0,), {})}
    )
    saves = run(
        model,
        """
        model.transformer.h[1].ln_1.input[:] = 0
        after = model.transformer.h[1].output.save()
        """,
        [3, 1],
    )
    assert same(saves["after"], expected.seen[0, "transformer.h.1", "output"])


def test_an_edited_output_that_is_also_the_modules_input_leaves_the_input() -> None:
    # contract: C3
    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model.gives(hidden) + hidden  # type: ignore[no-any-return]

    model = made(lambda: Small(body, gives=nn.Identity()))
    saves = run(
        model,
        """
        before = model.gives.output.clone().save()
        model.gives.output[:] = 0
        after = model.output.save()
        """,
    )
    assert same(saves["after"], saves["before"])


def test_input_can_be_assigned_alone() -> None:
    # contract: C2
    model = llama()
    norm = "model.layers.1.post_attention_layernorm"
    expected = plain(
        model, [3, 1, 4], 1, (), {(0, norm, "inputs"): lambda value: ((value[0][0] * 3, value[0][1]), value[1])}
    )
    saves = run(
        model,
        """
        norm = model.model.layers[1].post_attention_layernorm
        norm.input = norm.input * 3
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], expected.logits[0])
    named = run(
        model,
        """
        attention = model.model.layers[1].self_attn
        attention.input = attention.input + 5
        logits = model.logits.save()
        """,
    )
    shifted = {
        (0, "model.layers.1.self_attn", "inputs"): lambda value: (
            value[0],
            {**value[1], "positions": value[1]["positions"] + 5},
        )
    }
    assert same(named["logits"], plain(model, [3, 1, 4], 1, (), shifted).logits[0])


def test_keyword_arguments_can_be_assigned() -> None:
    # contract: C2
    model = llama()
    path = "model.layers.1.self_attn"

    def doubled(value: Any) -> Any:
        return value[0], {**value[1], "hidden_states": value[1]["hidden_states"] * 2}

    expected = plain(model, [3, 1, 4], 1, (), {(0, path, "inputs"): doubled})
    saves = run(
        model,
        """
        attention = model.model.layers[1].self_attn
        args, kwargs = attention.inputs
        attention.inputs = args, {**kwargs, "hidden_states": kwargs["hidden_states"] * 2}
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], expected.logits[0])


def test_case_39_a_forced_token_is_the_one_that_is_generated() -> None:
    # contract: C2
    model = llama()
    for value in ("5", "torch.tensor(5)", "torch.tensor([[5]])", "torch.tensor([5], dtype=torch.int32)"):
        other, forced = Request([3, 1], None, 3), Request([3, 1], f"model.samples = {value}", 3)
        Engine(model).run(other, forced)
        assert forced.generated == [5, *plain(model, [3, 1, 5], 2).generated]
        assert other.generated == plain(model, [3, 1], 3).generated
    in_place = Request([3, 1], "for step in tracer.iter[:]: model.samples[:] = step", 3)
    Engine(model).run(in_place)
    assert in_place.generated == [0, 1, 2]


def test_case_40_logits_edited_at_every_step() -> None:
    # contract: C2
    model = llama()
    never = plain(model, [3, 1], 1).generated[0]
    edits = {}
    for step in range(4):
        edits[step, "", "logits"] = lambda row: torch.where(torch.arange(VOCABULARY) == never, -torch.inf, row)
    expected = plain(model, [3, 1], 4, (), edits)
    request = Request([3, 1], "for step in tracer.iter[:]: model.logits[:, never] = -torch.inf", 4)
    request.values["never"] = never
    Engine(model).run(request)
    assert request.generated == expected.generated
    assert never not in request.generated


def test_what_is_assigned_is_cast_to_the_dtype_of_the_site() -> None:
    # contract: C3
    model = llama()
    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.1.mlp", "output"): torch.ones_like})
    for value in (
        "torch.ones(3, 8)",
        "torch.ones(3, 8).long()",
        "torch.ones(3, 8).bool()",
        "torch.ones(1).expand(3, 8)",
    ):
        saves = run(model, f"model.model.layers[1].mlp.output = {value}\nlogits = model.logits.save()")
        assert same(saves["logits"], expected.logits[0]), value


def test_a_replacement_that_has_a_gradient() -> None:
    # contract: C3
    saves = run(
        llama(),
        """
        with torch.enable_grad():
            weight = torch.ones(3, 8, requires_grad=True)
            model.model.layers[1].mlp.output = weight * 2
        logits = model.logits.save()
        """,
    )
    assert not saves["logits"].requires_grad
    edit = {(0, "model.layers.1.mlp", "output"): lambda h: torch.full_like(h, 2)}
    assert same(saves["logits"], plain(llama(), [3, 1, 4], 1, (), edit).logits[0])


def test_a_value_is_read_back_as_it_was_assigned() -> None:
    # contract: C3
    saves = run(
        llama(),
        """
        mine = torch.ones(3, 8, dtype=torch.float64)
        model.model.layers[0].mlp.output = mine
        same = (model.model.layers[0].mlp.output is mine).save()
        hidden, residual = model.model.layers[0].output
        whole = model.model.layers[0].resid_post.save()
        hidden = hidden.clone().save()
        model.samples = 3
        token = model.samples.clone().save()
        """,
    )
    assert saves["same"] is True
    assert same(saves["hidden"], torch.ones(3, HIDDEN, dtype=torch.float64))
    assert same(saves["token"], torch.tensor([[3]]))


def test_assigned_and_then_edited_in_place() -> None:
    # contract: C3
    model = llama()

    def edit(h: torch.Tensor) -> torch.Tensor:
        h = h * 2
        h[0] = 7
        return h

    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.1.mlp", "output"): edit})
    saves = run(
        model,
        """
        mlp = model.model.layers[1].mlp
        mlp.output = mlp.output * 2
        mlp.output[0] = 7
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], expected.logits[0])


def test_assigned_twice_the_last_counts() -> None:
    # contract: C3
    model = llama()
    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.1.mlp", "output"): lambda h: h + 1})
    saves = run(
        model,
        """
        mlp = model.model.layers[1].mlp
        before = mlp.output
        mlp.output = torch.zeros(3, 8)
        mlp.output = before + 1
        logits = model.logits.save()
        model.samples = 4
        model.samples = torch.tensor([[6]])
        model.samples = 5
        """,
    )
    assert same(saves["logits"], expected.logits[0])
    request = Request([3, 1], "model.samples = 4\nmodel.samples = torch.tensor([[6]])\nmodel.samples = 5", 1)
    Engine(model).run(request)
    assert request.generated == [5]


def test_edited_and_then_assigned() -> None:
    # contract: C3
    model = llama()
    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.1.mlp", "output"): lambda h: h + 1})
    saves = run(
        model,
        """
        mlp = model.model.layers[1].mlp
        new = mlp.output + 1
        mlp.output[:] = 9
        mlp.output = new
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], expected.logits[0])


def test_a_later_site_sees_the_edit_and_the_earlier_value_does_not() -> None:
    # contract: C3
    model = llama()
    edit = {(0, "model.layers.0", "resid_post"): lambda h: h * 2}
    expected = plain(model, [3, 1, 4], 1, ("model.layers.0", "model.layers.1"), edit)
    saves = run(
        model,
        """
        pair = model.model.layers[0].output.save()
        model.model.layers[0].resid_post *= 2
        again = model.model.layers[0].output.save()
        later = model.model.layers[1].resid_pre.save()
        """,
    )
    seen = expected.seen[0, "model.layers.0", "output"]
    assert same(saves["pair"], seen)
    assert same(saves["again"][0] + saves["again"][1], (seen[0] + seen[1]) * 2)
    assert same(saves["later"], expected.seen[0, "model.layers.1", "resid_pre"])


def test_an_edit_after_the_block_has_gone_on_does_not_land() -> None:
    # contract: C3
    model = llama()
    saves = run(
        model,
        """
        early = model.model.layers[0].mlp.output
        model.model.layers[1].output
        early[:] = 0
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], plain(model, [3, 1, 4]).logits[0])


def test_a_block_that_ends_with_its_edit() -> None:
    # contract: C3
    model = llama()
    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.2.mlp", "output"): torch.zeros_like})
    for block in ("model.model.layers[2].mlp.output.zero_()", "model.model.layers[2].mlp.output = torch.zeros(3, 8)"):
        request = Request([3, 1, 4], block)
        Engine(model).run(request)
        assert same(request.logits, [expected.logits[0][0]])


def test_a_stopped_block_leaves_its_edit() -> None:
    # contract: C6
    model = llama()
    request = Request([3, 1, 4], "model.model.layers[2].mlp.output.zero_()\ntracer.stop()", 3)
    Engine(model).run(request)
    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.2.mlp", "output"): torch.zeros_like})
    assert same(request.logits, [expected.logits[0][0]])
    assert request.probe.stopped


def test_several_blocks_edit_one_site() -> None:
    # contract: C3
    model = gpt()
    path = "transformer.h.1"
    block = """
        model.transformer.h[1].output.mul_(by)
        model.transformer.h[1].resid_post.add_(by)
        model.transformer.h[1].output = model.transformer.h[1].output - 1
        logits = model.logits.save()
        """
    prompts = [[3, 1], [4], [1, 5, 9], [2, 6]]
    requests = [
        Request(prompt, block if by else None, values={"by": by})
        for by, prompt in zip((2, 0, 3, -1), prompts, strict=True)
    ]
    Engine(model).run(*requests)
    for request in requests:
        by = request.values["by"]
        edits = {(0, path, "output"): lambda h, by=by: h * by + by - 1} if by else {}
        assert same(request.logits, [plain(model, request.prompt, 1, (), edits).logits[0][0]])


def test_a_block_that_fails_leaves_the_others_edits_and_values_alone() -> None:
    # contract: D1
    model = llama()
    fails = "h = model.model.layers[1].mlp.output\nh[:] = 100\n1 / 0"
    edits = "h = model.model.layers[1].mlp.output\nh[:] = 1\nlogits = model.logits.save()"
    reads = "h = model.model.layers[1].mlp.output.save()\nlogits = model.logits.save()"
    alone = [Request([3, 1], edits), Request([2], reads), Request([9, 9], None)]
    Engine(model).run(*alone)
    first, *others, last = [Request([7], fails), *(Request(r.prompt, r.block) for r in alone), Request([5, 6], fails)]
    Engine(model).run(first, others[0], Request([7], fails), others[1], others[2], last, check=False)
    for request, wanted in zip(others, alone, strict=True):
        assert same(request.saves, wanted.saves)
        assert same(request.logits, wanted.logits)
    assert isinstance(first.error, ZeroDivisionError)
    assert isinstance(last.error, ZeroDivisionError)


def test_the_engines_own_tensors_are_not_written_to() -> None:
    # contract: C3
    kept: list[torch.Tensor] = []

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        kept.append(hidden)
        hidden = model.gives(hidden)
        kept.append(hidden)
        return hidden * 1

    model = made(lambda: Small(body, gives=Gives(lambda h: h * 2)))
    run(model, "model.gives.input.zero_()\nmodel.gives.output = torch.zeros(3, 8)")
    assert same(kept[0], model.embed(torch.tensor([3, 1, 4])).detach())


# What does not fit.

WRONG = {
    "rows": ("model.model.layers[1].mlp.output = torch.zeros(2, 8)", r"\(3, 8\).*\(2, 8\)"),
    "too many rows": ("model.model.layers[1].mlp.output = torch.zeros(6, 8)", r"\(3, 8\).*\(6, 8\)"),
    "width": ("model.model.layers[1].mlp.output = torch.zeros(3, 7)", r"\(3, 8\).*\(3, 7\)"),
    "a row alone": ("model.model.layers[1].mlp.output = torch.zeros(8)", r"\(3, 8\).*\(8,\)"),
    "dimensions": ("model.model.layers[1].mlp.output = torch.zeros(1, 3, 8)", r"\(3, 8\).*\(1, 3, 8\)"),
    "number": ("model.model.layers[1].mlp.output = 0", r"a tensor of shape \(3, 8\).*not a int"),
    "none": ("model.model.layers[1].mlp.output = None", "not a NoneType"),
    "list": ("model.model.layers[1].mlp.output = [[0.0] * 8] * 3", "not a list"),
    "complex": ("model.model.layers[1].mlp.output = torch.zeros(3, 8, dtype=torch.complex64)", "cannot be cast"),
    "floating token": ("model.samples = 1.5", "cannot be cast"),
    "two tokens": ("model.samples = torch.tensor([[1, 2]])", r"\(1, 1\).*\(1, 2\)"),
    "meta": ("model.model.layers[1].mlp.output = torch.zeros(3, 8, device='meta')", "meta"),
    "sparse": ("model.model.layers[1].mlp.output = torch.zeros(3, 8).to_sparse()", "dense"),
    "one for a pair": ("model.model.layers[1].output = torch.zeros(3, 8)", "a tuple of 2, not a Tensor"),
    "three for a pair": ("model.model.layers[1].output = (torch.zeros(3, 8),) * 3", "a tuple of 2, not one of 3"),
    "half of a pair": ("model.model.layers[1].output = (torch.zeros(3, 8), torch.zeros(2, 8))", r"output\[1\]"),
    "stream": ("model.model.layers[1].resid_pre = torch.zeros(3, 9)", r"resid_pre.*\(3, 8\)"),
    "stream pair": ("model.model.layers[1].resid_post = (torch.zeros(3, 8), 0)", "resid_post.*not a tuple"),
    "logits": ("model.logits = torch.zeros(1, 5)", r"logits.*\(1, 23\)"),
    "inputs": ("model.model.layers[1].mlp.inputs = torch.zeros(3, 8)", "a tuple of 2"),
    "other keywords": ("model.model.layers[1].self_attn.inputs = ((), {'x': torch.zeros(3, 8)})", "keys"),
    "no keywords": ("model.model.layers[1].self_attn.inputs = ((), None)", "dict"),
    "none for none": ("model.model.layers[0].inputs = ((positions, hidden, torch.zeros(3, 8)), {})", "None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_at_its_line_and_nothing_changes(name: str) -> None:
    # contract: C3
    model = llama()
    code, message = WRONG[name]
    values = "positions, hidden = torch.arange(3), torch.zeros(3, 8)" if name == "none for none" else ""
    block = f"x = 1\n{values}\n{code}\nraise SystemError"
    wanted = plain(model, [3, 1, 4], 1)
    for others in ([], [Request([8, 8], "x = model.model.layers[1].mlp.output")]):
        request = Request([3, 1, 4], block)
        requests = [*others, request]
        engine = Engine(model)
        engine.run(*requests, check=False)
        assert isinstance(request.error, ReplacementError)
        assert isinstance(request.error, BlockError)
        assert isinstance(request.error, ValueError)
        assert line_of(request.error) == 3
        with pytest.raises(ReplacementError, match=message):
            raise request.error
        assert same(request.logits, [wanted.logits[0][0]])
        assert not request.probe.edited


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_replacement_can_be_caught(name: str) -> None:
    # contract: C3
    model = llama()
    values = "positions, hidden = torch.arange(3), torch.zeros(3, 8)" if name == "none for none" else "pass"
    saves = run(
        model,
        f"""
        {values}
        try:
            {WRONG[name][0]}
        except ValueError as error:
            text = str(error).save()
        tokens = model.samples.save()
        """,
    )
    assert saves["text"]
    assert saves["tokens"].tolist() == [plain(model, [3, 1, 4]).generated]


# What a block can do to its value that no longer fits when the model goes on.

SPOILED = {
    "transposed": "h.t_()",
    "cut": "h.resize_(2, 8)",
    "assigned and resized": "model.model.layers[1].mlp.output = x = torch.zeros(3, 8)\nx.resize_(1, 8)",
    "assigned and grown": "model.model.layers[1].output = x = [torch.zeros(3, 8)] * 2\nx.append(1)",
    "other numbers": "h.data = torch.zeros(5, 8)\nh.add_(1)",
}


@pytest.mark.parametrize("name", SPOILED)
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_value_that_was_spoiled_is_its_blocks_error_alone(name: str, goes_on: bool) -> None:
    # contract: D1
    model = llama()
    block = f"h = model.model.layers[1].mlp.output\n{SPOILED[name]}\n" + ("model.logits" if goes_on else "")
    request, other = Request([3, 1, 4], block), Request([2, 7], "logits = model.logits.save()", 2)
    Engine(model).run(request, other, check=False)
    assert isinstance(request.error, ReplacementError)
    assert other.error is None
    assert other.generated == plain(model, [2, 7], 2).generated
    assert same(request.logits, [plain(model, [3, 1, 4], 1).logits[0][0]])


@pytest.mark.parametrize("code", ["h.squeeze_()", "h.unsqueeze_(0)", "h.requires_grad_()"])
def test_a_shape_that_differs_by_ones_alone_fits(code: str) -> None:
    # contract: C3
    model = llama()
    request = Request([3, 1, 4], f"h = model.logits\n{code}\nmodel.samples")
    Engine(model).run(request)
    assert same(request.logits, [plain(model, [3, 1, 4], 1).logits[0][0]])


def nobodys() -> Any:
    """A model with a module that is called with, and returns, a tensor whose rows are no request's."""

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, scale = model.gives(hidden, torch.arange(50.0), torch.tensor(2.0))
        return hidden * scale.to(hidden.dtype)

    return made(lambda: Small(body, gives=Gives(lambda hidden, table, scale: (hidden + table[1], scale))))


def test_what_is_nobodys_is_passed_on_in_a_replacement() -> None:
    # contract: C3
    model = nobodys()
    h = model.embed(torch.tensor([3, 1, 4])).detach()
    for block in (
        "args, kwargs = model.gives.inputs\nmodel.gives.inputs = ((args[0] * 2, *args[1:]), kwargs)",
        "model.gives.input = model.gives.input * 2",
        "model.gives.input *= 2",
        "hidden, scale = model.gives.output\nmodel.gives.output = ((hidden - 1) * 2 + 1, scale)",
    ):
        request = Request([3, 1, 4], block + "\nout = model.output.save()")
        Engine(model).run(request, Request([3], None))
        assert same(request.saves["out"], (h * 2 + 1) * 2), block


@pytest.mark.parametrize(
    "code",
    [
        "hidden, scale = model.gives.output; model.gives.output = (hidden * 0, scale * 2)",
        "args, kwargs = model.gives.inputs; model.gives.inputs = ((args[0] * 0, args[1] * 0, args[2]), kwargs)",
    ],
)
def test_what_is_nobodys_cannot_be_replaced(code: str) -> None:
    # contract: C3
    model = nobodys()
    request = Request([3, 1, 4], f"x = 1\n{code}\nraise SystemError")
    Engine(model).run(request, Request([3], None), check=False)
    assert isinstance(request.error, ReplacementError)
    assert "no rows of this request alone" in str(request.error)
    assert line_of(request.error) == 2
    h = model.embed(torch.tensor([3, 1, 4])).detach()
    assert same(request.logits, [((h[-1] + 1) * 2) @ model.embed.weight.detach().T])


def test_an_edit_of_what_is_nobodys_changes_nothing_at_all() -> None:
    # contract: C3
    model = nobodys()
    request = Request([3, 1, 4], "hidden, scale = model.gives.output\nhidden.zero_()\nscale.zero_()\nmodel.output")
    Engine(model).run(request, check=False)
    assert isinstance(request.error, ReplacementError)
    h = model.embed(torch.tensor([3, 1, 4])).detach()
    assert same(request.logits, [((h[-1] + 1) * 2) @ model.embed.weight.detach().T])


def test_a_refused_edit_can_be_caught_at_the_next_site() -> None:
    # contract: C3
    saves = run(
        nobodys(),
        """
        model.gives.output[1].zero_()
        try:
            model.output
        except ValueError as error:
            text = str(error).save()
        token = model.samples.save()
        """,
    )
    assert "gives.output" in saves["text"]
    assert saves["token"].shape == (1, 1)


def test_only_some_names_of_a_module_can_be_assigned() -> None:
    # contract: C8
    error = failing(llama(), "model.model.layers[0].outptu = 1")
    assert isinstance(error, AttributeError)
    assert "model.layers.0.outptu cannot be assigned" in str(error)


def test_the_edits_of_the_oracle_are_given_copies() -> None:
    value = torch.ones(2)
    (given,) = copied((value,))
    given.zero_()
    assert value.sum() == 2


def test_nothing_of_the_turn_in_which_a_block_fails_is_written() -> None:
    # contract: D1
    model = llama()
    failed = Request([3, 1], "h = model.model.layers[1].mlp.output\nh[:] = 100\n1 / 0")
    Engine(model).run(Request([5], None), failed, check=False)
    assert isinstance(failed.error, ZeroDivisionError)
    assert same(failed.logits, [plain(model, [3, 1]).logits[0][0]])
    assert not failed.probe.edited


def test_a_block_that_only_reads_beside_one_that_edits_is_not_taken_to_edit() -> None:
    # contract: F3
    edits, reads = "model.model.layers[1].mlp.output.zero_()", "value = model.model.layers[1].mlp.output.save()"
    requests = [Request([3], edits), Request([4], reads), Request([5], edits), Request([6], reads)]
    Engine(llama()).run(*requests)
    assert [request.probe.edited for request in requests] == [True, False, True, False]


WAYS_TO_WRITE = {
    "in place": "layer.output[0][:] = 7",
    "by a part": "layer.output[0][:1] += 1",
    "another shape in place": "layer.output[0].unsqueeze_(0)",
    "other memory": "h = layer.output[0]; h.set_(torch.zeros_like(h)); h += 3",
    "assigned": "layer.output = (layer.output[0] * 2, layer.output[1])",
    "in place and assigned": "h = layer.output[0]; h += 1; layer.output = (h * 2, layer.output[1])",
    "and fails": "layer.output[0][:] = 5; 1 / 0",
    "both": "layer.output[0].zero_(); layer.output[1][:] = 2",
    "nothing": "h = layer.output[0]",
    "kept and written later": "h = layer.output[0]; h += 1; x = layer.mlp; y = model.model.layers[2].output; h[:] = 99",
}


@pytest.mark.parametrize("first", WAYS_TO_WRITE)
@pytest.mark.parametrize("second", WAYS_TO_WRITE)
def test_what_several_write_lands_as_if_each_were_alone(first: str, second: str) -> None:
    """Rows that many have written in place are put back at once; which of them they are changes nothing."""
    model = llama()

    def request(way: str | None, prompt: list[int]) -> Request:
        head = "layer = model.model.layers[1]\n"
        block = (
            None
            if way is None
            else head + "for _ in tracer.iter[:]:\n    " + "\n    ".join(WAYS_TO_WRITE[way].split("; "))
        )
        return Request(prompt, block, tokens=3)

    plan: list[tuple[str | None, list[int]]] = [
        (first, [3, 1, 4]), (None, [1, 5]), (second, [9]), ("in place", [2, 6]), (first, [5, 3, 5, 8]),
    ]  # fmt: skip
    together = [request(*each) for each in plan]
    Engine(model).run(*together, check=False)
    for each, found in zip(plan, together, strict=True):
        alone = request(*each)
        Engine(model).run(alone, check=False)
        assert type(found.error) is type(alone.error)
        assert found.generated == alone.generated
        for one, other in zip(found.logits, alone.logits, strict=True):
            assert torch.allclose(one, other, atol=1e-12)
