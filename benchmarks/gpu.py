"""On a GPU, at the shape of Llama-3.1-8B: each gear against vLLM's default engine, and the eager one against its eager.

    python -m benchmarks.gpu [--pairs 5] [--out FOLDER]

The weights are random: they cost nothing to load, and take the time of real ones.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import pairs
from benchmarks.pairs import Case, Comparison
from endoscope import VLLM, save

PROMPT, TOKENS, LAYERS, HIDDEN = 128, 128, 32, 4096
MANY, ONE = "32 requests", "one stream"
TARGETS: dict[str, tuple[float | None, float | None]] = {
    "untraced": (0.99, 0.99),
    "one layer saved at prefill": (0.95, 0.95),
    "logits read at every step": (0.95, 0.97),
    "one layer steered at every step": (0.95, 0.98),
    "every layer kept by a cache": (0.93, 0.93),
    "every layer kept by a loop": (0.40, 0.93),
    "eager gear, to vLLM's eager engine": (0.90, 0.90),
    "31 untraced beside one in the eager gear": (None, None),
}

Block = Callable[[Any, list[Any], dict[str, Any], Any], Any]


def prefill(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Save a layer's rows of the prompts."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = model.model.layers[16].resid_post.save()
    return tracer.result


def logits(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Look at the logits of every step, and keep the last ones."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    last = model.logits
                save(last)
    return tracer.result


def steered(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Add a vector to a layer's output in every step."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                vector = push.cuda()
                for _ in tracer.iter[:]:
                    model.model.layers[16].output[0][:] += vector
    return tracer.result


def cached(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Keep every layer's output of every generated token."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                tracer.next()
                kept = tracer.cache()
    return tracer.result


def looped(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Do the same in a loop, for the first tensor of each output; nothing comes home."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                rows = []
                for step in tracer.iter[:]:
                    for layer in model.model.layers:
                        rows.append(layer.output[0])
    return tracer.result


def inside(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Look at an MLP, which is no tap, in every step."""
    with model.trace(**sampling) as tracer:
        for prompt in prompts:
            with tracer.invoke(prompt):
                for _ in tracer.iter[:]:
                    last = model.model.layers[16].mlp.output
                save(last)
    return tracer.result


def beside(model: Any, prompts: list[Any], sampling: dict[str, Any], push: Any) -> Any:
    """Do so in the first request only, beside others that are not traced."""
    with model.trace(**sampling) as tracer:
        with tracer.invoke(prompts[0]):
            for _ in tracer.iter[:]:
                last = model.model.layers[16].mlp.output
            save(last)
        for prompt in prompts[1:]:
            with tracer.invoke(prompt):
                pass
    return tracer.result


BLOCKS: dict[str, Block | None] = dict(
    zip(TARGETS, (None, prefill, logits, steered, cached, looped, inside, beside), strict=True)
)


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
        say: told what is being done.
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
    with model.trace([1, 2, 3], max_tokens=1):  # a first pass learns the order of the modules
        first = model.model.norm.output[0].save()
    cases: list[Case] = []
    for requests, column in ((32, 0), (1, 1)):
        for name, block in BLOCKS.items():
            if (only and name not in only) or (name.startswith("31") and requests == 1):
                continue
            other = eager if name.startswith("eager") else plain
            label = f"{name} ({(MANY, ONE)[column]})"
            comparison = Comparison(label, "tokens/s", TARGETS[name][column])
            cases.append(Case(_plain(other, requests), _ours(model, block, requests, push), {"rate": comparison}))
    pairs.run(cases, count, say)
    gears = model.debug()["gears"]
    model.close()
    return {"start_s": start, "gears": gears, "comparisons": [case.comparisons["rate"].to_json() for case in cases]}


def _prompts(requests: int) -> list[list[int]]:
    chance = random.Random(0)
    return [[chance.randrange(3, 128000) for _ in range(PROMPT)] for _ in range(requests)]


def _sampling() -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}


def _rate(outputs: Any, seconds: float, requests: int) -> dict[str, float]:
    outputs = outputs if isinstance(outputs, list) else [outputs]
    assert len(outputs) == requests
    assert all(len(output.outputs[0].token_ids) == TOKENS for output in outputs)
    return {"rate": requests * TOKENS / seconds}


def _plain(llm: Any, requests: int) -> Callable[[], dict[str, float]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in _prompts(requests)]

    def run() -> dict[str, float]:
        start = time.perf_counter()
        outputs = llm.generate(prompts, SamplingParams(**_sampling()), use_tqdm=False)
        return _rate(outputs, time.perf_counter() - start, requests)

    return run


def _ours(model: Any, block: Block | None, requests: int, push: Any) -> Callable[[], dict[str, float]]:
    prompts = _prompts(requests)

    def run() -> dict[str, float]:
        start = time.perf_counter()
        traced = None if block is None else block(model, prompts, _sampling(), push)
        outputs = model.generate(prompts, **_sampling()) if traced is None else traced
        return _rate(outputs, time.perf_counter() - start, requests)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=[], choices=list(TARGETS))
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    import torch
    import vllm

    with TemporaryDirectory() as folder:
        found = measure(make_model(Path(folder)), given.pairs, given.only, lambda text: print(text, flush=True))
    found.update(card=torch.cuda.get_device_name(), vllm=vllm.__version__, torch=torch.__version__, pairs=given.pairs)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu.json").write_text(json.dumps(found, indent=1))
    print(f"| {found['card']}, vLLM {found['vllm']}, torch {found['torch']} | ratio | lowest | highest | target |")
    for one in found["comparisons"]:
        print(
            f"| {one['name']} | {one['ratio']:.3f} | {min(one['ratios']):.3f} | {max(one['ratios']):.3f} "
            f"| {one['target'] or ''} | {median(one['plain']):.0f} and {median(one['ours']):.0f} tokens/s"
        )
    print(json.dumps({"start_s": found["start_s"], "gears": found["gears"]}))


if __name__ == "__main__":
    main()
