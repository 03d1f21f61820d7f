"""``tracer.cache``: every visit of chosen modules kept, with no Python for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from endoscope.probing.rows import Copy

if TYPE_CHECKING:
    from endoscope.probing.probe import Probe
    from endoscope.probing.site import Station


class Cache:
    """What one block keeps of each visit to its modules: the shared copy, and which piece is its own."""

    def __init__(self, probe: Probe, stations: list[Station]) -> None:
        self.probe = probe
        self.stations = stations
        self.visits: dict[str, list[tuple[Copy, int]]] = {station.path: [] for station in stations}
        for station in stations:
            station.caches.append(self)

    def close(self) -> None:
        """Keep no more visits."""
        for station in self.stations:
            if self in station.caches:
                station.caches.remove(self)

    def values(self) -> dict[str, list[Any]]:
        """The kept outputs by module path, one for each visit, in order."""
        return {path: [copy.view(index)[0] for copy, index in visits] for path, visits in self.visits.items()}
