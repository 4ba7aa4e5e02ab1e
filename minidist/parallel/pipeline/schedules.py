"""Chapter 11 · Pipeline schedules: the work of each rank, in order, as data.

A model's layers are cut into stages and a batch into microbatches. A schedule is one list of
instructions for each rank (instructions.py). The checker (schedule_checker.py) proves it without
running it, the executor (executor.py) runs it, and the same list is drawn. Three stages, four
microbatches, time to the right, `F2` a forward, `B2` a backward:

    GPipe     F0 F1 F2 F3 .. .. .. .. .. .. B3 B3 B2 B2 B1 B1 B0 B0          first all forwards,
              .. F0 F1 F2 F3 .. .. .. B3 B3 B2 B2 B1 B1 B0 B0 .. ..          then all backwards
              .. .. F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0 .. .. .. ..

    1F1B      F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3          each backward
              .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..          as early as possible
              .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..

Both take the same time. But GPipe holds the activations of all microbatches at once, and 1F1B only
those of as many microbatches as there are stages from this stage to the last. The bubble is the
share of idle time. For p ranks, m microbatches, equal stages, backward twice as long as forward:

    schedule       bubble              microbatches held     a rank's list
    naive          (p-1)/p             1                     F0 B0 F1 B1 …: one rank works at a time
                                                             (chapter 10)
    GPipe          (p-1)/(m+p-1)       m                     all F, then all B, the last first
    1F1B           (p-1)/(m+p-1)       min(m, p-stage)       p-1-stage F ahead, then F B F B …, then
                                                             the remaining B
    interleaved    (p-1)/(v·m+p-1)     more than 1F1B        v stages a rank, stage s on rank s mod
                                                             p; if p divides m. Held by its stages
                                                             together: min(2(p-1-r)+(v-1)p+1, v·m),
                                                             each of 1/v of the rank's layers
    ZB-H1          (p-1)/(3m+p-1)      at most min(m, p)     B is two: for the input, at once; for
                                                             the weights, deferred to what would be
                                                             idle time. If all three take equal time
                                                             and m is at least p
    ZB-V           (p-1)/(6m+p-1)      p, on every rank      two stages a rank, there and back. If
                                                             all three take equal time and m is at
                                                             least 2p-1
    DualPipe-V     (p-1)/(6m+p-1)      p + 1/2               the same, if m is at least 2p
    PipeDream      (p-1)/(m+p-1)       min(m, p-stage)       1F1B, and after each B an update
                                                             (pipedream.py)

V schedules give each rank two stages, there and back, so that the first stage and the last are on
one rank:

    stages of   rank 0   rank 1   rank 2   rank 3
    there            0        1        2        3        rank r has stages r and 2p-1-r
    back             7        6        5        4

Embedding and loss are both on rank 0, so a tied table needs no message. A backward begins on rank
0, where the forward ends. So every rank holds the same number of activations: 2p of stages with
half of its layers, as much memory as rank 0 under 1F1B. ZB-V cuts every backward in two, and the
weights' half fills the gaps. DualPipe-V cuts only the backwards that fill a gap. In its middle a
forward and a backward of different microbatches stand in pairs, for devices that can run the two at
once. Fewer microbatches are possible, too.

Messages are instructions too. A send only starts: it never waits. A receive waits until its message
has arrived. Messages from one rank to another arrive in the order in which they were sent, so they
are received in that order.

notes:   N0 Pipeline Parallelism; N1 §2.3; N2 流水线并行, 调度策略
Source:  Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (zero
         bubble); Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (ZB-V);
         DeepSeek-AI 2024 (DualPipe; DualPipe-V is one half of it); Narayanan et al. 2019
         (PipeDream).
"""

from collections import defaultdict, deque
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

# --------------------------------------------------------------------- orders: what a rank computes
# Each is (rank, number of ranks, number of microbatches) -> the rank's computes in order; of_orders
# adds the messages.


