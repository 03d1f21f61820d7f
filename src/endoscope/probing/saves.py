"""What a block keeps, and the names under which it goes home."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from greenlet import getcurrent

from endoscope.errors import UsageError
from endoscope.tracing.rewrite import SAVE


class Kept(NamedTuple):
    """One call of ``save``: the text of the expression, its value, and the names that it was bound to."""

    text: str
    value: Any
    names: tuple[str, ...] = ()


def save(value: Any, text: str = "", names: tuple[str, ...] = ()) -> Any:
    """Mark a value of a block to be sent home when its request ends; returns the value.

    Inside a block ``value.save()`` does the same. In a helper function that a block calls, this
    function works for a value of any type.

    Args:
        value: anything that can be pickled; tensors arrive on the CPU.
        text: the key for a value that is bound to no name when the block ends; the block's compiler
            fills in the text of the expression, and ``save(Tensor)`` stands for a tensor that has none.
        names: the block's names that the value is being bound to; filled in by the compiler as well.

    Raises:
        UsageError: outside a block.
    """
    keep = getattr(getcurrent(), "keep", None)
    if keep is None:
        raise UsageError("save() was called outside a block: it marks a value of a block to be sent home")
    keep(text or f"save({type(value).__name__})", value, names)
    return value


def save_method(value: Any, text: str, names: tuple[str, ...] = ()) -> Any:
    """What ``value.save()`` in a block becomes: the object's own ``save`` if it has one, else :func:`save`."""
    own = getattr(type(value), "save", None)
    if (own is not None and own is not tensor_save) or "save" in getattr(value, "__dict__", ()):
        return value.save()
    return save(value, text, names)


def tensor_save(self: Any) -> Any:
    """``tensor.save()`` in a helper function, whose text is not rewritten."""
    return save(self)


_ATOMS = (int, float, complex, str, bytes, type(None))
"""Values of these types may be one object though they came about apart."""

_MISSING: Any = object()


def named(kept: list[Kept], namespace: Mapping[str, Any], outside: Mapping[str, Any]) -> dict[str, Any]:
    """The saved values by name.

    A value that is bound to names when the block ends goes home under each of them; any other under
    the text of its expression, and as a list where several came from one expression.

    Args:
        kept: what was saved, in order.
        namespace: the block's names as they are now.
        outside: the names as the block found them.
    """
    ids = {id(each.value) for each in kept if not isinstance(each.value, _ATOMS)}
    saves = {name: value for name, value in namespace.items() if id(value) in ids and name != SAVE}
    bound = {id(value) for value in saves.values()}
    unnamed: dict[str, list[Any]] = {}
    for text, value, names in kept:
        if isinstance(value, _ATOMS):
            # Of the names that hold the same number, those count that the statement bound or named, or else the block.
            mine = [name for name in names or (text,) if namespace.get(name, _MISSING) is value]
            if not mine and not text.isidentifier():
                mine = [
                    name for name in namespace if namespace[name] is value and outside.get(name, _MISSING) is not value
                ]
            if mine:
                saves.update(dict.fromkeys(mine, value))
                continue
        if id(value) not in bound:
            unnamed.setdefault(text, []).append(value)
    for text, values in unnamed.items():
        saves.setdefault(text, values[0] if len(values) == 1 else values)
    return saves
