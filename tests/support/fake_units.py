"""Units of ZeRO-3 without weights, for the order in which they are gathered."""

from typing import Any


class FakeUnit:
    """A unit with a name and nothing to gather."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.is_free = True

    def free(self) -> None:
        self.is_free = True


def units_named(names: str) -> Any:
    return [FakeUnit(name) for name in names]


def names_of(units: Any) -> str:
    return "".join(unit.name for unit in units)
