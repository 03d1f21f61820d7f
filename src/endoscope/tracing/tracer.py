"""A trace as its user writes it: ``with model.trace(...) as tracer`` and ``with tracer.invoke(...)`` inside it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any

from endoscope.errors import SerializationError, UnsupportedError, UsageError
from endoscope.tracing.backend import Backend
from endoscope.tracing.block import Block
from endoscope.tracing.capture import Capture
from endoscope.tracing.clean import clean
from endoscope.tracing.names import bind
from endoscope.tracing.serialize import Referenced

NOTHING: Any = object()
"""In place of a prompt: the trace has none of its own, and its body makes invokes."""

_IN_BLOCKS = frozenset({"iter", "all", "next", "stop", "cache", "emit"})


def _no_references() -> Mapping[int, tuple[str, ...]]:
    return {}


class Invoke(Referenced):
    """One prompt of a trace, with the block that runs for it.

    Used as ``with tracer.invoke(prompt):``; the body of that ``with`` is the block.

    Attributes:
        prompt: the prompt as the user gave it.
        sampling: the sampling arguments of the trace, with those of the invoke over them.
        block: what runs for this prompt; set when its ``with`` ends.
        index: the number of the invoke in its trace, from 0.
    """

    def __init__(self, tracer: Tracer, prompt: Any, sampling: Mapping[str, Any]) -> None:
        self.prompt = prompt
        self.sampling = dict(sampling)
        self.block: Block | None = None
        self.index = -1
        self._tracer: Tracer | None = tracer  # until its exit, so that the two do not keep each other alive
        self._capture: Capture | None = None

    def reference(self) -> tuple[str, ...]:
        """Return the key of the tracer: inside a block an invoke is its tracer."""
        return ("tracer",)

    def __enter__(self) -> Invoke:
        try:
            if self._tracer is None:
                raise UsageError("This invoke belongs in the body of its trace, and that trace has ended.")
            self._tracer._enter_invoke(self, sys._getframe(1))
        except BaseException as error:
            clean(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        try:
            return self._tracer is not None and self._tracer._exit_invoke(self, error)
        except BaseException as failure:
            clean(failure)
            raise


class Tracer(Referenced):
    """Turns the body of a ``with`` into blocks and hands them to a backend when the ``with`` ends.

    With a prompt, the body is the block of a single invoke and does not run here. Without one, the body runs here as
    ordinary Python, and each ``with tracer.invoke(prompt):`` in it is an invoke with a block of its own.

    Args:
        backend: called with the tracer when the ``with`` ends, unless its body raised.
        prompt: the prompt; ``NOTHING`` for a trace whose body makes invokes.
        sampling: sampling arguments for every invoke.
        references: asked on exit for the objects that travel as references: ``id(object)`` to key.

    Attributes:
        backend: the backend.
        invokes: the trace's invokes, in the order in which they were entered.
        saves: what came home under the names that the blocks saved; filled by a synchronous backend.
        result: the finished output, or outputs; set by a synchronous backend.
        file: the file that the trace stands in.
        line: the line of its ``with``.
    """

    def __init__(
        self,
        backend: Backend,
        prompt: Any = NOTHING,
        sampling: Mapping[str, Any] | None = None,
        references: Callable[[], Mapping[int, tuple[str, ...]]] = _no_references,
    ) -> None:
        self.backend = backend
        self.invokes: list[Invoke] = []
        self.saves: dict[str, Any] = {}
        self.result: Any = None
        self.file = "<unknown>"
        self.line = 0
        self._prompt = prompt
        self._sampling = dict(sampling or {})
        self._references = references
        self._state = "new"  # then "open", while the body runs; "exit", while the backend does; "done"
        self._made: list[Invoke] = []  # by invoke(), entered or not
        self._current: Invoke | None = None

    def reference(self) -> tuple[str, ...]:
        """Return the key under which a block finds its own tracer in the engine.

        Raises:
            SerializationError: if the trace has ended: a block has a tracer of its own.
        """
        if self._state == "done":
            raise SerializationError(
                f"it is the tracer of another trace, the one at {self._where()}, which has ended. Take what you need "
                "of it (tracer.result, tracer.saves) before the with."
            )
        return ("tracer",)

    @property
    def has_invokes(self) -> bool:
        """Whether the trace has no prompt of its own, and its body makes invokes."""
        return self._prompt is NOTHING

    def invoke(self, prompt: Any, **sampling: Any) -> Invoke:
        """Return one more prompt of the trace, to be entered with ``with``; that body is its block.

        Args:
            prompt: the prompt.
            **sampling: sampling arguments of this prompt alone, over those of the trace.

        Raises:
            UsageError: the trace has a prompt of its own, or is not open, or another invoke is.
        """
        try:
            self._check_invoke("tracer.invoke(...)")
        except UsageError as error:
            clean(error)
            raise
        made = Invoke(self, prompt, {**self._sampling, **sampling})
        self._made.append(made)
        return made

    def bind(self, values: Mapping[str, Any], invoke: Invoke | None = None) -> None:
        """Bind names in the frame that wrote an invoke's block, as assignments there would.

        Only for a backend, and only while it is called: later the frames are gone. A name that is no variable of the
        frame is ignored.

        Args:
            values: the names and their values.
            invoke: whose frame; by default the frame of every invoke of the trace, each once.
        """
        if self._state != "exit":
            raise UsageError(
                f"{self._where()}: names can be bound only while the trace's with is being left, and this trace is "
                f"{self._state!r}. Call bind from the backend's __call__."
            )
        seen: set[tuple[int, frozenset[str]]] = set()
        for each in self.invokes if invoke is None else [invoke]:
            assert each._capture is not None
            assert each.block is not None
            global_names = frozenset(name for name, is_global in each.block.binds.items() if is_global)
            frame = each._capture.frame
            if (id(frame), global_names) not in seen:
                seen.add((id(frame), global_names))
                bind(frame, values, global_names)

    def __enter__(self) -> Tracer:
        try:
            self._enter(sys._getframe(1))
        except BaseException as error:
            clean(error)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        try:
            return self._exit(error)
        except BaseException as failure:
            clean(failure)
            raise

    def __getattr__(self, name: str) -> Any:
        if name == "barrier":
            raise UnsupportedError(
                "tracer.barrier is not supported: the engine schedules every request independently, so one cannot wait "
                "for another inside a forward. Put what needs both values after the with, or in a second trace."
            )
        if name in _IN_BLOCKS:
            raise UsageError(
                f"{self._where()}: tracer.{name} means something only inside a block, where the model runs, and it was "
                "used outside of one. Use it in the body of `with model.trace(prompt)` or `with tracer.invoke(prompt)`."
            )
        raise AttributeError(f"{type(self).__qualname__!r} object has no attribute {name!r}", name=name, obj=self)

    # The way of a trace: enter, invokes, exit

    def _enter(self, frame: FrameType) -> None:
        if self._state != "new":
            raise UsageError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: this trace was already entered at {self._where()}, and "
                "a trace is used once. Call model.trace(...) again for another."
            )
        self.file, self.line = frame.f_code.co_filename, frame.f_lineno
        if self._prompt is NOTHING:
            self._state = "open"
            return
        invoke = Invoke(self, self._prompt, self._sampling)
        self._open(invoke, frame, self)
        self.line = invoke._capture.place.line if invoke._capture else self.line
        self._state = "open"

    def _exit(self, error: BaseException | None) -> bool:
        try:
            if self._current is not None and self._prompt is not NOTHING:
                if not self._close(self._current, error):
                    return False
            elif error is not None:
                return False
            self._check_invokes()
            self._state = "exit"
            self.backend(self)
            return True
        finally:
            self._state = "done"
            self._current = None
            for invoke in (*self.invokes, *self._made):
                invoke._capture = None  # it holds the frame
                invoke._tracer = None
            self._made.clear()

    def _enter_invoke(self, invoke: Invoke, frame: FrameType) -> None:
        self._check_invoke("An invoke")
        if invoke.index >= 0:
            raise UsageError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: this invoke was already entered, and an invoke is used "
                "once. Call tracer.invoke(...) again for another."
            )
        self._open(invoke, frame, invoke)

    def _exit_invoke(self, invoke: Invoke, error: BaseException | None) -> bool:
        try:
            return self._close(invoke, error)
        finally:
            self._current = None

    def _open(self, invoke: Invoke, frame: FrameType, value: object) -> None:
        capture = Capture(frame, value)
        invoke.index = len(self.invokes)
        self.invokes.append(invoke)
        invoke._capture = capture
        self._current = invoke
        capture.start()

    def _close(self, invoke: Invoke, error: BaseException | None) -> bool:
        assert invoke._capture is not None
        invoke.block = invoke._capture.finish(error, self._references())
        return invoke.block is not None

    # Misuse

    def _where(self) -> str:
        return f"{self.file}:{self.line}"

    def _check_invoke(self, what: str) -> None:
        if self._prompt is not NOTHING:
            raise UsageError(
                f"{self._where()}: {what} cannot stand in a trace that has a prompt of its own. Write `with "
                "model.trace() as tracer:` without a prompt, and one `with tracer.invoke(prompt):` for each prompt."
            )
        if self._state != "open":
            state = "was not entered yet" if self._state == "new" else "has ended"
            raise UsageError(
                f"{self._where()}: {what} belongs in the body of its trace, and this trace {state}. Write it inside "
                "`with model.trace() as tracer:`."
            )
        if self._current is not None:
            raise UsageError(
                f"{self._where()}: {what} cannot stand inside another invoke. Write the invokes one after the other."
            )

    def _check_invokes(self) -> None:
        if len(self._made) > len(self.invokes) and self._prompt is NOTHING:
            raise UsageError(
                f"{self._where()}: tracer.invoke(...) was called {len(self._made)} times and entered "
                f"{len(self.invokes)} times. Every invoke needs a with of its own: `with tracer.invoke(prompt):`."
            )
        if not self.invokes:
            raise UsageError(
                f"{self._where()}: the trace has neither a prompt nor an invoke, so there is nothing to run. Write "
                "`with model.trace(prompt):`, or `with tracer.invoke(prompt):` in its body."
            )
