"""The soak: thousands of traces of every kind on one asynchronous engine, and the memory of its processes meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import psutil  # type: ignore[import-untyped]

from benchmarks import engines, workload
from benchmarks import picture as pictures
from endoscope import BlockError

MODEL = "tiny-llama"
TRACES = 10_000
AT_ONCE = 16
SAMPLES = 100
"""How often the memory is looked at."""

TOKENS = 8
NOTHING_LEFT = {"probes": 0, "requests": 0, "hooks": 0, "bytes": 0}

# How many of a hundred traces are of each kind.
MIX = {
    "read": 30,
    "edit": 20,
    "emit": 10,
    "two sequences": 10,
    "stop": 10,
    "error": 10,
    "abort": 10,
}


class Failed(Exception):
    """Raised by the blocks that are meant to fail."""


async def measure(name: str, traces: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Run traces of all kinds, some at once, and look at the resident memory of each process again and again.

    Args:
        name: the model.
        traces: how many.
        say: told what is being done.

    Returns:
        ``traces`` (how many had been run at each look), ``memory`` (bytes at each look, by process), ``kinds`` (how
        many ran of each) and ``growth`` (bytes that a thousand traces add, by process, over the second half).

    Raises:
        RuntimeError: if a trace gave something else than it should, or the engine still holds something at the end.
    """
    say("starting the engine")
    dice = random.Random(0)
    texts = workload.prompts(64)
    counts = dict.fromkeys(MIX, 0)
    done: list[int] = []
    memory: dict[str, list[int]] = {}
    async with engines.ours_async(name) as model:
        every = max(AT_ONCE, traces // SAMPLES)
        ran = 0
        while True:
            done.append(ran)
            for process, held in _memory().items():
                memory.setdefault(process, []).append(held)
            if ran >= traces:
                break
            target = min(traces, ran + every)
            while ran < target:
                kinds = dice.choices(list(MIX), list(MIX.values()), k=min(AT_ONCE, target - ran))
                runs = [_run(model, kind, dice.choice(texts), dice.randint(1, TOKENS), name) for kind in kinds]
                await asyncio.gather(*runs)
                ran += len(kinds)
                for kind in kinds:
                    counts[kind] += 1
                say(f"{ran} of {traces}")
        left = await model.debug()
        if left != NOTHING_LEFT:
            raise RuntimeError(f"the engine still holds {left}")
    growth = {process: _slope(done, held) for process, held in memory.items()}
    return {"traces": done, "memory": memory, "kinds": counts, "growth": growth}


async def _run(model: Any, kind: str, prompt: str, tokens: int, name: str) -> None:
    """One trace, from its ``with`` to its last output."""
    sampling = {**workload.sampling(tokens), "n": 2 if kind == "two sequences" else 1}
    if kind == "two sequences":
        sampling |= {"temperature": 1.0, "seed": tokens}
    layer = workload.LAYERS[name] // 2
    match kind:
        case "read" | "two sequences" | "abort":
            with model.trace(prompt, **sampling | ({"max_tokens": 100} if kind == "abort" else {})) as tracer:
                rows = [].save()
                for _ in tracer.iter[:]:
                    rows.append(model.model.layers[layer].resid_post)
        case "edit":
            with model.trace(prompt, **sampling) as tracer:
                rows = [].save()
                for step in tracer.iter[:]:
                    model.model.layers[layer].mlp.output[:] *= 0.5
                    model.model.layers[layer].resid_post = model.model.layers[layer].resid_post + 1
                    rows.append(model.logits)
        case "emit":
            with model.trace(prompt, **sampling) as tracer:
                rows = [].save()
                for step in tracer.iter[:]:
                    tracer.emit(row=model.model.layers[layer].resid_post[-1])
                    rows.append(step)
        case "stop":
            with model.trace(prompt, **sampling | {"max_tokens": 100}) as tracer:
                rows = [].save()
                for step in tracer.iter[:]:
                    rows.append(model.logits)
                    if step + 1 == tokens:
                        tracer.stop()
        case "error":
            with model.trace(prompt, **sampling) as tracer:
                rows = [].save()
                for step in tracer.iter[:]:
                    rows.append(model.model.layers[layer].resid_post)
                    if step + 1 == tokens:
                        raise Failed(prompt)
    await _follow(tracer.backend, kind, tokens)


async def _follow(stream: Any, kind: str, tokens: int) -> None:
    if kind == "abort":
        seen = 0
        outputs = aiter(stream)
        async for _ in outputs:
            seen += 1
            if seen == tokens:
                break
        await outputs.aclose()
        return
    try:
        output = await stream
    except Failed as error:
        if kind != "error" or not isinstance(error, BlockError):
            raise
        output = error.output  # type: ignore[attr-defined]
    else:
        if kind == "error":
            raise RuntimeError("the block's error did not come out of its stream")
    sequences = output.saves["rows"] if kind == "two sequences" else [output.saves["rows"]]
    for rows in sequences:
        if len(rows) != tokens:
            raise RuntimeError(f"a trace ({kind}) saved {len(rows)} values, not {tokens}")


def picture(measured: dict[str, Any]) -> str:
    """Draw the memory of each process over the traces, as the text of an SVG file."""
    megabytes = {process: [held / 1e6 for held in curve] for process, curve in measured["memory"].items()}
    return pictures.curves(measured["traces"], megabytes, "traces", "resident memory, MB")


def _memory() -> dict[str, int]:
    """The resident bytes of the client and of the engine's two processes."""
    client = psutil.Process()
    found = {"client": client.memory_info().rss}
    for child in client.children(recursive=True):
        title = " ".join(child.cmdline())
        for part, process in (("EngineCore", "engine core"), ("Worker", "worker")):
            if part in title:
                found[process] = child.memory_info().rss
    return found


def _slope(done: list[int], held: list[int]) -> float:
    """Bytes that a thousand traces add: the line of least squares through the second half."""
    xs, ys = done[len(done) // 2 :], held[len(held) // 2 :]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((a - x) ** 2 for a in xs)
    return 1000 * sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / over if over else 0.0
