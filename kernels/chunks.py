"""Many tensors in one launch: they are cut into chunks of equal length, one for each block of
threads.

    chunks = Chunks([w.size for w in weights], xp)
    args = (Table(weights), chunks.owner, chunks.start, chunks.lengths, …)
    launch(…, grid=len(chunks), args=args)

A model has hundreds of tensors, most of them small (biases, norms); a launch for each costs more
than its work.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

CHUNK = 4096  # elements; a multiple of the elements that any version loads at once


class Chunks:
    """The tensor and the first element of each block. No chunk crosses the end of a tensor.

    Attributes: owner    int32 (chunks,): the number of the tensor
                start    int64 (chunks,): its first element, a multiple of CHUNK
                lengths  int64 (tensors,): elements of each tensor
    """

    def __init__(self, lengths: Sequence[int], xp: Any) -> None:
        counts = [-(-length // CHUNK) for length in lengths]
        owner = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
        first = np.repeat(np.cumsum([0, *counts])[:-1], counts)
        self.owner = xp.asarray(owner)
        self.start = xp.asarray((np.arange(len(owner), dtype=np.int64) - first) * CHUNK)
        self.lengths = xp.asarray(np.array(lengths, np.int64))
        self._count = len(owner)

    def __len__(self) -> int:
        return self._count
