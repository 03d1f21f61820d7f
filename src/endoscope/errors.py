"""Every error that endoscope raises of its own.

::

    EndoscopeError
    ├── TraceError                  the trace is refused; nothing was submitted
    │   ├── NoSourceError           the text of the block cannot be had
    │   ├── BlockSyntaxError        also SyntaxError: a statement that cannot stand in a block
    │   ├── SerializationError      also TypeError: a value from outside the block cannot travel
    │   ├── PromptError             also ValueError: not a prompt, an empty one, or one that can never run
    │   ├── SamplingError           also ValueError: an unknown sampling argument, or a wrong value of one
    │   └── UsageError              also RuntimeError: a trace used in a way that it cannot be used
    ├── EngineError                 the engine cannot be built, or cannot be used from here
    │   ├── ModeError               also ValueError: ``mode`` is neither "sync" nor "async"
    │   ├── ModelNotFoundError      also FileNotFoundError: no such model
    │   ├── VersionError            also ImportError: vLLM is missing, or is a version that is not supported
    │   ├── UnsupportedError        also NotImplementedError: a feature that cannot be traced
    │   ├── SecondEngineError       also RuntimeError: this process already has an engine of that kind
    │   ├── EngineArgumentError     also TypeError: an argument that vLLM's engine does not take
    │   ├── EngineClosedError       also RuntimeError: the model was closed
    │   └── EventLoopError          also RuntimeError: no event loop, or another one than the engine's
    └── BlockError                  also RuntimeError: raised inside a block; ends that block's request only
        ├── SiteError               a place in the model that a block cannot stop at
        │   ├── UnknownModuleError  also AttributeError: the model has no such module
        │   ├── OutOfOrderError     the pass has already left that site
        │   └── NeverRanError       the site is never visited: its module did not run, or was skipped
        ├── ReplacementError        also ValueError: a replacement that does not fit the site
        ├── MissingStateError       a module runs whose keys and values were left out before
        ├── StepTimeoutError        also TimeoutError: the block kept its turn for too long
        ├── SaveLimitError          also MemoryError: the block keeps more bytes than it may
        └── PreemptionError         the engine preempted a request whose block had changed values

Any other exception that a block raises reaches the caller as a class that is both
:class:`BlockError` and the class of the original.
"""

from __future__ import annotations

from typing import Any


class EndoscopeError(Exception):
    """The base of every error that endoscope raises of its own."""


class TraceError(EndoscopeError):
    """The trace is refused on the client's side; nothing was submitted."""


class NoSourceError(TraceError):
    """The text of the block cannot be had, so the block cannot be read."""


class BlockSyntaxError(TraceError, SyntaxError):
    """The block holds a statement that cannot stand in one, such as ``return`` or ``await``."""

    __str__ = Exception.__str__


class SerializationError(TraceError, TypeError):
    """A value that the block takes from outside cannot be sent to the engine."""


class PromptError(TraceError, ValueError):
    """The prompt is of a kind that vLLM does not take, is empty, or can never be scheduled."""


class SamplingError(TraceError, ValueError):
    """A sampling argument that vLLM does not know, or a value that it refuses."""


class UsageError(TraceError, RuntimeError):
    """A trace is used in a way that it cannot be used."""


class EngineError(EndoscopeError):
    """The engine cannot be built, or cannot be used from here."""


class ModeError(EngineError, ValueError):
    """``mode`` is neither ``"sync"`` nor ``"async"``."""


class ModelNotFoundError(EngineError, FileNotFoundError):
    """The model is neither a directory here nor to be had from a hub."""

    __str__ = Exception.__str__


class VersionError(EngineError, ImportError):
    """vLLM is not installed, or its version is not one that this release was seen to work with."""


class UnsupportedError(EngineError, NotImplementedError):
    """A feature of vLLM that cannot be traced is switched on, or a name that endoscope refuses."""


class SecondEngineError(EngineError, RuntimeError):
    """vLLM holds one in-process engine for each process, and this process already has it."""


class EngineArgumentError(EngineError, TypeError):
    """An argument that vLLM's engine does not take, or a value that it refuses."""


class EngineClosedError(EngineError, RuntimeError):
    """The model was closed; it does not start again."""


class EventLoopError(EngineError, RuntimeError):
    """There is no running event loop, or it is not the one that the engine lives in."""


class BlockError(EndoscopeError, RuntimeError):
    """An error raised inside a block. It ended that block's request and no other.

    Attributes:
        output: the finished ``RequestOutput`` of the request; ``output.saves`` holds what the
            block had saved before it failed. ``None`` until the request has ended.
        request: vLLM's id of the request, or ``None``.
    """

    output: Any = None
    request: str | None = None


class SiteError(BlockError):
    """A place in the model that the block cannot stop at."""


class UnknownModuleError(SiteError, AttributeError):
    """The model has no module of that name."""


class OutOfOrderError(SiteError):
    """The block asked for a site that the current pass has already left."""


class NeverRanError(SiteError):
    """The site is not visited: its module does not run in the step, or is skipped, or the request ended before."""


class ReplacementError(BlockError, ValueError):
    """A replacement does not fit its site in rows, width or dtype."""


class MissingStateError(BlockError):
    """A module with attention runs for a request that has skipped it before, and whose keys and values it lacks."""


class StepTimeoutError(BlockError, TimeoutError):
    """The block took longer from one handoff to the next than ``step_timeout`` allows."""

    __str__ = Exception.__str__


class SaveLimitError(BlockError, MemoryError):
    """The block keeps, or emits at once, more bytes than ``save_limit`` allows."""


class PreemptionError(BlockError):
    """The engine preempted a request whose block had changed the model's values, and these are lost."""
