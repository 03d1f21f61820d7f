"""Submitting: how long a ``with`` statement of an asynchronous trace takes, and how much of it is vLLM's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import engines, workload

TARGET = 0.5
"""Milliseconds that a ``with`` may take, after the first of a loop."""

TRACES = 200
CHUNK = 50
"""So many are submitted before their outputs are awaited, so that neither side is slowed by a long queue."""


async def measure(name: str, traces: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Time the submission of traces, and of the same requests on plain ``AsyncLLM``.

    Each is timed by itself, in turns of a chunk of ours and a chunk of plain's. Nothing is awaited within a chunk but
    plain's own ``add_request``, which is a coroutine.

    Args:
        name: the model.
        traces: how many are timed.
        say: told what is being done.

    Returns:
        Samples and medians in milliseconds of ``with`` (from before ``model.trace`` to behind the block), of
        ``add_request`` (all that plain vLLM does for a request), and of ``process_inputs`` (of that, the tokenizing
        and checking in the caller's thread, which a trace has to do as well); and ``first_with``, the first ``with``.
    """
    from vllm import SamplingParams

    prompts, sampling = workload.prompts(CHUNK), workload.sampling(1)
    samples: dict[str, list[float]] = {"with": [], "add_request": [], "process_inputs": []}
    first: float | None = None
    say("starting the engines")
    async with engines.plain_async(name) as llm, engines.ours_async(name) as model:
        await model.generate(prompts, **sampling)
        for begin in range(-CHUNK, traces, CHUNK):
            say("warming up" if begin < 0 else f"{begin} of {traces}")
            streams: list[Any] = []
            taken: list[float] = []
            await engines.rest_async()
            for prompt in prompts[: min(CHUNK, traces - begin)]:
                start = time.perf_counter()
                with model.trace(prompt, **sampling) as tracer:
                    logits = model.logits.save()
                taken.append(1e3 * (time.perf_counter() - start))
                streams.append(tracer.backend)
            first = taken[0] if first is None else first
            workload.check([await stream for stream in streams], len(taken), 1)
            if begin >= 0:
                samples["with"] += taken
            await engines.rest_async()
            added = await _add(llm, prompts[: len(taken)], sampling, f"{name}-{begin}")
            if begin >= 0:
                samples["add_request"] += added
            for number, prompt in enumerate(prompts[: len(taken)]):
                start = time.perf_counter()
                _process(llm, f"processed-{begin}-{number}", prompt, SamplingParams(**sampling))
                if begin >= 0:
                    samples["process_inputs"].append(1e3 * (time.perf_counter() - start))
    return {
        "first_with": first,
        **{key: {"samples": values, "median": median(values)} for key, values in samples.items()},
    }


async def _add(llm: Any, prompts: list[str], sampling: dict[str, Any], name: str) -> list[float]:
    from vllm import SamplingParams

    queues, taken = [], []
    for number, prompt in enumerate(prompts):
        start = time.perf_counter()
        queues.append(await llm.add_request(f"{name}-{number}", prompt, SamplingParams(**sampling)))
        taken.append(1e3 * (time.perf_counter() - start))
    outputs = []
    for queue in queues:
        output = await queue.get()
        while not output.finished:
            output = await queue.get()
        outputs.append(output)
    workload.check(outputs, len(prompts), 1)
    return taken


def _process(llm: Any, request: str, prompt: str, params: Any) -> Any:
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    parsed = parse_model_prompt(llm.model_config, {"prompt": prompt})
    (rendered,) = llm.renderer.render_cmpl([parsed], llm.renderer.default_cmpl_tok_params)
    return llm.input_processor.process_inputs(request, rendered, params, supported_tasks=("generate",))
