"""What a block's ``tracer`` is: steps of the generation, stopping, caches, and the result."""

from __future__ import annotations

import fnmatch
from collections.abc import ItemsView, Iterable, Iterator, KeysView, ValuesView
from typing import Any

from endoscope.errors import NeverRanError, OutOfOrderError, UnknownModuleError, UnsupportedError, UsageError
from endoscope.probing.cache import Cache
from endoscope.probing.handoff import Handoffs
from endoscope.probing.limits import CountedApart
from endoscope.probing.probe import Probe, StopBlock, current_probe
from endoscope.probing.saves import save
from endoscope.probing.views import ModuleView, unknown
from endoscope.tracing.serialize import Referenced


class Result(Referenced):
    """Stands in a block for the finished ``RequestOutput``, which is known only when the block is over."""

    def reference(self) -> tuple[str, ...]:
        """It travels home as a reference, and arrives as the finished output."""
        return ("result",)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UsageError(
            f"tracer.result.{name} was read in a block, but the result is known only when the request is over: "
            f"save it with tracer.result.save(), or read tracer.result after the trace"
        )


class Steps:
    """``tracer.iter``: choose steps with ``tracer.iter[a:b]``, ``tracer.iter[:]`` or ``tracer.iter[i]``."""

    def __getitem__(self, steps: slice | int | Iterable[int]) -> Iterator[int]:
        """Iterate over the chosen steps; the loop ends with the request, if that is earlier.

        Steps that have gone by are left out of a range of them.

        Raises:
            ValueError: for a step that is negative or not a whole number.
            OutOfOrderError: in the loop, for a step that was asked for by its number and has gone by.
        """
        if isinstance(steps, slice):
            start, stop, by = steps.start or 0, steps.stop, 1 if steps.step is None else steps.step
            for value in (start, by, 0 if stop is None else stop):
                _whole(value)
            if by == 0:
                raise ValueError("tracer.iter takes a step of at least 1")
            return _run(iter(range(start, stop, by)) if stop is not None else _count(start, by))
        if isinstance(steps, int):
            return _run(iter([_whole(steps)]), named=True)
        if not hasattr(steps, "__iter__"):
            _whole(steps)
        return _run(iter([_whole(step) for step in steps]), named=True)

    def __iter__(self) -> Iterator[int]:
        return self[:]


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"tracer.iter takes whole numbers, not {value!r}")
    if value < 0:
        raise ValueError(f"tracer.iter counts steps from 0, and cannot know how many there will be: {value} is refused")
    return value


def _count(start: int, by: int) -> Iterator[int]:
    while True:
        yield start
        start += by


def _run(steps: Iterator[int], named: bool = False) -> Iterator[int]:
    probe = current_probe("tracer.iter")
    for step in steps:
        if step < probe.step and not probe.finished:
            if named:
                raise OutOfOrderError(
                    f"tracer.iter asked for step {step}, but the block is already in step {probe.step}"
                )
            continue
        while probe.step < step:
            if not probe.next_step():
                return
        # A request that has ended has no further step, though the block runs on behind the loop.
        if probe.finished:
            return
        yield step


