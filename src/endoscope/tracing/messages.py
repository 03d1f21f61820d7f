"""Everything that crosses between the client process and the engine process, apart from vLLM's own messages."""

from __future__ import annotations

from typing import Any

import msgspec

from endoscope.tracing.block import Code
from endoscope.tracing.reach import UNREAD, Reach


class Submission(msgspec.Struct, frozen=True, array_like=True):
    """Client to engine, on the request itself: a block to run for it. Set by a backend, read by the engine's probes."""

    reads_only: bool
    """Whether the block is known to change nothing of the model. First, since the scheduler looks at nothing else."""
    home: str
    """Where what the block makes is sent to: the address of the client's inbox."""
    key: str
    """The request's name in that inbox."""
    code: Code
    """The block."""
    values: bytes
    """Its outside values: a dict by name, as ``serialize.dumps`` makes it."""
    skips_throughout: bool
    """Whether the block is known to skip in every step what it skips in one."""
    reach: Reach = UNREAD
    """The sites that the block can ask for."""


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of a :class:`Submission`."""

    reads_only: bool


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One line of a traceback."""

    filename: str
    line: int
    name: str


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """An exception on its way to the caller. Set where the block ran, read where it is raised again."""

    module: str
    """Where the exception's class is defined."""
    name: str
    """The class's qualified name."""
    message: str
    """``str()`` of the exception."""
    pickled: bytes | None
    """The exception itself, or ``None`` if it cannot travel."""
    frames: tuple[Frame, ...]
    """The user's part of its traceback, outermost first."""
    notes: tuple[str, ...] = ()
    cause: Failure | None = None
    """What it was raised from."""
    context: Failure | None = None
    """What was being handled when it was raised."""
    suppress: bool = False
    """Whether a traceback leaves the context out."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Engine to client: a block has ended, or its request has. The buffers of the saves follow as further parts."""

    key: str
    sequence: int
    """Which of the request's ``n`` sequences."""
    saves: bytes
    """A dict by name, as ``serialize.dumps`` makes it."""
    failure: Failure | None = None


class Printed(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Engine to client: a block printed whole lines."""

    key: str
    sequence: int
    stream: str
    """``"stdout"`` or ``"stderr"``."""
    text: str


class Warned(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Engine to client: a block issued a warning."""

    key: str
    sequence: int
    text: str
    category: str
    """Name of a built-in warning class; any other arrives as ``UserWarning``."""
    filename: str
    line: int


class Emitted(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Engine to client: values that a block sends home at the step that made them."""

    key: str
    sequence: int
    step: int
    """The generated step that made them."""
    values: bytes
    """A dict by name, as ``serialize.dumps`` makes it."""


Message = Ended | Printed | Warned | Emitted

_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_submission: msgspec.msgpack.Decoder[Submission] = msgspec.msgpack.Decoder(Submission)
_head: msgspec.msgpack.Decoder[_Head] = msgspec.msgpack.Decoder(_Head)
_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | Submission) -> bytes:
    """The message as bytes."""
    return _encoder.encode(message)


def decode(data: Any) -> Message:
    """The message that an engine sent."""
    return _decoder.decode(data)


def decode_submission(data: Any) -> Submission:
    """The submission that a client put on a request."""
    return _submission.decode(data)


def reads_only(data: Any) -> bool:
    """Whether the block of an encoded submission is known to change nothing. What it holds is skipped, not decoded."""
    try:
        return _head.decode(data).reads_only
    except msgspec.DecodeError:  # nothing that a backend made
        return False
