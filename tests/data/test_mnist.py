"""MNIST's files, written here in miniature."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from minidist.data import mnist
from minidist.errors import DataError

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: np.ndarray) -> bytes:
    """The bytes of an IDX file."""
    header = struct.pack(
        f">BBBB{array.ndim}I", 0, 0, CODES[array.dtype.str[1:]], array.ndim, *array.shape
    )
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(
    folder: Path, *, zipped: bool = False, dotted: bool = False, **replaced: bytes | None
) -> None:
    """The four files of a set of 5 and 2 images of 3 × 4; `replaced` by the first word of the
    name."""
    random = np.random.default_rng(0)
    for part, count in (("train", 5), ("t10k", 2)):
        images = random.integers(0, 256, (count, 3, 4)).astype(np.uint8)
        labels = np.arange(count, dtype=np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = replaced.get(f"{part}_{kind[:6]}", idx(array))
            if content is None:
                continue
            name = f"{part}-{kind}-ubyte".replace("-idx", ".idx" if dotted else "-idx")
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


kinds = st.sampled_from([np.dtype(kind) for kind in CODES])
shapes = arrays.array_shapes(min_dims=0, min_side=0)


@given(arrays.arrays(kinds, shapes), st.booleans())
def test_every_type_and_shape_comes_back(
    tmp_path_factory: pytest.TempPathFactory, array: np.ndarray, zipped: bool
) -> None:
    path = tmp_path_factory.mktemp("idx") / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    read = mnist.read_idx(path)
    assert read.shape == array.shape and read.dtype == array.dtype and read.dtype.isnative
    np.testing.assert_array_equal(read, array)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("dotted", [False, True])
def test_a_folder(tmp_path: Path, zipped: bool, dotted: bool) -> None:
    write(tmp_path, zipped=zipped, dotted=dotted)
    data = mnist.load(tmp_path)
    assert len(data.train) == 5 and len(data.test) == 2 and data.classes == 5
    images, labels = data.train.batch([3, 0])
    assert images.shape == (2, 12) and images.dtype == np.float32 and labels.tolist() == [3, 0]
    np.testing.assert_allclose(images[0], data.train.pixels[3].reshape(-1) / 255, rtol=1e-6)
    assert images.min() >= 0 and images.max() <= 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not an IDX file: it begins with nothing"),
        (b"\0\0", "begins with 00 00"),
        (b"\x89PNG", "begins with 89 50 4e 47"),
        (b"\0\0\x07\1", "is not an IDX file"),
        (b"\0\0\x08\x50" + b"\0\0\0\1" * 80 + b"x", "at most 32"),
        (b"\0\0\x08\3\0\0", "ends inside its header, which states 3 dims"),
        (idx(np.zeros((2, 3), "u1"))[:-1], r"uint8 \(2, 3\) needs 6 bytes, but the file has 5"),
        (idx(np.zeros((2, 3), "u1")) + b"x", "needs 6 bytes, but the file has more"),
        (
            b"\0\0\x0e\2" + b"\xff" * 8,
            r"needs 147,573,952,520,956,936,200 bytes, but the file has 0",
        ),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_malformed_files(tmp_path: Path, content: bytes, says: str, zipped: bool) -> None:
    path = tmp_path / ("file.gz" if zipped else "file")
    path.write_bytes(gzip.compress(content) if zipped else content)
    with pytest.raises(DataError, match=says) as caught:
        mnist.read_idx(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_damaged_gzip(tmp_path: Path) -> None:
    good = gzip.compress(idx(np.arange(200, dtype="u1")))
    for content in (b"not gzip", good[:-12], good[:20] + b"\xff\xff" + good[22:]):
        path = tmp_path / "file.gz"
        path.write_bytes(content)
        with pytest.raises(DataError, match="file.gz"):
            mnist.read_idx(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        mnist.read_idx(tmp_path / "missing")


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write(tmp_path, t10k_labels=None)
    with pytest.raises(
        DataError, match="no file t10k-labels-idx1-ubyte or t10k-labels-idx1-ubyte.gz in"
    ):
        mnist.load(tmp_path)
    write(tmp_path, t10k_labels=idx(np.zeros(3, "u1")))
    with pytest.raises(DataError, match=r"images of shape \(2, 3, 4\) with labels of shape \(3,\)"):
        mnist.load(tmp_path)
    write(tmp_path, train_images=idx(np.zeros((5, 12), "u1")))
    with pytest.raises(
        DataError,
        match=r"train-images-idx3-ubyte in .*has uint8 \(5, 12\); .* uint8 in 3 dims",
    ):
        mnist.load(tmp_path)
