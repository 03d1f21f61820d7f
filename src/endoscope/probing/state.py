"""What torch keeps on a thread, kept apart for the engine and for each probe that has the turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._C import (
    _InferenceMode,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _set_grad_enabled,
)


class TorchState(NamedTuple):
    """The modes and defaults that a block may change and that must not leak out of it.

    ``modes`` are the function modes that the block has entered, such as the one that
    ``torch.set_default_device`` sets.
    """

    grad: bool = False
    inference: bool = False
    dtype: torch.dtype | None = None
    autocast: bool = False
    modes: tuple[Any, ...] = ()


FRESH = TorchState()
"""What a block starts with: no gradients, and tensors that count their versions."""


@contextmanager
def tracked() -> Iterator[None]:
    """Tensors made in here have version counters, as those made in inference mode have not."""
    with _InferenceMode(False):
        _set_grad_enabled(False)
        yield


def switch(state: TorchState, run: Any, *args: Any) -> TorchState:
    """Call ``run(*args)`` with a block's state, then bring back the thread's own.

    Returns:
        The block's state afterwards, to be given to the next call.
    """
    dtype, autocast, depth = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), _len_torch_function_stack()
    # The guard also brings back whatever the block does to the gradient and inference modes.
    with _InferenceMode(state.inference):
        _set_grad_enabled(state.grad)
        if state is not FRESH:
            _apply(state, dtype)
        run(*args)
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    found = torch.get_default_dtype()
    found_autocast = torch.is_autocast_enabled("cpu")
    if (
        found == dtype
        and found_autocast == autocast
        and not (grad or inference)
        and _len_torch_function_stack() == depth
    ):
        return FRESH
    modes = []
    while _len_torch_function_stack() > depth:
        modes.append(_pop_torch_function_stack())
    torch.set_default_dtype(dtype)
    torch.set_autocast_enabled("cpu", autocast)
    return TorchState(grad, inference, found, found_autocast, tuple(reversed(modes)))


def _apply(state: TorchState, dtype: torch.dtype) -> None:
    torch.set_default_dtype(state.dtype or dtype)
    torch.set_autocast_enabled("cpu", state.autocast)
    for mode in state.modes:
        _push_on_torch_function_stack(mode)
