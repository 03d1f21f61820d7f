"""The oracle: the same checkpoint in transformers, in float32, with plain PyTorch hooks. Nothing of endoscope is in it.

Generation goes on greedily over a cache of keys and values, as in any engine: the first step runs all rows of the
prompt, every later one runs one row. Reads and edits name a place by ``(part, layer)``:

``resid_pre``, ``resid_post``
    the residual stream before and after a decoder layer;
``resid_mid``
    the stream between a layer's attention and its MLP;
``norm``
    the output of a layer's first norm;
``attention``, ``mlp``
    what a layer's attention and MLP add to the stream;
``mlp_input``, ``attention_input``
    what they are called with;
``final_norm``
    the output of the norm behind the last layer; its layer is ``None``;
``logits``
    those of the next token, ``[1, vocabulary]``; their layer is ``None``;
``all_logits``
    those behind every row of the step, ``[rows, vocabulary]``; to be read only, and their layer is ``None``;
``pattern``
    a layer's attention, ``[heads, rows, tokens so far]``; to be read only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

Place = tuple[str, "int | None"]

TOLERANCE = 1e-4
"""Largest difference of a row, as a part of that row's length.

Both sides compute in float32, in different orders of summation. One rounding is 6e-8 of a value, and some thirty layers
of sums over hundreds of terms make 1e-6 to 1e-5 of it. Bfloat16 anywhere on the way would make 1e-2, and another site,
step or row 1e-1 and more, so neither can hide below this.
"""


@dataclass
class Edit:
    """A change at one place: ``change(rows)`` gives what takes the rows' place, in the steps that are named."""

    part: str
    layer: int | None
    change: Callable[[Tensor], Tensor]
    steps: Iterable[int] | None = None
    """The generated steps in which it is made; ``None`` for every one."""

    def applies(self, step: int) -> bool:
        return self.steps is None or step in self.steps


@dataclass
class Run:
    """What one generation gave: its tokens, and for each place that was read the value of each step."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    values: dict[Place, list[Tensor]] = field(default_factory=dict)

    def __getitem__(self, place: Place) -> list[Tensor]:
        return self.values[place]


class Oracle:
    """One checkpoint, with the weights of a LoRA adapter added to its own if one is given."""

    def __init__(self, path: str, adapter: str | None = None) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self.model.eval()
        if adapter is not None:
            self._add(Path(adapter))
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        gpt2 = self.model.config.model_type == "gpt2"
        self._layers: Any = self.model.transformer.h if gpt2 else self.model.model.layers
        self._final_norm: nn.Module = self.model.transformer.ln_f if gpt2 else self.model.model.norm
        self._norm, self._attention = ("ln_1", "attn") if gpt2 else ("input_layernorm", "self_attn")
        self._second_norm = "ln_2" if gpt2 else "post_attention_layernorm"
        self.depth = len(self._layers)
        self.width: int = self.model.config.hidden_size
        # Runs without an edit are asked for again and again.
        self._runs: dict[Any, Run] = {}

    @torch.no_grad()
    def _add(self, adapter: Path) -> None:
        config = json.loads((adapter / "adapter_config.json").read_text())
        weights = load_file(adapter / "adapter_model.safetensors")
        for name in weights:
            module, part, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
            if part == "lora_A":
                product = weights[name.replace("lora_A", "lora_B")] @ weights[name]
                self.model.get_submodule(module).weight += product * (config["lora_alpha"] / config["r"])

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        return list(self.tokenizer(text)["input_ids"])

    @torch.no_grad()
    def run(
        self,
        prompt: str | Sequence[int],
        steps: int,
        reads: Iterable[Place] = (),
        edits: Sequence[Edit] = (),
        forced: dict[int, int] | None = None,
    ) -> Run:
        """Generate ``steps`` tokens.

        Args:
            prompt: text or tokens.
            steps: how many tokens; the end-of-text token does not end the generation.
            reads: the places to read. A place that is edited as well is read as it is before the edit.
            edits: the changes to make.
            forced: tokens to take in place of the greedy ones, by step.
        """
        ids = self.tokens(prompt) if isinstance(prompt, str) else list(prompt)
        reads, forced = tuple(reads), forced or {}
        key = tuple(ids), steps, reads, tuple(forced.items())
        if not edits and key in self._runs:
            return self._runs[key]
        run = Run(ids, values={place: [] for place in reads})
        step = 0

        def at(place: Place, value: Tensor) -> Tensor:
            """The pass is at a place with the value ``[rows, width]``: read it, then change it."""
            if place in run.values:
                run.values[place].append(value.clone())
            for edit in edits:
                if (edit.part, edit.layer) == place and edit.applies(step):
                    value = edit.change(value.clone())
            return value

        wanted = {*run.values, *((edit.part, edit.layer) for edit in edits)}
        handles = [handle for place in wanted if (handle := self._hook(place, at)) is not None]
        patterns = any(part == "pattern" for part, _ in wanted)
        cache = DynamicCache()
        feed = ids
        try:
            for step in range(steps):
                made = self.model(
                    torch.tensor([feed]), past_key_values=cache, use_cache=True, output_attentions=patterns
                )
                at(("all_logits", None), made.logits[0])
                for layer, pattern in enumerate(made.attentions or ()):
                    at(("pattern", layer), pattern[0])
                logits = at(("logits", None), made.logits[0, -1:])
                token = int(logits.argmax())
                token = forced.get(step, token)
                run.tokens.append(token)
                feed = [token]
        finally:
            for handle in handles:
                handle.remove()
        if not edits:
            self._runs[key] = run
        return run

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def _hook(self, place: Place, at: Callable[[Place, Tensor], Tensor]) -> Any:
        part, index = place
        if part in ("logits", "all_logits", "pattern"):
            return None

        def after(_: Any, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (at(place, output[0][0])[None], *output[1:])
            return at(place, output[0])[None]

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (at(place, args[0][0])[None], *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": at(place, kwargs["hidden_states"][0])[None]}

        if part == "final_norm":
            return self._final_norm.register_forward_hook(after)
        layer = self._layers[index]
        if part in ("resid_post", "mlp", "attention", "norm"):
            names = {"resid_post": "", "mlp": "mlp", "attention": self._attention, "norm": self._norm}
            return layer.get_submodule(names[part]).register_forward_hook(after)
        names = {
            "resid_pre": "",
            "resid_mid": self._second_norm,
            "mlp_input": "mlp",
            "attention_input": self._attention,
        }
        return layer.get_submodule(names[part]).register_forward_pre_hook(before, with_kwargs=True)


def distance(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, as a part of the expected row's length."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} in place of {tuple(expected.shape)}"
    found, expected = found.double().flatten(1), expected.double().flatten(1)
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)).max())


def assert_close(found: Any, expected: Tensor, what: str = "the value") -> None:
    """Fail unless a value of endoscope agrees with the oracle's to float32's rounding, row by row."""
    assert isinstance(found, Tensor), f"{what} is a {type(found).__name__}"
    assert found.dtype == torch.float32
    far = distance(found, expected)
    assert far <= TOLERANCE, f"{what} differs from the oracle's by {far:.2e} of its length"


def assert_steps_close(found: Sequence[Any], expected: Sequence[Tensor], what: str = "the value") -> None:
    """Fail unless there is one value for each step, and each agrees with the oracle's."""
    assert len(found) == len(expected), f"{what}: {len(found)} visits in place of {len(expected)}"
    for step, (mine, its) in enumerate(zip(found, expected, strict=True)):
        assert_close(mine, its, f"{what} in step {step}")
