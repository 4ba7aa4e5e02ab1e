"""Provide a group for checks: an asynchronous sum arrives when wait() is called; waits are counted.

The checks of lessons 07 and 15 give it to a student's code, and so see whether backward continues
while sums are on their way. Without it, an answer that waits for each sum at once gives the right
numbers, and passes.
"""

from typing import Any

import numpy as np

from minidist.comm.group import Group

SAME_WAITS = 20  # waits for one sum, after which a loop is taken to be endless


class LateHandle:
    """A sum on its way. It is put into its place when it is waited for, and not before."""

    def __init__(
        self, group: "LateGroup", handle: Any, x: np.ndarray, room: np.ndarray, out: np.ndarray
    ) -> None:
        self.group = group
        self.handle = handle
        self.room = room
        self.out = out
        self.waits = 0
        self.x: np.ndarray | None = x  # what is summed, until it is waited for

    def wait(self) -> np.ndarray:
        """Return `out`, with the sum in it.

        Raises:  RuntimeError at the 21st wait.
        """
        self.handle.wait()
        self.group.waits += 1
        self.waits += 1
        if self.waits == 1:
            self.out[...] = self.room
            self.x = None
            self.group.flying.remove(self)
        if self.waits > SAME_WAITS:
            raise RuntimeError(
                "the same sum is waited for again and again: take it out of the list once it "
                "has landed"
            )
        return self.out


class LateGroup:
    """A group whose asynchronous sums arrive when they are waited for.

    Attributes: flying: the handles that were not waited for yet; waits: how many waits there were.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank = group.rank
        self.size = group.size
        self.flying: list[LateHandle] = []
        self.waits = 0

    def start_all_reduce(self, x: np.ndarray, *, out: np.ndarray, **options: Any) -> LateHandle:
        """Start an all-reduce as the group does, but `out` (n,) keeps its old numbers until
        wait()."""
        return self._started(self.group.start_all_reduce, x, out, options)

    def start_reduce_scatter(self, x: np.ndarray, *, out: np.ndarray, **options: Any) -> LateHandle:
        """Start a reduce-scatter as the group does, but `out` (this rank's chunk of x) keeps its
        old numbers until wait()."""
        return self._started(self.group.start_reduce_scatter, x, out, options)

    def land(self) -> int:
        """Wait for all that flies, so that no message is under way; returns how many sums that
        were."""
        left = list(self.flying)
        for handle in left:
            handle.wait()
        return len(left)

    def _started(
        self, verb: Any, x: np.ndarray, out: np.ndarray, options: dict[str, Any]
    ) -> LateHandle:
        """Return the handle of a sum that starts now, by the ring."""
        room = np.empty_like(out)
        handle = LateHandle(
            self, verb(x, out=room, **{**options, "algorithm": "ring"}), x, room, out
        )
        self.flying.append(handle)
        return handle
