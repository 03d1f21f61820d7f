"""Toy models, an engine of a hundred lines that runs blocks on them, and the oracle: plain PyTorch hooks.

No two requests of a batch touch each other in these models, so a request that runs alone gives the numbers that it
gives in any batch. What the models do take from a serving engine: buffers that are used again, a fused addition and
normalization that writes into its arguments, and an inner model whose ``__call__`` passes by the hooks of PyTorch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from endoscope.errors import SerializationError
from endoscope.probing import BlockTracer, Handoffs, ModelView, Probe, Span
from endoscope.probing.reached import Reached
from endoscope.probing.site import Site
from endoscope.probing.steps import caches_close
from endoscope.tracing.block import Code
from endoscope.tracing.reach import Reach, hidden_first, reach
from endoscope.tracing.serialize import MARK, dumps
from endoscope.tracing.skips import skips_throughout

HIDDEN, VOCABULARY, LAYERS = 8, 23, 3
FILE = "block.py"


# The models.


class Norm(nn.Module):
    """Normalizes; with a residual, adds first, and writes both results into its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def normal(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self.normal(x)
        residual.add_(x)
        x.copy_(self.normal(residual))
        return x, residual


class Rotary(nn.Module):
    """One object that every layer has under a name of its own."""

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = positions.to(q.dtype).unsqueeze(-1)
        return q * angle.cos(), k * angle.sin()


class Attention(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.rotary_emb = rotary
        self.o_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states).chunk(3, -1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(torch.tanh(q * k) + v)  # type: ignore[no-any-return]


class Memory(nn.Module):
    """Reads all rows that the request has had so far, of this step and of earlier ones, as attention does."""

    owners: ClassVar[list[Any]] = []
    """Whose each row of the step is."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Any, list[torch.Tensor]] = {}

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        read = []
        for owner, row in zip(self.owners, value, strict=True):
            rows = self.kept.setdefault(owner, [])
            rows.append(row.clone())
            read.append(torch.stack(rows).mean(0))
        return torch.stack(read)


class Remembering(Attention):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__(rotary)
        self.attn = Memory()

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states).chunk(3, -1)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(torch.tanh(q * k) + self.attn(v))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    """Writes its result into one buffer that all layers share, as an allocator does."""

    buffer = torch.zeros(64, HIDDEN, dtype=torch.float64)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.buffer[: x.shape[0]]
        return result.copy_(self.down(torch.relu(self.up(x))))


class LlamaLayer(nn.Module):
    def __init__(self, rotary: Rotary, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = attention(rotary)
        self.post_attention_layernorm = Norm()
        self.mlp = Mlp()

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Inner(nn.Module):
    """Is called past the hooks of PyTorch."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class LlamaInner(Inner):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        rotary = Rotary()
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(LlamaLayer(rotary, attention) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return hidden  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The head is the embedding under another name, which never runs as a module."""

    def __init__(self, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.model = LlamaInner(attention)
        self.lm_head = self.model.embed_tokens

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.model(ids, positions)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.lm_head.weight.T


class GptLayer(nn.Module):
    """The stream is passed whole: what the layer norm is given is the residual itself."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(HIDDEN)
        self.attn = nn.Linear(HIDDEN, HIDDEN)
        self.ln_2 = nn.LayerNorm(HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = self.attn(self.ln_1(hidden_states)) + hidden_states
        return self.mlp(self.ln_2(hidden_states)) + hidden_states  # type: ignore[no-any-return]


class GptInner(Inner):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.wpe = nn.Embedding(64, HIDDEN)
        self.h = nn.ModuleList(GptLayer() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(ids) + self.wpe(positions)
        for layer in self.h:
            hidden = layer(hidden)
        return self.ln_f(hidden)  # type: ignore[no-any-return]


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transformer = GptInner()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.transformer(ids, positions)  # type: ignore[no-any-return]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)  # type: ignore[no-any-return]


class Gives(nn.Module):
    """Returns whatever its function makes of its arguments: a module of any shape."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Small(nn.Module):
    """An embedding, and then whatever a test passes the hidden states through.

    Args:
        body: called with the model, the hidden states and the positions; returns hidden states.
        modules: further modules by name.
    """

    def __init__(self, body: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        for name, module in modules.items():
            self.add_module(name, module)
        self.body = body

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.body(self, self.embed(ids), positions)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.embed.weight.T


def made(model: Callable[[], nn.Module], seed: int = 0) -> Any:
    """A model in float64 with weights that the seed decides."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model().to(torch.float64).eval()


def llama() -> Any:
    return made(Llama)


def remembering() -> Any:
    """A llama whose rows read earlier ones of their request."""
    return made(lambda: Llama(Remembering))


def gpt() -> Any:
    return made(Gpt)


# The engine.


@dataclass
class Request:
    """One request of a test.

    Attributes:
        prompt: token ids.
        block: the text of its block; ``None`` for a request that is not traced.
        tokens: how many tokens it generates.
        joins: the step of the engine in which it joins the batch.
        parts: sizes of the parts that its prompt is run in.
        values: names from outside of the block.
        pauses: steps of the engine that it sits out.
        printed: what the block printed and warned.
    """

    prompt: list[int]
    block: str | None = None
    tokens: int = 1
    joins: int = 0
    parts: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    pauses: frozenset[int] = frozenset()
    printed: list[tuple[str, Any]] = field(default_factory=list)
    probe: Any = None
    saves: dict[str, Any] = field(default_factory=dict)
    generated: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    owner: object = field(default_factory=object)
    done: int = 0
    """How many positions were computed."""

    @property
    def error(self) -> BaseException | None:
        return None if self.probe is None else self.probe.error


class Engine:
    """Runs requests in one batch, step by step, and calls the handoffs as a serving engine does."""

    def __init__(self, model: Any) -> None:
        self.module = model
        self.handoffs = Handoffs(model)
        stations = self.handoffs.stations.values()
        self.handoffs.stateful = {s for s in stations if any(isinstance(m, Memory) for m in s.module.modules())}
        self.model = ModelView(self.handoffs)
        self.tracer = BlockTracer(self.handoffs)
        self.after_begin: Callable[[], None] | None = None
        self._reached = Reached(self.handoffs.stations)
        self._can_reach: dict[Probe, frozenset[Site]] = {}
        self._wanted = self.handoffs.wanted
        self.handoffs.wanted = self._checked  # type: ignore[method-assign]
        self.step = 0
        self.padding = 0
        """Rows of each step that are no request's."""

    def probe(self, block: str, send: Any = None, **values: Any) -> Probe:
        """A probe that runs the block; ``model`` and ``tracer`` are among its names."""
        namespace = {"model": self.model, "tracer": self.tracer, "torch": torch, **values}
        code = code_of(block)
        probe = Probe(code.compile(), namespace, self.handoffs, "request", send)
        probe.skips_throughout = skips_throughout(code, namespace)
        probe.reach = self._reach_of(code, namespace)
        return probe

    def _reach_of(self, code: Code, values: dict[str, Any]) -> Reach:
        met: list[tuple[str, ...]] = []
        try:
            dumps(hidden_first(code, values), met=met)
        except SerializationError:
            return Reach()
        return reach(code, values, met[: met.index(MARK)] if MARK in met else ())

    def _checked(self, probe: Probe, site: Site) -> None:
        """As ``Handoffs.wanted``: no block stops where its text does not tell that it can."""
        if site.station is not None and self.handoffs.running and probe in self._can_reach:
            assert site in self._can_reach[probe], (
                f"{site.name} is not among {sorted(s.name for s in self._can_reach[probe])}"
            )
        self._wanted(probe, site)

    def run(self, *requests: Request, check: bool = True) -> Any:
        """Run the requests until each has its tokens; with ``check``, raise the first error of a block.

        Returns:
            The saves of the only request, or those of all.
        """
        for request in requests:
            if request.block is not None:
                request.probe = self.probe(
                    request.block, lambda *line, to=request.printed: to.append(line), **request.values
                )
                request.probe.last_step = request.tokens - 1
        self.step = 0
        while any(not self._over(request) for request in requests):
            batch = [
                request
                for request in requests
                if request.joins <= self.step and self.step not in request.pauses and not self._over(request)
            ]
            if batch:
                self._run_step(batch)
            self.step += 1
            for request in batch:
                if self._over(request) and request.probe is not None:
                    request.probe.finish()
                    request.saves = request.probe.saves()
                    caches_close(request.probe)
        if check:
            for request in requests:
                if request.error is not None:
                    raise request.error
        return requests[0].saves if len(requests) == 1 else [request.saves for request in requests]

    @staticmethod
    def _over(request: Request) -> bool:
        probe = request.probe
        if probe is not None and probe.dead and (probe.stopped or probe.error is not None):
            return True
        return len(request.generated) >= request.tokens

    def _run_step(self, batch: list[Request]) -> None:
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        makes: list[bool] = []
        pairs: list[tuple[Probe, Span, bool]] = []
        owners: list[Any] = []
        for row, request in enumerate(batch):
            known = request.prompt + request.generated
            count = len(known) - request.done
            if request.parts:
                count = request.parts.pop(0)
            start = len(ids)
            ids += known[request.done : request.done + count]
            positions += range(request.done, request.done + count)
            request.done += count
            last.append(len(ids) - 1)
            makes.append(request.done == len(known))
            if request.probe is not None:
                pairs.append((request.probe, Span(start, len(ids), row), makes[-1]))
            owners += [request.owner] * count
        rows = len(ids)
        Memory.owners = owners + [None] * self.padding
        ids += [0] * self.padding
        positions += [0] * self.padding
        self._can_reach = {probe: self._reached.sites(probe.reach.at(probe.line)) for probe, _, _ in pairs}
        self.handoffs.begin(pairs, len(ids), len(batch), rows)
        if self.after_begin is not None:
            self.after_begin()
        with torch.inference_mode():
            hidden = self.module(torch.tensor(ids), torch.tensor(positions))
            logits = self.handoffs.visit(self.handoffs.logits, self.module.compute_logits(hidden[last]))
            samples = self.handoffs.visit(self.handoffs.samples, logits.argmax(-1, keepdim=True))
        self.handoffs.end()
        for row, request in enumerate(batch):
            if makes[row]:
                request.logits.append(logits[row].clone())
                request.generated.append(int(samples[row]))

    def wrapped(self) -> list[str]:
        """The modules that something of ours stands around."""
        return [path for path, module in self.module.named_modules() if module.__dict__.get("forward")]


def compiled(block: str) -> Any:
    """The code of a block whose first line is line 1 of its file."""
    return code_of(block).compile()


def code_of(block: str) -> Code:
    """The text of such a block."""
    return Code.make(textwrap.dedent(block).strip("\n"), FILE, 1, 0)


def run(model: Any, block: str, prompt: list[int] | None = None, tokens: int = 1, **values: Any) -> dict[str, Any]:
    """What a block saves that runs alone on a new engine."""
    saves: dict[str, Any] = Engine(model).run(Request(prompt or [3, 1, 4], block, tokens, values=values))
    return saves


def failing(model: Any, block: str, prompt: list[int] | None = None, tokens: int = 1, **values: Any) -> BaseException:
    """The error of a block that runs alone on a new engine."""
    request = Request(prompt or [3, 1, 4], block, tokens, values=values)
    Engine(model).run(request, check=False)
    assert request.error is not None
    return request.error


def line_of(error: BaseException) -> int:
    """The innermost line of the block in an error's traceback."""
    line = 0
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


# The oracle.

Where = tuple[int, str, str]
"""A step, the path of a module, and ``output``, ``inputs``, ``resid_pre`` or ``resid_post``."""


@dataclass(eq=False)
class Plain:
    """What a request that runs alone gives with plain hooks.

    Attributes:
        seen: every value of the watched modules, of the logits and of the samples, before its edit.
        logits: by step, ``[1, vocabulary]``.
        generated: the tokens.
    """

    seen: dict[Where, Any]
    logits: list[torch.Tensor]
    generated: list[int]


def plain(
    model: Any,
    prompt: list[int],
    tokens: int = 1,
    paths: tuple[str, ...] = (),
    edits: dict[Where, Callable[[Any], Any]] | None = None,
) -> Plain:
    """Run one request alone, with hooks of PyTorch on the modules at ``paths`` and on those that are edited.

    An edit is given the value, its tensors copied, and returns what takes its place. The path ``""`` with the kind
    ``logits`` or ``samples`` edits what the step gives.
    """
    edits = edits or {}
    result = Plain({}, [], [])
    step = 0
    handles = []

    def before(path: str, layer: bool) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            result.seen[step, path, "inputs"] = copied((args, kwargs))
            changed = False
            if edit := edits.get((step, path, "inputs")):
                (args, kwargs), changed = edit(copied((args, kwargs))), True
            if layer:
                pair = args[-2:] if len(args) == 3 else (args[0], None)
                whole = pair[0].clone() if pair[1] is None else pair[0] + pair[1]
                result.seen[step, path, "resid_pre"] = whole.clone()
                if edit := edits.get((step, path, "resid_pre")):
                    new, changed = edit(whole), True
                    args = (new,) if len(args) == 1 else (args[0], new, None if pair[1] is None else new * 0)
            return (args, kwargs) if changed else None

        return hook

    def after(path: str, layer: bool) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            result.seen[step, path, "output"] = copied(output)
            changed = False
            if edit := edits.get((step, path, "output")):
                output, changed = edit(copied(output)), True
            if layer:
                pair = isinstance(output, tuple)
                whole = output[0] + output[1] if pair else output.clone()
                result.seen[step, path, "resid_post"] = whole.clone()
                if edit := edits.get((step, path, "resid_post")):
                    new, changed = edit(whole), True
                    output = (new, new * 0) if pair else new
            return output if changed else None

        return hook

    for path in sorted({*paths, *(path for _, path, _ in edits if path)}):
        module = model.get_submodule(path)
        layer = isinstance(module, (LlamaLayer, GptLayer))
        handles.append(module.register_forward_pre_hook(before(path, layer), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path, layer)))
    known, done = list(prompt), 0
    try:
        for step in range(tokens):
            Memory.owners = [result] * (len(known) - done)
            with torch.inference_mode():
                hidden = model(torch.tensor(known[done:]), torch.arange(done, len(known)))
                logits = model.compute_logits(hidden[-1:])
            result.seen[step, "", "logits"] = logits.clone()
            if edit := edits.get((step, "", "logits")):
                logits = edit(logits.clone())
            result.logits.append(logits)
            sample = logits.argmax(-1, keepdim=True)
            result.seen[step, "", "samples"] = sample.clone()
            if edit := edits.get((step, "", "samples")):
                sample = edit(sample)
            result.generated.append(int(sample))
            done = len(known)
            known.append(result.generated[-1])
    finally:
        for handle in handles:
            handle.remove()
    return result


def copied(value: Any) -> Any:
    """The value with its tensors copied, so that nothing that the model does later shows in them."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, tuple):
        return tuple(copied(item) for item in value)
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    return value


def same(found: Any, expected: Any) -> bool:
    """Whether two structures hold the same numbers, up to the rounding of float64."""
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(found, torch.Tensor)
            and found.shape == expected.shape
            and found.dtype == expected.dtype
            and bool(torch.allclose(found, expected, rtol=1e-9, atol=1e-10))
        )
    if isinstance(expected, (tuple, list)):
        return (
            isinstance(found, (tuple, list))
            and len(found) == len(expected)
            and all(same(one, other) for one, other in zip(found, expected, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(found, dict)
            and found.keys() == expected.keys()
            and all(same(found[key], expected[key]) for key in expected)
        )
    return bool(found == expected)
