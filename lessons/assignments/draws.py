"""Draw numbers from words: the same words give the same numbers on every machine and Python.

    draw = StudentDraw("assignment 1", course, student)
    draw.below(6)                   # 0 to 5
    draw.choice(("sum", "max"))
    draw.shuffled(range(6))

Each number is a SHA-256 of the words and of how many numbers were drawn before it.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class StudentDraw:
    """Numbers that are drawn one after the other."""

    def __init__(self, *words: str) -> None:
        # With the lengths, ("ab", "c") and ("a", "bc") give different seeds.
        self._seed = "".join(f"{len(word)}:{word};" for word in words).encode()
        self._count = 0

    def below(self, count: int) -> int:
        """Return a number from 0 to count - 1."""
        digest = hashlib.sha256(self._seed + str(self._count).encode()).digest()
        self._count += 1
        return int.from_bytes(digest[:16], "big") % count

    def between(self, least: int, most: int) -> int:
        """Return a number from `least` to `most`, both included."""
        return least + self.below(most - least + 1)

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self.below(len(options))]

    def shuffled(self, items: Iterable[T]) -> list[T]:
        """Return the items in a drawn order (Fisher and Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order
