"""Every line of the contract that this release keeps is named by a test that proves it."""

import re
from pathlib import Path

KEPT = {
    *(f"A{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14)),
    *(f"B{n}" for n in (1, 2, 3, 4)),
    *(f"C{n}" for n in range(1, 9)),
    *(f"D{n}" for n in range(1, 7)),
    *(f"F{n}" for n in range(1, 6)),
}
CASES = {*range(1, 15), 16, *range(18, 29), *range(30, 41)}


def sources() -> str:
    """The text of all tests but this one."""
    here = Path(__file__)
    return "\n".join(file.read_text() for file in here.parent.rglob("test_*.py") if file != here)


def test_every_line_is_named_by_a_test() -> None:
    named = {
        line
        for comment in re.findall(r"# contract:([A-F0-9, ]+)", sources())
        for line in re.findall(r"[A-F]\d+", comment)
    }
    assert not KEPT - named, f"no test names {sorted(KEPT - named)}"


def test_every_case_is_a_test() -> None:
    named = {int(number) for number in re.findall(r"def test_(?:\w+_)?case_(\d+)_", sources())}
    assert not CASES - named, f"no test is named after {sorted(CASES - named)}"
