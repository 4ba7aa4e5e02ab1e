"""Exercise 13: which blocks a rank has, the online softmax, the positions, and what goes round.

Copy this file (`minidist lesson 13 --copy DIR`), replace each `hole(...)` by your own code, and
grade it: `minidist check 13 DIR/exercise_13.py`. A sequence is cut in 2·ranks blocks, numbered from
0 (section 3).
"""

import numpy as np

from minidist.grading import hole


def blocks_of(rank, ranks):
    """Return the numbers of a rank's two blocks, the earlier one first."""
    return [rank, hole(1, "as far from the end as the first is from the beginning", rank, ranks)]


def tokens_of(length, rank, ranks):
    """Return the positions of a rank's tokens in the whole sequence: (own,) integers."""
    blocks = np.array_split(np.arange(length), 2 * ranks)
    return np.concatenate([blocks[number] for number in blocks_of(rank, ranks)])


def multiplied(query_block, key_block):
    """Return whether queries of one block attend to any keys of another block, or of the same:
    causal."""
    return hole(
        2, "which of the two blocks must not be later than the other?", query_block, key_block
    )


def plain_ring_attention(q, k, v, positions, group):
    """Return ring attention's forward of one head: (own, D) three times, positions (own,) -> (own,
    D).

    top and total (own, 1) are the maximum and the sum so far, y (own, D) the weighted sum so far:
    section 1.
    """
    next_rank = (group.rank + 1) % group.size
    prev_rank = (group.rank - 1) % group.size
    # seen: where these keys stand
    top = -np.inf
    total = 0.0
    y = 0.0
    seen = positions
    for hop in range(group.size):
        scores = q @ k.T / np.sqrt(q.shape[1])
        scores[positions[:, None] < seen] = -np.inf  # these lie ahead
        now = hole(3, "the maximum over all keys so far: (own, 1)", top, scores)
        p = np.exp(scores - now)
        shrink = hole(4, "what makes sums under the old maximum sums under the new one", top, now)
        total = hole(5, "the sum over all keys so far", total, shrink, p)
        y = hole(6, "the weighted sum over all keys so far", y, shrink, p, v)
        top = now
        if hop < group.size - 1:  # pass on, take the previous rank's
            k, v, seen = (group.exchange(x, dst=next_rank, src=prev_rank) for x in (k, v, seen))
    return y / total


def positions_for_rotary(length, rank, ranks):
    """Return the positions that `rotary` gets with a rank's queries and keys: (own,) integers."""
    return hole(
        7, "the angle between a query and a key depends on their distance in the whole sequence"
    )


def arrays_sent(ranks):
    """Return how many arrays a rank sends for attention (forward, backward); the keys of one rank's
    tokens are one array, their values another: section 4.1."""
    forward = hole(8, "keys and values: how often is each sent?", ranks)
    backward = hole(
        9, "the same again, and their gradients, which must also return to their rank", ranks
    )
    return forward, backward
