"""Deadlock detection: which rank waits for which, and whether the waits can end, from every rank's
long waits (wait_state.py).

    rank 0   recv(src=2) at a.py:14      0 ---> 2
    rank 1   all_reduce  at a.py:20      1 ---> 0          0 waits for 2 at a.py:14, 2 waits for 0
                                                           at a.py:9
    rank 2   recv(src=0) at a.py:9       2 ---> 0

A wait is hopeless if some peer will never do what the wait needs: the peer has ended; or it is
itself in a hopeless wait, in the call that matters; or every thread of its program is. A message in
flight unblocks its receiver, and its sender if the receiver reads from it. All waits are assumed
hopeless at first; then waits with hope are removed until none can be removed. The result is the
largest set of waits that wait only for each other, or for ranks that have ended.

Ranks that wait in the same call of the same group with different signatures disagree: that needs no
other proof.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from minidist.comm.health.wait_state import State, Wait
from minidist.comm.signature import mismatch

States = Mapping[int, State]

LONG_PACKETS = (
    "if short messages pass, a link between these hosts drops longer packets (its MTU is smaller) "
    "without an error; as root, on each host: ip link set dev eth0 mtu 1200, or sysctl "
    "net.ipv4.tcp_mtu_probing=1"
)
"""The possible cause if packets are never acknowledged."""


class WaitingRank(NamedTuple):
    """A rank and one of its waits."""

    rank: int
    wait: Wait


class Verdict(NamedTuple):
    """The error of a job: `ranks` raise `error` ("MismatchError" or "DeadlockError")."""

    error: str
    text: str
    ranks: list[int]


def disagreement(states: States) -> Verdict | None:
    """Return the verdict on two ranks in the same call of a group with different signatures, or
    None."""
    calls: dict[tuple[int, int], list[WaitingRank]] = {}
    for node in _nodes(states):
        if call := node.wait.collective:
            calls.setdefault((call.group, call.sequence), []).append(node)
    for first, *others in calls.values():
        for other in others:
            if not _agree(first.wait, other.wait):
                return _mismatch(first, other, _concerned([first, *others]))
    return None


def hopeless(states: States, ended: States, *, strict: bool) -> list[WaitingRank]:
    """Return the waits that nothing will end; empty if all have hope.

    Args:    states: of the ranks that have not ended. ended: the last states of those that have.
             strict: assume nothing that is not reported: a rank that is not settled, or a message
             in flight, gives hope. Without it the answer is only a suspicion.
    """
    nodes = set(_nodes(states))
    while True:
        struck = {
            node
            for node in nodes
            if not any(
                _hopeless_peer(node, peer, states, ended, nodes, strict) for peer in _peers(node)
            )
        }
        if not struck:
            return sorted(nodes, key=lambda node: (node.rank, node.wait.number))
        nodes -= struck


def verdict(nodes: list[WaitingRank], states: States, ended: States) -> Verdict:
    """Return the error to raise for hopeless waits, with the cycle among them, or the rank that has
    ended, in words."""
    path, last = _path(nodes, states, ended)
    ranks = _concerned(nodes)
    if last is None:
        for one, other in zip(path, path[1:] + path[:1], strict=True):
            if (
                one.wait.collective
                and other.rank in one.wait.members
                and not _agree(one.wait, other.wait)
            ):
                return _mismatch(one, other, ranks)
    steps = [
        f"{one.rank} waits for {other} at {one.wait.where}"
        for one, other in zip(
            path,
            [*(node.rank for node in path[1:]), path[0].rank if last is None else last],
            strict=True,
        )
    ]
    if last is not None:
        steps.append(f"rank {last} has ended")
    return Verdict(
        "DeadlockError",
        "\n".join([f"no rank can continue: {', '.join(steps)}", *_lines(nodes)]),
        ranks,
    )


def table(states: States, ended: States, size: int) -> str:
    """Return what every rank does, one line each, and how late ranks are that others wait for."""
    lines: list[str] = []
    late: dict[int, float] = {}
    for node in _nodes(states):
        for peer in node.wait.peers:
            if peer not in states or not states[peer].waits:
                late[peer] = max(late.get(peer, 0.0), node.wait.seconds)
    for rank in range(size):
        behind = f"; late by {late[rank]:.1f} s" if rank in late else ""
        if rank in ended:
            lines.append(f"  rank {rank} has ended{behind}")
        elif rank in states and states[rank].waits:
            lines += _lines([WaitingRank(rank, wait) for wait in states[rank].waits])
        elif rank in states and states[rank].doing:
            lines.append(f"  rank {rank} waits for no rank, at {states[rank].doing}{behind}")
        else:
            lines.append(f"  rank {rank} waits for no rank and does not answer{behind}")
    return "\n".join(lines + _resent(states))


def _resent(states: States) -> list[str]:
    """Return a line about ranks between which packets are lost although both report, and the
    possible cause."""
    pairs = [
        f"{rank} to {peer}"
        for rank, state in sorted(states.items())
        for peer in sorted(state.resent)
        if peer in states
    ]
    return (
        [
            "  packets are sent again and again and never acknowledged, from rank "
            f"{', '.join(pairs)}: {LONG_PACKETS}"
        ]
        if pairs
        else []
    )


# --- hope
# ------------------------------------------------------------------------------------------------------------


def _nodes(states: States) -> Iterator[WaitingRank]:
    return (WaitingRank(rank, wait) for rank in sorted(states) for wait in states[rank].waits)


def _concerned(nodes: list[WaitingRank]) -> list[int]:
    """Return the ranks that wait in vain, or will: also members of a hopeless collective that have
    not entered it yet."""
    members = {rank for node in nodes if node.wait.collective for rank in node.wait.members}
    return sorted(members.union(node.rank for node in nodes))


def _peers(node: WaitingRank) -> tuple[int, ...]:
    """Return the ranks that can delay the wait: its own rank, if another thread carries out a
    started call."""
    return node.wait.peers or ((node.rank,) if node.wait.collective else ())


def _hopeless_peer(
    node: WaitingRank,
    peer: int,
    states: States,
    ended: States,
    nodes: set[WaitingRank],
    strict: bool,
) -> bool:
    """Return whether `peer` will never do what `node` waits for."""
    mine = states[node.rank]
    theirs = states.get(peer, ended.get(peer))
    if theirs is None:
        return False
    if strict and node.wait.incoming and theirs.sent.get(node.rank, 0) != mine.taken.get(peer, 0):
        return False  # a message is in flight
    if peer in ended:
        return True
    if (
        strict
        and not node.wait.incoming
        and node.rank in theirs.reads
        and (mine.sent.get(peer, 0) != theirs.taken.get(node.rank, 0))
    ):
        return False  # and is being received
    others = _waits_before(node, peer, theirs, strict)
    return bool(others) and nodes.issuperset(others)


def _waits_before(node: WaitingRank, peer: int, state: State, strict: bool) -> list[WaitingRank]:
    """Return the waits of `peer` that must end before it does what `node` waits for; empty if there
    may be none.

    The calls of a group are carried out one after the other: if `peer` is in one, none of its other
    threads can help.
    """
    if mine := node.wait.collective:
        same = [
            WaitingRank(peer, wait)
            for wait in state.waits
            if wait.peers and wait.collective and wait.collective.group == mine.group
        ]
        if same:
            together = len(node.wait.peers) > 1 and _agree(node.wait, same[0].wait)
            return [] if together else same  # it has entered: another rank delays us
        if peer == node.rank:
            return []  # our own worker carries the call out
    if strict and not state.settled:
        return []
    return [WaitingRank(peer, wait) for wait in state.waits]


def _path(
    nodes: list[WaitingRank], states: States, ended: States
) -> tuple[list[WaitingRank], int | None]:
    """Return a cycle of hopeless waits and None; or a chain of them, and the ended rank for which
    the last one waits."""
    path = [nodes[0]]
    among = set(nodes)
    while True:
        node = path[-1]
        others = []
        for peer in _peers(node):
            if peer in ended:
                return [each for each in path if each.wait.peers], peer
            others = [
                other
                for other in _waits_before(node, peer, states.get(peer, State()), False)
                if other in among
            ]
            if others:
                break
        assert others, "a wait is hopeless because of some peer"
        onward = next((other for other in others if other.wait.peers), others[0])
        if onward in path:
            return [each for each in path[path.index(onward) :] if each.wait.peers], None
        path.append(onward)


# --- words
# -----------------------------------------------------------------------------------------------------------


def _agree(one: Wait, other: Wait) -> bool:
    return one.call is not None and other.call is not None and one.call.agrees(other.call)


def _mismatch(one: WaitingRank, other: WaitingRank, ranks: list[int]) -> Verdict:
    mine = one.wait.collective
    theirs = other.wait.collective
    if mine and theirs and mine.group == theirs.group:
        return Verdict("MismatchError", str(mismatch(mine, one.rank, theirs, other.rank)), ranks)
    what = "group" if other.wait.collective else "verb"
    return Verdict(
        "MismatchError",
        "\n".join(
            [
                f"ranks disagree in {what}:",
                *_lines([one, other]),
                f"rank {other.rank} is in the group of rank {one.rank}'s call, and must make "
                "that call too, in the same order",
            ]
        ),
        ranks,
    )


def _lines(nodes: list[WaitingRank]) -> list[str]:
    """Return lines such as "  rank 1 calls all_reduce(...), its call 7, at train.py:40, and has
    waited 0.3 s for a message from rank 0"."""
    lines = []
    for rank, wait in nodes:
        call = "a transfer" if wait.call is None else wait.call.describe()
        group = f" (group of ranks {', '.join(map(str, wait.members))})" if wait.collective else ""
        lines.append(
            f"  rank {rank} calls {call}{group}, and has waited {wait.seconds:.1f} s for "
            f"{wait.what}"
        )
    return lines
