"""Random blocks over random schedules, compared with plain hooks on each request alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from harness import VOCABULARY, Engine, Plain, Request, Where, copied, gpt, llama, plain, same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# The sites of each model in the order in which a pass comes to them: path and kind.
_LLAMA_LAYER = [
    ("", "inputs"),
    ("", "resid_pre"),
    (".input_layernorm", "inputs"),
    (".input_layernorm", "output"),
    (".self_attn", "inputs"),
    (".self_attn.qkv_proj", "output"),
    (".self_attn.o_proj", "inputs"),
    (".self_attn", "output"),
    (".post_attention_layernorm", "output"),
    (".mlp", "inputs"),
    (".mlp.up", "output"),
    (".mlp.down", "inputs"),
    (".mlp", "output"),
    ("", "output"),
    ("", "resid_post"),
]
_GPT_LAYER = [
    ("", "inputs"),
    ("", "resid_pre"),
    (".ln_1", "inputs"),
    (".ln_1", "output"),
    (".attn", "output"),
    (".ln_2", "inputs"),
    (".mlp", "inputs"),
    (".mlp.0", "output"),
    (".mlp.1", "inputs"),
    (".mlp.2", "output"),
    (".mlp", "output"),
    ("", "output"),
    ("", "resid_post"),
]
_ENDS = [("", "logits"), ("", "samples")]
SITES = {
    "llama": [
        ("model.embed_tokens", "output"),
        *((f"model.layers.{i}{path}", kind) for i in range(3) for path, kind in _LLAMA_LAYER),
        ("model.norm", "inputs"),
        ("model.norm", "output"),
        *_ENDS,
    ],
    "gpt": [
        ("transformer.wte", "output"),
        ("transformer.wpe", "output"),
        *((f"transformer.h.{i}{path}", kind) for i in range(3) for path, kind in _GPT_LAYER),
        ("transformer.ln_f", "output"),
        ("lm_head", "inputs"),
        ("lm_head", "output"),
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

    def code_at(self, kind: str) -> str:
        return f"h.add_(3).remainder_({VOCABULARY})" if kind == "samples" else self.code

    def text(self, name: str) -> list[str]:
        path, kind = SITES[name][self.site]
        where = f"model.{kind}" if not path else f"model.get_submodule({path!r}).{kind}"
        owner, _, attribute = where.rpartition(".")
        if self.how == "read":
            return [f"held.append({where})"]
        lines = [f"site = {owner}", f"value = site.{attribute}", "held.append(copied(value))"]
        lines.append(f"found = floats(value, {kind!r})")
        lines.append(f"h = found[{self.tensor} % len(found)]")
        change = [self.code_at(kind)]
        if self.how == "in place":
            return [*lines, *change]
        return [*lines, "old, h = h, h.clone()", *change, f"site.{attribute} = swapped(value, old, h)"]

    def edit(self, name: str) -> tuple[tuple[str, str], Any]:
        path, kind = SITES[name][self.site]

        def edit(value: Any) -> Any:
            found = floats(value, kind)
            old = found[self.tensor % len(found)]
            with torch.inference_mode(False), torch.no_grad():
                names = {"h": old.clone(), "torch": torch}
                exec(self.code_at(kind), names)
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
                path, kind = SITES[name][action.site]
                held.append(result.seen[step, path, kind])
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
            assert same(request.saves["held"], held)
        assert request.probe is None or request.probe.dead
