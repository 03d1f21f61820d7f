"""What the engine tests share: prompts, names of modules in vLLM's trees, and programs run in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = ("smollm2", "tiny-llama", "tiny-gpt2", "tiny-qwen3")

# Of different lengths, from one token to some forty.
PROMPTS = (
    "The Eiffel Tower is in the city of",
    "Water",
    "One, two, three, four, five, six,",
    "A long time ago, in a village at the foot of the mountains, an old woman told the children a story about a fox "
    "who wanted to see the sea, and every evening they asked her",
)
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
NOTHING_LEFT = {"probes": 0, "requests": 0, "hooks": 0, "bytes": 0}


def layers_of(model: Any) -> Any:
    """The list of decoder layers, by vLLM's path of it."""
    return model.transformer.h if "gpt2" in model._name else model.model.layers


def parts_of(model: Any) -> tuple[str, str]:
    """vLLM's names of a layer's first norm and of its attention."""
    return ("ln_1", "attn") if "gpt2" in model._name else ("input_layernorm", "self_attn")


def final_norm_of(model: Any) -> Any:
    """The norm behind the last layer."""
    return model.transformer.ln_f if "gpt2" in model._name else model.model.norm


def tokens_of(output: Any) -> list[int]:
    """The tokens that a finished output generated."""
    return list(output.outputs[0].token_ids)


def environment(**more: str) -> dict[str, str]:
    """An environment for a child that uses this package: no network, one thread."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(HERE)]),
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        **more,
    }


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with the arguments, up to three minutes."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment(**env),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


def held(counts: dict[str, Any]) -> dict[str, Any]:
    """What an engine holds for traces."""
    return {name: count for name, count in counts.items() if name != "gears"}


def script(folder: Path, text: str, name: str = "script.py") -> str:
    """Write a script to a file; returns its path."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)
