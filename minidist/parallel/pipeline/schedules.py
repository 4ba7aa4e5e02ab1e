"""Chapter 11 · Pipeline schedules: what each rank does, in which order, as data.

A model's layers are cut into stages; a batch is cut into microbatches. A schedule is a list of instructions for each
rank, and nothing else: the checker (schedule_checker.py) proves it without running it, the worker (pipeline.py) runs
it, and the same list is drawn. Three stages, four microbatches, time to the right, `F2` a forward, `B2` a backward:

    GPipe     F0 F1 F2 F3 .. .. .. .. .. .. B3 B3 B2 B2 B1 B1 B0 B0          first all forwards, then all backwards
              .. F0 F1 F2 F3 .. .. .. B3 B3 B2 B2 B1 B1 B0 B0 .. ..
              .. .. F0 F1 F2 F3 B3 B3 B2 B2 B1 B1 B0 B0 .. .. .. ..

    1F1B      F0 F1 F2 .. .. .. .. B0 B0 F3 B1 B1 .. B2 B2 .. B3 B3          a backward as soon as there can be one
              .. F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3 .. ..
              .. .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. .. .. ..

Both take as long; but what a forward keeps for its backward is held for all microbatches at once in GPipe, and for no
more than there are stages ahead in 1F1B. The bubble is the share of time in which a rank is idle. For p ranks, m
microbatches, equal stages, backward twice as long as forward:

    schedule       bubble              microbatches held     a rank's list
    naive          (p-1)/p             1                     F0 B0 F1 B1 …: one rank works at a time (chapter 10)
    GPipe          (p-1)/(m+p-1)       m                     all F, then all B, the last first
    1F1B           (p-1)/(m+p-1)       min(m, p-stage)       p-1-stage F ahead, then F B F B …, then the B that are left
    interleaved    (p-1)/(v·m+p-1)     more than 1F1B        v stages a rank, stage s on rank s mod p; if p divides m.
                                                             Of its stages together min(2(p-1-r)+(v-1)p+1, v·m), each of
                                                             1/v of the rank's layers
    ZB-H1          (p-1)/(3m+p-1)      at most min(m, p)     B is two: for the input, at once; for the weights, put off
                                                             into what would be idle time. With all three as
                                                             long, from m = p on

Messages are instructions too. A send only starts: it never waits. A receive waits until its message is there. Messages
from one rank to another arrive in the order in which they were sent, so they must be received in that order.

notes:   N0 Pipeline Parallelism; N1 §2.3; N2 流水线并行, 调度策略
Source:  Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, interleaved); Qi et al. 2023 (zero bubble).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from minidist.errors import ScheduleError


@dataclass(frozen=True)
class Instruction:
    """One thing that a rank does, for one microbatch on one of its stages."""

    stage: int
    microbatch: int
    word: ClassVar[str] = "instruction"

    def __str__(self) -> str:
        return f"{self.word} of microbatch {self.microbatch} on stage {self.stage}"


class Forward(Instruction):
    """Run the stage's layers."""

    word = "forward"


class Backward(Instruction):
    """Find the gradients of the stage's weights and of its input."""

    word = "backward"


class BackwardInput(Instruction):
    """Find the gradient of the stage's input, and leave those of its weights for BackwardWeights."""

    word = "backward for the input"


class BackwardWeights(Instruction):
    """Find the gradients of the stage's weights."""

    word = "backward for the weights"


class SendActivation(Instruction):
    """Start to send the stage's output to the next stage."""

    word = "send of the activation"


class RecvActivation(Instruction):
    """Wait for the stage's input, from the stage before."""

    word = "receive of the activation"


class SendGradient(Instruction):
    """Start to send the gradient of the stage's input to the stage before."""

    word = "send of the gradient"


class RecvGradient(Instruction):
    """Wait for the gradient of the stage's output, from the next stage."""

    word = "receive of the gradient"


COMPUTES = (Forward, Backward, BackwardInput, BackwardWeights)
SENDS = (SendActivation, SendGradient)
RECEIVES = (RecvActivation, RecvGradient)


def sent_as(receive: Instruction) -> Instruction:
    """The send that a receive waits for."""
    if isinstance(receive, RecvActivation):
        return SendActivation(receive.stage - 1, receive.microbatch)
    return SendGradient(receive.stage + 1, receive.microbatch)


