"""What a block's values from outside are, as far as that tells what can be done to them without a change."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from endoscope.tracing import pure
from endoscope.tracing.serialize import Referenced

# A module of Python's is known by its own name.
PLAIN = "<plain>"
"""A number, a text, a tensor, or a container of such."""
MODULES = "<modules>"
"""A module of the model, or a container that has some in it."""
MODEL = "<model>"
TRACER = "<tracer>"
TOKENIZER = "<tokenizer>"
SAVES = "<save>"
"""The function ``endoscope.save``."""
UNKNOWN = "<unknown>"
"""Anything else: it may have operators, attributes and methods that do whatever their author likes."""

NO_REFERENCES: Mapping[int, tuple[str, ...]] = MappingProxyType({})

_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None), range})
_CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_TORCH = frozenset({"dtype", "device", "Size", "layout", "memory_format"})
_MOST = 1000  # elements of containers that are looked at for one name


def kind_of(value: object, references: Mapping[int, tuple[str, ...]] = NO_REFERENCES) -> str:
    """Return what a value from outside is, as one of this module's words or the name of a module of Python's."""
    kind = type(value)
    if kind in _ATOMS:
        return PLAIN
    if isinstance(value, Referenced):
        word = value.reference()[0]
        return {"model": MODEL, "module": MODULES, "tracer": TRACER}.get(word, UNKNOWN)
    if kind in _CONTAINERS:
        return _kind_of_elements(value, references)
    if _is_of_torch(kind):
        return PLAIN
    if kind is ModuleType:
        name = str(value.__name__)  # type: ignore[attr-defined]
        return name if name in pure.FUNCTIONS and sys.modules.get(name) is value else UNKNOWN
    if references.get(id(value)) == ("tokenizer",):
        return TOKENIZER
    return SAVES if value is getattr(sys.modules.get("endoscope.probing.saves"), "save", _MOST) else UNKNOWN


def _is_of_torch(kind: type) -> bool:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return False
    return kind is torch.Tensor or kind is torch.nn.Parameter or any(kind is getattr(torch, name) for name in _TORCH)


def _kind_of_elements(container: Any, references: Mapping[int, tuple[str, ...]]) -> str:
    found, left, count = PLAIN, [container], 0
    while left:
        value = left.pop()
        elements = [*value, *value.values()] if type(value) is dict else value
        count += len(elements)
        if count > _MOST:
            return UNKNOWN
        for element in elements:
            if type(element) in _ATOMS:
                continue
            if type(element) in _CONTAINERS:
                left.append(element)
                continue
            kind = kind_of(element, references)
            if kind in (MODEL, MODULES):
                found = MODULES
            elif kind != PLAIN:
                return UNKNOWN
    return found
