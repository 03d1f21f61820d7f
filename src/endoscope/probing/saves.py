"""What a block keeps, and the names under which it goes home."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from greenlet import getcurrent

from endoscope.errors import UsageError


def save(value: Any, text: str = "") -> Any:
    """Mark a value of a block to be sent home when its request ends; returns the value.

    Inside a block ``value.save()`` does the same. In a helper function that a block calls, this
    function works for a value of any type.

    Args:
        value: anything that can be pickled; tensors arrive on the CPU.
        text: the key for a value that is bound to no name when the block ends; the block's compiler
            fills in the text of the expression.

    Raises:
        UsageError: outside a block.
    """
    keep = getattr(getcurrent(), "keep", None)
    if keep is None:
        raise UsageError("save() was called outside a block: it marks a value of a block to be sent home")
    keep(text or f"{type(value).__name__}", value)
    return value


def save_method(value: Any, text: str) -> Any:
    """What ``value.save()`` in a block becomes: the object's own ``save`` if it has one, else :func:`save`."""
    own = getattr(type(value), "save", None)
    if (own is not None and own is not tensor_save) or "save" in getattr(value, "__dict__", ()):
        return value.save()
    return save(value, text)


def tensor_save(self: Any) -> Any:
    """``tensor.save()`` in a helper function, whose text is not rewritten."""
    return save(self, "tensor")


_ATOMS = (int, float, complex, str, bytes, type(None))
_MISSING: Any = object()


def named(
    kept: list[tuple[str, Any]], namespace: dict[str, Any], outside: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The saved values by name.

    A value that the block has bound to names goes home under each of them; any other under the text of
    its expression, and as a list where several came from one expression.

    Args:
        kept: text and value of each saved one.
        namespace: the names of the block, as they are now.
        outside: the names as the block found them: one that still has that value was not bound by the block.
    """
    outside = outside or {}
    texts = {(text, id(value)) for text, value in kept}
    ids = {id(value) for text, value in kept if not _names_itself(text, value)}
    saves = {}
    for name, value in namespace.items():
        is_text = (name, id(value)) in texts
        is_bound = id(value) in ids and outside.get(name, _MISSING) is not value
        if (is_text or is_bound) and not name.startswith("__endoscope_"):
            saves[name] = value
    bound = {id(value) for value in saves.values()}
    unnamed: dict[str, list[Any]] = {}
    for text, value in kept:
        if (text not in saves or saves[text] is not value) if _names_itself(text, value) else id(value) not in bound:
            unnamed.setdefault(text, []).append(value)
    for text, values in unnamed.items():
        saves.setdefault(text, values[0] if len(values) == 1 else values)
    return saves


def _names_itself(text: str, value: Any) -> bool:
    # Python has one object for all equal small numbers: where the text is a name, no other name is meant.
    return isinstance(value, _ATOMS) and text.isidentifier()
