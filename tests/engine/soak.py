"""``make soak MINUTES=10``: fresh random schedules on every kind of engine until the time is over."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from random_blocks import RandomOracle
from random_schedules import ENGINES, MODEL, Schedule, check, preemptions, schedules

from endoscope import VLLM
from tests.conftest import path_of

BATCH = settings(max_examples=25, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def main() -> None:
    """Share the time among the engines; what fails is shrunk, and printed with its script."""
    parser = argparse.ArgumentParser(description="Compare random blocks on real engines with the oracle.")
    parser.add_argument("minutes", type=float, help="how long, starts of engines included")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="as a run printed it"
    )
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    dice, its, began = random.Random(options.seed), RandomOracle(path_of(MODEL)), time.monotonic()
    for number, name in enumerate(ENGINES, 1):
        until = began + 60 * options.minutes * number / len(ENGINES)
        with asyncio.Runner() as runner:
            ends, examples = soak(runner, name, its, until, dice)
        told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        print(
            f"{name}: {examples} examples; of {ends.total()} requests {told}; {preemptions()} preemptions", flush=True
        )


def soak(runner: Any, name: str, its: RandomOracle, until: float, dice: random.Random) -> tuple[Counter[str], int]:
    """Run batch after batch on one engine; returns how the requests ended, and the number of examples."""
    arguments, ends, examples = ENGINES[name], Counter[str](), 0

    async def start() -> Any:
        return VLLM(path_of(MODEL), mode="async", **arguments).start()

    model = runner.run(start())
    try:
        while time.monotonic() < until:

            @BATCH
            @seed(dice.randrange(1 << 32))
            @given(schedules(arguments["max_num_batched_tokens"]))
            def batch(schedule: Schedule) -> None:
                nonlocal examples
                preempts = "num_gpu_blocks_override" in arguments
                ends.update(runner.run(check(schedule, schedule.expected(its), model, preempts)))
                examples += 1

            batch()
    finally:
        model.close()
    return ends, examples


if __name__ == "__main__":
    main()
