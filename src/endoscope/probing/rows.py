"""A site's value and the rows of it that belong to one request.

A value is a tensor, or tuples, lists and dicts of tensors. A tensor whose first dimension counts the
tokens of the step is cut by the request's span; one whose first dimension counts the requests is cut
at the request's row; any other belongs to no request and is handed out whole.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from endoscope.errors import ReplacementError


@dataclass(slots=True)
class Step:
    """The shape of one step of the engine: how many rows its tensors have."""

    tokens: int
    requests: int


@dataclass(slots=True)
class Span:
    """The rows of a step that belong to one request: tokens ``start:stop``, and row ``row`` of the requests."""

    start: int
    stop: int
    row: int

    def of(self, tensor: torch.Tensor, step: Step) -> tuple[int, int] | None:
        """First and last row (exclusive) of the request in the tensor, or ``None`` if it has no such rows."""
        if tensor.dim() == 0:
            return None
        rows = tensor.shape[0]
        if rows == step.tokens:
            return self.start, self.stop
        if rows == step.requests:
            return self.row, self.row + 1
        return None


def walk(value: Any, visit: Callable[[torch.Tensor], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """The same structure, of the same classes, with every tensor replaced by what ``visit`` makes of it.

    What is neither a tensor nor a tuple, list or dict is replaced by what ``other`` makes of it.
    """
    if isinstance(value, torch.Tensor):
        return visit(value)
    if isinstance(value, (tuple, list)):
        items = [walk(item, visit, other) for item in value]
        kind = type(value)
        if kind is tuple:
            return tuple(items)
        if kind is list:
            return items
        # What holds no tensor, such as a torch.Size, may not be one that can be made from any items.
        if all(map(operator.is_, items, value)):
            return value if isinstance(value, tuple) else other(value)
        return kind(*items) if hasattr(value, "_fields") else kind(items)
    if isinstance(value, dict):
        made = {key: walk(item, visit, other) for key, item in value.items()}
        if type(value) is dict:
            return made
        if all(made[key] is value[key] for key in made):
            return other(value)
        same = copy.copy(value)
        for key, item in made.items():
            same[key] = item
        return same
    return other(value)


_UNCHANGING = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout})


def own(leaf: Any) -> Any:
    """A copy of what a module was given or has returned beside tensors, so that a block can do with it as it likes.

    A module, an object that has one, and whatever cannot be copied are handed out as they are.
    """
    if type(leaf) in _UNCHANGING or any(
        isinstance(one, nn.Module) for one in (leaf, *getattr(leaf, "__dict__", {}).values())
    ):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # a lock, a stream, whatever a class raises
        return leaf


def tensors(value: Any) -> list[torch.Tensor]:
    """Every tensor of the value, in the order of :func:`walk`."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for item in value for tensor in tensors(item)]


class Layout:
    """Where the rows of some requests lie in the tensors of a step.

    Args:
        spans: the requests' spans, in the order of the batch.
        step: the shape of the step.
    """

    __slots__ = ("by_request", "by_token", "count", "step")

    def __init__(self, spans: list[Span], step: Step) -> None:
        self.step = step
        self.count = len(spans)
        self.by_token = _cuts([(span.start, span.stop) for span in spans])
        self.by_request = _cuts([(span.row, span.row + 1) for span in spans])

    def of(self, tensor: torch.Tensor) -> Cuts | None:
        """How the tensor is cut; ``None`` if its rows belong to no request."""
        if tensor.dim() == 0:
            return None
        rows = tensor.shape[0]
        if rows == self.step.tokens:
            return self.by_token
        return self.by_request if rows == self.step.requests else None


Cuts = tuple[int, int, list[int], list[int]]
"""First row, row behind the last, sizes of the pieces between, and which pieces are the requests'."""


def _cuts(edges: list[tuple[int, int]]) -> Cuts:
    sizes, mine = [], []
    low = at = edges[0][0]
    for start, stop in edges:
        if start > at:
            sizes.append(start - at)
        mine.append(len(sizes))
        sizes.append(stop - start)
        at = stop
    return low, at, sizes, mine


