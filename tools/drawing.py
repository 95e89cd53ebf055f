"""SVG drawings of the protocol: statuses with their transitions, and scenarios with their messages.

The same input always gives the same file, so that a check can compare them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

INK, GREY, BLUE, RED = "#1f2430", "#6b7280", "#2f4fb5", "#b3261e"
CHAR = 6.4
"""Approximate width of a character of 12 pixels."""

Labels = Mapping[str, Mapping[str, Sequence[str]]]
"""{status: {next status: the events that cause the transition}}."""


@dataclass(slots=True)
class Canvas:
    """Collects shapes; coordinates are in pixels from the upper left corner."""

    width: float
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, *, anchor: str = "middle", ink: str = INK, bold: bool = False,
             size: int = 12) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}" font-size="{size}"{weight}>'
            f"{escape(words, quote=False)}</text>"
        )

    def words(self, x: float, y: float, words: str) -> None:
        """Add small text on a background that hides the lines behind it."""
        width = len(words) * 5.8
        self.parts.append(f'<rect x="{x - width / 2:g}" y="{y - 10:g}" width="{width:g}" height="13" fill="#ffffff"/>')
        self.text(x, y, words, size=11)

    def line(self, x: float, y: float, to_x: float, to_y: float, *, ink: str = INK, dashed: bool = False,
             arrow: bool = False) -> None:  # fmt: skip
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}", ink=ink, dashed=dashed, arrow=arrow)

    def path(self, steps: str, *, ink: str = INK, dashed: bool = False, arrow: bool = False) -> None:
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        head = f' marker-end="url(#{_head(ink)})"' if arrow else ""
        self.parts.append(f'<path d="{steps}" fill="none" stroke="{ink}"{dash}{head}/>')

    def box(self, x: float, y: float, width: float, height: float, *, fill: str = "#eef1fb", ink: str = BLUE) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{fill}" stroke="{ink}"/>'
        )

    def svg(self, title: str, height: float) -> str:
        """Return the whole drawing, on white, so that it can be read on a dark page too."""
        heads = "".join(
            f'<marker id="{_head(ink)}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'orient="auto"><path d="M0 0L8 4L0 8z" fill="{ink}"/></marker>'
            for ink in (INK, BLUE, RED)
        )
        opening = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{height:g}" '
            f'viewBox="0 0 {self.width:g} {height:g}" role="img" font-family="system-ui, sans-serif">'
        )
        ground = f'<rect width="{self.width:g}" height="{height:g}" fill="#ffffff"/>'
        return "\n".join(
            [opening, f"<title>{escape(title)}</title><defs>{heads}</defs>", ground, *self.parts, "</svg>\n"]
        )


def _head(ink: str) -> str:
    return f"head-{ink[1:]}"


# --- statuses ---------------------------------------------------------------------------------------------------------

GAP: Final = 190.0
BOX: Final = (112.0, 34.0)
LINE: Final = 14.0
ROOM: Final = 22.0
"""Space between an arc and the labels of those below it."""


@dataclass(slots=True)
class _Arc:
    """An arc from one status to another; `level` is its distance from the statuses."""

    source: int
    target: int
    words: list[str]
    level: float = 0.0

    @property
    def is_forward(self) -> bool:
        return self.target > self.source

    @property
    def span(self) -> tuple[int, int]:
        return min(self.source, self.target), max(self.source, self.target)

    @property
    def end(self) -> float:
        """Return the height at which its labels end."""
        return self.level + len(self.words) * LINE


def states(title: str, moves: Labels) -> str:
    """Return a drawing of statuses in a row, in order: forward transitions above them, backward ones below."""
    order = list(moves)
    arcs = [
        _Arc(order.index(status), order.index(other), [part for event in events for part in textwrap.wrap(event, 27)])
        for status, row in moves.items()
        for other, events in row.items()
    ]
    sides = [_levelled(arc for arc in arcs if arc.is_forward is forward) for forward in (True, False)]
    y = max((arc.end for arc in sides[0]), default=0.0) + 30
    canvas, labels = Canvas(GAP * len(order)), Canvas(0)
    for side in sides:
        for arc in side:
            _bow(canvas, labels, y, arc, _slot(side, arc, arc.source), _slot(side, arc, arc.target))
    canvas.parts += labels.parts
    for index, status in enumerate(order):
        canvas.box(GAP * index + (GAP - BOX[0]) / 2, y, *BOX)
        canvas.text(GAP * index + GAP / 2, y + 22, status, bold=True, size=13)
    return canvas.svg(title, y + BOX[1] + max((arc.end for arc in sides[1]), default=0.0) + 20)


def _levelled(arcs: Iterable[_Arc]) -> list[_Arc]:
    """Return the arcs, shortest first, each placed beyond the labels of those that it spans."""
    placed: list[_Arc] = []
    for arc in sorted(arcs, key=lambda arc: (arc.span[1] - arc.span[0], arc.span)):
        below = [o.end for o in placed if max(arc.span[0], o.span[0]) < min(arc.span[1], o.span[1])]
        arc.level = max(below, default=0.0) + ROOM
        placed.append(arc)
    return placed


def _slot(side: Sequence[_Arc], arc: _Arc, status: int) -> float:
    """Return the x at which the arc meets the status: the longer the arc, the closer to the middle of the box."""
    is_right = max(arc.span) != status
    there = [other for other in side if status in other.span and (max(other.span) != status) is is_right]
    offset = 48.0 - 11.0 * there.index(arc)
    return GAP * status + GAP / 2 + (offset if is_right else -offset)


def _bow(canvas: Canvas, labels: Canvas, y: float, arc: _Arc, x: float, to_x: float) -> None:
    up = -1 if arc.is_forward else 1
    edge = y if arc.is_forward else y + BOX[1]
    top = edge + up * arc.level
    turn = 10 if to_x > x else -10
    canvas.path(
        f"M{x:g} {edge:g}L{x:g} {top - up * 10:g}Q{x:g} {top:g} {x + turn:g} {top:g}L{to_x - turn:g} {top:g}"
        f"Q{to_x:g} {top:g} {to_x:g} {top - up * 10:g}L{to_x:g} {edge + up * 2:g}",
        ink=BLUE, arrow=True,
    )  # fmt: skip
    first = top - 5 - (len(arc.words) - 1) * LINE if arc.is_forward else top + LINE
    for index, part in enumerate(arc.words):
        labels.words((x + to_x) / 2, first + index * LINE, part)


# --- scenarios --------------------------------------------------------------------------------------------------------

COLUMN: Final = 330.0
LEFT: Final = 150.0
ROW: Final = 21.0
_MESSAGE = re.compile(r"(\w+) -> (\w+): (.+?)(?: \((lost|late|twice)\))?(?: x(\d+))?")
_DESCRIBED = re.compile(r"(\w+) notifies subscription (\d+): (.+?)(?: x(\d+))?")
_STOPS = {"dies": True, "shuts down": True, "freezes": True, "starts": False, "thaws": False}


@dataclass(frozen=True, slots=True)
class Scene:
    """What happens at one time, and the messages sent until then; `why` is the explanation, may be empty."""

    at: float
    why: str
    do: str
    then: Sequence[str]


def scenario(title: str, parties: Sequence[str], scenes: Iterable[Scene]) -> str:
    """Return a drawing with the parties side by side and time downwards. Each message is an arrow; each update from an
    agent to its session is a dot."""
    chart = _Chart(list(parties))
    for scene in scenes:
        chart.scene(scene)
    return chart.svg(title)


class _Chart:
    def __init__(self, parties: list[str]) -> None:
        self._x = {name: LEFT + index * COLUMN for index, name in enumerate(parties)}
        self._last = parties[-1]
        self._width = max(LEFT + COLUMN * (len(parties) - 1) + 60, LEFT + COLUMN + 60)
        self._canvas = Canvas(self._width)
        self._y = 56.0
        self._since = dict.fromkeys(parties, 40.0)
        self._stopped: set[str] = set()

    def scene(self, scene: Scene) -> None:
        self._y += 12
        self._canvas.text(10, self._y, f"{scene.at:g} s", anchor="start", ink=GREY)
        for words in textwrap.wrap(scene.why, int((self._width - 70) / CHAR)):
            self._words(words, ink=GREY)
        if scene.do:
            self._words(scene.do, bold=True)
            self._turn(scene.do)
        for line in scene.then:
            self._line(line)

    def svg(self, title: str) -> str:
        lines = Canvas(self._width)
        for name in self._x:
            self._life(name, self._y)
            lines.box(self._x[name] - 30, 10, 60, 28)
            lines.text(self._x[name], 29, name, bold=True, size=13)
        self._canvas.parts += lines.parts
        return self._canvas.svg(title, self._y + 14)

    def _words(self, words: str, *, ink: str = INK, bold: bool = False) -> None:
        width = len(words) * CHAR + 12
        self._canvas.parts.append(f'<rect x="56" y="{self._y - 13:g}" width="{width:g}" height="18" fill="#ffffff"/>')
        self._canvas.text(60, self._y, words, anchor="start", ink=ink, bold=bold)
        self._y += 17

    def _turn(self, happening: str) -> None:
        name, _, what = happening.partition(" ")
        if name in self._x and what in _STOPS:
            self._life(name, self._y - 10)
            (self._stopped.add if _STOPS[what] else self._stopped.discard)(name)

    def _life(self, name: str, until: float) -> None:
        """Draw the lifeline from where it last ended, behind what is already drawn."""
        line = Canvas(self._width)
        line.line(self._x[name], self._since[name], self._x[name], until, ink="#c3c7d1", dashed=name in self._stopped)
        self._canvas.parts[:0] = line.parts
        self._since[name] = until

    def _line(self, line: str) -> None:
        if found := _MESSAGE.fullmatch(line):
            self._message(*found.groups())
        elif found := _DESCRIBED.fullmatch(line):
            self._reported(*found.groups())
        else:
            self._words(line.replace(" x", " ×"), ink=GREY)
            self._y += 4

    def _message(self, source: str, target: str, words: str, fate: str | None, times: str | None) -> None:
        x, to_x = self._x[source], self._x[target]
        parts = textwrap.wrap(words + (f" ×{times}" if times else ""), int((abs(to_x - x) - 16) / CHAR))
        for part in parts:
            self._canvas.text((x + to_x) / 2, self._y + 2, part)
            self._y += 15
        self._y -= 8
        ink = RED if fate == "lost" else BLUE
        end = x + (to_x - x) * 0.8 if fate == "lost" else to_x + (3 if to_x < x else -3)
        self._canvas.line(x, self._y, end, self._y, ink=ink, dashed=fate in ("lost", "late"), arrow=fate != "lost")
        if fate == "lost":
            self._canvas.text(end, self._y + 5, "✕", ink=RED, bold=True, size=14)
        elif fate is not None:
            self._canvas.text(to_x, self._y - 5, fate, anchor="end" if to_x > x else "start", ink=RED, size=11)
        self._y += ROW

    def _reported(self, who: str, number: str, words: str, times: str | None) -> None:
        is_last = who == self._last
        x = self._x[who]
        said = f"session{'' if number == '1' else ' ' + number}: {words}" + (f" ×{times}" if times else "")
        self._canvas.parts.append(f'<circle cx="{x:g}" cy="{self._y - 4:g}" r="3.5" fill="{BLUE}"/>')
        self._canvas.text(
            x + (-10 if is_last else 10), self._y, said, anchor="end" if is_last else "start", ink=GREY, size=11
        )
        self._y += ROW - 4
