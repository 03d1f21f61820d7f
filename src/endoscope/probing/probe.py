"""A probe: one block running for one request, in turns with the model on the model's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from types import CodeType
from typing import TYPE_CHECKING, Any

from greenlet import GreenletExit, getcurrent, greenlet

from endoscope.errors import NeverRanError, ReplacementError, SaveLimitError, UsageError
from endoscope.probing.limits import Held, too_much
from endoscope.probing.rows import NOBODYS, Span, matched, tensors
from endoscope.probing.saves import Kept, named, save_method
from endoscope.probing.site import Site
from endoscope.probing.streams import Lines, Send, Turn
from endoscope.probing.turns import Aside, Turns
from endoscope.tracing.reach import UNREAD
from endoscope.tracing.rewrite import SAVE
from endoscope.tracing.sites import OUTPUT

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
        send: sends home what the block prints, warns and emits.
    """

    __slots__ = (
        "aside",
        "caches",
        "code",
        "edited",
        "edited_pass",
        "error",
        "finished",
        "fixed",
        "held",
        "holds",
        "host",
        "in_step",
        "item",
        "kept",
        "lacks",
        "last",
        "last_step",
        "lines",
        "namespace",
        "outside",
        "partial",
        "position",
        "reach",
        "reads_only",
        "replacement",
        "request",
        "samples",
        "send",
        "shown",
        "site",
        "skips_throughout",
        "span",
        "step",
        "stopped",
        "value",
    )  # fmt: skip
    # Of many probes, each one's attributes lie together: memory that the model's pass has driven out of the caches.

    def __init__(
        self,
        code: CodeType,
        namespace: dict[str, Any],
        host: Handoffs,
        request: str = "",
        send: Send | None = None,
    ) -> None:
        super().__init__(self._deep)
        self.code = code
        self.namespace = namespace
        self.outside: dict[str, Any] = {}
        """The namespace as the block found it."""
        self.host = host
        self.request = request
        self.send = send
        self.lines = {name: Lines(send, name) for name in ("stdout", "stderr")} if send else {}
        self.step = 0
        """The generated step that the block is in: 0 for the pass over the prompt."""
        self.span = Span(0, 0, 0)
        self.position = -1
        self.site: Site | None = None
        """Where the probe is parked; ``None`` while it has the turn."""
        self.item: int | None = None
        """The only item of the site's value that it waits for; ``None`` for all of it."""
        self.partial = False
        """Whether it was handed no more than that item."""
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
        self.held = Held()
        self.edited = False
        self.edited_pass = False
        """Whether it has changed something in the model's pass, and so in the request's keys and values."""
        self.lacks: frozenset[Station] = frozenset()
        """The modules that may not have kept everything of the request, since they are taken to be skipped for good."""
        self.reads_only = False
        """Whether the block is known to change nothing, and others rely on that."""
        self.reach = UNREAD
        """The sites that the text of the block can reach."""
        self.skips_throughout = False
        """Whether what the text of the block skips in one step is known to be skipped in every later one."""
        self.last_step: int | None = None
        """The last step that the request can have, where that is known."""
        self.finished = False
        self.stopped = False
        self.error: BaseException | None = None  # type: ignore[assignment]
        self.caches: list[Any] = []
        self.aside = Aside()

    # What runs in the probe's own greenlet.

    def _deep(self, _: Any = None) -> None:
        _under_frames(self._block)

    def _start(self, argument: Any) -> None:
        def start() -> None:
            self.switch(argument)

        _far_down(start)

    def _block(self) -> None:
        from endoscope.probing.views import output_of  # which is about probes itself

        namespace = self.namespace
        namespace["__builtins__"] = __builtins__
        namespace[SAVE] = save_method
        namespace[OUTPUT] = output_of
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
        if not (self.last is site and self.holds):
            return self._arrive(site)
        if self.partial and (item := self.host.item) is not None:
            self.value = self.shown = item.whole(self)
            self.partial = False
        return self.value

    def take_item(self, site: Site, item: int) -> Any:
        """``take(site)[item]``, for which no more than that item need be handed over."""
        if not (self.last is site and self.holds):
            value = self._arrive(site, item)
        elif self.partial and item != self.item:
            value = self.take(site)
        else:
            value = self.value
        return value if self.partial else value[item]

    def _arrive(self, site: Site, item: int | None = None) -> Any:
        position = site.position
        if position is None or position <= self.position or site.residual or self.finished:
            self.host.check(self, site)
        self.value = self.shown = value = self.park(site, item)
        self.last = site
        self.holds = True
        return value

    def park(self, site: Site, item: int | None = None) -> Any:
        """Give the turn back until somebody hands the probe a value for this site."""
        if self.stopped:  # and the block has caught what tracer.stop() raised, and goes on
            raise StopBlock
        self.site = site
        self.item = item
        self.holds = False
        self.host.wanted(self, site)
        return self.parent.switch()  # type: ignore[union-attr]

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
        """Mark a value to be sent home.

        Raises:
            SaveLimitError: if the block now keeps more than it may.
        """
        self.kept.append(Kept(text, value, names))
        if (error := self._too_much()) is not None:
            raise error

    def check_kept(self) -> None:
        """End the block if it keeps more than it may."""
        error = self._too_much()
        if error is not None and self.dead:
            self.error = self.error or error
        elif error is not None:
            self.fail(error)

    def _too_much(self) -> SaveLimitError | None:
        limit = self.host.limits.save_limit
        if not self.held.grown(self.kept, limit - self._cached()):
            return None
        error = too_much(self.held.total + self._cached(), limit)
        # What was saved first, and is within the limit, goes home all the same.
        while self.kept and self.held.grown(self.kept, limit - self._cached()):
            dropped = self.kept.pop().value
            self.caches = [cache for cache in self.caches if not cache.close(dropped)]
            self.held.clear()
        return error

    def _cached(self) -> int:
        return sum(cache.bytes for cache in self.caches) if self.caches else 0

    def next_step(self) -> bool:
        """Park until the request's next step begins; ``False`` if it has none."""
        if self.finished:
            return False
        return self.park(self.host.next_step) is not ENDED

    # What runs on the model's side.

    @property
    def line(self) -> int:
        """The line of the block at which it is parked; 0 if it has not begun."""
        frame = self.gr_frame
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return 0 if frame is None else frame.f_lineno

    def turn(self, value: Any = None, throw: BaseException | None = None, turns: Turns | None = None) -> None:
        """Give the probe the turn, and take it back when it parks or ends.

        What the block prints and warns meanwhile goes to its client, and what it changes of torch's
        modes and defaults is put aside until its next turn.

        Args:
            value: what the block has been waiting for.
            throw: what is raised in the block instead.
            turns: those that this is one of, if the caller gives more than one.
        """
        if turns is None:
            with Turns() as turns:
                self.turn(value, throw, turns)
            return
        current = getcurrent()
        if self.parent is not current:
            self.parent = current
        self.site = None
        self.replacement = NOTHING
        started = self or self.dead
        if throw is None:
            turns.give(self, self.switch if started else self._start, value)
            return
        if not started:
            # A greenlet that was never started would raise it here.
            if not isinstance(throw, GreenletExit):
                self.error = throw
            throw = GreenletExit()
        turns.give(self, self.throw, throw)

    def read(self, value: Any) -> None:
        """As :meth:`turn`, with a value, for a probe of which it is known that it only reads.

        Such a block changes nothing that would have to be put aside.
        """
        self.site = None
        Turn.probe = self
        self.switch(value)
        Turn.probe = None

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
        self.held.clear()
        self.caches.clear()
        self.fixed = []
        self.lacks = frozenset()
        self.aside = Aside()
        # Tracebacks hold the frames of the block, with the tensors in them and this probe itself.
        errors, seen = [self.error], set[int]()
        while errors:
            error = errors.pop()
            if error is not None and id(error) not in seen:
                seen.add(id(error))
                error.__traceback__ = None
                errors += [error.__cause__, error.__context__]
        self.value = self.shown = self.replacement = self.site = self.last = None


