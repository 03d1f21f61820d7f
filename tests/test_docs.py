"""The examples of the README and the docs, each page run as the script that a reader would type."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import path_of

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAME = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
OPTIONS = 'dtype="float32", max_model_len=512, kv_cache_memory_bytes=1 << 28'


def script_of(page: Path) -> str:
    """The page's Python, in the order in which it is read."""
    return "".join(re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE))


def with_examples() -> list[Path]:
    """The pages that have some."""
    return [page for page in PAGES if script_of(page)]


@pytest.mark.parametrize("page", with_examples(), ids=lambda page: page.stem)
def test_the_examples_of_a_page_run_and_print_what_it_says(page: Path, tmp_path: Path) -> None:
    source = script_of(page)
    expected = re.findall(r"^\s*# prints: ?(.*)$", source, flags=re.MULTILINE)
    script = tmp_path / f"{page.stem}.py"
    assert NAME in source
    # Compiling takes a minute, so only one of the pages is run as it stands.
    options = OPTIONS if page.stem == "README" else f"{OPTIONS}, enforce_eager=True"
    script.write_text(source.replace(NAME, f"{path_of('smollm2')!r}, {options}"))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    printed = iter(done.stdout.splitlines())
    for line in expected:
        assert any(line.strip() == each.strip() for each in printed), (
            f"{line!r} is not printed in order:\n{done.stdout}"
        )


def test_pages_with_examples_are_found() -> None:
    names = {page.stem for page in with_examples()}
    assert names >= {"README", "index", "quickstart", "stream", "sync", "block", "errors"}
