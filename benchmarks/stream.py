"""The stream: many asynchronous traces of one prompt each, all at once, against plain ``AsyncLLM``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import engines, pairs, workload
from benchmarks.pairs import Case, Comparison
from endoscope import save

REQUESTS = 64
TOKENS = 32

RATES = {
    "smollm2": {"logits": 0.96, "one layer": 0.93},
    "tiny-llama": {"logits": 0.90, "one layer": 0.75},
}
FIRST = {"smollm2": 1.15, "tiny-llama": 1.3}
"""The most that the time to the first output may be of plain's."""
LABELS = {"untraced": "untraced", "logits": "logits saved", "one layer": "one layer at every step"}

Stream = Callable[[Any, str, dict[str, Any], int], Any]


def untraced(model: Any, prompt: str, sampling: dict[str, Any], layer: int) -> Any:
    """Submit a prompt without a block."""
    return model.generate(prompt, **sampling)


def first_logits(model: Any, prompt: str, sampling: dict[str, Any], layer: int) -> Any:
    """Save the logits of the first token."""
    with model.trace(prompt, **sampling) as tracer:
        logits = model.logits.save()
    return tracer.backend


def one_layer(model: Any, prompt: str, sampling: dict[str, Any], layer: int) -> Any:
    """Save one layer's rows of the prompt, and its row of each token."""
    with model.trace(prompt, **sampling) as tracer:
        rows = save([])
        for _ in tracer.iter[:]:
            rows.append(model.model.layers[layer].output[0])
    return tracer.backend


async def measure(name: str, count: int, requests: int, tokens: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Compare the asynchronous engine with plain ``AsyncLLM``.

    Both sides run one task for each request, which submits it and iterates over its outputs. The time to the first
    output is counted from before the first task starts, and so holds the submission of all of them.

    Args:
        name: the model.
        count: how many pairs of each.
        requests: traces of a run.
        tokens: new tokens of each.
        say: told what is being done.

    Returns:
        ``comparisons``.
    """
    say("starting the engines")
    async with engines.plain_async(name) as llm, engines.ours_async(name) as model:
        cases = _cases(name, llm, model, requests, tokens)
        await pairs.run_async(cases, count, say)
    return {"comparisons": [one for case in cases for one in case.comparisons.values()]}


def _cases(name: str, llm: Any, model: Any, requests: int, tokens: int) -> list[Case]:
    from vllm import SamplingParams

    prompts, sampling, layer = workload.prompts(requests), workload.sampling(tokens), workload.LAYERS[name] // 2
    number = 0

    def generate(prompt: str) -> Any:
        nonlocal number
        number += 1
        return llm.generate(prompt, SamplingParams(**sampling), request_id=f"plain-{number}")

    async def all_at_once(submit: Callable[[str], Any]) -> tuple[list[Any], dict[str, float]]:
        firsts: list[float] = []

        async def follow(prompt: str) -> Any:
            first = 0.0
            output: Any = None
            async for output in submit(prompt):
                first = first or time.perf_counter()
            firsts.append(first)
            return output

        start = time.perf_counter()
        outputs = await asyncio.gather(*[follow(prompt) for prompt in prompts])
        seconds = time.perf_counter() - start
        workload.check(outputs, requests, tokens)
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        return outputs, {"rate": made / seconds, "first": 1e3 * (median(firsts) - start)}

    async def plain() -> dict[str, float]:
        _, numbers = await all_at_once(generate)
        return numbers

    def ours(stream: Stream, visits: int) -> pairs.AsyncRun:
        async def run() -> dict[str, float]:
            outputs, numbers = await all_at_once(lambda prompt: stream(model, prompt, sampling, layer))
            if stream is first_logits and any(output.saves["logits"].shape[0] != 1 for output in outputs):
                raise RuntimeError("the logits of one token each should have come home")
            if stream is one_layer:
                workload.check_rows([output.saves["rows"] for output in outputs], outputs, visits)
            return numbers

        return run

    runs = {"untraced": (untraced, 0), "logits": (first_logits, 1), "one layer": (one_layer, tokens)}
    cases = []
    for key, (stream, visits) in runs.items():
        rate = Comparison(f"{LABELS[key]}: throughput", "tokens/s", RATES[name].get(key))
        limit = None if stream is untraced else FIRST[name]
        first = Comparison(f"{LABELS[key]}: median time to the first output", "ms", limit, rate=False)
        cases.append(Case(plain, ours(stream, visits), {"rate": rate, "first": first}))
    return cases
