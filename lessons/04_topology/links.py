"""Links of lesson 04: ranks that share a machine reach each other as ever, others over a link that
takes its time.

    with machines(group, nodes=[0, 0, 1, 1], alpha=3e-3, beta=5e-8) as cluster:
        cluster.all_reduce(x, algorithm="hierarchical")

One laptop cannot show what a network costs, since there the processor carries every byte. Here a
message to another machine waits for α + n·β seconds, asleep. Each rank has a network card of its
own, which sends one message after the other.
"""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import numpy as np

from minidist.comm.group import Group
from minidist.comm.handle import Handle
from minidist.comm.transport import Tag, Transport
from minidist.comm.transports.throttled import Delayed


class Network(Delayed):
    """Delay messages to ranks of other machines only.

    Args:    nodes: the machine of each rank of the job.
    """

    def __init__(
        self, inner: Transport, nodes: Sequence[int], *, alpha: float, beta: float
    ) -> None:
        self.nodes = tuple(nodes)
        super().__init__(inner, alpha=alpha, beta=beta)

    def start_send(self, peer: int, tag: Tag, view: np.ndarray, meta: bytes = b"") -> Handle:
        if self.nodes[peer] == self.nodes[self.world_rank]:
            return self.inner.start_send(peer, tag, view, meta)
        return super().start_send(peer, tag, view, meta)


@contextlib.contextmanager
def machines(group: Group, nodes: Sequence[int], *, alpha: float, beta: float) -> Iterator[Group]:
    """Yield the same ranks as if they were on several machines; `nodes` has one number per rank of
    the group.

    Every rank of the group enters and leaves together, as with `split`.
    """
    of_job = dict(zip(group.world_ranks, nodes, strict=True))
    network = Network(
        group.transport,
        [of_job.get(rank, -1) for rank in range(group.transport.world_size)],
        alpha=alpha,
        beta=beta,
    )
    digest = hashlib.blake2b(f"{group.id}/machines/{tuple(nodes)}".encode(), digest_size=8).digest()
    cluster = Group(
        network,
        group.ledger,
        group.world_ranks,
        axis=f"{group.axis}.machines",
        id=int.from_bytes(digest, "little"),
        nodes=nodes,
    )
    try:
        yield cluster
        cluster.close()
    finally:
        network.close()
