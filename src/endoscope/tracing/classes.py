"""Classes that travel by value, when they arrive.

cloudpickle gives such a class an id, and what arrives under an id that is known becomes that class, with all its
attributes set to what they were when it was sent. So one request would change the classes of another that is under
way, and a value that comes home the caller's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cloudpickle import cloudpickle


class Classes:
    """The classes of one unpickling.

    Args:
        own: whether to make every class anew; otherwise a known class is taken as it is.
    """

    def __init__(self, own: bool) -> None:
        self.own = own
        self.known: set[type] = set()

    def around(self, function: Any) -> Any:
        """What takes the place of one of cloudpickle's functions in a pickle."""
        if function is cloudpickle._make_skeleton_class:
            return self._making(function, 4)
        if function is cloudpickle._make_skeleton_enum:
            return self._making(function, 5)
        if function is cloudpickle._class_setstate:
            return self._filling
        return function

    def _making(self, make: Callable[..., type], place: int) -> Callable[..., type]:
        def made(*args: Any) -> type:
            key = args[place]
            known = None if self.own else cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID.get(key)
            if known is not None:
                self.known.add(known)
                return known  # type: ignore[no-any-return]
            if not self.own:
                return make(*args)
            new = make(*args[:place], None, *args[place + 1 :])
            # Its way home leads to the class that was sent.
            cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS[new] = key
            return new

        return made

    def _filling(self, kind: type, state: Any) -> type:
        return kind if kind in self.known else cloudpickle._class_setstate(kind, state)
