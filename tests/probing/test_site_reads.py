"""What a block reads at a site is what a plain hook sees there, for its own rows only."""

from __future__ import annotations

import inspect
from collections import namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from harness import HIDDEN, VOCABULARY, Engine, Gives, Request, Small, gpt, llama, made, plain, run, same
from torch import nn

LLAMA_PATHS = (
    "model.embed_tokens",
    "model.layers.0",
    "model.layers.1",
    "model.layers.1.self_attn",
    "model.layers.1.self_attn.qkv_proj",
    "model.layers.1.mlp",
    "model.layers.1.mlp.down",
    "model.layers.2.post_attention_layernorm",
    "model.layers.2",
    "model.norm",
)
GPT_PATHS = ("transformer.wte", "transformer.h.0", "transformer.h.1.ln_2", "transformer.h.1.mlp.0", "lm_head")
LAYERS = {"llama": "model.layers.1", "gpt": "transformer.h.1"}


def model_of(name: str) -> tuple[Any, tuple[str, ...]]:
    return (llama(), LLAMA_PATHS) if name == "llama" else (gpt(), GPT_PATHS)


def reads(kind: str) -> str:
    """A block that reads one kind of site of the module at ``path``, at every step."""
    return f"""
        values = [].save()
        for step in tracer.iter[:]:
            values.append(model.get_submodule(path).{kind})
        """


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("kind", ["output", "inputs"])
def test_every_module_gives_what_a_hook_sees_at_every_step(name: str, kind: str) -> None:
    # contract: C2
    model, paths = model_of(name)
    expected = plain(model, [3, 1, 4], 3, paths)
    for path in paths:
        found = run(model, reads(kind), tokens=3, path=path)["values"]
        assert same(found, [expected.seen[step, path, kind] for step in range(3)]), path


@pytest.mark.parametrize("name", ["llama", "gpt"])
@pytest.mark.parametrize("kind", ["resid_pre", "resid_post"])
def test_case_11_the_residual_stream_is_whole(name: str, kind: str) -> None:
    # contract: C2
    model, _ = model_of(name)
    path = LAYERS[name]
    expected = plain(model, [3, 1, 4], 3, (path,))
    found = run(model, reads(kind), tokens=3, path=path)["values"]
    assert same(found, [expected.seen[step, path, kind] for step in range(3)])


def test_case_11_the_output_of_a_layer_stays_the_pair() -> None:
    # contract: C2
    saves = run(
        llama(),
        """
        pair = model.model.layers[0].output.save()
        whole = model.model.layers[0].resid_post.save()
        """,
    )
    assert type(saves["pair"]) is tuple
    assert len(saves["pair"]) == 2
    assert same(saves["whole"], saves["pair"][0] + saves["pair"][1])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_the_stream_after_a_layer_is_the_stream_before_the_next(layer: int) -> None:
    # contract: C2
    for model, layers in ((llama(), "model.model.layers"), (gpt(), "model.transformer.h")):
        first, last = (layer, layer + 1) if layer < 2 else (1, 2)
        saves = run(
            model,
            f"""
            before = {layers}[{first}].resid_post.save()
            after = {layers}[{last}].resid_pre.save()
            """,
        )
        assert same(saves["before"], saves["after"])
        assert saves["before"].data_ptr() != saves["after"].data_ptr()


def test_input_is_the_first_argument_by_position_or_by_name() -> None:
    # contract: C2
    model = llama()
    expected = plain(model, [3, 1, 4], 1, ("model.layers.1.self_attn", "model.layers.1"))
    saves = run(
        model,
        """
        by_position = model.model.layers[1].input.save()
        by_name = model.model.layers[1].self_attn.input.save()
        """,
    )
    assert same(saves["by_position"], expected.seen[0, "model.layers.1", "inputs"][0][0])
    _, named = expected.seen[0, "model.layers.1.self_attn", "inputs"]
    assert same(saves["by_name"], named["positions"])


