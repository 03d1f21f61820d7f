"""Paired runs: plain vLLM and endoscope in turns, and the median of the ratios of neighbours.

A machine that others use as well is now fast and now slow. Two runs next to each other see the same machine, so their
ratio says something where neither time does; which of the two comes first changes from pair to pair. A run begins when
the engines are idle, so that neither pays for what the other left behind.
"""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.engines import rest, rest_async

Run = Callable[[], dict[str, float]]
AsyncRun = Callable[[], Awaitable[dict[str, float]]]


@dataclass
class Comparison:
    """What the pairs of one benchmark measured.

    Attributes:
        name: what was run.
        unit: of the samples.
        target: what the ratio should reach, or stay below where ``rate`` is false; ``None`` where it only informs.
        rate: whether more is better: the ratio is then ours to plain of a rate, otherwise of a time.
        plain, ours: the samples, pair by pair.
    """

    name: str
    unit: str
    target: float | None
    rate: bool = True
    plain: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """Ours to plain, pair by pair."""
        return [ours / plain for plain, ours in zip(self.plain, self.ours, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return median(self.ratios)

    @property
    def reached(self) -> bool | None:
        """Whether the ratio reaches the target; ``None`` without one."""
        if self.target is None:
            return None
        return self.ratio >= self.target if self.rate else self.ratio <= self.target

    def to_json(self) -> dict[str, Any]:
        """Return samples, medians, ratios and target."""
        return {
            **asdict(self),
            "ratios": self.ratios,
            "median_plain": median(self.plain),
            "median_ours": median(self.ours),
            "ratio": self.ratio,
            "reached": self.reached,
        }


@dataclass
class Case:
    """One benchmark: a run of each side, and which of the numbers that a run returns are compared.

    A run times itself and returns its numbers by name; what it does before and after (checking what came back) is not
    in them.
    """

    plain: Any
    ours: Any
    comparisons: dict[str, Comparison]

    def add(self, plain: dict[str, float], ours: dict[str, float]) -> None:
        """Take in a pair."""
        for number, comparison in self.comparisons.items():
            comparison.plain.append(plain[number])
            comparison.ours.append(ours[number])


def run(cases: list[Case], count: int, say: Callable[[str], object]) -> None:
    """Run every case once to warm up and then ``count`` times, in rounds over the cases."""
    for number in range(-1, count):
        say(_progress(number, count))
        for index, case in enumerate(cases):
            first, second = _order(case, number + index)
            one = _apart(first)
            two = _apart(second)
            if number >= 0:
                case.add(*(one, two) if first is case.plain else (two, one))


async def run_async(cases: list[Case], count: int, say: Callable[[str], object]) -> None:
    """Do what :func:`run` does, for runs that are coroutine functions."""
    for number in range(-1, count):
        say(_progress(number, count))
        for index, case in enumerate(cases):
            first, second = _order(case, number + index)
            one = await _apart_async(first)
            two = await _apart_async(second)
            if number >= 0:
                case.add(*(one, two) if first is case.plain else (two, one))


def _apart(one: Run) -> dict[str, float]:
    gc.collect()
    rest()
    return one()


async def _apart_async(one: AsyncRun) -> dict[str, float]:
    gc.collect()
    await rest_async()
    return await one()


def _order(case: Case, number: int) -> tuple[Any, Any]:
    return (case.plain, case.ours) if number % 2 == 0 else (case.ours, case.plain)


def _progress(number: int, count: int) -> str:
    return "warming up" if number < 0 else f"pair {number + 1} of {count}"