def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield each microbatch through all stages and back before the next: chapter 10."""
    for microbatch in range(microbatches):
        yield Forward(rank, microbatch)
        yield Backward(rank, microbatch)


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield all forwards, then all backwards, the last microbatch first."""
    yield from (Forward(rank, microbatch) for microbatch in range(microbatches))
    yield from (Backward(rank, microbatch) for microbatch in reversed(range(microbatches)))


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield one forward ahead for each stage after this one, then a forward and a backward in
    turn."""
    ahead = min(ranks - 1 - rank, microbatches)
    yield from (Forward(rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Forward(rank, microbatch + ahead)
        yield Backward(rank, microbatch)


def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield 1F1B with each backward for the weights `rank` microbatches later, so that it fills the
    gaps at the end."""
    for instruction in one_f_one_b(rank, ranks, microbatches):
        whole = isinstance(instruction, Backward)
        yield BackwardInput(rank, instruction.microbatch) if whole else instruction
        if whole and instruction.microbatch >= rank:
            yield BackwardWeights(rank, instruction.microbatch - rank)
    yield from (
        BackwardWeights(rank, late) for late in range(max(0, microbatches - rank), microbatches)
    )


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Instruction]:
    """Yield 1F1B over `chunks` stages per rank: microbatches go in groups of `ranks`, each group
    through all stages in turn.

    If `ranks` does not divide `microbatches`, this is the schedule of the next multiple without the
    extra microbatches. It still runs, because no microbatch needs one that was left out.
    """
    full = -(-microbatches // ranks) * ranks
    order = [
        (chunk, group + number)
        for group in range(0, full, ranks)
        for chunk in range(chunks)
        for number in range(ranks)
    ]
    forwards = [Forward(chunk * ranks + rank, microbatch) for chunk, microbatch in order]
    backwards = [
        Backward((chunks - 1 - chunk) * ranks + rank, microbatch) for chunk, microbatch in order
    ]
    ahead = (
        min(2 * (ranks - 1 - rank) + (chunks - 1) * ranks, len(order))
        if chunks > 1
        else ranks - 1 - rank
    )
    whole: list[Instruction] = [*forwards[:ahead]]
    for number, backward in enumerate(backwards):
        whole += [*forwards[number + ahead : number + ahead + 1], backward]
    return (instruction for instruction in whole if instruction.microbatch < microbatches)


# V schedules are phases: (number of times, word). `F0` is a forward on the stage there, `B1` a
# backward on the stage back, `I1` and `W1` its two halves, each of the next microbatch. `W` without
# a number is the oldest deferred half.
KINDS = {"F": Forward, "B": Backward, "I": BackwardInput, "W": BackwardWeights}


def zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield forwards until the first is back, then each backward as early as possible; the last
    weights' halves wait."""
    full = max(microbatches, 2 * ranks - 1)
    after = ranks - rank
    phases = [
        (2 * after - 1, "F0"),
        (rank, "F1 F0"),
        (after, "F1 I1 W1"),
        (full - 2 * ranks + rank + 1, "F0 I0 W0 F1 I1 W1"),
        (after - 1, "I0 W0 F1 I1 W1"),
        (rank, "I0 I1"),
        (after, "I0 W0"),
        (rank, "W1"),
        (rank, "W0"),
    ]
    return _played(phases, rank, ranks, microbatches)


def dualpipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Yield, in the middle, a forward there, a backward from back, a forward back, a backward from
    there, in turn."""
    full = max(microbatches, 2 * ranks)
    after = ranks - rank - 1
    half = (rank + 1) // 2
    phases = [
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 W F1"),
        (full - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        (half, "B1 B0"),
        ((rank + 1) % 2, "B1 I0"),
        (half, "I1 I0"),
        (after, "W I0"),
        (rank + 1, "W"),
    ]
    return _played(phases, rank, ranks, microbatches)


def _played(
    phases: list[tuple[int, str]], rank: int, ranks: int, microbatches: int
) -> Iterator[Instruction]:
    """Yield the computes that phases stand for, without those of microbatches that do not exist."""
    stages = (rank, 2 * ranks - 1 - rank)
    done = defaultdict[str, int](int)
    deferred: deque[Instruction] = deque()
    for times, words in phases:
        for word in words.split() * times:
            if word == "W":
                instruction: Instruction = deferred.popleft()
            else:
                same = word.replace("I", "B")  # the first half counts as the backward
                instruction = KINDS[word[0]](stages[int(word[1])], done[same])
                done[same] += 1
            if word[0] == "I":
                deferred.append(BackwardWeights(instruction.stage, instruction.microbatch))
            if instruction.microbatch < microbatches:
                yield instruction


ORDERS: dict[str, Callable[..., Iterable[Instruction]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "dualpipe-v": dualpipe_v,
    "pipedream": one_f_one_b,
}

V_SHAPED = ("zb-v", "dualpipe-v")  # schedules whose stages go there and back
UPDATING = ("pipedream",)  # schedules with an update after each backward


# ------------------------------------------------------------------------------ orders to schedules


def stages_a_rank(name: str, chunks: int | None = None) -> int:
    """Return the number of stages per rank under a schedule; `chunks`: as make_schedule's. Raises:
    as make_schedule."""
    if name not in ORDERS:
        raise ScheduleError(f"no pipeline schedule {name!r}; choose one of {', '.join(ORDERS)}")
    if name == "interleaved":
        if chunks is not None and chunks < 1:
            raise ScheduleError(
                f"schedule interleaved with {chunks} stages per rank: choose at least 1"
            )
        return chunks or 2
    own = 2 if name in V_SHAPED else 1
    if chunks not in (None, own):
        raise ScheduleError(
            f"schedule {name} has {'two stages' if own == 2 else 'one stage'} per rank, not "
            f"{chunks}; use interleaved for any number"
        )
    return own


def make_schedule(
    name: str, ranks: int, microbatches: int, *, chunks: int | None = None
) -> Schedule:
    """Return the schedule called `name`, one of ORDERS, checked.

    Args:    microbatches: from 1, also fewer than ranks; chunks: stages a rank (default: 2 for
             interleaved and the V schedules, else 1; only interleaved takes others).
    Raises:  ScheduleError if there is no such schedule or a number does not fit it.
    """
    own = stages_a_rank(name, chunks)
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(
            f"schedule {name} with {ranks} ranks and {microbatches} microbatches: both are at "
            "least 1"
        )
    options = {"chunks": own} if name == "interleaved" else {}
    orders = [ORDERS[name](rank, ranks, microbatches, **options) for rank in range(ranks)]
    return check(
        replace(of_orders(name, orders, v_shaped=name in V_SHAPED), updates=name in UPDATING)
    )


def of_orders(
    name: str, orders: Sequence[Iterable[Instruction]], *, v_shaped: bool = False
) -> Schedule:
    """Return a schedule, not yet checked, in which each rank computes in the given order; the
    messages it needs are added.

    A result is sent as soon as it is computed. A message is received just before it is needed,
    after all messages that the same rank sent earlier. v_shaped: stages are placed there and back.
    """
    computes = [list(order) for order in orders]
    everything = [instruction for order in computes for instruction in order]
    stages = max((instruction.stage for instruction in everything), default=-1) + 1
    microbatches = max((instruction.microbatch for instruction in everything), default=-1) + 1
    silent = Schedule(
        name,
        len(computes),
        microbatches,
        max(1, -(-stages // len(computes))),
        tuple(map(tuple, computes)),
        v_shaped=v_shaped,
    )
    # (from, to) -> receives in order of sends
    links: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
    for rank, order in enumerate(computes):
        for send in (send for compute in order for send in _sends(compute, silent)):
            receive = received_as(send)
            links[rank, silent.rank_of(receive.stage)].append(receive)
    lists = []
    for rank, order in enumerate(computes):
        instructions: list[Instruction] = []
        for compute in order:
            for receive in (
                needed for needed in needs(compute, silent) if isinstance(needed, RECEIVES)
            ):
                coming = links[silent.rank_of(sent_as(receive).stage), rank]
                count = coming.index(receive) + 1 if receive in coming else 0
                instructions += coming[:count]
                del coming[:count]
            instructions += [compute, *_sends(compute, silent)]
        lists.append(tuple(instructions))
    return replace(silent, lists=tuple(lists))


def _sends(compute: Instruction, schedule: Schedule) -> Iterator[Instruction]:
    """Return the messages that leave the rank after this compute."""
    if isinstance(compute, Forward) and schedule.leaves(compute.stage, compute.stage + 1):
        yield SendActivation(compute.stage, compute.microbatch)
    if isinstance(compute, (Backward, BackwardInput)) and schedule.leaves(
        compute.stage, compute.stage - 1
    ):
        yield SendGradient(compute.stage, compute.microbatch)
