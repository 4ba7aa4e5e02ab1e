"""Live figures: what a reader sees at every position of a figure's sliders, computed by the modules
of this package when the site is built.

A figure is a prediction, some controls, and a picture for each choice of their values. The page
draws the pictures (static/live.js) and computes nothing. All words come in both languages: a figure
is made by `figure(say)`, where say(english, chinese) returns one of them.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

Say = Callable[[str, str], str]
"""say(english, chinese) returns the text in the reader's language."""

NAMES = (
    "families",
    "ring",
    "buckets",
    "edit_schedule",
    "schedules",
    "cuts",
    "ring_attention",
    "zero_memory",
    "mesh",
    "routing",
    "sawtooth",
    "offload_lanes",
    "compression",
    "roofline",
    "thousand",
    "sick_job",
    "checkpoint",
)
"""The modules of this package that hold a figure each, in the order of the course."""


@dataclass(frozen=True)
class Control:
    """A slider: its label, and the text of each of its positions."""

    label: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """A question, which a reader answers before the figure moves."""

    question: str
    choices: tuple[str, ...]
    right: int  # the place of the right choice
    why: str


@dataclass
class Picture:
    """What a reader sees at one position of all sliders: shapes, facts below them, and the command
    that gives the same numbers."""

    command: str
    facts: list[str] = field(default_factory=list)
    shapes: list[list[Any]] = field(default_factory=list)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        color: str,
        text: str = "",
        *,
        sets: tuple[int, int] | None = None,
    ) -> None:
        """Draw a rectangle, with a text in its middle.

        Args:    color: a class of live.css: c0 … c7, free, wrong, right, edge. sets: (control,
                 position) that a click chooses.
        """
        shape: list[Any] = ["r", _short(x), _short(y), _short(width), _short(height), color]
        if text or sets:
            shape.append(text)
        if sets:
            shape.append(list(sets))
        self.shapes.append(shape)

    def text(self, x: float, y: float, text: str, look: str = "") -> None:
        """Write a text whose baseline begins at (x, y). Args: look: classes of live.css: middle,
        end, bold, soft, small."""
        self.shapes.append(["t", _short(x), _short(y), text, *([look] if look else [])])

    def line(self, points: Sequence[tuple[float, float]], look: str = "") -> None:
        """Draw a line through points. Args: look: classes: c0 … c7, thick, dashed."""
        told = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        self.shapes.append(["l", told, *([look] if look else [])])


def _short(number: float) -> float | int:
    """Return a place on the picture, to a tenth."""
    rounded = round(float(number), 1)
    return int(rounded) if rounded == int(rounded) else rounded


@dataclass(frozen=True)
class Live:
    """A live figure. Attributes: lesson, section: where it stands, "03", "3"; size: of the picture,
    in units of the page; picture(positions): what is seen, by the position of each control."""

    name: str
    lesson: str
    section: str
    title: str
    predict: Prediction
    controls: tuple[Control, ...]
    size: tuple[int, int]
    picture: Callable[..., Picture]
    start: tuple[int, ...] = ()  # the positions at first; the first of each if left out

    def positions(self) -> Iterator[tuple[int, ...]]:
        """Yield every choice of positions, the last control's changing first."""
        yield from product(*(range(len(control.values)) for control in self.controls))


def every(say: Say) -> list[Live]:
    """Return all figures in a language."""
    return [importlib.import_module(f"{__name__}.{name}").figure(say) for name in NAMES]


def data_of(live: Live) -> dict[str, Any]:
    """Return what the page reads of a figure: each shape once, and pictures as lists of their
    places."""
    pictures = [live.picture(*place) for place in live.positions()]
    places: dict[str, int] = {}
    shapes = list[list[Any]]()
    drawn = list[list[int]]()
    for picture in pictures:
        keys = [repr(shape) for shape in picture.shapes]
        for key, shape in zip(keys, picture.shapes, strict=True):
            if key not in places:
                places[key] = len(shapes)
                shapes.append(shape)
        drawn.append([places[key] for key in keys])
    return {
        "size": live.size,
        "choices": live.predict.choices,
        "right": live.predict.right,
        "why": live.predict.why,
        "controls": [[control.label, control.values] for control in live.controls],
        "start": live.start or (0,) * len(live.controls),
        "shapes": shapes,
        "pictures": [
            [shown, picture.facts, picture.command]
            for shown, picture in zip(drawn, pictures, strict=True)
        ],
    }
