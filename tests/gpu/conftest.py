"""A tiny random model, its oracle, and one engine on the GPU for all tests. Run with vLLM's V1 runner as well:

VLLM_USE_V2_MODEL_RUNNER=0 python -m pytest tests/gpu
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# What has looked at the GPU in this process cannot be forked into the engine's.
os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

VOCABULARY = 512


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of four layers in float32, whose greedy tokens do not run in circles at once."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.08)
    model.save_pretrained(folder)
    vocabulary = {"type": "WordLevel", "vocab": {f"w{i}": i for i in range(VOCABULARY)}, "unk_token": "w0"}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": vocabulary,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return str(folder)


@pytest.fixture(scope="session")
def its(path: str) -> Any:
    """The oracle."""
    from oracle import Oracle

    return Oracle(path)


@pytest.fixture(scope="session")
def model(path: str) -> Iterator[Any]:
    """The engine, with vLLM's defaults but for its sizes."""
    from endoscope import VLLM

    with VLLM(
        path,
        dtype="float32",
        kv_cache_memory_bytes=1 << 28,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        attention_backend="TRITON_ATTN",  # the default one has no float32
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]},
    ) as made:
        yield made
        counts = made.debug()
        gears = counts.pop("gears")
        assert set(counts.values()) == {0}
        assert all(gears.values())
