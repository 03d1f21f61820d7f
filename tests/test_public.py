"""The public names, what importing them costs, and the tree of errors."""

import re
import subprocess
import sys
from importlib import metadata

import pytest

import endoscope
from endoscope import errors
from endoscope.vllm import internals

NAMES = ["VLLM", "AsyncVLLMBackend", "Backend", "BlockError", "EndoscopeError", "VLLMBackend", "save"]


def test_the_exported_names_are_these() -> None:
    assert sorted(endoscope.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(endoscope, name).__name__ == name
    assert set(NAMES) <= set(dir(endoscope))
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = endoscope.nothing_of_the_kind


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, endoscope; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "endoscope" in loaded
    assert not loaded & {"torch", "vllm", "numpy", "zmq", "transformers", "greenlet", "cloudpickle", "asyncio"}


def test_the_backends_are_backends() -> None:  # contract: A13
    assert issubclass(endoscope.AsyncVLLMBackend, endoscope.Backend)
    assert issubclass(endoscope.VLLMBackend, endoscope.Backend)


def test_every_error_stands_in_the_tree_at_the_top_of_its_file() -> None:
    tree = errors.__doc__ or ""
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.EndoscopeError)
    }
    drawn = re.findall(r"(?:── |^)(\w+Error)\b(?: +also (\w+))?", tree, flags=re.MULTILINE)
    drawn += [("EndoscopeError", "")] if "    EndoscopeError" in tree else []
    assert {name for name, _ in drawn} == set(classes)
    for name, also in drawn:
        if also:
            assert also in {base.__name__ for base in classes[name].__mro__}


def test_a_version_of_vllm_that_is_not_supported_is_refused_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.31.9")
    with pytest.raises(errors.VersionError, match=r"vLLM 0\.32\.x, and vllm 0\.31\.9 is installed"):
        internals.check_version()


def test_a_missing_vllm_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(errors.VersionError, match=r"pip install 'endoscope\[cpu\]'"):
        internals.check_version()
