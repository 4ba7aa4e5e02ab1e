"""The algorithms that each verb takes, and the choice that `auto` makes.

All ranks must make the same choice, so it depends only on data that every rank of the call has: the
verb, the number of ranks and of nodes, and the arrays' length in verbs where it is the same on all
ranks. Where all ranks of a group share memory, auto takes "shared" for each verb that has it.
Elsewhere, with that length, the job's communication profile decides (`minidist bench calibrate`
measures it, rank 0 reads it when the job starts): auto takes the algorithm with the least predicted
time (critical_path.py). Without a profile, for the other verbs, and where the predicted times
differ little, the limits below decide.
"""

from collections.abc import Callable
from typing import Any

from minidist.comm.collectives import (
    bruck,
    direct,
    dissemination,
    halving_doubling,
    hierarchical,
    naive,
    native,
    pairwise,
    ring,
    shared_memory,
    torus,
    torus_both,
    tree,
)
from minidist.comm.cost.critical_path import Tiers, fastest
from minidist.comm.cost.link_model import LinkCost
from minidist.errors import ConfigError

ALONE: dict[str, Callable[..., Any]] = {
    "broadcast": lambda call, x, place, root: x,
    "reduce": lambda call, x, out, op, root: op.finish(x, out),
    "all_reduce": lambda call, x, out, op: op.finish(x, out),
    "gather": lambda call, own, rows, root: rows.join([own]),
    "all_gather": lambda call, own, rows: rows.join([own]),
    "scatter": lambda call, x, place, root: x,
    "reduce_scatter": lambda call, x, out, op: op.finish(x, out),
    "all_to_all": lambda call, parts, place: list(parts),
    "barrier": lambda call: None,
}
"""The result of each verb in a group of one rank, for any algorithm: the others need two ranks."""

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    "broadcast": {
        "naive": naive.broadcast,
        "tree": tree.broadcast,
        "ring": ring.broadcast,
        "hierarchical": hierarchical.broadcast,
        "native": native.broadcast,
        "shared": shared_memory.broadcast,
    },
    "reduce": {
        "naive": naive.reduce,
        "tree": tree.reduce,
        "hierarchical": hierarchical.reduce,
        "native": native.reduce,
    },
    "all_reduce": {
        "naive": naive.all_reduce,
        "tree": tree.all_reduce,
        "ring": ring.all_reduce,
        "direct": direct.all_reduce,
        "pairwise": pairwise.all_reduce,
        "halving-doubling": halving_doubling.all_reduce,
        "hierarchical": hierarchical.all_reduce,
        "torus": torus.all_reduce,
        "torus-both": torus_both.all_reduce,
        "native": native.all_reduce,
        "shared": shared_memory.all_reduce,
        "doubling": halving_doubling.double_whole,
    },
    "gather": {
        "naive": naive.gather,
        "tree": tree.gather,
        "native": native.gather,
    },
    "all_gather": {
        "naive": naive.all_gather,
        "ring": ring.all_gather,
        "halving-doubling": halving_doubling.all_gather,
        "hierarchical": hierarchical.all_gather,
        "torus": torus.all_gather,
        "native": native.all_gather,
        "shared": shared_memory.all_gather,
    },
    "scatter": {
        "naive": naive.scatter,
        "tree": tree.scatter,
        "native": native.scatter,
    },
    "reduce_scatter": {
        "naive": naive.reduce_scatter,
        "ring": ring.reduce_scatter,
        "pairwise": pairwise.reduce_scatter,
        "halving-doubling": halving_doubling.reduce_scatter,
        "hierarchical": hierarchical.reduce_scatter,
        "torus": torus.reduce_scatter,
        "native": native.reduce_scatter,
        "shared": shared_memory.reduce_scatter,
    },
    "all_to_all": {
        "naive": naive.all_to_all,
        "pairwise": pairwise.all_to_all,
        "bruck": bruck.all_to_all,
        "native": native.all_to_all,
        "shared": shared_memory.all_to_all,
    },
    "barrier": {
        "naive": naive.barrier,
        "dissemination": dissemination.barrier,
        "native": native.barrier,
        "shared": shared_memory.barrier,
    },
}
"""The function of each verb and algorithm."""

_USUAL = {
    "broadcast": "tree",
    "reduce": "tree",
    "gather": "naive",
    "all_gather": "ring",
    "scatter": "naive",
    "reduce_scatter": "ring",
    "all_to_all": "pairwise",
    "barrier": "dissemination",
}
# the other algorithms send as many bytes between nodes, or more
_BY_LEADERS = ("broadcast", "reduce", "all_reduce")

DIRECT_BYTES = 64 << 10
"""Use direct while a rank sends at most this, (P-1)n: its messages do not wait for each other."""
TREE_BYTES = 64 << 10
"""Use tree up to this length: 2 log2(P) messages wait for each other, in the ring 2(P-1)."""

PAIRWISE_BYTES = 512 << 10
"""Use pairwise up to this length: two waits instead of the ring's 2(P-1). For longer arrays the
ring's even load of the links is faster."""

HIERARCHICAL_BYTES = 4 << 10
"""Use hierarchical above this length, between nodes with several ranks: a network is slower than
the links inside a node, and only leaders use it. Over 1 Gbit/s it takes two thirds of the ring's
time. Over a network as fast as memory the ring is faster: a profile shows that."""


def choose(
    verb: str,
    algorithm: str,
    nbytes: int,
    size: int,
    link: LinkCost | None = None,
    board: bool = False,
    tiers: Tiers | None = None,
) -> str:
    """Return the name of the algorithm to run: `algorithm` itself, or the choice for "auto".

    Args:    nbytes: the array's bytes, for reduce, all_reduce and reduce_scatter; other verbs must
             pass 0.
             link: the cost of messages in this group, the same on all its ranks; None if not
             measured.
             board: whether the ranks share memory. tiers: the ranks' distribution over nodes, if
             several nodes hold several ranks.
    Raises:  ConfigError that lists the names the verb takes.
    """
    if algorithm == "auto" and board and "shared" in ALGORITHMS[verb]:
        return "shared"
    if algorithm == "shared" and not board and size > 1:
        raise ConfigError(
            f"{verb}: algorithm shared needs ranks that share memory: ranks of one host, with "
            "transport auto or shm; choose algorithm auto, or another"
        )
    if algorithm == "auto":
        usual = _usual(verb, nbytes, size, tiers)
        return usual if link is None else fastest(verb, nbytes, size, link, usual, tiers)
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS[verb]:
        raise ConfigError(
            f"{verb} has no algorithm {algorithm!r}; choose auto, {', '.join(ALGORITHMS[verb])}"
        )
    return algorithm


def _usual(verb: str, nbytes: int, size: int, tiers: Tiers | None) -> str:
    """Return the choice for "auto" without a profile."""
    few = verb == "all_reduce" and nbytes <= HIERARCHICAL_BYTES
    if tiers is not None and verb in _BY_LEADERS and not few:
        return "hierarchical"
    if verb in _USUAL:
        return _USUAL[verb]
    if nbytes * (size - 1) <= DIRECT_BYTES:
        return "direct"
    if nbytes <= TREE_BYTES:
        return "tree"
    return "pairwise" if nbytes <= PAIRWISE_BYTES else "ring"
