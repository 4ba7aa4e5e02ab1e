"""Chapter 24 · What a collective costs on a cluster: its messages, walked once over the links that
they cross.

    cost = call_cost(GroupCall("dp", "all_reduce", "ring", 1 << 20), places, cluster)
    cost.seconds, cost.link_bytes           # bytes on each link, by its number

The messages are those of the algorithm's own code (messages.py); there is no second formula.
program.py holds them: of each rank, or of one rank for all where all do the same. One walk serves
both. Its rules, with the five numbers of comm/cost/link_model.py on each link:

    A message takes α, the sum over its route, and n·β of the narrowest link. It goes through all
    links at once. A link carries one message at a time, in the order in which they arrive. (Two
    that share it evenly end when the later of these does.) The first and the last link are also
    busy for o, a receiver that adds for n·γ, and both for n·κ where every rank sends to all others
    at once.
    A send whose sender does nothing else meanwhile (send, exchange) leaves when its receiver is
    ready; any other leaves when it is started. Either is complete when the message has arrived.
    What ranks show each other in shared memory is written and read once, at β/2 a byte each, and
    all wait for all.
    A round that repeats is played until it delays every rank and every link by the same time; the
    rest of its repeats are multiplied.

To each call but the library's (`native`) the cluster's `call_seconds` are added.

On links that are all alike an algorithm takes what comm/cost/critical_path.py says, to the last
digit. There is one exception: for a tree's way down among P ranks that are no power of two,
critical_path.py counts one α too many.

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
from minidist.simulate.links import CallLinks, users_of
from minidist.simulate.messages import Operands, record, record_symmetric
from minidist.simulate.program import (
    ADD,
    ARRIVED,
    END,
    POST,
    SEND,
    SENT,
    SHOW,
    Program,
    SymmetricProgram,
)

FEW_PERIODS = 3  # a call of more stretches than this is continued in a straight line from these
Index = np.ndarray | slice
EVEN = 1e-12  # delays are equal if they differ by less than this share of the largest


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


_Remembered = dict[tuple[str, str, Operands, tuple[int, ...]], CallCost]


def _costs(cluster: Cluster) -> _Remembered:
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
) -> Program | SymmetricProgram:
    """Return one program for all ranks where they do the same; else a program of each."""
    return record_symmetric(verb, algorithm, operands, size, nodes) or record(
        verb, algorithm, operands, size, nodes
    )


# ---------------------------------------------------------------- the walk


def walk(program: Program | SymmetricProgram, members: Sequence[int], cluster: Cluster) -> CallCost:
    """Return the cost of a program whose ranks are at the places `members`: its rounds are played
    one after the other."""
    clock = np.zeros(program.size)
    links = CallLinks(members, cluster)
    for part, times in program.rounds():
        _repeat(part, times, clock, links)
    return CallCost(float(clock.max()), links.link_bytes(), program.messages, program.sent_bytes)


def _repeat(part: Program, times: int, clock: np.ndarray, links: CallLinks) -> None:
    """Play a round `times` times.

    If a round delays every rank's clock and every link that it uses by the same time, then the next
    one, which is equal, does so, too: it and all after it are not played.
    """
    links.count(links.routes(part.src, part.dst).hops, times * part.nbytes)
    play = MessageWalk(part, clock, links)
    for left in reversed(range(times)):
        clock_before = clock.copy()
        free_before = links.free.copy()
        play.run()
        used = links.free != free_before
        later = clock - clock_before
        delays = np.concatenate([later, (links.free - free_before)[used]])
        if left and np.ptp(delays) <= EVEN * delays.max():
            clock += left * later
            links.free[used] += left * later.max()
            return


class MessageWalk:
    """The walk of one program, or of one round of it. Times are in seconds since the call began.

    Each turn lets every rank that need not wait carry out one operation. All ranks' operations of a
    turn are arrays, so a thousand ranks take little longer than eight.

    Attributes: clock    of each rank; it is the caller's array, and is moved on in place
                started  when each message was started; arrived: when it arrived; not a number
                         before
    """

    def __init__(self, program: Program, clock: np.ndarray, links: CallLinks) -> None:
        self.program = program
        self.clock = clock
        self._links = links
        self._routes = links.routes(program.src, program.dst)
        self._busy, self._lag = self._seconds()
        self._users: dict[int, np.ndarray] = {}
        self._kinds = program.kind.ravel()
        self._args = program.arg.ravel()

    def run(self) -> "MessageWalk":
        """Carry out all operations of all ranks, from the clock on; may be called again."""
        program = self.program
        messages = len(program.src)
        self._active = np.arange(program.size)  # the ranks that are not at their end
        # the place of each one's next operation in the flat tables
        self._at = self._active.astype(np.int64) * program.kind.shape[1]
        self.started = np.full(messages, np.nan)
        self._ready = np.full(messages, np.nan)
        self.arrived = np.full(messages, np.nan)
        while self._active.size:
            self._turn()
        return self

    def left(self, numbers: np.ndarray) -> np.ndarray:
        """Return when these messages left: when they were started, or when the receiver was ready
        if they meet it."""
        started: np.ndarray = self.started[numbers]
        return np.where(
            self.program.meets[numbers],
            np.maximum(started, np.nan_to_num(self._ready[numbers])),
            started,
        )

    def _turn(self) -> None:
        """Carry out every rank's next operation, as far as it need not wait."""
        program = self.program
        ranks = self._active
        kind = self._kinds[self._at]
        arg = self._args[self._at]
        there = np.bincount(kind, minlength=END) > 0
        same = int(there.sum()) == 1  # all ranks do the same
        moved = np.zeros(len(ranks), bool)
        for own, times in ((SEND, self.started), (POST, self._ready)):
            if there[own]:
                chosen: Index = slice(None) if same else np.flatnonzero(kind == own)
                times[arg[chosen]] = self.clock[ranks[chosen]]
                moved[chosen] = True
        if there[SEND] or there[POST]:
            leaving = self._leaving(arg[moved])
            # a message is there twice if its sender and its receiver came in one turn
            self._carry(np.unique(leaving) if there[SEND] and there[POST] else np.sort(leaving))
        if there[SENT] or there[ARRIVED]:
            waits = np.flatnonzero((kind == SENT) | (kind == ARRIVED))
            until = self.arrived[arg[waits]]
            ends = ~np.isnan(until)
            waits = waits[ends]
            self.clock[ranks[waits]] = np.maximum(self.clock[ranks[waits]], until[ends])
            moved[waits] = True
        if there[ADD]:
            adds = kind == ADD
            self.clock[ranks[adds]] += arg[adds] * self._links.port.gamma[ranks[adds]]
            moved |= adds
        if there[SHOW] and int((kind == SHOW).sum()) == program.size:
            read = program.size - 1 if program.verb == "all_gather" else 1
            port = self._links.port
            copied = port.alpha + arg * port.beta * (1 + read) / 2
            self.clock[:] = self.clock.max() + copied.max()
            moved[:] = True
        if not moved.any():
            raise AssertionError("ranks wait for each other")
        self._at += moved
        goes_on = self._kinds[self._at] != END
        if not goes_on.all():
            self._active = ranks[goes_on]
            self._at = self._at[goes_on]

    def _leaving(self, numbers: np.ndarray) -> np.ndarray:
        """Return those of these messages that can leave now."""
        program = self.program
        leaves = np.isnan(self.arrived[numbers]) & ~np.isnan(self.started[numbers])
        leaves &= ~(program.meets[numbers] & np.isnan(self._ready[numbers]))
        leaving: np.ndarray = numbers[leaves]
        return leaving

    def _carry(self, numbers: np.ndarray) -> None:
        """Send messages over their links: in the order in which they start where they share one."""
        if not numbers.size:
            return
        links = self._links
        left = self.left(numbers)
        ready = left.copy()
        ends = np.zeros(len(numbers))
        chosen: Index = numbers if len(numbers) < len(self.arrived) else slice(None)
        last = self._routes.last[chosen]
        hops = self._routes.hops[chosen]
        busy = self._busy[chosen]
        lag = self._lag[chosen]
        for hop, shared in enumerate(self._routes.shared):
            here: Index = slice(None) if hop <= last.min() else np.flatnonzero(hop <= last)
            link = hops[here, hop]
            seconds = busy[here, hop]
            if shared:
                users = self._users_at(hop, link, whole=len(numbers) == len(self.arrived))
                begins = links.take_in_turn(link, ready[here], seconds, left[here], users)
            else:
                begins = links.take(link, ready[here], seconds)
            ends[here] = np.maximum(ends[here], begins + seconds) + lag[here, hop]
            ready[here] = begins + lag[here, hop]
        self.arrived[numbers] = ends

    def _users_at(self, hop: int, link: np.ndarray, *, whole: bool) -> np.ndarray:
        """Return the messages of each link at a hop; remembered if they are the whole program's."""
        if not whole:
            return users_of(link)
        if hop not in self._users:
            self._users[hop] = users_of(link)
        return self._users[hop]

    def _seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return for how long each message keeps each of its links, and how long after its
        begin there it reaches the next link: (messages, hops) each."""
        program = self.program
        links = self._links
        (hops, last, _) = self._routes
        size = program.nbytes[:, None]
        hop = np.arange(hops.shape[1])
        final = hop == last[:, None]
        outer = final | (hop == 0)
        crowd = links.crowd[hops] * program.crowded
        busy = (
            size * links.beta[hops]
            + outer * (links.overhead[hops] + size * crowd)
            + (final & program.adds[:, None]) * size * links.gamma[hops]
        )
        return busy, links.alpha[hops] - (hop == 0) * links.overhead[hops]
