"""Chapter 11 · Instructions: the steps that a rank of a pipeline can run. A schedule is a list of
them for each rank.

    rank 0   Forward(0, 0)  SendActivation(0, 0)  …  RecvGradient(0, 0)  Backward(0, 0)
    rank 1   RecvActivation(1, 0)  Forward(1, 0)  Backward(1, 0)  SendGradient(1, 0)  …

The two numbers are (stage, microbatch).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar


@dataclass(frozen=True)
class Instruction:
    """One instruction of a rank for one microbatch on one of its stages."""

    stage: int
    microbatch: int
    word: ClassVar[str] = "instruction"

    def __str__(self) -> str:
        return f"{self.word} of microbatch {self.microbatch} on stage {self.stage}"


class Forward(Instruction):
    """Run the stage's layers."""

    word = "forward"


class Backward(Instruction):
    """Compute the gradients of the stage's weights and of its input."""

    word = "backward"


class BackwardInput(Instruction):
    """Compute the gradient of the stage's input; BackwardWeights computes those of its weights
    later."""

    word = "backward for the input"


class BackwardWeights(Instruction):
    """Compute the gradients of the stage's weights."""

    word = "backward for the weights"


class SendActivation(Instruction):
    """Start to send the stage's output to the next stage."""

    word = "send of the activation"


class RecvActivation(Instruction):
    """Wait for the stage's input, from the previous stage."""

    word = "receive of the activation"


class SendGradient(Instruction):
    """Start to send the gradient of the stage's input to the previous stage."""

    word = "send of the gradient"


class RecvGradient(Instruction):
    """Wait for the gradient of the stage's output, from the next stage."""

    word = "receive of the gradient"


COMPUTES = (Forward, Backward, BackwardInput, BackwardWeights)
SENDS = (SendActivation, SendGradient)
RECEIVES = (RecvActivation, RecvGradient)


def sent_as(receive: Instruction) -> Instruction:
    """Return the send that belongs to a receive."""
    if isinstance(receive, RecvActivation):
        return SendActivation(receive.stage - 1, receive.microbatch)
    return SendGradient(receive.stage + 1, receive.microbatch)


def received_as(send: Instruction) -> Instruction:
    """Return the receive that belongs to a send."""
    if isinstance(send, SendActivation):
        return RecvActivation(send.stage + 1, send.microbatch)
    return RecvGradient(send.stage - 1, send.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The instructions of every rank; stage s is on rank s mod ranks, or goes there and back
    (v_shaped).

    Attributes: lists: in rank order, each in the order in which the rank runs it.
                chunks: stages per rank (v).
                checked: whether schedule_checker.check has proved it; make_schedule returns checked
                schedules.
                v_shaped: rank r has the stages r and 2p-1-r of 2p: the first and the last stage are
                on one rank.
                updates: each backward ends in an update of its stage (PipeDream); else one update
                ends the step.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    lists: tuple[tuple[Instruction, ...], ...]
    checked: bool = field(default=False, compare=False)
    v_shaped: bool = False
    updates: bool = False

    @cached_property
    def instructions(self) -> frozenset[Instruction]:
        """The instructions of all ranks."""
        return frozenset(instruction for mine in self.lists for instruction in mine)

    @property
    def stages(self) -> int:
        """The number of stages of all ranks together."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank that has this stage."""
        chunk, place = divmod(stage, self.ranks)
        return self.ranks - 1 - place if self.v_shaped and chunk % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank has, in order: its chunks 0, 1, …"""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def leaves(self, stage: int, other: int) -> bool:
        """Return whether the result of a stage for another stage is a message: the other stage
        exists, and is on another rank."""
        return 0 <= other < self.stages and self.rank_of(stage) != self.rank_of(other)

    def computes(self, rank: int) -> list[Instruction]:
        """Return a rank's list without its messages."""
        return [
            instruction for instruction in self.lists[rank] if isinstance(instruction, COMPUTES)
        ]

    def held(self, rank: int) -> int:
        """Return the most microbatches that are on a rank's stages at once: forward done, and not
        the whole backward."""
        now = most = 0
        for instruction in self.computes(rank):
            now += isinstance(instruction, Forward) - isinstance(
                instruction, (Backward, BackwardWeights)
            )
            most = max(most, now)
        return most
