"""What a block may take: the time between two handoffs, and the bytes that it keeps."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from endoscope.errors import EngineArgumentError, SaveLimitError

if TYPE_CHECKING:
    from endoscope.probing.saves import Kept


STEP_TIMEOUT, SAVE_LIMIT = "ENDOSCOPE_STEP_TIMEOUT", "ENDOSCOPE_SAVE_LIMIT"
"""Environment variables that an engine's process takes its limits from."""


@dataclass
class Limits:
    """The limits of every block of an engine.

    Attributes:
        step_timeout: seconds that a block may take from one handoff to the next.
        save_limit: bytes that a block may keep to be sent home, and may emit at once.
    """

    step_timeout: float = 30.0
    save_limit: int = 2 << 30

    @classmethod
    def given(cls, step_timeout: Any = None, save_limit: Any = None) -> Limits:
        """Limits from the values that are given, else from the environment, else the defaults.

        Raises:
            EngineArgumentError: for a value that is not a positive number.
        """
        return cls(
            _number("step_timeout", step_timeout, STEP_TIMEOUT, cls.step_timeout),
            int(_number("save_limit", save_limit, SAVE_LIMIT, cls.save_limit)),
        )

    @contextmanager
    def in_environment(self) -> Iterator[None]:
        """Processes that are started meanwhile have these limits."""
        before = {name: os.environ.get(name) for name in (STEP_TIMEOUT, SAVE_LIMIT)}
        os.environ.update({STEP_TIMEOUT: repr(self.step_timeout), SAVE_LIMIT: repr(self.save_limit)})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _number(name: str, value: Any, variable: str, default: float) -> float:
    if value is None:
        name, value = variable, os.environ.get(variable)
    try:
        number = default if value is None else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise EngineArgumentError(f"{name} takes a positive number, not {value!r}")
    return number


class CountedApart:
    """A container whose bytes are counted by what fills it."""


class Held:
    """Counts the bytes that a block keeps, at the cost of what has come since the last count."""

    __slots__ = ("_containers", "_ids", "_saved", "total")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is kept."""
        self.total = 0
        self._saved = 0
        self._ids: set[int] = set()
        self._containers: list[tuple[Any, int]] = []

    def grown(self, kept: list[Kept], limit: int) -> bool:
        """Whether more than the limit is kept by now; ``total`` is then the exact number of bytes."""
        self._count(kept, exact=False)
        if self.total <= limit:
            return False
        # The block may have let go of something since it was counted, or keep a tensor twice.
        self.clear()
        self._count(kept, exact=True)
        return self.total > limit

    def _count(self, kept: list[Kept], exact: bool) -> None:
        for each in islice(kept, self._saved, None):
            self._add(each.value, exact)
        self._saved = len(kept)
        containers = self._containers
        # What is found in a container joins the list, and is looked into in its turn.
        for index, (container, known) in enumerate(containers):
            count = len(container)
            if count > known:
                values = container.values() if isinstance(container, dict) else container
                new = list(islice(values, known, None))
                if not exact and set(map(type, new)) == _TENSORS:
                    self.total += sum(map(_nbytes, new))
                else:
                    for value in new:
                        self._add(value, exact)
                containers[index] = container, count

    def _add(self, value: Any, exact: bool) -> None:
        if isinstance(value, torch.Tensor):
            if exact:
                if id(value) in self._ids:
                    return
                self._ids.add(id(value))
            self.total += value.nbytes
        elif isinstance(value, (list, tuple, dict)):
            if not isinstance(value, CountedApart) and id(value) not in self._ids:
                self._ids.add(id(value))
                self._containers.append((value, 0))
        elif isinstance(value, (str, bytes, bytearray)):
            self.total += len(value)
        elif type(value).__module__ == "numpy":
            self.total += int(value.nbytes)


_TENSORS = {torch.Tensor}

_nbytes = operator.attrgetter("nbytes")


def too_much(total: int, limit: int) -> SaveLimitError:
    """The error of a block that keeps more than it may."""
    return SaveLimitError(
        f"the block keeps {_megabytes(total)} to be sent home, and the limit is {_megabytes(limit)} "
        f"(save_limit={limit}). Keep fewer rows or layers, reduce them in the block, send them home as they are made "
        f"with tracer.emit(), or build the model with a larger save_limit"
    )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count:,} bytes"
