"""Keys: parameters by name, divided among servers by size; each server's keys are in one vector.

    keys by size     embedding 80 | head 80 | up 32 | down 32 | qkv 24 | out 8
    server 0         embedding 80           | up 32           | qkv 24
    server 1                        head 80         | down 32          | out 8

The largest key is assigned first, and each key goes to the server that has least. A key is never
cut, so loads differ by no more than the largest key. A worker sends a server whole vectors, and
gets whole vectors back: one message each way for each dtype.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from minidist.autograd.tensor import Parameter
from minidist.device import account
from minidist.device.backend import Array
from minidist.errors import ConfigError
from minidist.nn import Module
from minidist.nn.weights import unround
from minidist.parallel.step.flat import (
    Piece,
    empty_like,
    join,
    settle_in_vector,
    trainable,
    views,
)


def assign(sizes: Sequence[int], servers: int) -> list[list[int]]:
    """Return the keys of each server, as positions in `sizes` in ascending order; the same on every
    rank.

    Raises:  ConfigError if a server would have none.
    """
    if not 1 <= servers <= len(sizes):
        raise ConfigError(
            f"{servers} parameter servers for {len(sizes)} keys: each server has at least one "
            f"key; use 1 to {len(sizes)} servers"
        )
    loads = [0] * servers
    shares: list[list[int]] = [[] for _ in range(servers)]
    for key in sorted(range(len(sizes)), key=lambda key: -sizes[key]):
        server = min(
            range(servers), key=lambda server: (loads[server], len(shares[server]), server)
        )
        shares[server].append(key)
        loads[server] += sizes[key]
    return [sorted(share) for share in shares]


def keys_by_server(model: Module, servers: int) -> list[list[Parameter]]:
    """Return the keys of each server: the parameters that learn, by size."""
    learning = trainable(model.parameters())
    return [
        [learning[key] for key in share]
        for share in assign([p.data.nbytes for p in learning], servers)
    ]


class Shard:
    """The keys of one server, moved into one vector for each dtype; their gradients are views of
    vectors, too.

    Args:    dtype: a server's, wider than the keys': of its masters and sums (default: the keys'
             own).
    Attributes: keys       the parameters, which stay usable
                weights    a vector for each dtype
                masters    the vectors that are updated: the weights, or vectors in `dtype` that the
                           weights are rounded from
                gradients  as long, of the masters' dtype
                nbytes     of the weights
    """

    def __init__(self, keys: Sequence[Parameter], *, dtype: np.dtype | None = None) -> None:
        self.keys = tuple(keys)
        self.runs = [
            [key for key in keys if key.dtype == dtype]
            for dtype in dict.fromkeys(key.dtype for key in keys)
        ]
        # the parameters become views: pull and the update change p.data
        self.weights = [join(run) for run in self.runs]
        settle_in_vector(self.keys)
        self.nbytes = sum(vector.nbytes for vector in self.weights)
        self.masters = [
            master_of(run, vector, dtype)
            for run, vector in zip(self.runs, self.weights, strict=True)
        ]
        self.wide = any(a is not b for a, b in zip(self.masters, self.weights, strict=True))
        self.gradients = [empty_like(vector, vector.size, "gradients") for vector in self.masters]
        if not self.wide:  # with wider masters, no backward writes there
            for key, grad in self._by_key(self.gradients):
                key.bind_gradient(grad)  # backward writes into the vector that push sends

    def pieces(self) -> list[Piece]:
        """Return the pieces of an optimizer, with this shard's gradients."""
        return [
            Piece(key, master, grad, range(key.size))
            for (key, master), (_, grad) in zip(
                self._by_key(self.masters), self._by_key(self.gradients), strict=True
            )
        ]

    def round(self) -> None:
        """Set the weights to the masters, rounded once."""
        for master, weights in zip(self.masters, self.weights, strict=True):
            if master is not weights:
                weights[...] = master

    def point(self, pieces: Iterable[Piece], gradients: Sequence[Array]) -> None:
        """Let `pieces` (of this shard) read other gradients, laid out as this shard's."""
        for piece, (_, grad) in zip(pieces, self._by_key(gradients), strict=True):
            piece.grad = grad.reshape(piece.data.shape)

    def new_buffers(self, category: str) -> list[Array]:
        """Return new vectors as long as the weights, counted in the memory account."""
        return [empty_like(vector, vector.size, category) for vector in self.weights]

    def _by_key(self, vectors: Sequence[Array]) -> Iterator[tuple[Parameter, Array]]:
        """Yield (key, its place in the vector of its dtype)."""
        for run, vector in zip(self.runs, vectors, strict=True):
            yield from views(run, vector)


def master_of(run: Sequence[Parameter], weights: Array, dtype: np.dtype | None) -> Array:
    """Return `weights` themselves, or in a wider dtype the numbers as they were drawn."""
    if dtype is None or dtype == weights.dtype:
        return weights
    master = account.current().hold(weights.astype(dtype), "optimizer")
    ends = [*accumulate(key.size for key in run)]
    unround(
        master,
        weights,
        [
            (key, slice(end - key.size, end), range(key.size))
            for key, end in zip(run, ends, strict=True)
        ],
    )
    return master
