"""Plain Python against the inside of a language model, while vLLM serves it.

The names below are imported when they are first used, so that ``import endoscope`` costs neither torch nor vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from endoscope.errors import BlockError, EndoscopeError
    from endoscope.probing.saves import save
    from endoscope.tracing.backend import Backend
    from endoscope.vllm.async_backend import AsyncVLLMBackend
    from endoscope.vllm.model import VLLM
    from endoscope.vllm.sync_backend import VLLMBackend

__version__ = "0.1.0"

_HOMES = {
    "AsyncVLLMBackend": "endoscope.vllm.async_backend",
    "Backend": "endoscope.tracing.backend",
    "BlockError": "endoscope.errors",
    "EndoscopeError": "endoscope.errors",
    "VLLM": "endoscope.vllm.model",
    "VLLMBackend": "endoscope.vllm.sync_backend",
    "save": "endoscope.probing.saves",
}

__all__ = ["VLLM", "AsyncVLLMBackend", "Backend", "BlockError", "EndoscopeError", "VLLMBackend", "save"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'endoscope' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
