"""Adam over many tensors in one launch: against float64, minidist.optim, with clipping, loss scale
and overflow."""

from types import SimpleNamespace

import numpy as np
import pytest
from kernel_checks import KINDS, close, needs_compiler, on_each_device, there

from minidist import optim
from minidist.device.backend import to_host
from minidist.errors import KernelError, ShapeError
from minidist.kernels import on_cpu
from minidist.kernels.adam import VERSIONS, AdamTensors, adam_reference, adam_step
from minidist.kernels.chunks import CHUNK
from minidist.kernels.global_norm import Gradients, global_norm, global_norm_reference

SHAPES = [(3, 5), (CHUNK + 9,), (1,), (0,), (2, 16)]
DECAYS = [0.1, 0.0, 0.3, 0.0, 0.2]


def drawn(kind, seed=0):
    """Masters, gradients, copies full of NaN."""
    rng = np.random.default_rng(seed)
    dtype = KINDS[kind][0]
    masters = [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]
    gradients = [rng.normal(size=shape).astype(dtype) for shape in SHAPES]
    return masters, gradients, [np.full(shape, np.nan, dtype) for shape in SHAPES]


@pytest.mark.parametrize("apart", [True, False])
def test_the_reference_is_that_of_optim(apart):
    rng = np.random.default_rng(0)
    p = rng.normal(size=(3, 4))
    m = np.zeros((3, 4))
    v = np.zeros((3, 4))
    weights = SimpleNamespace(data=p.copy(), grad=None, name="p")
    rule = (optim.AdamW if apart else optim.Adam)([weights], 0.01, weight_decay=0.1)
    for step in (1, 2, 3):
        weights.grad = rng.normal(size=(3, 4))
        rule.step()
        p, m, v = adam_reference(p, weights.grad, m, v, lr=0.01, step=step, decay=0.1, apart=apart)
        np.testing.assert_allclose(weights.data, p, rtol=1e-12)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("apart", [True, False])
def test_three_steps_are_the_references(version, kind, apart, device):
    """Gradients 8 times too large by the loss scale, clipped to norm 2; the second step overflows
    without a trace."""
    kind = kind if version > 1 else "float32"
    masters, gradients, copies = drawn(kind)
    wide, wide_g = ([a.astype(np.float64) for a in arrays] for arrays in (masters, gradients))
    states = [(np.zeros_like(p), np.zeros_like(p)) for p in wide]
    placed = [there(device, *arrays) for arrays in (masters, gradients, copies)]
    tensors = AdamTensors(placed[0], decays=DECAYS, copies=placed[2])
    found = Gradients(placed[1])
    clip = 2.0 / (global_norm_reference(gradients) / 8 + 1e-6)
    assert clip < 1
    count = 0
    for step in range(3):
        norm = global_norm(found, factor=1 / 8 if step != 1 else np.inf)
        with on_cpu.watch(seed=step):
            adam_step(
                tensors,
                found,
                lr=0.01,
                apart=apart,
                norm=norm,
                limit=2.0,
                scale=1 / 8,
                version=version,
            )
        if step != 1:
            count += 1
            for i, p in enumerate(wide):
                wide[i], *states[i] = adam_reference(
                    p,
                    wide_g[i] / 8 * clip,
                    *states[i],
                    lr=0.01,
                    step=count,
                    decay=DECAYS[i],
                    apart=apart,
                )
        for p, m, v, copy, want, state in zip(
            tensors.masters.arrays,
            tensors.m.arrays,
            tensors.v.arrays,
            placed[2],
            wide,
            states,
            strict=True,
        ):
            close(p, want, 1e-6)
            close(m, state[0], 1e-6)
            close(v, state[1], 1e-6)
            close(copy, want, KINDS[kind][1] + 1e-6)
        assert to_host(tensors.count).tolist() == [count]


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("apart", [True, False])
def test_a_rate_on_the_device_is_read_by_the_kernel(version, apart, device):
    """Bit by bit what the same numbers give from the host, decay too; and the number that is there
    when it runs."""
    sides = []
    for on_device in (False, True):
        masters, gradients, _ = drawn("float32")
        placed = [there(device, *arrays) for arrays in (masters, gradients)]
        tensors = AdamTensors(placed[0], decays=DECAYS)
        found = Gradients(placed[1])
        (rate,) = there(device, np.zeros(1))
        for lr in (0.02, 0.003):
            rate[...] = lr
            adam_step(tensors, found, lr=rate if on_device else lr, apart=apart, version=version)
        sides.append([to_host(p) for p in placed[0]])
    for one, other in zip(*sides, strict=True):
        np.testing.assert_array_equal(one, other)


@on_each_device
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_overflow_changes_no_bit(bad, device):
    masters, gradients, copies = drawn("float32")
    gradients[1][CHUNK + 3] = bad
    placed = [there(device, *arrays) for arrays in (masters, gradients, copies)]
    tensors = AdamTensors(placed[0], decays=DECAYS, copies=placed[2])
    found = Gradients(placed[1])
    for version in VERSIONS:
        adam_step(tensors, found, lr=0.01, norm=global_norm(found), limit=1.0, version=version)
    for p, master in zip(placed[0], masters, strict=True):
        np.testing.assert_array_equal(to_host(p), master)
    assert all(np.isnan(to_host(copy)).all() for copy in placed[2])
    assert not any(to_host(m).any() for m in (*tensors.m.arrays, *tensors.v.arrays))
    adam_step(tensors, found, lr=0.01)  # without a norm nobody looks: NaN shows in the weight
    assert np.isnan(to_host(placed[0][1])[CHUNK + 3])
    assert np.isfinite(to_host(placed[0][0])).all()


@needs_compiler
def test_bytes_moved_and_errors():
    """28 bytes an element with half types, and one launch beside adam_prepare however many
    tensors."""
    masters, gradients, copies = drawn("bfloat16")
    elements = sum(p.size for p in masters)
    tensors = AdamTensors(masters, decays=DECAYS, copies=copies)
    with on_cpu.watch(count=True) as seen:
        adam_step(tensors, Gradients(gradients), lr=0.01, version=3)
    assert [launch.kernel for launch in seen] == ["adam_prepare", "adam_v3<__nv_bfloat16>"]
    assert seen[1].stores.bytes == 14 * elements
    threads = seen[1].grid[0] * 256
    # tables, numbers: the same for a block, from a cache
    assert seen[1].loads.bytes == 14 * elements + 84 * threads
    with pytest.raises(ShapeError, match="must agree"):
        adam_step(tensors, Gradients(gradients[1:]), lr=0.01)
    with pytest.raises(ShapeError, match="4 decays for 5 tensors"):
        AdamTensors(masters, decays=DECAYS[1:])
    late = [np.zeros(9, np.float32)[1:]]
    with pytest.raises(KernelError, match="take version 2"):
        adam_step(AdamTensors(late, decays=[0]), Gradients(late), lr=0.1, version=3)
