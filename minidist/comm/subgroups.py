"""The ranks, order and id of a group that is made from another group. Nothing is sent here.

    world       0 1 2 3 4 5
    color       0 1 0 1 0 1     split: the ranks of one color, in the order of their keys
    even, odd   0 . 2 . 4 .     . 1 . 3 . 5
    without 2   0 1 . 3 4 5     the remaining ranks

An id is a hash of the parent's id and of the operation that made the subgroup: the same on every
rank and in every run, and different for every group, so groups that overlap or are nested may be
used at the same time.
"""

import hashlib
from collections.abc import Iterable

import numpy as np

from minidist.comm.calls.members import Members
from minidist.errors import ConfigError

Subgroup = tuple[int, str, list[int], list[int]]
"""A group to be made: id, axis, its ranks in order (by their rank in the parent), and each rank's
reserved place of the board."""


def row(members: Members, color: int | None, key: int | None, axis: str | None) -> np.ndarray:
    """Return this rank's row of a split: [[has a color, color, key, place of its board]], int64 (1,
    4).

    Raises: ConfigError for a color or key that is no integer of 64 bits, and for an axis without a
    name.
    """
    for name, value in (("color", color), ("key", key)):
        if not isinstance(value, int | np.integer | None) or not -1 << 63 <= (value or 0) < 1 << 63:
            raise ConfigError(f"split: {name}={value!r} must be an integer of 64 bits, or None")
    if not isinstance(axis, str | None):
        raise ConfigError(f"split: axis={axis!r} must be a name, or None")
    place = -1 if color is None else members.transport.reserve_board()
    return np.array(
        [[color is not None, color or 0, members.rank if key is None else key, place]], np.int64
    )


def of_color(
    members: Members, number: int, color: int, table: np.ndarray, axis: str | None
) -> Subgroup:
    """Return the group of the ranks that pass `color`, in the order of their keys, then of their
    ranks.

    Args: number: the number of this split in the group, from 1; table: all ranks' rows, int64
    (size, 4).
    """
    chosen = sorted(
        (int(entry[2]), rank, int(entry[3]))
        for rank, entry in enumerate(table)
        if entry[0] and entry[1] == color
    )
    return (
        derived_id(members.id, f"{number}/{int(color)}"),
        axis or f"{members.axis}.split",
        [rank for _, rank, _ in chosen],
        [place for _, _, place in chosen],
    )


def without(members: Members, gone: Iterable[int]) -> Subgroup:
    """Return the group of the ranks that are not `gone`, in their order. Raises: ConfigError for a
    rank that the group does not have."""
    lost = sorted(set(gone))
    if unknown := [rank for rank in lost if rank not in range(members.size)]:
        raise ConfigError(
            f"without: the group {members.axis} has ranks 0 to {members.size - 1}, not {unknown}"
        )
    ranks = [rank for rank in range(members.size) if rank not in lost]
    return derived_id(members.id, f"without {lost}"), members.axis, ranks, [-1] * len(ranks)


def derived_id(parent: int, how: str) -> int:
    """Return the id of a group made from group `parent` by the operation `how`; the same on every
    rank."""
    return int.from_bytes(
        hashlib.blake2b(f"{parent}/{how}".encode(), digest_size=8).digest(), "little"
    )
