"""Chapter 24 · The walk of a call in which every rank does the same: all of its ranks at once, as
arrays.

    ring     rank r sends to rank r + 1, then waits for rank r - 1; and so P - 1 times

Recorded rank by rank, the ring of 16,384 ranks would be 268 million messages. One rank's program
stands for all (messages.py makes sure of it), and an operation of all ranks is one array of P. So
no rank is ever behind another in its program, and messages need no numbers: the message of rank r
is element r. Rules and results are those of walk.py.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from minidist.simulate.cluster import Cluster
from minidist.simulate.program import ADD, ARRIVED, POST, SEND, SENT, TurnedProgram

Index = np.ndarray | slice
EVEN = 1e-12  # times are equal if they differ by less than this share of a round


class TurnedWalk:
    """Where the walk stands. Times are in seconds since the call began.

    A round ends where no message is under way. If a round has put off all that it looks at, the
    ranks' clocks and the links that it uses, by the same time, then each that does the same will,
    too: those are not walked.

    Attributes: clock   of each rank
    """

    def __init__(self, program: TurnedProgram, members: Sequence[int], cluster: Cluster) -> None:
        self.program = program
        self.clock = np.zeros(program.size)
        self._links = _Links(cluster, crowded=program.crowded)
        routes = {
            ahead: [
                cluster.route(place, members[(rank + ahead) % program.size])
                for rank, place in enumerate(members)
            ]
            for ahead in np.unique(program.ahead).tolist()
        }
        self._crossings = {ahead: _Crossing(found, self._links) for ahead, found in routes.items()}
        self._gamma = np.array(
            [
                cluster.links[cluster.route(place, members[rank - 1])[0]].gamma
                for rank, place in enumerate(members)
            ]
        )

    def run(self) -> float:
        """Return seconds until the last rank is done."""
        for todo, times in _rounds(self.program):
            for left in reversed(range(times)):
                clock = self.clock
                free = self._links.free.copy()
                _Play(todo, self)
                later = self.clock - clock
                used = self._links.free != free
                put_off = np.concatenate([later, (self._links.free - free)[used]])
                if left and np.ptp(put_off) <= EVEN * put_off.max():
                    self._skip(todo, left, later, used)
                    break
        return float(self.clock.max())

    def _skip(self, todo: "_Round", times: int, later: np.ndarray, used: np.ndarray) -> None:
        """Take the same round so many times more."""
        self.clock = self.clock + times * later
        self._links.free[used] += times * later.max()
        for message in todo.messages:
            self._crossings[message.ahead].nbytes += times * message.nbytes

    def add(self, nbytes: int) -> None:
        """Let every rank add arrays."""
        self.clock = self.clock + nbytes * self._gamma

    def carry(self, message: "_Message", leave: np.ndarray) -> np.ndarray:
        """Return when a message of every rank arrives, in the order of senders."""
        return self._crossings[message.ahead].carry(leave, message.nbytes, message.adds)

    def link_bytes(self) -> dict[int, int]:
        """Return the bytes that each link carried."""
        return self._links.carried(list(self._crossings.values()))


# ---------------------------------------------------------------- rounds


class _Message(NamedTuple):
    """One from each rank, to the rank so far ahead."""

    ahead: int
    nbytes: int
    adds: bool
    meets: bool


class _Round(NamedTuple):
    """Operations after which no message is under way: (kind, the message's number, or bytes), and
    the messages."""

    ops: tuple[tuple[int, int], ...]
    messages: tuple[_Message, ...]


def _rounds(program: TurnedProgram) -> Iterator[tuple[_Round, int]]:
    """Yield the rounds of a program, and how often each comes one after the other."""
    for todo, alike in groupby(_each_round(program)):
        yield todo, sum(1 for _ in alike)


def _each_round(program: TurnedProgram) -> Iterator[_Round]:
    columns = (program.ahead, program.nbytes, program.adds, program.meets)
    messages = [
        _Message(*row) for row in zip(*(column.tolist() for column in columns), strict=True)
    ]
    ops = list[tuple[int, int]]()
    here = dict[int, int]()
    waits = 0
    for kind, number in zip(program.kinds.tolist(), program.args.tolist(), strict=True):
        ops.append((kind, number if kind == ADD else here.setdefault(number, len(here))))
        waits += kind in (SENT, ARRIVED)
        if waits == 2 * len(here):  # the sender's and the receiver's
            yield _Round(tuple(ops), tuple(messages[number] for number in here))
            ops = []
            here = {}
            waits = 0
    assert not ops, "every message is waited for"


class _Play:
    """A round, played at once."""

    def __init__(self, todo: _Round, walk: TurnedWalk) -> None:
        self.todo = todo
        self.walk = walk
        self.started = dict[int, np.ndarray]()  # message -> when its senders begin it
        # when its receivers are ready; both in the senders' order
        self.ready = dict[int, np.ndarray]()
        self.arrived = dict[int, np.ndarray]()
        for kind, number in todo.ops:
            if kind == ADD:
                walk.add(number)
            elif kind in (SEND, POST):
                self._begin(kind, number)
            else:
                assert number in self.arrived, "ranks wait for each other"
                until = self.arrived[number]
                ahead = todo.messages[number].ahead
                walk.clock = np.maximum(
                    walk.clock, np.roll(until, ahead) if kind == ARRIVED else until
                )

    def _begin(self, kind: int, number: int) -> None:
        """Let all ranks begin to send a message, or be ready for it: it goes, if it need not wait
        for the other."""
        message = self.todo.messages[number]
        clock = self.walk.clock
        if kind == SEND:
            self.started[number] = clock
        else:
            self.ready[number] = np.roll(clock, -message.ahead)
        if (
            number in self.arrived
            or number not in self.started
            or message.meets
            and number not in self.ready
        ):
            return
        leave = self.started[number]
        leave = np.maximum(leave, self.ready[number]) if message.meets else leave
        self.arrived[number] = self.walk.carry(message, leave)


# ---------------------------------------------------------------- links


class _Links:
    """The links in use, numbered from 0 as they come, and their costs as columns."""

    def __init__(self, cluster: Cluster, *, crowded: bool) -> None:
        self._cluster = cluster
        self._crowded = crowded
        self._numbers: dict[int, int] = {}
        self.free = np.zeros(0)  # until when each is busy

    def local(self, links: Sequence[int]) -> np.ndarray:
        """Return the numbers of links here."""
        numbers = np.array([self._numbers.setdefault(link, len(self._numbers)) for link in links])
        self.free = np.zeros(len(self._numbers))
        return numbers

    def columns(self, links: Sequence[int]) -> np.ndarray:
        """Return α, β, o, γ and κ of links of the cluster: (5, links)."""
        found = [self._cluster.links[link] for link in links]
        return (
            np.array(
                [
                    (
                        link.alpha,
                        1 / link.bandwidth,
                        link.overhead,
                        link.gamma,
                        link.crowd * self._crowded,
                    )
                    for link in found
                ]
            )
            .reshape(-1, 5)
            .T
        )

    def carried(self, crossings: Sequence["_Crossing"]) -> dict[int, int]:
        """Return bytes by the cluster's number of the link, in ascending order."""
        total = np.zeros(len(self._numbers), np.int64)
        for crossing in crossings:
            for hop in crossing.hops:
                total += crossing.nbytes * np.bincount(hop.link, minlength=len(total))
        return {
            link: int(total[number])
            for link, number in sorted(self._numbers.items())
            if total[number]
        }


class _Hop(NamedTuple):
    """The n-th link of all messages that have so many.

    Attributes: at           senders of these messages; link: of each its number
                columns      of each link; outer, final: whether it is the first or the last of the
                             route; the last
                alone        places in `at` of messages that have their link to themselves; their
                             senders, their links
                turns        senders (links, most), -1 behind the last, of those that share one; the
                             links
    """

    at: np.ndarray
    link: np.ndarray
    columns: np.ndarray
    outer: np.ndarray
    final: np.ndarray
    first: bool
    alone: tuple[Index, Index, Index]
    turns: tuple[np.ndarray, np.ndarray]


class _Crossing:
    """One message from each rank, to the rank so far ahead, over links that some may share.
    Attributes: nbytes: so far, of each rank."""

    def __init__(self, routes: Sequence[tuple[int, ...]], links: _Links) -> None:
        self.nbytes = 0
        self._links = links
        self._busy: dict[tuple[int, bool], list[tuple[np.ndarray, np.ndarray]]] = {}
        self.hops = [_hop(routes, hop, links) for hop in range(max(map(len, routes)))]

    def carry(self, ready: np.ndarray, nbytes: int, adds: bool) -> np.ndarray:
        """Return when each message arrives. Messages that share a link take turns, as they are
        ready."""
        self.nbytes += nbytes
        free, first, ready, ends = self._links.free, ready, ready.copy(), np.zeros(len(ready))
        for hop, (busy, lag) in zip(self.hops, self._costs(nbytes, adds), strict=True):
            places, at, link = hop.alone
            begins = np.maximum(ready[at], free[link])
            behind = begins + busy[places]
            free[link] = behind
            ends[at] = np.maximum(ends[at], behind) + lag[places]
            ready[at] = begins + lag[places]
            if hop.turns[0].size:
                self._in_turn(hop, first, ready, ends, busy, lag)
        return ends

    def _in_turn(
        self,
        hop: _Hop,
        first: np.ndarray,
        ready: np.ndarray,
        ends: np.ndarray,
        busy: np.ndarray,
        lag: np.ndarray,
    ) -> None:
        """Return the messages that share a link, the first of each link, then the second, …"""
        table, links = hop.turns
        free = self._links.free
        senders = hop.at
        when = np.where(table < 0, np.inf, first[senders[table]])
        order = np.take_along_axis(table, np.argsort(when, axis=1, kind="stable"), axis=1)
        for turn in range(order.shape[1]):
            places = order[:, turn]
            here = places >= 0
            places = places[here]
            link = links[here]
            at = senders[places]
            begins = np.maximum(ready[at], free[link])
            free[link] = behind = begins + busy[places]
            ends[at] = np.maximum(ends[at], behind) + lag[places]
            ready[at] = begins + lag[places]

    def _costs(self, nbytes: int, adds: bool) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return of each hop the seconds in which its links are busy, and those until the message
        is at the next."""
        if (nbytes, adds) not in self._busy:
            self._busy[nbytes, adds] = [_seconds(hop, nbytes, adds) for hop in self.hops]
        return self._busy[nbytes, adds]


def _seconds(hop: _Hop, nbytes: int, adds: bool) -> tuple[np.ndarray, np.ndarray]:
    alpha, beta, overhead, gamma, crowd = hop.columns
    busy = (
        nbytes * beta
        + hop.outer * (overhead + nbytes * crowd)
        + (hop.final & adds) * nbytes * gamma
    )
    return busy, alpha - overhead if hop.first else alpha


def _hop(routes: Sequence[tuple[int, ...]], hop: int, links: _Links) -> _Hop:
    at = np.array([rank for rank, route in enumerate(routes) if hop < len(route)])
    named = [routes[rank][hop] for rank in at.tolist()]
    link = links.local(named)
    final = np.array([hop == len(routes[rank]) - 1 for rank in at.tolist()])
    _, group, count = np.unique(link, return_inverse=True, return_counts=True)
    alone, shared = (
        np.flatnonzero(chosen[group.reshape(-1)]) for chosen in (count == 1, count > 1)
    )
    table = np.full((int((count > 1).sum()), int(count.max()) if shared.size else 0), -1)
    by_link = shared[np.argsort(link[shared], kind="stable")]
    users, begins, each = np.unique(link[by_link], return_index=True, return_counts=True)
    for row, begin, many in zip(table, begins.tolist(), each.tolist(), strict=True):
        row[:many] = by_link[begin : begin + many]
    return _Hop(
        at,
        link,
        links.columns(named),
        final | (hop == 0),
        final,
        hop == 0,
        (_span(alone), _span(at[alone]), _span(link[alone])),
        (table, users),
    )


def _span(places: np.ndarray) -> Index:
    """Return places that follow each other as a slice, which is quicker."""
    if len(places) and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places
