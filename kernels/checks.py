"""Checks before a launch: on a GPU a read beyond the end of an array raises no error."""

from collections.abc import Sequence

from minidist.device.backend import Array
from minidist.errors import KernelError, ShapeError


def check_alike(name: str, *arrays: Array | None) -> None:
    """Raise ShapeError if the arrays that are not None differ in shape."""
    shapes = {array.shape for array in arrays if array is not None}
    if len(shapes) > 1:
        raise ShapeError(
            f"{name}: arrays of shapes {' and '.join(map(str, sorted(shapes)))}; they must be alike"
        )


def check_number(name: str, what: str, array: Array | None) -> None:
    """Raise ShapeError if an array that stands for a number on the device does not have one
    element."""
    if array is not None and array.size != 1:
        raise ShapeError(f"{name}: {what} has shape {array.shape}; it needs one number, shape (1,)")


def check_version(name: str, version: int | None, versions: Sequence[int]) -> None:
    """Raise KernelError for a version that does not exist; None means the fastest that fits."""
    if version is not None and version not in versions:
        raise KernelError(
            f"{name} has no version {version}; choose one of {', '.join(map(str, versions))}"
        )
