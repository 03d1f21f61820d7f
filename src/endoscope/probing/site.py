"""Where a probe can stop: the sites of a model, and what is known of each module that has some."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from endoscope.errors import ReplacementError

if TYPE_CHECKING:
    from endoscope.probing.cache import Cache
    from endoscope.probing.probe import Probe
    from endoscope.probing.skip import Form

AFTER_THE_MODULES = 1 << 40
"""Position in a pass of the first site that lies behind every module."""


class Site:
    """A place in a pass where a probe can stop.

    Attributes:
        name: the path below the model, such as ``model.layers.3.mlp.output``.
        kind: ``output``, ``inputs``, ``resid_pre``, ``resid_post``, ``skip``, ``logits``, ``samples`` or ``step``.
        limit: what its whole numbers have to stay below, as indices have to; ``None`` where anything goes.
        residual: whether it is one of the residual stream.
        station: the module that has the site; ``None`` for the sites of the engine.
        waiting: the probes parked here, in the order in which they came.
        position: when a pass comes to the site, or ``None`` where that is not known or happens several times.
    """

    __slots__ = ("kind", "limit", "name", "position", "residual", "station", "waiting")

    def __init__(self, name: str, kind: str, station: Station | None = None) -> None:
        self.name = name
        self.kind = kind
        self.residual = kind in ("resid_pre", "resid_post")
        self.station = station
        self.waiting: list[Probe] = []
        self.limit = (
            getattr(station.module, "num_embeddings", None) if station is not None and kind == "inputs" else None
        )
        self.position: int | None = AFTER_THE_MODULES + (kind == "samples") if station is None else None

    def check(self, rows: Sequence[torch.Tensor]) -> None:
        """Refuse indices that would be out of range.

        Raises:
            ReplacementError: if a whole number is not one of ``range(limit)``.
        """
        if self.limit is None:
            return
        for each in rows:
            if each.numel() and not each.is_floating_point() and not each.is_complex():
                low, high = int(each.min()), int(each.max())
                if low < 0 or high >= self.limit:
                    wrong = low if low < 0 else high
                    raise ReplacementError(f"{self.name} takes numbers from 0 to {self.limit - 1}, not {wrong}")

    def __repr__(self) -> str:
        return f"<Site {self.name}>"


class Station:
    """One module under one of its names: its sites, what it is inside of, and when it runs in a pass.

    Attributes:
        outer: the modules that it is inside of, innermost first.
        inside: how many calls of it are under way.
        entered, left: positions in the recorded order of a pass, or ``None`` if it was not seen to run.
        calls: how often the recorded pass ran it.
        caches: the caches that keep its output.
        form: what it returned when that was last looked at, or ``None``.
        lacking: probes of this step for which it has not kept everything that it would read.
    """

    __slots__ = (
        "_stream",
        "_stream_known",
        "caches",
        "calls",
        "entered",
        "form",
        "inputs",
        "inside",
        "lacking",
        "left",
        "module",
        "outer",
        "output",
        "path",
        "resid_post",
        "resid_pre",
        "skip",
        "view",
    )  # fmt: skip

    def __init__(self, path: str, module: nn.Module, outer: Station | None) -> None:
        self.path = path
        self.module = module
        self.outer: tuple[Station, ...] = () if outer is None else (outer, *outer.outer)
        dot = f"{path}." if path else ""
        self.inputs = Site(f"{dot}inputs", "inputs", self)
        self.output = Site(f"{dot}output", "output", self)
        self.resid_pre = Site(f"{dot}resid_pre", "resid_pre", self)
        self.resid_post = Site(f"{dot}resid_post", "resid_post", self)
        self.skip = Site(f"{dot}skip", "skip", self)
        self.caches: list[Cache] = []
        self.lacking: list[Probe] = []
        self.form: Form | None = None
        self.inside = 0
        self.entered: int | None = None
        self.left: int | None = None
        self.calls = 0
        self._stream: Stream | None = None
        self._stream_known = False
        self.view: Any = None
        """What blocks see of the module, once one has asked."""

    def enter(self, clock: int) -> None:
        """A recorded pass enters the module."""
        self.calls += 1
        self.entered = clock
        self.inputs.position = self.resid_pre.position = self.skip.position = clock if self.calls == 1 else None

    def leave(self, clock: int) -> None:
        """A recorded pass leaves the module."""
        self.left = clock
        self.output.position = self.resid_post.position = clock if self.calls == 1 else None

    @property
    def sites(self) -> tuple[Site, ...]:
        """All of them."""
        return self.inputs, self.output, self.resid_pre, self.resid_post, self.skip

    def site(self, kind: str) -> Site:
        """The site of a kind; ``input`` is part of ``inputs``."""
        found: Site = getattr(self, "inputs" if kind == "input" else kind)
        return found

    @property
    def enters(self) -> bool:
        """Whether something is to be done before the module runs."""
        return bool(self.inputs.waiting or self.resid_pre.waiting or self.skip.waiting or self.lacking)

    @property
    def leaves(self) -> bool:
        """Whether somebody waits for what the module returns."""
        return bool(self.output.waiting or self.resid_post.waiting or self.caches)

    @property
    def stream(self) -> Stream | None:
        """How the module carries the residual stream; ``None`` if it is no decoder layer."""
        if not self._stream_known:
            self._stream = Stream.of(self.module) if self._is_layer() else None
            self._stream_known = True
        return self._stream

    def _is_layer(self) -> bool:
        return bool(self.outer) and isinstance(self.outer[0].module, nn.ModuleList)


class Stream:
    """Where a decoder layer takes in the residual stream.

    Most of vLLM's layers pass the stream on as a pair whose sum it is, ``(hidden_states, residual)``, so
    that adding and normalizing can be one operation; others pass it whole.

    Attributes:
        hidden, residual: name and index of the layer's arguments; ``residual`` is ``None`` where the
            stream is passed whole.
    """

    NAMES = ("hidden_states", "hidden_state", "x")

    __slots__ = ("hidden", "residual")

    def __init__(self, hidden: tuple[str, int], residual: tuple[str, int] | None) -> None:
        self.hidden = hidden
        self.residual = residual

    @classmethod
    def of(cls, module: nn.Module) -> Stream | None:
        """Read from the signature of the layer's class; ``None`` if it takes no hidden states."""
        parameters = list(inspect.signature(type(module).forward).parameters)[1:]
        hidden = next((name for name in cls.NAMES if name in parameters), None)
        if hidden is None:
            return None
        residual = ("residual", parameters.index("residual")) if "residual" in parameters else None
        return cls((hidden, parameters.index(hidden)), residual)

    @staticmethod
    def argument(which: tuple[str, int], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument of a call."""
        name, index = which
        return args[index] if index < len(args) else kwargs.get(name)

    @staticmethod
    def put(
        which: tuple[str, int], value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with another value for the argument."""
        name, index = which
        if index < len(args):
            return (*args[:index], value, *args[index + 1 :]), kwargs
        return args, {**kwargs, name: value}