class BlockTracer(Referenced):
    """The ``tracer`` of a block, in the process where the model runs."""

    def __init__(self, handoffs: Handoffs) -> None:
        self._handoffs = handoffs

    def reference(self) -> tuple[str, ...]:
        """It travels home as a reference."""
        return ("tracer",)

    iter = Steps()

    result = Result()

    def all(self) -> Iterator[int]:
        """Iterate over every step of the generation, as ``tracer.iter[:]`` does."""
        return self.iter[:]

    def next(self) -> int:
        """Go on to the next step of the generation; returns its number.

        Raises:
            NeverRanError: if the request ends before.
        """
        probe = current_probe("tracer.next()")
        step = probe.step
        while probe.step == step:
            if not probe.next_step():
                raise NeverRanError(f"tracer.next() asked for step {step + 1}, but the request ended before it")
        return probe.step

    def stop(self) -> None:
        """End this block and its request at this step; what was saved goes home."""
        current_probe("tracer.stop()").stopped = True
        raise StopBlock

    def emit(self, **values: Any) -> None:
        """Send values home now, without waiting for the end of the request.

        They are copied as they are at this moment, and arrive with the output of this step, in
        ``output.emits``.

        Args:
            **values: the values by name.

        Raises:
            SerializationError: if a value cannot travel.
        """
        probe = current_probe("tracer.emit()")
        if probe.send is not None:
            probe.send("emit", (probe.step, values))

    def cache(self, modules: Iterable[Any] | Any = None) -> CacheView:
        """Keep the output of every further visit to the modules.

        Args:
            modules: modules, paths, or shell-style patterns of paths such as ``"model.layers.*.mlp"``;
                ``None`` keeps those of every decoder layer.

        Returns:
            A mapping from module path to the list of outputs, one for each visit, which is saved with
            the name that it is bound to.

        Raises:
            UnknownModuleError: if a path or a pattern fits no module.
        """
        probe = current_probe("tracer.cache()")
        cache = Cache(probe, self._chosen(modules))
        probe.caches.append(cache)
        for station in cache.stations:
            self._handoffs.wrappers.want(station)
        return save(CacheView(cache), "tracer.cache")  # type: ignore[no-any-return]

    def _chosen(self, modules: Any) -> list[Any]:
        stations = self._handoffs.stations
        if modules is None:
            return [station for station in stations.values() if station.stream is not None]
        if isinstance(modules, (str, ModuleView)):
            modules = [modules]
        chosen: dict[str, Any] = {}
        for module in modules:
            if isinstance(module, ModuleView):
                chosen[module._station.path] = module._station
                continue
            paths = fnmatch.filter(stations, module)
            if not paths:
                raise UnknownModuleError(unknown(self._handoffs, stations[""], module))
            chosen.update((path, stations[path]) for path in paths)
        return list(chosen.values())

    @property
    def barrier(self) -> Any:
        """Refused: requests are scheduled independently of each other.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(BARRIER)

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        """Refused inside a block.

        Raises:
            UsageError: always.
        """
        raise UsageError("tracer.invoke stands in a trace without a prompt, and not inside another block")


BARRIER = (
    "tracer.barrier is refused: requests are scheduled independently of each other, so one cannot wait for another. "
    "Run them one after the other and pass saved values on"
)


class CacheView(CountedApart, dict[str, list[Any]]):
    """The outputs that a block's cache has kept so far, by module path; filled when it is read or sent home."""

    def __init__(self, cache: Cache) -> None:
        super().__init__()
        self.cache = cache

    def fill(self) -> CacheView:
        """Bring the mapping up to date."""
        self.update(self.cache.values())
        return self

    def __getitem__(self, key: Any) -> list[Any]:
        return super(CacheView, self.fill()).__getitem__(_path(key))

    def __contains__(self, key: Any) -> bool:
        return super(CacheView, self.fill()).__contains__(_path(key))

    def __iter__(self) -> Iterator[str]:
        return super(CacheView, self.fill()).__iter__()

    def __len__(self) -> int:
        return super(CacheView, self.fill()).__len__()

    def __repr__(self) -> str:
        return super(CacheView, self.fill()).__repr__()

    def get(self, key: Any, default: Any = None) -> Any:
        """The outputs of a module, or the default if it has no part in the cache."""
        return super(CacheView, self.fill()).get(_path(key), default)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The paths of the modules."""
        return super(CacheView, self.fill()).keys()

    def values(self) -> ValuesView[list[Any]]:  # type: ignore[override]
        """The outputs of each module."""
        return super(CacheView, self.fill()).values()

    def items(self) -> ItemsView[str, list[Any]]:  # type: ignore[override]
        """Paths and outputs."""
        return super(CacheView, self.fill()).items()

    def __reduce__(self) -> Any:
        return dict, (dict(self.fill()),)


def _path(key: Any) -> Any:
    return key._station.path if isinstance(key, ModuleView) else key


def caches_close(probe: Probe) -> None:
    """Keep no more visits for a probe."""
    for cache in probe.caches:
        cache.close()
