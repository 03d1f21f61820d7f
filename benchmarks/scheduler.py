"""What our scheduler costs those who do not trace: throughput, and time to first token beside traces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from statistics import median, quantiles
from typing import Any

from benchmarks import engines, pairs, workload
from benchmarks.pairs import Case, Comparison

SHORT = 256
"""Untraced requests of a run that measures throughput, each of a few tokens."""

TARGET = 0.98

LONG, LENGTH = 8, 400
"""Prompts that are traced, and how many tokens each has."""

BESIDE = 32
"""Untraced requests that arrive while the long prompts do."""

BUDGET = 512
"""Tokens of a step: one long prompt and what is there besides; two long ones do not fit."""

GAP = 0.02
"""Seconds from one arrival to the next."""


def throughput(name: str, count: int, tokens: int, say: Callable[[str], object]) -> list[Comparison]:
    """Compare many short untraced requests on our engine with the same on plain ``vllm.LLM``.

    Args:
        name: the model.
        count: how many pairs.
        tokens: new tokens of each request.
        say: told what is being done.
    """
    from vllm import SamplingParams

    prompts = [f"{number}: {workload.prompts(64)[number % 64]}" for number in range(SHORT)]
    sampling = workload.sampling(tokens)

    def rate(run: Callable[[], list[Any]]) -> dict[str, float]:
        start = time.perf_counter()
        outputs = run()
        seconds = time.perf_counter() - start
        workload.check(outputs, SHORT, tokens)
        return {"rate": SHORT * tokens / seconds}

    say("starting the engines")
    with engines.plain(name) as llm, engines.ours(name) as model:
        compared = Comparison(f"{SHORT} short untraced requests", "tokens/s", TARGET)
        case = Case(
            lambda: rate(lambda: llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)),
            lambda: rate(lambda: model.generate(prompts, **sampling)),
            {"rate": compared},
        )
        pairs.run([case], count, say)
    return [compared]


async def first_tokens(name: str, count: int, tokens: int, say: Callable[[str], object]) -> list[Comparison]:
    """Compare the time to first token of untraced requests beside traced long prompts with that beside untraced ones.

    Both runs are on our engine, with the same prompts at the same moments. "plain" is the run in which nothing is
    traced; there, vLLM splits the long prompts as it likes.

    Args:
        name: the model.
        count: how many pairs.
        tokens: new tokens of each request.
        say: told what is being done.
    """
    shorts, layer = workload.prompts(BESIDE), workload.LAYERS[name] // 2
    sampling = workload.sampling(tokens)
    # Each prompt is another one in each run, so that the cache serves none.
    numbers = iter(range(1000, 1 << 15))

    def long_prompt() -> list[int]:
        number = next(numbers)
        return [number] + [1000 + (number * 31 + place * 17) % 20_000 for place in range(LENGTH - 1)]

    say("starting the engine")
    async with engines.ours_async(name, max_num_batched_tokens=BUDGET) as model:

        def trace(prompt: list[int]) -> Any:
            with model.trace(prompt, **sampling) as tracer:
                rows = model.model.layers[layer].output[0].save()
            return tracer.backend

        async def follow(backend: Any) -> tuple[float, Any]:
            start, first, output = time.perf_counter(), 0.0, None
            async for output in backend:
                first = first or time.perf_counter()
            return 1e3 * (first - start), output

        async def later(delay: float, submit: Callable[[], Any]) -> tuple[float, Any]:
            await asyncio.sleep(delay)
            return await follow(submit())

        def run(traced: bool) -> pairs.AsyncRun:
            async def once() -> dict[str, float]:
                arrivals: list[Coroutine[Any, Any, tuple[float, Any]]] = []
                for place, short in enumerate(shorts):
                    if place % (BESIDE // LONG) == 0:
                        long = long_prompt()
                        submit = (lambda p=long: trace(p)) if traced else (lambda p=long: model.generate(p, **sampling))
                        arrivals.append(later(place * GAP, submit))
                    arrivals.append(later(place * GAP, lambda p=short: model.generate(p, **sampling)))
                found = await asyncio.gather(*arrivals)
                longs = [output for _, output in found if len(output.prompt_token_ids) == LENGTH]
                if traced and {output.saves["rows"].shape[0] for output in longs} != {LENGTH}:
                    raise RuntimeError("every row of the long prompts should have come home")
                waits = [wait for wait, output in found if len(output.prompt_token_ids) < workload.KV_BLOCK]
                if (len(longs), len(waits)) != (LONG, BESIDE):
                    raise RuntimeError(f"{len(longs)} long and {len(waits)} short requests finished")
                return {"median": median(waits), "p95": quantiles(waits, n=20)[-1]}

            return once

        compared = {
            "median": Comparison(f"median time to first token beside {LONG} long prompts", "ms", None, rate=False),
            "p95": Comparison("the 95th percentile of it", "ms", None, rate=False),
        }
        await pairs.run_async([Case(run(False), run(True), compared)], count, say)
    return list(compared.values())


def measure(name: str, count: int, tokens: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Measure both.

    Args:
        name: the model.
        count: how many pairs of each.
        tokens: new tokens of each request.
        say: told what is being done.

    Returns:
        ``comparisons``.
    """
    found = throughput(name, count, tokens, say)
    return {"comparisons": [*found, *asyncio.run(first_tokens(name, count, tokens, say))]}
