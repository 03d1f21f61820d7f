"""Every gear against vLLM's default engine, and the eager one against vLLM's own eager engine.

What a block does is what decides on the gear of its steps, so there is one block for each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks import engines, pairs, workload
from benchmarks.pairs import Case, Comparison
from endoscope import save

UNTRACED, PREFILL, LOGITS, STEERED = (
    "untraced",
    "one layer saved at prefill",
    "logits read at every step",
    "one layer steered at every step",
)
CACHED, LOOPED = "every layer kept by a cache", "every layer read in a loop"
EAGER, BESIDE = "eager gear, to vLLM's eager engine", "all, with one of them in the eager gear"

TARGETS = {
    UNTRACED: 0.97,
    PREFILL: 0.93,
    LOGITS: 0.93,
    STEERED: 0.88,
    CACHED: 0.80,
    LOOPED: 0.70,
    EAGER: 0.95,
    BESIDE: None,
}
"""On the CPU, with compiled code."""

REQUESTS = 32

Block = Callable[[Any, list[Any], dict[str, Any], int, Any], Any]


def prefill(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Save a layer's rows of the prompts."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = model.model.layers[middle].resid_post.save()
    return tracer.result


def logits(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Look at the logits of every step, and keep the last ones."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    last = model.logits
                save(last)
    return tracer.result


def steered(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Add a vector to a layer's output in every step."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                vector = push.to(model.lm_head.weight.device)
                for _ in tracer.iter[:]:
                    model.model.layers[middle].output[0][:] += vector
    return tracer.result


def cached(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Keep every layer's output of every generated token."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                tracer.next()
                kept = tracer.cache()
    return tracer.result


def looped(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Do the same in a loop, for the first tensor of each output; nothing comes home."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = []
                for step in tracer.iter[:]:
                    for layer in model.model.layers:
                        rows.append(layer.output[0])
    return tracer.result


def inside(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Look at an MLP, which is no tap, in every step."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    last = model.model.layers[middle].mlp.output
                save(last)
    return tracer.result


def beside(model: Any, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any) -> Any:
    """Do so in the first request only, beside others that are not traced."""
    with model.trace(**sampling) as tracer:
        with tracer.invoke(prompts[0]):
            for _ in tracer.iter[:]:
                last = model.model.layers[middle].mlp.output
            save(last)
        for prompt in prompts[1:]:
            with tracer.invoke(prompt):
                pass
    return tracer.result


BLOCKS: dict[str, Block | None] = {
    UNTRACED: None,
    PREFILL: prefill,
    LOGITS: logits,
    STEERED: steered,
    CACHED: cached,
    LOOPED: looped,
    EAGER: inside,
    BESIDE: beside,
}


def cases(
    plain: Any,
    eager: Any,
    model: Any,
    prompts: list[Any],
    sampling: dict[str, Any],
    middle: int,
    push: Any,
    targets: dict[str, float | None],
    label: str = "{}",
) -> Iterator[Case]:
    """One case for each of the targets.

    Args:
        plain, eager: plain vLLM, as it is by default and with ``enforce_eager``.
        model: ours.
        prompts: of a run; texts or lists of tokens.
        sampling: exactly so many tokens, and no end before.
        middle: the layer that is looked at.
        push: what is added to its output, ``[hidden]``.
        targets: what the ratios should reach, by the names of this module.
        label: how a case is named.
    """
    for name, target in targets.items():
        comparison = Comparison(label.format(name), "tokens/s", target)
        ours = _ours(model, BLOCKS[name], prompts, sampling, middle, push)
        yield Case(_plain(eager if name == EAGER else plain, prompts, sampling), ours, {"rate": comparison})


def _rate(outputs: Any, seconds: float, requests: int, tokens: int) -> dict[str, float]:
    outputs = outputs if isinstance(outputs, list) else [outputs]
    workload.check_tokens(outputs, requests, tokens)
    return {"rate": requests * tokens / seconds}


def _plain(llm: Any, prompts: list[Any], sampling: dict[str, Any]) -> Callable[[], dict[str, float]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    given = [each if isinstance(each, str) else TokensPrompt(prompt_token_ids=each) for each in prompts]

    def run() -> dict[str, float]:
        start = time.perf_counter()
        outputs = llm.generate(given, SamplingParams(**sampling), use_tqdm=False)
        return _rate(outputs, time.perf_counter() - start, len(given), sampling["max_tokens"])

    return run


def _ours(
    model: Any, block: Block | None, prompts: list[Any], sampling: dict[str, Any], middle: int, push: Any
) -> Callable[[], dict[str, float]]:
    def run() -> dict[str, float]:
        start = time.perf_counter()
        traced = None if block is None else block(model, prompts, sampling, middle, push)
        outputs = model.generate(prompts, **sampling) if traced is None else traced
        return _rate(outputs, time.perf_counter() - start, len(prompts), sampling["max_tokens"])

    return run


def measure(name: str, count: int, requests: int, tokens: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Compare the gears on the CPU, compiled.

    Args:
        name: the model.
        count: how many pairs of each.
        requests: prompts of a run.
        tokens: new tokens of each.
        say: told what is being done.

    Returns:
        ``comparisons``.
    """
    import torch

    say("starting the engines")
    with ExitStack() as stack:
        plain = stack.enter_context(engines.plain(name, enforce_eager=False))
        eager = stack.enter_context(engines.plain(name))
        model = stack.enter_context(engines.ours(name, enforce_eager=False))
        layers = workload.LAYERS[name]
        width = model.engine.llm.llm_engine.model_config.get_hidden_size()
        push = torch.full((width,), 1e-3, dtype=torch.bfloat16)
        found = list(
            cases(
                plain, eager, model, workload.prompts(requests), workload.sampling(tokens), layers // 2, push, TARGETS
            )
        )
        pairs.run(found, count, say)
    return {"comparisons": [case.comparisons["rate"] for case in found]}
