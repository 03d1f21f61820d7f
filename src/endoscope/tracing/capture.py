"""The reading of one ``with``: from its ``__enter__``, over its body that is not run, to its block."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType

from endoscope.errors import UsageError
from endoscope.tracing.block import Block
from endoscope.tracing.skip import Skip, Skipped
from endoscope.tracing.source import find_with


class Capture:
    """Skips the body of the ``with`` that a frame is entering, and reads it when the ``with`` is left.

    Attributes:
        frame: the frame that the ``with`` stands in.
        place: where in it.
    """

    __slots__ = ("_skip", "_value", "frame", "place")

    def __init__(self, frame: FrameType, value: object) -> None:
        self.frame = frame
        self._value = value  # what __enter__ returns
        self.place = find_with(frame)
        self._skip = Skip(frame, self.place)

    def start(self) -> None:
        """Begin to skip: the body that follows does not run."""
        self._skip.start()

    def finish(self, error: BaseException | None, references: Mapping[int, tuple[str, ...]]) -> Block | None:
        """Return the block, or ``None`` if the ``with``'s own header failed with ``error``.

        Args:
            error: what ``__exit__`` was given.
            references: see :meth:`Block.capture`.
        """
        self._skip.stop()
        place = self.place
        if isinstance(error, Skipped) or (error is None and not place.inside):
            if place.target is not None:
                place.target.assign(self.frame, self._value, place.variables, place.global_names)
            return Block.capture(self.place, self.frame, references)
        if error is not None and not self._raised_inside(error):
            return None
        raise UsageError(
            f"{self.place.code.filename}:{self.place.line}: the body of the trace ran here, and it should run in the "
            "engine. Something took endoscope's trace function away between the with and its body: do not call "
            "sys.settrace in the with's own line."
        ) from error

    def _raised_inside(self, error: BaseException) -> bool:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame is not self.frame:
            trace = trace.tb_next
        return trace is not None and trace.tb_lasti in self.place.inside
