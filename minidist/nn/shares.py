"""Each rank's part of a dim and of attention's heads, and the largest tensor axis of a GPT."""

from minidist.comm.chunks import bounds
from minidist.nn.config import GPTConfig


def even_slices(length: int, size: int) -> list[slice]:
    """Return the slice of a dim of `length` for each of `size` ranks, as numpy.array_split cuts
    it."""
    edges = bounds(length, size)
    return [slice(edges[rank], edges[rank + 1]) for rank in range(size)]


def head_shares(heads: int, key_heads: int, size: int) -> list[tuple[range, range]]:
    """Return for each rank its query heads, and the key heads that these query heads use.

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
    """Return the smallest dim that the tensor axis divides, which bounds the axis: "heads", "token
    ids" or "hidden numbers", and its count."""
    hidden = config.mixture.hidden or config.hidden if config.mixture else config.hidden
    counts = {"heads": config.heads, "token ids": config.vocabulary, "hidden numbers": hidden}
    return min(counts.items(), key=lambda item: item[1])
