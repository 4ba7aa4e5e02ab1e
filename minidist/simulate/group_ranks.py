"""Chapter 24 · The groups of a plan by name: which world ranks a rank meets in each.

"tp", "dp,cp"       along axes of the mesh: ranks that agree in every other coordinate
"dp.shard"          hybrid sharding: neighbours that share a copy of the state
"dp.replicas"       those that hold the same shard of other copies
"pp.ends"           the first and the last stage, if both have the tied token table
"tp.sharers"        ranks that hold the same key head
"dp.peers"          the servers, or the workers, of a parameter server
"""

from functools import lru_cache

from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.nn.shares import head_shares
from minidist.parallel.hybrid.plan import Plan


@lru_cache(maxsize=1 << 16)
def group_ranks(plan: Plan, config: GPTConfig, name: str, rank: int) -> tuple[int, ...]:
    """Return the world ranks of the group `name` that `rank` is in, in group order.

    Raises:  ConfigError for a name that no group of a plan has.
    """
    if name == "world":
        return tuple(range(plan.size))
    base, _, kind = name.partition(".")
    along = _along(plan, tuple(base.split(",")), rank)
    if not kind:
        return along
    here = along.index(rank)
    size = plan.shard or len(along)
    if kind == "shard":
        return along[here - here % size : here - here % size + size]
    if kind == "replicas":
        return along[here % size :: size]
    if kind == "ends":
        return along[0], along[-1]
    if kind == "sharers":
        shares = head_shares(config.heads, config.key_heads, len(along))
        return tuple(along[r] for r in range(len(along)) if shares[r][1] == shares[here][1])
    if kind == "peers":
        workers = len(along) - plan.servers
        return along[:workers] if here < workers else along[workers:]
    raise ConfigError(f"simulate: no group of a plan is called {name!r}")


def _along(plan: Plan, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return ranks that differ from `rank` in the coordinates of `axes` alone; the last axis is
    innermost."""
    steps = {}
    step = 1
    for axis in reversed(plan.axes):
        steps[axis] = step
        step *= plan.axes[axis]
    if unknown := [axis for axis in axes if axis not in steps]:
        raise ConfigError(f"simulate: no axis of a plan is called {unknown[0]!r}")
    found = [rank - sum(rank // steps[axis] % plan.axes[axis] * steps[axis] for axis in axes)]
    for axis in plan.axes:
        if axis in axes:
            found = [
                first + place * steps[axis] for first in found for place in range(plan.axes[axis])
            ]
    return tuple(found)
