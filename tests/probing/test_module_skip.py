"""``module.skip``: a value takes the place of a module's result for one request, whoever else is in the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import (
    HIDDEN,
    VOCABULARY,
    Engine,
    Gives,
    Plain,
    Request,
    Small,
    copied,
    failing,
    gpt,
    line_of,
    llama,
    made,
    plain,
    remembering,
    same,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from endoscope.errors import MissingStateError, NeverRanError, OutOfOrderError, ReplacementError

PROMPT = [3, 1, 4]
STEPS = 3
PATHS = {
    "llama": [
        "model.embed_tokens",
        "model.layers.0.input_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.self_attn",
        "model.layers.1.mlp",
        "model.layers.2.mlp.down",
        "model.layers.0",
        "model.layers.2",
        "model.norm",
    ],
    "gpt": ["transformer.wte", "transformer.h.1.mlp", "transformer.h.1.mlp.1", "transformer.h.1", "lm_head"],
}
EVERYWHERE = [(name, path) for name, paths in PATHS.items() for path in paths]
MODELS = {"llama": llama, "gpt": gpt, "remembering": remembering}
BLOCK = """
for step in tracer.iter[:]:
    model.get_submodule(path).skip(given[step])
"""


def counted(model: Any, path: str) -> list[Any]:
    """A list that gets an entry whenever the module runs."""
    module, runs = model.get_submodule(path), []
    original = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        runs.append(path)
        return original(*args, **kwargs)

    module.forward = forward
    return runs


def noise(like: Any, seed: int = 0) -> Any:
    """The same structure with other numbers."""
    if isinstance(like, tuple):
        return tuple(noise(item, seed + 1 + index) for index, item in enumerate(like))
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype)


def replaced(model: Any, prompt: list[int], path: str, steps: int = STEPS, at: Any = None) -> tuple[list[Any], Plain]:
    """Values for a module's result in each step, and what plain hooks give that put them there."""
    at = range(steps) if at is None else at
    seen = plain(model, prompt, steps, (path,)).seen
    given = [noise(seen[step, path, "output"], 10 * step) for step in range(steps)]
    edits = {(step, path, "output"): lambda _, value=given[step]: copied(value) for step in at}
    return given, plain(model, prompt, steps, (path,), edits)


def warm(model: Any) -> Engine:
    """An engine that blocks have taken part in, so that it knows the order of the model."""
    engine = Engine(model)
    engine.run(Request([1, 2], "model.logits"))
    # A step without blocks unwraps what the first one wrapped.
    engine.run(Request([1], None))
    return engine


def check(engine: Engine, request: Request, expected: Plain) -> None:
    """The request gave what plain hooks give, and nothing of its skips is left."""
    assert request.error is None
    assert request.generated == expected.generated
    assert same(request.logits, [row[0] for row in expected.logits])
    nothing_left(engine)


def nothing_left(engine: Engine) -> None:
    handoffs = engine.handoffs
    handoffs.begin([], 1, 1)
    assert len(handoffs.wrappers) == 0
    assert not handoffs.skips.under
    assert not handoffs.skips.done
    assert not handoffs.skips._values
    assert not any(station.lacking or station.skip.waiting for station in handoffs.stations.values())


@pytest.mark.parametrize(("name", "path"), EVERYWHERE)
def test_one_request_of_many_skips_a_module(name: str, path: str) -> None:
    # contract: C4
    model = MODELS[name]()
    given, expected = replaced(model, PROMPT, path)
    untouched = plain(model, PROMPT, STEPS, (path,))
    engine = Engine(model)
    reads = """
        seen = [].save()
        for step in tracer.iter[:]:
            seen.append(model.get_submodule(path).output)
        """
    skipper = Request(PROMPT, BLOCK, STEPS, values={"path": path, "given": given})
    reader = Request(PROMPT, reads, STEPS, values={"path": path})
    twin = Request(PROMPT, None, STEPS)
    other = Request([5], "model.logits", 4, joins=1)
    engine.run(twin, skipper, reader, other)
    check(engine, skipper, expected)
    check(engine, reader, untouched)
    check(engine, twin, untouched)
    check(engine, other, plain(model, [5], 4))
    assert same(reader.saves["seen"], [untouched.seen[step, path, "output"] for step in range(STEPS)])


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize(("name", "path"), EVERYWHERE)
def test_a_module_that_every_request_skips_does_not_run(name: str, path: str, padding: int) -> None:
    # contract: C4
    model = MODELS[name]()
    first, second = replaced(model, PROMPT, path), replaced(model, [7, 2], path)
    untouched = plain(model, [8], 4)
    engine = warm(model)
    engine.padding = padding
    runs = counted(model, path)
    requests = [
        Request(PROMPT, BLOCK, STEPS, values={"path": path, "given": first[0]}),
        Request([7, 2], BLOCK, STEPS, values={"path": path, "given": second[0]}),
    ]
    engine.run(*requests)
    assert runs == []
    check(engine, requests[0], first[1])
    check(engine, requests[1], second[1])
    # From here on one that does not skip is there.
    requests = [Request(PROMPT, BLOCK, STEPS, values={"path": path, "given": first[0]}), Request([8], None, 4, joins=2)]
    engine.run(*requests)
    assert len(runs) == 4
    check(engine, requests[0], first[1])
    assert requests[1].generated == untouched.generated


