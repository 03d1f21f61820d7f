"""The gears on a GPU, at the shape of Llama-3.1-8B.

    python -m benchmarks.gpu [--pairs 5] [--only untraced ...] [--out FOLDER]

The weights are random: they cost nothing to load, and take the time of real ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import gears, pairs
from endoscope import VLLM

PROMPT, TOKENS, LAYERS, HIDDEN = 128, 128, 32, 4096

TARGETS: dict[int, dict[str, float | None]] = {
    32: {
        gears.UNTRACED: 0.99, gears.PREFILL: 0.95, gears.LOGITS: 0.95, gears.STEERED: 0.95, gears.LOOPED: 0.40,
        gears.EAGER: 0.90, gears.BESIDE: None, gears.CACHED: 0.93,
    },
    1: {
        gears.UNTRACED: 0.99, gears.PREFILL: 0.95, gears.LOGITS: 0.97, gears.STEERED: 0.98, gears.LOOPED: 0.93,
        gears.EAGER: 0.90, gears.CACHED: 0.93,
    },
}  # fmt: skip
"""By the number of requests at once."""


def make_model(folder: Path) -> str:
    """Write the configuration of the model, and the smallest tokenizer that loads."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
        "intermediate_size": 14336, "num_hidden_layers": LAYERS, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "max_position_embeddings": 8192, "hidden_act": "silu",
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    vocabulary = {"type": "WordLevel", "vocab": {"<end>": 0, "a": 1}, "unk_token": "<end>"}
    tokenizer = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
                 "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
                 "model": vocabulary}  # fmt: skip
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<end>"}
    for name, content in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", named)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_model_len": 2048,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.25,  # three engines share the card
    "kv_cache_memory_bytes": 6 << 30,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}


def measure(path: str, count: int, only: list[str], say: Callable[[str], object]) -> dict[str, Any]:
    """Run all cases, each with 32 requests and with one.

    Args:
        path: the model.
        count: pairs of each case.
        only: names of the cases; all if it is empty.
        say: told what is being done, and each result as soon as it is there.
    """
    import torch
    from vllm import LLM

    start: dict[str, float] = {}

    def timed(name: str, build: Callable[[], Any]) -> Any:
        say(f"starting {name}")
        before = time.perf_counter()
        engine = build()
        start[name] = time.perf_counter() - before
        return engine

    model = timed("endoscope", lambda: VLLM(path, save_limit=8 << 30, **ENGINE).start())
    plain = timed("vLLM", lambda: LLM(path, **ENGINE))
    eager = timed("vLLM, eager", lambda: LLM(path, enforce_eager=True, **ENGINE))
    push = torch.full((HIDDEN,), 1e-3, dtype=torch.bfloat16, device="cpu")
    chance = random.Random(0)
    prompts = [[chance.randrange(3, 128000) for _ in range(PROMPT)] for _ in range(32)]
    sampling = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    found = []
    for requests, targets in TARGETS.items():
        chosen = {name: target for name, target in targets.items() if not only or name in only}
        label = "{}, " + ("32 requests" if requests == 32 else "one stream")
        for case in gears.cases(plain, eager, model, prompts[:requests], sampling, LAYERS // 2, push, chosen, label):
            # One case after the other, each with a warm-up of its own: what is measured by then is not lost.
            pairs.run([case], count, lambda _: None)
            found.append(case.comparisons["rate"].to_json())
            say(_row(found[-1]))
    steps = model.debug()["gears"]
    model.close()
    return {"start_s": start, "gears": steps, "comparisons": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], choices=list(gears.BLOCKS))
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    # What has looked at the GPU in this process cannot be forked into an engine's.
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    import torch
    import vllm

    with TemporaryDirectory() as folder:
        found = measure(make_model(Path(folder)), given.pairs, given.only, lambda text: print(text, flush=True))
    found.update(card=torch.cuda.get_device_name(), vllm=vllm.__version__, torch=torch.__version__, pairs=given.pairs)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps(found, indent=1))
    print(f"| {found['card']}, vLLM {found['vllm']}, torch {found['torch']} | ratio | lowest | highest | target |")
    for one in found["comparisons"]:
        print(_row(one))
    print(json.dumps({"start_s": found["start_s"], "gears": found["gears"]}))


def _row(one: dict[str, Any]) -> str:
    return (
        f"| {one['name']} | {one['ratio']:.3f} | {min(one['ratios']):.3f} | {max(one['ratios']):.3f} "
        f"| {one['target'] or ''} | {median(one['plain']):.0f} and {median(one['ours']):.0f} tokens/s"
    )


if __name__ == "__main__":
    main()
