"""What each rank gets of a dim, and of attention's heads; and between how many ranks a GPT can be
divided."""

from minidist.comm.chunks import bounds
from minidist.nn.config import GPTConfig


def even_slices(length: int, size: int) -> list[slice]:
    """The slice of each of `size` ranks of a dim of `length`, as numpy.array_split cuts it."""
    edges = bounds(length, size)
    return [slice(edges[rank], edges[rank + 1]) for rank in range(size)]


def head_shares(heads: int, key_heads: int, size: int) -> list[tuple[range, range]]:
    """For each rank its query heads, and the key heads that these query heads look at.

    With at least as many key heads as ranks, a key head goes to one rank with all its query heads.
    With fewer, each key head goes to several ranks, which divide its query heads.
    Args:    heads, key_heads: of the whole layer; key_heads divides heads. size: number of ranks,
             at most heads.
    Returns: (query heads, key heads) of each rank, in rank order.
    """
    each = heads // key_heads
    if key_heads >= size:
        return [
            (range(part.start * each, part.stop * each), range(part.start, part.stop))
            for part in even_slices(key_heads, size)
        ]
    shares = []
    for key, sharing in enumerate(even_slices(size, key_heads)):
        for part in even_slices(each, sharing.stop - sharing.start):
            shares.append(
                (range(key * each + part.start, key * each + part.stop), range(key, key + 1))
            )
    return shares


def narrowest(config: GPTConfig) -> tuple[str, int]:
    """What bounds the tensor axis of a GPT: "heads", "token ids" or "hidden numbers", and their
    count."""
    hidden = config.mixture.hidden or config.hidden if config.mixture else config.hidden
    counts = {"heads": config.heads, "token ids": config.vocabulary, "hidden numbers": hidden}
    return min(counts.items(), key=lambda item: item[1])
