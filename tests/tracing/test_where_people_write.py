"""The block's text is found wherever people write: or one clear error says why it cannot be."""

from __future__ import annotations

import doctest
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from tracing_support import HERE, SRC, environment, program, python, trace

from endoscope.errors import NoSourceError

BODY = """
with trace("p") as tracer:
    bound = 40 + 2
print("BOUND", bound)
"""
IMPORT = "from tracing_support import trace\n"


def test_case_31_a_script_and_a_module(tmp_path: Path) -> None:
    path = program(tmp_path, BODY)
    assert python(str(path)) == "BOUND 42\n"
    assert python("-m", "program", cwd=tmp_path) == "BOUND 42\n"
    assert python("-O", str(path)) == "BOUND 42\n"


def test_case_31_python_c() -> None:
    assert python("-c", IMPORT + BODY) == "BOUND 42\n"
    assert python("-uc", IMPORT + BODY) == "BOUND 42\n"
    assert python("-c", IMPORT + "def f():\n  with trace('p'): x = 1\n  return x\nprint(f())") == "1\n"
    assert python("-c" + IMPORT + BODY) == "BOUND 42\n"


def test_case_31_exec_under_python_c_is_not_taken_for_the_command() -> None:
    text = IMPORT + 'exec("with trace(1):\\n  x = 1\\n")\n'
    assert "NoSourceError: <string>:1: the text of this block cannot be had" in python("-c", text)


def test_case_31_a_program_read_from_a_pipe() -> None:
    said = python("-", stdin=IMPORT + BODY)
    assert "NoSourceError" in said
    assert "Write it to a file and run that" in said


def test_case_31_without_column_numbers(tmp_path: Path) -> None:
    path = program(tmp_path, BODY)
    assert python("-X", "no_debug_ranges", str(path)) == "BOUND 42\n"
    path = program(tmp_path, "with trace('p'): x = 1\n", "short.py")
    assert "Run without -X no_debug_ranges" in python("-X", "no_debug_ranges", str(path))


def repl(lines: list[str], *arguments: str, **env: str) -> str:
    """Type the lines into an interactive interpreter on a pseudo-terminal; return what it said."""
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        sys.executable, [*arguments], env=environment(TERM="dumb", **env), encoding="utf-8", timeout=30, echo=False
    )
    try:
        child.expect_exact(">>> ")
        for line in [*lines, "print('E' + 'ND')"]:
            child.sendline(line)
        child.expect_exact("END")
        return re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", child.before)
    finally:
        child.close(force=True)


REPL_LINES = [
    "from tracing_support import trace",
    "base = 40",
    "with trace('p') as tracer:",
    "    bound = base + 2",
    "",
    "print('BOUND', bound)",
    "def f():",
    "    with trace('p'): x = base; y = x + 1",
    "    return x, y",
    "",
    "base = 50",
    "print('CALLED', f())",
]


def test_case_31_repl_on_a_pseudo_terminal(tmp_path: Path) -> None:
    said = repl(REPL_LINES, "-q", PYTHON_BASIC_REPL="1", PYTHON_HISTORY=str(tmp_path / "history"))
    assert "BOUND 42" in said
    assert "CALLED (50, 51)" in said


@pytest.mark.skipif(sys.version_info < (3, 13), reason="the newer interactive interpreter came with CPython 3.13")
def test_case_31_the_newer_repl(tmp_path: Path) -> None:
    pexpect = pytest.importorskip("pexpect")
    child = pexpect.spawn(
        sys.executable,
        ["-q"],
        env=environment(TERM="xterm", PYTHON_HISTORY=str(tmp_path / "history")),
        encoding="utf-8",
        timeout=30,
        dimensions=(40, 200),
    )
    try:
        child.expect_exact(">>> ")
        for line in (REPL_LINES[0], "with trace('p'): bound = 40 + 2", "", "print('BO' + 'UND', bound)"):
            child.send(line + "\r")
        child.expect_exact("BOUND 42")
    finally:
        child.close(force=True)


def test_case_31_repl_of_asyncio(tmp_path: Path) -> None:
    lines = [*REPL_LINES[:2], "await asyncio.sleep(0)", "with trace('p'): bound = base + 2", "", REPL_LINES[5]]
    env = {"PYTHON_BASIC_REPL": "1", "PYTHON_HISTORY": str(tmp_path / "history")}
    assert "BOUND 42" in repl(lines, "-m", "asyncio", **env)


