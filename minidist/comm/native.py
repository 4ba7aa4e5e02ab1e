"""What a transport's own collectives are to the rest: the interface behind `algorithm="native"`.

    native = transport.native(group.id, group.world_ranks)      # ConfigError if the transport has
                                                                none
    native.all_reduce(x, out, "sum")                            # on every rank of the group, in the
                                                                same order

The caller makes sure that all ranks make the same call (collectives/native.py): the libraries do
not check. Each method returns when its part is done, and yields the core until then. Arrays are
1-D, contiguous and on the host; sums are of their dtype, everything else moves bytes (uint8). A
DeviceTransport's (device_lane.py) take arrays on the GPU, and return when the work is in the
current stream's queue.

All raise: PeerLostError or what `abort` was given; TimeoutError that names the rank after the
transport's limit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np


class Native(ABC):
    """A transport's collectives among the ranks of one group."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called it."""

    @abstractmethod
    def broadcast(self, octets: np.ndarray, root: int) -> None:
        """The root's bytes into every other rank's `octets`."""

    @abstractmethod
    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        """All ranks' x combined into the root's `out`, which may be its x; a mean is left
        undivided, here and below."""

    @abstractmethod
    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """All ranks' x combined into every rank's `out`, which may be x."""

    @abstractmethod
    def reduce_scatter(
        self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str
    ) -> None:
        """All ranks' x combined, the first counts[0] elements for rank 0, and so on; `out` is apart
        from x."""

    @abstractmethod
    def gather(
        self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int
    ) -> None:
        """counts[r] bytes from each rank r, one after the other, into the root's `out`."""

    @abstractmethod
    def all_gather(self, octets: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """counts[r] bytes from each rank r, one after the other, into every rank's `out`."""

    @abstractmethod
    def scatter(
        self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int
    ) -> None:
        """The root's bytes, cut as `counts` says, rank r's into its `out`; the root has no
        `out`."""

    @abstractmethod
    def all_to_all(
        self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]
    ) -> None:
        """leaving[r] bytes to each rank r, coming[r] from each, one after the other on either
        side."""