def received_as(send: Instruction) -> Instruction:
    """The receive that a send is for."""
    if isinstance(send, SendActivation):
        return RecvActivation(send.stage + 1, send.microbatch)
    return RecvGradient(send.stage - 1, send.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The instructions of every rank; stage s belongs to rank s mod ranks.

    Attributes: lists     in rank order, each in the order in which the rank does it
                chunks    stages a rank (v)
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    lists: tuple[tuple[Instruction, ...], ...]

    @property
    def stages(self) -> int:
        """Stages of all ranks."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Who has this stage."""
        return stage % self.ranks

    def computes(self, rank: int) -> list[Instruction]:
        """A rank's list without its messages."""
        return [instruction for instruction in self.lists[rank] if isinstance(instruction, COMPUTES)]


# ------------------------------------------------------------------------------------- orders: what a rank computes

def naive(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """Each microbatch through all stages and back before the next: chapter 10."""
    for microbatch in range(microbatches):
        yield Forward(rank, microbatch)
        yield Backward(rank, microbatch)


def gpipe(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """All forwards, then all backwards, the last first: its activations are the freshest."""
    yield from (Forward(rank, microbatch) for microbatch in range(microbatches))
    yield from (Backward(rank, microbatch) for microbatch in reversed(range(microbatches)))


def one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """As many forwards ahead as there are stages after this one, then a forward and a backward in turn."""
    ahead = min(ranks - 1 - rank, microbatches)
    yield from (Forward(rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Forward(rank, microbatch + ahead)
        yield Backward(rank, microbatch)


def zb_h1(rank: int, ranks: int, microbatches: int) -> Iterator[Instruction]:
    """1F1B whose backward for the weights comes `rank` microbatches late, and fills the gaps at the end.

    So every rank holds at most as many microbatches as 1F1B's first.
    """
    ahead = min(ranks - 1 - rank, microbatches)
    yield from (Forward(rank, microbatch) for microbatch in range(ahead))
    for microbatch in range(microbatches):
        if microbatch + ahead < microbatches:
            yield Forward(rank, microbatch + ahead)
        yield BackwardInput(rank, microbatch)
        if microbatch >= rank:
            yield BackwardWeights(rank, microbatch - rank)
    yield from (BackwardWeights(rank, late) for late in range(max(0, microbatches - rank), microbatches))


def interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Instruction]:
    """1F1B over `chunks` stages a rank: microbatches go in groups of `ranks`, each group through all stages in turn.

    Where `ranks` does not divide `microbatches`, it is the schedule of the next multiple without those that are not
    there: what waits for nothing that was left out can still run.
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
    """The schedule called `name`: one of ORDERS.

    Args:    microbatches: from 1, also fewer than ranks. chunks: stages a rank; only interleaved has several (2).
    Raises:  ScheduleError if there is no such schedule or a number does not fit it.
    """
    if name not in ORDERS:
        raise ScheduleError(f"no pipeline schedule {name!r}; choose one of {', '.join(ORDERS)}")
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"schedule {name} with {ranks} ranks and {microbatches} microbatches: both are at least 1")
    if name == "interleaved":
        chunks = 2 if chunks is None else chunks
        if chunks < 1:
            raise ScheduleError(f"schedule interleaved with {chunks} stages a rank: it is at least 1")
        return of_orders(name, [interleaved(rank, ranks, microbatches, chunks) for rank in range(ranks)])
    if chunks not in (None, 1):
        raise ScheduleError(f"schedule {name} has one stage a rank, not {chunks}; take interleaved for several")
    return of_orders(name, [ORDERS[name](rank, ranks, microbatches) for rank in range(ranks)])


def of_orders(name: str, orders: Sequence[Iterable[Instruction]]) -> Schedule:
    """A schedule in which each rank computes in the order given, with the messages that this needs.

    A result is sent as soon as it is there; a message is received just before it is needed, and with it those that the
    same rank sent earlier.
    """
    computes = [list(order) for order in orders]
    ranks, everything = len(computes), [instruction for order in computes for instruction in order]
    stages = max((instruction.stage for instruction in everything), default=-1) + 1
    chunks = max(1, -(-stages // ranks))
    last = ranks * chunks - 1
    links: dict[tuple[int, int], list[Instruction]] = {}        # (from, to) -> sends, in order
    for rank, order in enumerate(computes):
        for send in (send for instruction in order for send in _sends(instruction, ranks, last)):
            links.setdefault((rank, received_as(send).stage % ranks), []).append(send)
    lists = []
    for rank, order in enumerate(computes):
        received: dict[int, int] = {}                           # from whom -> how many
        instructions: list[Instruction] = []
        for instruction in order:
            for receive in _receives(instruction, ranks, last):
                send = sent_as(receive)
                source = send.stage % ranks
                link, done = links.get((source, rank), []), received.get(source, 0)
                until = link.index(send) + 1 if send in link else done
                instructions += [received_as(earlier) for earlier in link[done:until]]
                received[source] = max(done, until)
            instructions += [instruction, *_sends(instruction, ranks, last)]
        lists.append(tuple(instructions))
    microbatches = max((instruction.microbatch for instruction in everything), default=-1) + 1
    return Schedule(name, ranks, microbatches, chunks, tuple(lists))


def _sends(compute: Instruction, ranks: int, last: int) -> Iterator[Instruction]:
    """What leaves the rank after it computed this."""
    if ranks > 1 and isinstance(compute, Forward) and compute.stage < last:
        yield SendActivation(compute.stage, compute.microbatch)
    if ranks > 1 and isinstance(compute, (Backward, BackwardInput)) and compute.stage > 0:
        yield SendGradient(compute.stage, compute.microbatch)


def _receives(compute: Instruction, ranks: int, last: int) -> Iterator[Instruction]:
    """What must have arrived before the rank computes this."""
    if ranks > 1 and isinstance(compute, Forward) and compute.stage > 0:
        yield RecvActivation(compute.stage, compute.microbatch)
    if ranks > 1 and isinstance(compute, (Backward, BackwardInput)) and compute.stage < last:
        yield RecvGradient(compute.stage, compute.microbatch)
