"""The engine's side of the way home: messages pushed to the clients' inboxes as soon as they are final."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from multiprocessing import parent_process
from pickle import PickleBuffer
from typing import Any

import zmq

from endoscope.tracing.messages import Message, encode

logger = logging.getLogger(__name__)


class Outbox:
    """Sends messages to inboxes by address; an inbox that is gone costs its messages and nothing else."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        for cpu in _cpus():
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, cpu)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def send(self, home: str, message: Message, buffers: list[PickleBuffer] | None = None) -> None:
        """Send a message, with tensor memory as parts of their own that are not copied here.

        Args:
            home: address of the inbox.
            message: what to send.
            buffers: memory that nobody writes to any more.
        """
        socket = self._sockets.get(home)
        if socket is None:
            socket = self._sockets[home] = self._context.socket(zmq.PUSH)
            socket.set_hwm(0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(home)
        parts: list[Any] = [encode(message), *(buffer.raw() for buffer in buffers or ())]
        try:
            socket.send_multipart(parts, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            logger.warning("a client's inbox is gone; a message of %s was dropped", getattr(message, "key", "?"))
            self._sockets.pop(home).close()

    def close(self) -> None:
        """Close every connection."""
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()
        self._context.term()


def _cpus() -> Iterable[int]:
    """Where the thread that sends may run: on the engine's cores. vLLM binds its worker on the CPU to the model's."""
    if parent_process() is None or not hasattr(os, "sched_getaffinity"):
        return ()
    return os.sched_getaffinity(os.getppid())
