"""Random blocks: one that is known to only read changes nothing. And if it did, it would be refused."""

from __future__ import annotations

import textwrap
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Engine, Request, llama
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from endoscope.errors import ReplacementError
from endoscope.probing import Probe
from endoscope.tracing.block import Code
from endoscope.tracing.flow import names_of
from endoscope.tracing.reads import reads_only

PROMPT, TOKENS = [3, 1, 4], 2

# In the order of a pass. A block holds one after the other, and does random things while it holds it.
SITES = [
    "model.model.layers[0].output[0]",
    "model.model.layers[1].input",
    "model.model.layers[1].mlp.output",
    "model.model.layers[1].output",
    "model.model.layers[2].resid_post",
    "model.model.norm.inputs",
    "model.logits",
    "model.samples",
]
NAMES = st.sampled_from("abcd")
HARMLESS = [
    *("{}.clone()", "{}.float()", "{}.double()", "{}.view(-1)", "{}.reshape(-1)", "{}.detach()", "{}.contiguous()"),
    *(
        "{}.to(torch.float64)",
        "{}.T",
        "{}[0]",
        "{}[-1:]",
        "{}[...]",
        "{}.get('k')",
        "{}.copy()",
        "{}.max()",
        "{}.sum()",
    ),
    *("-{}", "+{}", "({} + {})", "({} * 1)", "({} or {})", "({} if {} is None else {})", "[{}, {}]", "({}, {})"),
    *("{{'k': {}}}", "[*{}]", "[x for x in {}]", "[x := {}]", "(x := {})", "list({})", "tuple({})", "max({}, {})"),
    *("next_to({})", "torch.relu({})", "F.relu({})", "torch.stack([{}, {}])", "{}.squeeze()", "sum([], {})"),
    *("{}.output", "{}.mlp", "{}.weight", "{}.items()", "{}.setdefault('k', {})", "{}.pop()", "dict(k={})"),
    *("{}.real", "torch.as_tensor({})", "torch.zeros(8)", "{}.expand_as({})", "{}.unsqueeze(0)", "{}.chunk(2)"),
]
CHANGING = [
    *("{}.add_(1)", "{}.mul_(2)", "{}.zero_()", "{}.data", "{}.sort()", "F.relu({}, True)", "F.silu({}, True)"),
    *("torch.add({}, 1, out={})", "model.model.norm({})", "{}.half()", "{}.copy_({})", "{}.numpy()", "{}.norm({})"),
    *("{}.update({{'k': 1}})", "{}.sigmoid_()", "torch.norm({}, 2, 0, False, {})"),
]
LEAVES = ["(0)", "(1.5)", "[]", "{}", "vector", "model.model.norm", "model.model.layers[2]", "None"]


@st.composite
def expression(draw: st.DrawFn, depth: int = 2) -> str:
    if not depth or draw(st.integers(0, 2)) == 0:
        return draw(st.one_of(NAMES, NAMES, NAMES, NAMES, st.sampled_from(LEAVES)))
    form = draw(st.sampled_from(CHANGING if draw(st.integers(0, 19)) == 19 else HARMLESS))
    inner = [draw(expression(depth - 1)) for _ in range(form.replace("{{", "").count("{"))]
    return form.format(*inner)


@st.composite
def statement(draw: st.DrawFn, depth: int = 1) -> list[str]:
    kinds = ["assign"] * 6 + ["augment"] * 3 + ["store", "append", "unpack", "expression", "site", "nested"]
    kind = draw(st.sampled_from(kinds + (["for", "if", "no_grad"] if depth else [])))
    name, other = draw(NAMES), draw(NAMES)
    match kind:
        case "augment":
            return [f"{name} {draw(st.sampled_from(['+=', '*=', '-=']))} {draw(st.sampled_from(['1', '2.5', other]))}"]
        case "store":
            return [f"{name}[{draw(st.sampled_from(['0', repr('k'), ':', '-1']))}] = {draw(expression(1))}"]
        case "append":
            return [f"{name}.{draw(st.sampled_from(['append', 'extend', 'add']))}({draw(expression(1))})"]
        case "unpack":
            return [f"{name}, *{other} = {draw(expression())}", f"for x in {other}:", f"    {name} = x"]
        case "expression":
            return [draw(expression())]
        case "site" if draw(st.integers(0, 5)) == 5:
            return [f"model.model.layers[1].mlp.output = {draw(expression())}"]
        case "nested":
            return [f"{name} = [{other}]", f"{name}[0] {draw(st.sampled_from(['=', '+=']))} 1"]
        case "for" | "if" | "no_grad":
            head = {"for": f"for {name} in list({other}):", "if": f"if {name} is not {other}:"}
            inner = draw(statement(depth - 1))
            return [head.get(kind, "with torch.no_grad():"), *(f"    {line}" for line in inner)]
    return [f"{name} = {draw(expression())}"]


@st.composite
def blocks(draw: st.DrawFn) -> str:
    lines = ["x = a = b = c = d = 0"]
    chosen = sorted(draw(st.sets(st.integers(0, len(SITES) - 1), min_size=1, max_size=4)))
    loop = draw(st.booleans())
    body: list[str] = []
    for number in chosen:
        body += [f"{draw(NAMES)} = {SITES[number]}"]
        for _ in range(draw(st.integers(1, 4))):
            # What fails is left behind, so that a block seldom ends early.
            tried = textwrap.indent("\n".join(draw(statement())), "    ").split("\n")
            body += ["try:", *tried, "except Exception as error:", "    pass"]
    if loop:
        return "\n".join([*lines, "for step in tracer.iter[:]:", *textwrap.indent("\n".join(body), "    ").split("\n")])
    return "\n".join([*lines, *body])


