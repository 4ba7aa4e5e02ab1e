"""Chapter 24 · When each message of a collective leaves and arrives, by the walk of walk.py.

    for message in message_times("all_reduce", "ring", Operands(4096, itemsize=8), cluster,
    range(4)):
        message.src, message.dst, message.nbytes, message.start, message.stop

The figure of lesson 02 is drawn from it: the same on every machine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minidist.simulate.cluster import Cluster
from minidist.simulate.links import CallLinks
from minidist.simulate.messages import Operands, record
from minidist.simulate.walk import MessageWalk


class MessageTime(NamedTuple):
    """A message between ranks of a group, in bytes, and in seconds since the call began."""

    src: int
    dst: int
    nbytes: int
    start: float
    stop: float


def message_times(
    verb: str, algorithm: str, operands: Operands, cluster: Cluster, members: Sequence[int]
) -> list[MessageTime]:
    """Return every message of one call by the ranks at places `members`, in the order in which they
    leave.

    By the rules of walk.py: a blocking send leaves when its receiver is ready. The last message
    arrives when the call ends by call_cost, less what `cluster.call_seconds` and the last
    receiver's own work take.
    Raises: ConfigError for an algorithm that the verb does not have, or whose messages are the
    library's (native).
    """
    program = record(
        verb, algorithm, operands, len(members), [cluster.node_of(place) for place in members]
    )
    walked = MessageWalk(program, np.zeros(program.size), CallLinks(members, cluster)).run()
    left = walked.left(np.arange(len(program.src)))
    columns = (program.src, program.dst, program.nbytes, left, walked.arrived)
    return sorted(
        (
            MessageTime(*row)
            for row in zip(*(np.asarray(column).tolist() for column in columns), strict=True)
        ),
        key=lambda message: (message.start, message.src, message.dst),
    )
