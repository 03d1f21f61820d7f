"""A block that misbehaves ends its own request, and the others of its batch are as they are without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from endoscope import VLLM, BlockError
from endoscope.errors import EngineArgumentError, SaveLimitError, StepTimeoutError, UsageError
from tests.conftest import options_of, path_of

PROMPTS = [[5, 9, 2, 7], [11, 3], [8, 8, 1]]
SAMPLING = {"max_tokens": 6, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model() -> Iterator[VLLM]:
    name = "tiny-llama"
    with VLLM(path_of(name), step_timeout=0.5, save_limit=4_000_000, **options_of(name)) as started:
        yield started


def endless() -> None:
    while True:
        pass


def sleeps() -> None:
    import time

    time.sleep(1000)


def keeps() -> Any:
    import torch

    from endoscope import save

    rows = save([])
    while True:
        rows.append(torch.ones(1 << 16))


def exits() -> None:
    import os

    os._exit(1)


def changes() -> None:
    import torch

    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float64)
    torch.rand(100)
    raise KeyError("changed")


BAD = {
    endless: StepTimeoutError,
    sleeps: StepTimeoutError,
    keeps: SaveLimitError,
    exits: UsageError,
    changes: KeyError,
}


def batch(model: VLLM, bad: Any = None) -> tuple[list[Any], Any]:
    """Three sampled requests whose blocks read, and, if one is given, a misbehaving block in the same batch."""
    results, error = [], None
    try:
        with model.trace(**SAMPLING) as tracer:
            for number, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt, seed=number):
                    rows = [].save()
                    for _ in tracer.iter[:]:
                        rows.append(model.model.layers[1].output[0])
            if bad is not None:
                with tracer.invoke([4, 4, 4]):
                    kept = (7).save()
                    before = model.model.layers[0].output
                    for _ in tracer.iter[2:]:
                        bad()
                        before = model.model.layers[0].output
    except BlockError as raised:
        error = raised
    for output in tracer.result[: len(PROMPTS)]:
        results.append(list(output.outputs[0].token_ids))
    return [results, tracer.saves["rows"]], error


# contract: D5, D1
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_a_block_that_misbehaves_ends_alone(model: VLLM, bad: Any) -> None:
    (tokens, rows), error = batch(model, bad)
    assert isinstance(error, BAD[bad])
    assert error.output.saves == {"kept": 7}
    assert len(error.output.outputs[0].token_ids) == 2
    expected_tokens, expected_rows = batch(model)[0]
    assert tokens == expected_tokens
    for found, expected in zip(rows, expected_rows, strict=True):
        assert len(found) == len(expected) == 6
        assert all((one == other).all() for one, other in zip(found, expected, strict=True))
    counts = model.debug()
    assert counts.pop("gears")
    assert counts == {"probes": 0, "requests": 0, "hooks": 0, "bytes": 0}


# contract: D5
def test_an_emitted_value_has_the_same_limit(model: VLLM) -> None:
    import torch

    with pytest.raises(SaveLimitError), model.trace([1, 2, 3], max_tokens=2) as tracer:
        small = torch.ones(3).save()
        tracer.emit(large=torch.ones(2_000_000))
    assert "small" in tracer.saves
    assert small.sum() == 3


# contract: D5
def test_limits_are_positive_numbers() -> None:
    with pytest.raises(EngineArgumentError, match="step_timeout takes a positive number"):
        VLLM("any", step_timeout=0)
    with pytest.raises(EngineArgumentError, match="save_limit takes a positive number"):
        VLLM("any", save_limit=-1)
