"""What a block does to torch's modes and defaults stays in the block, and is there after its next handoff."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import HIDDEN, Engine, Gives, Request, Small, llama, made, plain, run, same
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

GETS: dict[str, str] = {
    "grad": "torch.is_grad_enabled()",
    "inference": "torch.is_inference_mode_enabled()",
    "dtype": "torch.get_default_dtype()",
    "autocast": "torch.is_autocast_enabled('cpu')",
    "cast": "torch.get_autocast_dtype('cpu')",
    "device": "str(torch.get_default_device())",
    "made on": "torch.zeros(1).device.type",
    "tracks": "torch.ones(1, requires_grad=True).mul(2).requires_grad",
}
EVERYTHING = "{" + ", ".join(f"{name!r}: {get}" for name, get in GETS.items()) + "}"

# How a block sets something for good or for a while, and what it then finds.
SETS: dict[str, tuple[str, dict[str, Any]]] = {
    "no_grad": ("with torch.no_grad():", {}),
    "grad": ("with torch.enable_grad():", {"grad": True, "tracks": True}),
    "inference": ("with torch.inference_mode():", {"inference": True}),
    "grad in inference": (
        "with torch.inference_mode(), torch.inference_mode(False), torch.enable_grad():",
        {"grad": True, "tracks": True},
    ),
    "autocast": ("with torch.autocast('cpu'):", {"autocast": True}),
    "autocast half": ("with torch.autocast('cpu', dtype=torch.float16):", {"autocast": True, "cast": torch.float16}),
    "device": ("with torch.device('meta'):", {"device": "meta", "made on": "meta"}),
    "set grad": ("torch.set_grad_enabled(True)\nif True:", {"grad": True, "tracks": True}),
    "set dtype": ("torch.set_default_dtype(torch.float64)\nif True:", {"dtype": torch.float64}),
    "set device": ("torch.set_default_device('meta')\nif True:", {"device": "meta", "made on": "meta"}),
    "set device twice": (
        "torch.set_default_device('cpu'); torch.set_default_device('meta')\nif True:",
        {"device": "meta", "made on": "meta"},
    ),
    "all": (
        "torch.set_default_dtype(torch.bfloat16)\n"
        "with torch.autocast('cpu', dtype=torch.float16), torch.enable_grad(), torch.device('meta'):",
        {
            "dtype": torch.bfloat16,
            "grad": True,
            "tracks": True,
            "autocast": True,
            "cast": torch.float16,
            "device": "meta",
            "made on": "meta",
        },
    ),
}
PLAIN = {
    "grad": False,
    "inference": False,
    "dtype": torch.float32,
    "autocast": False,
    "cast": torch.bfloat16,
    "device": "cpu",
    "made on": "cpu",
    "tracks": False,
}


def state() -> dict[str, Any]:
    """Torch's modes and defaults as they are here."""
    found: dict[str, Any] = eval(EVERYTHING)
    return found


@pytest.fixture(autouse=True)
def _unchanged() -> Iterator[None]:
    """Nothing of what the blocks of a test set is left behind it."""
    before = state()
    yield
    assert state() == before
    assert _get_current_function_mode_stack() == []
    assert getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) is None
    assert torch.utils._device.CURRENT_DEVICE is None


seen: list[list[float]] = []


def draws(hidden: torch.Tensor) -> torch.Tensor:
    """What a module does that draws a random number."""
    seen[-1].append(torch.rand(1).item())
    return hidden * 1


def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A model of one module."""
    return model.a(hidden)  # type: ignore[no-any-return]


def watching() -> tuple[Any, list[dict[str, Any]]]:
    """A model that notes the state that each of its modules runs in."""
    found: list[dict[str, Any]] = []

    def note(hidden: torch.Tensor) -> torch.Tensor:
        found.append(state())
        return hidden * 1

    def body(model: Any, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for name in ("a", "b", "c"):
            hidden = getattr(model, name)(hidden)
        return hidden

    return made(lambda: Small(body, a=Gives(note), b=Gives(note), c=Gives(note))), found


@pytest.mark.parametrize("name", SETS)
def test_a_state_is_the_blocks_own(name: str) -> None:
    # contract: C1
    head, expected = SETS[name]
    sets = f"""
{head}
    found = [{EVERYTHING}].save()
    for step in tracer.iter[:]:
        model.a.output
        found.append({EVERYTHING})
        model.b.output
        model.logits
        found.append({EVERYTHING})
"""
    looks = f"""
found = [{EVERYTHING}].save()
for step in tracer.iter[:]:
    model.a.output
    model.b.output
    found.append({EVERYTHING})
    model.logits
