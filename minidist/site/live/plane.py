"""A plane with two axes on a picture: where a number lies, ticks, and curves cut off at the edge."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from minidist.site.live import Picture


@dataclass(frozen=True)
class Plane:
    """A rectangle of a picture with an axis of x and one of y.

    Attributes: left, top, width, height: in units of the picture; x, y: the numbers at both ends of
                an axis; log_x, log_y: whether an axis is logarithmic.
    """

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = False
    log_y: bool = False

    @property
    def bottom(self) -> float:
        """Return where the axis of x lies."""
        return self.top + self.height

    def across(self, x: float) -> float:
        """Return where a number of x lies; beyond an end, the end."""
        return self.left + self.width * _part(x, self.x, self.log_x)

    def up(self, y: float) -> float:
        """Return where a number of y lies; beyond an end, the end."""
        return self.bottom - self.height * _part(y, self.y, self.log_y)

    def axes(
        self,
        picture: Picture,
        x_ticks: Iterable[tuple[float, str]],
        y_ticks: Iterable[tuple[float, str]],
    ) -> None:
        """Draw both axes and their ticks, (number, text)."""
        right = self.left + self.width
        picture.line([(self.left, self.top), (self.left, self.bottom), (right, self.bottom)])
        for number, text in x_ticks:
            x = self.across(number)
            picture.line([(x, self.bottom), (x, self.bottom + 4)])
            picture.text(x, self.bottom + 17, text, "middle soft small")
        for number, text in y_ticks:
            y = self.up(number)
            picture.line([(self.left - 4, y), (self.left, y)])
            picture.text(self.left - 7, y + 4, text, "end soft small")

    def curve(self, picture: Picture, points: Sequence[tuple[float, float]], look: str) -> None:
        """Draw a line through points; those beyond an end of x are left out."""
        low, high = self.x
        inside = [(self.across(x), self.up(y)) for x, y in points if low <= x <= high]
        picture.line([(round(x), round(y)) for x, y in inside], look)

    def mark(self, picture: Picture, x: float, y: float, look: str, side: float = 9) -> None:
        """Draw a small square at a point."""
        picture.box(self.across(x) - side / 2, self.up(y) - side / 2, side, side, look)


def _part(number: float, ends: tuple[float, float], is_log: bool) -> float:
    """Return which part of an axis lies before a number, from 0 to 1."""
    low, high = ends
    if is_log:
        number = math.log(max(number, low))
        low = math.log(low)
        high = math.log(high)
    return min(1.0, max(0.0, (number - low) / (high - low)))