BACKTRACE = 64
"""How many frames ``c10::get_lazy_backtrace`` takes."""


def _under_frames(run: Callable[[], None]) -> None:
    """Run a probe's block below more C frames than torch looks at when it makes an error.

    A C++ error of torch takes down the 64 innermost return addresses of the stack. Behind the first frame of a
    greenlet there is whatever the model's side has on the stack by then, and to follow that as if it were frames can
    end the process. A chain of chains costs one frame of 32 bytes for each, which matters: all of them are copied
    away and back whenever the block gives the turn back.
    """
    once: Iterator[Any] = iter(run, NOTHING)
    for _ in range(BACKTRACE + 6):
        once = chain(once)
    next(once)


def _far_down(run: Callable[[], None]) -> None:
    """Start a probe some ten kilobytes further down the stack than where the model calls its modules.

    What two greenlets have at the same addresses of the stack is copied away and back at every turn; that far down,
    the frames of the model stay where they are.
    """
    once: Iterator[Any] = iter(run, NOTHING)
    for _ in range(100):
        once = map(bool, once)
    next(once)


ENDINGS = 8
"""How often a block that goes on after its request has ended is told so before it is dropped."""


def current_probe(what: str) -> Probe:
    """The probe that has the turn.

    Raises:
        UsageError: outside a block.
    """
    probe = getcurrent()
    if isinstance(probe, Probe):
        return probe
    raise UsageError(f"{what} has a value only inside a block, where the model runs")
