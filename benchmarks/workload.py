"""What every benchmark runs: the models, the prompts and the sampling, the same for both sides of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parent.parent / ".models"

NAMES = ("smollm2", "tiny-llama")
LAYERS = {"smollm2": 30, "tiny-llama": 4}

KV_BLOCK = 128
"""Tokens in a block of vLLM's KV cache on the CPU. Prompts stay below it, so that none is served from the cache."""

_OPENINGS = (
    "The capital of {} is",
    "A traveller who comes to {} for the first time should know that",
    "In the year 1900 the people of {}",
    "Write a short poem about the rivers of {}.",
    "The best known dish of {} is made with rice, vegetables and",
    "Question: which language do most people in {} speak at home, at school and at work? Answer:",
    "The weather in {} today is mild in the north, with some rain along the coast, while in the south it is",
    "{} is",
)
_PLACES = ("France", "Japan", "Peru", "Kenya", "Norway", "Vietnam", "New Zealand", "Portugal")


def prompts(count: int) -> list[str]:
    """Return the first of 64 different prompts, of about 3 to 30 tokens, in a mixed order."""
    every = [_OPENINGS[(i + j) % 8].format(_PLACES[j]) for i in range(8) for j in range(8)]
    if count > len(every):
        raise SystemExit(f"there are {len(every)} prompts, not {count}")
    return every[:count]


def sampling(tokens: int) -> dict[str, Any]:
    """Return the sampling arguments: exactly so many tokens, the likeliest each time."""
    return {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}


def path(name: str) -> str:
    """Return the directory of a model.

    Raises:
        SystemExit: it has not been made.
    """
    directory = MODELS / name
    if not (directory / "config.json").is_file():
        raise SystemExit(f"{directory} holds no model: run `make models`")
    return str(directory)


def options(name: str) -> dict[str, Any]:
    """Return the engine arguments; both sides get these and no other. The model's own dtype is used.

    The KV cache holds all requests of a benchmark at once, also in float32, so that none is preempted.
    """
    space = 1 << 29 if name == "smollm2" else 1 << 26
    return {"enforce_eager": True, "kv_cache_memory_bytes": space, "max_model_len": 512}


def check_tokens(outputs: list[Any], count: int, tokens: int) -> None:
    """Refuse to count a run that did less than it should have.

    Raises:
        RuntimeError: a request is missing, or has another number of tokens.
    """
    if len(outputs) != count:
        raise RuntimeError(f"{len(outputs)} of {count} requests finished")
    for output in outputs:
        made = len(output.outputs[0].token_ids)
        if made != tokens:
            raise RuntimeError(f"request {output.request_id} made {made} tokens, not {tokens}")


def check(outputs: list[Any], count: int, tokens: int) -> None:
    """Refuse to count a run that did less than it should have, or that the prefix cache could help.

    Raises:
        RuntimeError: as for :func:`check_tokens`, or for a prompt that the cache could serve.
    """
    check_tokens(outputs, count, tokens)
    for output in outputs:
        if len(output.prompt_token_ids) >= KV_BLOCK:
            raise RuntimeError(f"request {output.request_id} has a prompt of {len(output.prompt_token_ids)} tokens")


def check_rows(rows: list[Any], outputs: list[Any], visits: int) -> None:
    """Refuse to count a run whose blocks did not bring home what they saved.

    Args:
        rows: for each request, the rows of each visit: all of its prompt's first, then one for each token.
        outputs: the finished outputs, in the same order.
        visits: how many tensors each request saved.
    """
    if len(rows) != len(outputs):
        raise RuntimeError(f"the rows of {len(rows)} of {len(outputs)} requests came home")
    for mine, output in zip(rows, outputs, strict=True):
        if len(mine) != visits:
            raise RuntimeError(f"request {output.request_id} saved {len(mine)} tensors, not {visits}")
        shapes = {mine[0].shape[0], mine[-1].shape[0]}
        if shapes != {len(output.prompt_token_ids), 1 if visits > 1 else len(output.prompt_token_ids)}:
            raise RuntimeError(f"request {output.request_id} saved tensors of {sorted(shapes)} rows")
