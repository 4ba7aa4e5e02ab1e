"""Chapter 24 · Roles: ranks that do the same. One of them runs, and its trace stands for all.

What a rank does follows from its place on each axis, and from what it is given there:

    pp        its stage
    tp        how many heads, hidden numbers and token ids it has; the first also counts undivided
              weights in the norm
    cp        ring: its place (which keys it sees when); all-to-all: how many tokens
    dp, ep    how many rows; with servers whether it is one; in whose copy of the state it counts in
              the norm

ZeRO's chunks begin anywhere in a parameter, so with ZeRO no two ranks of the data axis hold the
same pieces. They are as long, to an element a bucket; ranks that differ in that alone share a role.
"""

from collections.abc import Hashable, Sequence

from minidist.nn import GPTConfig
from minidist.nn.shares import even_slices, head_shares
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.step.step import rows_of


def roles(
    plan: Plan, config: GPTConfig, rows: int, tokens: int | None = None, *, norm: bool = True
) -> list[int]:
    """Return the role of each rank, from 0 on; the first rank of a role is the one to run.

    Args:    rows: sequences of the global batch, each of `tokens`.
             norm: False: ranks that differ only in what they count in the gradient's norm share a
             role, too: half as many roles with tp, for a few sums of small tensors a step.
    """
    numbers: dict[Hashable, int] = {}
    found = (
        _role(plan, config, rows, tokens or config.context, place) for place in _coordinates(plan)
    )
    return [
        numbers.setdefault((does, counts if norm else ()), len(numbers)) for does, counts in found
    ]


def first_of(role_of: Sequence[int]) -> list[int]:
    """Return the first rank of each role."""
    first: dict[int, int] = {}
    for rank, role in enumerate(role_of):
        first.setdefault(role, rank)
    return [first[role] for role in range(len(first))]


def _coordinates(plan: Plan) -> list[dict[str, int]]:
    """Return the coordinates of each rank."""
    steps = {}
    step = 1
    for axis in reversed(plan.axes):
        steps[axis] = step
        step *= plan.axes[axis]
    return [
        {axis: rank // steps[axis] % plan.axes[axis] for axis in plan.axes}
        for rank in range(plan.size)
    ]


def _role(
    plan: Plan, config: GPTConfig, rows: int, tokens: int, at: dict[str, int]
) -> tuple[Hashable, Hashable]:
    """Return what a rank does, and what it counts in the norm."""
    readers = at["dp"] * plan.ep + at["ep"]
    given: tuple[int, ...] = (rows_of(rows, size=plan.dp * plan.ep, rank=readers)[0],)
    if plan.strategy == "parameter-server":
        serves = at["dp"] >= plan.workers
        given = (
            (-1 - at["dp"],) if serves else (rows_of(rows, size=plan.workers, rank=at["dp"])[0],)
        )
    copy = ((at["dp"] * plan.ep + at["ep"]) * plan.cp + at["cp"]) // (plan.shard or plan.copies)
    does = (
        at["pp"],
        given,
        _tensor_part(plan, config, tokens, at["tp"]),
        _context_part(plan, config, tokens, at["cp"]),
        _experts(plan, config, at["ep"]),
    )
    return does, (
        at["tp"] == 0,
        _first_sharer(plan, config, at["tp"]),
        not plan.composed or (copy == 0 if plan.zero else at["ep"] == 0),
    )


def _length(whole: int, size: int, rank: int) -> int:
    part = even_slices(whole, size)[rank]
    return int(part.stop - part.start)


def _tensor_part(plan: Plan, config: GPTConfig, tokens: int, rank: int) -> Hashable:
    if plan.tp == 1:
        return 0
    shares = head_shares(config.heads, config.key_heads, plan.tp)
    queries, keys = shares[rank]
    hidden = (config.mixture.hidden if config.mixture else None) or config.hidden
    return (
        len(queries),
        len(keys),
        _length(hidden, plan.tp, rank),
        _length(config.vocabulary, plan.tp, rank),
        _length(tokens, plan.tp, rank) * plan.sequence_parallel,
    )


def _first_sharer(plan: Plan, config: GPTConfig, rank: int) -> bool:
    """Return True if no rank of tp before this one holds its key heads."""
    keys = [share[1] for share in head_shares(config.heads, config.key_heads, plan.tp)]
    return keys.index(keys[rank]) == rank


def _context_part(plan: Plan, config: GPTConfig, tokens: int, rank: int) -> Hashable:
    if plan.cp == 1 or plan.attention == "ring":
        return rank
    queries, keys = head_shares(
        config.heads // plan.tp, max(1, config.key_heads // plan.tp), plan.cp
    )[rank]
    return _length(tokens, plan.cp, rank), len(queries), len(keys)


def _experts(plan: Plan, config: GPTConfig, rank: int) -> int:
    return 0 if config.mixture is None else _length(config.mixture.experts, plan.ep, rank)
