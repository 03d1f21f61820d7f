"""What every test shares: the models of `make models`, and engines that start once and serve many tests."""

import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# With its default threads, vLLM on a CPU that others use as well may take a hundred times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

MODELS = Path(__file__).parent.parent / ".models"
# Eager, where a request's numbers are the same bit by bit whatever the blocks beside it ask for. The other gears have
# engines of their own; with this variable, all tests run on compiled ones, and those that compare bits may fail.
EAGER = os.environ.get("ENDOSCOPE_TEST_COMPILED") != "1"
TINY = {"kv_cache_memory_bytes": 1 << 26, "max_model_len": 512, "dtype": "float32", "enforce_eager": EAGER}
SMOLLM2 = {**TINY, "kv_cache_memory_bytes": 1 << 28}


def path_of(name: str) -> str:
    """Directory of one of the models of `make models`."""
    directory = MODELS / name
    if not directory.is_dir():
        pytest.fail(f"{directory} is missing: run `make models`")
    return str(directory)


def options_of(name: str) -> dict[str, Any]:
    """Engine arguments that suit the model on a CPU."""
    return dict(SMOLLM2 if name == "smollm2" else TINY)


@pytest.fixture(scope="session")
def sync_model() -> Iterator[Callable[[str], Any]]:
    """Gives the synchronous model of a name; its engine starts with its first trace and is shared."""
    from endoscope import VLLM

    models: dict[str, VLLM] = {}

    def get(name: str) -> VLLM:
        if name not in models:
            models[name] = VLLM(path_of(name), **options_of(name))
        return models[name]

    yield get
    for model in models.values():
        model.close()


@pytest.fixture(scope="session")
async def async_model() -> AsyncIterator[Callable[[str], Any]]:
    """Gives the asynchronous model of a name; its engine lives in the session's event loop."""
    from endoscope import VLLM

    models: dict[str, VLLM] = {}

    def get(name: str) -> VLLM:
        if name not in models:
            models[name] = VLLM(path_of(name), mode="async", **options_of(name))
        return models[name]

    yield get
    for model in models.values():
        model.close()
