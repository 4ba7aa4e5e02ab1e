"""Chapter 24 · Candidates: every plan that could run a model on a cluster, as columns of numbers.

    found = candidates(config, cluster, batch=1536)
    len(found), found.plan(0), found.order(0)       # a row: a plan, and the order of its axes

Enumerated: sizes dp × pp × ep × cp × tp whose product is the number of devices, the ZeRO stage, the
sequences per microbatch, the pipeline's schedule, recomputation, offload of the optimizer or of
all, the axis that lies inside nodes, and for ZeRO-3 a copy of the state in each node (hybrid
sharding).

Left out from the start: plans that Plan refuses (plan_checks.py), and divisions that give ranks
unequal parts, because such a plan is seldom the best.

Not enumerated: parameter servers, pipedream (another training), dualpipe-v (the time of zb-v with
more memory), zb-v with recomputation (a deferred backward keeps the recomputed activations), other
hybrid sharding or any with offload, compressed gradients, tensor parallelism wider than a node,
recomputation of only the scores, context parallelism with fewer than LEAST_TOKENS per rank.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.nn.config import divisors
from minidist.nn.shares import narrowest
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.hybrid.plan_checks import AXES
from minidist.simulate.cluster import Cluster

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v")
RECOMPUTED = ("none", "all")
OFFLOADS = ("none", "optimizer", "all")
ROWS = (1, 2, 4, 8)  # sequences of a microbatch: with more, products hardly become faster
# tokens per rank of an axis cp: with fewer, sending the keys takes longer than attention
LEAST_TOKENS = 2048
COLUMNS = (
    *AXES,
    "zero",
    "rows",
    "pieces",
    "schedule",
    "recomputed",
    "offload",
    "sequence",
    "order",
    "shard",
)
"""`rows`: sequences of a microbatch; `pieces`: microbatches of a data rank; `order`: an index in
`orders`; `shard`: number of ranks that share a copy of the state, 0: all."""


@dataclass(frozen=True)
class Candidates:
    """Plans as columns of numbers. Attributes: table: (plans, columns); orders: orders of the axes,
    the innermost last."""

    table: np.ndarray
    orders: tuple[tuple[str, ...], ...]
    precision: str = "bf16"

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> np.ndarray:
        """Return a column of all plans."""
        return self.table[:, COLUMNS.index(name)]

    def rows(self, *names: str) -> np.ndarray:
        """Return several columns of all plans: (plans, names)."""
        return self.table[:, [COLUMNS.index(name) for name in names]]

    def only(self, kept: np.ndarray) -> "Candidates":
        """Return the candidates selected by a mask or by row numbers."""
        return Candidates(self.table[kept], self.orders, self.precision)

    def plan(self, number: int) -> Plan:
        """Return a row as a Plan. Raises: PlanError if Plan refuses it."""
        row = dict(zip(COLUMNS, self.table[number].tolist(), strict=True))
        piped = row["pp"] > 1
        return Plan(
            **{axis: row[axis] for axis in AXES},
            zero=row["zero"],
            precision=self.precision,
            schedule=SCHEDULES[row["schedule"]],
            microbatches=row["pieces"] if piped else None,
            accumulate=1 if piped else row["pieces"],
            checkpoint_blocks=RECOMPUTED[row["recomputed"]],
            offload=OFFLOADS[row["offload"]],
            sequence_parallel=bool(row["sequence"]),
            shard=row["shard"] or None,
        )

    def order(self, number: int) -> tuple[str, ...]:
        """Return the order in which a plan's axes lie on the cluster, the innermost last."""
        return self.orders[self.table[number, COLUMNS.index("order")]]


def candidates(
    config: GPTConfig,
    cluster: Cluster,
    *,
    batch: int,
    precision: str = "bf16",
    offload: bool = True,
    devices: int | None = None,
    rows: Sequence[int] = ROWS,
) -> Candidates:
    """Return all candidates for a model on a cluster.

    Args:    devices: number of the cluster's devices to use (default: all); offload: whether plans
             may offload; rows: sequences that a microbatch may have.
    Raises:  ConfigError if no plan divides the batch equally; it names a batch that works.
    """
    size = devices or cluster.size
    orders = _orders()
    found = [
        row
        for axes in _axes(config, size, cluster.per_node)
        for row in _rows(config, axes, batch, cluster, orders, offload, rows)
    ]
    if not found:
        raise ConfigError(
            f"a batch of {batch} sequences on {size} devices: no plan gives each rank an equal "
            f"part; choose a batch of {-(-batch // size) * size}"
        )
    return Candidates(np.array(found, np.int32), orders, precision)