def test_the_inner_model_is_reached_past_its_own_call() -> None:
    # contract: C2
    model = llama()
    expected = plain(model, [3, 1, 4], 1, ("model.norm",))
    saves = run(
        model,
        """
        ids, positions = model.model.inputs[0]
        out = model.model.output.save()
        whole = model.output.save()
        """,
    )
    assert same(saves["out"], expected.seen[0, "model.norm", "output"][0])
    assert same(saves["whole"], saves["out"])


def test_logits_and_samples() -> None:
    # contract: C2
    model = llama()
    expected = plain(model, [3, 1, 4], 4)
    saves = run(
        model,
        """
        logits, tokens = [].save(), [].save()
        for step in tracer.iter[:]:
            logits.append(model.logits)
            tokens.append(model.samples)
        """,
        tokens=4,
    )
    assert same(saves["logits"], expected.logits)
    assert [token.tolist() for token in saves["tokens"]] == [[[token]] for token in expected.generated]
    assert saves["logits"][0].shape == (1, VOCABULARY)


def test_all_prompt_rows_at_the_first_step_and_one_row_at_each_later_one() -> None:
    # contract: C2
    saves = run(llama(), reads("output"), prompt=[3, 1, 4, 1, 5], tokens=4, path="model.layers.1.mlp")
    assert [tuple(value.shape) for value in saves["values"]] == [(5, HIDDEN), (1, HIDDEN), (1, HIDDEN), (1, HIDDEN)]


def test_case_20_a_read_at_each_step_runs_as_often_as_tokens_are_made() -> None:
    # contract: C5
    count = run(
        llama(),
        """
        count = 0
        for step in tracer.iter[:]:
            model.model.layers[2].output
            count += 1
        count.save()
        """,
        tokens=6,
    )["count"]
    assert count == 6


MIXED = [
    Request([1, 2, 3], None, tokens=5),
    Request([3, 1, 4, 1], reads("output"), tokens=4),
    Request([5, 9], None, tokens=2),
    Request([2, 6, 5], None, tokens=6, joins=1),
    Request([3, 5, 8, 9, 7], reads("output"), tokens=3),
    Request([9], reads("output"), tokens=6, joins=2),
    Request([3, 2, 3], None, tokens=4),
]


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_rows_with_untraced_ones_between_them(name: str) -> None:
    # contract: C2
    model, paths = model_of(name)
    for path in paths:
        requests = [Request(one.prompt, one.block, one.tokens, one.joins, values={"path": path}) for one in MIXED]
        Engine(model).run(*requests)
        for request in requests:
            expected = plain(model, request.prompt, request.tokens, (path,))
            assert request.generated == expected.generated
            assert same(request.logits, [row[0] for row in expected.logits])
            if request.block is not None:
                wanted = [expected.seen[step, path, "output"] for step in range(request.tokens)]
                assert same(request.saves["values"], wanted), path


def test_case_36_two_prompts_alike_have_rows_of_their_own() -> None:
    # contract: C2
    block = """
        if mine:
            model.model.layers[0].mlp.output[:] = 0
        value = model.model.layers[1].mlp.output.save()
        """
    model = llama()
    edited, left = Engine(model).run(
        Request([3, 1], block, values={"mine": True}), Request([3, 1], block, values={"mine": False})
    )
    assert same(left["value"], run(model, block, [3, 1], mine=False)["value"])
    assert same(edited["value"], run(model, block, [3, 1], mine=True)["value"])
    assert not same(edited["value"], left["value"])


def test_case_02_a_saved_value_is_what_was_computed_at_that_site() -> None:
    # contract: C3
    model = llama()
    paths = ("model.embed_tokens", *(f"model.layers.{i}" for i in range(3)), "model.layers.0.mlp", "model.norm")
    expected = plain(model, [3, 1, 4], 3, paths)
    saves = run(
        model,
        """
        held = [].save()
        for step in tracer.iter[:]:
            held.append(model.model.embed_tokens.output)
            held.append(model.model.layers[0].mlp.output)
            held.append(model.model.layers[0].output)
            held.append(model.model.layers[2].output)
            held.append(model.model.norm.output)
        """,
        tokens=3,
    )
    order = ("model.embed_tokens", "model.layers.0.mlp", "model.layers.0", "model.layers.2", "model.norm")
    assert same(saves["held"], [expected.seen[step, path, "output"] for step in range(3) for path in order])


