"""Chapter 24 · The events of a rank: what it does in a step, in its own order, without times.

A rank's trace is a list of these. Chapter 24 records it from the modules themselves, without data;
chapter 23 from a captured run. `minidist.observe.replay` puts all ranks' traces on one clock.

    Busy(7, "forward", 0)  Start(0, GroupCall("tp", "all_reduce", "ring", 1 << 20))  Await(0)  …
"""

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias


class Busy(NamedTuple):
    """The rank's own stream works; `work` says what it does, and the replay says how long that
    takes."""

    work: Hashable
    name: str  # "forward", "backward", "update", …
    micro: int | None = None  # microbatch


class GroupCall(NamedTuple):
    """A collective, or a message to or from one peer. The axis and the rank together name the
    group.

    The n-th collective of a group on one rank meets the n-th on the others. Messages of a pair meet
    in order. An exchange is two calls: a send and a recv.
    """

    axis: str  # "dp", "tp", "dp,cp", "world"
    verb: str  # "all_reduce", …, "send", "recv"
    algorithm: str  # never "auto"
    nbytes: int  # of the rank's array: n of the volume formulas
    blocks: tuple[int, ...] = ()  # bytes of each rank where they differ; all_to_all: to each rank
    peer: int = -1  # of a message: rank in the group
    name: str = ""  # bucket or layer, for pictures
    itemsize: int = 1
    dims: int = 1


class Start(NamedTuple):
    """A call begins in the background; the calls of one group run one after another."""

    id: int  # unique in the rank's trace
    call: GroupCall


class Await(NamedTuple):
    """The rank stands still until call or move `id` has ended. A blocking call is Start and Await.

    A recorded call does not end on all ranks at one moment; its end is that of the last rank.
    """

    id: int
    sooner: float = 0.0  # seconds before the end of the call at which this rank continues


class Memory(NamedTuple):
    """The memory account changed: bytes taken, or freed if negative."""

    category: str
    nbytes: int


class Transfer(NamedTuple):
    """A copy between device, host and disk, on a lane of its own; Await(id) waits for it."""

    id: int
    lane: str
    nbytes: int


Event: TypeAlias = Busy | Start | Await | Memory | Transfer
