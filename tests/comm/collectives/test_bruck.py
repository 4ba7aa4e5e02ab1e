"""Labels lead back to shapes, whatever follows them, and cannot be changed."""

import numpy as np
import pytest

from minidist.comm.collectives.bruck import labels_of, shapes_in


@pytest.mark.parametrize("shapes", [[()], [(3,)], [(0, 2), (), (1, 1, 1)], [(1,) * 63 + (7,), (5,)]])
@pytest.mark.parametrize("behind", [0, 1, 8, 13])
def test_labels_lead_back(shapes, behind):
    labels = labels_of([np.broadcast_to(np.float32(0), shape) for shape in shapes])
    octets = np.concatenate([labels, np.full(behind, 255, np.uint8)])
    parts = shapes_in(octets, len(shapes), itemsize=4)
    assert parts.shapes == tuple(shapes)
    assert parts.lengths == tuple(4 * int(np.prod(shape)) for shape in shapes)
    assert parts.starts == tuple(len(labels) + sum(parts.lengths[:count]) for count in range(len(shapes) + 1))


def test_labels_are_only_to_be_read():
    with pytest.raises(ValueError, match="read-only"):
        labels_of([np.zeros(3)])[0] = 1
