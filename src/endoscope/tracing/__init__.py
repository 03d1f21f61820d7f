"""From a ``with`` to a block that can be sent to an engine.

The way of a trace: :class:`Tracer` (``tracer``) is entered; ``source`` finds the ``with`` in the user's text and
``skip`` keeps its body from running; on exit ``block`` reads the text and, with ``names`` and ``serialize``, the values
that it takes from outside; the :class:`Backend` gets it all. This room knows nothing of models or engines.
"""

from __future__ import annotations

from endoscope.tracing.backend import Backend
from endoscope.tracing.tracer import Invoke, Tracer

__all__ = ["Backend", "Invoke", "Tracer"]
