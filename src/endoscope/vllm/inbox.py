"""The client's side of the way home: what blocks send, sorted by the request that it belongs to."""

from __future__ import annotations

import asyncio
import builtins
import itertools
import os
import shutil
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from endoscope.tracing.messages import Emitted, Ended, Printed, Warned, decode

_numbers = itertools.count()


class Arrival:
    """What has come home for one request.

    Attributes:
        ended: the message that ends each sequence, with the memory of its tensors; a second one is left out.
        emitted: what blocks have sent home since that was last read.
        refused: the first warning of its blocks that the caller's filters make an error.
        complete: whether every sequence has sent one.
    """

    def __init__(self, key: str, sequences: int) -> None:
        self.key = key
        self.sequences = sequences
        self.ended: dict[int, tuple[Ended, list[Any]]] = {}
        self.emitted: list[Emitted] = []
        self.refused: Warning | None = None
        self.wake: Callable[[], object] | None = None

    @property
    def complete(self) -> bool:
        """Whether every sequence's block has ended."""
        return len(self.ended) >= self.sequences

    def add(self, message: Ended, buffers: list[Any]) -> None:
        """A sequence's block has ended."""
        self.ended.setdefault(message.sequence, (message, buffers))
        if self.complete and self.wake is not None:
            self.wake()


class Inbox:
    """A socket that engines push to. It is bound in a folder that only this user can read."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="endoscope-")
        self.address = f"ipc://{os.path.join(self.folder, 'inbox')}"
        self.arrivals: dict[str, Arrival] = {}
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finalizer = weakref.finalize(self, _remove, self._socket, self.folder)

    def expect(self, sequences: int) -> Arrival:
        """Make room for what a new request's blocks will send."""
        key = str(next(_numbers))
        arrival = self.arrivals[key] = Arrival(key, sequences)
        return arrival

    def forget(self, arrival: Arrival) -> None:
        """Drop whatever else comes for a request."""
        self.arrivals.pop(arrival.key, None)

    def drain(self, timeout: float = 0.0) -> bool:
        """Take in what has come, waiting up to ``timeout`` seconds for the first; whether there was anything."""
        if not self._socket.poll(int(timeout * 1000)):
            return False
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return True
            self._take(parts)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, take in what comes whenever the loop sees it."""
        if self._loop is None:
            self._loop = loop
            loop.add_reader(self._socket.fileno(), _drain, weakref.ref(self))

    def _take(self, parts: Sequence[zmq.Frame]) -> None:
        message = decode(parts[0].buffer)
        arrival = self.arrivals.get(message.key)
        if arrival is None:
            return
        match message:
            case Ended():
                arrival.add(message, [part.buffer for part in parts[1:]])
            case Emitted():
                arrival.emitted.append(message)
            case Printed():
                _print(_mark(arrival, message.sequence), message)
            case Warned():
                try:
                    _warn(_mark(arrival, message.sequence), message)
                except Warning as error:
                    # Whoever takes this in may wait for another request.
                    arrival.refused = arrival.refused or error.with_traceback(None)

    def close(self) -> None:
        """Close the socket and remove its folder."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._loop = None
        self._finalizer()


def _drain(reference: weakref.ref[Inbox]) -> None:
    inbox = reference()
    if inbox is not None:
        # The descriptor tells only of changes, so everything that is there is taken at once.
        inbox.drain()


def _remove(socket: zmq.Socket[bytes], folder: str) -> None:
    socket.close(linger=0)
    shutil.rmtree(folder, ignore_errors=True)


def _mark(arrival: Arrival, sequence: int) -> str:
    return f"[request {arrival.key}]" if arrival.sequences == 1 else f"[request {arrival.key}, sequence {sequence}]"


def _print(mark: str, message: Printed) -> None:
    stream = sys.stderr if message.stream == "stderr" else sys.stdout
    for line in message.text.split("\n"):
        print(f"{mark} {line}", file=stream, flush=True)


def _warn(mark: str, message: Warned) -> None:
    category = getattr(builtins, message.category, None)
    if not (isinstance(category, type) and issubclass(category, Warning)):
        category = UserWarning
    warnings.warn_explicit(f"{mark} {message.text}", category, message.filename, message.line)