def test_the_pass_in_which_the_model_is_learned_runs_every_module() -> None:
    """As :meth:`ModuleView.skip` says; a first step of one row for each request leaves nothing in doubt later."""
    model = llama()
    path = "model.layers.1.mlp"
    alone, longer = replaced(model, [3], path), replaced(model, PROMPT, path)
    engine = Engine(model)
    runs = counted(model, path)
    request = Request([3], BLOCK, STEPS, values={"path": path, "given": alone[0]})
    engine.run(request)
    check(engine, request, alone[1])
    assert len(runs) == 1
    for _ in range(2):
        request = Request(PROMPT, BLOCK, STEPS, values={"path": path, "given": longer[0]})
        engine.run(request)
        check(engine, request, longer[1])
    # Whose rows the result has was seen in a step of one row a request, and so once more in one of three rows.
    assert len(runs) == 2


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_what_a_module_is_called_with_is_read_before_it_is_skipped(fresh: bool, beside: bool) -> None:
    # contract: C4
    model = llama()
    path = "model.layers.1"
    its = plain(model, PROMPT, 1, (path, f"{path}.mlp"))
    half = {(0, f"{path}.mlp", "output"): lambda _: its.seen[0, f"{path}.mlp", "inputs"][0][0] / 2}
    expected = plain(model, PROMPT, 1, ("model.layers.2",), half)
    block = """
        mlp = model.model.layers[1].mlp
        before = mlp.input.save()
        all_of_them = mlp.inputs.save()
        mlp.skip(before / 2)
        after = mlp.output.save()
        later = model.model.layers[2].output.save()
        """
    engine = Engine(model) if fresh else warm(model)
    request = Request(PROMPT, block)
    engine.run(request, *([Request([2, 2], None)] if beside else []))
    check(engine, request, expected)
    before = its.seen[0, f"{path}.mlp", "inputs"]
    assert same(request.saves["before"], before[0][0])
    assert same(request.saves["all_of_them"], before)
    assert same(request.saves["after"], before[0][0] / 2)
    assert same(request.saves["later"], expected.seen[0, "model.layers.2", "output"])


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_layer_is_skipped_with_the_residual_stream(name: str, number: int, beside: bool) -> None:
    # contract: C4
    model = MODELS[name]()
    path = f"model.layers.{number}" if name == "llama" else f"transformer.h.{number}"
    kept: list[Any] = []

    def keep(whole: torch.Tensor) -> torch.Tensor:
        kept.append(whole.clone())
        return whole

    edits: dict[Any, Any] = {(step, path, "resid_pre"): keep for step in range(STEPS)}
    edits |= {(step, path, "resid_post"): lambda _: kept[-1].clone() for step in range(STEPS)}
    expected = plain(model, PROMPT, STEPS, (), edits)
    block = """
        seen = [].save()
        for step in tracer.iter[:]:
            layer = model.get_submodule(path)
            called = layer.inputs
            stream = layer.resid_pre
            layer.skip(stream)
            seen.append((stream, layer.output, layer.resid_post))
        """
    engine = warm(model)
    runs = counted(model, path)
    request = Request(PROMPT, block, STEPS, values={"path": path})
    engine.run(request, *([Request([2, 2], None, STEPS)] if beside else []))
    assert len(runs) == (STEPS if beside else 0)
    check(engine, request, expected)
    for stream, output, after in request.saves["seen"]:
        assert same(output, (stream, stream * 0) if name == "llama" else stream)
        assert same(after, stream)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("number", [0, 1])
def test_a_layer_is_skipped_with_what_it_was_called_with(number: int, beside: bool) -> None:
    """The pair, as its arguments are; the residual of the first layer is ``None``."""
    model = llama()
    path = f"model.layers.{number}"
    called = plain(model, PROMPT, 1, (path,)).seen[0, path, "inputs"][0]
    pair = called[1], called[1] * 0 if called[2] is None else called[2]
    expected = plain(model, PROMPT, 1, (path,), {(0, path, "output"): lambda _: copied(pair)})
    block = """
        (positions, hidden, residual), _ = model.get_submodule(path).inputs
        model.get_submodule(path).skip((hidden, residual))
        """
    engine = warm(model)
    request = Request(PROMPT, block, values={"path": path})
    engine.run(request, *([Request([2, 2], None)] if beside else []))
    check(engine, request, expected)


def test_a_skip_may_be_edited_behind_the_module() -> None:
    model = llama()
    path = "model.layers.1.mlp"
    expected = plain(model, PROMPT, 1, (path,), {(0, path, "output"): lambda v: torch.ones_like(v) * 3})
    block = """
        mlp = model.model.layers[1].mlp
        mlp.skip(torch.ones_like(mlp.input))
        mlp.output *= 3
        """
    for beside in ([], [Request([2, 2], "held = model.model.layers[1].mlp.output.save()")]):
        engine = warm(model)
        request = Request(PROMPT, block)
        engine.run(request, *beside)
        check(engine, request, expected)
    assert same(beside[0].saves["held"], plain(model, [2, 2], 1, (path,)).seen[0, path, "output"])