def test_a_held_value_does_not_change_when_another_block_edits_its_own() -> None:
    # contract: C3
    model = llama()
    holds = "value = model.model.layers[1].output.save()\nmodel.logits"
    edits = """
        hidden, residual = model.model.layers[1].output
        hidden.fill_(7)
        residual.fill_(7)
        """
    alone = run(model, holds, [5, 9])["value"]
    for order in ((edits, holds), (holds, edits)):
        requests = [Request([5, 9], block) for block in order]
        Engine(model).run(*requests)
        held = next(request for request in requests if request.block is holds)
        assert same(held.saves["value"], alone)


def test_two_blocks_do_not_share_a_tensor_that_is_nobodys() -> None:
    # contract: C3
    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, _ = model.gives(hidden)
        return hidden

    def build() -> nn.Module:
        return Small(body, gives=Gives(lambda hidden: (hidden, torch.arange(5.0))))

    edits = "model.gives.output[1].zero_()"
    holds = "value = model.gives.output[1].save()"
    first, second, third = (Request([4, 4], block) for block in (holds, edits, holds))
    Engine(made(build)).run(first, second, third, check=False)
    assert same(first.saves["value"], torch.arange(5.0))
    assert same(third.saves["value"], torch.arange(5.0))
    assert "cannot be changed" in str(second.error) or "not changed" in str(second.error)


# Values of any shape.


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


Plainer = namedtuple("Plainer", ["only"])


class Box(dict[str, Any]):
    """A dict with attributes, as model libraries return them."""

    @property
    def hidden(self) -> Any:
        return self["hidden"]


STRUCTURES: dict[str, Any] = {
    "tensor": lambda h: h,
    "one_in_a_tuple": lambda h: (h,),
    "two": lambda h: (h, h * 2),
    "none_first": lambda h: (None, h),
    "none_last": lambda h: (h, None),
    "pair_beside_none": lambda h: ((h, h * 2), None),
    "pair_beside_a_dict": lambda h: ((h, h * 2), {}),
    "list": lambda h: [h, h * 3],
    "dict": lambda h: {"hidden": h, "other": {"deep": [h * 2]}},
    "box": lambda h: Box(hidden=h),
    "named": lambda h: Pair(h, (h * 2, "text")),
    "named_with_none": lambda h: Plainer(Pair(h, None)),
    "a_number_beside": lambda h: (h, 3, "word"),
    "no_dimensions": lambda h: (h, torch.tensor(2.5)),
    "nothing": lambda h: (h, torch.zeros(0)),
    "nobodys": lambda h: (h, torch.arange(50.0)),
    "size": lambda h: (h, h.shape[1:]),
    "largest": lambda h: (h, h.max(dim=-1)),
    "per_request": lambda h: (h, torch.arange(2.0)),
    "same_twice": lambda h: (h, h),
}


def hidden_of(value: Any) -> torch.Tensor:
    """The first tensor of two dimensions in a value."""
    if isinstance(value, torch.Tensor):
        return value
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (torch.Tensor, tuple, list, dict)):
            return hidden_of(item)
    raise AssertionError("no tensor")


def structured(name: str) -> Any:
    """A model that has a module which returns that structure, and one which is called with it."""

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        value = model.gives(hidden)
        model.seen = type(value)
        return model.takes(value, also=value)  # type: ignore[no-any-return]

    return made(lambda: Small(body, gives=Gives(STRUCTURES[name]), takes=Gives(lambda x, also: hidden_of(x) * 1.0)))


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_value_of_any_structure_is_read_with_the_structure_kept(name: str) -> None:
    # contract: C2
    model = structured(name)
    block = """
        out = model.gives.output
        args, kwargs = model.takes.inputs
        values = [out, args, kwargs].save()
        """
    first, second = Request([1, 2, 3], block), Request([4, 5], block)
    Engine(model).run(first, second)
    for request, rows, row in ((first, slice(0, 3), 0), (second, slice(3, 5), 1)):
        h = model.embed(torch.tensor([1, 2, 3, 4, 5]))
        out, args, kwargs = request.saves["values"]
        expected = mine(STRUCTURES[name](h), rows, row)
        assert same(out, expected)
        assert type(out) is type(expected)
        assert same(args, (expected,))
        assert same(kwargs, {"also": expected})


