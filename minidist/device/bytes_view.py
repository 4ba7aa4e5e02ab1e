"""Arrays as the bytes that lie in files and digests."""

import numpy as np

from minidist.errors import ConfigError


def wire_view(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous host array: a 1-D uint8 view, also of bfloat16 and of empty arrays."""
    if not array.flags.c_contiguous:
        raise ConfigError(f"wire_view: an array of shape {array.shape} is not contiguous; pass np.ascontiguousarray(x)")
    return array.reshape(-1).view(np.uint8)