def test_another_request_edits_what_one_skips() -> None:
    model = llama()
    path = "model.layers.1.mlp"
    given, expected = replaced(model, PROMPT, path, 1)
    edits = {
        (0, path, "inputs"): lambda v: ((v[0][0] * 2,), v[1]),
        (0, f"{path}.up", "output"): lambda v: v + 1,
        (0, path, "output"): lambda v: v - 1,
    }
    other = plain(model, [5, 6], 1, (), edits)
    block = """
        mlp = model.model.layers[1].mlp
        mlp.input = mlp.input * 2
        mlp.up.output += 1
        mlp.output -= 1
        """
    engine = Engine(model)
    requests = [Request([5, 6], block), Request(PROMPT, BLOCK, values={"path": path, "given": given})]
    engine.run(*requests)
    check(engine, requests[0], other)
    check(engine, requests[1], expected)


# What is inside.

INSIDE = {
    "a site inside": "found = model.model.layers[1].mlp.up.output",
    "the beginning of a module inside": "found = model.model.layers[1].mlp.input",
    "a nested skip": "model.model.layers[1].mlp.skip(0)",
    "a module that runs under several names": "found = model.model.layers[1].self_attn.rotary_emb.output",
    "an assignment inside": "model.model.layers[1].mlp.output = 0",
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("inside", INSIDE)
def test_nothing_inside_a_skipped_module_can_be_asked_for(inside: str, beside: bool, fresh: bool) -> None:
    # contract: C4, C8
    model = llama()
    block = f"layer = model.model.layers[1]\nlayer.skip(layer.resid_pre)\n{INSIDE[inside]}"
    engine = Engine(model) if fresh else warm(model)
    request = Request(PROMPT, block)
    reader = Request([2, 2], "held = model.model.layers[1].mlp.up.output.save()")
    engine.run(request, *([reader] if beside else []), check=False)
    assert isinstance(request.error, NeverRanError)
    assert "has skipped model.layers.1: after model.layers.1.skip(...)" in str(request.error)
    assert line_of(request.error) == 3
    if beside:
        path = "model.layers.1.mlp.up"
        assert same(reader.saves["held"], plain(model, [2, 2], 1, (path,)).seen[0, path, "output"])


def test_what_was_skipped_in_one_step_can_be_read_in_the_next() -> None:
    model = llama()
    path = "model.layers.1.mlp"
    given, expected = replaced(model, PROMPT, path, 2, at=[0])
    later = plain(model, PROMPT, 2, (f"{path}.up",), {(0, path, "output"): lambda _: copied(given[0])})
    block = """
        mlp = model.model.layers[1].mlp
        mlp.skip(given)
        tracer.next()
        found = mlp.up.output.save()
        """
    engine = warm(model)
    request = Request(PROMPT, block, 2, values={"given": given[0]})
    engine.run(request)
    check(engine, request, expected)
    assert same(request.saves["found"], later.seen[1, f"{path}.up", "output"])


@pytest.mark.parametrize("third", [False, True])
def test_two_requests_skip_a_module_and_one_around_it(third: bool) -> None:
    # contract: C4
    model = llama()
    outer, inner = replaced(model, PROMPT, "model.layers.1"), replaced(model, [7, 2], "model.layers.1.mlp")
    engine = warm(model)
    layers, mlps = counted(model, "model.layers.1"), counted(model, "model.layers.1.mlp")
    requests = [
        Request(PROMPT, BLOCK, STEPS, values={"path": "model.layers.1", "given": outer[0]}),
        Request([7, 2], BLOCK, STEPS, values={"path": "model.layers.1.mlp", "given": inner[0]}),
    ]
    if third:
        requests.append(Request([2, 2], None, STEPS))
    engine.run(*requests)
    assert len(layers) == STEPS
    assert len(mlps) == (STEPS if third else 0)
    check(engine, requests[0], outer[1])
    check(engine, requests[1], inner[1])
    assert not third or requests[2].generated == plain(model, [2, 2], STEPS).generated


def test_a_module_inside_is_skipped_first() -> None:
    # contract: C8
    error = failing(
        llama(), "model.model.layers[1].mlp.skip(x)\nmodel.model.layers[1].skip(x)", x=torch.ones(3, HIDDEN)
    )
    assert isinstance(error, OutOfOrderError)
    assert line_of(error) == 2


@pytest.mark.parametrize(
    "block",
    [
        "x = mlp.output\nmlp.skip(x)",
        "mlp.skip(torch.ones(3, 8))\nmlp.skip(torch.ones(3, 8))",
        "mlp.skip(torch.ones(3, 8))\nmlp.input",
        "model.model.layers[2].input\nmlp.skip(torch.ones(3, 8))",
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_skip_out_of_order(block: str, fresh: bool) -> None:
    # contract: C8
    model = llama()
    engine = Engine(model) if fresh else warm(model)
    request = Request(PROMPT, f"mlp = model.model.layers[1].mlp\n{block}")
    engine.run(request, check=False)
    assert isinstance(request.error, OutOfOrderError)
    assert line_of(request.error) == 3


# What does not fit.

UNFIT = {
    "too few rows": ("mlp", "torch.ones(2, 8)", "takes a tensor of shape (3, 8) (this request's rows)"),
    "too wide": ("mlp", "torch.ones(3, 9)", "not one of shape (3, 9)"),
    "one row": ("mlp", "torch.ones(8)", "not one of shape (8,)"),
    "a number": ("mlp", "0", "not a int"),
    "nothing": ("mlp", "None", "not a NoneType"),
    "a pair": ("mlp", "(torch.ones(3, 8), torch.ones(3, 8))", "not a tuple"),
    "complex": ("mlp", "torch.ones(3, 8, dtype=torch.complex64)", "cannot be cast"),
    "meta": ("mlp", "torch.ones(3, 8, device='meta')", "on the meta device"),
    "sparse": ("mlp", "torch.ones(3, 8).to_sparse()", "a dense tensor"),
    "positions for a layer": ("layer", "layer.input", "takes a tensor of shape (3, 8)"),
    "one of a pair": ("layer", "(torch.ones(3, 8),)", "takes a tuple of 2"),
    "a pair of one": ("layer", "(torch.ones(3, 8), torch.ones(3, 1))", "not one of shape (3, 1)"),
    "a pair of nothing": ("layer", "(None, torch.ones(3, 8))", "not a NoneType"),
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("unfit", UNFIT)
def test_a_value_that_does_not_fit_is_that_blocks_error(unfit: str, beside: bool, fresh: bool) -> None:
    # contract: C3, D1
    target, value, message = UNFIT[unfit]
    model = llama()
    path = "model.layers.1.mlp"
    given, expected = replaced(model, [7, 2], path)
    engine = Engine(model) if fresh else warm(model)
    block = f"layer = model.model.layers[1]\nmlp = layer.mlp\n{target}.skip({value})"
    bad = Request(PROMPT, block, STEPS)
    good = Request([7, 2], BLOCK, STEPS, values={"path": path, "given": given})
    engine.run(*([good] if beside else []), bad, check=False)
    assert isinstance(bad.error, ReplacementError)
    assert message in str(bad.error)
    assert ".skip" in str(bad.error)
    assert line_of(bad.error) == 3
    if beside:
        check(engine, good, expected)
    nothing_left(engine)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_block_that_catches_the_error_goes_on_behind_the_module_which_has_run(fresh: bool, beside: bool) -> None:
    model = llama()
    path = "model.layers.1.mlp"
    expected = plain(model, PROMPT, 1, (path,))
    block = """
        mlp = model.model.layers[1].mlp
        try:
            mlp.skip(torch.ones(1, 1))
        except ValueError:
            pass
        found = mlp.output.save()
        """
    engine = Engine(model) if fresh else warm(model)
    request = Request(PROMPT, block)
    engine.run(request, *([Request([2], None)] if beside else []))
    check(engine, request, expected)
    assert same(request.saves["found"], expected.seen[0, path, "output"])


@pytest.mark.parametrize("value", ["torch.ones(3, 8, dtype=torch.int32)", "torch.ones(3, 8, dtype=torch.float16)"])
def test_a_value_is_cast(value: str) -> None:
    model = llama()
    path = "model.layers.1.mlp"
    expected = plain(model, PROMPT, 1, (path,), {(0, path, "output"): torch.ones_like})
    for beside in ([], [Request([2], None)]):
        engine = warm(model)
        request = Request(
            PROMPT, f"model.model.layers[1].mlp.skip({value})\nfound = model.model.layers[1].mlp.output.save()"
        )
        engine.run(request, *beside)
        check(engine, request, expected)
        assert request.saves["found"].dtype == torch.float64


def test_a_value_with_a_gradient_and_one_of_inference_mode() -> None:
    model = llama()
    path = "model.layers.1.mlp"
    expected = plain(model, PROMPT, 1, (path,), {(0, path, "output"): torch.ones_like})
    for how in ("torch.enable_grad()", "torch.inference_mode()"):
        block = f"with {how}:\n    x = torch.ones(3, 8, requires_grad=True) * 1\nmodel.model.layers[1].mlp.skip(x)"
        for beside in ([], [Request([2], None)]):
            engine = warm(model)
            request = Request(PROMPT, block)
            engine.run(request, *beside)
            check(engine, request, expected)


# Models of other shapes.


def passed(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return model.rest(hidden, model.gives(hidden, positions))  # type: ignore[no-any-return]


OTHERS = {
    "a number with a tensor": lambda h, p: (h * 2, 7),
    "a list": lambda h, p: [h * 2, None],
    "a dict": lambda h, p: {"hidden": h * 2, "positions": p + 1},
    "nested": lambda h, p: ((h * 2, (p + 1, None)), "name"),
    "integers": lambda h, p: p + 1,
}


def first_tensor(value: Any) -> torch.Tensor:
    while not isinstance(value, torch.Tensor):
        value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


@pytest.mark.parametrize("other", OTHERS)
def test_a_result_of_any_structure(other: str) -> None:
    rest = Gives(lambda h, found: h + first_tensor(found).reshape(h.shape[0], -1) * 0.5)
    model = made(lambda: Small(passed, gives=Gives(OTHERS[other]), rest=rest))

    def raised(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value + 3
        if isinstance(value, (tuple, list)):
            return type(value)(raised(item) for item in value)
        return {key: raised(item) for key, item in value.items()} if isinstance(value, dict) else value

    its = plain(model, PROMPT, 1, ("gives",)).seen[0, "gives", "output"]
    expected = plain(model, PROMPT, 1, (), {(0, "gives", "output"): raised})
    block = "model.gives.skip(given)\nfound = model.gives.output.save()"
    for beside in ([], [Request([2], None)]):
        engine = warm(model)
        runs = counted(model, "gives")
        request = Request(PROMPT, block, values={"given": raised(its)})
        engine.run(request, *beside)
        assert len(runs) == len(beside)
        check(engine, request, expected)
        assert same(request.saves["found"], raised(its))


class Opaque:
    """Holds a tensor where nobody looks for one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@pytest.mark.parametrize("what", ["an object", "rows of nobody", "now this and now that"])
def test_a_result_that_cannot_be_made_without_the_module_is_made_by_it(what: str) -> None:
    calls: list[int] = []

    def gives(hidden: torch.Tensor, positions: torch.Tensor) -> Any:
        calls.append(1)
        if what == "an object":
            return hidden * 2, Opaque(hidden)
        if what == "rows of nobody":
            return hidden * 2, torch.arange(17)
        return (hidden * 2, positions) if len(calls) % 2 else (hidden * 2,)

    model = made(lambda: Small(passed, gives=Gives(gives), rest=Gives(lambda h, found: h + found[0])))
    engine = Engine(model)
    engine.run(Request([1, 2], "model.logits", 2))
    del calls[:]
    if what == "now this and now that":
        # The structure was seen once, so far; the next skip that the module runs for shows another.
        for given in ((torch.ones(3, 8), torch.arange(3)), (torch.ones(3, 8),)) * 2:
            request = Request(PROMPT, "model.gives.skip(given)", values={"given": given})
            engine.run(request, Request([2], None))
        # It gave one tensor last, and now that it runs it gives two.
        request = Request(PROMPT, "model.gives.skip(given)", values={"given": (torch.ones(3, 8),)})
        engine.run(request, check=False)
        assert len(calls) == 5
        assert isinstance(request.error, ReplacementError)
        return
    request = Request(PROMPT, "model.gives.skip((torch.ones(3, 8), None))")
    engine.run(request, check=False)
    assert len(calls) == 1
    assert isinstance(request.error, ReplacementError)
    assert "can only be left as it is" in str(request.error) or "no rows of this request alone" in str(request.error)
    form = engine.handoffs.stations["gives"].form
    assert not any(isinstance(each, Opaque) for each in form._value or ())


def test_a_module_that_runs_twice_in_a_pass() -> None:
    """Each call can be skipped; a skip is for the call that comes next."""

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model.twice(model.twice(hidden) + 1)  # type: ignore[no-any-return]

    model = made(lambda: Small(body, twice=nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())))
    seen: list[torch.Tensor] = []

    def second_only(value: torch.Tensor) -> torch.Tensor:
        seen.append(value)
        return value if len(seen) % 2 else torch.full_like(value, 0.5)

    both = plain(model, PROMPT, 1, (), {(0, "twice", "output"): lambda v: torch.full_like(v, 0.5)})
    second = plain(model, PROMPT, 1, (), {(0, "twice", "output"): second_only})
    for beside in ([], [Request([2], None)]):
        engine = warm(model)
        runs = counted(model, "twice")
        request = Request(PROMPT, "model.twice.skip(x)\nmodel.twice.skip(x)", values={"x": torch.full((3, 8), 0.5)})
        engine.run(request, *beside)
        check(engine, request, both)
        assert len(runs) == 2 * len(beside)
        request = Request(PROMPT, "model.twice.output\nmodel.twice.skip(x)", values={"x": torch.full((3, 8), 0.5)})
        engine.run(request, *beside)
        check(engine, request, second)
        request = Request(PROMPT, "model.twice.skip(x)\nmodel.twice[0].output", values={"x": torch.full((3, 8), 0.5)})
        engine.run(request, *beside, check=False)
        assert isinstance(request.error, NeverRanError)


def test_a_module_that_runs_twice_is_learned_in_a_pass_that_skips_it() -> None:
    """Else it would be taken for one that runs once, and its second call for a site that has gone by."""

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model.twice(model.twice(hidden) + 1)  # type: ignore[no-any-return]

    model = made(lambda: Small(body, twice=nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU())))
    engine = Engine(model)
    engine.run(Request(PROMPT, "model.twice.skip(x)\nmodel.twice.skip(x)", values={"x": torch.full((3, 8), 0.5)}))
    twice = "first = model.twice[0].output.save()\nmodel.twice[1].output\nsecond = model.twice[0].output.save()"
    assert not same(*engine.run(Request(PROMPT, twice)).values())


@pytest.mark.parametrize("beside", [False, True])
def test_a_module_with_several_names_is_skipped_under_one(beside: bool) -> None:
    # contract: C4
    model = llama()
    name = "model.layers.1.self_attn.rotary_emb"
    calls: list[Any] = []

    def second_only(value: Any) -> Any:
        calls.append(value)
        return noise(value) if len(calls) == 2 else value

    # Plain hooks see the one object, which all three layers run.
    expected = plain(model, PROMPT, 1, (), {(0, name, "output"): second_only})
    engine = warm(model)
    runs = counted(model, name)
    values = {"given": noise(calls[1])}
    request = Request(PROMPT, f"model.get_submodule({name!r}).skip(given)", values=values)
    engine.run(request, *([Request([2], None)] if beside else []))
    check(engine, request, expected)
    assert len(runs) == (3 if beside else 2)


def test_the_whole_model_is_skipped() -> None:
    model = llama()
    engine = warm(model)
    runs = counted(model, "model.layers.0")
    x = noise(torch.ones(3, HIDDEN, dtype=torch.float64))
    for target in ("model", "model.model"):
        request = Request(PROMPT, f"{target}.skip(x)\nlogits = model.logits.save()", values={"x": x})
        engine.run(request)
        assert same(request.saves["logits"], model.compute_logits(x[-1:]))
    assert runs == []


def test_a_block_calls_a_module_that_it_skips() -> None:
    """The call in the block is no part of the pass, and so the module can be run with something else."""
    model = llama()
    path = "model.layers.1.mlp"
    expected = plain(model, PROMPT, 1, (), {(0, path, "inputs"): lambda v: ((v[0][0] * 2,), v[1])})
    block = """
        mlp = model.model.layers[1].mlp
        mlp.skip(mlp(mlp.input * 2))
        """
    engine = warm(model)
    request = Request(PROMPT, block)
    engine.run(request)
    check(engine, request, expected)


# Caches, stops, and parts of prompts.


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_a_cache_keeps_what_was_given_and_nothing_from_inside(beside: bool, fresh: bool) -> None:
    # contract: C4
    model = llama()
    given, expected = replaced(model, PROMPT, "model.layers.1", at=[0, 1])
    block = """
        cache = tracer.cache(["model.layers.1", "model.layers.1.mlp", "model.layers.2.mlp"])
        for step in tracer.iter[:2]:
            model.model.layers[1].skip(given[step])
        """
    edits = {(step, "model.layers.1", "output"): lambda _, value=given[step]: copied(value) for step in (0, 1)}
    seen = plain(model, PROMPT, STEPS, ("model.layers.1", "model.layers.1.mlp", "model.layers.2.mlp"), edits).seen
    engine = Engine(model) if fresh else warm(model)
    request = Request(PROMPT, block, STEPS, values={"given": given})
    inside = Request([2, 2], "held = tracer.cache('model.layers.1.mlp')", STEPS)
    engine.run(request, *([inside] if beside else []))
    check(engine, request, expected)
    cache = dict(request.saves["cache"].items())
    assert same(cache["model.layers.1"], [*given[:2], seen[2, "model.layers.1", "output"]])
    assert same(cache["model.layers.1.mlp"], [seen[2, "model.layers.1.mlp", "output"]])
    assert same(cache["model.layers.2.mlp"], [seen[step, "model.layers.2.mlp", "output"] for step in range(STEPS)])
    if beside:
        its = plain(model, [2, 2], STEPS, ("model.layers.1.mlp",)).seen
        expected_inside = [its[step, "model.layers.1.mlp", "output"] for step in range(STEPS)]
        assert same(dict(inside.saves["held"].items())["model.layers.1.mlp"], expected_inside)


def test_a_block_stops_behind_a_module_that_it_has_skipped() -> None:
    model = llama()
    given, _ = replaced(model, PROMPT, "model.layers.1.mlp")
    other, expected = replaced(model, [7, 2], "model.layers.1.mlp")
    engine = warm(model)
    values = {"path": "model.layers.1.mlp"}
    stops = Request(PROMPT, f"{BLOCK}    tracer.stop()", STEPS, values={**values, "given": given})
    fails = Request(PROMPT, f"{BLOCK}    1 / 0", STEPS, values={**values, "given": given})
    goes_on = Request([7, 2], BLOCK, STEPS, values={**values, "given": other})
    engine.run(stops, goes_on, fails, check=False)
    assert stops.error is None
    assert stops.probe.stopped
    assert len(stops.generated) == 1
    assert isinstance(fails.error, ZeroDivisionError)
    check(engine, goes_on, expected)


def test_a_prompt_that_runs_in_parts() -> None:
    """A skip is of the rows of its visit, as an edit is."""
    model = llama()
    engine = warm(model)
    runs = counted(model, "model.layers.1.mlp")
    block = """
        mlp = model.model.layers[1].mlp
        shape = tuple(mlp.input.shape)
        mlp.skip(torch.zeros(shape))
        found = mlp.output.save()
        """
    request = Request([3, 1, 4, 1, 5], block, parts=[2, 3])
    engine.run(request)
    assert same(request.saves["found"], torch.zeros(2, HIDDEN, dtype=torch.float64))
    assert len(runs) == 1
    first = plain(model, [3, 1], 1, (), {(0, "model.layers.1.mlp", "output"): torch.zeros_like})
    rest = Engine(model)
    last = Request([3, 1, 4, 1, 5], None, parts=[2, 3])
    rest.run(last)
    # The rows of the toy model do not read each other: the last part is as without a skip.
    assert same(request.logits, last.logits)
    assert first.generated is not None
    nothing_left(engine)


def test_a_module_that_does_not_run_is_no_place_to_skip() -> None:
    # contract: C8
    error = failing(gpt(), "model.transformer.h.skip(0)")
    assert isinstance(error, NeverRanError)
    assert "transformer.h.skip was asked for in step 0" in str(error)


def test_the_end_of_the_request_while_a_skip_is_asked_for() -> None:
    model = llama()
    block = "model.logits\ntracer.next()\nmodel.model.layers[0].skip(0)"
    request = Request(PROMPT, block, 2, values={})
    engine = warm(model)
    engine.run(request, check=False)
    assert isinstance(request.error, ReplacementError)
    request = Request(PROMPT, "tracer.next()\ntry:\n    tracer.next()\nfinally:\n    model.model.skip(0)", 2)
    engine.run(request, check=False)
    assert isinstance(request.error, NeverRanError)
    nothing_left(engine)


# Modules that keep something between steps.

WHEN = {
    "the first step": ("model.get_submodule(path).skip(given[0])", [0]),
    "the first step of a loop": (
        "for step in tracer.iter[:]:\n    if step == 0:\n        model.get_submodule(path).skip(given[0])",
        [0],
    ),
    "two steps": ("for step in tracer.iter[1:3]:\n    model.get_submodule(path).skip(given[step])", [1, 2]),
    "the last steps": ("for step in tracer.iter[2:]:\n    model.get_submodule(path).skip(given[step])", [2, 3, 4]),
    "the last step": ("for step in tracer.iter[4]:\n    model.get_submodule(path).skip(given[4])", [4]),
    "every step": (BLOCK, [0, 1, 2, 3, 4]),
    "never": ("model.logits", []),
}
FOR_GOOD = {"the last steps", "the last step", "every step"}
"""After these, no step of the request reads what the module keeps."""
STATEFUL = ["model.layers.1", "model.layers.1.self_attn", "model.layers.1.self_attn.attn"]


@pytest.mark.parametrize("others", [[], ["every step"], ["never"], list(WHEN)], ids=len)
@pytest.mark.parametrize("when", [when for when in WHEN if when != "never"])
@pytest.mark.parametrize("path", STATEFUL)
def test_what_a_skipped_module_keeps_is_as_hooks_leave_it(path: str, when: str, others: list[str]) -> None:
    """Later steps read the rows of the skipped ones, made of what the module was called with, in any batch."""
    # contract: C4
    model = remembering()
    engine = warm(model)
    runs = counted(model, path)
    pairs = []
    for number, each in enumerate([when, *others]):
        block, steps = WHEN[each]
        prompt = [PROMPT, [7, 2], [5], [9, 9, 4], [1, 2, 3, 4], [6], [8, 3], [2]][number]
        given, expected = replaced(model, prompt, path, 5, steps)
        pairs.append((Request(prompt, block, 5, values={"path": path, "given": given}), expected))
    del runs[:]
    engine.run(*[request for request, _ in pairs])
    for request, expected in pairs:
        check(engine, request, expected)
    # It is left out where every request skips it for good, and only there; the others, if any, all skip every step.
    left_out = set(WHEN[when][1]) if {when, *others} <= FOR_GOOD else set()
    assert len(runs) == 5 - len(left_out)


@pytest.mark.parametrize("inner", ["input_layernorm", "self_attn", "self_attn.qkv_proj", "self_attn.attn"])
@pytest.mark.parametrize("how", ["every step", "two steps", "the first step"])
def test_another_request_skips_what_runs_for_a_skipped_module(inner: str, how: str) -> None:
    """The whole layer runs for one request, for its keys and values, though each part is skipped by one of the two."""
    # contract: C4
    model = remembering()
    outer_given, outer = replaced(model, PROMPT, "model.layers.1", 5, [0])
    path = f"model.layers.1.{inner}"
    block, steps = WHEN[how]
    inner_given, expected = replaced(model, [7, 2], path, 5, steps)
    engine = warm(model)
    requests = [
        Request(PROMPT, WHEN["the first step"][0], 5, values={"path": "model.layers.1", "given": outer_given}),
        Request([7, 2], block, 5, values={"path": path, "given": inner_given}),
    ]
    engine.run(*requests)
    check(engine, requests[0], outer)
    check(engine, requests[1], expected)


def test_a_prompt_of_several_parts_is_skipped_in_its_last_step() -> None:
    """Its second part, of the same step, reads what the module keeps of the first."""
    model = remembering()
    path = "model.layers.1.self_attn.attn"
    engine = warm(model)
    runs = counted(model, path)
    request = Request([3, 1, 4, 1, 5], f"model.get_submodule({path!r}).skip(torch.zeros(2, 8))", parts=[2, 3])
    engine.run(request)
    assert len(runs) == 2
    assert len(model.get_submodule(path).kept[request.owner]) == 5


def test_a_function_from_outside_skips_in_the_first_step_only() -> None:
    """What the text tells is not of it."""
    model = remembering()
    given, _ = replaced(model, PROMPT, "model.layers.1", 3)
    twice, edits = replaced(model, PROMPT, "model.layers.2", 3)[0], {}
    for step in range(3):
        edits[step, "model.layers.2", "output"] = lambda _, value=twice[step]: copied(value)
    edits[0, "model.layers.1", "output"] = lambda _: copied(given[0])
    expected = plain(model, PROMPT, 3, (), edits)
    block = """
        for step in tracer.iter[:]:
            leave_out(model.model.layers[1], given[0], step)
            model.model.layers[2].skip(twice[step])
        """
    values = {"leave_out": lambda layer, x, step: step or layer.skip(x), "given": given, "twice": twice}
    engine = warm(model)
    request = Request(PROMPT, block, 3, values=values)
    engine.run(request)
    check(engine, request, expected)


BEHIND_ITS_BACK = {
    "goes on": "for step in tracer.iter[:]:\n    model.model.layers[1].skip(given[step])\n    onward()",
    "goes on in a prompt": (
        "for step in tracer.iter[:]:\n    model.model.layers[1].skip(given[step])\n"
        "    try:\n        onward()\n    except Exception:\n        pass\nlate = [1].save()"
    ),
    "changes the list": (
        "for step in tracer.iter[:]:\n    for n in which:\n        model.model.layers[n].skip(given[step])\n"
        "    use_up(which)"
    ),
}


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("how", BEHIND_ITS_BACK)
def test_a_block_that_only_seems_to_skip_in_every_step(how: str, beside: bool, fresh: bool) -> None:
    """Its keys and values are not there, or not to be relied on: the same error in any batch."""
    # contract: C4, D1
    model = remembering()
    given, _ = replaced(model, PROMPT, "model.layers.1")
    engine = Engine(model) if fresh else warm(model)

    def onward() -> None:
        engine.tracer.next()
        engine.model.logits  # noqa: B018

    values = {"given": given, "onward": onward, "which": [1], "use_up": list.clear}
    request = Request(PROMPT, BEHIND_ITS_BACK[how], STEPS, values=values)
    its, expected = replaced(model, [7, 2], "model.layers.1")
    others = [
        Request([2, 2], None, STEPS),
        Request([7, 2], BLOCK, STEPS, values={"path": "model.layers.1", "given": its}),
    ]
    engine.run(request, *(others if beside else []), check=False)
    assert isinstance(request.error, MissingStateError)
    assert "model.layers.1.self_attn.attn runs in step 1 of this request" in str(request.error)
    assert len(request.generated) == 2
    assert "late" not in request.saves
    if beside:
        assert others[0].generated == plain(model, [2, 2], STEPS).generated
        check(engine, others[1], expected)
    nothing_left(engine)


# Anything at all.

_LLAMA = [f"model.layers.{layer}{part}" for layer in range(3) for part in ("", ".self_attn", ".mlp.up", ".mlp")]
_PARTS = ("", ".input_layernorm", ".self_attn", ".self_attn.qkv_proj", ".self_attn.attn", ".mlp.up", ".mlp")
_GPT = [f"transformer.h.{layer}{part}" for layer in range(3) for part in ("", ".attn", ".mlp.1", ".mlp")]
RANDOM = {
    "llama": ["model.embed_tokens", *_LLAMA, "model.norm"],
    "gpt": ["transformer.wte", *_GPT, "lm_head"],
    "remembering": [f"model.layers.{layer}{part}" for layer in range(3) for part in _PARTS],
}


def order(name: str, paths: frozenset[str]) -> list[str]:
    """The paths that are not inside another of them, in the order of a pass."""
    return [p for p in RANDOM[name] if p in paths and not any(p.startswith(f"{other}.") for other in paths)]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, list[Any], int, bool]:
    name = draw(st.sampled_from(["llama", "gpt", "remembering", "remembering"]))
    some = st.frozensets(st.sampled_from(RANDOM[name]), max_size=4)
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.integers(1, 3))
        throughout = some.map(lambda paths, tokens=tokens: [paths] * tokens)
        steps = draw(st.one_of(st.none(), throughout, *[st.lists(some, min_size=tokens, max_size=tokens)] * 3))
        prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
        requests.append((prompt, tokens, draw(st.integers(0, 2)), draw(st.booleans()), steps))
    return name, requests, draw(st.integers(0, 2)), draw(st.booleans())


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_random_skips_in_random_batches_give_what_plain_hooks_give(schedule: tuple[str, list[Any], int, bool]) -> None:
    # contract: C4
    name, programs, padding, known = schedule
    model = MODELS[name]()
    engine = warm(model) if known else Engine(model)
    engine.padding = padding if name != "gpt" else 0
    throughout = """
        seen = [].save()
        for step in tracer.iter[:]:
            for path in paths:
                model.get_submodule(path).skip(given[step][path])
            for path in paths if reads else []:
                seen.append(given[step][path])
            seen.append(model.logits)
        """
    block = """
        seen = [].save()
        for step in tracer.iter[:]:
            for path in plan[step]:
                module = model.get_submodule(path)
                module.skip(given[step][path])
                if reads:
                    seen.append(module.output)
            seen.append(model.logits)
        """
    requests, results = [], []
    for prompt, tokens, joins, reads, steps in programs:
        if steps is None:
            requests.append(Request(prompt, None, tokens, joins))
            results.append((plain(model, prompt, tokens), None))
            continue
        plan = [order(name, paths) for paths in steps]
        shapes = plain(model, prompt, tokens, tuple({path for paths in plan for path in paths})).seen
        given = [{path: noise(shapes[step, path, "output"], step) for path in paths} for step, paths in enumerate(plan)]
        edits = {
            (step, path, "output"): lambda _, value=value: copied(value)
            for step, values in enumerate(given)
            for path, value in values.items()
        }
        expected = plain(model, prompt, tokens, (), edits)
        seen = []
        for step, paths in enumerate(plan):
            seen += [given[step][path] for path in paths if reads]
            seen.append(expected.logits[step])
        values = {"plan": plan, "paths": plan[0], "given": given, "reads": reads}
        # Of such a block it is known.
        same_in_all = all(paths == plan[0] for paths in plan)
        requests.append(Request(prompt, throughout if same_in_all else block, tokens, joins, values=values))
        results.append((expected, seen))
    engine.run(*requests)
    for request, (expected, seen) in zip(requests, results, strict=True):
        check(engine, request, expected)
        assert seen is None or same(request.saves["seen"], seen)


def test_a_block_that_is_taken_to_only_read_cannot_skip() -> None:
    """Others rely on it: its keys and values are theirs."""
    model = llama()
    engine = warm(model)
    request = Request(PROMPT, "model.model.layers[1].mlp.skip(torch.zeros(3, 8))")
    prober = engine.probe

    def probe(*args: Any, **values: Any) -> Any:
        made = prober(*args, **values)
        made.reads_only = True
        return made

    engine.probe = probe  # type: ignore[method-assign]
    engine.run(request, check=False)
    assert isinstance(request.error, ReplacementError)
    assert not request.probe.edited
