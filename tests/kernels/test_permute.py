"""Tokens to their experts and back: the references against ops as nn/moe.py uses them, each version
against these."""

import numpy as np
import pytest
from kernel_checks import (
    KINDS,
    check_gradient,
    close,
    needs_compiler,
    on_each_device,
    planted,
    there,
    wide,
)

from minidist.autograd import ops
from minidist.autograd.ops.experts import Placement, place_rows
from minidist.autograd.tensor import tensor
from minidist.device.backend import to_host
from minidist.errors import KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels import permute as family
from minidist.kernels.permute import (
    SOURCE,
    VERSIONS,
    from_experts,
    from_experts_gradient,
    from_experts_gradient_reference,
    from_experts_reference,
    to_experts,
    to_experts_reference,
)

# tokens, experts, choices a token, width
SIZES = [(1, 1, 1, 1), (23, 6, 3, 33), (7, 9, 2, 300)]


def routed(size, seed=0):
    """Choices of a gate, some dropped: the first token loses all."""
    rng = np.random.default_rng(seed)
    tokens, experts, ways, _ = size
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :ways]
    kept = rng.random((tokens, ways)) < 0.7
    kept[0] = tokens == 1
    return chosen, kept


def test_plan_and_references_are_the_mixtures():
    size = tokens, experts, ways, width = 23, 6, 3, 4
    rng = np.random.default_rng(0)
    (chosen, kept) = routed(size)
    x = rng.normal(size=(tokens, width))
    dy = rng.normal(size=(tokens, width))
    weights = rng.normal(size=kept.sum())
    placement = place_rows(chosen, kept, experts=experts)
    where = np.flatnonzero(kept)
    order = np.argsort(chosen.reshape(-1)[where], kind="stable")
    np.testing.assert_array_equal(placement.experts, chosen.reshape(-1)[where][order])
    np.testing.assert_array_equal(placement.tokens, where[order] // ways)
    np.testing.assert_array_equal(placement.counts, np.bincount(chosen[kept], minlength=experts))
    for token, slots in enumerate(placement.slots):
        np.testing.assert_array_equal(slots[slots >= 0], np.flatnonzero(placement.tokens == token))
    leaf = tensor(x, requires_grad=True)
    rows = to_experts_reference(x, placement)
    taken = ops.to_experts(leaf, placement)
    back = ops.from_experts(taken, weights, placement)
    np.testing.assert_array_equal(taken.data, rows)
    np.testing.assert_allclose(
        from_experts_reference(rows, weights, placement), back.data, atol=1e-14
    )
    back.backward(dy)
    gradients = from_experts_gradient_reference(dy, rows, weights, placement)
    np.testing.assert_allclose(
        from_experts_reference(gradients[0], None, placement), leaf.grad, atol=1e-14
    )
    check_gradient(
        lambda rows, weights: from_experts_reference(rows, weights, placement),
        gradients,
        (rows, weights),
        dy,
    )


def check(device, kind, size, version):
    dtype, bound = KINDS[kind]
    tokens, experts, ways, width = size if version == 1 else (*size[:3], -(-size[3] // 8) * 8)
    rng = np.random.default_rng(1)
    (chosen, kept) = routed(size)
    host = place_rows(chosen, kept, experts=experts)
    placement = Placement(host.shape, *there(device, host.choices, host.experts, host.counts))
    x, dy = (rng.normal(size=(tokens, width)).astype(dtype) for _ in range(2))
    x[-1, 0] = np.nan
    results = rng.normal(size=(len(host.tokens), width)).astype(dtype)
    weights = rng.random(len(host.tokens)).astype(np.float32)
    placed, dy_placed, results_placed, weights_placed = there(device, x, dy, results, weights)
    with on_cpu.watch(seed=2):
        rows = to_experts(placed, placement, version=version)
        y = from_experts(results_placed, weights_placed, placement, version=version)
        dx = from_experts(results_placed, None, placement, version=version)
        dresults, dweights = from_experts_gradient(
            dy_placed, results_placed, weights_placed, placement, version=version
        )
    assert rows.dtype == y.dtype == dresults.dtype == dtype
    np.testing.assert_array_equal(wide(rows), to_experts_reference(wide(x), host))
    exact = wide(results)
    factors = wide(weights)
    close(y, from_experts_reference(exact, factors, host), bound)
    close(dx, from_experts_reference(exact, None, host), bound)
    want = from_experts_gradient_reference(wide(dy), exact, factors, host)
    close(dresults, want[0], bound)
    close(dweights, want[1], 1e-6, scale=width)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_each_version_is_the_reference(version, kind, size, device):
    check(device, kind, size, version)


@on_each_device
def test_a_plan_on_the_device(device):
    chosen, kept = routed((23, 6, 3, 1))
    for drop in (kept, None):
        want = place_rows(chosen, drop, experts=6)
        got = place_rows(*there(device, chosen, drop), experts=6)
        for name in ("tokens", "experts", "slots", "counts"):
            np.testing.assert_array_equal(to_host(getattr(got, name)), getattr(want, name))


@needs_compiler
def test_bytes_moved_and_errors():
    chosen, kept = routed((32, 4, 2, 64))
    placement = place_rows(chosen, experts=4)
    x = np.ones((32, 64), np.float32)
    rows = np.ones((64, 64), np.float32)
    weights = np.ones(64, np.float32)
    # threads that read a row's token, a slot and a weight
    for version, tables in ((1, 64), (2, 32)):
        with on_cpu.watch(count=True) as seen:
            to_experts(x, placement, version=version)
            from_experts(rows, weights, placement, version=version)
        reads = 64 * tables * 4, 2 * 32 * (64 if version == 1 else 16) * 8
        assert [s.loads.bytes for s in seen] == [rows.nbytes + reads[0], rows.nbytes + reads[1]]
        assert [s.stores.bytes for s in seen] == [rows.nbytes, x.nbytes]
        assert [s.stores.sectors * 32 for s in seen] == [rows.nbytes, x.nbytes]
    empty = place_rows(chosen, np.zeros_like(kept), experts=4)
    assert to_experts(x, empty).shape == (0, 64)
    assert not from_experts(rows[:0], None, empty).any()
    assert [part.size for part in from_experts_gradient(x, rows[:0], weights[:0], empty)] == [0, 0]
    with pytest.raises(ShapeError, match="the same shape"):
        place_rows(chosen, kept[:2], experts=4)
    with pytest.raises(ShapeError, match=r"the placement needs \(32, width\)"):
        to_experts(x[1:], placement)
    with pytest.raises(ShapeError, match="one a row"):
        from_experts(rows, weights[1:], placement)
    with pytest.raises(ShapeError, match="not as wide"):
        from_experts_gradient(x[:, :4].copy(), rows, weights, placement)
    with pytest.raises(KernelError, match="take version 1"):
        to_experts(x[:, :3].copy(), placement, version=2)


MISTAKES = {
    "who is dropped counts": (
        1,
        ("            if (slot < 0) continue;\n            sum", "            sum", 1),
        "out of bounds: .* reads weights",
    ),
    "weights in the tokens' order": (
        2,
        (
            "const float weight = weights ? weights[slot]",
            "const float weight = weights ? weights[way]",
            1,
        ),
        None,
    ),
    "a row of its own number": (
        1,
        (
            "from = static_cast<long long>(tokens[blockIdx.x])",
            "from = static_cast<long long>(blockIdx.x)",
            2,
        ),
        "out of bounds: .* reads x",
    ),
}


@pytest.mark.sampled(every=2)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    """`None`: no rule of CUDA is broken, the result is wrong."""
    version, change, says = MISTAKES[mistake]
    kernels = [kernel for kernel in SOURCE.kernels if "<float>" in kernel]
    monkeypatch.setattr(family, "SOURCE", planted(tmp_path, SOURCE, kernels, change))
    with pytest.raises(
        KernelError if says else AssertionError, match=says or "Not equal to tolerance"
    ):
        check("cpu", "float32", (23, 6, 3, 33), version)
