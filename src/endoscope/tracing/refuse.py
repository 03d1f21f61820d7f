"""The kinds of values that mean nothing in another process, and why."""

from __future__ import annotations

_OPEN = "it belongs to this process"
_RUNNING = "it is in the middle of running, in this process"
_LOOP = "it belongs to this process's event loop"

_REFUSED = {
    "_io._IOBase": f"an open file: {_OPEN}",
    "_socket.socket": f"a socket: {_OPEN}",
    "mmap.mmap": f"a memory map: {_OPEN}",
    "_thread.lock": f"a lock: {_OPEN}",
    "_thread.RLock": f"a lock: {_OPEN}",
    "threading._RLock": f"a lock: {_OPEN}",
    "_multiprocessing.SemLock": f"a lock: {_OPEN}",
    "multiprocessing.synchronize.SemLock": f"a lock: {_OPEN}",
    "threading.Thread": f"a thread: {_OPEN}",
    "subprocess.Popen": f"a process: {_OPEN}",
    "multiprocessing.process.BaseProcess": f"a process: {_OPEN}",
    "sqlite3.Connection": f"a database connection: {_OPEN}",
    "builtins.generator": f"a generator: {_RUNNING}",
    "builtins.async_generator": f"an asynchronous generator: {_RUNNING}",
    "builtins.coroutine": f"a coroutine: {_RUNNING}",
    "builtins.frame": f"a frame: {_RUNNING}",
    "builtins.traceback": f"a traceback: {_RUNNING}",
    "greenlet.greenlet": f"a greenlet: {_RUNNING}",
    "_greenlet.greenlet": f"a greenlet: {_RUNNING}",
    "_asyncio.Future": f"a future or task: {_LOOP}",
    "asyncio.futures.Future": f"a future or task: {_LOOP}",
    "asyncio.events.AbstractEventLoop": f"an event loop: {_LOOP}",
    "concurrent.futures._base.Future": f"a future: {_OPEN}",
    "concurrent.futures._base.Executor": f"an executor: {_OPEN}",
}
# Names instead of classes: naming a class does not import its module. These two keep everything in memory.
_ALLOWED = frozenset({"_io.BytesIO", "_io.StringIO"})


def refusal(kind: type) -> str | None:
    """Return what an object of this class is and why it cannot travel, or ``None`` if nothing speaks against it."""
    for base in kind.__mro__:
        name = f"{base.__module__}.{base.__qualname__}"
        if name in _ALLOWED:
            return None
        if name in _REFUSED:
            return _REFUSED[name]
    return None
