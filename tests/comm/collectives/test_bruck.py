"""Labels lead back to shapes, whatever follows them, and cannot be changed."""

import numpy as np
import pytest

from minidist.comm.collectives.bruck import labels_of, shapes_in


@pytest.mark.parametrize(
    "shapes", [[()], [(3,)], [(0, 2), (), (1, 1, 1)], [(1,) * 63 + (7,), (5,)]]
)
@pytest.mark.parametrize("behind", [0, 1, 8, 13])
def test_labels_lead_back(shapes, behind):
    labels = labels_of([np.broadcast_to(np.float32(0), shape) for shape in shapes])
    octets = np.concatenate([labels, np.full(behind, 255, np.uint8)])
    parts = shapes_in(octets, len(shapes), itemsize=4)
    assert parts.shapes == tuple(shapes)
    assert parts.lengths == tuple(4 * int(np.prod(shape)) for shape in shapes)
    assert parts.starts == tuple(
        len(labels) + sum(parts.lengths[:count]) for count in range(len(shapes) + 1)
    )


def test_labels_are_only_to_be_read():
    with pytest.raises(ValueError, match="read-only"):
        labels_of([np.zeros(3)])[0] = 1


def test_labels_that_look_otherwise_are_read_themselves():
    """`like` saves the reading where labels are the expected ones; others may even be of another
    length."""
    few = labels_of([np.zeros(5), np.zeros((2, 1))])
    many = labels_of([np.zeros((3, 4, 1)), np.zeros(())])
    for like in (few, many):
        assert shapes_in(few, 2, 8, like).shapes == ((5,), (2, 1))
        assert shapes_in(many, 2, 8, like) == (((3, 4, 1), ()), (96, 8), (40, 136, 144))
