"""What torch keeps on a thread, kept apart for the engine and for each probe that has the turn."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import get_autocast_dtype, get_default_dtype, is_autocast_enabled, is_grad_enabled, is_inference_mode_enabled
from torch._C import (
    _get_dispatch_stack_at,
    _get_function_stack_at,
    _InferenceMode,
    _is_any_autocast_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
    _pop_torch_dispatch_stack,
    _pop_torch_function_stack,
    _push_on_torch_dispatch_stack,
    _push_on_torch_function_stack,
    _set_grad_enabled,
)
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils import _device

AUTOCAST = ("cpu", "cuda")
"""The kinds of device whose autocast is kept apart."""


class Modes(NamedTuple):
    """The function and dispatch modes that are entered, outermost first, and what keeps a default device."""

    functions: tuple[Any, ...] = ()
    dispatches: tuple[Any, ...] = ()
    device: torch.device | None = None
    context: Any = None

    @classmethod
    def now(cls) -> Modes:
        """Those that are entered now."""
        return cls(
            tuple(map(_get_function_stack_at, range(_len_torch_function_stack()))),
            tuple(map(_get_dispatch_stack_at, range(_len_torch_dispatch_stack()))),
            _device.CURRENT_DEVICE,
            getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        )

    def put(self) -> None:
        """Enter these in the place of those that are entered now."""
        while count := _len_torch_dispatch_stack():
            # A mode of torch's own (fake tensors, say) has a place of its own, which is part of the count.
            _pop_torch_dispatch_stack(getattr(_get_dispatch_stack_at(count - 1), "_mode_key", None))
        while _len_torch_function_stack():
            _pop_torch_function_stack()
        for mode in self.functions:
            _push_on_torch_function_stack(mode)
        for mode in self.dispatches:
            _push_on_torch_dispatch_stack(mode)
        _device.CURRENT_DEVICE = self.device
        torch._GLOBAL_DEVICE_CONTEXT.device_context = self.context


_NO_MODES = Modes()


@contextmanager
def no_modes() -> Iterator[None]:
    """What is computed within belongs to none of the modes and function transforms that the block is in."""
    modes = Modes.now()
    _NO_MODES.put()
    try:
        with temporarily_clear_interpreter_stack():
            yield
    finally:
        modes.put()


class Autocast(NamedTuple):
    """For each kind of device, whether it is on and what it casts to."""

    kinds: tuple[tuple[bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Autocast:
        """As it is now."""
        return cls(tuple((is_autocast_enabled(kind), get_autocast_dtype(kind)) for kind in AUTOCAST))

    def put(self) -> None:
        """Set it so."""
        for kind, (enabled, dtype) in zip(AUTOCAST, self.kinds, strict=True):
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)


class TorchState(NamedTuple):
    """The modes and defaults that a block may change and that must not leak out of it.

    ``dtype``, ``autocast`` and ``modes`` are ``None`` where the block has what the thread has.
    """

    grad: bool = False
    inference: bool = False
    dtype: torch.dtype | None = None
    autocast: Autocast | None = None
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
    """What the thread itself has of all this, while no block has the turn; ``None`` is the usual state."""

    dtype: torch.dtype
    autocast: Autocast
    casts: bool
    """Whether any autocast is on."""
    modes: Modes | None

    @classmethod
    def now(cls) -> Own:
        """As it is now."""
        modes = _len_torch_function_stack() or _len_torch_dispatch_stack()
        return cls(get_default_dtype(), Autocast.now(), _is_any_autocast_enabled(), Modes.now() if modes else None)


def untouched(own: Own) -> bool:
    """Whether a block that began :data:`FRESH` has left all of it as it was."""
    return (
        not is_grad_enabled()
        and not is_inference_mode_enabled()
        and get_default_dtype() is own.dtype
        and (Autocast.now() == own.autocast if own.casts else not _is_any_autocast_enabled())
        and (
            Modes.now() == own.modes
            if own.modes is not None
            else not _len_torch_function_stack() and not _len_torch_dispatch_stack()
        )
    )


def taken(own: Own) -> TorchState:
    """What a block has made of it, with the thread's own brought back, all but the inference mode."""
    grad, inference = is_grad_enabled(), is_inference_mode_enabled()
    dtype = autocast = modes = None
    if (found := get_default_dtype()) is not own.dtype:
        dtype = found
        torch.set_default_dtype(own.dtype)
    if (casts := Autocast.now()) != own.autocast:
        autocast = casts
        own.autocast.put()
    if (entered := Modes.now()) != (own.modes or _NO_MODES):
        modes = entered
        (own.modes or _NO_MODES).put()
    return TorchState(grad, inference, dtype, autocast, modes)


def resume(state: TorchState, own: Own, run: Any, argument: Any) -> TorchState:
    """Call ``run(argument)`` with a block's state, and bring back the thread's own.

    Returns:
        The block's state afterwards.
    """
    # The guard also brings back whatever the block does to the gradient and inference modes. Autocast goes with
    # inference mode in it, so that is read before the guard is left.
    with _InferenceMode(state.inference):
        _set_grad_enabled(state.grad)
        if state.dtype is not None:
            torch.set_default_dtype(state.dtype)
        if state.autocast is not None:
            state.autocast.put()
        if state.modes is not None:
            state.modes.put()
        run(argument)
        return taken(own)


class Draws:
    """The states of torch's global random number generators: of the processor, and of the current CUDA device."""

    __slots__ = ("_states",)

    def __init__(self, states: list[tuple[torch.Generator, torch.Tensor]]) -> None:
        self._states = states

    @classmethod
    def now(cls) -> Draws:
        """As they are now."""
        return cls([(generator, generator.get_state()) for generator in _generators()])

    @classmethod
    def seeded(cls) -> Draws:
        """Of a new seed, different for each call."""
        states = []
        for each in _generators():
            new = torch.Generator(each.device)
            new.manual_seed(secrets.randbits(63))
            states.append((each, new.get_state()))
        return cls(states)

    def put(self) -> None:
        """Set them so."""
        for generator, state in self._states:
            generator.set_state(state)


def _generators() -> list[torch.Generator]:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.default_generator, torch.cuda.default_generators[torch.cuda.current_device()]]
    return [torch.default_generator]
