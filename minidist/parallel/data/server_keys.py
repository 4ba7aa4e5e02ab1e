"""Keys: parameters by name, divided among servers by size; each server's keys lie in one vector.

    keys by size     embedding 80 | head 80 | up 32 | down 32 | qkv 24 | out 8      the largest first, each to the
    server 0         embedding 80           | up 32           | qkv 24              server that has least
    server 1                        head 80         | down 32          | out 8

A key is never cut, so loads differ by no more than the largest key. What a worker sends a server, and gets back, are
whole vectors: one message each way.
"""

from collections.abc import Iterable, Iterator, Sequence

from minidist.autograd.tensor import Parameter
from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.parallel.step.flat import Piece, empty_like, join, views


def assign(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """The keys of each server, as positions in `sizes` in ascending order; the same on every rank.

    Raises:  ConfigError if a server would have none.
    """
    if not 1 <= servers <= len(sizes):
        raise ConfigError(f"{servers} parameter servers for {len(sizes)} keys: each server has at least one key; "
                          f"take 1 to {len(sizes)} servers")
    loads, shares = [0] * servers, [[] for _ in range(servers)]     # type: list[int], list[list[int]]
    for key in sorted(range(len(sizes)), key=lambda key: -sizes[key]):
        server = min(range(servers), key=lambda server: (loads[server], len(shares[server]), server))
        shares[server].append(key)
        loads[server] += sizes[key]
    return [sorted(share) for share in shares]


class Shard:
    """The keys of one server, moved into one vector for each dtype; their gradients are views of vectors, too.

    Attributes: keys       the parameters, which stay usable
                weights    a vector for each dtype
                gradients  as long
                nbytes     of the weights
    """

    def __init__(self, keys: Sequence[Parameter]) -> None:
        self.keys = tuple(keys)
        self.runs = [[key for key in keys if key.dtype == dtype] for dtype in dict.fromkeys(key.dtype for key in keys)]
        self.weights = [join(run) for run in self.runs]
        self.nbytes = sum(vector.nbytes for vector in self.weights)
        self.gradients = self.rooms("gradients")
        for key, grad in self._by_key(self.gradients):
            key.bind_gradient(grad)

    def pieces(self) -> list[Piece]:
        """The pieces of an optimizer, with this shard's gradients."""
        return [Piece(key, key.data, grad, range(key.size)) for key, grad in self._by_key(self.gradients)]

    def point(self, pieces: Iterable[Piece], gradients: Sequence[Array]) -> None:
        """Let `pieces` (of this shard) read other gradients, laid out as this shard's."""
        for piece, (_, grad) in zip(pieces, self._by_key(gradients), strict=True):
            piece.grad = grad.reshape(piece.data.shape)

    def rooms(self, category: str) -> list[Array]:
        """New vectors as long as the weights, told to the memory account."""
        return [empty_like(vector, vector.size, category) for vector in self.weights]

    def _by_key(self, vectors: Sequence[Array]) -> Iterator[tuple[Parameter, Array]]:
        """(key, its place in the vector of its dtype)."""
        for run, vector in zip(self.runs, vectors, strict=True):
            yield from views(run, vector)
