"""Ring attention by passes of the kernel, one a pair of blocks: the same as attention to the whole
sequence at once."""

from typing import Any

import numpy as np
import pytest
from kernel_checks import needs_compiler

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops import online_attention
from minidist.autograd.tensor import tensor
from minidist.parallel.context import ring_attention as chapter

# of the largest number: float16 rounds a block's result, its gradients, and the sums once more
BOUND = 4e-3


def drawn(length: int, heads: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.normal(size=(1, count, length, 12)).astype(np.float16) for count in (2, heads, heads, 2)
    ]


def whole(q: np.ndarray, k: np.ndarray, v: np.ndarray, dy: np.ndarray) -> list[np.ndarray]:
    """y, dq, dk, dv in float64."""
    given = [tensor(x.astype(np.float64), requires_grad=True) for x in (q, k, v)]
    y = ops.causal_attention(*given)
    y.backward(dy.astype(np.float64))
    return [y.data, *(x.grad for x in given)]


def around(size: int, length: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """The largest error of y, dq, dk and dv of `size` ranks, in proportion to the largest number of
    each."""
    arrays = drawn(length, heads)
    monkeypatch.setattr(chapter, "fits_kernel", lambda q: True)

    def job(world: Any) -> list[np.ndarray]:
        own = chapter.zigzag(length, world.rank, size)
        q, k, v = (tensor(x[:, :, own].copy(), requires_grad=True) for x in arrays[:3])
        y = chapter.ring_attention(q, k, v, group=world, length=length)
        y.backward(arrays[3][:, :, own].copy())
        return [y.data, q.grad, k.grad, v.grad]

    found = md.run(job, size=size)
    worst = 0.0
    for place, exact in enumerate(whole(*arrays)):
        for rank, own in enumerate(found):
            there = exact[:, :, chapter.zigzag(length, rank, size)]
            assert own[place].dtype == np.float16
            worst = max(
                worst, float(abs(own[place].astype(np.float64) - there).max() / abs(exact).max())
            )
    return worst


@needs_compiler
@pytest.mark.parametrize(
    ("size", "length", "heads"),
    [
        (1, 9, 1),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in [(2, 20, 1), (1, 9, 2), (2, 70, 2), (3, 11, 1)]
        ),
    ],
)
def test_passes_of_the_kernel_join_to_the_whole(
    size: int, length: int, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert around(size, length, heads, monkeypatch) < BOUND


@pytest.mark.soak
@needs_compiler
def test_a_planted_bug_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are added with weights of one, as if each had seen all keys."""

    def absorb(
        self: Any, q: np.ndarray, k: np.ndarray, v: np.ndarray, queries: slice, *, causal: bool
    ) -> None:
        before = self.y[:, :, queries].copy()
        original(self, q, k, v, queries, causal=causal)
        self.y[:, :, queries] += before

    original = online_attention.FusedSoftmax.absorb
    monkeypatch.setattr(online_attention.FusedSoftmax, "absorb", absorb)
    assert around(2, 20, 2, monkeypatch) > 10 * BOUND
