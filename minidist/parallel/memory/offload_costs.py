"""What offloading costs (chapter 20): what must be there before training, on device and disk, and
what will move.

The formulas stand in offload.py; here they are numbers, for a rank's own shards to the byte.
"""

from collections.abc import Sequence
from typing import Any

from minidist.comm.chunks import bounds
from minidist.device.account import MemoryAccount
from minidist.device.backend import device_of
from minidist.errors import MemoryLimitError
from minidist.nn import GPT
from minidist.parallel.memory.activations import ALL, pass_bytes
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.memory_formula import Each


def moved_to_host(
    learning: int, each: Each, *, passes: int = 1, reduced: int | None = None
) -> dict[str, int]:
    """Bytes a step that a rank moves with OnHost, by direction.

    Args:    learning: how many of the parameters that are not frozen are the rank's, Ψ/P.
             passes: backwards of a step whose gradients are reduced: A, and 1 with ZeRO-1.
             reduced: numbers that a step's reductions leave on the rank (default: `passes` times
             `learning`).
    """
    reduced = passes * learning if reduced is None else reduced
    return {
        "device to host": reduced * each.gradients,
        "host to device": learning * each.parameters,
    }


def moved_to_disk(
    units: int,
    root: int,
    learning: int,
    each: Each,
    *,
    masters: bool = False,
    passes: int = 1,
    keeps: bool = False,
    fetched: int | None = None,
    reduced: int | None = None,
    outside: int = 0,
) -> dict[str, int]:
    """Bytes a step that a rank moves with OnDisk, by direction.

    Args:    units, root: the rank's numbers in units, fetched twice a pass (once if a unit `keeps`
             its weights from forward to backward), and in the root, fetched once a step.
             learning, reduced: as above; masters: whether weights have masters beside them, counted
             in each.optimizer.
             fetched: numbers that a step's gathers take of the rank, if not these (a pipeline's
             microbatches).
             outside: numbers whose gradients are read, summed over other ranks too, and written
             once more.
    """
    fetched = (1 if keeps else 2) * passes * units + root if fetched is None else fetched
    reduced = passes * learning if reduced is None else reduced
    weights = fetched * each.parameters
    gradients = reduced * each.gradients
    update = each.optimizer + (0 if masters else each.parameters)
    summed = outside * each.gradients
    return {
        "disk to host": weights + gradients + summed + learning * update,
        "host to device": weights,
        "device to host": gradients,
        "host to disk": gradients + summed + learning * (each.parameters + each.optimizer),
    }


def numbers_moved(calls: Sequence[Collective], itemsize: int) -> dict[str, int]:
    """How many numbers of a step's collectives are this rank's own, by verb: of a chunk that it
    gives, or that it gets.

    Args:    calls: of the data axis, as DataAxis.traffic tells them.
    """
    found = {"all_gather": 0, "reduce_scatter": 0}
    for call in (call for call in calls if call.verb in found):
        edges = bounds(call.nbytes // itemsize, call.group.size)
        found[call.verb] += edges[call.group.rank + 1] - edges[call.group.rank]
    return found


def require_memory(limit: int | None, units: Sequence[Any], root: Any) -> None:
    """Raise MemoryLimitError if units of ZeRO-3 cannot fit: two whole ones, a unit's gradients, and
    the root."""
    if limit is None or not units:
        return
    one, other = max(
        zip(units, [*units[1:], units[-1]], strict=True),
        key=lambda pair: pair[0].nbytes + pair[1].nbytes,
    )
    weights = one.nbytes + other.nbytes * (one is not other)
    gradients = max(unit.nbytes for unit in units)
    need = weights + gradients + 2 * root.nbytes
    if need > limit:
        raise MemoryLimitError(
            f"device memory: two units at work ({one.name}, {other.name}: {weights:,} bytes), "
            f"the gradients of one ({gradients:,}) and the root with its own "
            f"({2 * root.nbytes:,}) need {need:,} bytes and the limit is {limit:,}; raise it, or "
            "make the model narrower"
        )


def require_room(plan: Any, model: GPT, account: MemoryAccount, sequences: int) -> None:
    """Raise MemoryLimitError if a step on so many sequences cannot fit: known on dp alone, without
    experts."""
    if plan.device_memory is None or plan.composed or model.config.mixture is not None or plan.ways:
        return
    at_once = -(-sequences // (plan.dp * plan.accumulate))
    which = plan.checkpoint_blocks if plan.activation_memory is None else ALL
    kept = pass_bytes(model.config, at_once, which, device=device_of(next(model.parameters()).data))
    held = account.now["total"]
    if held + kept > plan.device_memory:
        rows = f"{at_once} sequence{'s' * (at_once > 1)}"
        raise MemoryLimitError(
            f"device memory: {held:,} bytes that stay and {kept:,} of activations, of {rows} at "
            f"once, need {held + kept:,} bytes and the limit is {plan.device_memory:,}; "
            f"{plan.savings}"
        )


def require_disk(plan: Any, model: GPT, store: Any, who: str) -> None:
    """Raise DiskError unless a rank's share of all that lasts, with Adam, fits on its disk.

    Args:    model: what the rank has of it, cut, not yet divided by ZeRO; who: the rank, in words.
    """
    parameters = [*model.parameters()]
    each = Each.of(parameters[0].dtype.itemsize, masters=plan.precision != "fp32")
    dense = plan.shard or plan.copies
    experts = plan.dp * plan.cp
    store.require(
        int(
            sum(
                p.size * each.together / (dense if p.shared_by is None else experts)
                for p in parameters
            )
        ),
        who,
    )
