"""One handoff: a plain chain of modules whose values many blocks read, less the same chain with nobody reading.

There is no engine here, so that nothing but handoffs is in the difference. As in the engine, modules return a pair of
tensors, the pass runs in inference mode, and a block's prints would be relayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

from endoscope.probing import BlockTracer, Handoffs, ModelView, Probe, Span

TARGET = 15.0
"""Microseconds that a handoff may take."""

LAYERS = 32
WIDTH = 576
STEPS = 40
WARM = 4
REQUESTS = (1, 8, 32)

BLOCKS = {
    "every layer": """
rows = []
for _ in tracer.iter[:]:
    for each in model.layers:
        rows.append(each.output[0])
""",
    "one layer": """
rows = []
for _ in tracer.iter[:]:
    rows.append(model.layers[16].output[0])
""",
}


class Layer(nn.Module):
    """Has the signature of vLLM's decoder layers and returns what it is given; its time is as good as nothing."""

    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pair."""
        return hidden_states, residual


class Chain(nn.Module):
    """Layers one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run every layer."""
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return hidden, residual


def measure(count: int, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure a handoff for several numbers of requests in a step.

    Args:
        count: how many pairs of each.
        say: told what is being done.

    Returns:
        For each block and number of requests: ``block``, ``requests``, ``samples`` and ``median`` in microseconds, and
        ``target``. There is none for one layer, whose time is mostly what beginning and ending a step takes.
    """
    results: list[dict[str, Any]] = []
    for block, text in BLOCKS.items():
        per_step = LAYERS if block == "every layer" else 1
        for requests in REQUESTS:
            say(f"{block}, {requests} requests")
            samples = []
            for number in range(-1, count):
                if number % 2 == 0:
                    bare, read = _seconds(None, requests), _seconds(text, requests)
                else:
                    read, bare = _seconds(text, requests), _seconds(None, requests)
                if number >= 0:
                    samples.append(1e6 * (read - bare) / (requests * per_step))
            middle, target = median(samples), TARGET if per_step > 1 else None
            results.append(
                {"block": block, "requests": requests, "samples": samples, "median": middle, "target": target}
            )
    return results


@torch.inference_mode()
def _seconds(block: str | None, requests: int) -> float:
    """The median time of a step, with a probe for each request that runs the block."""
    model = Chain()
    hidden, residual = torch.randn(requests, WIDTH), torch.randn(requests, WIDTH)
    handoffs = Handoffs(model)
    view, tracer = ModelView(handoffs), BlockTracer(handoffs)
    probes: list[tuple[Probe, Span, bool]] = []
    if block is not None:
        code = compile(block, "<block>", "exec")
        for row in range(requests):
            names = {"model": view, "tracer": tracer}
            probe = Probe(code, names, handoffs, str(row), relay=lambda *_: None)
            probes.append((probe, Span(row, row + 1, row), True))
    times = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        if probes:
            handoffs.begin(probes, requests, requests)
        model(hidden, residual)
        if probes:
            handoffs.end()
        times.append(time.perf_counter() - start)
    for probe, _, _ in probes:
        _check(probe, requests, LAYERS if "each" in (block or "") else 1)
        probe.finish()
        probe.clear()
    return median(times[WARM:])


def _check(probe: Probe, requests: int, per_step: int) -> None:
    if probe.error is not None:
        raise probe.error
    rows = probe.namespace["rows"]
    if len(rows) != (WARM + STEPS) * per_step or rows[-1].shape != (1, WIDTH):
        raise RuntimeError(f"a block read {len(rows)} values, not {(WARM + STEPS) * per_step}")