@cache
def untraced() -> Request:
    request = Request(PROMPT, None, TOKENS)
    Engine(llama()).run(request)
    return request


def weights(model: Any) -> list[torch.Tensor]:
    return [each.detach() for each in model.state_dict().values()]


def known_to_read(text: str, values: dict[str, Any], engine: Engine) -> bool:
    code = Code.make(text, "block.py", 1, 0)
    outside, _ = names_of(code.rewritten())
    every = {"model": engine.model, "tracer": engine.tracer, "torch": torch, **values}
    return reads_only(code, {name: every[name] for name in outside if name in every})


seen: Counter[tuple[bool, bool]] = Counter()


@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck), derandomize=True)
@given(blocks())
def check(text: str) -> None:
    try:
        compile(text, "block.py", "exec")
    except SyntaxError:  # a walrus in the wrong place
        assume(False)
    model = llama()
    engine = Engine(model)
    values = {"F": F, "vector": torch.ones(8, dtype=torch.float64)}
    before = [each.clone() for each in weights(model)]
    request = Request(PROMPT, text, TOKENS, values=values)
    known = known_to_read(text, values, engine)
    try:
        engine.run(request, check=False)
    except Exception:
        # A block may break a module: half of its weights in another dtype, say.
        assert not known, text
        return
    same = all(
        torch.equal(old, new) and old.dtype == new.dtype for old, new in zip(before, weights(model), strict=True)
    )
    seen[known, request.probe.edited or not same] += 1
    if known:
        assert not request.probe.edited, text
        assert same, text
        if request.error is None:
            assert request.generated == untraced().generated, text
            assert all(map(torch.equal, request.logits, untraced().logits)), text


@pytest.mark.filterwarnings("ignore")
def test_what_is_known_to_only_read_changes_nothing() -> None:  # contract: F3
    check()
    # The blocks are worth their while: many are known, and many of the others change something.
    assert seen[True, False] > 50
    assert seen[False, True] > 10
    assert not seen[True, True]


WAYS = ["{}", *(form for form in HARMLESS if form.replace("{{", "").count("{") >= 1)]
INNER = ["{}", "+{}", "{}.view(-1)", "[{}, {}]", "({} or {})", "{{'k': {}}}"]
WRITES = ["x += 1", "x[0] = 1", "x[0] += 1", "x.append(1)", "x, *y = x, 2\n    x *= 2", "for y in x:\n        y += 1"]


def edited(engine: Engine, text: str) -> bool:
    request = Request(PROMPT, text, 1, values={"F": F, "vector": torch.ones(8, dtype=torch.float64)})
    engine.run(request, check=False)
    return bool(request.probe.edited)


@pytest.mark.filterwarnings("ignore")
def test_no_way_to_get_at_a_value_hides_that_it_is_written_into() -> None:  # contract: F3
    """Every form of the grammar around some of them, and then a change in place."""
    engine = Engine(llama())
    known = changed = 0
    for site in ("model.logits", "model.model.layers[1].output", "[model.logits]"):
        for outer in WAYS:
            for inner in INNER if site == "model.logits" else ["{}"]:
                way = outer.format(*[inner.format("h", "h", "h")] * 3)
                for write in WRITES:
                    lines = f"    x = {way}\n    {write}"
                    text = f"a = b = c = 0\nh = {site}\ntry:\n{lines}\nexcept Exception as error:\n    pass"
                    try:
                        compile(text, "block.py", "exec")
                    except SyntaxError:
                        continue
                    if known_to_read(text, {"F": F}, engine):
                        known += 1
                        assert not edited(engine, text), text
                    elif inner == "{}":
                        changed += edited(engine, text)
    assert known > 100
    assert changed > 100


class Trusting(Engine):
    """Takes every block for one that only reads."""

    def probe(self, block: str, relay: Any = None, **values: Any) -> Probe:
        probe = super().probe(block, relay, **values)
        probe.reads_only = True
        return probe


@pytest.mark.parametrize(
    "text",
    [
        "h = model.model.layers[1].mlp.output\nh += 1\nmodel.logits",
        "model.model.layers[1].mlp.output = model.model.layers[1].mlp.output + 1\nmodel.logits",
        "model.model.layers[1].resid_post[:] = 0",  # the block ends in the same turn
        "model.logits[:] = 0\ntracer.stop()",
        "model.samples = 1",
        "model.model.layers[0].input.zero_()",
    ],
)
def test_a_change_that_was_not_foreseen_is_refused(text: str) -> None:
    """Before anything of the engine is touched, and nobody else notices."""
    engine = Trusting(llama())
    request, other = Request(PROMPT, text, TOKENS), Request(PROMPT, None, TOKENS)
    engine.run(request, other, check=False)
    assert isinstance(request.error, ReplacementError)
    assert "fault of endoscope" in str(request.error)
    assert not request.probe.edited
    assert other.generated == untraced().generated
    made = untraced().logits[: len(request.logits)]
    assert all(torch.allclose(mine, its) for mine, its in zip(request.logits, made, strict=True))


def test_a_block_that_only_reads_goes_on_as_ever() -> None:
    engine = Trusting(llama())
    request = Request(PROMPT, "rows = [model.logits.clone() for s in tracer.iter[:]].save()", TOKENS)
    engine.run(request)
    assert len(request.saves["rows"]) == TOKENS
