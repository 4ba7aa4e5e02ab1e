"""The numbers of the live figure `ring_attention`, computed another way."""

import numpy as np

from minidist.parallel.context.ring_attention import visible
from minidist.site.live.ring_attention import TOKENS, walked


def test_the_ring_attention_of_the_figure_multiplies_what_the_real_one_does() -> None:
    """Scores of each rank as in the lesson's table; at each hop as the real ring's blocks say."""
    assert walked(4, False).scores.sum(axis=1).tolist() == [78, 222, 366, 510]
    assert walked(4, True).scores.sum(axis=1).tolist() == [294] * 4
    for size in (2, 5, 8):
        length = TOKENS * size
        for (rank, hop), scores in np.ndenumerate(walked(size, True).scores):
            pairs = visible(length, rank, (rank - hop) % size, size)
            sides = [(queries.stop - queries.start, causal) for queries, _, causal in pairs]
            assert scores == sum(n * (n + 1) // 2 if causal else n * n for n, causal in sides)
