"""What a block saves, and under which names it goes home."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Engine, Request, llama, plain, run, same

from endoscope.errors import UsageError
from endoscope.probing import save
from endoscope.probing.saves import tensor_save


def test_a_saved_value_goes_home_under_every_name_that_the_block_gave_it() -> None:
    # contract: B2
    saves = run(llama(), "a = b = model.logits.save()\nc = b\nd = c.clone()")
    assert sorted(saves) == ["a", "b", "c"]
    assert saves["a"] is saves["b"] is saves["c"]


def test_a_value_bound_to_no_name_goes_home_under_its_text() -> None:
    # contract: B2
    saves = run(
        llama(),
        """
        model.model.layers[1].mlp.output.save()
        model.logits.argmax(-1).save()
        (model.samples + 1).save()
        """,
    )
    assert sorted(saves) == ["model.logits.argmax(-1)", "model.model.layers[1].mlp.output", "model.samples + 1"]
    assert same(saves["model.logits.argmax(-1)"][0] + 1, saves["model.samples + 1"][0, 0])


def test_several_under_one_text_are_a_list() -> None:
    # contract: B2
    saves = run(llama(), "for step in tracer.iter[:]:\n    model.logits.save()", tokens=3)
    assert list(saves) == ["model.logits"]
    assert same(saves["model.logits"], plain(llama(), [3, 1, 4], 3).logits)


def test_a_name_that_is_bound_anew_is_what_it_was_bound_to_last() -> None:
    # contract: B2
    saves = run(llama(), "for step in tracer.iter[:]:\n    logits = model.logits\n    logits.save()", tokens=3)
    assert same(saves["logits"], plain(llama(), [3, 1, 4], 3).logits[2])


def test_a_list_that_is_saved_first_and_filled_later() -> None:
    # contract: B2
    saves = run(
        llama(),
        """
        values, by_step = [].save(), {}.save()
        for step in tracer.iter[:]:
            values.append(step)
            by_step[step] = 1
        """,
        tokens=3,
    )
    assert saves == {"values": [0, 1, 2], "by_step": {0: 1, 1: 1, 2: 1}}


@pytest.mark.parametrize("value", ["5", "1.5", "'text'", "True", "None", "(1, 2)", "[1]", "{'a': 1}", "torch.float32"])
def test_a_value_of_any_type(value: str) -> None:
    # contract: B2
    (found,) = run(llama(), f"x = {value}\nx.save()").values()
    assert found == eval(value)
    assert run(llama(), f"x = ({value}).save()")["x"] == eval(value)


@pytest.mark.parametrize("value", ["5", "None", "'text'", "True"])
def test_a_number_is_not_taken_for_another_name_that_holds_the_same(value: str) -> None:
    # contract: B2
    outside = eval(value)
    block = f"other = {value}\nx = {value}\nx.save()\ny = ({value}).save()"
    assert run(llama(), block, outside=outside) == {"x": outside, "y": outside}


def test_a_number_that_was_saved_before_its_name_was_bound_anew() -> None:
    # contract: B2
    assert run(llama(), "n = 1\nother = 1\nn.save()\nn = 2") == {"n": 1}


def test_a_number_bound_to_no_name() -> None:
    # contract: B2
    assert run(llama(), "len([1, 2]).save()") == {"len([1, 2])": 2}


def test_what_was_saved_before_an_error_is_kept() -> None:
    # contract: A7
    request = Request([3, 1], "logits = model.logits.save()\n1 / 0\nlate = 1\nlate.save()", 3)
    Engine(llama()).run(request, check=False)
    assert list(request.saves) == ["logits"]
    assert same(request.saves["logits"], plain(llama(), [3, 1]).logits[0])


class Own:
    """An object whose ``save`` is its own business."""

    def __init__(self) -> None:
        self.saved = 0

    def save(self) -> str:
        self.saved += 1
        return "its own"


class Instance:
    """The same with a function on the instance, as a module of Python has."""

    def __init__(self) -> None:
        self.save = lambda: "its own"


@pytest.mark.parametrize("kind", [Own, Instance])
def test_an_object_with_a_save_of_its_own(kind: Any) -> None:
    # contract: C1
    thing = kind()
    saves = run(llama(), "result = thing.save()\nresult.save()", thing=thing)
    assert saves == {"result": "its own"}
    if kind is Own:
        assert thing.saved == 1


def test_a_view_of_a_module_can_be_saved() -> None:
    # contract: C1
    saves = run(llama(), "layer = model.model.layers[1].save()\nmodel.save()")
    assert saves["layer"].reference() == ("module", "model.layers.1")
    assert saves["model"].reference() == ("model",)


def test_save_in_a_helper() -> None:
    # contract: B2
    def helper(value: torch.Tensor) -> None:
        save(value * 2)
        save(3, "three")
        tensor_save(value)

    saves = run(llama(), "logits = model.logits\nhelper(logits)", helper=helper)
    assert sorted(saves) == ["logits", "save(Tensor)", "three"]
    assert same(saves["save(Tensor)"], saves["logits"] * 2)
    assert saves["three"] == 3


def test_save_in_a_function_of_the_block() -> None:
    # contract: B2
    saves = run(llama(), "def f(x):\n    y = x + 1\n    y.save()\n    return y\nz = f(model.samples)")
    assert list(saves) == ["z"]


def test_save_outside_a_block() -> None:
    # contract: C1
    with pytest.raises(UsageError, match="outside a block"):
        save(1)


def test_case_33_a_name_that_is_bound_later_or_not_at_all() -> None:
    # contract: C1
    for name in ("later", "never"):
        request = Request([3], f"x = 1\ny = {name}\nlater = 2")
        Engine(llama()).run(request, check=False)
        assert isinstance(request.error, NameError)
        assert name in str(request.error)


def test_case_35_two_requests_with_one_block_and_other_values() -> None:
    # contract: C1
    model = llama()
    block = "model.model.layers[1].mlp.output.add_(by)\nby = by + 1\nby.save()\nlogits = model.logits.save()"
    requests = [Request([3, 1], block, values={"by": by}) for by in (1, 2, -7)]
    Engine(model).run(*requests)
    for request in requests:
        by = request.values["by"]
        edit = {(0, "model.layers.1.mlp", "output"): lambda h, by=by: h + by}
        assert request.saves["by"] == by + 1
        assert same(request.saves["logits"], plain(model, [3, 1], 1, (), edit).logits[0])
