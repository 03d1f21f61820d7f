"""Tensors as bytes and back, without importing torch where there are none."""

from __future__ import annotations

import importlib
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
    size = memoryview(data).nbytes
    tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
    if size:
        memoryview(tensor.numpy())[:] = memoryview(data).cast("B")
    tensor = tensor.view(getattr(torch, dtype)).reshape(shape)
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
