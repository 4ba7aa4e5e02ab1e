"""The size of buckets by the α-β model."""

import pytest

from minidist.comm.cost.bucket_size import LEAST_BYTES, best_bucket_bytes, exposed_seconds
from minidist.comm.cost.link_model import LinkCost


def link(alpha: float, bandwidth: float, gamma: float = 0.0) -> LinkCost:
    return LinkCost("made up", 2, alpha, 0.0, 1 / bandwidth, gamma, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    "cost", [link(50e-6, 125e6), link(50e-6, 125e6, gamma=4e-9), link(1e-3, 1e9)]
)
def test_no_other_size_costs_less(ranks: int, cost: LinkCost) -> None:
    nbytes = 500 << 20
    best = best_bucket_bytes(nbytes, ranks, cost)
    assert LEAST_BYTES < best < nbytes and best % 1024 == 0
    least = exposed_seconds(nbytes, ranks, cost, best)
    assert all(
        exposed_seconds(nbytes, ranks, cost, best * factor) >= least * (1 - 1e-6)
        for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0)
    )


def test_the_formula_by_hand() -> None:
    """12 MiB over 2 ranks, 50 µs and 125 MB/s: sqrt(12,582,912 × 2 × 50e-6 × 125e6) = 396,583
    bytes."""
    assert best_bucket_bytes(12 << 20, 2, link(50e-6, 125e6)) == 387 << 10


def test_the_bounds() -> None:
    assert best_bucket_bytes(1 << 20, 2, link(1e-9, 1e9)) == LEAST_BYTES
    assert best_bucket_bytes(1 << 20, 2, link(1.0, 1e9)) == 1 << 20
    assert best_bucket_bytes(1 << 20, 2, LinkCost("free", 2, 0.1, 0.0, 0.0, 0.0, 0.0)) == 1 << 20
    assert best_bucket_bytes(100, 2, link(1e-9, 1e9)) == LEAST_BYTES
