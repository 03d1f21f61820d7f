"""The sites that a block can reach from each of its lines on, read from its text.

How a step of the engine may run depends on what its blocks can ask for in it, and that has to be known before the step
begins. The answer errs on one side only: a site that may be reached is among them, and so are some that are not.

A site is written as its path below the model, ``model.layers[3].mlp.output``; ``[*]`` stands for any element,
``model.layers[3].**`` for every site of a module and of all that is inside of it. ``<patterns>@cache`` stands for what
``tracer.cache`` keeps.
"""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from endoscope.errors import SerializationError
from endoscope.tracing.outside import MODEL, MODULES, NO_REFERENCES, PLAIN, TRACER, UNKNOWN, kind_of
from endoscope.tracing.reaching import EVERYTHING, NO_MODULES, NOTHING, Path, Reader, Value
from endoscope.tracing.scopes import bound_names
from endoscope.tracing.serialize import MARK, Referenced

if TYPE_CHECKING:
    from endoscope.tracing.block import Code


class Reach(msgspec.Struct, frozen=True, array_like=True):
    """The sites that a block can reach.

    Attributes:
        lines: lines of the file, in order.
        sites: for each of them, the sites that are reached from the lines up to it on. The last are those of every
            line behind.
    """

    lines: tuple[int, ...] = ()
    sites: tuple[tuple[str, ...], ...] = ((EVERYTHING,),)

    def at(self, line: int) -> tuple[str, ...]:
        """The sites that the block can reach when it stands at the line; 0 for a block that has not begun."""
        return self.sites[min(bisect_left(self.lines, line), len(self.sites) - 1)]


UNREAD = Reach()
"""That of a block whose text nobody has looked at."""

HIDDEN = "__endoscope_hidden__"
"""The name behind those outside values whose inside is not looked at, in a dict of all of them."""


class _Mark(Referenced):
    def reference(self) -> tuple[str, ...]:
        return MARK


def hidden_first(
    code: Code, values: dict[str, Any], references: Mapping[int, tuple[str, ...]] = NO_REFERENCES
) -> dict[str, Any]:
    """The outside values, those that are not looked into first.

    What they refer to is then met first when they are serialized, up to a :data:`serialize.MARK`.
    """
    members = _members(code, values)
    hidden = {k: v for k, v in values.items() if k not in members and _kind(v, references) == UNKNOWN}
    return {**hidden, HIDDEN: _Mark(), **{k: v for k, v in values.items() if k not in hidden}} if hidden else values


def _kind(value: object, references: Mapping[int, tuple[str, ...]]) -> str:
    try:
        return kind_of(value, references)
    except SerializationError:  # a module of another model, which is refused when the value is serialized
        return UNKNOWN


def _members(code: Code, values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The objects of which a block reads nothing but attributes that are modules, numbers and such: ``self.model``.

    Returns:
        The attributes that it reads, by name, for each such object's name.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, used in _attributes_read(code).items():
        value = values.get(name)
        kind: Any = type(value)
        own: Any = getattr(value, "__dict__", None)
        if isinstance(value, ModuleType | Referenced) or kind.__getattribute__ is not object.__getattribute__:
            continue
        if type(own) is not dict or not all(each in own and not hasattr(kind, each) for each in used):
            continue
        if all(_kind(own[each], NO_REFERENCES) in (PLAIN, MODULES, MODEL) for each in used):
            found[name] = {each: own[each] for each in used}
    return found


@lru_cache(maxsize=1024)
def _attributes_read(code: Code) -> dict[str, frozenset[str]]:
    """The names that a block uses for nothing but to read attributes, and which."""
    nodes = [node for statement in code.rewritten() for node in ast.walk(statement)]
    taken = {name for node in nodes for name in bound_names(node)}
    taken.update(node.arg for node in nodes if isinstance(node, ast.arg))
    read: dict[str, set[str]] = {}
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    chains: Counter[str] = Counter()
    for node in nodes:
        match node:
            case ast.Attribute(ast.Name(name), attribute, ast.Load()):
                read.setdefault(name, set()).add(attribute)
                chains[name] += 1
    return {
        name: frozenset(attributes)
        for name, attributes in read.items()
        if name not in taken and uses[name] == chains[name]
    }


def reach(code: Code, values: Mapping[str, Any], hidden: Iterable[tuple[str, ...]]) -> Reach:
    """The sites that a block can reach.

    Args:
        code: the block.
        values: its outside values by name.
        hidden: the references to modules, the model and the tracer that are in outside values of other kinds than
            modules and containers, such as functions.
    """
    indices = _index_names(code)
    outside: list[tuple[str, str, Value]] = []
    members = _members(code, values)
    for name, value in values.items():
        kind = kind_of(value)
        if kind in (MODEL, MODULES):
            outside.append((name, kind, _value_of(value)))
        elif kind == TRACER:
            outside.append((name, TRACER, NOTHING))
        elif name in members:
            for attribute, each in members[name].items():
                outside.append((f"{name}.{attribute}", MODULES, _value_of(each)))
        else:
            known = repr(value) if name in indices and type(value) in (int, str) else ""
            outside.append((name, known, NOTHING))
    escaped = set()
    for key in hidden:
        if key[0] == "tracer":
            return Reach()
        if key[0] in ("model", "module"):
            escaped.add(_path_of(key))
    return _read(code, tuple(outside), frozenset(escaped))


def _value_of(value: Any) -> Value:
    """What an outside value is that is the model, a module, or something plain that may hold some."""
    if isinstance(value, Referenced):
        return Value(frozenset({_path_of(value.reference())}))
    return _held(value) if type(value) in (list, tuple, dict, set, frozenset) else NOTHING


def _path_of(key: tuple[str, ...]) -> Path:
    return tuple(key[1].split(".")) if key[0] == "module" and key[1] else ()


def _held(container: Any) -> Value:
    """What a container holds, and what that holds."""
    given = [*container, *container.values()] if isinstance(container, dict) else container
    itself: set[Path] = set()
    deeper: set[Path] = set()
    for element in given:
        if isinstance(element, Referenced):
            itself.add(_path_of(element.reference()))
        elif isinstance(element, dict | list | tuple | set | frozenset):
            deeper |= _held(element).all
    return Value(NO_MODULES, frozenset(itself), frozenset(deeper))


@lru_cache(maxsize=1024)
def _index_names(code: Code) -> frozenset[str]:
    """The names that stand alone in square brackets or in the round ones of ``get_submodule``."""
    found = set()
    for node in (node for statement in code.written() for node in ast.walk(statement)):
        match node:
            case ast.Subscript(_, ast.Name(name)) | ast.Call(ast.Attribute(_, "get_submodule"), [ast.Name(name)], []):
                found.add(name)
    return frozenset(found)


@lru_cache(maxsize=4096)
def _read(code: Code, outside: Any, escaped: frozenset[Path]) -> Reach:
    try:
        reader = Reader(code.rewritten(), outside)
    except RecursionError:
        return Reach()
    for path in escaped:
        reader.anywhere.add((*path, EVERYTHING))
    return Reach(*reader.result())
