"""The synchronous path: one batch of prompts, plain, untraced, and with the same block on every request."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import engines, pairs, workload
from benchmarks.pairs import Case, Comparison
from endoscope import save

REQUESTS = 32
TOKENS = 32

TARGETS = {
    "smollm2": {"untraced": 0.98, "prefill": 0.95, "one layer": 0.93, "every layer": 0.85},
    "tiny-llama": {"untraced": 0.95, "prefill": 0.90, "one layer": 0.80, "every layer": 0.65},
}
LABELS = {
    "untraced": "untraced",
    "prefill": "one layer saved at prefill",
    "one layer": "one layer at every step",
    "every layer": "every layer at every step",
}

Traced = Callable[[Any, list[str], dict[str, Any], int], tuple[list[Any], list[Any]]]


def prefill(model: Any, prompts: list[str], sampling: dict[str, Any], layer: int) -> tuple[list[Any], list[Any]]:
    """Save one layer's rows of each prompt."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = model.model.layers[layer].output[0].save()
    return tracer.result, [[each] for each in rows]


def one_layer(model: Any, prompts: list[str], sampling: dict[str, Any], layer: int) -> tuple[list[Any], list[Any]]:
    """Save one layer's rows of each prompt, and its row of each token."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = save([])
                for _ in tracer.iter[:]:
                    rows.append(model.model.layers[layer].output[0])
    return tracer.result, rows


def every_layer(model: Any, prompts: list[str], sampling: dict[str, Any], layer: int) -> tuple[list[Any], list[Any]]:
    """Save every layer's rows of each prompt, and every layer's row of each token."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = save([])
                for _ in tracer.iter[:]:
                    for each in model.model.layers:
                        rows.append(each.output[0])
    return tracer.result, rows


def measure(name: str, count: int, requests: int, tokens: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Compare the synchronous engine with plain ``vllm.LLM``.

    Args:
        name: the model.
        count: how many pairs of each.
        requests: prompts of a run.
        tokens: new tokens of each.
        say: told what is being done.

    Returns:
        ``comparisons``, and ``handoff_us``: what a handoff costs in the engine, as the time that reading every layer
        at every step adds to an untraced run, its values' way home and its submission included, divided by the number
        of handoffs.
    """
    say("starting the engines")
    with engines.plain(name) as llm, engines.ours(name) as model:
        cases = _cases(name, llm, model, requests, tokens)
        pairs.run(list(cases.values()), count, say)
    handoffs = requests * tokens * workload.LAYERS[name]
    added = [
        requests * tokens * (1 / traced - 1 / untraced)
        for traced, untraced in zip(
            cases["every layer"].comparisons["rate"].ours, cases["untraced"].comparisons["rate"].ours, strict=True
        )
    ]
    return {
        "comparisons": [case.comparisons["rate"] for case in cases.values()],
        "handoff_us": {"samples": [1e6 * each / handoffs for each in added], "median": 1e6 * median(added) / handoffs},
    }


def _cases(name: str, llm: Any, model: Any, requests: int, tokens: int) -> dict[str, Case]:
    from vllm import SamplingParams

    prompts, sampling, layers = workload.prompts(requests), workload.sampling(tokens), workload.LAYERS[name]

    def plain() -> dict[str, float]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(**sampling), use_tqdm=False)
        return rate(outputs, time.perf_counter() - start)

    def untraced() -> dict[str, float]:
        start = time.perf_counter()
        outputs = model.generate(prompts, **sampling)
        return rate(outputs, time.perf_counter() - start)

    def traced(block: Traced, visits: int) -> pairs.Run:
        def run() -> dict[str, float]:
            start = time.perf_counter()
            outputs, rows = block(model, prompts, sampling, layers // 2)
            seconds = time.perf_counter() - start
            workload.check_rows(rows, outputs, visits)
            return rate(outputs, seconds)

        return run

    def rate(outputs: list[Any], seconds: float) -> dict[str, float]:
        workload.check(outputs, requests, tokens)
        return {"rate": sum(len(output.outputs[0].token_ids) for output in outputs) / seconds}

    runs = {
        "untraced": untraced,
        "prefill": traced(prefill, 1),
        "one layer": traced(one_layer, tokens),
        "every layer": traced(every_layer, tokens * layers),
    }
    return {
        key: Case(plain, ours, {"rate": Comparison(LABELS[key], "tokens/s", TARGETS[name][key])})
        for key, ours in runs.items()
    }