def mine(value: Any, rows: slice, row: int) -> Any:
    """A structure with the rows of one request: of five tokens, or of two requests."""
    if isinstance(value, torch.Tensor):
        if value.dim() and value.shape[0] == 5:
            return value[rows].detach()
        return (value[row : row + 1] if value.dim() and value.shape[0] == 2 else value).detach()
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mine(item, rows, row) for item in value))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return type(value)([mine(item, rows, row) for item in value])
    if isinstance(value, dict):
        return type(value)({key: mine(item, rows, row) for key, item in value.items()})
    return value


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_edit_leaves_the_structure_as_the_model_made_it(name: str) -> None:
    # contract: C3
    model = structured(name)
    h = model.embed(torch.tensor([1, 2, 3]))
    made_type = type(STRUCTURES[name](h))
    saves = run(
        model,
        """
        value = model.gives.output
        while not isinstance(value, torch.Tensor):
            value = next(v for v in (value.values() if isinstance(value, dict) else value) if v is not None)
        value[1] = 5
        out = model.takes.output.save()
        """,
        prompt=[1, 2, 3],
    )
    expected = h.detach().clone()
    expected[1] = 5
    assert same(saves["out"], expected)
    assert model.seen is made_type


def test_two_arguments_are_two_arguments() -> None:
    # contract: C2
    model = llama()
    expected = plain(model, [3, 1], 1, ("model.norm",))
    saves = run(
        model,
        """
        args, kwargs = model.model.norm.inputs
        both = (args, kwargs).save()
        """,
        prompt=[3, 1],
    )
    assert same(saves["both"], expected.seen[0, "model.norm", "inputs"])


def test_as_many_tokens_as_requests() -> None:
    # contract: C2
    model = llama()
    block = reads("output")
    requests = [Request([n], block, tokens=3, values={"path": "model.layers.1"}) for n in (3, 1, 4)]
    Engine(model).run(*requests)
    for request in requests:
        expected = plain(model, request.prompt, 3, ("model.layers.1",))
        assert same(request.saves["values"], [expected.seen[step, "model.layers.1", "output"] for step in range(3)])


def test_a_tensor_laid_out_otherwise_is_read_and_edited_like_any() -> None:
    # contract: C3
    layouts: dict[str, Any] = {
        "transposed": lambda h: h.t().contiguous().t(),
        "expanded": lambda h: h[:, :1].expand(-1, HIDDEN),
        "every_other": lambda h: h.repeat_interleave(2, 0)[::2],
        "flipped": lambda h: h.flip(0).flip(0),
    }
    for name, layout in layouts.items():

        def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return model.gives(hidden) * 1.0  # type: ignore[no-any-return]

        model = made(lambda body=body, layout=layout: Small(body, gives=Gives(layout)))
        h = layout(model.embed(torch.tensor([1, 2, 3, 4, 5]))).detach()
        block = """
            value = model.gives.output.clone().save()
            model.gives.output[0, 1] = 9
            after = model.output.save()
            """
        untraced, first, second = Request([1, 2]), Request([3], block), Request([4, 5], block)
        Engine(model).run(untraced, first, second)
        for request, rows in ((first, slice(2, 3)), (second, slice(3, 5))):
            expected = h[rows].clone(memory_format=torch.contiguous_format)
            assert same(request.saves["value"], expected), name
            expected[0, 1] = 9
            assert same(request.saves["after"], expected), name


# Names.


