"""Tensors as bytes and back, without importing torch where there are none."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
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


def reduce_tensor(tensor: Any) -> Reduced:
    """Reduce a tensor to its own elements: of a view, never what else its storage holds.

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
        str(tensor.device),
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

Runs = list[tuple[str, list[tuple[tuple[int, ...], int]]]]
"""What a pack holds: for each buffer its dtype, and how many tensors of which shape follow each other in it."""


class _Group:
    """The packed tensors of one dtype, as runs of equal shapes."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.count = 0
        self.runs: list[tuple[tuple[int, ...], list[Any]]] = []

    def add(self, tensor: Any) -> int:
        shape = tensor.shape
        if not self.runs or self.runs[-1][0] != shape:
            self.runs.append((shape, []))
        self.runs[-1][1].append(tensor)
        self.count += 1
        return (self.count - 1) * len(_PACKABLE) + self.number


class Packer:
    """Collects small tensors, of which a block may keep a thousand: they travel as one buffer for each dtype."""

    def __init__(self) -> None:
        torch = self._torch = sys.modules.get("torch")
        self._kind = getattr(torch, "Tensor", None)
        self._strided = getattr(torch, "strided", None)
        self._groups = {}
        if self._kind is not None:
            self._groups = {getattr(torch, name): _Group(number, name) for number, name in enumerate(_PACKABLE)}
        self._places: dict[int, int] = {}

    def take(self, tensor: Any) -> int | None:
        """The place of a tensor in the pack, or ``None`` if it is to travel by itself."""
        # Asked for every object of a value, so the order of these questions is that of their cost.
        if type(tensor) is not self._kind:
            return None
        place = self._places.get(id(tensor))
        if place is not None:
            return place
        group = self._groups.get(tensor.dtype)
        if group is None or not tensor.is_cpu or tensor.requires_grad or tensor.layout is not self._strided:
            return None
        if tensor.nbytes > PACKED:
            return None
        place = self._places[id(tensor)] = group.add(tensor)
        return place

    def close(self) -> tuple[Runs, list[PickleBuffer]]:
        """What was packed, and its memory."""
        runs: Runs = []
        buffers = []
        for group in self._groups.values():
            if group.count:
                assert self._torch is not None
                parts = [self._torch.stack(tensors).reshape(-1) for _, tensors in group.runs]
                flat = parts[0] if len(parts) == 1 else self._torch.cat(parts)
                buffers.append(PickleBuffer(flat.view(self._torch.uint8).numpy()))
                runs.append((group.name, [(tuple(shape), len(tensors)) for shape, tensors in group.runs]))
        return runs, buffers


class Pack:
    """The tensors of a pack where they have arrived, each in memory of its own.

    Args:
        runs: what it holds.
        buffers: its memory.
    """

    def __init__(self, runs: Runs, buffers: list[Any]) -> None:
        self._tensors: list[list[Any]] = [[] for _ in _PACKABLE]
        for (name, shapes), buffer in zip(runs, buffers, strict=True):
            self._tensors[_PACKABLE.index(name)] = _unpacked(name, shapes, buffer)

    def __getitem__(self, place: int) -> Any:
        index, number = divmod(place, len(_PACKABLE))
        return self._tensors[number][index]


def _unpacked(name: str, shapes: list[tuple[tuple[int, ...], int]], buffer: Any) -> list[Any]:
    torch = importlib.import_module("torch")
    kind = getattr(torch, name)
    own = bytearray(buffer)
    flat = torch.frombuffer(own, dtype=kind) if own else torch.empty(0, dtype=kind, device="cpu")
    tensors: list[Any] = []
    start = 0
    for shape, count in shapes:
        stop = start + count * math.prod(shape)
        tensors.extend([each.clone() for each in flat[start:stop].view(count, *shape).unbind(0)])
        start = stop
    return tensors
