"""Which gear each step of the engine runs in, chosen from what the step's blocks can ask for in it.

*graph*: nobody can ask for a module. vLLM's own path: compiled code and CUDA graphs, as they are.
*split*: all that anybody can ask for are taps, where compiled code calls us.
*eager*: anything else. The modules run one by one, as Python, for this one step.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from enum import StrEnum

from endoscope.probing import Handoffs, Probe
from endoscope.probing.reached import Reached
from endoscope.probing.site import Site
from endoscope.vllm.engine import taps as tapped

logger = logging.getLogger(__name__)


class Gear(StrEnum):
    """How one step of the model runs."""

    GRAPH = "graph"
    SPLIT = "split"
    EAGER = "eager"


class Gears:
    """Chooses the gear of each step.

    Args:
        handoffs: the sites of the model.
        taps: those that compiled code serves; ``None`` for an engine that compiles nothing and has no graphs, all
            of whose steps are eager.
    """

    def __init__(self, handoffs: Handoffs, taps: frozenset[Site] | None) -> None:
        self.taps = taps
        self.steps: Counter[str] = Counter()
        """How many steps of the engine ran in each gear."""
        self._handoffs = handoffs
        self._reached = Reached(handoffs.stations)
        self._known: dict[tuple[str, ...], tuple[Gear, Site | None]] = {}
        self._told: set[Site] = set()
        self._recorded = False

    def choose(self, probes: Collection[Probe]) -> Gear:
        """The gear for a step with these probes in it."""
        if self.taps is None:
            return Gear.EAGER
        gear = Gear.GRAPH
        for probe in probes:
            if probe.lacks:
                return Gear.EAGER
            if probe.caches:
                gear = self._lower(gear, self._for_caches(probe))
            if not probe.dead:
                gear = self._lower(gear, self._for_sites(probe.reach.at(probe.line)))
            if gear is Gear.EAGER:
                return gear
        if gear is Gear.SPLIT and not self._recorded:
            # What modules return, and in which order they run, is learned in a pass that runs them one by one.
            if not self._handoffs.wrappers.recorded:
                return Gear.EAGER
            self._recorded = True
            self.taps -= tapped.misfits()
            self._known.clear()
            return self.choose(probes)
        return gear

    @staticmethod
    def _lower(one: Gear, other: Gear) -> Gear:
        return other if one is Gear.GRAPH or other is Gear.EAGER else one

    def _for_caches(self, probe: Probe) -> Gear:
        assert self.taps is not None
        outputs = {station.output for cache in probe.caches for station in cache.open}
        return Gear.GRAPH if not outputs else Gear.SPLIT if outputs <= self.taps else Gear.EAGER

    def _for_sites(self, written: tuple[str, ...]) -> Gear:
        known = self._known.get(written)
        if known is None:
            known = self._known[written] = self._of(written)
        gear, untapped = known
        if untapped is not None and untapped not in self._told:
            self._told.add(untapped)
            self._tell(untapped)
        return gear

    def _of(self, written: tuple[str, ...]) -> tuple[Gear, Site | None]:
        assert self.taps is not None
        sites = self._reached.sites(written)
        if not sites:
            return Gear.GRAPH, None
        untapped = min((site for site in sites if site not in self.taps), key=lambda site: site.name, default=None)
        return (Gear.SPLIT, None) if untapped is None else (Gear.EAGER, untapped)

    def _tell(self, site: Site) -> None:
        if site.kind == "output":
            advice = f"VLLM(..., taps=[..., {site.name!r}]) avoids that"
        else:
            advice = "only outputs and resid_post can be tapped"
        logger.warning(
            "a block can ask for %s, which is no tap, so steps with it run eagerly, without compiled code and graphs; "
            "%s",
            site.name,
            advice,
        )
