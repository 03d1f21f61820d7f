"""``tracer.cache`` keeps every visit of the modules that it names."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from harness import HIDDEN, Engine, Gives, Request, Small, failing, gpt, line_of, llama, made, plain, run, same

from endoscope.errors import UnknownModuleError

LAYERS = [f"model.layers.{i}" for i in range(3)]
LOOP = "\nfor step in tracer.iter[:]: pass"


def kept(saves: dict[str, Any], name: str = "cache") -> dict[str, Any]:
    """A cache as it travels home."""
    found: dict[str, Any] = pickle.loads(pickle.dumps(saves[name]))
    assert type(found) is dict
    return found


def expected(model: Any, prompt: list[int], tokens: int, paths: list[str], edits: Any = None) -> dict[str, Any]:
    seen = plain(model, prompt, tokens, tuple(paths), edits).seen
    return {path: [seen[step, path, "output"] for step in range(tokens)] for path in paths}


@pytest.mark.parametrize(
    ("modules", "paths"),
    [
        ("", LAYERS),
        ("'model.layers.*.mlp'", [f"{layer}.mlp" for layer in LAYERS]),
        ("'model.layers.1'", LAYERS[1:2]),
        ("['model.norm', model.model.layers[0]]", ["model.norm", "model.layers.0"]),
        ("model.model.layers[1].mlp.up", ["model.layers.1.mlp.up"]),
        ("model.model.layers", []),
        ("modules=['model.layers.[02]', 'model.layers.2']", ["model.layers.0", "model.layers.2"]),
        ("list(model.model.layers)[1:]", LAYERS[1:]),
    ],
)
def test_the_outputs_of_the_chosen_modules_at_every_step(modules: str, paths: list[str]) -> None:
    # contract: C7
    model = llama()
    block = f"cache = tracer.cache({modules}){LOOP}"
    requests = [Request([3, 1, 4], block, 3), Request([5, 9], None, 2), Request([2, 6], block, 4, joins=1)]
    Engine(model).run(*requests)
    for request in requests[::2]:
        found = kept(request.saves)
        if paths:
            assert same(found, expected(model, request.prompt, request.tokens, paths))
            assert list(found) == paths
        else:
            assert found == {"model.layers": []}


def test_the_default_is_the_decoder_layers_of_any_model() -> None:
    # contract: C7
    model = gpt()
    assert same(
        kept(run(model, f"cache = tracer.cache(){LOOP}", tokens=2)),
        expected(model, [3, 1, 4], 2, [f"transformer.h.{i}" for i in range(3)]),
    )


def test_a_cache_keeps_what_the_block_made_of_a_value() -> None:
    # contract: C7
    model = llama()
    paths = ["model.layers.0.mlp", "model.layers.1.mlp"]
    edits = {(step, paths[0], "output"): torch.zeros_like for step in range(2)}
    saves = run(
        model,
        """
        cache = tracer.cache("model.layers.*.mlp")
        for step in tracer.iter[:]:
            model.model.layers[0].mlp.output.zero_()
        """,
        tokens=2,
    )
    wanted = expected(model, [3, 1, 4], 2, paths, edits)
    found = kept(saves)
    assert all(value.abs().sum() == 0 for value in found[paths[0]])
    assert same(found[paths[1]], wanted[paths[1]])


def test_a_cache_can_be_read_in_the_block() -> None:
    # contract: C7
    saves = run(
        llama(),
        """
        cache = tracer.cache("model.layers.*.mlp")
        model.logits
        looks = [
            len(cache), list(cache), list(cache.keys()), [len(v) for v in cache.values()],
            [(k, len(v)) for k, v in cache.items()], "model.layers.1.mlp" in cache, "model.norm" in cache,
            model.model.layers[1].mlp in cache, len(cache["model.layers.0.mlp"]), len(cache[model.model.layers[0].mlp]),
            len(cache.get("model.layers.0.mlp")), cache.get("x"), {k: len(v) for k, v in dict(cache).items()},
            "tensor" in repr(cache),
        ].save()
        tracer.next()
        model.logits
        later = [len(cache[path]) for path in cache].save()
        """,
        tokens=3,
    )
    paths = [f"model.layers.{i}.mlp" for i in range(3)]
    ones = [(path, 1) for path in paths]
    assert saves["looks"] == [3, paths, paths, [1, 1, 1], ones, True, False, True, 1, 1, 1, None, dict(ones), True]
    assert saves["later"] == [2, 2, 2]


def test_two_caches_of_one_block_that_share_modules() -> None:
    # contract: C7
    model = llama()
    block = "one = tracer.cache()\nother = tracer.cache('model.layers.1')" + LOOP
    first, second = Request([3, 1, 4], block, 2), Request([5, 9], block, 3)
    Engine(model).run(Request([1], None), first, Request([1], None), second)
    for request in (first, second):
        assert same(kept(request.saves, "one"), expected(model, request.prompt, request.tokens, LAYERS))
        assert same(kept(request.saves, "other"), expected(model, request.prompt, request.tokens, LAYERS[1:2]))


def test_a_cache_from_the_middle_of_a_pass_and_of_a_generation() -> None:
    # contract: C7
    model = llama()
    saves = run(
        model,
        """
        for step in tracer.iter[1]:
            model.model.layers[1].output
            cache = tracer.cache()
        for step in tracer.iter[:]: pass
        """,
        tokens=3,
    )
    wanted = expected(model, [3, 1, 4], 3, LAYERS)
    assert same(kept(saves), {LAYERS[0]: wanted[LAYERS[0]][2:], **{path: wanted[path][1:] for path in LAYERS[1:]}})


def test_what_a_cache_keeps_does_not_change_and_is_nobody_elses() -> None:
    # contract: C3
    model = llama()
    edits = "cache = tracer.cache()\nmodel.logits\ncache['model.layers.0'][0][0].zero_()\nmodel.samples"
    reads = f"cache = tracer.cache(){LOOP}"
    requests = [Request([3, 1], reads, 2), Request([4], edits, 2), Request([5, 6], reads, 2)]
    Engine(model).run(*requests)
    for request in (requests[0], requests[2]):
        assert same(kept(request.saves), expected(model, request.prompt, 2, LAYERS))


def test_what_is_nobodys_is_kept_for_each() -> None:
    # contract: C3
    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model.gives(hidden)[0] * 1  # type: ignore[no-any-return]

    model = made(lambda: Small(body, gives=Gives(lambda hidden: (hidden, torch.arange(50.0), None))))
    edits = "cache = tracer.cache('gives')\nmodel.logits\ncache['gives'][0][1].zero_()"
    first, second, third = (Request([n], edits if n == 1 else f"cache = tracer.cache('gives'){LOOP}") for n in range(3))
    Engine(model).run(first, second, third)
    for request in (first, third):
        hidden = model.embed(torch.tensor(request.prompt)).detach()
        assert same(kept(request.saves), {"gives": [(hidden, torch.arange(50.0), None)]})


def test_the_rows_of_one_request_travel_and_no_more() -> None:
    # contract: C7
    block = "cache = tracer.cache('model.layers.1.mlp')" + LOOP
    requests = [Request([n] * 5, block) for n in range(4)]
    Engine(llama()).run(*requests)
    for request in requests:
        kept_rows = request.probe.caches[0].values()["model.layers.1.mlp"]
        assert sum(each.nbytes for each in kept_rows) == 5 * HIDDEN * 8


@pytest.mark.parametrize("asked", ["model.layer.*", "layers.0", "model.layers.9", "*.attention", ""])
def test_a_pattern_that_fits_no_module(asked: str) -> None:
    # contract: C7
    if asked == "":
        assert kept(run(llama(), f"cache = tracer.cache(''){LOOP}")).keys() == {""}
        return
    error = failing(llama(), f"x = 1\ncache = tracer.cache(['model.norm', {asked!r}])")
    assert isinstance(error, UnknownModuleError)
    assert f"the model has no {asked}" in str(error)
    assert line_of(error) == 2


def test_a_cache_holds_nothing_of_the_engines_own_tensors() -> None:
    # contract: A9
    outputs: list[Any] = []

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = model.gives(hidden)
        outputs.append(weakref.ref(hidden))
        return hidden * 1

    model = made(lambda: Small(body, gives=Gives(lambda hidden: hidden * 2)))
    request = Request([3], f"cache = tracer.cache('gives'){LOOP}", 3)
    gc.collect()
    gc.disable()
    try:
        Engine(model).run(request, Request([1, 1, 1], None, 3))
        assert [output() for output in outputs] == [None] * 3
    finally:
        gc.enable()
    assert [tuple(value.shape) for value in kept(request.saves)["gives"]] == [(1, HIDDEN)] * 3


def test_a_cache_goes_on_after_the_last_line_of_its_block() -> None:
    # contract: C7
    model = llama()
    request = Request([3, 1, 4], "cache = tracer.cache()", 3)
    Engine(model).run(request)
    assert same(kept(request.saves), expected(model, [3, 1, 4], 3, LAYERS))


def test_a_copy_of_a_cache_is_a_plain_mapping() -> None:
    # contract: C7
    saves = run(llama(), f"cache = tracer.cache('model.norm'){LOOP}")
    assert type(copy.copy(saves["cache"])) is dict
