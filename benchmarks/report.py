"""What was measured, as tables in a terminal."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich.table import Table

from benchmarks import submit
from benchmarks.pairs import Comparison


def comparisons(title: str, found: list[Comparison]) -> Table:
    """Return a table of paired runs. The ratio is what counts; the two medians only say how large things are."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("endoscope against plain vLLM")
    for heading in ("ratio", "lowest", "highest", "target", "plain", "endoscope"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for one in found:
        sign = "≥" if one.rate else "≤"
        target = "" if one.target is None else f"{sign} {one.target:.2f}"
        table.add_row(
            one.name,
            _judged(f"{one.ratio:.3f}", one.reached),
            f"{min(one.ratios):.3f}",
            f"{max(one.ratios):.3f}",
            target,
            f"{median(one.plain):,.1f}",
            f"{median(one.ours):,.1f}",
            one.unit,
        )
    return table


def handoffs(found: list[dict[str, Any]]) -> Table:
    """Return a table of what a handoff costs outside of an engine."""
    table = Table(title="one handoff, without an engine", title_justify="left", title_style="bold")
    table.add_column("read at every step")
    for heading in ("requests", "µs each", "target"):
        table.add_column(heading, justify="right")
    for one in found:
        value, limit = one["median"], one["target"]
        reached = None if limit is None else value <= limit
        shown = "" if limit is None else f"≤ {limit:.0f}"
        table.add_row(one["block"], str(one["requests"]), _judged(f"{value:.1f}", reached), shown)
    return table


def submitting(title: str, found: dict[str, Any]) -> Table:
    """Return a table of what submitting a trace takes."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("to submit one request, in a loop")
    for heading in ("ms", "target"):
        table.add_column(heading, justify="right")
    value = found["with"]["median"]
    table.add_row(
        "endoscope: the with statement", _judged(f"{value:.3f}", value <= submit.TARGET), f"≤ {submit.TARGET}"
    )
    table.add_row("  the first one", f"{found['first_with']:.3f}", "")
    table.add_row("plain vLLM: add_request", f"{found['add_request']['median']:.3f}", "")
    table.add_row("plain vLLM: tokenizing and checking alone", f"{found['process_inputs']['median']:.3f}", "")
    return table


def memory(title: str, found: dict[str, Any]) -> Table:
    """Return a table of each process's memory at some points of a soak."""
    table = Table(title=title, title_justify="left", title_style="bold")
    last = len(found["traces"]) - 1
    looks = sorted({round(last * part) for part in (0, 0.05, 0.1, 0.25, 0.5, 0.75, 1)})
    table.add_column("behind so many traces")
    for look in looks:
        table.add_column(f"{found['traces'][look]:,}", justify="right")
    table.add_column("of 1000 more, at last", justify="right")
    for process, held in found["memory"].items():
        row = [f"{held[look] / 1e6:,.1f}" for look in looks]
        table.add_row(process, *row, f"{found['growth'][process] / 1e6:+.2f}")
    return table


def _judged(text: str, reached: bool | None) -> str:
    if reached is None:
        return text
    return f"[green]{text}[/green]" if reached else f"[red]{text} missed[/red]"
