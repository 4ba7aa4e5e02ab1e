"""Chapter 24 · What a collective costs on a cluster: its messages, walked once over the links that
they cross.

    cost = call_cost(GroupCall("dp", "all_reduce", "ring", 1 << 20), places, cluster)
    cost.seconds, cost.link_bytes           # bytes on each link, by its number

The messages are those of the algorithm's own code (messages.py); there is no second formula. Rules
of the walk, with the five numbers of comm/cost/link_model.py on each link:

    A message takes α, the sum over its route, and n·β of the narrowest link. It goes through all
    links at once. A link carries one message at a time, in the order in which they come. (Two that
    share it evenly end when the later
    of these does.)  The first and the last link are also busy for o, a receiver that adds for n·γ,
                     and both for n·κ
    where every rank sends to all others at once.
    A send whose sender does nothing else meanwhile (send, exchange) leaves when its receiver is
    ready; any other leaves when it is started. Either is complete when the message has arrived.
    What ranks show each other in shared memory is written and read once, at β/2 a byte each, and
    all wait for all.

To each call the cluster's `call_seconds` are added.

So on links that are all alike an algorithm takes what comm/cost/critical_path.py says, to the last
digit; but for a tree's way down among P ranks that are no power of two, where that counts one α too
many.

Algorithm `native` of GPUs and TPUs is no code of ours: library.py models it. notes: N4 §2.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import fsum
from typing import NamedTuple, Protocol

import numpy as np

from minidist.comm.collectives.torus import grid
from minidist.comm.limits import SHOWN_BYTES, STRETCH_BYTES
from minidist.simulate.cluster import Cluster
from minidist.simulate.library import Library
from minidist.simulate.messages import Operands, record, record_turned
from minidist.simulate.program import (
    ADD,
    ARRIVED,
    END,
    POST,
    SEND,
    SENT,
    SHOW,
    Program,
    TurnedProgram,
)
from minidist.simulate.turned_walk import TurnedWalk

FEW_PERIODS = 3  # a call of more stretches than this is continued in a straight line from these


class Priced(Protocol):
    """A call as observe/events.py has it."""

    @property
    def verb(self) -> str: ...
    @property
    def algorithm(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def blocks(self) -> tuple[int, ...]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def dims(self) -> int: ...


class CallCost(NamedTuple):
    """The cost of a call that shares no link with another."""

    seconds: float
    link_bytes: dict[int, int]  # by the link's number
    messages: int  # of all ranks
    sent_bytes: int


def call_cost(call: Priced, members: Sequence[int], cluster: Cluster) -> CallCost:
    """Return the cost of a call of the ranks at places `members`, in the group's order. Remembered
    by cluster.

    A message (send, recv, exchange) has two members: where it comes from and where it goes.

    Raises: ConfigError for a verb or algorithm that there is not.
    """
    if len(members) < 2:
        return CallCost(0.0, {}, 0, 0)
    if call.verb in ("send", "recv", "exchange"):
        alone = _message(members[0], members[-1], call.nbytes, cluster)
        return (
            alone._replace(seconds=alone.seconds + cluster.call_seconds(2))
            if alone.messages
            else alone
        )
    remembered = _costs(cluster)
    operands = Operands(call.nbytes, tuple(call.blocks), call.itemsize, call.dims)
    key = (call.verb, call.algorithm, operands, tuple(members))
    found = remembered.get(key)
    if found is None:
        if call.algorithm == "native":
            seconds, link_bytes, sent = library_of(cluster, tuple(members)).cost(
                call.verb, operands
            )
            found = CallCost(seconds, link_bytes, len(members), sent)
        else:
            found = _walked(call.verb, call.algorithm, operands, tuple(members), cluster)
            found = found._replace(seconds=found.seconds + cluster.call_seconds(len(members)))
        remembered[key] = found
    return found


_Memory = dict[tuple[str, str, Operands, tuple[int, ...]], CallCost]


def _costs(cluster: Cluster) -> _Memory:
    return cluster.topology.__dict__.setdefault("_costs", {})  # type: ignore[no-any-return]


def library_of(cluster: Cluster, members: tuple[int, ...]) -> Library:
    """Return the library of a group, remembered by cluster."""
    known: dict[tuple[int, ...], Library] = cluster.topology.__dict__.setdefault("_libraries", {})
    if members not in known:
        known[members] = Library(members, cluster)
    return known[members]


def _message(src: int, dst: int, nbytes: int, cluster: Cluster) -> CallCost:
    route = cluster.route(src, dst)
    if not route:
        return CallCost(0.0, {}, 0, 0)
    links = cluster.links
    seconds = fsum(links[number].alpha for number in route)
    seconds += nbytes / min(links[number].bandwidth for number in route)
    return CallCost(seconds, dict.fromkeys(route, nbytes), 1, nbytes)


# ---------------------------------------------------------------- long calls


def _period(verb: str, algorithm: str, size: int) -> int:
    """Return bytes after which a long call's messages begin again; 0 if they do not."""
    if algorithm == "shared":
        return 0 if verb == "barrier" else SHOWN_BYTES
    if verb != "all_reduce" or algorithm not in ("ring", "hierarchical", "torus"):
        return 0
    return STRETCH_BYTES * (grid(size).columns if algorithm == "torus" else 1)