"""
    model, by_module = watching()
    first, setter, second = Request([3], looks, 3), Request([3, 1], sets, 3), Request([5], looks, 3)
    Engine(model).run(first, setter, second)
    assert setter.saves["found"] == [PLAIN | expected] * 7
    assert first.saves["found"] == [PLAIN] * 4
    assert second.saves["found"] == [PLAIN] * 4
    assert by_module == [{**PLAIN, "inference": True}] * 9


@pytest.mark.parametrize("name", [name for name in SETS if SETS[name][0].startswith("with")])
def test_the_state_before_is_back_after_a_with(name: str) -> None:
    # contract: C1
    model, _ = watching()
    saves = run(model, f"{SETS[name][0]}\n    model.a.output\nmodel.b.output\nfound = {EVERYTHING}.save()")
    assert saves["found"] == PLAIN


def test_two_blocks_each_in_an_autocast_of_its_own() -> None:
    # contract: C1
    block = """
        with torch.autocast('cpu', dtype=kind):
            model.a.output
            before = torch.ones(2, 2) @ torch.ones(2, 2)
            model.b.output
            after = torch.ones(2, 2) @ torch.ones(2, 2)
        [before.dtype, after.dtype].save()
        """
    default = "with torch.autocast('cpu'):\n    model.a.output\n    (torch.ones(2, 2) @ torch.ones(2, 2)).dtype.save()"
    model, _ = watching()
    kinds = [torch.float16, torch.bfloat16, torch.float16]
    requests = [Request([1], block, values={"kind": kind}) for kind in kinds]
    last = Request([1], default)
    Engine(model).run(*requests, last)
    assert [next(iter(request.saves.values())) for request in requests] == [[kind, kind] for kind in kinds]
    assert next(iter(last.saves.values())) == torch.bfloat16


def test_two_blocks_each_with_a_default_device() -> None:
    # contract: C1
    block = """
        torch.set_default_device(device)
        model.a.output
        torch.set_default_device(device)
        model.b.output
        found = torch.zeros(1).device.type.save()
        """
    model, _ = watching()
    requests = [Request([1], block, values={"device": device}) for device in ("meta", "cpu", "meta")]
    Engine(model).run(*requests)
    assert [request.saves["found"] for request in requests] == ["meta", "cpu", "meta"]


class Counts(TorchFunctionMode):
    """A function mode that counts the calls in it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **kwargs or {})


def test_a_mode_of_the_block_does_not_see_the_model() -> None:
    # contract: C1
    model, _ = watching()
    mine = Counts()
    saves = run(
        model,
        """
        with mine:
            model.a.output
            before = mine.calls
            model.c.output
            between = mine.calls - before
            torch.zeros(1)
            after = mine.calls - before - between
        outside = mine.calls
        torch.zeros(1)
        [between, after, mine.calls - outside].save()
        """,
        mine=mine,
    )
    assert list(saves.values()) == [[0, 1, 0]]


