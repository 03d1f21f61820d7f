"""Random blocks over random schedules on real engines, compared with the oracle on each request alone.

What fails is shrunk, and printed as a script that runs alone. ``make soak`` runs the same for as long as one likes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_blocks import PLACES, Action, Program, RandomOracle
from random_schedules import ENGINES, LONGEST, MODEL, Asked, Schedule, check, preemptions, schedules

from endoscope import VLLM
from tests.conftest import path_of

# The same examples in every run, so that CI fails for what was changed and for nothing else.
EXAMPLES = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def its() -> RandomOracle:
    """The oracle of the model."""
    return RandomOracle(path_of(MODEL))


@pytest.fixture(scope="module")
async def cramped() -> AsyncIterator[Any]:
    """Steps of 48 tokens, keys and values for two requests, and the prefix cache."""
    async with VLLM(path_of(MODEL), mode="async", **ENGINES["cramped"]) as model:
        yield model.start()


@pytest.fixture(scope="module")
async def roomy() -> AsyncIterator[Any]:
    """Steps of 64 tokens, the prefix cache, and space for all."""
    async with VLLM(path_of(MODEL), mode="async", **ENGINES["roomy"]) as model:
        yield model.start()


@EXAMPLES
@given(data=st.data())
async def test_a_cramped_engine_gives_what_each_request_gives_alone(data: Any, cramped: Any, its: Any) -> None:
    # contract: C2, C3, C5, C6, D1, F2, F3, F4
    schedule = data.draw(schedules(ENGINES["cramped"]["max_num_batched_tokens"]))
    await check(schedule, schedule.expected(its), cramped, preempts=True)


@pytest.mark.parametrize("how", ["read", "in place"])
async def test_the_cramped_engine_does_preempt(how: str, cramped: Any, its: Any) -> None:  # contract: F4
    """Three requests that need two blocks of keys and values each, of three that there are."""
    block = Program(((Action(PLACES.index(("mlp", 1)), how, 0),),) * LONGEST)
    asked = Asked(story=0, length=30, tokens=LONGEST, program=block, after=None, abort=None)
    expected, before = block.acted_out(its, asked.prompt, LONGEST), preemptions()
    assert not expected.tie
    ends = await check(Schedule((asked,) * 3), [expected] * 3, cramped, preempts=True)
    assert preemptions() > before
    assert set(ends) == ({"finished"} if how == "read" else {"finished", "preempted"})


@EXAMPLES
@given(data=st.data())
async def test_a_roomy_engine_gives_what_each_request_gives_alone(data: Any, roomy: Any, its: Any) -> None:
    # contract: A9, C2, C3, C5, C6, D1, F3
    schedule = data.draw(schedules(ENGINES["roomy"]["max_num_batched_tokens"]))
    await check(schedule, schedule.expected(its), roomy, preempts=False)