def _walked(
    verb: str, algorithm: str, operands: Operands, members: tuple[int, ...], cluster: Cluster
) -> CallCost:
    """Return the cost by the walk; of a long call the last of few periods, as often as it comes.

    Every period does the same, so from the second on each adds the same time. Its remainder is
    walked with the others.
    """
    period = _period(verb, algorithm, len(members))
    periods = 0 if not period or operands.blocks else operands.nbytes // period
    if periods <= FEW_PERIODS:
        return walk(
            _recorded(verb, algorithm, operands, len(members), _nodes(members, cluster)),
            members,
            cluster,
        )
    rest = operands.nbytes - periods * period
    fewer, more = (
        _walked(verb, algorithm, operands._replace(nbytes=rest + count * period), members, cluster)
        for count in (FEW_PERIODS - 1, FEW_PERIODS)
    )
    times = periods - FEW_PERIODS
    return CallCost(
        more.seconds + times * (more.seconds - fewer.seconds),
        {
            number: nbytes + times * (nbytes - fewer.link_bytes.get(number, 0))
            for number, nbytes in more.link_bytes.items()
        },
        more.messages + times * (more.messages - fewer.messages),
        more.sent_bytes + times * (more.sent_bytes - fewer.sent_bytes),
    )


def _nodes(members: Sequence[int], cluster: Cluster) -> tuple[int, ...]:
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(cluster.node_of(place), len(numbers)) for place in members)


@lru_cache(maxsize=64)
def _recorded(
    verb: str, algorithm: str, operands: Operands, size: int, nodes: tuple[int, ...]
) -> Program | TurnedProgram:
    """Return one program for all ranks where they do the same; else a program of each."""
    return record_turned(verb, algorithm, operands, size, nodes) or record(
        verb, algorithm, operands, size, nodes
    )


# ---------------------------------------------------------------- the walk


def walk(program: Program | TurnedProgram, members: Sequence[int], cluster: Cluster) -> CallCost:
    """Replay a program on the places `members`.

    In a round every rank that does not wait carries out one operation. All ranks' operations of a
    round are arrays, so a thousand ranks take little longer than eight.
    """
    if isinstance(program, TurnedProgram):
        turned = TurnedWalk(program, members, cluster)
        return CallCost(turned.run(), turned.link_bytes(), program.messages, program.sent_bytes)
    state = MessageWalk(program, members, cluster)
    while state.active.size:
        state.round()
    return CallCost(
        float(state.clock.max()), state.link_bytes(), program.messages, program.sent_bytes
    )


