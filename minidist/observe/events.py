"""Chapter 24 · The events of a rank: its actions in a step, in their order, without times.

A rank's trace is a list of events. Chapter 24 records it from the modules themselves, without data;
chapter 23 from a captured run. `minidist.observe.replay` puts the traces of all ranks on one clock.

    Busy(7, "forward", 0)  Start(0, GroupCall("tp", "all_reduce", "ring", 1 << 20))  Await(0)  …
"""

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias


class Busy(NamedTuple):
    """Work of the rank's own stream; `work` names it, and the replay gives its duration."""

    work: Hashable
    name: str  # "forward", "backward", "update", …
    micro: int | None = None  # microbatch


class GroupCall(NamedTuple):
    """A collective, or a message to or from one peer; axis and rank together identify the group.

    The n-th collective of a group on one rank is the n-th on its other ranks. Messages of a pair of
    ranks are matched in order. An exchange is two calls: a send and a recv.
    """

    axis: str  # "dp", "tp", "dp,cp", "world"
    verb: str  # "all_reduce", …, "send", "recv"
    algorithm: str  # never "auto"
    nbytes: int  # bytes of the rank's array: n of the volume formulas
    blocks: tuple[int, ...] = ()  # bytes of each rank if they differ; all_to_all: to each rank
    peer: int = -1  # for a message: the other rank, numbered in the group
    name: str = ""  # bucket or layer, for pictures
    itemsize: int = 1
    dims: int = 1


class Start(NamedTuple):
    """The start of a call in the background; calls of one group run one after another."""

    id: int  # unique in the rank's trace
    call: GroupCall


class Await(NamedTuple):
    """A wait for the end of call or move `id`. A blocking call is Start and Await.

    A recorded call does not end on all ranks at the same moment; its end is that of the last rank.
    """

    id: int
    sooner: float = 0.0  # seconds before the end of the call at which this rank continues


class Memory(NamedTuple):
    """A change of the memory account: bytes allocated, or freed if negative."""

    category: str
    nbytes: int


class Sync(NamedTuple):
    """The host waits until its device has ended everything before: it reads a number."""


class Transfer(NamedTuple):
    """A copy between device, host and disk, on its own lane; Await(id) waits for it."""

    id: int
    lane: str
    nbytes: int


Event: TypeAlias = Busy | Start | Await | Memory | Sync | Transfer
