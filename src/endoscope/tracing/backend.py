"""The base of every backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from endoscope.tracing.tracer import Tracer


class Backend:
    """Carries a trace to an engine, and its values home.

    A backend is called once, with the tracer, when the trace's ``with`` ends. The frames that wrote the blocks are
    alive during the call and only then, so whatever needs them (``tracer.bind``) happens in it.

    Example:
        >>> class Listing(Backend):
        ...     def __call__(self, tracer):
        ...         print([invoke.block.code.source.strip() for invoke in tracer.invokes])
        >>> with Tracer(Listing(), prompt="Hello"):
        ...     x = 1
        ['x = 1']
    """

    def __call__(self, tracer: Tracer) -> None:
        """Submit the trace's invokes: ``tracer.invokes``, each with its prompt, sampling arguments and block."""
        raise NotImplementedError(f"{type(self).__qualname__} does not say how to run a trace: define __call__(tracer)")
