"""What a module takes or returns beside tensors is the block's own, as are the rows that it is handed."""

from __future__ import annotations

import copy
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from harness import Engine, Gives, Request, Small, made, run


class Pair(NamedTuple):
    hidden: torch.Tensor
    other: Any


class Names(list[str]):
    """A list of a class of its own, without a tensor in it."""


class Bag:
    """An object with a method that changes it."""

    def __init__(self) -> None:
        self.items = [1]

    def add(self, item: int) -> None:
        self.items.append(item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bag) and other.items == self.items

    __hash__ = None  # type: ignore[assignment]


LEAVES: dict[str, tuple[Callable[[], Any], str]] = {
    "set": (lambda: {1, 2}, "leaf.add(9)"),
    "deque": (lambda: deque([1]), "leaf.append(9)"),
    "counter": (lambda: Counter("aab"), "leaf.update('abc')"),
    "ordered dict": (lambda: OrderedDict(a=1), "leaf['b'] = 2"),
    "list of a class of its own": (lambda: Names(["a"]), "leaf.append('b')"),
    "list in a list": (lambda: [[1]], "leaf[0].append(9)"),
    "dict in a dict": (lambda: {"a": {"b": 1}}, "leaf['a'].clear()"),
    "bytearray": (lambda: bytearray(b"a"), "leaf.extend(b'b')"),
    "object": (Bag, "leaf.add(9)"),
}
"""Something beside tensors, and a change of it."""

PLACES: dict[str, tuple[Callable[[torch.Tensor, Any], Any], Callable[[Any], Any], str]] = {
    "tuple": (lambda x, leaf: (x, leaf), lambda given: given[1], "model.one.output[1]"),
    "named tuple": (Pair, lambda given: given.other, "model.one.output.other"),
    "list": (lambda x, leaf: [x, leaf], lambda given: given[1], "model.one.output[1]"),
    "dict": (lambda x, leaf: {"h": x, "other": leaf}, lambda given: given["other"], "model.one.output['other']"),
    "deep": (
        lambda x, leaf: (x, [{"other": leaf}]),
        lambda given: given[1][0]["other"],
        "model.one.output[1][0]['other']",
    ),
    "argument": (lambda x, leaf: (x, leaf), lambda given: given[1], "model.two.inputs[0][1]"),
    "keyword": (lambda x, leaf: (x, leaf), lambda given: given[1], "model.three.inputs[1]['other']"),
}
"""Where it is, how the engine finds it there, and how a block does."""


def hidden_of(given: Any) -> Any:
    return given["h"] if isinstance(given, dict) else given[0]


def model_of(leaf: Any, place: str) -> tuple[Any, list[Any]]:
    """A model in which the same object comes along at every step, and what its modules were given of it."""
    given: list[Any] = []
    put, find, _ = PLACES[place]

    def body(model: Any, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        value = model.one(x)
        other = find(value)
        given.append(copy.deepcopy(other))
        x = model.two(hidden_of(value), other)
        given.append(copy.deepcopy(leaf))
        result: torch.Tensor = model.three(x, other=other)
        return result

    def same(x: torch.Tensor, other: Any) -> torch.Tensor:
        given.append(copy.deepcopy(other))
        return x + 0

    one = Gives(lambda x: put(x + 0, leaf))
    return made(lambda: Small(body, one=one, two=Gives(same), three=Gives(same))), given


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", LEAVES)
@pytest.mark.parametrize("edits", [False, True], ids=["reads", "edits"])
def test_a_change_of_it_stays_in_the_block(kind: str, place: str, edits: bool) -> None:  # contract: D1
    make, change = LEAVES[kind]
    leaf, clean = make(), make()
    model, given = model_of(leaf, place)
    edit = "\n    model.two.output[:] = 7" if edits else ""
    start = f"seen = [].save()\nfor _ in tracer.iter[:]:\n    leaf = {PLACES[place][2]}"
    changing = f"{start}\n    {change}\n    seen.append(leaf){edit}"
    reading = f"seen = [].save()\nfor _ in tracer.iter[:]:\n    seen.append({PLACES[place][2]})"
    # In the place before `two` an edit of its output comes later in the pass; behind it, it would come too late.
    if place == "keyword":
        changing = changing.replace("model.two.output", "model.three.output")
    requests = [
        Request([3], reading, 2),
        Request([1, 4], changing, 2),
        Request([1, 5], reading, 2),
        Request([9], None, 2),
    ]
    Engine(model).run(*requests)
    assert leaf == clean
    assert given
    assert all(each == clean for each in given)
    changed = make()
    exec(change, {"leaf": changed})
    assert changed != clean
    for request, expected in zip(requests, (clean, changed, clean), strict=False):
        assert request.saves["seen"] == [expected, expected]


def test_each_block_has_one_of_its_own_at_every_step() -> None:
    leaf = {1}
    model, _ = model_of(leaf, "tuple")
    block = "seen = [].save()\nfor _ in tracer.iter[:]:\n    seen.append(model.one.output[1])"
    requests = [Request([3], block, 3), Request([4], block, 3)]
    Engine(model).run(*requests)
    objects = [id(each) for request in requests for each in request.saves["seen"]]
    assert len({*objects, id(leaf)}) == 7


def test_a_pair_with_it_can_be_assigned_again() -> None:
    model, given = model_of({1}, "tuple")
    block = "h, other = model.one.output\nmodel.one.output = (h * 0, other)\nx = model.two.input.save()"
    saves = run(model, block)
    assert not saves["x"].any()
    assert all(each == {1} for each in given)


def test_what_cannot_be_copied_is_handed_out_as_it_is() -> None:
    lock = threading.Lock()
    model = made(
        lambda: Small(
            lambda model, x, _: model.two(*model.one(x))[0], one=Gives(lambda x: (x, lock)), two=Gives(lambda *a: a)
        )
    )
    saves = run(model, "kind = [type(model.one.output[1]).__name__].save()")
    assert saves["kind"] == ["lock"]
