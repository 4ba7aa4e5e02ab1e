"""scikit-learn's digits."""

import sys

import numpy as np
import pytest

from minidist.data import digits
from minidist.errors import DataError


def test_digits() -> None:
    data = digits.load()
    assert data.train.pixels.shape == (1437, 8, 8) and len(data.test) == 360 and data.classes == 10
    images, labels = data.test.batch(np.arange(360), dtype="float64")
    assert (
        images.shape == (360, 64)
        and images.dtype == np.float64
        and images.min() == 0
        and images.max() == 1
    )
    assert set(labels.tolist()) == set(range(10)) and labels.dtype == np.int64


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=r'pip install "minidist\[digits\]"'):
        digits.load()
