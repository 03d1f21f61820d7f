"""The wrappers around modules that make a pass come by where a probe waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent
from torch import nn

from endoscope.probing.probe import Probe
from endoscope.probing.site import Station

if TYPE_CHECKING:
    from endoscope.probing.skip import Skips

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Wrappers:
    """Wraps and unwraps the ``forward`` of modules.

    The wrapper stands in the module's own ``__dict__``, where it is found both by ``module(...)`` and
    by code that calls ``module.forward(...)``, as vLLM's compiled models do.

    Args:
        stations: every module of the model, by path.
        enter: called with a station and its arguments before the module runs; gives the arguments back.
        leave: called with a station and its result after the module has run; gives the result back.
        skips: called around a module that blocks skip.
    """

    def __init__(
        self,
        stations: dict[str, Station],
        enter: Callable[[Station, tuple[Any, ...], dict[str, Any]], Arguments],
        leave: Callable[[Station, Any], Any],
        skips: Skips,
    ) -> None:
        self.enter = enter
        self.leave = leave
        self.skips = skips
        self.stations: dict[nn.Module, list[Station]] = {}
        for station in stations.values():
            self.stations.setdefault(station.module, []).append(station)
        self.on: dict[nn.Module, Callable[..., Any] | None] = {}
        self.wanted: set[Station] = set()
        """The stations that have been asked for, and for which all is wrapped."""
        self.clock: int | None = None
        """Counts what modules do while a pass is recorded; otherwise ``None``."""
        self.recorded = False

    def __len__(self) -> int:
        return len(self.on)

    def want(self, station: Station) -> None:
        """Wrap the module and those that it is inside of: they may be entered before a block asks for them."""
        if station in self.wanted:
            return
        self.wanted.add(station)
        for module in self._needed(station):
            if module not in self.on:
                self._wrap(module)

    def keep(self, stations: Iterable[Station]) -> None:
        """Unwrap every module but these and those that they are inside of."""
        self.wanted = set(stations)
        needed = {module for station in self.wanted for module in self._needed(station)}
        for module in [module for module in self.on if module not in needed]:
            self._unwrap(module)

    def _needed(self, station: Station) -> Iterator[nn.Module]:
        # What a module with several names is inside of tells under which of them it runs.
        for name in self.stations[station.module]:
            yield name.module
            for one in name.outer:
                yield one.module

    def record(self) -> None:
        """Note when each module runs in the pass that begins now.

        The order tells a block at once that it asks for what has already gone by.
        """
        self.clock = 0
        for module in self.stations:
            if module not in self.on:
                self._wrap(module)

    def recording_ends(self) -> None:
        """The recorded pass is over."""
        self.clock = None
        self.recorded = True

    def _wrap(self, module: nn.Module) -> None:
        original: Callable[..., Any] = module.forward
        stations = self.stations[module]
        only = stations[0] if len(stations) == 1 else None
        enter, leave, skips = self.enter, self.leave, self.skips

        def forward(*args: Any, **kwargs: Any) -> Any:
            # A block may call a module itself; that is no part of the pass.
            if isinstance(getcurrent(), Probe):
                return original(*args, **kwargs)
            station = only or _named_by_where_it_runs(stations)
            if station is None:
                return original(*args, **kwargs)
            if self.clock is not None:
                self.clock += 1
                station.enter(self.clock)
            skipping = None
            if station.enters:
                args, kwargs = enter(station, args, kwargs)
                if station.skip.waiting:
                    skipping = skips.enter(station)
                if station.lacking:
                    skips.needed(station)
            if skipping is None or skipping.runs:
                station.inside += 1
                try:
                    output = original(*args, **kwargs)
                finally:
                    station.inside -= 1
            else:
                output = skipping.output
            if self.clock is not None:
                self.clock += 1
                station.leave(self.clock)
                skips.note(station, output)
            if skipping is not None:
                output = skips.leave(skipping, output)
            return leave(station, output) if station.leaves else output

        self.on[module] = module.__dict__.get("forward")
        module.__dict__["forward"] = forward

    def _unwrap(self, module: nn.Module) -> None:
        own = self.on.pop(module)
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def _named_by_where_it_runs(stations: list[Station]) -> Station | None:
    """Under which of its names a module that has several is being run: the one inside the innermost running module."""
    running = [station for station in stations if not station.outer or station.outer[0].inside]
    return max(running, key=lambda station: len(station.outer), default=None)
