"""Which blocks are known to only read. All that is known is so; what is only harmless need not be known."""

from __future__ import annotations

import builtins
import inspect
import math
import sys
import textwrap
import types
from collections import OrderedDict
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F
from tracing_support import NoBackend, trace

import endoscope
from endoscope.tracing import pure
from endoscope.tracing.block import Code
from endoscope.tracing.flow import names_of
from endoscope.tracing.reads import reads_only
from endoscope.tracing.serialize import Referenced


class Named(Referenced):
    """Stands for what travels by reference."""

    def __init__(self, *key: str) -> None:
        self.key = key

    def reference(self) -> tuple[str, ...]:
        return self.key


class Evil:
    """Does what it likes wherever Python lets it."""

    def _any(self, *args: Any, **kwargs: Any) -> Evil:
        return self

    __getattr__ = __iadd__ = __add__ = __radd__ = __matmul__ = __rmatmul__ = __eq__ = __lt__ = __call__ = _any
    __getitem__ = __iter__ = __enter__ = __exit__ = __neg__ = _any
    __hash__ = object.__hash__

    def __class_getitem__(cls, item: Any) -> Any:
        return item.add_(1)


class Liar:
    """Says that it is a model, and travels as one."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return Named

    def reference(self) -> tuple[str, ...]:
        return ("something",)


class Subclass(torch.Tensor):
    pass


def helper(h: Any) -> Any:
    return h


TOKENIZER = object()
REFERENCES = {id(TOKENIZER): ("tokenizer",)}
HOME = types.ModuleType("torch")  # not the one that is imported
VALUES: dict[str, Any] = {
    "model": Named("model"),
    "layer": Named("module", "model.layers.1"),
    "layers": Named("module", "model.layers"),
    "chosen": [Named("module", "model.layers.0"), Named("module", "model.layers.2")],
    "tracer": Named("tracer"),
    "tokenizer": TOKENIZER,
    "torch": torch,
    "F": F,
    "math": math,
    "nn": torch.nn,
    "save": endoscope.save,
    "n": 3,
    "ids": [1, 2, 3],
    "options": {"dim": -1, "deep": [(1, "x"), {"y": None}]},
    "vector": torch.ones(8),
    "weight": torch.nn.Parameter(torch.ones(8)),
    "vectors": {"a": torch.ones(8), "b": [torch.zeros(8)]},
    "dtype": torch.float32,
    "evil": Evil(),
    "Evil": Evil,
    "liar": Liar(),
    "evils": [1, [Evil()]],
    "ordered": OrderedDict(a=1),
    "helper": helper,
    "sub": torch.ones(8).as_subclass(Subclass),
    "home": HOME,
    "sys": sys,
    "builtins": builtins,
    "long": list(range(5000)),
    "where": slice(Evil(), None),
}


def answer(text: str, **more: Any) -> bool:
    """What is said of a block that takes the names that it needs from ``VALUES`` or from ``more``."""
    code = Code.make(textwrap.dedent(text).strip("\n"), "block.py", 1, 0)
    outside, _ = names_of(code.rewritten())
    known = {**VALUES, **more}
    return reads_only(code, {name: known[name] for name in outside if name in known}, REFERENCES)


READS = [
    "pass",
    "x = model.logits.save()",
    "model.logits.argmax(-1).save()",
    "h = layer.output[0].save()",
    "h = layer.resid_post.clone().save()",
    "h = model.model.layers[3].mlp.output",
    "hidden, residual = layer.output\nboth = (hidden + residual).save()",
    "x = save(layer.output)",
    "x = layers[n].resid_pre[-1, ...].float().cpu().save()",
    "x = layers[n].resid_pre[:, 1:3].to(torch.float32)",
    "x = layer.get_submodule('mlp.down').output.norm(dim=-1, keepdim=True)",
    "args, kwargs = layer.inputs\nx = args[0].save()",
    "x = layer.input.clone()[-1].save()",
    "x = layer.input.save()",
    "seen = {}.save()\nfor step in tracer.iter[:]:\n    seen.setdefault(('a', step), []).append(layer.output[0])",
    "rows = [].save()\nfor step in tracer.iter[1:5]:\n    rows.append(model.logits.softmax(-1).max().item())",
    "rows = [].save()\nfor _ in tracer.all():\n    rows += [model.samples]\n    rows.extend([1, 2])",
    "rows = list().save()\nrows.append(layer.output)\ntracer.next()\nrows.append(layer.output)\nrows.sort()",
    "tracer.emit(lens=model.logits.topk(5).indices, step=n)",
    "for step in tracer.iter:\n    if model.logits.softmax(-1).max() < 0.5:\n        tracer.stop()",
    "cache = tracer.cache(modules=['model.layers.*.mlp', layer])",
    "cache = tracer.cache()\nx = cache['model'][0].mean().save()",
    "r = tracer.result.save()",
    "acts = [l.output[0] for l in layers].save()",
    "acts = {i: l.resid_post.norm() for i, l in enumerate(model.model.layers) if i % 2 == 0}.save()",
    "acts = [layers[i].output for i in range(n)].save()",
    "for l in chosen:\n    x = l.output[0].float()\nx.save()",
    "for l, v in zip(layers, [vector, vector]):\n    x = (l.output[0] @ v).float().save()",
    "x = vectors['a'] @ layer.output[0].T",
    "probe = (layer.resid_post[-1].float() @ weight - 0.5).sigmoid().save()",
    "lens = (layer.resid_post @ model.lm_head.weight.T).argmax(-1).save()",
    "total = 0\nfor _ in tracer.iter[:]:\n    total += layer.output[0].sum()\ntotal.save()",
    "total, count = 0.0, 0\nfor _ in tracer.iter[:]:\n    total += 1\n    count += len(ids)",
    "h = layer.output[0].clone()\nh[0] = 0\nh += 1\nh.save()",
    "h = layer.output[0] * 1\nh *= 2",
    "x = torch.zeros(3, 8)\nx[0] = layer.output[0][-1]",
    "d = {}\nd['x'] = layer.output\nd['y'] = d['x'][0].mean()\ndel d",
    "text = ''\ntext += str(int(model.samples))\nprint(text, layer.output[0].shape, sep='', flush=True)",
    "print(f'{model.logits.max():.3f} {n!r:>{n}}')",
    "print(*[1, 2])",
    "word = model.tokenizer.decode(model.logits.argmax(-1)).save()",
    "word = tokenizer.decode(model.samples[0], skip_special_tokens=True)\nend = tokenizer.eos_token_id",
    "p = torch.softmax(model.logits, dim=-1)\nx = torch.topk(p, k=5, dim=-1).values.save()",
    "p = F.softmax(model.logits, dim=-1)\nq = F.relu(p)\nr = torch.nn.functional.cosine_similarity(p, q, dim=-1)",
    "x = torch.linalg.norm(layer.output[0], dim=-1)\ny = math.log(2) + math.pi",
    "import torch\nimport math\nx = torch.stack([layer.output[0], layer.output[0]]).mean(0) * math.sqrt(2)",
    "import torch.nn.functional as G\nfrom torch.nn import functional as H\nx = G.softmax(H.relu(model.logits), -1)",
    "import torch.nn.functional\nx = torch.nn.functional.gelu(layer.output[0])",
    "with torch.no_grad():\n    x = layer.output[0].mean()",
    "x = (y := layer.output[0]).mean()\nz = y",
    "if (h := layer.output)[0].sum() > 0 and n:\n    x = h\nelse:\n    x = None",
    "x = layer.output[0] if n > 2 else vector\nx = -x\nx = +x",
    "while True:\n    x = model.logits\n    break",
    "try:\n    x = layer.output\nexcept (ValueError, RuntimeError) as error:\n    x = str(error)\nfinally:\n    y = 1",
    "assert model.logits.isfinite().all(), 'not finite'",
    "if model.logits.isnan().any():\n    raise ValueError(f'{n}')",
    "x = isinstance(layer.output, tuple)\ny = isinstance(n, (int, torch.Tensor))",
    "x = model.logits.masked_fill(model.logits < 0, torch.finfo(model.logits.dtype).min)",
    "x = sorted(ids, reverse=True)\nx.append(3)\nx[0] = layer.output",
    "first, *rest = ids\nrest.append(layer.output)",
    "x: int = 3\ny = options['deep'][1].get('y')",
    "a = b = layer.output[0]\nc = a.view(-1)\nd = c.reshape(2, -1).permute(1, 0).contiguous()",
    "h = layer.output[0].cpu().tolist()\nh.append(1)",
    "x = layer.output[0].to(dtype).type_as(vector)",
    "x = model.logits.shape[-1] - 1\ny = max(x, 3, default=2)\nz = round(2.5)",
    "sub = 3\nx = sub",  # its outside value is never read
    "x = {**options, 'z': 1}\nx.update({'q': 2})",
    "x = 'a,b'.split(',')\ny = ' '.join(x).upper().strip()",
    "name = 'x'\nname += 'y'\nx = name in ['xy']",
    # Odd, and yet nothing but an error can come of it.
    "torch = 1\ntorch.softmax(vector, 0)",
    "try:\n    1 / 0\nexcept Exception as torch:\n    torch.softmax(1)",
    "import torch as math\nmath.log(1)",
]

EDITS = [
    # Plainly.
    "layer.output = vector",
    "layer.output[0][:] = 0",
    "layer.output[0][-1] += vector",
    "layer.resid_post[-1] = vector",
    "model.logits[:, 3] = -math.inf",
    "model.samples = 3",
    "layer.input = vector",
    "layer.inputs = ((vector,), {})",
    "layer.skip(vector)",
    "h = layer.output[0]\nh += 1",
    "h = layer.output[0]\nh[0] = 1",
    "h = layer.output[0]\nh.add_(1)",
    "h = layer.output[0]\nh.mul_(2).save()",
    "h = layer.output[0]\ndel h[0]",
    "for s in tracer.iter[:]:\n    layer.output[0].zero_()",
    # By another name.
    "h = layer.output[0]\ng = h\ng += 1",
    "h = layer.output[0]\ng = h.view(-1)\ng += 1",
    "h = layer.output[0]\ng = h.float()\ng *= 2",
    "h = layer.output[0]\ng = +h\ng *= 2",
    "h = layer.output[0]\ng = h or 1\ng *= 2",
    "h = layer.output[0]\ng = h if n else 1\ng *= 2",
    "h = 1\nfor s in tracer.iter[:]:\n    h += 1\n    h = layer.output[0]",
    "for s in tracer.iter[:]:\n    if s:\n        g += 1\n    g = layer.output[0]",
    "h = 0\n[h := x for x in layer.output]\nh += 1",
    "h = [layer.output[0]]\nh[0] += 1",
    "h = [layer.output[0]]\nh[0][0] = 1",
    "h = {'a': layer.output[0]}\nh.get('a')[0] = 1",
    "h = {'a': layer.output[0]}\nfor key, value in h.items():\n    value += 1",
    "h = []\nh.append(layer.output[0])\ng = h.pop()\ng += 1",
    "h = []\nh.append(layer.output[0])\ng, = h\ng -= 1",
    "h = layer.output[0].clone()\nh = layer.output[0]\nh[0] = 1",
    "h = max(layer.output)\nh += 1",
    "h = sum([], layer.output[0])\nh += 1",
    "h = save(layer.output[0])\nh += 1",
    "h = layer.output[0].save()\nh += 1",
    "(h := layer.output[0]).fill_(1)",
    "a, b = 1, layer.output[0]\nb += 1",
    "a, (b, *c) = 1, (2, layer.output[0])\nfor d in c:\n    d += 1",
    "x = [i for i in layer.output]\nfor i in x:\n    i += 1",
    "h = layer.output[0]\nh.T[0] = 1",
    "h = layer.output[0].real\nh += 1",
    # Targets.
    "a, h[0] = 1, 2" + "\nh = layer.output[0]",
    "h = layer.output[0]\na, h[0] = 1, 2",
    "h = layer.output[0]\n[a, *h[0]] = 1, 2",
    "h = layer.output[0]\nfor h[0] in range(3):\n    pass",
    "h = layer.output[0]\n[0 for h[0] in [1]]",
    "h = layer.output[0]\nwith torch.no_grad() as h[0]:\n    pass",
    "a = layer.output = vector",
    "a, layer.output = 1, vector",
    "for layer.output in [vector]:\n    pass",
    "[0 for layer.output in [vector]]",
    "layer.output: int = vector",
    "del layer.output",
    "layer.output += 1",
    "h = layer.output[0]\nh.requires_grad = True",
    "h = layer.output[0]\nh.grad = vector",
    "h = layer.output[0]\nh.data = vector",
    "h = layer.output[0]\nh.data[0] = 1",
    "h = layer.output[0].data\nh.add(1)",
    "model.model.norm.weight.data[0] = 1",
    "model.model.norm.weight[0] = 1",
    "w = model.lm_head.weight\nw += 1",
    # Methods and functions.
    "torch.add(layer.output[0], 1, out=layer.output[0])",
    "torch.norm(layer.output[0], 2, 0, False, layer.output[0])",
    "torch.norm(*[layer.output[0], 2, 0, False, layer.output[0]])",
    "torch.tensordot(layer.output[0], vector, 1, layer.output[0])",
    "torch.Tensor.add_(layer.output[0], 1)",
    "torch.add(layer.output[0], 1, **{'out': layer.output[0]})",
    "torch.relu_(layer.output[0])",
    "torch.ops.aten.add_(layer.output[0], 1)",
    "torch._foreach_add_([layer.output[0]], 1)",
    "torch.nn.init.zeros_(layer.output[0])",
    "nn.init.zeros_(layer.output[0])",
    "F.relu(layer.output[0], inplace=True)",
    "F.relu(layer.output[0], True)",
    "F.relu(*[layer.output[0], True])",
    "F.silu(layer.output[0], True)",
    "F.relu_(layer.output[0])",
    "F.dropout(layer.output[0], 0.5, True, True)",
    "F.dropout(layer.output[0], inplace=True)",
    "F.normalize(layer.output[0], 2, 0, 1e-6, layer.output[0])",
    "F.embedding(model.samples, layer.output[0], max_norm=1)",
    "torch.nn.functional.threshold(layer.output[0], 1, 1, True)",
    "getattr(layer.output[0], 'add_')(1)",
    "setattr(layer, 'output', vector)",
    "delattr(layer, 'output')",
    "type(layer).output.__set__(layer, vector)",
    "layer.__setattr__('output', vector)",
    "layer.output[0].__iadd__(1)",
    "layer.output[0].__setitem__(0, 1)",
    "layer.__class__.output.fset(layer, vector)",
    "exec('layer.output = vector')",
    "eval('layer.output[0].add_(1)')",
    "globals()['layer'].output[0].add_(1)",
    "vars(layer)",
    "f = layer.output[0].add_\nf(1)",
    "f = layer.output[0].mean\nf()",
    "list(map(layer.output[0].add_, [1]))",
    "list(filter(layer.output[0].add_, [1]))",
    "sorted([1, 2], key=layer.output[0].add_)",
    "max([1, 2], key=layer.output[0].add_)",
    "print(1, file=evil)",
    "iter(layer.output[0].zero_, None)",
    "[].__class__",
    "h = layer.output[0].numpy()\nh[0] = 1",
    "h = layer.output[0].numpy()\nh.sort()",
    "layer.output[0].apply_(abs)",
    "layer.output[0].map_(vector, max)",
    "layer.output[0].register_hook(print)",
    "layer.output[0].share_memory_()",
    "layer.output[0].requires_grad_()",
    "layer.output[0].resize(3)",
    "layer.output[0].set_(vector)",
    "layer.output[0].copy_(vector)",
    "layer.output[0].swapaxes_(0, 1)",
    "layer.output[0].backward()",
    "layer.output.sort()",
    "layer.output.append(1)",
    "d = layer.output\nd['x'] = 1",
    "layer.inputs[1].update({'x': 1})",
    "layer.inputs[1]['x'] = 1",
    # Modules.
    "model.model.norm(layer.output[0])",
    "model.lm_head.forward(layer.output[0])",
    "f = model.model.norm\nf(layer.output[0])",
    "model.model.norm.float()",
    "model.model.norm.to(torch.float16)",
    "model.half()",
    "layer.cpu()",
    "for l in layers:\n    l.double()",
    "for l in chosen:\n    l.float()",
    "[l.float() for l in layers]",
    "x = {'a': layer}\nx['a'].float()",
    "x = []\nx.append(layer)\ny = []\nfor z in x:\n    z.half()",
    "x = []\ny = x\ny.append(layer)\nx[0].half()",
    "x = []\nx.append(layer)\n(ids + x)[3].half()",
    "x = {}\nx.setdefault('a', layer)\nx.get('a').half()",
    "x, y = layer, 1\nx.half()",
    "x = layer if n else vector\nx.half()",
    "model.logits_processor.input.float()",
    "model.logits_processor.inputs[0][0].half()",
    "args, kwargs = model.logits_processor.inputs\nfor a in args:\n    a.half()",
    "model.logits_processor.input.output.half()",
    "max(layers).half()",
    "list(layers)[0].half()",
    "tuple(layers)[0].half()",
    "layers.append(layer)",
    "layer.mlp.topk(layer.output[0])",
    "layer.apply(helper)",
    "layer.register_forward_hook(helper)",
    "layer.requires_grad_()",
    "layer.eval()",
    "layer.load_state_dict({})",
    "model.get_submodule('a')(vector)",
    "model.get_submodule('a').half()",
    "model._station.module",
    "model._handoffs.probes",
    # What is not plain.
    "x = evil",
    "evil.anything",
    "x = vector + evil",
    "evil += 1",
    "Evil[vector]",
    "x = evils[1]",
    "x = liar.output",
    "x = ordered['a']",
    "x = sub + 1",
    "x = helper(layer.output)",
    "home.softmax(vector)",
    "sys.modules",
    "builtins.print(1)",
    "x = long[0]",
    "x = where",
    "x = vector.anything",
    # Names that are not what they seem.
    "torch = evil\ntorch.softmax(vector, 0)",
    "len = evil\nlen(vector)",
    "len = layer.output[0].add_\nlen(1)",
    "for len in [layer.output[0].add_]:\n    len(1)",
    "[len(1) for len in [layer.output[0].add_]]",
    "model = evil\nmodel.logits",
    "[model.logits for model in [vector]]",
    "tracer = evil\ntracer.emit(x=1)",
    "save = evil",
    "x = exec\nx('1')",
    "import torch as len\nlen(1)",
    "from torch import zeros as print\nprint(1)",
    "import os",
    "import os as torch\ntorch.softmax()",
    "from torch import manual_seed",
    "from . import torch",
    "__endoscope_save__ = evil",
    "with torch.no_grad() as torch:\n    pass",
    "t = tracer\nt.emit(x=1)",
    # Statements and expressions that are not looked into.
    "def f():\n    layer.output = vector\nf()",
    "f = lambda: layer.output[0].add_(1)\nf()",
    "class A:\n    layer.output = vector",
    "@helper\ndef f(): pass",
    "@layer.output[0].add_\ndef f(): pass",
    "class A(metaclass=helper): pass",
    "match layer.output:\n    case helper():\n        pass",
    "match n:\n    case 1:\n        layer.output = vector",
    "global n\nn = 1",
    "with evil:\n    pass",
    "with torch.inference_mode():\n    pass",
    "with torch.device('meta'):\n    pass",
    "with torch.no_grad():\n    layer.output = vector",
    "try:\n    x = 1\nexcept* ValueError:\n    pass",
    "try:\n    pass\nexcept helper:\n    pass",
    "try:\n    x = 1\nfinally:\n    layer.output = vector",
    "while layer.output[0].add_(1):\n    pass",
    "x = f'{layer.output[0].add_(1)}'",
    "x = f'{n:{layer.output[0].add_(1)}}'",
    "assert layer.output[0].add_(1)",
    "raise helper(1)",
    "x = vector[layer.output[0].add_(1)]",
    "x = {layer.output[0].add_(1): 1}",
    "x = {1: layer.output[0].add_(1)}",
    "x = [1 for i in ids if layer.output[0].add_(1)]",
    "x = 1 < layer.output[0].add_(1)",
    "x = not layer.output[0].add_(1)",
    "x = isinstance(layer.output[0].add_(1), int)",
    "x = isinstance(vector, evil)",
    "x = isinstance(vector, helper(1))",
    "x = '{0.__class__}'.format(vector)",
    # The engine.
    "tracer.barrier()",
    "x = tracer.barrier",
    "tracer.invoke('x')",
    "tracer.emit(**options)",
    "tracer.emit(x=layer.output[0].add_(1))",
    "torch.manual_seed(0)",
    "x = torch.rand(3)",
    "x = layer.output[0].bernoulli()",
    "torch.set_default_dtype(torch.float16)",
    "torch.set_grad_enabled(True)",
    "torch.save(layer.output, 'file')",
    "x = open('file')",
    "x = input()",
    "tokenizer.add_tokens(['x'])",
    "model.tokenizer.eos_token = 'x'",
    "x = unknown_anywhere",
]


@pytest.mark.parametrize("text", READS)
def test_a_block_that_only_reads(text: str) -> None:
    assert answer(text)


@pytest.mark.parametrize("text", EDITS)
def test_a_block_that_changes_something_or_may(text: str) -> None:  # contract: F3
    assert not answer(text)


@pytest.mark.parametrize("text", EDITS)
def test_it_is_seen_wherever_it_stands(text: str) -> None:
    body = textwrap.indent(text, "    ")
    assert not answer(f"for step in tracer.iter[:]:\n{body}")
    assert not answer(f"if n:\n{body}\nelse:\n    pass")
    assert not answer(f"try:\n    x = model.logits\nexcept ValueError:\n{body}")
    assert not answer(f"with torch.no_grad():\n{body}")


def test_the_answer_depends_on_the_values_of_the_trace() -> None:
    text = "x = (layer.output[0] @ value).save()"
    assert answer(text, value=torch.ones(8))
    assert not answer(text, value=Evil())
    assert answer(text, value=2)
    assert not answer("value.half()", value=Named("module", "x"))
    assert answer("value.half()", value=torch.ones(8))


def test_a_loop_is_gone_through_until_nothing_new_is_found() -> None:
    chain = "\n".join(f"    a{i} = a{i + 1}" for i in range(9))
    assert not answer(f"a9 = 1\nfor s in ids:\n{chain}\n    a0 += 1\n    a9 = vector")
    assert answer(f"a9 = 1\nfor s in ids:\n{chain}\n    a0 += 1\n    a9 = 2")


def test_a_trace_finds_out_by_itself() -> None:
    backend = NoBackend()
    with trace("p", backend):
        x = torch.ones(2) + 1
    assert backend.tracer is not None
    assert backend.tracer.invokes[0].block.reads_only
    backend = NoBackend()
    with trace("p", backend):
        VALUES["vector"][0] = 1
    assert backend.tracer is not None
    assert not backend.tracer.invokes[0].block.reads_only


# The lists.


def test_every_name_on_the_lists_is_one() -> None:
    for name in pure.TENSOR_METHODS | pure.ANYWHERE:
        assert callable(getattr(torch.Tensor, name)), name
    for path, names in pure.FUNCTIONS.items():
        module = sys.modules[path]
        for name in names:
            assert callable(getattr(module, name)), f"{path}.{name}"
    for path, names in pure.CONSTANTS.items():
        for name in names:
            assert isinstance(getattr(sys.modules[path], name), (float, torch.dtype, torch.layout)), name
    assert all(callable(getattr(builtins, name)) for name in pure.BUILTINS | pure.TYPES)
    assert pure.MAKING_BUILTINS | pure.PLAIN_BUILTINS <= pure.BUILTINS
    kinds = (list, tuple, dict, set, str)
    assert all(any(hasattr(kind, name) for kind in kinds) for name in pure.CONTAINER_METHODS | pure.CHANGES)


def test_no_name_on_the_lists_changes_in_place() -> None:
    listed = pure.TENSOR_METHODS | pure.CONTAINER_METHODS | pure.ANYWHERE | frozenset().union(*pure.FUNCTIONS.values())
    assert not [name for name in listed if name.endswith("_") or name.startswith("_")]
    assert not {"out", "inplace", "key", "file", "generator"} & pure.KEYWORDS
    assert not pure.CHANGES & pure.CONTAINER_METHODS
    # A list's or a set's method of that name would change it.
    tensor_only = pure.TENSOR_METHODS - pure.CONTAINER_METHODS - {"split"}
    assert not [name for name in tensor_only if any(hasattr(kind, name) for kind in (list, dict, set, bytearray))]
    assert not [name for name in pure.ANYWHERE if hasattr(torch.nn.Module, name)]
    assert not [name for name in pure.ANYWHERE if any(hasattr(kind, name) for kind in (list, dict, set))]


def test_no_listed_function_takes_out_or_inplace_by_position() -> None:
    for path, names in pure.FUNCTIONS.items():
        for name in names:
            try:
                parameters = inspect.signature(getattr(sys.modules[path], name)).parameters.values()
            except (TypeError, ValueError):
                continue  # made in C++, where `out` is given by name alone
            places = [
                place
                for place, parameter in enumerate(parameters)
                if parameter.name in ("out", "inplace") and parameter.kind is not inspect.Parameter.KEYWORD_ONLY
            ]
            if places:
                assert pure.AT_MOST[f"{path}.{name}"] == places[0], f"{path}.{name}"


ARGUMENTS: list[tuple[Any, ...]] = [
    (),
    (0,),
    (1,),
    (0, 1),
    (1, 0),
    (0, 0, 1),
    (0.25, 0.5),
    (-1, 8),
    (torch.ones(3, 8, dtype=torch.bool), 2.0),
    (torch.rand(3, 8),),
    (torch.rand(8, 3),),
    (torch.rand(3, 8), torch.rand(3, 8)),
    (torch.rand(3, 8), 0.5),
    (0, torch.tensor([0, 1])),
    (0, torch.zeros(3, 8, dtype=torch.int64)),
    (0, torch.zeros(3, 8, dtype=torch.int64), torch.rand(3, 8)),
    (0, torch.tensor([1]), torch.rand(1, 8)),
    (0, torch.tensor([1]), 2.0),
    (torch.ones(3, 8, dtype=torch.bool), torch.rand(3, 8)),
    (torch.float64,),
]


@pytest.mark.filterwarnings("ignore")
def test_no_listed_method_or_function_changes_what_it_is_given() -> None:
    """Each is called with all that may fit, and no tensor that took part has changed; most have been called."""
    called, asked = set(), set()
    functions = [(f"Tensor.{name}", getattr(torch.Tensor, name)) for name in pure.TENSOR_METHODS]
    for path, names in pure.FUNCTIONS.items():
        if path != "math":
            functions += [(f"{path}.{name}", getattr(sys.modules[path], name)) for name in names]
    state = torch.random.get_rng_state()
    for name, function in functions:
        asked.add(name)
        for given in [*ARGUMENTS, *([[ARGUMENTS[9][0]], *more] for more in ARGUMENTS[:4])]:
            first = torch.rand(3, 8, generator=torch.Generator().manual_seed(1))
            arguments = (first, *given) if isinstance(given, tuple) else tuple(given)
            before = [each.clone() if isinstance(each, torch.Tensor) else each for each in arguments]
            versions = [each._version for each in arguments if isinstance(each, torch.Tensor)]
            try:
                function(*arguments[: pure.AT_MOST.get(name, 9)])
            except Exception:  # these arguments do not fit
                pass
            else:
                called.add(name)
            assert versions == [each._version for each in arguments if isinstance(each, torch.Tensor)], name
            for old, new in zip(before, arguments, strict=True):
                assert not isinstance(old, torch.Tensor) or torch.equal(old, new), name
    assert torch.equal(state, torch.random.get_rng_state())
    assert len(called) > 0.85 * len(asked), sorted(asked - called)


def test_what_counts_as_new_shares_no_memory_with_what_it_is_made_of() -> None:
    h, eye = torch.rand(3, 3), torch.eye(3)
    made = [h + 0, 0 + h, h - 0, h * 1, 1 * h, h / 1, h // 1, h % 9, h**1, h @ eye, eye @ h, h.clone()]
    made += [torch.tensor(h.tolist()), torch.full_like(h, 1), torch.ones_like(h)]
    made += [value for kind in (torch.int64, torch.bool) for i in [h.to(kind)] for value in (i & i, i | i, i ^ i)]
    assert all(each.data_ptr() != h.data_ptr() for each in made)
    whole = h.to(torch.int64)
    assert all(each.data_ptr() != whole.data_ptr() for each in (whole & whole, whole | whole, whole << 0, whole >> 0))
    made = [h.clone().t().contiguous()]
    assert +h is h  # and so it does not count as new
