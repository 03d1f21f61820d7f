"""Tensors as bytes and back, without importing torch where there are none."""

from __future__ import annotations

import importlib
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from typing import Any

Reduced = tuple[Callable[..., Any], tuple[Any, ...]]


def is_plain_tensor(value: object) -> bool:
    """Return whether the value is a dense ``torch.Tensor`` or ``Parameter`` itself, not of a class derived from it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    kind = type(value)
    if kind is not getattr(torch, "Tensor", None) and kind is not torch.nn.Parameter:
        return False
    tensor: Any = value
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def reduce_tensor(tensor: Any, home: bool = False) -> Reduced:
    """Reduce a tensor to its own elements: of a view, never what else its storage holds.

    With ``home`` it arrives on the CPU, wherever it is now.

    The bytes are a ``PickleBuffer``, so a pickler with a ``buffer_callback`` takes them out of band. For a contiguous
    tensor on the CPU that buffer is the tensor's own memory, not a copy.
    """
    torch = sys.modules["torch"]
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # numpy knows neither bfloat16 nor float8, so it is shown bytes.
    data = plain.reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    parameter = type(tensor) is torch.nn.Parameter
    return rebuild_tensor, (
        PickleBuffer(data),
        dtype,
        tuple(tensor.shape),
        "cpu" if home else str(tensor.device),
        tensor.requires_grad,
        parameter,
    )


def rebuild_tensor(
    data: Any, dtype: str, shape: tuple[int, ...], device: str, requires_grad: bool, parameter: bool
) -> Any:
    """Make the tensor again, in memory of its own, on its device if this process has it and else on the CPU."""
    torch = importlib.import_module("torch")
    own = data if isinstance(data, bytearray) else bytearray(data)
    kind = getattr(torch, dtype)
    tensor = torch.frombuffer(own, dtype=kind).view(shape) if own else torch.empty(shape, dtype=kind, device="cpu")
    if device != "cpu":
        tensor = _moved(tensor, device)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def _moved(tensor: Any, device: str) -> Any:
    try:
        return tensor.to(device)
    except (RuntimeError, AssertionError, NotImplementedError):  # no such device here, or torch built without it
        return tensor


PACKED = 1 << 16
"""Bytes up to which a tensor travels packed together with others."""

_PACKABLE = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "bool")

Run = tuple[str, tuple[int, ...], int]
"""In a pack: the dtype and the shape of tensors that follow each other, and how many they are."""


MANY = 16
"""So many tensors in a list are looked at together."""

Place = tuple[int, int]
"""In a pack: the numbers of the tensors of a list, from the first to behind the last."""

_KIND = operator.attrgetter("dtype", "layout", "device", "requires_grad")
_SHAPE = operator.attrgetter("shape")


class Packer:
    """Collects small tensors, of which a block may keep a thousand: they travel as one buffer for each dtype.

    Those on a GPU are joined there, and copied at once.
    """

    def __init__(self) -> None:
        torch = self._torch = sys.modules.get("torch")
        self._kind = getattr(torch, "Tensor", None)
        self._strided = getattr(torch, "strided", None)
        self._dtypes = () if self._kind is None else {getattr(torch, name) for name in _PACKABLE}
        self._places: dict[int, int] = {}
        self._lists: dict[int, tuple[list[Any], Place]] = {}
        """The lists are kept as well: one that pickling has made would leave its id to another."""
        self._runs: list[tuple[Any, tuple[int, ...], Any, list[Any]]] = []

    def take(self, tensor: Any) -> int | None:
        """The number of a tensor in the pack, or ``None`` if it is to travel by itself."""
        # Asked for every object of a value, so the order of these questions is that of their cost.
        if type(tensor) is not self._kind:
            return None
        place = self._places.get(id(tensor))
        if place is not None:
            return place
        dtype = tensor.dtype
        if dtype not in self._dtypes or not (tensor.is_cpu or tensor.is_cuda) or tensor.requires_grad:
            return None
        if tensor.layout is not self._strided or tensor.nbytes > PACKED:
            return None
        shape, device = tensor.shape, tensor.device
        if not self._runs or self._runs[-1][0] is not dtype or self._runs[-1][1:3] != (shape, device):
            self._runs.append((dtype, shape, device, []))
        self._runs[-1][3].append(tensor)
        place = self._places[id(tensor)] = len(self._places)
        return place

    def take_list(self, values: list[Any]) -> Place | None:
        """Where the tensors of a list are in the pack, or ``None`` if it is to be looked at item by item.

        A block that keeps a row of each layer at each step has a thousand of them in one.
        """
        if len(values) < MANY or set(map(type, values)) != {self._kind}:
            return None
        known = self._lists.get(id(values))
        if known is not None:
            return known[1]
        kinds = set(map(_KIND, values))
        dtype, layout, device, requires_grad = kinds.pop()
        if kinds or dtype not in self._dtypes or layout is not self._strided or requires_grad:
            return None
        if device.type not in ("cpu", "cuda"):
            return None
        runs = [(dtype, shape, device, list(alike)) for shape, alike in itertools.groupby(values, _SHAPE)]
        if any(alike[0].nbytes > PACKED for *_, alike in runs):
            return None
        ids = set(map(id, values))
        if len(ids) < len(values) or not ids.isdisjoint(self._places):
            return None
        start = len(self._places)
        self._places.update(zip(map(id, values), itertools.count(start), strict=False))
        self._runs += runs
        place = start, start + len(values)
        self._lists[id(values)] = values, place
        return place

    def close(self) -> tuple[list[Run], list[PickleBuffer]]:
        """What was packed, in order, and its memory: a buffer for each dtype, in the order in which they appear."""
        flat: dict[Any, list[Any]] = {}
        runs: list[Run] = []
        for dtype, shape, _, tensors in self._runs:
            assert self._torch is not None
            # Along a dimension that is there, joining is much cheaper than along a new one.
            joined = self._torch.cat(tensors) if shape else self._torch.stack(tensors)
            flat.setdefault(dtype, []).append(joined.reshape(-1))
            runs.append((str(dtype).removeprefix("torch."), tuple(shape), len(tensors)))
        buffers = []
        for parts in flat.values():
            assert self._torch is not None
            if len({part.device for part in parts}) > 1:
                parts = [part.cpu() for part in parts]
            whole = parts[0] if len(parts) == 1 else self._torch.cat(parts)
            buffers.append(PickleBuffer(whole.cpu().view(self._torch.uint8).numpy()))
        return runs, buffers


def unpack(runs: list[Run], buffers: Iterator[Any]) -> list[Any]:
    """The tensors of a pack in order, each in memory of its own.

    Args:
        runs: what it holds.
        buffers: yields its memory, one buffer for each dtype.
    """
    if not runs:
        return []
    torch = importlib.import_module("torch")
    flat: dict[str, Any] = {}
    used: dict[str, int] = {}
    tensors: list[Any] = []
    for name, shape, count in runs:
        if name not in flat:
            data = next(buffers)
            kind = getattr(torch, name)
            # What is read-only is copied first, since torch warns of tensors in it.
            own = bytearray(data) if memoryview(data).readonly else data
            flat[name] = torch.frombuffer(own, dtype=kind) if len(own) else torch.empty(0, dtype=kind, device="cpu")
        start = used.get(name, 0)
        stop = used[name] = start + count * math.prod(shape)
        tensors.extend(torch.unbind_copy(flat[name][start:stop].view(count, *shape), 0))
    return tensors
