"""What a block keeps, and the names under which it goes home."""

from __future__ import annotations

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
    if own is not None and own is not tensor_save:
        return value.save()
    return save(value, text)


def tensor_save(self: Any) -> Any:
    """``tensor.save()`` in a helper function, whose text is not rewritten."""
    return save(self, "tensor")


def named(kept: list[tuple[str, Any]], namespace: dict[str, Any]) -> dict[str, Any]:
    """The saved values by name.

    A value that is bound to names when the block ends goes home under each of them; any other under
    the text of its expression, and as a list where several came from one expression.
    """
    ids = {id(value) for _, value in kept}
    saves = {
        name: value for name, value in namespace.items() if id(value) in ids and not name.startswith("__endoscope_")
    }
    bound = {id(value) for value in saves.values()}
    unnamed: dict[str, list[Any]] = {}
    for text, value in kept:
        if id(value) not in bound:
            unnamed.setdefault(text, []).append(value)
    for text, values in unnamed.items():
        saves.setdefault(text, values[0] if len(values) == 1 else values)
    return saves
