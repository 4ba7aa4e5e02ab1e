"""Arrays as bytes, for files and digests."""

import numpy as np

from minidist.errors import ConfigError


def bytes_view(array: np.ndarray) -> np.ndarray:
    """The bytes of a contiguous host array of any dtype and size: a 1-D uint8 view.

    Raises:  ConfigError if the array is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ConfigError(f"bytes_view: an array of shape {array.shape} is not contiguous; "
                          f"pass np.ascontiguousarray(x)")
    return array.reshape(-1).view(np.uint8)
