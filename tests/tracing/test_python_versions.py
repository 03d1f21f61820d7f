"""The room's own tests on the other CPython versions, where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [
    "cloudpickle>=3.1", "msgspec>=0.19", "pytest>=9", "numpy", "hypothesis", "coverage", "pexpect", "ipython>=9",
    "ipykernel", "nbclient",
]  # fmt: skip
INSIDE = "ENDOSCOPE_OTHER_PYTHON"


def interpreter(version: str) -> str | None:
    """Return a CPython of that version: on PATH, or among pyenv's."""
    found = [shutil.which(f"python{version}")]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found += [str(path) for path in sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)]
    for path in filter(None, found):
        asked = subprocess.run([path, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], capture_output=True)
        if asked.stdout.decode().strip() == version:  # a shim of pyenv may be there without its Python
            return path
    return None


def environment(version: str) -> str:
    """Return the Python of a virtual environment with what the tests need; make it if it is not there."""
    folder = ROOT / f".venv-{version}"
    python, done = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(PACKAGES)
    if done.is_file() and done.read_text() == wanted and python.exists():
        return str(python)
    base = interpreter(version)
    if base is None:
        pytest.skip(f"no CPython {version} on PATH nor among pyenv's versions")
    subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    (folder / ".gitignore").write_text("*\n")
    made = subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"the packages for CPython {version} cannot be had: {made.stderr[-300:]}")
    done.write_text(wanted)
    return str(python)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_this_room_on_cpython(version: str, tmp_path: Path) -> None:
    if INSIDE in os.environ:
        pytest.skip("already inside of such a run")
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        pytest.skip("this is the version that runs the tests")
    ini = tmp_path / "pytest.ini"
    ini.write_text("[pytest]\naddopts = -q -ra -p no:cacheprovider\nfilterwarnings = error\n")
    done = subprocess.run(
        [environment(version), "-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), str(Path(__file__).parent)],
        env={**os.environ, INSIDE: "1", "PYTHONPATH": str(ROOT / "src")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