def test_the_names_of_a_model_and_what_a_view_knows_of_its_module() -> None:
    # contract: C2
    saves = run(
        llama(),
        """
        layers = model.model.layers
        found = [
            len(layers), layers[-1] is layers["2"] or repr(layers[-1]) == repr(layers["2"]),
            [repr(layer) for layer in layers], [repr(layer) for layer in layers[1:]],
            model.model.norm.weight.shape, repr(model), layers[0].self_attn.qkv_proj.out_features,
        ].save()
        """,
    )
    three = [f"<model.layers.{i}: LlamaLayer>" for i in range(3)]
    assert saves["found"] == [3, True, three, three[1:], torch.Size([HIDDEN]), "<model: Llama>", 3 * HIDDEN]


def test_one_layer_several_times_in_a_list() -> None:
    # contract: C2
    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in model.layers:
            hidden = layer(hidden)
        return hidden

    def build() -> nn.Module:
        layer = nn.Linear(HIDDEN, HIDDEN)
        return Small(body, layers=nn.ModuleList([layer, layer, nn.Tanh()]))

    model = made(build)
    saves = run(
        model,
        """
        names = [repr(layer) for layer in model.layers].save()
        last = model.layers[2].output.save()
        """,
        [1, 2],
    )
    assert saves["names"] == ["<layers.0: Linear>", "<layers.1: Linear>", "<layers.2: Tanh>"]
    hidden = model.embed(torch.tensor([1, 2]))
    assert same(saves["last"], torch.tanh(model.layers[0](model.layers[0](hidden))).detach())


def test_a_module_called_from_a_block_is_no_visit() -> None:
    # contract: C2
    model = llama()
    expected = plain(model, [3, 1, 4], 1, ("model.layers.0", "model.layers.2.mlp.up"))
    saves = run(
        model,
        """
        hidden, residual = model.model.layers[0].output
        lens = model.model.norm(hidden + residual).save()
        early = model.model.layers[2].mlp.up(hidden).save()
        late = model.model.layers[2].mlp.up.output.save()
        """,
    )
    hidden, residual = expected.seen[0, "model.layers.0", "output"]
    with torch.inference_mode():
        assert same(saves["lens"], model.model.norm.normal(hidden + residual))
        assert same(saves["early"], model.model.layers[2].mlp.up(hidden))
    assert same(saves["late"], expected.seen[0, "model.layers.2.mlp.up", "output"])


def test_reading_a_site_twice_gives_the_same_object() -> None:
    # contract: C3
    saves = run(
        llama(),
        """
        first = model.model.layers[0].output
        same = (model.model.layers[0].output is first).save()
        """,
    )
    assert saves["same"] is True


def test_a_read_changes_nothing() -> None:
    # contract: C3
    model = gpt()
    expected = plain(model, [3, 1, 4], 3)
    request = Request([3, 1, 4], reads("output"), 3, values={"path": "transformer.h.1.mlp.1"})
    Engine(model).run(request)
    assert request.generated == expected.generated
    assert all(torch.equal(row, wanted[0]) for row, wanted in zip(request.logits, expected.logits, strict=True))
    assert request.probe.edited is False


def test_the_harness_writes_no_code_of_ours_into_its_oracle() -> None:
    source = inspect.getsource(plain)
    assert "handoffs" not in source
    assert "Probe" not in source


def test_a_module_called_from_one_block_is_no_visit_for_another() -> None:
    # contract: C2
    model = llama()
    engine = Engine(model)
    calls = Request(
        [5, 9],
        """
        cache = tracer.cache("model.layers.2.mlp.up")
        hidden, _ = model.model.layers[0].output
        for attempt in range(3):
            model.model.layers[2].mlp.up(hidden)
        model.logits
        visits = len(cache["model.layers.2.mlp.up"]).save()
        """,
    )
    waits = Request([3, 1], "value = model.model.layers[2].mlp.up.output.save()")
    engine.run(waits, calls)
    path = "model.layers.2.mlp.up"
    assert same(waits.saves["value"], plain(model, [3, 1], 1, (path,)).seen[0, path, "output"])
    assert calls.saves["visits"] == 1
