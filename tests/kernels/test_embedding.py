"""The gradient of an embedding: the reference against the op's, each version against it, the same
bits in any order."""

import numpy as np
import pytest
from kernel_checks import KINDS, close, needs_compiler, on_each_device, planted, there, wide

from minidist.autograd import ops
from minidist.autograd.ops import gather
from minidist.autograd.tensor import tensor
from minidist.device.backend import to_host
from minidist.device.dispatch import launcher
from minidist.errors import KernelError, ShapeError
from minidist.kernels import embedding as family
from minidist.kernels import on_cpu
from minidist.kernels.embedding import (
    SOURCE,
    VERSIONS,
    embedding_gradient,
    embedding_gradient_reference,
)

# tokens, rows of the table, width: one of each, rows without a token and long runs, more than a
# block of columns
SIZES = [(1, 1, 1), (50, 7, 33), (9, 40, 5), (40, 3, 300)]


def drawn(size, dtype, seed=0):
    """Frequent tokens first, as in a text; the last row of the table stays without a token where
    there are several."""
    rng = np.random.default_rng(seed)
    tokens, count, width = size
    ids = np.minimum(rng.geometric(0.4, tokens) - 1, max(count - 2, 0))
    return ids, rng.normal(size=(tokens, width)).astype(dtype)


def test_the_reference_is_the_gradient_of_the_op():
    ids, dy = drawn((24, 5, 3), np.float64)
    table = tensor(np.zeros((5, 3)), requires_grad=True)
    ops.embedding(table, ids.reshape(4, 6)).backward(dy.reshape(4, 6, 3))
    np.testing.assert_allclose(
        embedding_gradient_reference(ids, dy, 5), table.grad, rtol=1e-14, atol=1e-14
    )


def check(device, kind, size, version):
    dtype, bound = KINDS[kind]
    tokens, count, width = size
    size = size if version < 3 else (tokens, count, -(-width // 8) * 8)
    ids, dy = drawn(size, dtype)
    placed = there(device, ids, dy)
    bits = []
    for seed in range(2):
        with on_cpu.watch(seed=seed):
            bits.append(embedding_gradient(*placed, count, version=version))
    assert bits[0].dtype == dtype
    close(bits[0], embedding_gradient_reference(ids, dy.astype(np.float64), count), bound)
    assert to_host(bits[0]).tobytes() == to_host(bits[1]).tobytes()


@pytest.mark.sampled
@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_each_version_is_the_reference(version, kind, size, device):
    check(device, kind, size, version)


@on_each_device
@pytest.mark.parametrize("version", VERSIONS)
def test_nan_stays_in_its_row(version, device):
    ids, dy = drawn((40, 6, 8), np.float32)
    dy[ids == 1, 3] = np.nan
    dy[ids == 2, 0] = np.inf
    got = wide(embedding_gradient(*there(device, ids, dy), 6, version=version))
    np.testing.assert_array_equal(np.argwhere(np.isnan(got)), [[1, 3]])
    np.testing.assert_array_equal(np.argwhere(np.isinf(got)), [[2, 0]])


@needs_compiler
def test_ops_take_it(monkeypatch):
    """Where a GPU's arrays would ask for it: the gradients of embedding and take."""
    asked = []
    ids = np.array([[1, 0], [1, 3]])
    table, x = (
        np.arange(n * n, dtype=np.float32).reshape(n, n)[:, :m].copy() for n, m in ((5, 3), (4, 4))
    )

    def results():
        rows = tensor(table, requires_grad=True)
        columns = tensor(x, requires_grad=True)
        ops.embedding(rows, ids).backward(np.ones((2, 2, 3), np.float32))
        ops.take(columns, ids[:, 0], dim=1).backward(table[:4, :2].copy())
        return rows.grad, columns.grad

    plain = results()
    monkeypatch.setattr(
        gather, "kernel", lambda name, *arrays: asked.append(name) or launcher(name)
    )
    for got, want in zip(results(), plain, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
    assert asked == ["embedding_gradient"] * 2


@needs_compiler
def test_bytes_moved_and_errors():
    tokens = 64
    count = 9
    width = 256
    ids, dy = drawn((tokens, count, width), np.float32)
    bytes_of = {
        1: count * width * tokens * 8,
        2: count * width * 8 + tokens * width * 4,
        # ids, or bounds and positions: from caches
        3: 2 * 256 * count * 8 + tokens * 64 * 4,
    }
    for version in VERSIONS:
        with on_cpu.watch(count=True) as seen:
            embedding_gradient(ids, dy, count, version=version)
        assert seen[0].loads.bytes == dy.nbytes + bytes_of[version]
        assert seen[0].stores.bytes == 32 * seen[0].stores.sectors == count * width * 4
    assert embedding_gradient(ids[:0], dy[:0], 2).tolist() == [[0] * width] * 2
    assert embedding_gradient(ids, dy, 0).shape == (0, width)
    with pytest.raises(ShapeError, match="a row for each"):
        embedding_gradient(ids[1:], dy, count)
    with pytest.raises(KernelError, match="take version 2"):
        embedding_gradient(ids, dy[:, :3].copy(), count, version=3)


MISTAKES = {
    "the last warp's sum is lost": (3, ("other < used", "other < used - 1", 1), None),
    "no barrier before the sums are read": (
        3,
        ("        __syncthreads();\n", "", 1),
        "race on|nobody wrote",
    ),
    "the run's end is the next one's": (
        2,
        ("end = starts[row + 1];\n    for", "end = starts[row + 2];\n    for", 1),
        r"out of bounds: .* reads starts\[",
    ),
    "smaller tokens count too": (1, ("if (ids[i] == row) sum", "if (ids[i] <= row) sum", 1), None),
}


@pytest.mark.sampled(every=2)
@needs_compiler
@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes(mistake, tmp_path, monkeypatch):
    """`None`: no rule of CUDA is broken, the result is wrong."""
    version, change, says = MISTAKES[mistake]
    source = planted(tmp_path, SOURCE, [f"embedding_gradient_v{version}<float>"], change)
    monkeypatch.setattr(family, "SOURCE", source)
    with pytest.raises(
        KernelError if says else AssertionError, match=says or "Not equal to tolerance"
    ):
        check("cpu", "float32", (50, 7, 33), version)
