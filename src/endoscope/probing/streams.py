"""What blocks print and warn goes to their clients: whichever block has the turn, it is that block's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from greenlet import getcurrent

if TYPE_CHECKING:
    from endoscope.probing.probe import Probe

Send = Callable[[str, Any], None]
"""Called with a kind of message (``"stdout"``, ``"stderr"``, ``"warning"``, ``"emit"``) and its content."""


class Turn:
    """Which block has the turn, on the thread that runs the model."""

    probe: Probe | None = None


def in_turn() -> bool:
    """Whether the caller runs in the block that has the turn, be it in a greenlet that the block has made."""
    current: Any = getcurrent()
    while current is not None:
        if current is Turn.probe:
            return True
        current = current.parent
    return False


class Lines:
    """Text on its way to one client: whole lines are sent at once."""

    __slots__ = ("_rest", "_send", "_stream")

    def __init__(self, send: Send, stream: str) -> None:
        self._send = send
        self._stream = stream
        self._rest = ""

    def write(self, text: str) -> None:
        """Take text; what ends with a line break is sent."""
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._send(self._stream, lines)

    def close(self) -> None:
        """Send what is left of a line without a line break."""
        rest, self._rest = self._rest, ""
        if rest:
            self._send(self._stream, rest)


class BlockStream:
    """Stands in the place of ``sys.stdout`` or ``sys.stderr`` while blocks have their turns.

    One object serves all blocks, so what keeps it (a handler of ``logging``, say) still prints for the block that has
    the turn by then, and for the engine while none has.
    """

    encoding = "utf-8"
    errors = "replace"
    newlines = None
    closed = False

    def __init__(self, name: str) -> None:
        self.name = f"<{name}>"
        self._stream = name

    def write(self, text: str) -> int:
        """Take text for the block that has the turn."""
        if not isinstance(text, str):
            raise TypeError(f"write() takes a str, not a {type(text).__name__}")
        probe = Turn.probe
        if probe is not None and probe.send is not None:
            probe.lines[self._stream].write(text)
        elif (real := getattr(sys, f"__{self._stream}__")) is not None:
            real.write(text)
        return len(text)

    @property
    def buffer(self) -> BlockBytes:
        """Takes bytes, as UTF-8."""
        return BlockBytes(self)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of the strings."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Nothing to do: whole lines are under way, and a line's beginning waits for its end."""

    def isatty(self) -> bool:
        """Never a terminal."""
        return False

    def readable(self) -> bool:
        """Never."""
        return False

    def writable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Never."""
        return False

    def fileno(self) -> int:
        """There is none: what writes past Python writes where the engine does."""
        raise OSError("what a block prints has no file descriptor")


class BlockBytes:
    """A block's stream, for who writes bytes to it."""

    def __init__(self, stream: BlockStream) -> None:
        self._stream = stream

    def write(self, data: Any) -> int:
        """Take the bytes of text."""
        self._stream.write(bytes(data).decode("utf-8", "replace"))
        return len(data)

    def flush(self) -> None:
        """Nothing to do, as for text."""


def _warn(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
    probe = Turn.probe
    if probe is not None and probe.send is not None:
        probe.send("warning", (str(message), category, filename, lineno))
    else:
        _SHOW(message, category, filename, lineno, file, line)


_SHOW: Any = warnings.showwarning


class Streams(NamedTuple):
    """Where prints and warnings go, and which warnings are shown."""

    stdout: Any
    stderr: Any
    show: Any
    filters: Any
    implementation: Any

    @classmethod
    def now(cls) -> Streams:
        """As it is now."""
        return cls(sys.stdout, sys.stderr, warnings.showwarning, warnings.filters, warnings._showwarnmsg_impl)  # type: ignore[attr-defined]

    def put(self) -> None:
        """Print and warn there."""
        sys.stdout, sys.stderr, warnings.showwarning, warnings.filters, warnings._showwarnmsg_impl = self  # type: ignore[attr-defined]


_ALWAYS = ("always", None, Warning, None, 0)
"""Which warnings are shown is for the caller's filters to say, not for the engine's."""

OUT, ERR = BlockStream("stdout"), BlockStream("stderr")
_FILTERS = [_ALWAYS]


def of_blocks(engine: Streams) -> Streams:
    """What blocks have that changed nothing of it.

    Args:
        engine: what the engine has.
    """
    return Streams(OUT, ERR, _warn, _FILTERS, engine.implementation)


def untouched(given: Streams) -> bool:
    """Whether a block left everything as :func:`of_blocks` gave it."""
    return (
        sys.stdout is OUT
        and sys.stderr is ERR
        and warnings.showwarning is _warn
        and warnings.filters is _FILTERS
        and len(_FILTERS) == 1
        and warnings._showwarnmsg_impl is given.implementation  # type: ignore[attr-defined]
    )


def taken() -> Streams:
    """What a block made of it, to be given to that block again and to no other."""
    found = Streams.now()
    if found.filters is not _FILTERS:
        return found
    # Filters are added in place.
    own = found._replace(filters=list(_FILTERS))
    _FILTERS[:] = [_ALWAYS]
    return own
