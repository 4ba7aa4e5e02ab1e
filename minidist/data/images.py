"""Labelled grey images."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from minidist.errors import DataError


@dataclass(frozen=True)
class Images:
    """Images and their labels. Raises: DataError if the shapes do not fit."""

    pixels: np.ndarray  # (n, rows, columns), uint8: 0 is black, `white` is white
    labels: np.ndarray  # (n,), int64
    white: int

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.labels.shape != self.pixels.shape[:1]:
            raise DataError(
                f"images of shape {self.pixels.shape} with labels of shape {self.labels.shape}; "
                f"they need shapes (n, rows, columns) and (n,)"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, which: Any, dtype: Any = "float32") -> tuple[np.ndarray, np.ndarray]:
        """Return the images `which` (an integer array or a slice), (b, rows·columns) in [0, 1], and
        their labels (b,)."""
        chosen = self.pixels[which]
        return chosen.reshape(len(chosen), -1).astype(dtype) / np.asarray(
            self.white, dtype
        ), self.labels[which]


@dataclass(frozen=True)
class ImageData:
    """A training set and a test set of images."""

    train: Images
    test: Images
    classes: int
