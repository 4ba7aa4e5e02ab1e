"""Which algorithms each verb takes, and which one `auto` means.

A choice depends only on what every rank of the call knows alike, so that all choose the same: the verb, the number of
ranks, and, for the verbs whose arrays have one length on all ranks, that length.
"""

from collections.abc import Callable
from typing import Any

from minidist.comm.collectives import direct, dissemination, naive, pairwise, ring, tree
from minidist.errors import ConfigError

ALGORITHMS: dict[str, dict[str, Callable[..., Any]]] = {
    "broadcast": {"naive": naive.broadcast, "tree": tree.broadcast},
    "reduce": {"naive": naive.reduce, "tree": tree.reduce},
    "all_reduce": {"naive": naive.all_reduce, "tree": tree.all_reduce, "ring": ring.all_reduce,
                   "direct": direct.all_reduce},
    "gather": {"naive": naive.gather},
    "all_gather": {"naive": naive.all_gather, "ring": ring.all_gather},
    "scatter": {"naive": naive.scatter},
    "reduce_scatter": {"naive": naive.reduce_scatter, "ring": ring.reduce_scatter},
    "all_to_all": {"naive": naive.all_to_all, "pairwise": pairwise.all_to_all},
    "barrier": {"naive": naive.barrier, "dissemination": dissemination.barrier},
}

_USUAL = {"broadcast": "tree", "reduce": "tree", "gather": "naive", "all_gather": "ring", "scatter": "naive",
          "reduce_scatter": "ring", "all_to_all": "pairwise", "barrier": "dissemination"}

DIRECT_BYTES = 16 << 10
"""Up to here the steps that wait for each other cost more than the bytes (2(P-1) in the ring, one in direct)."""
DIRECT_BYTES_OF_TWO = 256 << 10
"""The same for two ranks, where direct sends no more bytes than the ring; beyond, the ring halves the additions."""


def choose(verb: str, algorithm: str, nbytes: int, size: int) -> str:
    """The name of the algorithm to run: `algorithm` itself, or what "auto" means for this call.

    Args:    nbytes: the array's bytes, for reduce, all_reduce and reduce_scatter; other verbs must pass 0.
    Raises:  ConfigError that lists the names the verb takes.
    """
    if algorithm == "auto":
        return _USUAL.get(verb) or _all_reduce(nbytes, size)
    if algorithm not in ALGORITHMS[verb]:
        raise ConfigError(f"{verb} has no algorithm {algorithm!r}; choose auto, {', '.join(ALGORITHMS[verb])}")
    return algorithm


def _all_reduce(nbytes: int, size: int) -> str:
    """direct sends P/2 times the ring's bytes, so its share of the work grows with P."""
    if size == 2:
        return "direct" if nbytes <= DIRECT_BYTES_OF_TWO else "ring"
    return "direct" if nbytes * size <= 4 * DIRECT_BYTES else "ring"
