"""What torch keeps on a thread, kept apart for the engine and for each probe that has the turn."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import get_autocast_dtype, get_default_dtype, is_autocast_enabled, is_grad_enabled, is_inference_mode_enabled
from torch._C import (
    _get_function_stack_at,
    _InferenceMode,
    _is_any_autocast_enabled,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _set_grad_enabled,
)
from torch.utils import _device

AUTOCAST = ("cpu", "cuda")
"""The kinds of device whose autocast is kept apart."""


class Modes(NamedTuple):
    """The function modes that are entered, outermost first, and what ``torch.set_default_device`` keeps beside them."""

    stack: tuple[Any, ...] = ()
    device: torch.device | None = None
    context: Any = None


class TorchState(NamedTuple):
    """The modes and defaults that a block may change and that must not leak out of it.

    ``dtype``, ``autocast`` and ``modes`` are ``None`` where the block has what the thread has.
    """

    grad: bool = False
    inference: bool = False
    dtype: torch.dtype | None = None
    autocast: tuple[tuple[bool, torch.dtype], ...] | None = None
    modes: Modes | None = None


FRESH = TorchState()
"""What a block starts with: no gradients, and tensors that count their versions."""


class tracked:
    """``with tracked():`` makes tensors that have version counters, as those made in inference mode have not."""

    __slots__ = ("_guard",)

    def __enter__(self) -> None:
        self._guard: Any = _InferenceMode(False)
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        _set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        # The guard also brings back whether gradients are on.
        self._guard.__exit__(*error)


class Own(NamedTuple):
    """What the thread itself has of all this, while no block has the turn."""

    dtype: torch.dtype
    autocast: tuple[tuple[bool, torch.dtype], ...] | None
    cpu: torch.dtype
    cuda: torch.dtype
    modes: Modes | None


def own() -> Own:
    """The thread's own state, as it is now."""
    return Own(
        get_default_dtype(),
        _autocast() if _is_any_autocast_enabled() else None,
        # While autocast is off, what it would cast to still counts: the next autocast takes it as its default.
        get_autocast_dtype("cpu"),
        get_autocast_dtype("cuda"),
        # Without a function mode there is no default device either.
        _modes() if _len_torch_function_stack() else None,
    )


def switch(state: TorchState, thread: Own, guards: list[Any] | None, run: Any, *args: Any) -> TorchState:
    """Call ``run(*args)`` with a block's state, then bring back the thread's own.

    Args:
        state: the block's.
        thread: what :func:`own` found before the block's turn.
        guards: given inside of :class:`tracked`, where a block that begins with what is there needs no guard of its
            own; receives one if it leaves inference mode on, to be left by the caller.
        run: gives the block the turn.

    Returns:
        The block's state afterwards, to be given to the next call.
    """
    dtype, autocast, cpu, cuda, modes = thread
    if guards is not None and state is FRESH:
        run(*args)
        grad, inference = is_grad_enabled(), is_inference_mode_enabled()
        found_autocast = _autocast() if autocast is not None or _is_any_autocast_enabled() else None
        if inference:
            guards.append(_InferenceMode(False))
            guards[-1].__enter__()
        if grad or inference:
            _set_grad_enabled(False)
    else:
        # The guard also brings back whatever the block does to the gradient and inference modes.
        with _InferenceMode(state.inference):
            _set_grad_enabled(state.grad)
            if state.dtype is not None:
                torch.set_default_dtype(state.dtype)
            if state.autocast is not None:
                _set_autocast(state.autocast)
            if state.modes is not None:
                _set_modes(state.modes)
            run(*args)
            grad, inference = is_grad_enabled(), is_inference_mode_enabled()
            # Read in here: the guard turns autocast off again, but leaves what it casts to.
            found_autocast = _autocast() if autocast is not None or _is_any_autocast_enabled() else None
    found = get_default_dtype()
    found_modes = None
    if found_autocast is not None:
        before = autocast or ((False, cpu), (False, cuda))
        if found_autocast == before:
            found_autocast = None
        else:
            _set_autocast(before)
    if modes is not None or _len_torch_function_stack():
        found_modes = _modes()
        if found_modes == (modes or Modes()):
            found_modes = None
        else:
            _set_modes(modes or Modes())
    if found == dtype:
        if not grad and not inference and found_autocast is None and found_modes is None:
            return FRESH
        return TorchState(grad, inference, None, found_autocast, found_modes)
    torch.set_default_dtype(dtype)
    return TorchState(grad, inference, found, found_autocast, found_modes)


def _autocast() -> tuple[tuple[bool, torch.dtype], ...]:
    return tuple((is_autocast_enabled(kind), get_autocast_dtype(kind)) for kind in AUTOCAST)


def _set_autocast(autocast: tuple[tuple[bool, torch.dtype], ...]) -> None:
    for kind, (enabled, dtype) in zip(AUTOCAST, autocast, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _modes() -> Modes:
    stack = tuple(_get_function_stack_at(index) for index in range(_len_torch_function_stack()))
    return Modes(stack, _device.CURRENT_DEVICE, getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None))


def _set_modes(modes: Modes) -> None:
    while _len_torch_function_stack():
        _pop_torch_function_stack()
    for mode in modes.stack:
        _push_on_torch_function_stack(mode)
    _device.CURRENT_DEVICE = modes.device
    torch._GLOBAL_DEVICE_CONTEXT.device_context = modes.context
