"""Dropout: rate, scale, and masks that no split can change."""

import numpy as np
import pytest

from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.device import account, backend
from minidist.errors import ConfigError, ShapeError

KEY = dict(rate=0.25, name="blocks.0.drop", seed=3, step=7)
X = np.random.default_rng(0).normal(size=(4, 6, 8)) + 10


def test_rate_and_scale():
    x = np.ones((200, 100))
    y = ops.dropout(x, **KEY).data
    assert (y == 0).mean() == pytest.approx(0.25, abs=0.01)
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    np.testing.assert_array_equal(ops.dropout(X, **{**KEY, "rate": 0.0}).data, X)


def test_the_key_decides():
    whole = ops.dropout(X, **KEY).data
    np.testing.assert_array_equal(ops.dropout(X, **KEY).data, whole)
    for change in (dict(step=8), dict(seed=4), dict(name="blocks.1.drop")):
        assert ((ops.dropout(X, **{**KEY, **change}).data == 0) != (whole == 0)).any()


def test_shards_drop_what_the_whole_drops():
    whole = ops.dropout(X, **KEY).data
    tokens = np.arange(24).reshape(4, 6)
    everything = slice(None)
    for batch, sequence, columns in [
        (slice(1, 3), everything, range(8)),
        (everything, slice(2, 5), range(8)),
        (everything, everything, range(3, 7)),
        (slice(3, 4), slice(2), range(1, 8, 2)),
    ]:
        place = (batch, sequence, slice(columns.start, columns.stop, columns.step))
        shard = ops.dropout(
            X[place], tokens=tokens[batch, sequence], columns=columns, width=8, **KEY
        )
        np.testing.assert_array_equal(shard.data, whole[place])


def test_the_gradient_passes_where_the_value_did():
    x = tensor(np.ones((50, 40)), requires_grad=True)
    y = ops.dropout(x, **KEY)
    y.sum().backward()
    np.testing.assert_array_equal(x.grad, y.data)


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
def test_a_residual_is_added_before_the_one_rounding(kind):
    x = X.astype(backend.dtype(kind))
    residual = X[::-1].astype(backend.dtype(kind))
    dropped = ops.dropout(np.ones_like(X), **KEY).data.astype(backend.widen(x).dtype)
    for rate, factor in ((0.25, dropped), (0.0, 1)):
        got = ops.dropout(x, residual, **{**KEY, "rate": rate}).data
        np.testing.assert_array_equal(
            got, backend.narrow(backend.widen(x) * factor + backend.widen(residual), x.dtype)
        )


def test_a_sum_with_dropout_holds_one_array_less_than_the_two():
    """Both save the mask alone."""
    peaks = []
    kept = []
    x, residual = (tensor(X.copy(), requires_grad=True) for _ in range(2))
    for call in (lambda: ops.dropout(x, residual, **KEY), lambda: residual + ops.dropout(x, **KEY)):
        with account.use(account.MemoryAccount()) as memory:
            y = call()
            kept.append(memory.now["activations"])
            assert kept[-1] == y.data.nbytes + X.size
        peaks.append(memory.peak["activations"])
    assert peaks[0] == peaks[1] - X.nbytes


def test_errors():
    with pytest.raises(
        ShapeError, match=r"a residual of shape \(6, 8\) does not fit x \(4, 6, 8\)"
    ):
        ops.dropout(X, X[0], **KEY)
    for rate in (1.0, -0.1):
        with pytest.raises(ConfigError, match=r"not in \[0, 1\)"):
            ops.dropout(X, **{**KEY, "rate": rate})
    with pytest.raises(ShapeError, match=r"global tokens of shape \(4, 6\), not \(24,\)"):
        ops.dropout(X, tokens=np.arange(24), **KEY)
