"""Taps: outputs of modules at which compiled code calls us, so that blocks can read and change them there."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Sequence
from typing import Any

import torch

from endoscope.errors import EngineArgumentError
from endoscope.probing import Handoffs
from endoscope.probing.site import Site, Station
from endoscope.vllm import internals

AUTO = "auto"
"""Tap every decoder layer's output."""

Visit = Callable[[Station, Any], Any]

_stations: list[Station] = []
"""The tapped modules of the process's engine, by number: what stands in compiled code can hold no more than that."""
_visits: list[Visit] = []
_fits: dict[int, bool] = {}
"""Which of them were seen to return a tensor or a pair of them, as a tap takes."""

_library: Any = torch.library.Library("endoscope", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("tap(Tensor(a!) value, int number) -> ()")
_library.define("tap_pair(Tensor(a!) first, Tensor(b!) second, int number) -> ()")


def chosen(handoffs: Handoffs, taps: str | Sequence[str]) -> list[Station]:
    """The modules that are to be tapped.

    Raises:
        EngineArgumentError: for a pattern that fits no module, or is not of an output.
    """
    stations = handoffs.stations
    if taps == AUTO:
        return [station for station in stations.values() if station.stream is not None]
    found: dict[str, Station] = {}
    for pattern in taps:
        path, _, kind = pattern.rpartition(".")
        if kind not in ("output", "resid_post"):
            raise EngineArgumentError(
                f"taps has {pattern!r}, and only outputs can be tapped: give the path of a module and .output, such as "
                f"'model.layers.*.mlp.output'"
            )
        fits = [each for each in fnmatch.filter(stations, path) if each]
        if not fits:
            near = difflib.get_close_matches(path.replace("*", "0"), stations, n=3, cutoff=0.5)
            hint = f"; nearest are {', '.join(f'{each}.output' for each in near)}" if near else ""
            raise EngineArgumentError(f"taps has {pattern!r}, and the model has no such module{hint}")
        found.update((each, stations[each]) for each in fits)
    return list(found.values())


def install(stations: Sequence[Station], visit: Visit) -> frozenset[Site]:
    """Make compiled code call ``visit`` with each of these modules and its output.

    It has to be done before the model is compiled. Python that is not compiled does not call it.

    Returns:
        The sites that are served there.
    """
    _stations[:], _visits[:] = stations, [visit]
    _fits.clear()
    for number, station in enumerate(stations):
        station.module.__dict__["forward"] = _tapped(station.module.forward, number)
    return frozenset(site for station in stations for site in (station.output, station.resid_post))


def misfits() -> frozenset[Site]:
    """Sites of :func:`install` that are served by no tap, since their modules return something else than it takes."""
    return frozenset(
        site
        for number, fits in _fits.items()
        if not fits
        for site in (_stations[number].output, _stations[number].resid_post)
    )


def _is_pair(output: Any) -> bool:
    return isinstance(output, tuple) and len(output) == 2 and all(isinstance(each, torch.Tensor) for each in output)


def _tapped(forward: Callable[..., Any], number: int) -> Callable[..., Any]:
    def tapped(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            if isinstance(output, torch.Tensor):
                torch.ops.endoscope.tap(output, number)
            elif _is_pair(output):
                torch.ops.endoscope.tap_pair(output[0], output[1], number)
        elif number not in _fits:
            _fits[number] = isinstance(output, torch.Tensor) or _is_pair(output)
        return output

    return tapped


def _one(value: torch.Tensor, number: int) -> None:
    if not internals.breaks_segment(lambda value: _visit_one(value, number), value):
        _visit_one(value, number)


def _pair(first: torch.Tensor, second: torch.Tensor, number: int) -> None:
    if not internals.breaks_segment(lambda first, second: _visit_pair(first, second, number), first, second):
        _visit_pair(first, second, number)


def _visit_one(value: torch.Tensor, number: int) -> None:
    station = _stations[number]
    if station.leaves:
        result = _visits[0](station, value)
        if result is not value:
            value.copy_(result)


def _visit_pair(first: torch.Tensor, second: torch.Tensor, number: int) -> None:
    station = _stations[number]
    if station.leaves:
        value = first, second
        for old, new in zip(value, _visits[0](station, value), strict=True):
            if new is not old:
                old.copy_(new)


def _nothing(*args: Any) -> None:
    """What a tap does to the shapes of tensors."""


_library.impl("tap", _one, "CompositeExplicitAutograd")
_library.impl("tap_pair", _pair, "CompositeExplicitAutograd")
torch.library.register_fake("endoscope::tap", _nothing, lib=_library)
torch.library.register_fake("endoscope::tap_pair", _nothing, lib=_library)
