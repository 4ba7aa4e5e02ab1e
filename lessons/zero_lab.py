"""Provide what lessons 14, 15 and 16 share: a model, batches, each stage trained and measured,
recorded steps.

Every function that takes a group is run by all its ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.device import account
from minidist.grading import Mistake, Result
from minidist.lessons import lab
from minidist.nn import GPT, GPTConfig
from minidist.observe.samples import SampledAccount
from minidist.observe.timeline import Timeline
from minidist.optim import Adam, Optimizer
from minidist.parallel.data.ddp import DDP
from minidist.parallel.step.step import Batch
from minidist.parallel.zero.zero1 import Zero1
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

# to compare weights
SMALL = GPTConfig(vocabulary=32, context=8, layers=2, width=16, heads=2, dtype="float64")
# to see memory, in float32
MEASURED = GPTConfig(vocabulary=64, context=32, layers=8, width=64, heads=4)
BUCKET = 1 << 17  # bytes: several buckets in MEASURED
SMALL_BUCKET = 1 << 12
NAMES = {0: "DDP", 1: "ZeRO-1", 2: "ZeRO-2", 3: "ZeRO-3"}
STEPS = 5  # of the runs that are compared
STAGES: dict[int, Any] = {0: DDP, 1: Zero1, 2: Zero2}


def global_batch(config: GPTConfig, step: int, sequences: int = 7) -> Batch:
    """Return inputs and targets; 7 sequences divide by no small group."""
    return lab.counting_batch(config, step, sequences)


def batches(config: GPTConfig) -> list[Batch]:
    """Return the global batches of the runs that are compared."""
    return [global_batch(config, step) for step in range(STEPS)]


def parts(
    group: Group, config: GPTConfig, steps: int = STEPS
) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
    """Yield (inputs, targets, targets of all ranks) of this rank, step by step."""
    from minidist.parallel.step.step import part_of

    for step in range(steps):
        batch = global_batch(config, step)
        part = part_of(batch, size=group.size, rank=group.rank)
        yield part.inputs, part.targets, batch[1].size


def make(
    stage: int, model: GPT, group: Group, *, bucket_bytes: int = BUCKET, **options: Any
) -> Any:
    """Return the strategy of a stage; 0 is DDP."""
    return (
        Zero3(model, group, **options)
        if stage == 3
        else STAGES[stage](model, group, bucket_bytes=bucket_bytes, **options)
    )


def new_adam(pieces: Any) -> Optimizer:
    """Return Adam, at the rate of all these runs."""
    return Adam(pieces, 1e-2)


class WatchedGroup:
    """A wrapped group that notes which arrays the collectives were given.

    Attributes: overlapped: whether an all-gather was given a part of its own result. gathered: what
                the all-gathers were given. sums: the arrays that reduce-scatters wrote to.
                all_reduces: their number. new_sums, new_gathers: whether a reduce-scatter, an
                all-gather was not told where to write, so its result is a new array.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.overlapped = False
        self.gathered: list[Any] = []
        self.sums: list[Any] = []
        self.all_reduces = 0
        self.new_sums = False
        self.new_gathers = False

    @property
    def gathers_sums(self) -> bool:
        """Return whether an all-gather was given a sum of gradients."""
        return any(np.shares_memory(x, y) for x in self.gathered for y in self.sums)

    @property
    def adds_weights(self) -> bool:
        """Return whether there were all-reduces, and no all-gather."""
        return self.all_reduces > 0 and not self.gathered

    def all_gather(self, x: Any, out: Any = None, **options: Any) -> Any:
        """Gather as the group does."""
        if out is not None and np.shares_memory(x, out):
            self.overlapped = True
        self.new_gathers |= out is None
        self.gathered.append(x)
        return self.group.all_gather(x, out=out, **options)

    def reduce_scatter(self, x: Any, out: Any = None, **options: Any) -> Any:
        """Sum as the group does."""
        self.new_sums |= out is None
        if out is not None:
            self.sums.append(out)
        return self.group.reduce_scatter(x, out=out, **options)

    def all_reduce(self, x: Any, **options: Any) -> Any:
        """Sum as the group does."""
        self.all_reduces += 1
        return self.group.all_reduce(x, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


def wrong_gathers(ranks: list[dict[str, Any]], where: str) -> dict[str, Mistake]:
    """Return the signs of ranks that exchange something else than the new weights of each.

    Args:    ranks: each with "gathers_sums" and "adds_weights" of its WatchedGroup.
    """
    return {
        "gradients are gathered": Mistake(
            any(rank["gathers_sums"] for rank in ranks),
            f"give all_gather the rank's chunk of the weights, not the sums: {where}",
        ),
        "old weights are added to new ones": Mistake(
            any(rank["adds_weights"] for rank in ranks),
            "a sum over the ranks mixes each chunk's new weights with the other ranks' old ones; "
            f"all_gather puts the new chunks one after the other: {where}",
        ),
    }


def new_array(reader: str, where: str) -> tuple[str, str]:
    """Return the mistake and the advice for a result that is in a new array, which `reader` does not
    read."""
    return (
        "the result went into a new array",
        f"{reader} uses the old array, and assigning to a name does not change it: use out=: {where}",
    )


def gathered(task: str, overlapped: bool, where: str) -> Result:
    """Return the Result of an exercise whose all-gathers must not be given a part of their own
    result."""
    given = "a part of the result" if overlapped else "a copy of the chunk"
    advice = f"y may not lie in x: give all_gather a copy: {where}"
    return Result(
        task,
        not overlapped,
        "a copy of the chunk",
        given,
        "it is overwritten while it is sent",
        advice,
    )


# ------------------------------------------------------------------------------------ equal weights


def state_vector(state: dict[str, np.ndarray]) -> np.ndarray:
    """Return all weights as one vector, in the order of their names."""
    return np.concatenate([state[name].ravel() for name in sorted(state)])


def alone() -> np.ndarray:
    """Return the weights of one process after STEPS steps."""
    model = lab.new_model(SMALL)
    lab.alone(model, new_adam, batches(SMALL))
    return state_vector(model.state_dict())


def trained(group: Group, stage: int, **options: Any) -> np.ndarray:
    """Return the weights of a stage after STEPS steps."""
    strategy = make(stage, lab.new_model(SMALL), group, bucket_bytes=SMALL_BUCKET, **options)
    optimizer = new_adam(strategy.parameters)
    for step in range(STEPS):
        strategy.step(global_batch(SMALL, step), optimizer)
    return state_vector(strategy.state_dict())


# ----------------------------------------------------------------------------------------- measured


def sent(group: Group, train: Callable[[], None]) -> dict[str, int]:
    """Return, on every rank, the bytes by verb that all ranks together send while `train` runs, and
    "messages".

    Scalars are not counted.
    """

    def counts() -> dict[str, int]:
        rows = [row for row in group.ledger.rows() if row["axis"] != "control"]
        found = {
            verb: sum(row["nbytes"] for row in rows if row["verb"] == verb)
            for verb in ("all_reduce", "reduce_scatter", "all_gather")
        }
        return {**found, "messages": sum(row["messages"] for row in rows)}

    before = counts()
    train()
    mine = np.array([after - before[name] for name, after in counts().items()])
    with group.ledger.control():
        total = group.all_reduce(mine)
    return dict(zip(before, map(int, total), strict=True))


def traffic(
    group: Group, stage: int, *, accumulate: int = 1, config: GPTConfig = MEASURED, **options: Any
) -> dict[str, int]:
    """Return what `sent` counts in one step of a stage."""
    strategy = make(stage, lab.new_model(config), group, **options)
    optimizer = new_adam(strategy.parameters)

    def step() -> None:
        strategy.step(global_batch(config, 0), optimizer, accumulate=accumulate)
        if stage in (1, 2):
            strategy.arrivals.wait_for_all()  # the new weights travel on after the step

    return sent(group, step)


def memory(
    group: Group, stage: int, *, config: GPTConfig = MEASURED, **options: Any
) -> dict[str, dict[str, int]]:
    """Return this rank's account after some steps of a stage; of peaks the lowest that a step
    reached.

    The lowest, because another thread may free an array a moment late.
    """
    with account.use(account.MemoryAccount()) as seen:
        strategy = make(stage, lab.new_model(config), group, **options)
        optimizer = new_adam(strategy.parameters)
        snapshots = []
        for step in range(4):
            seen.reset_peak()
            strategy.step(global_batch(config, step), optimizer)
            snapshots.append(seen.snapshot())
        return {
            name: {"now": figures["now"], "peak": min(one[name]["peak"] for one in snapshots[1:])}
            for name, figures in snapshots[-1].items()
        }


def recorded(
    group: Group,
    stage: int,
    *,
    config: GPTConfig = MEASURED,
    sequences: int = 8,
    steps: int = 12,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return on rank 0 each rank's quickest step, which other programs disturbed least; else [].

    Each: {"spans", "samples" of the memory account, "start", "stop"}.
    """
    timeline = Timeline(group.rank)
    timeline.follow(group.ledger)
    memory = SampledAccount()
    with account.use(memory):
        strategy = make(stage, lab.new_model(config), group, recorder=timeline, **options)
        optimizer = new_adam(strategy.parameters)
        for step in range(steps):
            with timeline.span("step", step=step):
                strategy.step(global_batch(config, step, sequences), optimizer)
    taken = sorted(
        (span for span in timeline.spans if span.name == "step"), key=lambda span: span.start
    )
    with group.ledger.control():
        seconds = group.all_reduce(np.array([span.stop - span.start for span in taken]), op="max")
    chosen = taken[int(np.argmin(seconds[1:])) + 1]
    spans = [
        asdict(span)
        for span in timeline.spans
        if span.row != "messages" and span.stop > chosen.start and span.start < chosen.stop
    ]
    samples = memory.samples()
    before = [sample for sample in samples if sample[0] <= chosen.start][-1:]
    kept = [list(sample) for sample in samples if chosen.start < sample[0] <= chosen.stop]
    return (
        gather_records(
            group,
            {
                "spans": spans,
                "samples": [*map(list, before), *kept],
                "start": chosen.start,
                "stop": chosen.stop,
            },
        )
        or []
    )


def parameter_bytes(config: GPTConfig) -> tuple[int, int]:
    """Return how many parameters the model has, and their bytes."""
    parameters = list(lab.new_model(config).parameters())
    return sum(p.size for p in parameters), sum(p.data.nbytes for p in parameters)