def test_case_31_ipython(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    text = IMPORT + BODY + "import asyncio\nawait asyncio.sleep(0)\n" + BODY.replace("bound", "again")
    said = python(
        "-m", "IPython", "--colors=NoColor", "--no-banner", "--simple-prompt", "--HistoryManager.enabled=False",
        stdin=IMPORT + "with trace('p') as tracer:\n    bound = 40 + 2\n\nprint('BOUND', bound)\n"
        "with trace('p'): one = 1\n\nprint('ONE', one)\n",
        IPYTHONDIR=str(tmp_path),
    )  # fmt: skip
    assert "BOUND 42" in said
    assert "ONE 1" in said
    path = tmp_path / "script.ipy"
    path.write_text(text)
    assert python("-m", "IPython", "--colors=NoColor", str(path), IPYTHONDIR=str(tmp_path)).count("BOUND 42") == 2


def test_case_31_notebook(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [
        f"import sys; sys.path[:0] = [{SRC!r}, {HERE!r}]\nfrom tracing_support import trace\nimport asyncio",
        BODY,
        "await asyncio.sleep(0)\nwith trace('p'):\n    top = bound + 1\nprint('TOP', top)",
        "def f(x):\n    with trace('p') as t: y = x + bound\n    return y\nprint('F', f(1))",
        "async def g(x):\n    with trace('p') as t:\n        y = x + bound\n    return y\nprint('G', await g(2))",
        "for number in range(2):\n    with trace('p'):\n        each = number\n    print('EACH', each)",
        "class Kept:\n    pass\nwith trace('p'):\n    kept = Kept()\nprint('SAME', type(kept) is Kept)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    manager = {"env": {**os.environ, "IPYTHONDIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime")}}
    client = nbclient.NotebookClient(notebook, timeout=60)
    client.create_kernel_manager()
    client.km.kernel_spec.argv[0] = sys.executable
    client.execute(**manager)
    said = "".join(output.get("text", "") for cell in notebook.cells for output in cell.outputs)
    assert said == "BOUND 42\nTOP 43\nF 43\nG 44\nEACH 0\nEACH 1\nSAME True\n"


COVERED = """
def f():
    before = 1
    with trace("p") as tracer:
        bound = before + 1
    after = bound + 1
    with trace("p"): one = 1
    try:
        with trace("p"):
            try:
                bound = 1
            finally:
                pass
    finally:
        last = 5
    return helper(after)

def helper(x):
    y = x
    return y

print("GOT", f())
print("LAST")
"""


@pytest.mark.parametrize("core", ["ctrace", "pytrace", "sysmon"])
def test_case_31_coverage_goes_on_recording(tmp_path: Path, core: str) -> None:
    pytest.importorskip("coverage")
    if core == "sysmon" and sys.version_info < (3, 12):
        pytest.skip("sys.monitoring came with CPython 3.12")
    path = program(tmp_path, COVERED)
    env = {"COVERAGE_CORE": core, "COVERAGE_FILE": str(tmp_path / "data")}
    said = python("-m", "coverage", "run", "--branch", str(path), cwd=tmp_path, **env)
    assert "GOT 3" in said
    report = python("-m", "coverage", "report", "-m", "--include=*/program.py", cwd=tmp_path, **env)
    missing = report.split("program.py")[1].splitlines()[0].split("%")[1]
    lines = path.read_text().split("\n")
    in_blocks = ("bound = before + 1", "try:", "bound = 1", "pass")
    skipped = {number for number, text in enumerate(lines, 1) if text.strip() in in_blocks}
    recorded = {int(n) for n in re.findall(r"(?<![\d>-])(\d+)(?![\d>-])", re.sub(r"\d+->\S+", "", missing))}
    spans = [(int(a), int(b)) for a, b in re.findall(r"(\d+)-(\d+)", re.sub(r"\d+->\S+", "", missing))]
    for first, last in spans:
        recorded |= set(range(first, last + 1))
    # The backend of these tests runs blocks in this process, so their lines may count as run.
    assert recorded <= skipped, report


def test_case_31_pytest_with_rewritten_asserts_and_coverage(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(
        IMPORT
        + textwrap.dedent(
            """
            import pytest

            def test_it():
                x = [1, 2]
                with trace("p"):
                    assert x == [1, 2], "message"
                    y = sum(x)
                assert y == 3

            def test_failing():
                x = 1
                with pytest.raises(AssertionError):
                    with trace("p"):
                        assert x == 2
            """
        )
    )
    said = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", ".", cwd=tmp_path)
    assert "2 passed" in said, said


def test_case_31_pdb(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        def f():
            before = 1
            with trace("p"):
                bound = before + 1
            after = bound + 1
            return after
        f()
        """,
    )
    said = python("-m", "pdb", str(path), stdin="b f\nc\nn\nn\nn\nn\np ('AFTER', after)\nc\nq\n", cwd=tmp_path)
    assert "('AFTER', 3)" in said, said
    assert "-> bound = before + 1" not in said
    assert "-> after = bound + 1" in said or "-> return after" in said
    said = python("-m", "pdb", str(path), stdin="b 7\nc\np ('BOUND', bound)\nc\nq\n", cwd=tmp_path)
    assert "('BOUND', 2)" in said, said


def test_case_31_breakpoint_before_the_trace(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        """
        def f():
            breakpoint()
            with trace("p"): bound = 2
            return bound
        f()
        """,
    )
    said = python(str(path), stdin="n\np ('BOUND', bound)\n" * 3 + "c\n", cwd=tmp_path)
    assert "('BOUND', 2)" in said, said


def documented() -> None:
    """Run a trace in a doctest.

    >>> with trace("p"):
    ...     x = 1 + 1
    >>> x
    2
    >>> def f():
    ...     with trace("p"): y = 5
    ...     return y
    >>> f()
    5
    """


def test_case_31_doctest() -> None:
    runner = doctest.DocTestRunner(verbose=False)
    for test in doctest.DocTestFinder().find(documented, globs={"trace": trace}):
        runner.run(test)
    assert runner.tries == 4
    assert runner.failures == 0


def edited(folder: Path, before: str, after: str) -> Any:
    """Import a function from a file, edit the file, and return the function."""
    path = folder / "edited.py"
    path.write_text(before)
    names: dict[str, Any] = {"trace": trace}
    exec(compile(before, str(path), "exec"), names)
    path.write_text(after)
    os.utime(path, (0, 0))
    return names["f"]


ORIGINAL = "def f(a=1, b=2):\n    with trace('p'):\n        x = a + 10\n    return x\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def f", "\n\ndef f"),
        ("a + 10", "a + 11"),
        ("a + 10", "a - 10"),
        ("a + 10", "b + 10"),
        ("with trace('p')", "if (1, 'p',    )"),
        ("x = a + 10", "x = a + 10; y = 2"),
        ("def f", "def f(:"),
    ],
)
def test_case_31_a_file_that_was_edited(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(NoSourceError, match="has changed since it was imported"):
        edited(tmp_path, ORIGINAL, ORIGINAL.replace(old, new))()


def test_case_31_a_file_edited_elsewhere(tmp_path: Path) -> None:
    assert edited(tmp_path, ORIGINAL, ORIGINAL + "\n\nx = 5\n")() == 11


def test_case_31_a_file_that_is_gone(tmp_path: Path) -> None:
    function = edited(tmp_path, ORIGINAL, ORIGINAL)
    (tmp_path / "edited.py").unlink()
    with pytest.raises(NoSourceError, match="no such file"):
        function()


def test_case_31_a_module_in_a_zip_file(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("inzip.py", IMPORT + BODY)
    said = python("-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'zipped.zip')!r}); import inzip")
    assert said == "BOUND 42\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("def f(trace):\r\n  with trace('p'):\r\n    x = '''a\r\nb'''\r\n  return x == 'a\\nb'\r\n", "utf-8"),
        ("# coding: latin-1\ndef f(trace):\n  é = 2\n  with trace('p'): x = 'é' * é\n  return x == 'éé'\n", "latin-1"),
        ("def f(trace):\n  with trace('p'): x = True\n  return x\n", "utf-8-sig"),
        ("a = 1\n\x0c\ndef f(trace):\n  y = 'a\x0cb'\n  with trace('p'): x = y\n  return x == y\n", "utf-8"),
        ("def f(trace):\n  y = 'a\u2028b'\n  with trace('p'): x = y\n  return x == y\n", "utf-8"),
        (f"def f(trace):\n{' ' * 700}with trace('p'): x = True\n{' ' * 700}return x\n", "utf-8"),
        ("def f(trace):\n with trace('p'):\n" + "  x = 1\n" * 3000 + " return x\n", "utf-8"),
        ("def f(trace):\n  with trace('p') \\\n    as t: \\\n    x = True\n  return x\n", "utf-8"),
    ],
)
def test_odd_files(tmp_path: Path, text: str, encoding: str) -> None:
    path = tmp_path / "odd.py"
    path.write_bytes(text.encode(encoding))
    names: dict[str, Any] = {}
    exec(compile(path.read_bytes(), str(path), "exec"), names)
    assert names["f"](trace)
