"""Groups made of groups: who belongs to the new one, in what order, and by what id it goes.

    world       0 1 2 3 4 5
    color       0 1 0 1 0 1     split: who passes the same color, in the order of their keys
    even, odd   0 . 2 . 4 .     . 1 . 3 . 5
    without 2   0 . . . 4 .     those that are left

An id is a hash of the parent's and of how the part came about: the same on every rank and in every run, and another for
every group, so groups that overlap or are nested may be used at once.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from minidist.errors import ConfigError

if TYPE_CHECKING:
    from minidist.comm.group import Group


class Part(NamedTuple):
    """Some ranks of a group, as a group.

    Attributes: id
                ranks   by their rank in the parent, in the order of the new group
                places  where each has reserved its board
                axis    what it is for
    """

    id: int
    ranks: list[int]
    places: list[int]
    axis: str


def of_color(group: "Group", number: int, color: int | None, key: int | None, axis: str | None) -> Part | None:
    """The part of those ranks that pass the same color; what Group.split says. None for color None.

    Args:    number: how many splits of the group this one makes.
    Raises:  ConfigError for a color or key that is no integer of 64 bits, and for an axis without a name.
    """
    for name, value in (("color", color), ("key", key)):
        if not isinstance(value, int | np.integer | None) or not -1 << 63 <= (value or 0) < 1 << 63:
            raise ConfigError(f"split: {name}={value!r} must be an integer of 64 bits, or None")
    if not isinstance(axis, str | None):
        raise ConfigError(f"split: axis={axis!r} must be a name, or None")
    place = -1 if color is None else group.transport.reserve_board()
    mine = [color is not None, color or 0, group.rank if key is None else key, place]
    with group.ledger.control():
        table = group.all_gather(np.array([mine], np.int64))
    if color is None:
        return None
    members = sorted((int(row[2]), rank, int(row[3])) for rank, row in enumerate(table) if row[0] and row[1] == color)
    return Part(_id_of(group.id, f"{number}/{int(color)}"), [rank for _, rank, _ in members],
                [place for _, _, place in members], axis or f"{group.axis}.split")


def left(group: "Group", gone: Iterable[int]) -> Part:
    """The part of those that are not `gone`, in their order. Sends nothing.

    Raises: ConfigError for a rank that the group does not have.
    """
    lost = sorted(set(gone))
    if unknown := [rank for rank in lost if rank not in range(group.size)]:
        raise ConfigError(f"without: the group {group.axis} has ranks 0 to {group.size - 1}, not {unknown}")
    ranks = [rank for rank in range(group.size) if rank not in lost]
    return Part(_id_of(group.id, f"without {lost}"), ranks, [-1] * len(ranks), group.axis)


def chosen(values: Sequence[int], part: Part) -> list[int]:
    """What a list over the parent's ranks has for those of the part."""
    return [values[rank] for rank in part.ranks]


def _id_of(parent: int, how: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{parent}/{how}".encode(), digest_size=8).digest(), "little")
