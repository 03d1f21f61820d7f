"""The sites that a block can reach, from its text: never too few, and exactly these where people write plainly."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from endoscope.tracing.block import Code
from endoscope.tracing.reach import EVERYTHING, Reach, hidden_first, reach
from endoscope.tracing.serialize import MARK, Referenced, dumps


class Ref(Referenced):
    def __init__(self, *key: str) -> None:
        self.key = key

    def reference(self) -> tuple[str, ...]:
        return self.key


MODEL, TRACER = Ref("model"), Ref("tracer")
LAYER = Ref("module", "model.layers.3")


def helper(layer: Any) -> Any:
    return layer.output


def of(text: str, **values: Any) -> Reach:
    code = Code.make(textwrap.dedent(text).strip("\n"), "block.py", 1, 0)
    given = {"model": MODEL, "tracer": TRACER, **values}
    met: list[tuple[str, ...]] = []
    ordered = hidden_first(code, given)
    dumps(ordered, met=met)
    hidden = met[: met.index(MARK)] if MARK in met else []
    return reach(code, given, hidden)


NONE = [
    "x = 1",
    "logits = model.logits.save()",
    "for step in tracer.iter[:]:\n    model.logits[:, 5] = 0\n    tracer.emit(top=model.logits.argmax())",
    "for _ in tracer.all():\n    if model.samples.item() == 3: tracer.stop()",
    "model.logits = model.logits * 2\nmodel.samples = model.samples",
    "h = model.lm_head.weight[3].save()",
    "text = model.tokenizer.decode([1])",
    "while True:\n    tracer.next()\n    x = model.logits",
    "n = len(model.model.layers)",
]

EXACT = {
    "h = model.model.layers[3].output": ["model.layers[3].output"],
    "h = model.model.layers[3].output[0].save()": ["model.layers[3].output"],
    "model.model.layers[-1].mlp.output[:] = 0": ["model.layers[-1].mlp.output"],
    "h = layer.mlp.input": ["model.layers.3.mlp.input"],
    "h = layer.resid_post": ["model.layers.3.resid_post"],
    "h = model.model.layers[L].output": ["model.layers[7].output"],
    "for i in range(5):\n    h = model.model.layers[i].output": ["model.layers[*].output"],
    "for l in model.model.layers:\n    h = l.output": ["model.layers[*].output"],
    "for i, l in enumerate(model.model.layers[2:5]):\n    h = l.output": ["model.layers[*].output"],
    "hs = [l.output[0] for l in model.model.layers]": ["model.layers[*].output"],
    "m = model.model\nl = m.layers[1]\nh = l.output": ["model.layers[1].output"],
    "a, b = model.model.layers[0], model.model.layers[1]\nh = b.output": ["model.layers[1].output"],
    "for l in (model.model.layers[0], model.model.norm):\n    h = l.output": [
        "model.layers[0].output",
        "model.norm.output",
    ],
    "for l in chosen:\n    h = l.output": ["model.layers.1.output", "model.layers.2.output"],
    "for i, l in pairs:\n    h = l.output": ["model.layers.1.output"],
    "d = {'a': layer}\nfor k, l in d.items():\n    h = l.output": ["model.layers.3.output"],
    "d = {'a': layer}\nfor l in d.values():\n    h = l.output": ["model.layers.3.output"],
    "rows = {}\nfor i, l in enumerate(model.model.layers):\n    rows.setdefault(i, []).append(l.output)": [
        "model.layers[*].output"
    ],
    "first, *rest = model.model.layers\nh = rest[2].output": ["model.layers[*].output"],
    "for a, b in zip(model.model.layers, model.model.layers[1:]):\n    h = b.resid_pre": ["model.layers[*].resid_pre"],
    "h = model.get_submodule('model.layers.4').output": ["model.layers.4.output"],
    "h = model.model.layers['4'].output": ["model.layers[*].output"],
    "layer.skip(layer.input)": ["model.layers.3.input", "model.layers.3.skip"],
    "layer.output = (layer.output[0] + 1, layer.output[1])": ["model.layers.3.output"],
    "def f(l): return l.output[0]\nh = f(model.model.layers[5])": ["model.layers[5].output"],
    "f = lambda l: l.output[0]\nh = f(model.model.layers[5])": ["model.layers[5].output"],
    "cache = tracer.cache()": ["@cache"],
    "cache = tracer.cache(modules=['model.layers.*.mlp'])": ["model.layers.*.mlp@cache"],
    "cache = tracer.cache([layer, model.model.norm])": ["model.layers.3.output", "model.norm.output"],
    "if model.logits.sum() > 0:\n    h = layer.output": ["model.layers.3.output"],
    "x = torch.nn.functional.relu(layer.output)": ["model.layers.3.output"],
    "model.lm_head(model.model.norm(layer.resid_post))": ["model.layers.3.resid_post"],
    "h = model.get_submodule(path).output": ["model.layers.3.output"],
    "x = model.logits_processor(model.lm_head, model.model.norm(layer.resid_post))": ["model.layers.3.resid_post"],
    "h = owner.model.model.layers[1].output": ["model.layers[1].output"],
    "h = owner._layer.output * owner.scale": ["model.layers.3.output"],
    "for l in owner.layers:\n    h = l.output": ["model.layers.1.output"],
    "l = layer if x else model.model.norm\nh = l.output": ["model.layers.3.output", "model.norm.output"],
    "(l := layer.mlp)\nh = l.output": ["model.layers.3.mlp.output"],
    "try:\n    h = layer.output\nexcept ValueError:\n    h = layer.input": [
        "model.layers.3.input",
        "model.layers.3.output",
    ],
    "h = (layer.output, layer.mlp.output)": ["model.layers.3.mlp.output", "model.layers.3.output"],
    "print(f'{layer.output}')": ["model.layers.3.output"],
    "assert layer.output.sum() > 0": ["model.layers.3.output"],
    "del layer.output[0]": ["model.layers.3.output"],
    "layer.output += 1": ["model.layers.3.output"],
    "layer.output[0] += 1": ["model.layers.3.output"],
    "(lambda: layer.output)()": ["model.layers.3.output"],
    "x = [*model.model.layers][3].output": ["model.layers[*].output"],
    "x = next(iter(model.model.layers)).output": ["model.layers[*].output"],
    "with torch.no_grad():\n    h = layer.output": ["model.layers.3.output"],
}

WIDE = {
    "h = other(layer)": "model.layers.3.**",
    "h = getattr(layer, 'output')": "model.layers.3.**",
    "h = list(map(lambda l: l.output, model.model.layers))": "model.layers.**",
    "hs = sorted(model.model.layers, key=lambda l: l.output)": "model.layers.**",
    "class A:\n    def __init__(self, l): self.l = l\nA(layer).l.output": "model.layers.3.**",
    "class A:\n    def __add__(self, l): return l.output\nA() + layer": "model.layers.3.**",
    "class A:\n    def __getitem__(self, l): return l.output\nA()[layer]": "model.layers.3.**",
    "class A:\n    def __contains__(self, l): return l.output\nlayer in A()": "model.layers.3.**",
    "match layer:\n    case x: x.output": "model.layers.3.**",
    "def f(*ls): return ls[0].output\nf(layer)": "model.layers.3.**",
    "def f(**ls): return ls['a'].output\nf(a=layer)": "model.layers.3.**",
    "h = model.get_submodule(path + '').output": "**.output",
    "h = used()": "model.layers.3.**",
    "h = owner.helper(1)": "**",
    "owner.tracer.cache()": "**",
    "for _ in owner.tracer.iter[:]: pass": "**",
    "owner._layer = 3\nh = owner.model.norm.output": "**",
    "x = owner\nh = x._layer.output": "**",
    "mods = dict(attn=layer.self_attn)\nfor m in mods.values():\n    h = m.output": "model.layers.3.self_attn.**",
    "base = {'a': layer}\nboth = {**base}\nh = both['a'].output": "model.layers.3.**",
    "def pick(i): return model.model.layers[i]\nfor l in map(pick, [0]): h = l.output": "model.layers[*].**",
    "def pick(i): return model.model.layers[i]\nh = pick(1).output": "model.layers[*].**",
    "class P:\n    def get(self): return layer\nh = P().get().output": "model.layers.3.**",
    "def add(d, k, v): d[k] = v\ns = {}\nadd(s, 'a', layer)\nh = s['a'].output": "model.layers.3.**",
    "d = {}\ne = d\ne['a'] = layer\nh = d['a'].output": "model.layers.3.**",
    "get = model.get_submodule\nh = get('model.norm').output": "**",
    "fs = [lambda m=l: m.output for l in model.model.layers]\nfs[0]()": "model.layers[*].**",
    "m = next((l for l in model.model.layers if False), model.model.norm)\nh = m.output": "model.norm.**",
    "def f(a, b, l): return l.output\nargs = (1, 2)\nf(*args, layer)": "model.layers.3.**",
    "def f(l, /, **kw): return kw['l'].output\nf(1, l=layer)": "model.layers.3.**",
    "def i(fn):\n    return lambda m: fn(m.mlp)\n@i\ndef f(l): return l.output\nf(layer)": "model.layers.3.**",
    "class C:\n    target = layer\nh = C.target.output": "model.layers.3.**",
    "l = []\nl[:] = model.model.layers\nh = l[0].output": "model.layers.**",
    "l = []\nl += [layer]\nh = l[0].output": "model.layers.3.**",
    "d = {'a': (1, layer)}\nk, (i, m) = d.popitem()\nh = m.output": "model.layers.3.output",
    "fn = model.model.norm if x else other\nfn(layer)": "model.layers.3.**",
    "class P:\n    def map(self, x): return x\nlist(map(lambda l: l.output, model.model.layers))": "model.layers.**",
    "tracer.cache(chosen + ['model.norm'])": "**",
    "import builtins\nbuiltins.eval('layer.output')": "**",
    "try: layer.nope\nexcept AttributeError as e: h = e.obj.output": "**",
    "def f(a: layer.output): pass": "model.layers.3.output",
    "z = layer.mlp.skip\nfor s in tracer.iter[1:]:\n    z(s)": "model.layers.3.mlp.skip",
    "m = model\nfor _ in range(9):\n    m = m.get_submodule('model')\nh = m.norm.output": "model.model.norm.output",
    "x = model.model\nx = x.layers\nx = x[1]\nx = x.self_attn\nx = x.o_proj\nh = x.output": "model.**.output",
    "h = many()": "**",
    "exec('layer.output')": "**",
    "h = globals()['layer'].output": "**",
    "f = tracer.cache\nf()": "**",
    "other(tracer)": "**",
    "tracer.cache(name)": "**",
    "def f(i): return model.model.layers[i].output\nf(1)": "model.layers[*].output",
    "def g():\n    yield layer.output\nfor x in g(): pass": "model.layers.3.output",
    "x = layer.__class__": "model.layers.3.**",
    "with layer as l: l.output": "model.layers.3.**",
    "import operator\noperator.attrgetter('output')(layer)": "model.layers.3.**",
}


class Owner:
    def __init__(self) -> None:
        self.model, self._layer, self.scale, self.tracer = MODEL, LAYER, 2.0, TRACER
        self.layers = [Ref("module", "model.layers.1")]

    def helper(self, i: int) -> Any:
        return self.layers[i].output


def values() -> dict[str, Any]:
    inner = LAYER
    root = MODEL
    return {
        "layer": LAYER,
        "L": 7,
        "chosen": [Ref("module", "model.layers.1"), Ref("module", "model.layers.2")],
        "pairs": [(0, Ref("module", "model.layers.1"))],
        "other": helper,
        "used": lambda: inner.output,  # type: ignore[attr-defined]
        "many": lambda: root.output,  # type: ignore[attr-defined]
        "path": "model.layers.3",
        "name": "model.layers.*",
        "x": True,
        "owner": Owner(),
    }


def given(text: str) -> dict[str, Any]:
    import ast

    names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    return {name: value for name, value in values().items() if name in names}


@pytest.mark.parametrize("text", NONE)
def test_logits_and_samples_need_no_module(text: str) -> None:
    assert of(text).at(0) == ()


@pytest.mark.parametrize("text", EXACT)
def test_what_is_written_plainly_is_known_exactly(text: str) -> None:
    assert of(text, **given(text)).at(0) == tuple(sorted(EXACT[text]))


@pytest.mark.parametrize("text", WIDE)
def test_what_cannot_be_followed_may_be_anything(text: str) -> None:
    assert WIDE[text] in of(text, **given(text)).at(0)


def test_a_block_is_past_what_it_has_passed() -> None:
    found = of(
        """
        h = layer.output
        for step in tracer.iter[:]:
            x = model.logits
            if step == 2:
                y = model.model.norm.output
        z = model.logits
        """,
        layer=LAYER,
    )
    assert found.at(0) == found.at(1) == ("model.layers.3.output", "model.norm.output")
    assert found.at(2) == found.at(3) == found.at(5) == ("model.norm.output",)
    assert found.at(6) == ()


def test_a_branch_that_was_not_taken_is_past() -> None:
    found = of(
        """
        if model.logits.sum() > 0:
            tracer.next()
            a = layer.output
        else:
            tracer.next()
            b = layer.mlp.output
        """,
        layer=LAYER,
    )
    assert found.at(1) == ("model.layers.3.mlp.output", "model.layers.3.output")
    assert found.at(2) == ("model.layers.3.output",)
    assert found.at(5) == ("model.layers.3.mlp.output",)


def test_functions_and_generators_of_a_block_may_be_called_from_anywhere() -> None:
    text = """
        def f():
            return layer.output
        lazy = (l.mlp.output for l in model.model.layers)
        tracer.next()
        """
    assert of(text, layer=LAYER).at(5) == ("model.layers.3.output", "model.layers[*].mlp.output")


def test_a_loop_through_modules_ends() -> None:
    text = "m = model\nfor _ in range(100):\n    m = m.inner\nh = m.output"
    assert EVERYTHING in " ".join(of(text).at(0))


def test_a_reach_that_nobody_has_read_is_everything() -> None:
    assert Reach().at(0) == Reach().at(99) == (EVERYTHING,)
