"""Chapter 11 · Pipeline schedules: what each rank does, in which order, as data.

A model's layers are cut into stages and a batch into microbatches. A schedule is one list of instructions for each rank
(instructions.py). The checker (schedule_checker.py) proves it without running it, the executor (executor.py) runs it,
and the same list is drawn. Three stages, four microbatches, time to the right, `F2` a forward, `B2` a backward:

    GPipe     F0 F1 F2 F3 .. .. .. .. .. .. B3 B3 B2 B2 B1 B1 B0 B0          first all forwards, then all backwards
              .. F0 F1 F2 F3 .. .. .. B3 B3 B2 B2 B1 B1 B0 B0 .. ..
              .. .. F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0 .. .. .. ..

    1F1B      F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3          each backward as early as possible
              .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..
              .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..

Both take the same time. But what a forward keeps for its backward is held for all microbatches at once in GPipe, and in
1F1B for as many as there are stages from here to the last. The bubble is the share of idle time. For p ranks, m
microbatches, equal stages, backward twice as long as forward:

    schedule       bubble              microbatches held     a rank's list
    naive          (p-1)/p             1                     F0 B0 F1 B1 …: one rank works at a time (chapter 10)
    GPipe          (p-1)/(m+p-1)       m                     all F, then all B, the last first
    1F1B           (p-1)/(m+p-1)       min(m, p-stage)       p-1-stage F ahead, then F B F B …, then the remaining B
    interleaved    (p-1)/(v·m+p-1)     more than 1F1B        v stages a rank, stage s on rank s mod p; if p divides m.
                                                             Of its stages together min(2(p-1-r)+(v-1)p+1, v·m), each of
                                                             1/v of the rank's layers
    ZB-H1          (p-1)/(3m+p-1)      at most min(m, p)     B is two: for the input, at once; for the weights, deferred
                                                             to what would be idle time. If all three take equal time
                                                             and m is at least p

Messages are instructions too. A send only starts: it never waits. A receive waits until its message has arrived.
Messages from one rank to another arrive in the order in which they were sent, so they are received in that order.

notes:   N0 Pipeline Parallelism; N1 §2.3; N2 流水线并行, 调度策略
Source:  Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (zero bubble).
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from minidist.errors import ScheduleError
from minidist.parallel.pipeline.instructions import (
    RECEIVES,
    Backward,
    BackwardInput,
    BackwardWeights,
    Forward,
    Instruction,
    Schedule,
    SendActivation,
    SendGradient,
    received_as,
    sent_as,
)
from minidist.parallel.pipeline.schedule_checker import check, needs

# ------------------------------------------------------------------------------------- orders: what a rank computes
# Each is (rank, number of ranks, number of microbatches) -> the rank's computes in order; of_orders adds the messages.

def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Each microbatch through all stages and back before the next: chapter 10."""
    for microbatch in range(microbatches):
        yield Forward(rank, microbatch)
        yield Backward(rank, microbatch)


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """All forwards, then all backwards, the last microbatch first."""
    yield from (Forward(rank, microbatch) for microbatch in range(microbatches))
    yield from (Backward(rank, microbatch) for microbatch in reversed(range(microbatches)))


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """One forward ahead for each stage after this one, then a forward and a backward in turn."""
    ahead = min(ranks - 1 - rank, microbatches)
    yield from (Forward(rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Forward(rank, microbatch + ahead)
        yield Backward(rank, microbatch)


def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """1F1B whose backward for the weights comes `rank` microbatches later and fills the gaps at the end."""
    for instruction in one_f_one_b(rank, ranks, microbatches):
        whole = isinstance(instruction, Backward)
        yield BackwardInput(rank, instruction.microbatch) if whole else instruction
        if whole and instruction.microbatch >= rank:
            yield BackwardWeights(rank, instruction.microbatch - rank)
    yield from (BackwardWeights(rank, late) for late in range(max(0, microbatches - rank), microbatches))


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Instruction]:
    """1F1B over `chunks` stages a rank: microbatches go in groups of `ranks`, each group through all stages in turn.

    If `ranks` does not divide `microbatches`, this is the schedule of the next multiple without the extra microbatches.
    It still runs, because no microbatch needs one that was left out.
    """
    full = -(-microbatches // ranks) * ranks
    order = [(chunk, group + number) for group in range(0, full, ranks) for chunk in range(chunks)
             for number in range(ranks)]
    forwards = [Forward(chunk * ranks + rank, microbatch) for chunk, microbatch in order]
    backwards = [Backward((chunks - 1 - chunk) * ranks + rank, microbatch) for chunk, microbatch in order]
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(order)) if chunks > 1 else ranks - 1 - rank
    whole: list[Instruction] = [*forwards[:ahead]]
    for number, backward in enumerate(backwards):
        whole += [*forwards[number + ahead:number + ahead + 1], backward]
    return (instruction for instruction in whole if instruction.microbatch < microbatches)


ORDERS: dict[str, Callable[..., Iterable[Instruction]]] = {
    "naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1}


# ----------------------------------------------------------------------------------------------- orders to schedules

def make_schedule(name: str, ranks: int, microbatches: int, *, chunks: int | None = None) -> Schedule:
    """The schedule called `name`, one of ORDERS, checked.

    Args:    microbatches: from 1, also fewer than ranks; chunks: stages a rank (default: 2 for interleaved, else 1).
    Raises:  ScheduleError if there is no such schedule or a number does not fit it.
    """
    if name not in ORDERS:
        raise ScheduleError(f"no pipeline schedule {name!r}; choose one of {', '.join(ORDERS)}")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"schedule {name} with {ranks} ranks and {microbatches} microbatches: both are at least 1")
    if name != "interleaved" and chunks not in (None, 1):
        raise ScheduleError(f"schedule {name} has one stage a rank, not {chunks}; take interleaved for several")
    if chunks is not None and chunks < 1:
        raise ScheduleError(f"schedule interleaved with {chunks} stages a rank: it is at least 1")
    options = {"chunks": chunks or 2} if name == "interleaved" else {}
    return check(of_orders(name, [ORDERS[name](rank, ranks, microbatches, **options) for rank in range(ranks)]))


def of_orders(name: str, orders: Sequence[Iterable[Instruction]]) -> Schedule:
    """A schedule, not yet checked, in which each rank computes in the given order; the messages it needs are added.

    A result is sent as soon as it is computed. A message is received just before it is needed, after all messages that
    the same rank sent earlier.
    """
    computes = [list(order) for order in orders]
    everything = [instruction for order in computes for instruction in order]
    stages = max((instruction.stage for instruction in everything), default=-1) + 1
    microbatches = max((instruction.microbatch for instruction in everything), default=-1) + 1
    empty = Schedule(name, len(computes), microbatches, max(1, -(-stages // len(computes))), ())
    links: dict[tuple[int, int], list[Instruction]] = defaultdict(list)     # (from, to) -> receives in order of sends
    for rank, order in enumerate(computes):
        for send in (send for compute in order for send in _sends(compute, empty)):
            receive = received_as(send)
            links[rank, empty.rank_of(receive.stage)].append(receive)
    lists = []
    for rank, order in enumerate(computes):
        instructions: list[Instruction] = []
        for compute in order:
            for receive in (needed for needed in needs(compute, empty) if isinstance(needed, RECEIVES)):
                coming = links[empty.rank_of(sent_as(receive).stage), rank]
                count = coming.index(receive) + 1 if receive in coming else 0
                instructions += coming[:count]
                del coming[:count]
            instructions += [compute, *_sends(compute, empty)]
        lists.append(tuple(instructions))
    return replace(empty, lists=tuple(lists))


def _sends(compute: Instruction, schedule: Schedule) -> Iterator[Instruction]:
    """The messages that leave the rank after this compute."""
    if schedule.ranks > 1 and isinstance(compute, Forward) and compute.stage < schedule.stages - 1:
        yield SendActivation(compute.stage, compute.microbatch)
    if schedule.ranks > 1 and isinstance(compute, (Backward, BackwardInput)) and compute.stage > 0:
        yield SendGradient(compute.stage, compute.microbatch)
