"""Curves as an SVG picture: a few elements written by hand, which needs no library for plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as Xml

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 60, 110, 20, 40
"""The margins; the names of the curves stand at their right ends."""
COLOURS = ("#3f51b5", "#00897b", "#e65100", "#8e24aa")
"""Seen on white and on black."""


def curves(xs: Sequence[float], ys: Mapping[str, Sequence[float]], x_title: str, y_title: str) -> str:
    """Draw curves over one axis, both axes from zero.

    Args:
        xs: where the values were taken, ascending.
        ys: the values of each curve, by its name; there are at most four.
        x_title, y_title: what stands at the axes.

    Returns:
        The text of the SVG file.
    """
    x_ticks, y_ticks = ticks(max(xs)), ticks(max(max(values) for values in ys.values()))
    right, floor = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x_of(value: float) -> float:
        return LEFT + (right - LEFT) * value / x_ticks[-1]

    def y_of(value: float) -> float:
        return floor - (floor - TOP) * value / y_ticks[-1]

    picture = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {HEIGHT}")
    picture.attrib |= {"font-family": "sans-serif", "font-size": "12", "fill": "#888"}

    def text(x: float, y: float, words: str, anchor: str, **more: str) -> None:
        element = Xml.SubElement(picture, "text", {"x": f"{x:.1f}", "y": f"{y:.1f}", "text-anchor": anchor, **more})
        element.text = words

    def line(points: Sequence[tuple[float, float]], colour: str, width: float) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        Xml.SubElement(
            picture, "polyline", {"points": path, "fill": "none", "stroke": colour, "stroke-width": str(width)}
        )

    for tick in y_ticks:
        line([(LEFT, y_of(tick)), (right, y_of(tick))], "#8884", 1)
        text(LEFT - 6, y_of(tick) + 4, f"{tick:,.0f}", "end")
    for tick in x_ticks:
        text(x_of(tick), floor + 16, f"{tick:,.0f}", "middle")
    text((LEFT + right) / 2, HEIGHT - 6, x_title, "middle")
    text(LEFT - 45, TOP - 8, y_title, "start")
    for colour, (name, values) in zip(COLOURS, ys.items(), strict=False):
        line([(x_of(x), y_of(y)) for x, y in zip(xs, values, strict=True)], colour, 2)
        text(right + 6, y_of(values[-1]) + 4, name, "start", fill=colour)
    Xml.indent(picture)
    return Xml.tostring(picture, encoding="unicode") + "\n"


def ticks(highest: float) -> list[float]:
    """Five to ten round numbers from zero to at least the highest value."""
    size = 1.0
    while highest / size > 10:
        size *= 10
    step = next(size * part for part in (0.1, 0.2, 0.5, 1) if highest <= 10 * size * part)
    count = max(1, -int(-highest // step))
    return [step * number for number in range(count + 1)]
