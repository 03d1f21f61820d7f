"""Which handler catches what an instruction raises."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def handlers(code: CodeType) -> dict[int, int]:
    """Return, for each offset that a handler covers, the offset of that handler.

    CPython keeps this in ``co_exceptiontable``: entries of start, length, handler and stack depth, each a number in
    groups of six bits, the higher first; a byte with 0x40 set is followed by another group.
    """
    found: dict[int, int] = {}
    numbers = _numbers(iter(code.co_exceptiontable))
    for start, length, handler, _ in zip(numbers, numbers, numbers, numbers, strict=True):
        for index in range(start, start + length):
            found[index * 2] = handler * 2
    return found


def _numbers(table: Iterator[int]) -> Iterator[int]:
    for byte in table:
        number = byte & 0x3F
        while byte & 0x40:
            byte = next(table)
            number = number << 6 | byte & 0x3F
        yield number
