"""Which blocks are known to skip in every step what they skip in one; what is unclear is not known."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tracing_support import NoBackend, trace

from endoscope.tracing.block import Code
from endoscope.tracing.messages import Submission, decode_submission, encode, reads_only
from endoscope.tracing.serialize import Referenced
from endoscope.tracing.skips import skips_throughout


class Named(Referenced):
    """Stands for what travels by reference."""

    def __init__(self, *key: str) -> None:
        self.key = key

    def reference(self) -> tuple[str, ...]:
        return self.key


VALUES: dict[str, Any] = {
    "model": Named("model"),
    "layer": Named("module", "model.layers.1"),
    "some": [Named("module", "model.layers.0"), Named("module", "model.layers.2")],
    "tracer": Named("tracer"),
    "tracing": Named("tracer"),
    "path": "model.layers.1",
    "which": [1, 2],
    "n": 2,
    "given": [torch.ones(1)],
    "torch": torch,
    "helper": lambda x: x,
}

KNOWN = {
    "the plain words": "for _ in tracer.iter[:]:\n    layer.skip(layer.resid_pre)",
    "all": "for step in tracer.all():\n    model.model.layers[3].skip(given[step])",
    "no brackets": "for _ in tracer.iter:\n    layer.skip(0)",
    "from a later step on": "for _ in tracer.iter[2:]:\n    layer.skip(0)",
    "by ones": "for _ in tracer.iter[::1]:\n    layer.skip(0)",
    "another name of the tracer": "for _ in tracing.iter[:]:\n    layer.skip(0)",
    "numbers from outside": "for _ in tracer.iter[:]:\n    model.model.layers[n - 1].skip(0)",
    "paths": (
        "for _ in tracer.iter[:]:\n"
        "    model.get_submodule(path).skip(0)\n    model.get_submodule(f'{path}.{n}').skip(0)"
    ),
    "a slice": "for _ in tracer.iter[:]:\n    for one in model.model.layers[2:5]:\n        one.mlp.skip(one.mlp.input)",
    "a range": "for _ in tracer.iter[:]:\n    for i in range(3):\n        model.model.layers[i].skip(0)",
    "a list from outside": "for _ in tracer.iter[:]:\n    for one in some:\n        one.skip(0)",
    "numbers": "for _ in tracer.iter[:]:\n    for i in [1, -1]:\n        model.model.layers[i].skip(0)",
    "numbered": "for _ in tracer.iter[:]:\n    for i, one in enumerate(some):\n        one.skip(given[i])",
    "a name of the loop": "for _ in tracer.iter[:]:\n    mlp = model.model.layers[2].mlp\n    mlp.skip(mlp.input * 0)",
    "a name before": "mlp = layer.mlp\nfor _ in tracer.iter[:]:\n    mlp.skip(mlp.input * 0)",
    "a name in a loop": (
        "for _ in tracer.iter[:]:\n"
        "    for i in which:\n        one = model.model.layers[i]\n        one.skip(one.resid_pre)"
    ),
    "beside others": """
        kept = [].save()
        tracer.cache(layer)
        for step in tracer.iter[:]:
            if step > 2:
                kept.append(layer.input)
            try:
                value = helper(layer.input)
            except ValueError:
                value = 0
            with torch.no_grad():
                value = value + 1
            layer.skip(value)
            tracer.emit(now=layer.output)
            model.model.layers[3].output[:] = 0
            if step == 9:
                tracer.stop()
        print(kept)
        """,
}
UNCLEAR = {
    "no skip": "for _ in tracer.iter[:]:\n    layer.output",
    "no loop": "layer.skip(0)",
    "some steps": "for _ in tracer.iter[:3]:\n    layer.skip(0)",
    "up to a number": "for _ in tracer.iter[:n]:\n    layer.skip(0)",
    "every other step": "for _ in tracer.iter[::2]:\n    layer.skip(0)",
    "by a number": "for _ in tracer.iter[::n]:\n    layer.skip(0)",
    "one step": "for _ in tracer.iter[1]:\n    layer.skip(0)",
    "a list of steps": "for _ in tracer.iter[[0, 1]]:\n    layer.skip(0)",
    "another loop": "for _ in which:\n    layer.skip(0)\nfor _ in tracer.iter[:]:\n    pass",
    "one before the loop": "layer.skip(0)\nfor _ in tracer.iter[1:]:\n    layer.skip(0)",
    "one behind the loop": "for _ in tracer.iter[:]:\n    layer.skip(0)\nlayer.skip(0)",
    "else": "for _ in tracer.iter[:]:\n    layer.skip(0)\nelse:\n    layer.skip(0)",
    "if": "for step in tracer.iter[:]:\n    if step:\n        layer.skip(0)",
    "if around": "if n:\n    for step in tracer.iter[:]:\n        layer.skip(0)",
    "while": "for step in tracer.iter[:]:\n    while step:\n        layer.skip(0)",
    "try": "for step in tracer.iter[:]:\n    try:\n        layer.skip(0)\n    except Exception:\n        pass",
    "try around": "try:\n    for _ in tracer.iter[:]:\n        layer.skip(0)\nexcept Exception:\n    pass",
    "with": "for _ in tracer.iter[:]:\n    with torch.no_grad():\n        layer.skip(0)",
    "and": "for step in tracer.iter[:]:\n    step and layer.skip(0)",
    "a conditional": "for step in tracer.iter[:]:\n    layer.skip(0) if step else None",
    "a comprehension": "for _ in tracer.iter[:]:\n    [one.skip(0) for one in some]",
    "a function": "def f():\n    layer.skip(0)\nfor _ in tracer.iter[:]:\n    f()",
    "a method": "for _ in tracer.iter[:]:\n    f = layer.skip\n    f(0)",
    "by name": "for step in tracer.iter[:]:\n    layer.skip(0)\n    step or getattr(some[0], 'skip')(0)",
    "break": "for step in tracer.iter[:]:\n    layer.skip(0)\n    if step == 2:\n        break",
    "continue": "for step in tracer.iter[:]:\n    if step == 2:\n        continue\n    layer.skip(0)",
    "the step's module": "for step in tracer.iter[:]:\n    model.model.layers[step].skip(0)",
    "the step's slice": "for step in tracer.iter[:]:\n    for one in some[step:]:\n        one.skip(0)",
    "the step's range": "for step in tracer.iter[:]:\n    for i in range(step):\n        model.model.layers[i].skip(0)",
    "the step's name": "for step in tracer.iter[:]:\n    one = model.model.layers[step]\n    one.skip(0)",
    "a value's module": "for _ in tracer.iter[:]:\n    model.model.layers[model.samples[0]].skip(0)",
    "a result's module": "for _ in tracer.iter[:]:\n    helper(layer).skip(0)",
    "two names": "one = some[0]\nfor _ in tracer.iter[:]:\n    one.skip(0)\n    one = some[1]",
    "two values": "one = some[0]\nif n:\n    one = some[1]\nfor _ in tracer.iter[:]:\n    one.skip(0)",
    "a name under an if": "for step in tracer.iter[:]:\n    if step:\n        layer = some[1]\n    layer.skip(0)",
    "a name of a loop that is over": (
        "for step in tracer.iter[:]:\n    for one in some:\n        if one is layer:\n            pass\n    one.skip(0)"
    ),
    "counted": "for _ in tracer.iter[:]:\n    n += 1\n    model.model.layers[n].skip(0)",
    "taken away": "for _ in tracer.iter[:]:\n    for one in some:\n        one.skip(0)\n    some.pop()",
    "exchanged": (
        "for _ in tracer.iter[:]:\n    for i in which:\n        model.model.layers[i].skip(0)\n    which[0] += 1"
    ),
    "used up": "each = enumerate(some)\nfor _ in tracer.iter[:]:\n    for i, one in each:\n        one.skip(0)",
    "an own enumerate": (
        "def enumerate(x):\n    return []\n"
        "for _ in tracer.iter[:]:\n    for i, one in enumerate(some):\n        one.skip(0)"
    ),
    "next": "for _ in tracer.iter[:]:\n    layer.skip(0)\n    tracer.next()",
    "a loop inside": "for _ in tracer.iter[:]:\n    layer.skip(0)\n    for _ in tracer.iter[:5]:\n        model.logits",
    "the tracer's other name": "t = tracer\nfor _ in tracer.iter[:]:\n    layer.skip(0)\n    t.next()",
    "the tracer given away": "for _ in tracer.iter[:]:\n    layer.skip(0)\n    helper(tracer)",
    "no tracer": "for _ in some.iter[:]:\n    layer.skip(0)",
    "another tracer": "tracer = some\nfor _ in tracer.iter[:]:\n    layer.skip(0)",
    "skips of something else": "for _ in tracer.iter[:]:\n    layer.skip(0)\n    helper.skip(1)",
}


def known(text: str) -> bool:
    code = Code.make(textwrap.dedent(text).strip("\n"), "block.py", 1, 0)
    code.compile()
    return skips_throughout(code, VALUES)


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str) -> None:  # contract: C4
    assert known(KNOWN[name])


@pytest.mark.parametrize("name", UNCLEAR)
def test_unclear(name: str) -> None:  # contract: C4
    assert not known(UNCLEAR[name])


def test_a_trace_finds_out_by_itself() -> None:
    layer = VALUES["layer"]
    backend = NoBackend()
    with trace("p", backend) as tracer:
        for _ in tracer.iter[:]:
            layer.skip(0)
    assert tracer.invokes[0].block.skips_throughout
    with trace("p", backend) as tracer:
        layer.skip(0)
    assert not tracer.invokes[0].block.skips_throughout
    with trace(backend=backend) as tracer:
        with tracer.invoke("p"):
            for _ in tracer.all():
                layer.skip(0)
        with tracer.invoke("q") as invoke:
            for _ in invoke.all():
                layer.skip(0)
    assert [invoke.block.skips_throughout for invoke in tracer.invokes] == [True, True]


def test_a_submission_carries_it() -> None:
    code = Code.make(KNOWN["the plain words"], "block.py", 1, 0)
    for answer in (True, False):
        data = encode(Submission(False, "home", "key", code, b"", answer))
        assert decode_submission(data).skips_throughout is answer
        assert not reads_only(data)
