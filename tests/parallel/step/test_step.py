"""The norm of the whole gradient: each number once, the same bits on every rank, for its cost."""

from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.data.rank_batch import with_digests
from minidist.optim import global_norm
from minidist.parallel.step.step import Counted, gradient_norm


def tensors(sizes: tuple[int, ...]) -> list[Parameter]:
    """Parameters with gradients; the last one has none."""
    draw = np.random.default_rng(len(sizes))
    found = [Parameter(np.zeros(size, np.float32), name=f"w{size}") for size in sizes]
    for parameter in found[:-1]:
        parameter.grad = draw.normal(size=parameter.size).astype(np.float32)
    return found


def test_a_rank_that_counts_all_sends_nothing() -> None:
    def job(world: Any) -> tuple[float, dict[str, Any]]:
        some = tensors((5, 9000, 3))
        with world.ledger.during("step"):
            norm = gradient_norm(Counted(some))
        assert norm == global_norm(p.grad for p in some)
        assert gradient_norm(Counted(())) == 0.0
        return float(norm), world.ledger.sent_bytes("step")

    (norm, sent), (other, _) = md.run(job, size=2)
    assert norm == other
    assert not sent


@pytest.mark.parametrize("compared", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_ranks_that_count_parts_find_the_norm_of_the_whole(size: int, compared: bool) -> None:
    """In rank order, for a float64 per rank, and two more where there is a batch to compare."""
    sizes = (5, 9000, 3, 7, 1, 40, 2)

    def job(world: Any) -> tuple[float, float, dict[str, Any]]:
        mine = tensors(sizes)[world.rank :: world.size]
        batch = with_digests((np.zeros((2, 3), int), np.ones((2, 3), int)), 0) if compared else None
        with world.ledger.during("step"):
            norm = gradient_norm(Counted(mine, world, batch))
        return float(norm), float(Counted(mine).squares()), world.ledger.sent_bytes("step")

    norms, own, sent = zip(*md.run(job, size=size), strict=True)
    assert set(norms) == {float(np.sqrt(np.sum(own)))}
    assert norms[0] == pytest.approx(global_norm(p.grad for p in tensors(sizes)), rel=1e-14)
    nbytes = (size - 1) * (24 if compared else 8)
    for each in sent:
        assert set(each) <= {"control"}
        assert sum(sum(verbs.values()) for verbs in each.values()) == nbytes
