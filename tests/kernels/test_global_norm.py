"""The global norm over many tensors in one launch: against float64, in the same bits each time,
overflow included."""

import numpy as np
import pytest
from kernel_checks import KINDS, needs_compiler, on_each_device, there

from minidist.device.backend import to_host
from minidist.errors import ConfigError, KernelError
from minidist.kernels import on_cpu
from minidist.kernels.chunks import CHUNK, Chunks
from minidist.kernels.global_norm import (
    SOURCE,
    VERSIONS,
    Gradients,
    global_norm,
    global_norm_reference,
)
from minidist.kernels.loader import launch
from minidist.optim import global_norm as global_norm_of_optim

SHAPES = [(3, 5), (CHUNK,), (1,), (CHUNK + 9,), (0,), (2, 17)]


def drawn(kind, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=shape) * 3).astype(KINDS[kind][0]) for shape in SHAPES]


def test_chunks_cover_each_tensor_once():
    chunks = Chunks([0, 1, CHUNK, 2 * CHUNK + 1], np)
    assert chunks.owner.tolist() == [1, 2, 3, 3, 3]
    assert chunks.start.tolist() == [0, 0, 0, CHUNK, 2 * CHUNK]
    assert len(chunks) == 5


def test_the_reference_is_that_of_optim():
    arrays = drawn("float32")
    assert global_norm_reference(arrays) == pytest.approx(global_norm_of_optim(arrays), rel=1e-14)


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_version_is_the_reference(version, kind, device):
    arrays = drawn(kind if version > 1 else "float32")
    norms = []
    for seed in range(2):
        with on_cpu.watch(seed=seed):
            norms.append(
                to_host(global_norm(Gradients(there(device, *arrays)), factor=0.5, version=version))
            )
    assert norms[0].dtype == np.float32
    assert norms[0].tobytes() == norms[1].tobytes()
    np.testing.assert_allclose(norms[0], [global_norm_reference(arrays) / 2], rtol=1e-6)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_an_overflow_anywhere_shows(version, bad, device):
    for which, place in ((0, 14), (1, CHUNK - 1), (2, 0), (3, CHUNK + 8), (5, 33)):
        arrays = drawn("float32")
        arrays[which].reshape(-1)[place] = bad
        assert not np.isfinite(
            to_host(global_norm(Gradients(there(device, *arrays)), version=version))
        ).any()


@on_each_device
@pytest.mark.parametrize("count", [1, 255, 600])
def test_all_sums_are_added(count, device):
    """There are as many sums as threads, fewer, or more: each counts once."""
    sums, norm = there(
        device, np.arange(1, count + 1, dtype=np.float32), np.full(1, np.nan, np.float32)
    )
    launch(SOURCE, "global_norm_finish", grid=1, block=256, args=(sums, count, None, norm, 2.0))
    np.testing.assert_allclose(to_host(norm), [2 * np.sqrt(count * (count + 1) / 2)], rtol=1e-6)


@needs_compiler
def test_bytes_moved_and_errors():
    arrays = drawn("float32")
    total = sum(array.nbytes for array in arrays)
    for version in (2, 3):
        with on_cpu.watch(count=True) as seen:
            global_norm(Gradients(arrays), version=version)
        assert len(seen) == 2
        threads = seen[0].grid[0] * 256
        # tables: the same for a block, so from a cache
        assert seen[0].loads.bytes == total + 28 * threads
    late = np.zeros(9, np.float32)[1:]
    with pytest.raises(KernelError, match="take version 2"):
        global_norm(Gradients([late]), version=3)
    assert global_norm(Gradients([late])).tolist() == [0]
    assert global_norm(Gradients([late[:0]])).tolist() == [0]
    with pytest.raises(ConfigError, match="at least one"):
        Gradients([])
