"""The sites that the text of a block speaks of, found in the model."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

from endoscope.probing.site import Site, Station
from endoscope.tracing.reaching import CACHE, EVERYTHING, SITES

_SEGMENT = re.compile(r"\[(?:\*|-?\d+)\]|[^.\[]+")


class Reached:
    """Finds sites by what :mod:`endoscope.tracing.reach` writes of them.

    Args:
        stations: every module of the model, by path.
    """

    def __init__(self, stations: dict[str, Station]) -> None:
        self._stations = stations
        self._known: dict[str, frozenset[Site]] = {}

    def sites(self, written: Iterable[str]) -> frozenset[Site]:
        """All the sites that are meant; what fits no module of the model means none."""
        return frozenset().union(*map(self._of, written))

    def _of(self, written: str) -> frozenset[Site]:
        found = self._known.get(written)
        if found is None:
            found = self._known[written] = frozenset(self._find(written))
        return found

    def _find(self, written: str) -> Iterable[Site]:
        if written.endswith(CACHE):
            pattern = written.removesuffix(CACHE)
            kept = fnmatch.filter(self._stations, pattern) if pattern else self._stations
            return [station.output for path in kept if (station := self._stations[path]).stream is not None or pattern]
        segments = _SEGMENT.findall(written)
        last = segments[-1]
        stations = [self._stations[""]]
        for segment in segments[:-1]:
            stations = [child for station in stations for child in self._below(station, segment)]
        if last == EVERYTHING:
            return [site for station in stations for inside in self._inside(station) for site in inside.sites]
        return [station.site(last) for station in stations] if last in SITES else []

    def _inside(self, station: Station) -> list[Station]:
        """The module and all that are inside of it."""
        return [each for each in self._stations.values() if each is station or station in each.outer]

    def _below(self, station: Station, segment: str) -> list[Station]:
        if segment == EVERYTHING:
            return self._inside(station)
        names = [name for name, module in station.module._modules.items() if module is not None]
        if segment.startswith("["):
            if segment == "[*]":
                chosen = names
            else:
                number = int(segment[1:-1])
                chosen = [names[number]] if -len(names) <= number < len(names) else []
        else:
            chosen = [segment] if segment in names else []
        dot = f"{station.path}." if station.path else ""
        return [self._stations[dot + name] for name in chosen if dot + name in self._stations]
