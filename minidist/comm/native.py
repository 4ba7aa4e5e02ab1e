"""The interface of a transport's own collectives, which `algorithm="native"` uses.

    native = transport.native(group.id, group.world_ranks)   # ConfigError if the transport has none
    native.all_reduce(x, out, "sum")                         # on every rank, in the same order

The caller makes sure that all ranks make the same call (collectives/native.py): the libraries do
not check. Each method returns when this rank's part is done, and yields the core until then. Arrays
are 1-D, contiguous and on the host; sums are computed in their dtype, the other methods move bytes
(uint8). Those of a DeviceTransport (device_lane.py) take arrays on the GPU, and return when the
work is in the current stream's queue.

All raise: PeerLostError or the error given to `abort`; TimeoutError that names the rank after the
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
        """Copy the root's bytes to every other rank's `octets`."""

    @abstractmethod
    def reduce(self, x: np.ndarray, out: np.ndarray | None, op: str, root: int) -> None:
        """Combine all ranks' x into the root's `out`, which may be its x; a mean is not divided,
        here and below."""

    @abstractmethod
    def all_reduce(self, x: np.ndarray, out: np.ndarray, op: str) -> None:
        """Combine all ranks' x into every rank's `out`, which may be x."""

    @abstractmethod
    def reduce_scatter(
        self, x: np.ndarray, out: np.ndarray, counts: Sequence[int], op: str
    ) -> None:
        """Combine all ranks' x: the first counts[0] elements for rank 0, and so on; `out` does not
        overlap x."""

    @abstractmethod
    def gather(
        self, octets: np.ndarray, out: np.ndarray | None, counts: Sequence[int], root: int
    ) -> None:
        """Join counts[r] bytes from each rank r in the root's `out`."""

    @abstractmethod
    def all_gather(self, octets: np.ndarray, out: np.ndarray, counts: Sequence[int]) -> None:
        """Join counts[r] bytes from each rank r in every rank's `out`."""

    @abstractmethod
    def scatter(
        self, octets: np.ndarray | None, counts: Sequence[int], out: np.ndarray | None, root: int
    ) -> None:
        """Cut the root's bytes by `counts`, and copy part r to rank r's `out`; the root has no
        `out`."""

    @abstractmethod
    def all_to_all(
        self, octets: np.ndarray, leaving: Sequence[int], out: np.ndarray, coming: Sequence[int]
    ) -> None:
        """Send leaving[r] bytes to each rank r and receive coming[r] bytes from it; both arrays in
        rank order."""
