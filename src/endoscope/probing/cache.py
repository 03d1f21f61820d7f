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
        self.bytes = 0
        """Of the rows that are kept."""
        for station in stations:
            station.caches.append(self)

    def add(self, path: str, copy: Copy, index: int) -> None:
        """Keep a visit."""
        self.visits[path].append((copy, index))
        for base, cuts in zip(copy.bases, copy.cuts, strict=True):
            rows = (len(base) if base.dim() else 1) if cuts is None else cuts[2][cuts[3][index]]
            self.bytes += base.nbytes // max(len(base), 1) * rows if base.dim() else base.nbytes

    @property
    def open(self) -> list[Station]:
        """The modules whose visits are still kept."""
        return [station for station in self.stations if self in station.caches]

    def close(self, view: Any = None) -> bool:
        """Keep no more visits; with a view, only if it is this cache's. Whether it was closed."""
        if view is not None and getattr(view, "cache", None) is not self:
            return False
        for station in self.stations:
            if self in station.caches:
                station.caches.remove(self)
        return True

    def values(self) -> dict[str, list[Any]]:
        """The kept outputs by module path, one for each visit, in order."""
        return {path: [copy.view(index) for copy, index in visits] for path, visits in self.visits.items()}
