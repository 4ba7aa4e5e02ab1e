"""Layers cut between the ranks of a tensor-parallel group, and the edges of the regions that they make.

A block has two regions, attention and MLP. In each, a column linear, then something elementwise or head by head, then a
row linear: between them each rank works on its own columns, and nothing travels.

    x ── enter ── x W1 of own columns ── gelu, or attention of own heads ── y W2 of own rows ── leave ── + bias

What enter and leave do is the Region's affair: Megatron's f and g in chapter 12, a gather and a scatter of the sequence
in chapter 13. Layers, not whole models, are replaced: their weights keep their names, and the GPT its definition.
"""

from collections.abc import Sequence

from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.ops.vocabulary import split_cross_entropy
from minidist.autograd.tensor import Tensor
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.device.backend import Array, array_module, beside
from minidist.nn import MLP, DropoutKey, Embedding, Linear, Mixture, Module, Weight
from minidist.nn.moe import Sequences
from minidist.nn.output import Output
from minidist.parallel.zero.weight_shard import Place, WeightShard


class Region:
    """Where each rank works on its own columns: what is done at its two edges.

    Attributes: group, algorithm: of the collectives
    """

    def __init__(self, group: Group, algorithm: str = "ring") -> None:
        self.group, self.algorithm = group, algorithm

    def enter(self, x: Tensor) -> Tensor:
        """Megatron's f: x, whole on all ranks, goes in as it is; its gradients are all-reduced."""
        return collectives.copy_to(x, group=self.group, algorithm=self.algorithm)       # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """Megatron's g: the ranks' summands are all-reduced; the gradient goes in as it is."""
        return collectives.reduce_from(x, group=self.group, algorithm=self.algorithm)   # type: ignore[no-any-return]

    def sequences(self) -> Sequences:
        """Which tokens a gate sees that stands outside the region: here all."""
        return Sequences()


def ranges(length: int, size: int) -> list[slice]:
    """The part of each rank of a dim of `length`, in numpy.array_split order."""
    edges = bounds(length, size)
    return [slice(edges[rank], edges[rank + 1]) for rank in range(size)]


class ColumnLinear(Module):
    """y_r = x W[:, columns of r] + b[columns of r]: (…, inputs) -> (…, own outputs).

    Args:    linear: the whole layer, its weights not yet drawn.
             columns: of every rank; numpy.array_split's unless given.
             enter: whether x comes from outside the region; no if the caller let it in (two layers, one x).
             sharers: the ranks that have this rank's columns too; word: the last of the weights' names (WeightShard).
    """

    def __init__(self, linear: Linear, tp: Region, *, columns: Sequence[slice | Array] | None = None,
                 enter: bool = True, sharers: Group | None = None, word: str = "") -> None:
        group = tp.group
        chosen = columns or ranges(linear.weight.shape[1], group.size)
        self.region, self.product = tp if enter else None, linear.product
        self.weight = WeightShard(linear.weight, [(slice(None), part) for part in chosen], group.rank, sharers=sharers,
                                  word=word)
        self.bias = None if linear.bias is None else WeightShard(
            linear.bias, [(part,) for part in chosen], group.rank, sharers=sharers, word=word)

    def forward(self, x: Tensor, *, bias: bool = True) -> Tensor:
        return self.product(x if self.region is None else self.region.enter(x), self.weight,    # type: ignore
                            self.bias if bias else None)


class SharedKeysLinear(Module):
    """Queries of this rank's heads, and the keys and values of the one head that they look at, which others have too.

    Two column linears side by side, for what ranks share must lie alike on all of them, wherever ZeRO cuts it.
    Args:    queries, keys: the columns of every rank; sharers: the ranks that have this rank's keys.
    """

    def __init__(self, linear: Linear, tp: Region, *, queries: Sequence[Array], keys: Sequence[Array],
                 sharers: Group) -> None:
        self.region, self.product = tp, linear.product
        parts = {"queries": ColumnLinear(linear, tp, columns=queries, word="queries"),
                 "keys": ColumnLinear(linear, tp, columns=keys, sharers=sharers, word="keys")}
        self.weight = {name: part.weight for name, part in parts.items()}
        self.bias = {name: part.bias for name, part in parts.items()}

    def forward(self, x: Tensor) -> Tensor:
        x = self.region.enter(x)
        return ops.concat([self.product(x, weight, self.bias[name]) for name, weight in self.weight.items()], dim=-1)


