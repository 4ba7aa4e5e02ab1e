"""Hybrid sharding: ranks of a node share one copy of the state, and every node has a copy.

Gathering and scattering go over the links inside a node, which are fast; between nodes travel only sums of shards:

    8 ranks, shard=4       node 0           node 1
    share a copy        0   1   2   3    4   5   6   7     gather weights, reduce-scatter gradients
    same shard          0 ─────────────── 4                 all-reduce that shard's gradients; 1-5, 2-6, 3-7 too

With S ranks a copy and R = P/S copies a rank holds 1/S where it would hold 1/P, and sends in a step, for n bytes that
are gathered or scattered in c collectives:

    inside, axis "dp.shard"         (S-1)/S × cn
    between, axis "dp.replicas"     2(R-1)/R × n/S, once a step, whatever the number of backward passes

notes:   N2:426 names it (混合分片策略), and means ZeRO-3 with tensor parallelism; this is its usual meaning
Source:  Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", §3.2.2.
"""

from collections.abc import Iterable

from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.parallel.step.recorder import Recorder


class Sharing:
    """Who shares a copy with this rank, and who holds the same shard of other copies.

    Args:    group: all ranks of the data axis; shard: how many neighbours share one copy (None: all of them).
             algorithm: of the all-reduce between copies.
    Attributes: group  all ranks
                shard  those that share this rank's copy
                copies how many copies there are
    Raises:  ConfigError if `shard` does not divide the group.
    """

    def __init__(self, group: Group, shard: int | None, *, algorithm: str, recorder: Recorder) -> None:
        size = group.size if shard is None else shard
        if size not in divisors(group.size):
            raise ConfigError(f"shard={shard}: {group.size} ranks cannot be cut into copies of {size}; choose one of "
                              f"{', '.join(map(str, divisors(group.size)))}")
        self.group, self.copies, self.algorithm, self.recorder = group, group.size // size, algorithm, recorder
        self.shard, self._replicas = group, None
        if self.copies > 1:
            self.shard = _split(group, group.rank // size, "shard")
            self._replicas = _split(group, group.rank % size, "replicas")
        self._pending: list[Pending] = []

    def start_sum(self, chunk: Array, what: str) -> None:
        """Begin to sum a shard's gradients, already summed within this copy, over all copies, in place.

        Cost:    one all-reduce of the chunk over the copies; nothing where there is one copy.
        """
        if self._replicas is not None:
            self.recorder.announce(self._replicas.axis, f"all_reduce {what}")
            self._pending.append(self._replicas.start_all_reduce(chunk, out=chunk, algorithm=self.algorithm))

    def require_room(self, there: Iterable[bool]) -> None:
        """Refuse several copies where a shard's gradients are not on the device, to be summed there."""
        if self.copies > 1 and not all(there):
            raise ConfigError(f"shard={self.shard.size} of {self.group.size} ranks: the gradients of {self.copies} "
                              f"copies are summed on the device, and an offload takes them away; use one of the two")

    def settle(self) -> None:
        """Return when all sums are there."""
        for pending in self._pending:
            pending.wait()
        self._pending = []


def divisors(size: int) -> list[int]:
    """What divides `size`: the numbers of ranks that can share a copy."""
    return [number for number in range(1, size + 1) if size % number == 0]


def _split(group: Group, color: int, what: str) -> Group:
    part = group.split(color, axis=f"{group.axis}.{what}")
    assert part is not None
    return part
