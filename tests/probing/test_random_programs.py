"""Random blocks over random schedules, compared with plain hooks on each request alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from harness import VOCABULARY, Engine, Plain, Request, Where, copied, gpt, llama, plain, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The sites of each model in the order in which a pass comes to them: path, kind, and how many tensors a block may edit.
_LLAMA_LAYER = [
    ("", "inputs", 2),
    ("", "resid_pre", 1),
    (".input_layernorm", "inputs", 2),
    (".input_layernorm", "output", 2),
    (".self_attn", "inputs", 1),
    (".self_attn.qkv_proj", "output", 1),
    (".self_attn.o_proj", "inputs", 1),
    (".self_attn", "output", 1),
    (".post_attention_layernorm", "output", 2),
    (".mlp", "inputs", 1),
    (".mlp.up", "output", 1),
    (".mlp.down", "inputs", 1),
    (".mlp", "output", 1),
    ("", "output", 2),
    ("", "resid_post", 1),
]
_GPT_LAYER = [
    ("", "inputs", 1),
    ("", "resid_pre", 1),
    (".ln_1", "inputs", 1),
    (".ln_1", "output", 1),
    (".attn", "output", 1),
    (".ln_2", "inputs", 1),
    (".mlp", "inputs", 1),
    (".mlp.0", "output", 1),
    (".mlp.1", "inputs", 1),
    (".mlp.2", "output", 1),
    (".mlp", "output", 1),
    ("", "output", 1),
    ("", "resid_post", 1),
]
_ENDS = [("", "logits", 1), ("", "samples", 1)]
SITES = {
    "llama": [
        ("model.embed_tokens", "output", 1),
        *((f"model.layers.{i}{path}", kind, count) for i in range(3) for path, kind, count in _LLAMA_LAYER),
        ("model.norm", "inputs", 2),
        ("model.norm", "output", 2),
        *_ENDS,
    ],
    "gpt": [
        ("transformer.wte", "output", 1),
        ("transformer.wpe", "output", 1),
        *((f"transformer.h.{i}{path}", kind, count) for i in range(3) for path, kind, count in _GPT_LAYER),
        ("transformer.ln_f", "output", 1),
        ("lm_head", "inputs", 1),
        ("lm_head", "output", 1),
        *_ENDS,
    ],
}

# What is done to a tensor ``h``, in place. An assignment gives the model a copy to which the same was done.
CODES = [
    "h.mul_(0.5)",
    "h += 1",
    "h[-1] -= 0.25",
    "h[:, 1:3] = 0.5",
    "h[h > 0.5] = 0.5",
    "h.view(-1)[::3].neg_()",
    "h[0].copy_(h[-1].clone())",
    "h.clamp_(-1, 1)",
    "h.index_put_((torch.tensor([0, 0]), torch.tensor([0, 2])), torch.tensor(1.5, dtype=h.dtype), accumulate=True)",
    "h.t()[1].zero_()",
]


def floats(value: Any, kind: str) -> list[torch.Tensor]:
    """The tensors of a value that a block may edit."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() or kind == "samples" else []
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple):
        return []
    return [tensor for item in value for tensor in floats(item, kind)]


def swapped(value: Any, old: torch.Tensor, new: torch.Tensor) -> Any:
    """The value with one tensor in the place of another."""
    if value is old:
        return new
    if isinstance(value, tuple):
        return tuple(swapped(item, old, new) for item in value)
    if isinstance(value, dict):
        return {key: swapped(item, old, new) for key, item in value.items()}
    return value


@dataclass
class Action:
    """What a block does at one site in one step.

    Attributes:
        site: the number of the site in the order of a pass.
        how: ``read``, ``in place`` or ``assign``.
        tensor: which of the tensors there.
        code: what is done to it.
    """

    site: int
    how: str
    tensor: int
    code: str

    def text(self, name: str) -> list[str]:
        path, kind, count = SITES[name][self.site]
        where = f"model.{kind}" if not path else f"model.get_submodule({path!r}).{kind}"
        owner, _, attribute = where.rpartition(".")
        if self.how == "read":
            return [f"held.append({where})"]
        lines = [f"site = {owner}", f"value = site.{attribute}", "held.append(copied(value))"]
        lines.append(f"h = floats(value, {kind!r})[{self.tensor % count}]")
        if kind == "samples":
            change = [f"h.add_(3).remainder_({VOCABULARY})"]
        else:
            change = [self.code]
        if self.how == "in place":
            return [*lines, *change]
        return [*lines, "old, h = h, h.clone()", *change, f"site.{attribute} = swapped(value, old, h)"]

    def edit(self, name: str) -> tuple[tuple[str, str], Any]:
        path, kind, count = SITES[name][self.site]

        def edit(value: Any) -> Any:
            old = floats(value, kind)[self.tensor % count]
            with torch.inference_mode(False), torch.no_grad():
                names = {"h": old.clone(), "torch": torch}
                exec(f"h.add_(3).remainder_({VOCABULARY})" if kind == "samples" else self.code, names)
            return swapped(value, old, names["h"])

        return (path, kind), edit