class Copy:
    """A copy of the rows of a value that belong to some requests, made once for all of them.

    It holds the rows from the first request's to the last's, and is made outside inference mode, so that
    each request's piece of it has a version counter of its own, which tells whether a block wrote into it.
    Nothing of the engine's own tensors is kept.
    """

    __slots__ = ("_by_token", "_flat", "_parts", "_pieces", "bases", "count", "cuts", "value")

    def __init__(self, value: Any, layout: Layout) -> None:
        self.count = layout.count
        self._by_token = layout.by_token
        self.bases: list[torch.Tensor] = []
        self.cuts: list[Cuts | None] = []
        self._pieces: list[list[torch.Tensor]] | None = None
        self._parts: list[tuple[torch.Tensor, ...]] | None = None
        self._flat = type(value) is tuple and all(isinstance(item, torch.Tensor) for item in value)
        for tensor in (value,) if isinstance(value, torch.Tensor) else value if self._flat else tensors(value):
            cuts = layout.of(tensor)
            self.cuts.append(cuts)
            self.bases.append((tensor if cuts is None else tensor[cuts[0] : cuts[1]]).clone())
        if isinstance(value, torch.Tensor):
            self.value: Any = self.bases[0]
        elif self._flat:
            self.value = ()
        else:
            base = iter(self.bases)
            self.value = walk(value, lambda tensor: next(base))

    def pieces(self) -> list[list[torch.Tensor]]:
        """For each tensor of the value, one piece for each request, in the order of the layout."""
        if self._pieces is None:
            self._pieces = []
            for base, cuts in zip(self.bases, self.cuts, strict=True):
                # ``data`` counts its versions from 0, which a clone of the engine's tensor need not.
                if cuts is None:
                    # Nobody's rows. Each request has them all, and must not see what another's block writes there.
                    self._pieces.append([base.data, *(base.clone().data for _ in range(self.count - 1))])
                elif self.count == 1:
                    self._pieces.append([base.data])
                else:
                    # One call, and unlike those of a plain split the pieces do not share a version counter.
                    split = torch.unsafe_split_with_sizes(base, cuts[2])
                    self._pieces.append([split[index] for index in cuts[3]])
        return self._pieces

    def views(self) -> Iterable[tuple[Any, Sequence[torch.Tensor]]]:
        """What each request of the layout gets, in its order, and the tensors in it."""
        parts = self._by_request()
        if self._flat:
            return zip(parts, parts, strict=True)
        if isinstance(self.value, torch.Tensor):
            return zip(self.pieces()[0], parts, strict=True)
        return [(self._view(each), each) for each in parts]

    def view(self, index: int) -> Any:
        """What request number ``index`` of the layout gets."""
        return self._view(self._by_request()[index])

    def _by_request(self) -> list[tuple[torch.Tensor, ...]]:
        if self._parts is None:
            self._parts = list(zip(*self.pieces(), strict=True)) if self.bases else [()] * self.count
        return self._parts

    def _view(self, parts: tuple[torch.Tensor, ...]) -> Any:
        if self._flat:
            return parts
        piece = iter(parts)
        return walk(self.value, lambda tensor: next(piece), own)

    def edge_of(self, index: int, part: torch.Tensor, span: Span) -> tuple[int, int] | None:
        """First and last row (exclusive) of a request; ``None`` if its part is no piece of the copy any more.

        A block may have given its part another shape or other memory.
        """
        base, cuts = self.bases[index], self.cuts[index]
        edge = span.start, span.stop
        if cuts is None or base.dim() == 0:
            return None
        if cuts is not self._by_token:
            edge = span.row, span.row + 1
        at = base.data_ptr() + (edge[0] - cuts[0]) * base.stride(0) * base.element_size()
        same = part.data_ptr() == at and part.shape == (edge[1] - edge[0], *base.shape[1:])
        return edge if same and part.stride() == base.stride() and part.dtype is base.dtype else None

    def nobodys(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of a request's parts that are not cut: their rows belong to no request."""
        return [part for part, cuts in zip(parts, self.cuts, strict=True) if cuts is None]


NO_TENSORS: list[torch.Tensor] = []


def matched(name: str, expected: Any, given: Any) -> list[torch.Tensor]:
    """The tensors of a replacement, in the order and of the shape and kind of those that it replaces.

    Raises:
        ReplacementError: if the structure, a shape or a dtype does not fit.
    """
    if isinstance(expected, torch.Tensor):
        if isinstance(given, (int, float, bool)) and expected.numel() == 1:
            given = torch.tensor(given, device=expected.device)
        if not isinstance(given, torch.Tensor):
            raise ReplacementError(f"{name} takes a tensor of shape {tuple(expected.shape)}, not a {_kind(given)}")
        if given.shape != expected.shape and not (given.numel() == expected.numel() == 1):
            raise ReplacementError(
                f"{name} takes a tensor of shape {tuple(expected.shape)} (this request's rows), "
                f"not one of shape {tuple(given.shape)}"
            )
        if not torch.can_cast(given.dtype, expected.dtype):
            raise ReplacementError(f"{name} takes {expected.dtype}; {given.dtype} cannot be cast to it")
        if given.layout is not torch.strided or given.is_meta:
            raise ReplacementError(f"{name} takes a dense tensor that has values, not {_odd(given)}")
        return [given if given.shape == expected.shape else given.reshape(expected.shape)]
    if isinstance(expected, (tuple, list)):
        if not isinstance(given, (tuple, list)) or len(given) != len(expected):
            raise ReplacementError(
                f"{name} takes a {_kind(expected)} of {len(expected)}, not "
                + (f"one of {len(given)}" if isinstance(given, (tuple, list)) else f"a {_kind(given)}")
            )
        return [t for i, (e, g) in enumerate(zip(expected, given, strict=True)) for t in matched(f"{name}[{i}]", e, g)]
    if isinstance(expected, dict):
        if not isinstance(given, dict) or given.keys() != expected.keys():
            raise ReplacementError(f"{name} takes a dict with the keys {list(expected)}")
        return [t for key in expected for t in matched(f"{name}[{key!r}]", expected[key], given[key])]
    if given is not expected and given != expected:
        raise ReplacementError(f"{name} is no tensor but {expected!r:.60}, and can only be left as it is")
    return []


def _kind(value: Any) -> str:
    return type(value).__name__


def _odd(tensor: torch.Tensor) -> str:
    return "one on the meta device" if tensor.is_meta else f"a {tensor.layout} one"


NOBODYS = "a tensor of shape {} has no rows of this request alone, so it can be read but not changed"

READS_ONLY = (
    "{} was changed by a block that endoscope took for one that only reads, and whose keys and values other requests "
    "may use, so the change is refused. This is a fault of endoscope: please report it, with the block. Until it is "
    "mended, assign the changed value to its site, which is always known for a change"
)


class Edit:
    """What blocks did to a value at one visit: rows written into a copy that takes the value's place.

    The engine's own tensor is left as it is, since a module may return a tensor that others still read
    (its own input, say); only what flows on from this site is changed.
    """

    __slots__ = ("fresh", "originals", "rows", "step")

    def __init__(self, value: Any, step: Step) -> None:
        self.originals = [value] if isinstance(value, torch.Tensor) else tensors(value)
        self.fresh: dict[int, torch.Tensor] = {}
        self.rows: list[tuple[int, int]] = []
        self.step = step

    def write(self, span: Span, changes: list[tuple[int, torch.Tensor]]) -> None:
        """Put a request's rows into the tensors of these numbers: into all of them, or into none.

        Raises:
            ReplacementError: if no rows of a tensor belong to the request alone, or the rows have
                another shape now.
        """
        edges = []
        for index, rows in changes:
            original = self.originals[index]
            edge = span.of(original, self.step)
            if edge is None:
                raise ReplacementError(NOBODYS.format(tuple(original.shape)))
            shape = (edge[1] - edge[0], *original.shape[1:])
            if [size for size in rows.shape if size != 1] != [size for size in shape if size != 1]:
                raise ReplacementError(
                    f"a value of shape {shape} was given the shape {tuple(rows.shape)} in place, and no longer fits"
                )
            edges.append((edge, rows.reshape(shape)))
        for (index, _), (edge, rows) in zip(changes, edges, strict=True):
            target = self.fresh.get(index)
            if target is None:
                target = self.fresh[index] = self.originals[index].clone()
            target[edge[0] : edge[1]].copy_(rows)
            self.rows.append(edge)

    def write_all(self, number: int, copy: Copy, index: int, edges: list[tuple[int, int]]) -> None:
        """Put all rows of a copy into the tensor of this number; those that nobody has written are as they were.

        Args:
            number: of the tensor in the value.
            copy: made of the value, or of an item of it.
            index: of the tensor in the copy.
            edges: the rows that were written, request by request in the order of the batch.
        """
        base, cuts = copy.bases[index], copy.cuts[index]
        assert cuts is not None
        low, high = cuts[0], cuts[0] + len(base)
        target = self.fresh.get(number)
        if target is not None:
            target[low:high].copy_(base)
        elif len(base) == len(self.originals[number]):
            # Blocks may hold on to their rows of the copy.
            self.fresh[number] = base.clone()
        else:
            target = self.fresh[number] = self.originals[number].clone()
            target[low:high].copy_(base)
        for start, stop in edges:
            if self.rows and self.rows[-1][1] == start:
                start = self.rows.pop()[0]
            self.rows.append((start, stop))

    def result(self, value: Any) -> Any:
        """The value with the edited tensors in it."""
        if not self.fresh:
            return value
        if isinstance(value, torch.Tensor):
            return self.fresh[0]
        index = iter(range(len(self.originals)))
        return walk(value, lambda tensor: self.fresh.get(next(index), tensor))
