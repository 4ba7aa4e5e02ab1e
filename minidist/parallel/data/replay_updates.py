"""The updates of an asynchronous run, made again in one process: a proof that the run's record is
complete.

    record of server 0   worker 1's step 0 from versions (0, 0) | worker 0's step 0 from (0, 0) | …
    record of server 1   worker 0's step 0 from versions (0, 0) | worker 1's step 0 from (0, 0) | …

An update is made again as soon as the weights exist from which its gradient was made. The gradient
is of the same part of the same batch, so the weights at the end are those of the run, to the last
bit (data/bounded_staleness.py).
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from minidist.device.backend import Array
from minidist.errors import CommError
from minidist.nn import Module
from minidist.optim import Optimizer
from minidist.parallel.data.bounded_staleness import Update, copies_of, own_scale
from minidist.parallel.data.server_keys import Shard, keys_by_server
from minidist.parallel.step.flat import Piece
from minidist.parallel.step.step import Batch, Loss, loss_of, part_of


def replay(
    model: Module,
    records: Sequence[Sequence[Update]],
    batch: Callable[[int], Batch],
    make_optimizer: Callable[[list[Piece]], Optimizer],
    *,
    workers: int,
    loss: Loss | None = None,
    clip: float | None = None,
) -> None:
    """Make an asynchronous run's updates again, in this process; `model` starts as the run's and
    ends as its servers' weights.

    Args:    records: of each server; batch(step): the global batch; make_optimizer: as each server
             made its own.
             loss, clip: the run's.
    Cost:    a forward and a backward for each worker's step; keeps every version of the weights.
    """
    loss = loss or loss_of(model)
    shards = [Shard(keys) for keys in keys_by_server(model, len(records))]
    pieces = [shard.pieces() for shard in shards]
    optimizers = [make_optimizer(of_server) for of_server in pieces]
    # of each server, every version of its weights
    kept = [[copies_of(shard.weights)] for shard in shards]
    gradients: dict[tuple[int, int, tuple[int, ...]], tuple[list[list[Array]], float]] = {}

    def gradient(update: Update) -> tuple[list[list[Array]], float]:
        """Return a worker's gradient by server, and the factor that scales it."""
        for shard, versions, version in zip(shards, kept, update.versions, strict=True):
            _restore(shard.weights, versions[version])
        part = part_of(batch(update.step), size=workers, rank=update.worker)
        model.zero_grad()
        if len(part.inputs):
            loss(part, part.targets.size).backward()
        scale = own_scale([key for shard in shards for key in shard.keys], clip)
        return [copies_of(shard.gradients) for shard in shards], scale

    for server, update in _in_order(records):
        if update[:3] not in gradients:
            gradients[update[:3]] = gradient(update)
        by_server, scale = gradients[update[:3]]
        _restore(shards[server].weights, kept[server][-1])
        shards[server].point(pieces[server], by_server[server])
        optimizers[server].step(update.lr, scale)
        kept[server].append(copies_of(shards[server].weights))
    for shard, versions in zip(shards, kept, strict=True):
        _restore(shard.weights, versions[-1])


def _in_order(records: Sequence[Sequence[Update]]) -> Iterator[tuple[int, Update]]:
    """Yield (server, update): each server's in order, each update when the weights exist from which
    its gradient was made."""
    # versions of each server's weights
    left = [deque(record) for record in records]
    exist = [1] * len(records)
    while any(left):
        ready = [
            server
            for server, record in enumerate(left)
            if record
            and all(
                version < versions
                for version, versions in zip(record[0].versions, exist, strict=True)
            )
        ]
        if not ready:
            raise CommError(
                f"replay: {sum(map(len, left))} updates of the record were made from weights "
                "that it never makes; the records of all servers belong together"
            )
        for server in ready:
            yield server, left[server].popleft()
            exist[server] += 1


def _restore(vectors: Sequence[Array], values: Sequence[Array]) -> None:
    for vector, value in zip(vectors, values, strict=True):
        vector[...] = value