class RowLinear(Module):
    """y = Σ_r x_r W[rows of r, :] + b: (…, own inputs) -> (…, outputs).

    The bias stays whole on every rank, and is added once, after the sum: before it, it would count P times.
    Args:    rows: of every rank; numpy.array_split's unless given.
    """

    def __init__(self, linear: Linear, tp: Region, *, rows: Sequence[slice] | None = None) -> None:
        self.region, self.product = tp, linear.product
        parts: list[Place] = [(part,) for part in rows or ranges(linear.weight.shape[0], tp.group.size)]
        self.weight = WeightShard(linear.weight, parts, tp.group.rank)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(self.product(x, self.weight))
        return y if self.bias is None else y + self.bias


class SplitMLP(MLP):
    """MLP whose hidden numbers are divided: columns of gate and up, rows of down. What enters does so once for both."""

    def __init__(self, mlp: MLP, tp: Region) -> None:
        self.region = tp
        self.gate = None if mlp.gate is None else ColumnLinear(mlp.gate, tp, enter=False)       # type: ignore
        self.up = ColumnLinear(mlp.up, tp, enter=False)             # type: ignore[assignment]
        self.down = RowLinear(mlp.down, tp)                         # type: ignore[assignment]

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        return super().forward(self.region.enter(x), key)


class SplitMixture(Mixture):
    """Mixture whose experts' hidden numbers are divided, of each expert: columns of gate and up, rows of down.

    The gate stands outside the region, whole on all ranks: tokens and the weights of the results go in together, so
    that all ranks route alike, and what each makes of its columns is a summand of the weighted sums that come out.
    Shared experts are regions of their own.
    """

    def __init__(self, mixture: Mixture, tp: Region) -> None:
        vars(self).update(vars(mixture))
        self.region, self.sequences = tp, tp.sequences()
        experts = self.experts
        hidden = ranges(experts.up.shape[2], tp.group.size)
        columns: list[Place] = [(slice(None), slice(None), part) for part in hidden]
        rows: list[Place] = [(slice(None), part) for part in hidden]
        experts.gate = None if experts.gate is None else WeightShard(experts.gate, columns, tp.group.rank)
        experts.up = WeightShard(experts.up, columns, tp.group.rank)
        experts.down = WeightShard(experts.down, rows, tp.group.rank)
        self.shared = [SplitMLP(expert, tp) for expert in self.shared]

    def enter(self, x: Tensor) -> Tensor:
        """Tokens, and the gate's chances, into the region."""
        return self.region.enter(x)

    def leave(self, y: Tensor) -> Tensor:
        """The ranks' summands out of the region."""
        return self.region.leave(y)


class SplitEmbedding(Embedding):
    """Rows of the table are divided: a rank looks up the ids that it has, with zeros for the others, and all add up."""

    def __init__(self, embedding: Embedding, tp: Region) -> None:
        self.region, self.count = tp, embedding.weight.shape[0]
        self.rows = ranges(self.count, tp.group.size)[tp.group.rank]
        self.weight: Weight = WeightShard(embedding.weight, [(part,) for part in ranges(self.count, tp.group.size)],
                                          tp.group.rank)

    def forward(self, ids: Array) -> Tensor:
        xp = array_module(ids)
        mine = (ids >= self.rows.start) & (ids < self.rows.stop)
        found = ops.embedding(self.weight, xp.where(mine, ids - self.rows.start, 0))
        return self.region.leave(ops.where(beside(mine[..., None], found.data), found, 0.0))

    def unembed(self, x: Tensor) -> Tensor:
        """Logits of the own rows of a tied table: (…, width) -> (…, own rows)."""
        return ops.unembed(self.region.enter(x), self.weight)       # type: ignore[no-any-return]


class SplitOutput(Output):
    """Logits of a slice of the vocabulary: their loss without ever joining them."""

    def __init__(self, vocabulary: int, tp: Region) -> None:
        self.vocabulary, self.region = vocabulary, tp
        self.first = ranges(vocabulary, tp.group.size)[tp.group.rank].start

    def loss(self, logits: Tensor, targets: Array, *, divisor: float | None) -> Tensor:
        """As Output.loss, the same bits on every rank."""
        return split_cross_entropy(logits, targets, first=self.first, vocabulary=self.vocabulary,  # type: ignore
                                   group=self.region.group, divisor=divisor, algorithm=self.region.algorithm)

    def whole(self, logits: Tensor) -> Tensor:
        """Joined, for generating text: an all-gather of `vocabulary` numbers a row."""
        return collectives.gather_copies(logits, dim=-1, group=self.region.group)   # type: ignore[no-any-return]
