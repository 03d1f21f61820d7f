"""A probe: one block running for one request, in turns with the model on the model's thread."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import GreenletExit, getcurrent, greenlet

from endoscope.errors import NeverRanError, ReplacementError, UsageError
from endoscope.probing import state
from endoscope.probing.rows import NOBODYS, Span, matched, tensors
from endoscope.probing.saves import Kept, named, save_method
from endoscope.probing.site import Site

if TYPE_CHECKING:
    import torch

    from endoscope.probing.handoff import Handoffs
    from endoscope.probing.site import Station

NOTHING: Any = object()


class StopBlock(BaseException):
    """Raised by ``tracer.stop()``: ends the block, and its request, from any depth of calls and loops."""


class Ended:
    """Handed to a probe that waits for the next step of a request that has none."""


ENDED = Ended()


class Probe(greenlet):
    """One block, running for one sequence of one request.

    The probe is a greenlet on the thread that runs the model. It has the turn from a handoff until it
    parks at its next site; nothing else runs meanwhile, so no lock is needed.

    Args:
        code: the compiled block.
        namespace: the block's outside values by name; the block's own names are added to it.
        host: where the probe parks.
        request: vLLM's id of the request, for messages.
        relay: called with ``(stream, text)`` for what the block prints, and with ``("warning", ...)``.
    """

    def __init__(
        self,
        code: CodeType,
        namespace: dict[str, Any],
        host: Handoffs,
        request: str = "",
        relay: Callable[[str, Any], None] | None = None,
    ) -> None:
        super().__init__(self._deep)
        self.code = code
        self.namespace = namespace
        self.outside: dict[str, Any] = {}
        """The namespace as the block found it."""
        self.host = host
        self.request = request
        self.output = Relay(relay, "stdout") if relay else None
        self.errors = Relay(relay, "stderr") if relay else None
        self.relay = relay
        self.step = 0
        """The generated step that the block is in: 0 for the pass over the prompt."""
        self.span = Span(0, 0, 0)
        self.position = -1
        self.site: Site | None = None
        """Where the probe is parked; ``None`` while it has the turn."""
        self.last: Site | None = None
        """The site where the probe stopped last."""
        self.holds = False
        """Whether that visit is still under way."""
        self.in_step = False
        self.samples = True
        """Whether the step makes a token for the request."""
        self.value: Any = None
        self.shown: Any = None
        """What was handed over at that visit, whatever was assigned since."""
        self.fixed: list[torch.Tensor] = []
        """Those of its tensors whose rows belong to no request."""
        self.replacement: Any = NOTHING
        self.kept: list[Kept] = []
        self.edited = False
        self.lacks: frozenset[Station] = frozenset()
        """The modules that have not kept everything of the request, since the block has skipped them."""
        self.finished = False
        self.stopped = False
        self.error: BaseException | None = None  # type: ignore[assignment]
        self.caches: list[Any] = []
        self._state = state.FRESH
        self._streams: tuple[Any, ...] | None = None

    # What runs in the probe's own greenlet.

    def _deep(self, _: Any = None) -> None:
        _deepened(self)

    def _block(self) -> None:
        namespace = self.namespace
        namespace["__builtins__"] = __builtins__
        namespace["__endoscope_save__"] = save_method
        namespace.setdefault("__name__", "__block__")
        self.outside = dict(namespace)
        try:
            exec(self.code, namespace)
        except StopBlock:
            self.stopped = True
        except GreenletExit:
            pass
        except BaseException as error:
            self.error = error

    def take(self, site: Site) -> Any:
        """Park until the pass comes to the site; returns the request's part of its value.

        Within one visit the same object is returned at every call.
        """
        if self.last is site and self.holds:
            return self.value
        self.host.check(self, site)
        value = self.park(site)
        self.last, self.holds, self.value, self.shown = site, True, value, value
        return value

    def park(self, site: Site) -> Any:
        """Give the turn back until somebody hands the probe a value for this site."""
        if self.stopped:  # and the block has caught what tracer.stop() raised, and goes on
            raise StopBlock
        self.site = site
        self.holds = False
        self.host.wanted(self, site)
        parent = self.parent
        assert parent is not None
        return parent.switch()

    def replace(self, site: Site, value: Any) -> None:
        """Put a value in the place of the site's, for this request's rows.

        Raises:
            ReplacementError: if the value does not fit in structure, shape or dtype.
        """
        self.take(site)
        shown = self.shown
        rows = matched(site.name, shown, value)
        site.check(rows)
        for new, old in zip(rows, tensors(shown), strict=True):
            if new is not old and any(old is part for part in self.fixed):
                raise ReplacementError(f"{site.name}: {NOBODYS.format(tuple(old.shape))}")
        # A number is read back as the tensor that it becomes.
        self.value = self.replacement = value if isinstance(value, (tuple, list, dict)) else rows[0] if rows else value

    def keep(self, text: str, value: Any, names: tuple[str, ...] = ()) -> None:
        """Mark a value to be sent home."""
        self.kept.append(Kept(text, value, names))

    def next_step(self) -> bool:
        """Park until the request's next step begins; ``False`` if it has none."""
        if self.finished:
            return False
        return self.park(self.host.next_step) is not ENDED

    # What runs on the model's side.

    def turn(self, value: Any = None, throw: BaseException | None = None, engine: Engine | None = None) -> None:
        """Give the probe the turn, and take it back when it parks or ends.

        What the block prints and warns meanwhile goes to the relay, and what it changes of torch's
        modes and defaults is put aside until its next turn.

        Args:
            value: what the block has been waiting for.
            throw: what is raised in the block instead.
            engine: what the engine has of all that, if the caller has asked for it and brings it back itself.
        """
        current = getcurrent()
        if self.parent is not current:
            self.parent = current
        self.site = None
        self.replacement = NOTHING
        if throw is not None and not self and not self.dead:
            # A greenlet that was never started would raise it here.
            if not isinstance(throw, GreenletExit):
                self.error = throw
            throw = GreenletExit()
        run, argument = (self.switch, value) if throw is None else (self.throw, throw)
        streams, thread, guards = engine or Engine.now()
        if self.relay is None:
            self._state = state.switch(self._state, thread, guards, run, argument)
            return
        if self._streams is None:
            # Which warnings are shown is for the caller's filters to say, not for the engine's.
            every = [("always", None, Warning, None, 0)]
            self._streams = self.output, self.errors, self._warn, every, streams[-1]
        set_streams(self._streams)
        try:
            self._state = state.switch(self._state, thread, guards, run, argument)
        finally:
            self._streams = _streams()
            if engine is None:
                set_streams(streams)

    def _warn(
        self, message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        assert self.relay is not None
        self.relay("warning", (str(message), category, filename, lineno))

    def fail(self, error: BaseException) -> None:
        """Raise an error in the block, at the site where it is parked."""
        self.leave()
        self.turn(throw=error)

    def leave(self) -> None:
        """Take the probe off the site where it is parked."""
        site = self.site
        if site is not None and self in site.waiting:
            site.waiting.remove(self)
        self.site = None

    def finish(self) -> None:
        """The request has ended: a loop over steps ends, and the code after it runs to the end of the block."""
        self.finished = True
        for _ in range(ENDINGS):
            if self.dead:
                return
            site = self.site
            self.leave()
            if site is self.host.next_step:
                self.turn(ENDED)
            else:
                name = "a site" if site is None else site.name
                self.turn(throw=NeverRanError(f"{name} was asked for, but the request ended in step {self.step}"))
        self.kill()

    def kill(self) -> None:
        """End the block wherever it is, without running the rest of it; ``finally`` clauses run."""
        self.finished = True
        self.leave()
        for _ in range(ENDINGS):
            if self.dead:
                return
            self.turn(throw=GreenletExit())
            self.leave()

    def saves(self) -> dict[str, Any]:
        """The saved values by name, as they are now."""
        return named(self.kept, self.namespace, self.outside)

    def clear(self) -> None:
        """Let go of everything that the block held."""
        self.namespace.clear()
        self.outside.clear()
        self.kept.clear()
        self.caches.clear()
        self.fixed = []
        self.lacks = frozenset()
        self._streams = None
        # Tracebacks hold the frames of the block, with the tensors in them and this probe itself.
        errors, seen = [self.error], set[int]()
        while errors:
            error = errors.pop()
            if error is not None and id(error) not in seen:
                seen.add(id(error))
                error.__traceback__ = None
                errors += [error.__cause__, error.__context__]
        self.value = self.shown = self.replacement = self.site = self.last = None


def _deepened_block() -> Callable[[Probe], None]:
    """Runs a probe's block below more C frames than torch looks at when it makes an error.

    A C++ error of torch takes down the 64 innermost return addresses of the stack. Behind the first frame of a
    greenlet there is whatever the model's side has on the stack by then, and to follow that as if it were frames can
    end the process. A staticmethod that is called costs one small C frame and nothing else.
    """
    run: Any = Probe._block
    for _ in range(BACKTRACE + 6):
        run = staticmethod(run)
    return run  # type: ignore[no-any-return]


BACKTRACE = 64
"""How many frames ``c10::get_lazy_backtrace`` takes."""

_deepened = _deepened_block()


def _streams() -> tuple[Any, ...]:
    """Where prints and warnings go, and which warnings are shown: a block may redirect them for a while."""
    return sys.stdout, sys.stderr, warnings.showwarning, warnings.filters, warnings._showwarnmsg_impl  # type: ignore[attr-defined]


class Engine(NamedTuple):
    """What the engine has while no block has the turn: where it prints and warns, and its torch state."""

    streams: tuple[Any, ...]
    thread: state.Own
    guards: list[Any] | None = None
    """For a visit to many: what blocks leave on, to be left at its end."""

    @classmethod
    def now(cls, guards: list[Any] | None = None) -> Engine:
        """As it is now."""
        return cls(_streams(), state.own(), guards)


def set_streams(streams: tuple[Any, ...]) -> None:
    """Print and warn there."""
    sys.stdout, sys.stderr, warnings.showwarning, warnings.filters, warnings._showwarnmsg_impl = streams  # type: ignore[attr-defined]


ENDINGS = 8
"""How often a block that goes on after its request has ended is told so before it is dropped."""


class Relay:
    """A text stream that hands whole lines on to the client."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, relay: Callable[[str, Any], None], stream: str) -> None:
        self._relay = relay
        self._stream = stream
        self._rest = ""

    def write(self, text: str) -> int:
        """Take text; what ends with a line break is sent at once."""
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._relay(self._stream, lines)
        return len(text)

    def flush(self) -> None:
        """Send what is left of a line without a line break."""
        rest, self._rest = self._rest, ""
        if rest:
            self._relay(self._stream, rest)

    def writelines(self, lines: Any) -> None:
        """Write each of the strings."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Never a terminal."""
        return False

    def writable(self) -> bool:
        """Always."""
        return True


def current_probe(what: str) -> Probe:
    """The probe that has the turn.

    Raises:
        UsageError: outside a block.
    """
    probe = getcurrent()
    if isinstance(probe, Probe):
        return probe
    raise UsageError(f"{what} has a value only inside a block, where the model runs")