class MessageWalk:
    """Where a walk stands. Times are in seconds since the call began.

    Attributes: clock   of each rank; active: the ranks that are not at their end
                started, arrived  of each message; not a number before
    """

    def __init__(self, program: Program, members: Sequence[int], cluster: Cluster) -> None:
        self.program = program
        self.members = members
        self.cluster = cluster
        size = program.size
        self.clock = np.zeros(size)
        self.active = np.arange(size)
        self._at = np.zeros(size, np.int64)
        self.started, self._ready, self.arrived = (
            np.full(len(program.src), np.nan) for _ in range(3)
        )
        self._routes()

    def _routes(self) -> None:
        """Number the links in use, and keep each message's links and their costs."""
        program = self.program
        places = self.members
        cluster = self.cluster
        pairs, which = np.unique(program.src * program.size + program.dst, return_inverse=True)
        routes = [
            cluster.route(places[pair // program.size], places[pair % program.size])
            for pair in pairs.tolist()
        ]
        hops = max(map(len, routes), default=0)
        self._used = sorted({number for route in routes for number in route})
        local = {number: index for index, number in enumerate(self._used)}
        table = np.full((len(routes), hops), -1)
        for row, route in zip(table, routes, strict=True):
            row[: len(route)] = [local[number] for number in route]
        self._hops = table[which]
        self._last = np.array([len(route) - 1 for route in routes], np.int64)[which]
        links = [cluster.links[number] for number in self._used]
        columns = [
            (link.alpha, 1 / link.bandwidth, link.overhead, link.gamma, link.crowd)
            for link in links
        ]
        self._alpha, self._beta, self._overhead, self._gamma, self._crowd = (
            np.array(columns).reshape(-1, 5).T
        )
        if not program.crowded:
            self._crowd = np.zeros_like(self._crowd)
        self._free = np.zeros(len(links))
        self._carried = np.zeros(len(links), np.int64)
        first = np.array(
            [cluster.route(place, places[index - 1])[0] for index, place in enumerate(places)]
        )
        # for what a rank does without messages
        port = [cluster.links[number] for number in first.tolist()]
        self._port_alpha, self._port_beta, self._port_gamma = (
            np.array(values)
            for values in zip(
                *((link.alpha, 1 / link.bandwidth, link.gamma) for link in port), strict=True
            )
        )

    def link_bytes(self) -> dict[int, int]:
        """Return the bytes that each link carried."""
        return {
            number: int(nbytes)
            for number, nbytes in zip(self._used, self._carried, strict=True)
            if nbytes
        }

    def left(self, numbers: np.ndarray) -> np.ndarray:
        """Return when these messages left: when they were started, or when the receiver was ready
        if they meet it."""
        started: np.ndarray = self.started[numbers]
        return np.where(
            self.program.meets[numbers],
            np.maximum(started, np.nan_to_num(self._ready[numbers])),
            started,
        )

    def round(self) -> None:
        """Carry out every rank's next operation, as far as it need not wait."""
        program = self.program
        ranks = self.active
        kind = program.kind[ranks, self._at[ranks]]
        arg = program.arg[ranks, self._at[ranks]]
        moved = np.zeros(len(ranks), bool)
        for own, times in ((SEND, self.started), (POST, self._ready)):
            chosen = kind == own
            if chosen.any():
                times[arg[chosen]] = self.clock[ranks[chosen]]
                moved |= chosen
        if moved.any():
            numbers = np.unique(arg[moved])  # once, if both of its ranks came just now
            self._carry(
                numbers[
                    np.isnan(self.arrived[numbers])
                    & ~np.isnan(self.started[numbers])
                    & ~(program.meets[numbers] & np.isnan(self._ready[numbers]))
                ]
            )
        waits = (kind == SENT) | (kind == ARRIVED)
        if waits.any():
            until = self.arrived[arg[waits]]
            there = ~np.isnan(until)
            self.clock[ranks[waits][there]] = np.maximum(
                self.clock[ranks[waits][there]], until[there]
            )
            moved[np.flatnonzero(waits)[there]] = True
        adds = kind == ADD
        if adds.any():
            self.clock[ranks[adds]] += arg[adds] * self._port_gamma[ranks[adds]]
            moved |= adds
        shows = kind == SHOW
        if shows.any() and int(shows.sum()) == program.size:
            read = program.size - 1 if program.verb == "all_gather" else 1
            copied = self._port_alpha + arg * self._port_beta * (1 + read) / 2
            self.clock[:] = self.clock.max() + copied.max()
            moved |= shows
        if not moved.any():
            raise AssertionError("ranks wait for each other")
        self._at[ranks[moved]] += 1
        self.active = ranks[program.kind[ranks, self._at[ranks]] != END]

    def _carry(self, numbers: np.ndarray) -> None:
        """Send messages over their links: in the order in which they start where they share one."""
        program = self.program
        ready = self.left(numbers)
        order = np.argsort(ready, kind="stable")
        numbers = numbers[order]
        ready = ready[order]
        nbytes = program.nbytes[numbers]
        last = self._last[numbers]
        ends = np.zeros(len(numbers))
        for hop in range(self._hops.shape[1] if len(numbers) else 0):
            here = np.flatnonzero(hop <= last)
            link = self._hops[numbers[here], hop]
            size = nbytes[here]
            final = last[here] == hop
            outer = final | (hop == 0)
            busy = (
                size * self._beta[link]
                + outer * (self._overhead[link] + size * self._crowd[link])
                + (final & program.adds[numbers[here]]) * size * self._gamma[link]
            )
            begins = self._in_turn(link, ready[here], busy)
            lag = self._alpha[link] - (self._overhead[link] if hop == 0 else 0.0)
            ends[here] = np.maximum(ends[here], begins + busy) + lag
            ready[here] = begins + lag
            np.add.at(self._carried, link, size)
        self.arrived[numbers] = ends

    def _in_turn(self, link: np.ndarray, ready: np.ndarray, busy: np.ndarray) -> np.ndarray:
        """Return when each message gets its link; those that share one follow each other in the
        order given."""
        begins = np.empty(len(link))
        left = np.arange(len(link))
        while left.size:
            _, first = np.unique(link[left], return_index=True)
            turn = left[first]
            begins[turn] = np.maximum(ready[turn], self._free[link[turn]])
            self._free[link[turn]] = begins[turn] + busy[turn]
            left = np.delete(left, first)
        return begins
