"""Keys: parameters by name, divided among servers by size; each server's keys lie in one vector.

    keys by size     embedding 80 | head 80 | up 32 | down 32 | qkv 24 | out 8      the largest first, each to the
    server 0         embedding 80           | up 32           | qkv 24              server that has least
    server 1                        head 80         | down 32          | out 8

A key is never cut, so loads differ by no more than the largest key. What a worker sends a server, and gets back, are
whole vectors: one message each way.
"""

from collections.abc import Iterable, Sequence

from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError
from minidist.parallel.step.flat import Piece, empty_like


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
    """

    def __init__(self, keys: Sequence[Parameter]) -> None:
        self.keys = tuple(keys)
        self.runs = [[key for key in keys if key.dtype == dtype] for dtype in dict.fromkeys(key.dtype for key in keys)]
        self.weights = [_vector(run, "parameters") for run in self.runs]
        self.gradients = [_vector(run, "gradients") for run in self.runs]
        for run, weights, gradients in zip(self.runs, self.weights, self.gradients, strict=True):
            for key, data, grad in zip(run, views(run, weights), views(run, gradients), strict=True):
                data[...] = key.data
                key.data = data
                key.bind_gradient(grad)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(vector.nbytes for vector in self.weights)

    def pieces(self) -> list[Piece]:
        """The pieces of an optimizer, with this shard's gradients."""
        return [Piece(key, data, grad) for run, weights, gradients in
                zip(self.runs, self.weights, self.gradients, strict=True)
                for key, data, grad in zip(run, views(run, weights), views(run, gradients), strict=True)]

    def point(self, pieces: Iterable[Piece], gradients: Sequence[Array]) -> None:
        """Let `pieces` (of this shard) read other gradients, laid out as this shard's."""
        grads = (grad for run, vector in zip(self.runs, gradients, strict=True) for grad in views(run, vector))
        for piece, grad in zip(pieces, grads, strict=True):
            piece.grad = grad.reshape(piece.data.shape)

    def rooms(self, category: str) -> list[Array]:
        """New vectors as long as the weights, told to the memory account."""
        return [empty_like(vector, vector.size, category) for vector in self.weights]


def _vector(run: Sequence[Parameter], category: str) -> Array:
    vector = array_module(run[0].data).zeros(sum(key.size for key in run), run[0].dtype)
    return account.current().hold(vector, category)


def views(run: Sequence[Parameter], vector: Array) -> Iterable[Array]:
    """The place of each key in a vector of the run, in the key's shape."""
    start = 0
    for key in run:
        yield vector[start:start + key.size].reshape(key.shape)
        start += key.size


def free(parameters: Iterable[Parameter]) -> None:
    """Forget the values of parameters that are kept elsewhere: they read as NaN, and take one element's room."""
    for parameter in parameters:
        xp = array_module(parameter.data)
        parameter.data = xp.broadcast_to(xp.full((), xp.nan, parameter.dtype), parameter.shape)
