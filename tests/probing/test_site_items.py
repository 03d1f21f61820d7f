"""``X.output[0]`` hands over one tensor of a pair, and nothing but the cost tells it from ``X.output`` and its item."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Engine, Request, llama, plain, run, same

LAYER = "model.layers.1"

WAYS = {
    "item alone": "rows.append((layer.output[0], None))",
    "other item alone": "rows.append((None, layer.output[1]))",
    "both, one by one": "rows.append((layer.output[0], layer.output[1]))",
    "the other first": "residual = layer.output[1]; rows.append((layer.output[0], residual))",
    "item, then the pair": "h = layer.output[0]; rows.append(layer.output); assert layer.output[0] is h",
    "the pair, then item": "pair = layer.output; rows.append((layer.output[0], pair[1]))",
    "by a variable": "i = 1; rows.append((layer.output[0], layer.output[i]))",
    "from the end": "rows.append((layer.output[0], layer.output[-1]))",
    "unpacked": "h, residual = layer.output; rows.append((h, residual))",
    "in a helper": "get = lambda item: layer.output[item]; rows.append((get(0), get(1)))",
}


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.mark.parametrize("ways", [(way, way) for way in WAYS] + list(zip(WAYS, [*WAYS][1:], strict=False)))
def test_every_way_to_read_gives_what_a_hook_sees(model: Any, ways: tuple[str, str]) -> None:
    prompts, blocks = ([3, 1, 4], [5, 9]), []
    for way in ways:
        body = "\n".join(f"    {line}" for line in WAYS[way].split("; "))
        blocks.append(f"rows = [].save()\nlayer = model.get_submodule(path)\nfor _ in tracer.iter[:]:\n{body}")
    requests = [
        Request(prompt, block, tokens=3, values={"path": LAYER}) for prompt, block in zip(prompts, blocks, strict=True)
    ]
    Engine(model).run(*requests)
    for request, prompt in zip(requests, prompts, strict=True):
        expected = plain(model, prompt, 3, (LAYER,))
        for step, pair in enumerate(request.saves["rows"]):
            for found, right in zip(pair, expected.seen[step, LAYER, "output"], strict=True):
                assert found is None or same(found, right)


def test_only_what_is_read_is_copied(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from endoscope.probing import handoff

    copied: list[Any] = []

    class Watched(handoff.Copy):
        def __init__(self, value: Any, layout: Any) -> None:
            copied.append(value)
            super().__init__(value, layout)

    monkeypatch.setattr(handoff, "Copy", Watched)
    run(model, "h = model.get_submodule(path).output[0].save()", path=LAYER)
    assert [isinstance(value, torch.Tensor) for value in copied] == [True]
    copied.clear()
    run(model, "layer = model.get_submodule(path); h = layer.output[0]; r = layer.output[1].save()", path=LAYER)
    assert [type(value) for value in copied] == [torch.Tensor, tuple]
    assert len(copied[1]) == 1


EDITS = {
    "item in place": ("layer.output[0][:] = 0", (0, None)),
    "other item in place": ("layer.output[1].zero_()", (None, 0)),
    "item kept, then the pair assigned": (
        "h = layer.output[0]; layer.output = (torch.zeros_like(h), layer.output[1])",
        (0, None),
    ),
    "item in place, then the pair read": (
        "layer.output[0].zero_(); pair = layer.output; assert not pair[0].any()",
        (0, None),
    ),
    "both, one by one": ("layer.output[0].zero_(); layer.output[1].zero_()", (0, 0)),
    "the rest alone": ("h = layer.output[0]; layer.output[1].zero_()", (None, 0)),
    "item of what was assigned": (
        "layer.output = (layer.output[0] * 0, layer.output[1]); assert not layer.output[0].any()",
        (0, None),
    ),
}


@pytest.mark.parametrize(
    "beside", [None, "h = model.get_submodule(path).output[0].save()", "pair = model.get_submodule(path).output.save()"]
)
@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_items_land(model: Any, edit: str, beside: str | None) -> None:
    text, wanted = EDITS[edit]

    def change(pair: Any) -> Any:
        return tuple(each if to is None else torch.zeros_like(each) for each, to in zip(pair, wanted, strict=True))

    changed = plain(model, [3, 1, 4], 1, (), {(0, LAYER, "output"): change}).logits[0]
    untouched = plain(model, [5, 9], 1, (LAYER,))
    editing = Request(
        [3, 1, 4], f"layer = model.get_submodule(path); {text}; l = model.logits.save()", values={"path": LAYER}
    )
    requests = [editing]
    if beside is not None:
        requests.append(Request([5, 9], beside, values={"path": LAYER}))
    Engine(model).run(*requests)
    assert same(editing.saves["l"], changed)
    if beside is not None:
        right = untouched.seen[0, LAYER, "output"]
        name, found = next(iter(requests[1].saves.items()))
        assert same(found, right if name == "pair" else right[0])


def test_objects_of_the_user_have_outputs_of_their_own(model: Any) -> None:
    block = """
        class Mine:
            output = [5, 6]
        class Empty:
            pass
        mine = [Mine().output, Mine().output[1], Mine.output[0]].save()
        try:
            Empty().output[0]
        except AttributeError as error:
            text = str(error).save()
        match 6:
            case Mine.output:
                pass
            case _:
                matched = "no".save()
        class Names:
            output = int
        Mine.output = "key"
        match {"key": 5, "other": 6}:
            case {Mine.output: Names.output() as value, "other": 6}:
                matched_too = [value, f"{Mine.output=}"].save()
        h = model.get_submodule(path).output[0]
        try:
            model.get_submodule(path).output[2]
        except IndexError as error:
            beyond = str(error).save()
        """
    saves = run(model, block, path=LAYER)
    assert saves["mine"] == [[5, 6], 6, 5]
    assert saves["text"] == "'Empty' object has no attribute 'output'"
    assert saves["matched"] == "no"
    assert saves["matched_too"] == [5, "Mine.output='key'"]
    assert "out of range" in saves["beyond"]


def test_a_copy_for_the_rest_counts_versions_whatever_the_block_has_set(model: Any) -> None:
    block = """
        layer = model.get_submodule(path)
        with torch.inference_mode():
            h = layer.output[0]
            residual = layer.output[1]
        residual.zero_()
        l = model.logits.save()
        """
    edit = {(0, LAYER, "output"): lambda pair: (pair[0], torch.zeros_like(pair[1]))}
    changed = plain(model, [3, 1, 4], 1, (), edit).logits[0]
    assert same(run(model, block, path=LAYER)["l"], changed)


@pytest.mark.parametrize("way", ["torch.func.grad", "torch.func.jacrev"])
def test_the_rest_belongs_to_no_transform_of_another_block(model: Any, way: str) -> None:
    edit = {(0, LAYER, "output"): lambda pair: (pair[0], torch.zeros_like(pair[1]))}
    changed = plain(model, [5, 9], 1, (), edit).logits[0]
    transforms = f"""
        layer = model.get_submodule(path)
        h = layer.output[0]
        g = {way}(lambda x: (x * layer.output[1]).sum())(h.clone())
        """
    edits = """
        layer = model.get_submodule(path)
        h = layer.output[0]
        layer.output[1].zero_()
        l = model.logits.save()
        """
    both = [Request([3, 1, 4], transforms, values={"path": LAYER}), Request([5, 9], edits, values={"path": LAYER})]
    Engine(model).run(*both)
    assert same(both[1].saves["l"], changed)


def test_the_rest_is_no_doing_of_a_mode_of_the_block(model: Any) -> None:
    block = """
        from torch.utils._python_dispatch import TorchDispatchMode
        seen = [].save()
        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                seen.append(str(function))
                return function(*args, **(kwargs or {}))
        layer = model.get_submodule(path)
        h = layer.output[0]
        with Watch():
            residual = layer.output[1]
            residual + 1
        """
    assert run(model, block, path=LAYER)["seen"] == ["aten.add.Tensor"]