class Dispatches(TorchDispatchMode):
    """A dispatch mode that counts the operations in it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **kwargs or {})


def test_a_dispatch_mode_of_the_block_does_not_see_the_model() -> None:
    # contract: C1
    model, _ = watching()
    mine = Dispatches()
    other = Request([5], "for _ in tracer.iter[:]:\n    model.a.output + 1\n    model.b.output + 1")
    request = Request(
        [3],
        """
        with mine:
            torch.zeros(1)
            before = mine.calls
            model.a.output
            model.c.output
            between = mine.calls - before
            torch.zeros(1)
        [before, between, mine.calls].save()
        """,
        values={"mine": mine},
    )
    Engine(model).run(request, other)
    assert list(request.saves.values()) == [[1, 0, 2]]
    assert _get_current_dispatch_mode_stack() == []


def test_a_fake_tensor_mode_stays_in_its_block() -> None:
    # contract: C1
    model, _ = watching()
    saves = run(
        model,
        """
        from torch._subclasses.fake_tensor import FakeTensorMode
        with FakeTensorMode():
            made = type(torch.zeros(1)).__name__
            model.a.output
            again = type(torch.zeros(1)).__name__
        [made, again, type(torch.zeros(1)).__name__].save()
        """,
    )
    assert list(saves.values()) == [["FakeTensor", "FakeTensor", "Tensor"]]
    assert _get_current_dispatch_mode_stack() == []


# contract: D5
@pytest.mark.parametrize("does", ["torch.manual_seed(7)", "torch.rand(5)", "torch.default_generator.seed()", "pass"])
def test_the_engines_random_numbers_are_its_own(does: str) -> None:
    drawn: list[float] = []
    model = made(lambda: Small(body, a=Gives(draws)))

    def sequence(*blocks: str) -> list[float]:
        drawn.clear()
        torch.manual_seed(11)
        seen.append(drawn)
        Engine(model).run(*(Request([3], block, 3) for block in blocks))
        return list(drawn)

    block = f"for _ in tracer.iter[:]:\n    model.a.output\n    {does}\n    model.logits\n    {does}"
    assert sequence(block, block) == sequence("pass")


# contract: D5
def test_a_blocks_random_numbers_are_its_own() -> None:
    block = """
        torch.manual_seed(seed)
        found = [torch.rand(1).item()].save()
        for _ in tracer.iter[:]:
            model.a.output
            found.append(torch.rand(1).item())
        """
    model, _ = watching()
    requests = [Request([3], block, 3, values={"seed": seed}) for seed in (1, 2, 1)]
    Engine(model).run(*requests)
    expected = {}
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected[seed] = [torch.rand(1).item() for _ in range(4)]
    assert [request.saves["found"] for request in requests] == [expected[1], expected[2], expected[1]]
    unseeded = [Request([3], "found = torch.rand(4).save()") for _ in range(2)]
    Engine(model).run(*unseeded)
    assert not torch.equal(unseeded[0].saves["found"], unseeded[1].saves["found"])


@pytest.mark.parametrize("name", SETS)
def test_a_mode_and_a_default_device_of_the_engine_stay_its_own(name: str) -> None:
    # contract: C1
    engines = Counts()
    model, _ = watching()
    head, expected = SETS[name]
    request = Request([3, 1], f"{head}\n    model.a.output\n    model.c.output\n    found = {EVERYTHING}.save()")
    engine = Engine(model)
    with engines:
        torch.set_default_device("cpu")
        try:
            context = torch._GLOBAL_DEVICE_CONTEXT.device_context
            engine.run(request)
            stack = _get_current_function_mode_stack()
            assert [type(mode).__name__ for mode in stack] == ["DeviceContext", "Counts"]
            assert stack[0] is context
            assert torch._GLOBAL_DEVICE_CONTEXT.device_context is context
        finally:
            torch.set_default_device(None)
        assert _get_current_function_mode_stack() == [engines]
    assert request.saves["found"] == PLAIN | expected


def test_a_block_that_fails_or_is_killed_leaves_no_state() -> None:
    # contract: D1
    sets = SETS["all"][0]
    model, by_module = watching()
    failed = Request([1], f"{sets}\n    model.a.output\n    1 / 0")
    Engine(model).run(failed, check=False)
    assert isinstance(failed.error, ZeroDivisionError)
    engine = Engine(model)
    probe = engine.probe(f"{sets}\n    model.a.output")
    probe.turn()
    probe.kill()
    assert probe.dead
    assert by_module == [{**PLAIN, "inference": True}] * 3


def test_a_block_does_not_inherit_the_inference_mode_of_the_forward() -> None:
    # contract: C3
    saves = run(
        llama(),
        """
        made, value = torch.zeros(2), model.model.layers[0].mlp.output
        found = [made.is_inference(), value.is_inference(), model.logits.is_inference()].save()
        """,
    )
    assert saves["found"] == [False, False, False]


def test_gradients_in_a_block() -> None:
    # contract: C1
    model = llama()
    saves = run(
        model,
        """
        hidden = model.model.layers[2].mlp.output
        with torch.enable_grad():
            leaf = hidden.clone().requires_grad_()
            logits = model.logits
            (leaf ** 2).sum().backward()
        gradient = leaf.grad.save()
        """,
    )
    expected = plain(model, [3, 1, 4], 1, ("model.layers.2.mlp",))
    assert same(saves["gradient"], expected.seen[0, "model.layers.2.mlp", "output"] * 2)


def test_a_value_that_was_read_in_inference_mode_can_be_edited() -> None:
    # contract: C3
    model = llama()
    expected = plain(model, [3, 1, 4], 1, (), {(0, "model.layers.1.mlp", "output"): lambda h: h + 1})
    saves = run(
        model,
        """
        with torch.inference_mode():
            h = model.model.layers[1].mlp.output
            h += 1
            made = torch.ones(3, 8)
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], expected.logits[0])
    saves = run(
        model,
        """
        with torch.inference_mode():
            model.model.layers[1].mlp.output = model.model.layers[1].mlp.output + 1
        logits = model.logits.save()
        """,
    )
    assert same(saves["logits"], expected.logits[0])
    assert HIDDEN == 8
