"""The size of buckets with which the sum of gradients ends earliest, by the α-β model.

All buckets except the last are hidden behind backward; the last cannot be, as it is complete only
when backward ends. Larger buckets make the last one take longer, smaller ones cost more messages.
For Ψ bytes of gradients in buckets of b, on a ring of P ranks:

    seconds(b) = Ψ/b × 2(P-1) × α    the latency of all buckets
               + 2(P-1)/P × b × β    the bytes of the last one
    minimum at b = sqrt(Ψ × P × α / β)

notes: N2 §11.1, N4 §2.
"""

from math import sqrt

from minidist.comm.cost.link_model import LinkCost

LEAST_BYTES = 64 << 10
"""Below this size the work per bucket, which the model does not contain, costs more than the bucket
hides."""


def exposed_seconds(nbytes: int, ranks: int, cost: LinkCost, bucket_bytes: float) -> float:
    """Return the seconds of the model for buckets of this size."""
    return (
        2
        * (ranks - 1)
        * (nbytes / bucket_bytes * cost.alpha + bucket_bytes / ranks * byte_seconds(cost))
    )


def byte_seconds(cost: LinkCost) -> float:
    """Return the seconds per byte of an all-reduce: each is sent, and in half of the steps
    added."""
    return cost.beta + cost.gamma / 2


def best_bucket_bytes(nbytes: int, ranks: int, cost: LinkCost) -> int:
    """Return the size with the least seconds, in whole KiB, from LEAST_BYTES to all gradients in
    one bucket.

    Args:    nbytes: of all gradients of a rank. cost: of the link between the ranks that sum them.
    """
    beta = byte_seconds(cost)
    best = sqrt(nbytes * ranks * cost.alpha / beta) if beta else nbytes
    return max(LEAST_BYTES, min(round(best / 1024) * 1024, -(-nbytes // 1024) * 1024))
