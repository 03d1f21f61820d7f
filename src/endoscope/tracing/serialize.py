"""Values as bytes and back: what a block takes from outside, and what it sends home.

``cloudpickle`` does the work. Added to it: objects that travel as references (:class:`Referenced`), tensors that travel
without the rest of their storage, functions and classes of the user's own modules by value, the user's modules by
name, and a clear refusal of what means nothing in another process.
"""

from __future__ import annotations

import io
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

import cloudpickle

from endoscope.errors import SerializationError
from endoscope.tracing.classes import Classes
from endoscope.tracing.origin import folder_of, import_from, is_users
from endoscope.tracing.refuse import refusal
from endoscope.tracing.tensors import Packer, Place, is_plain_tensor, reduce_tensor, unpack

_PROTOCOL = 5
_NO_REFERENCES: Mapping[int, tuple[str, ...]] = MappingProxyType({})


MARK = ("mark",)
"""The key of an object that only marks a place among those that are serialized, and arrives as ``None``."""


class Referenced:
    """An object that is never copied to the engine: it travels as a key, and the engine has its own for it."""

    def reference(self) -> tuple[str, ...]:
        """Return the key that the other side resolves."""
        raise NotImplementedError(f"{type(self).__qualname__} does not say what it refers to: define reference()")


def dumps(
    value: object,
    references: Mapping[int, tuple[str, ...]] = _NO_REFERENCES,
    buffers: list[pickle.PickleBuffer] | None = None,
    met: list[tuple[str, ...]] | None = None,
    home: bool = False,
) -> bytes:
    """Serialize a value.

    Args:
        value: any Python value.
        references: objects that are not :class:`Referenced` and yet travel as a key: ``id(object)`` to key. The
            caller keeps the objects alive.
        buffers: an empty list that receives the memory of tensors and arrays, in order, instead of its being copied
            into the result. A buffer may be the tensor's own memory: send it or copy it before anybody writes to the
            tensor. Small tensors share buffers. Tensors are for the CPU then, as with ``home``.
        home: whether tensors arrive on the CPU, wherever they are now.
        met: an empty list that receives the key of each :class:`Referenced` object, in the order in which they are met.

    Raises:
        SerializationError: the value, or something that it holds, cannot travel.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, references, buffers, met, home or buffers is not None)
    try:
        pickler.dump(value)
        if buffers is None:
            return file.getvalue()
        assert pickler.packer is not None
        runs, packed = pickler.packer.close()
    except SerializationError:
        raise
    except (Exception, SystemExit) as error:  # any object may raise anything of its own when it is pickled
        raise SerializationError(f"pickle says: {error}.") from error
    finally:
        pickler.release()
    buffers[:0] = packed
    return pickle.dumps(runs, _PROTOCOL) + file.getvalue()


def loads(
    data: bytes | bytearray | memoryview,
    resolve: Callable[[tuple[str, ...]], Any],
    buffers: Iterable[Any] | None = None,
    own_classes: bool = False,
) -> Any:
    """Make the value again that :func:`dumps` serialized.

    Only for data from a trusted sender: like every pickle it can run any code.

    Args:
        data: what ``dumps`` returned.
        resolve: returns the object that a key stands for.
        buffers: the buffers that ``dumps`` collected, as anything that offers its bytes. They are copied, so that
            the tensors and arrays are writable and own their memory.
        own_classes: whether a class that travelled by value is made anew, apart from that of any other call. Otherwise
            a class that this process has sent away is the same class again, as it is by now.
    """
    file = io.BytesIO(data)
    if buffers is None:
        return _Unpickler(file, resolve, None, [], own_classes).load()
    given = iter(buffers)
    packed = unpack(pickle.load(file), given)
    return _Unpickler(file, resolve, [bytearray(buffer) for buffer in given], packed, own_classes).load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """One use each: it remembers which modules it told cloudpickle to pickle by value."""

    def __init__(
        self,
        file: io.BytesIO,
        references: Mapping[int, tuple[str, ...]],
        buffers: list[pickle.PickleBuffer] | None,
        met: list[tuple[str, ...]] | None,
        home: bool,
    ) -> None:
        super().__init__(file, _PROTOCOL, None if buffers is None else buffers.append)
        self._references = references
        self._met = met
        self._home = home
        self.packer = None if buffers is None else Packer()
        self._by_value: set[str] = set()

    def persistent_id(self, value: object) -> tuple[str, ...] | Place | int | None:
        if isinstance(value, Referenced):
            key = value.reference()
            if self._met is not None:
                self._met.append(key)
            return key
        if self.packer is not None:
            place = self.packer.take_list(value) if type(value) is list else self.packer.take(value)
            if place is not None:
                return place
        return self._references.get(id(value))

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is FunctionType or isinstance(value, type):
            self._take(value.__module__)
        elif isinstance(value, ModuleType):
            if value.__name__ == "__main__":
                raise SerializationError("it is the module __main__, which is another one in the engine.")
            if sys.modules.get(value.__name__) is value:
                return import_from, (value.__name__, folder_of(value))
        elif kind is CodeType:
            # cloudpickle leaves out the file, which the traceback of an error needs.
            make, parts = self.dispatch_table[CodeType](value)
            return make, tuple(value.co_filename if part == "<dynamic-code>" else part for part in parts)
        elif is_plain_tensor(value):
            return reduce_tensor(value, self._home)
        elif (reason := refusal(kind)) is not None:
            raise SerializationError(f"it is or holds {reason}.")
        return super().reducer_override(value)

    def _take(self, module: str | None) -> None:
        if module is not None and module not in self._by_value and is_users(module):
            self._by_value.add(module)
            _by_value.take(module)

    def release(self) -> None:
        """Undo what was told to cloudpickle, which keeps it for the whole process."""
        for module in self._by_value:
            _by_value.release(module)


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        resolve: Callable[[tuple[str, ...]], Any],
        buffers: list[bytearray] | None,
        packed: list[Any],
        own_classes: bool,
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._classes = Classes(own_classes)
        self._resolve = resolve
        self._packed = packed
        self._lists: dict[Place, list[Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self._classes.around(found) if module == "cloudpickle.cloudpickle" else found

    def persistent_load(self, key: Any) -> Any:
        if type(key) is int:
            return self._packed[key]
        if type(key[0]) is int:
            # A list that is found in several places is one.
            return self._lists.setdefault(key, self._packed[slice(*key)])
        return None if key == MARK else self._resolve(key)


class _ByValue:
    """The modules that cloudpickle pickles by value on our behalf, counted over the threads that pickle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()
        self._ours: set[str] = set()  # not those that the user registered

    def take(self, name: str) -> None:
        with self._lock:
            self._users[name] += 1
            if self._users[name] == 1 and name not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(sys.modules[name])
                self._ours.add(name)

    def release(self, name: str) -> None:
        with self._lock:
            self._users[name] -= 1
            if self._users[name] == 0:
                del self._users[name]
                if name in self._ours:
                    self._ours.discard(name)
                    cloudpickle.unregister_pickle_by_value(sys.modules[name])


_by_value = _ByValue()