def _orders() -> tuple[tuple[str, ...], ...]:
    """Return the orders of axes: the mesh's own order, then pp outermost, then each axis innermost
    with the others as in the mesh."""
    return (
        AXES,
        ("pp", *(axis for axis in AXES if axis != "pp")),
        *((*(other for other in AXES if other != axis), axis) for axis in AXES[:-1]),
    )


def _axes(config: GPTConfig, size: int, per_node: int) -> Iterator[tuple[int, ...]]:
    """Yield the possible sizes of the axes, in the order of AXES."""
    experts = config.mixture.experts if config.mixture else 1
    most_tp = min(narrowest(config)[1], per_node if per_node > 1 else size)
    for tp in divisors(size):
        if tp > most_tp or config.heads % tp or config.key_heads % min(tp, config.key_heads):
            continue
        for cp in divisors(size // tp):
            if cp > 1 and (config.context < cp * LEAST_TOKENS or config.context % (2 * cp)):
                continue
            for ep in divisors(size // tp // cp):
                if experts % ep:
                    continue
                for pp in divisors(size // tp // cp // ep):
                    if pp <= config.layers:
                        yield size // tp // cp // ep // pp, pp, ep, cp, tp


def _rows(
    config: GPTConfig,
    axes: tuple[int, ...],
    batch: int,
    cluster: Cluster,
    orders: Sequence[tuple[str, ...]],
    offload: bool,
    sizes: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """Yield all plans with these sizes of the axes."""
    dp, pp, ep, cp, tp = axes
    if batch % (dp * ep):
        return
    part = batch // (dp * ep)
    copies = dp * ep * cp
    stages = [0] if copies == 1 else [0, 1, 2, 3]
    shard = _in_node(copies, tp, cluster)
    for rows in sizes:
        pieces = part // rows
        if part % rows or pp > 1 and pieces < pp:
            continue
        schedules = [
            number
            for number, name in enumerate(SCHEDULES)
            if pp > 1
            and (name not in ("interleaved", "zb-v") or 2 * pp <= config.layers)
            and (name != "interleaved" or pieces % pp == 0)
            and (name != "zb-v" or pieces >= 2 * pp)
        ]
        for zero, schedule, recomputed, sequence, order in product(
            stages,
            schedules or [0],
            range(len(RECOMPUTED)),
            (0, 1) if tp > 1 else (0,),
            _distinct(axes, cluster, orders),
        ):
            if recomputed and SCHEDULES[schedule] == "zb-v":
                continue
            yield (*axes, zero, rows, pieces, schedule, recomputed, 0, sequence, order, 0)
            if zero == 3 and shard:
                yield (*axes, zero, rows, pieces, schedule, recomputed, 0, sequence, order, shard)
            for away, tier, stage in ((1, "host", zero), (2, "disk", 3)):
                if offload and tier in cluster.tiers and (copies == 1 or zero and stage == zero):
                    yield (
                        *axes,
                        stage,
                        rows,
                        pieces,
                        schedule,
                        recomputed,
                        away,
                        sequence,
                        order,
                        0,
                    )


def _in_node(copies: int, tp: int, cluster: Cluster) -> int:
    """Return the number of data ranks in a node, if one copy of the state per node is possible;
    else 0."""
    inside = cluster.per_node // tp
    return inside if cluster.nodes > 1 and 1 < inside < copies and copies % inside == 0 else 0


def _distinct(
    axes: tuple[int, ...], cluster: Cluster, orders: Sequence[tuple[str, ...]]
) -> list[int]:
    """Return the numbers of the orders that differ: axes of one rank do not count, and within one
    node all orders are equal."""
    sizes = dict(zip(AXES, axes, strict=True))
    found: dict[tuple[str, ...], int] = {}
    for number, order in enumerate(orders):
        found.setdefault(tuple(axis for axis in order if sizes[axis] > 1), number)
    uneven = cluster.nodes > 1 or bool(cluster.topology.torus) and cluster.size > 1
    return list(found.values()) if uneven else list(found.values())[:1]
