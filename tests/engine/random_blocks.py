"""Random blocks: each is a list of small actions, which is written as Python and also acted out on the oracle.

A block goes over the steps of its request in one of several ways, and in each step visits places in the order of a
pass. What it sees goes into a list ``held``, and comes home with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from oracle import Edit, Oracle, Place
from torch import Tensor

LAYERS = 4
LAYER_PARTS = ("resid_pre", "norm", "heads", "attention", "mlp_input", "neurons", "mlp", "resid_post")
"""The oracle's names, in the order of a pass, with ``heads`` and ``neurons``: what the attention's and the MLP's last
projection take in."""
PLACES: list[Place] = [
    *((part, layer) for layer in range(LAYERS) for part in LAYER_PARTS),
    ("final_norm", None),
    ("logits", None),
    ("samples", None),
]
SITES = {
    "resid_pre": "model.model.layers[{}].resid_pre",
    "norm": "model.model.layers[{}].input_layernorm.output",
    "heads": "model.model.layers[{}].self_attn.o_proj.input",
    "attention": "model.model.layers[{}].self_attn.output",
    "mlp_input": "model.model.layers[{}].mlp.input",
    "neurons": "model.model.layers[{}].mlp.down_proj.input",
    "mlp": "model.model.layers[{}].mlp.output",
    "resid_post": "model.model.layers[{}].resid_post",
    "final_norm": "model.model.norm.output",
    "logits": "model.logits",
    "samples": "model.samples",
}

CONSTRUCTS = ["read", "in place", "assign", "emit", "carry", "skip"]
"""What blocks do at a place."""
SKIPS = {"mlp_input": ("mlp", {"neurons", "mlp"}), "resid_pre": ("resid_post", {*LAYER_PARTS} - {"resid_post"})}
"""Where a block can skip what begins: the place behind it, and those that it then does not come by."""

# What is done to the rows ``h`` of a place, in place. Nothing here makes a step where rounding could take either side.
CHANGES = [
    "h.mul_(0.5)",
    "h += 1",
    "h[-1] -= 0.25",
    "h[:, 1:3] = 0.5",
    "h.clamp_(-1, 1)",
    "h.view(-1)[::3].neg_()",
    "h[0].copy_(h[-1].clone())",
    "h.copy_(h.roll(1, -1))",
    "h.index_put_((torch.tensor([0, 0]), torch.tensor([0, 2])), torch.tensor(1.5), accumulate=True)",
    "h[-1, :8] += carried",
]
TOKENS = [5, 1000, 40_000]
"""What a block puts in the place of a sampled token."""


class Wrong(Exception):
    """Raised by blocks that are meant to fail."""


@dataclass(frozen=True)
class Action:
    """What a block does at one place of one step.

    Attributes:
        place: index of the place in the order of a pass.
        how: one of ``CONSTRUCTS``.
        number: which change is made, or which token is put in.
    """

    place: int
    how: str
    number: int

    @property
    def part(self) -> str:
        return PLACES[self.place][0]

    @property
    def layer(self) -> int | None:
        return PLACES[self.place][1]

    @property
    def edits(self) -> bool:
        return self.how in ("in place", "assign", "skip")

    @property
    def change(self) -> str:
        if self.part == "samples":
            return f"h.fill_({TOKENS[self.number % len(TOKENS)]})"
        return CHANGES[self.number % len(CHANGES)]

    def text(self) -> list[str]:
        """The statements of the block."""
        site = SITES[self.part].format(self.layer)
        # vLLM's norms hand the residual stream on beside their result, but for the first one, which is given none.
        pair = self.part == "final_norm" or (self.part == "norm" and self.layer)
        value, assigned = (f"{site}[0]", f"(h, {site}[1])") if pair else (site, "h")
        match self.how:
            case "read":
                return [f"held.append({value})"]
            case "emit":
                return [f"tracer.emit(row={value}[-1])"]
            case "carry":
                return [f"carried = {value}[-1, :8].clone()", "held.append(carried)"]
            case "in place":
                return [f"h = {value}", "held.append(h.clone())", self.change, "held.append(h)"]
            case "assign":
                old = [f"held.append({value})", f"h = {value}.clone()"]
                return [*old, self.change, f"{site} = {assigned}", f"held.append({value})"]
        module = site.removesuffix(".input").removesuffix(".resid_pre")
        return [f"h = {site}.clone()", self.change, f"{module}.skip(h)"]


@dataclass(frozen=True)
class Program:
    """The block of one request.

    Attributes:
        steps: what it does in each step; it does nothing in those behind the list.
        form: how it goes over the steps: ``"all"``, ``"range"`` or ``"next"``; or ``"same"`` where it does the same in
            all of them, and is written so.
        bounds: of a range; steps outside of it are passed over.
        end: the step in which the block ends its request, and by what: ``"stop"`` or ``"raise"``.
    """

    steps: tuple[tuple[Action, ...], ...]
    form: str = "all"
    bounds: tuple[int, int] = (0, 0)
    end: tuple[int, str] | None = None

    def actions(self, step: int) -> tuple[Action, ...] | None:
        """What the block does in a step; ``None`` where it is not there."""
        if self.form == "range" and not self.bounds[0] <= step < self.bounds[1]:
            return None
        if self.form == "next" and step >= len(self.steps):
            return None
        return self.steps[step] if step < len(self.steps) else ()

    @property
    def last(self) -> tuple[int, str] | None:
        """The step in which the block really ends its request, and by what."""
        return self.end if self.end is not None and self.actions(self.end[0]) is not None else None

    @property
    def edits(self) -> bool:
        """Whether the block changes anything."""
        return any(action.edits for actions in self.steps for action in actions)

    def text(self) -> list[str]:
        """The statements of the block."""
        lines = ["held = [].save()", "carried = torch.ones(8)"]
        if self.form == "next":
            for step in range(len(self.steps)):
                lines += ["tracer.next()"] * bool(step) + [f"held.append({step})", *self._step(step)]
        elif self.form == "same":
            lines += ["for step in tracer.iter[:]:", "    held.append(step)"]
            lines += [f"    {line}" for action in self.steps[0] for line in action.text()]
            if self.end is not None:
                lines += [f"    if step == {self.end[0]}:", f"        {self._ending()}"]
        else:
            which = ":" if self.form == "all" else "{}:{}".format(*self.bounds)
            lines += [f"for step in tracer.iter[{which}]:", "    held.append(step)"]
            for step in range(max(len(self.steps), self.end[0] + 1 if self.end else 0)):
                if self.actions(step) is not None and (inner := self._step(step)):
                    lines += [f"    if step == {step}:", *(f"        {line}" for line in inner)]
        return [*lines, "held.append('behind the steps')"]

    def _step(self, step: int) -> list[str]:
        lines = [line for action in self.actions(step) or () for line in action.text()]
        if self.last is not None and self.last[0] == step:
            lines.append(self._ending())
        return lines

    def _ending(self) -> str:
        return "tracer.stop()" if self.end is not None and self.end[1] == "stop" else "raise Wrong('meant')"

    def acted_out(self, oracle: RandomOracle, prompt: list[int], tokens: int) -> Expected:
        """What the block sees and does on the oracle, for this request alone."""
        return _Acting(self, tokens).run(oracle, prompt)


@dataclass
class Expected:
    """What a request should give.

    Attributes:
        tokens: the generated tokens.
        held: what the block saved.
        emitted: what the block sent home on the way, in order.
        end: ``"stop"`` or ``"raise"`` if the block ends the request.
        tie: whether rounding decides about a token.
    """

    tokens: list[int] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    emitted: list[Tensor] = field(default_factory=list)
    end: str | None = None
    tie: bool = False


class RandomOracle(Oracle):
    """The oracle, with the places that only random blocks visit."""

    def _hook(self, place: Place, at: Callable[[Place, Tensor], Tensor]) -> Any:
        if place[0] not in ("heads", "neurons"):
            return super()._hook(place, at)
        layer = self._layers[place[1]]
        module = layer.self_attn.o_proj if place[0] == "heads" else layer.mlp.down_proj
        return module.register_forward_pre_hook(lambda _, args: (at(place, args[0][0])[None],))


class _Acting:
    """A block acted out by hooks: every place of every step in which it does something has its part of it."""

    def __init__(self, program: Program, tokens: int) -> None:
        self.program = program
        self.tokens = tokens
        self.found = Expected()
        self.carried = torch.ones(8)
        self.skipped: Any = None

    def run(self, oracle: RandomOracle, prompt: list[int]) -> Expected:
        last = self.program.last if self.program.last and self.program.last[0] < self.tokens else None
        steps = self.tokens if last is None else last[0] + 1
        edits = [edit for step in range(steps) for edit in self._edits(step)]
        forced = {
            step: TOKENS[action.number % len(TOKENS)]
            for step in range(steps)
            for action in self.program.actions(step) or ()
            if action.part == "samples" and action.edits
        }
        self.found.tokens = oracle.run(prompt, steps, (), edits, forced).tokens
        if last is not None:
            self.found.end = last[1]
            # A token counts that was sampled before the block ended its request.
            if not any(action.part == "samples" for action in self.program.actions(last[0]) or ()):
                self.found.tokens.pop()
        else:
            self.found.held.append("behind the steps")
        return self.found

    def _edits(self, step: int) -> list[Edit]:
        actions = self.program.actions(step)
        by_place: dict[Place, list[Callable[[Tensor], Tensor]]] = {}
        # The step's number is held before the first place that any request comes by.
        if actions is not None:
            by_place["resid_pre", 0] = [self._held(step)]
        for action in actions or ():
            place = ("logits", None) if action.part == "samples" else (action.part, action.layer)
            if action.part == "samples":
                continue
            by_place.setdefault(place, []).append(self._act(action))
            if action.how == "skip":
                by_place.setdefault((SKIPS[action.part][0], action.layer), []).append(lambda rows: self.skipped)
        sampled = [self._act(action) for action in actions or () if action.part == "samples"]
        by_place.setdefault(("logits", None), []).append(self._sample(sampled))

        def all_of(changes: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
            def change(rows: Tensor) -> Tensor:
                for each in changes:
                    rows = each(rows)
                return rows

            return change

        return [Edit(part, layer, all_of(changes), (step,)) for (part, layer), changes in by_place.items()]

    def _held(self, value: Any) -> Callable[[Tensor], Tensor]:
        def change(rows: Tensor) -> Tensor:
            self.found.held.append(value)
            return rows

        return change

    def _sample(self, actions: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
        def change(logits: Tensor) -> Tensor:
            first, second = logits[0].topk(2).values.tolist()
            self.found.tie |= first - second <= 1e-4 * max(1.0, abs(first))
            token = logits.argmax(-1, keepdim=True)
            for act in actions:
                token = act(token)
            return logits

        return change

    def _act(self, action: Action) -> Callable[[Tensor], Tensor]:
        def act(h: Tensor) -> Tensor:
            held = self.found.held
            match action.how:
                case "read":
                    held.append(h.clone())
                case "emit":
                    self.found.emitted.append(h[-1].clone())
                case "carry":
                    self.carried = h[-1, :8].clone()
                    held.append(self.carried)
                case "skip":
                    self.skipped = self._changed(action, h)
                case _:
                    held.append(h.clone())
                    h = self._changed(action, h)
                    held.append(h.clone())
            return h

        return act

    def _changed(self, action: Action, rows: Tensor) -> Tensor:
        names = {"h": rows.clone(), "torch": torch, "carried": self.carried}
        exec(action.change, names)
        changed: Tensor = names["h"]
        return changed


# Strategies


def _actions() -> st.SearchStrategy[tuple[Action, ...]]:
    action = st.builds(
        Action, st.integers(0, len(PLACES) - 1), st.sampled_from(CONSTRUCTS), st.integers(0, len(CHANGES) - 1)
    )
    return st.lists(action, max_size=4, unique_by=lambda action: action.place).map(_possible)


def _possible(actions: list[Action]) -> tuple[Action, ...]:
    """The actions in the order of a pass, without those that mean nothing where they stand."""
    kept: list[Action] = []
    skipped: set[Place] = set()
    for action in sorted(actions, key=lambda action: action.place):
        if (action.part, action.layer) in skipped:
            continue
        if action.how == "carry" and action.part == "samples":
            continue
        if action.how == "skip":
            if action.part not in SKIPS:
                continue
            skipped |= {(part, action.layer) for part in SKIPS[action.part][1]}
        kept.append(action)
    return tuple(kept)


@st.composite
def programs(draw: st.DrawFn, tokens: int) -> Program:
    """A block for a request of so many tokens."""
    form = draw(st.sampled_from(["all", "range", "next"]))
    if draw(st.booleans()):
        steps = (draw(_actions()),) * tokens  # the same in every step
        form = draw(st.sampled_from([form, "same"]))
    else:
        steps = tuple(draw(st.lists(_actions(), min_size=1, max_size=tokens)))
    bounds = (0, 0)
    if form == "range":
        start = draw(st.integers(0, tokens - 1))
        bounds = start, draw(st.integers(start, tokens + 2))
    end = draw(st.none() | st.tuples(st.integers(0, tokens - 1), st.sampled_from(["stop", "raise"])))
    return Program(steps, form, bounds, end)
