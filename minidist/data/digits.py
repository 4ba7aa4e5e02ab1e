"""The handwritten digits of scikit-learn: 1,797 images of 8 × 8, in 17 levels of grey."""

import numpy as np

from minidist.data.images import ImageData, Images
from minidist.errors import DataError

_TEST = 360  # the last fifth is held out


def load() -> ImageData:
    """Return 1,437 images for training, 360 for testing. Raises: DataError without scikit-learn
    (extra `digits`)."""
    try:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise DataError(
            'digits: scikit-learn is not installed; pip install "minidist[digits]"'
        ) from error
    bunch = load_digits()
    train, test = (
        Images(bunch.images[part].astype(np.uint8), bunch.target[part].astype(np.int64), white=16)
        for part in (slice(-_TEST), slice(-_TEST, None))
    )
    return ImageData(train=train, test=test, classes=10)
