"""The rooms of the package, and which way they may look."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "endoscope"
ROOMS = ("tracing", "probing", "vllm", "serve")
"""In this order: a room may import from those before it."""

HEAVY = {"tracing": {"torch", "vllm", "greenlet", "zmq"}, "probing": {"vllm", "zmq"}}
"""What a room must not import when it is imported."""

INTERNALS = PACKAGE / "vllm" / "internals.py"


def files(room: str) -> list[Path]:
    """The modules of a room."""
    return sorted((PACKAGE / room).rglob("*.py"))


def imported(file: Path) -> Iterator[tuple[str, bool]]:
    """Every module that a file imports, and whether that happens when the file itself is imported."""
    tree = ast.parse(file.read_text())
    inside = {
        id(node)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or _is_for_types(outer)
        for node in ast.walk(outer)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written in full"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            yield name, id(node) not in inside


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_from_those_before_it(room: str) -> None:
    allowed = {"errors", "__version__", *ROOMS[: ROOMS.index(room) + 1]}
    for file in files(room):
        for name, _ in imported(file):
            parts = name.split(".")
            if parts[0] == "endoscope" and len(parts) > 1:
                assert parts[1] in allowed, f"{file} imports {name}"


@pytest.mark.parametrize("room", sorted(HEAVY))
def test_a_room_is_as_light_as_it_says(room: str) -> None:
    for file in files(room):
        for name, at_once in imported(file):
            if at_once:
                assert name.split(".")[0] not in HEAVY[room], f"{file} imports {name}"


def test_one_file_touches_vllm() -> None:
    touching = {file for file in PACKAGE.rglob("*.py") for name, _ in imported(file) if name.split(".")[0] == "vllm"}
    assert touching == {INTERNALS}
