"""Arrays as bytes."""

import numpy as np
import pytest

from minidist.device.backend import bytes_view, dtype
from minidist.errors import ConfigError


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_bytes_views(kind, shape):
    x = np.ones(shape).astype(dtype(kind))
    view = bytes_view(x)
    assert view.dtype == np.uint8 and view.shape == (x.nbytes,)
    assert x.size == 0 or np.shares_memory(view, x)
    with pytest.raises(ConfigError, match="not contiguous"):
        bytes_view(np.ones((4, 4))[:, 1:])