@dataclass
class Program:
    """One request of a random schedule: what its block does in each step, or ``None`` if it has none."""

    prompt: list[int]
    tokens: int
    joins: int
    pauses: frozenset[int]
    steps: list[list[Action]] | None
    loop: bool

    def block(self, name: str) -> str | None:
        if self.steps is None:
            return None
        lines = ["held = [].save()"]
        if self.loop:
            lines.append("for step in tracer.iter[:]:")
            lines.append("    held.append(step)")
        for step, actions in enumerate(self.steps):
            if self.loop:
                lines.append(f"    if step == {step}:")
                lines += [f"        {line}" for action in actions for line in action.text(name)]
                lines.append("        pass")
            else:
                lines += ["tracer.next()"] * bool(step)
                lines.append(f"held.append({step})")
                lines += [line for action in actions for line in action.text(name)]
        return "\n".join(lines)

    def alone(self, name: str, model: Any) -> tuple[Plain, list[Any]]:
        edits: dict[Where, Any] = {}
        paths = set()
        for step, actions in enumerate(self.steps or []):
            for action in actions:
                where, edit = action.edit(name)
                paths.add(where[0])
                if action.how != "read":
                    edits[step, *where] = edit
        result = plain(model, self.prompt, self.tokens, tuple(paths - {""}), edits)
        held: list[Any] = []
        for step, actions in enumerate(self.steps or []):
            held.append(step)
            for action in actions:
                path, kind, _ = SITES[name][action.site]
                held.append(result.seen[step, path, kind] if path else (step, kind))
        return result, held


def actions(name: str) -> st.SearchStrategy[list[Action]]:
    one = st.builds(
        Action,
        st.integers(0, len(SITES[name]) - 1),
        st.sampled_from(["read", "in place", "assign"]),
        st.integers(0, 1),
        st.sampled_from(CODES),
    )
    return st.lists(one, max_size=5, unique_by=lambda action: action.site).map(
        lambda found: sorted(found, key=lambda action: action.site)
    )


@st.composite
def programs(draw: st.DrawFn, name: str) -> Program:
    tokens = draw(st.integers(1, 4))
    steps = st.lists(actions(name), min_size=tokens, max_size=tokens)
    return Program(
        prompt=draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)),
        tokens=tokens,
        joins=draw(st.integers(0, 3)),
        pauses=draw(st.frozensets(st.integers(1, 5), max_size=2)),
        steps=draw(st.one_of(steps, steps, st.none())),
        loop=draw(st.booleans()),
    )


@st.composite
def schedules(draw: st.DrawFn) -> tuple[str, list[Program], bool]:
    name = draw(st.sampled_from(["llama", "gpt"]))
    return name, draw(st.lists(programs(name), min_size=1, max_size=4)), draw(st.booleans())


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_random_blocks_give_what_plain_hooks_give(schedule: tuple[str, list[Program], bool]) -> None:
    # contract: C3
    name, found, warm = schedule
    model = llama() if name == "llama" else gpt()
    engine = Engine(model)
    if warm:
        engine.run(Request([1, 2], "model.logits", 2))
    values = {"copied": copied, "floats": floats, "swapped": swapped}
    requests = [
        Request(one.prompt, one.block(name), one.tokens, one.joins, values=dict(values), pauses=one.pauses)
        for one in found
    ]
    engine.run(*requests)
    engine.handoffs.begin([], 1, 1)
    assert engine.wrapped() == []
    for program, request in zip(found, requests, strict=True):
        result, held = program.alone(name, model)
        assert request.generated == result.generated
        assert same(request.logits, [row[0] for row in result.logits])
        if program.steps is not None:
            wanted = [_of_the_step(value, result) for value in held]
            assert same([_without_edits(value) for value in request.saves["held"]], wanted)
        assert request.probe is None or request.probe.dead


def _of_the_step(value: Any, result: Plain) -> Any:
    """Logits and samples are checked by the whole results: here it only counts that they were read."""
    return "end" if isinstance(value, tuple) and len(value) == 2 and value[1] in ("logits", "samples") else value


def _without_edits(value: Any) -> Any:
    ends = isinstance(value, torch.Tensor) and (value.shape == (1, VOCABULARY) or value.dtype == torch.int64)
    return "end" if ends else value
