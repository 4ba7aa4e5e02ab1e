"""The worker: runs one rank's list of instructions, whatever the work is.

It moves arrays between ranks, in the order of the list, and asks the work to compute. What the next instruction needs
begins to arrive while the present one computes; what was computed leaves while the next one computes:

    compute      forward 2           | forward 3           | backward 0 …
    leaves       activation 1 ------>  activation 2 ------>
    arrives      activation 3 ------>  gradient 0 -------->
"""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ScheduleError
from minidist.parallel.pipeline.schedule_checker import Span, check
from minidist.parallel.pipeline.schedules import (
    COMPUTES,
    RECEIVES,
    SENDS,
    Backward,
    BackwardInput,
    Forward,
    Instruction,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    received_as,
    sent_as,
)
from minidist.parallel.step.recorder import Recorder, Silent


class Work(Protocol):
    """What the stages of one rank compute."""

    def skips(self, microbatch: int) -> bool:
        """Whether a microbatch has nothing to compute, on any rank: then its instructions are left out."""
        ...

    def room(self, receive: Instruction) -> Array | None:
        """Where the message of a receive goes; None: a new array."""
        ...

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """From the activation of the stage before (None: there is none) to that of this one (None: it is the last)."""
        ...

    def backward(self, stage: int, microbatch: int, dy: Array | None, *, whole: bool) -> Array | None:
        """From the gradient of the stage's output to that of its input; the weights' too, if `whole`."""
        ...

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """The gradients of weights that a backward put off."""
        ...


class Worker:
    """Runs a rank's list.

    Args:    schedule: of as many ranks as the group has; it is checked here, before anything runs.
    Raises:  ScheduleError if it cannot run.
    """

    def __init__(self, schedule: Schedule, group: Group, *, recorder: Recorder | None = None) -> None:
        if schedule.ranks != group.size:
            raise ScheduleError(f"schedule {schedule.name} is for {schedule.ranks} ranks, and the group has "
                                f"{group.size}; make it for {group.size}")
        check(schedule)
        self.schedule, self.group, self.recorder = schedule, group, recorder or Silent()
        self._values: dict[Instruction, Array] = {}     # receive -> what it brings: arrived, or about to be sent
        self._arriving: dict[Instruction, Pending] = {}
        self._leaving: list[Pending] = []

    def run(self, work: Work) -> None:
        """Once through the list. Returns when all has been computed and has left."""
        self._carry_out(work, self.schedule.lists[self.group.rank])

    def run_forwards(self, work: Work) -> None:
        """The list's forwards and their messages alone: to evaluate. What is left of a right list is right."""
        self._carry_out(work, [instruction for instruction in self.schedule.lists[self.group.rank]
                               if isinstance(instruction, (Forward, SendActivation, RecvActivation))])

    def _carry_out(self, work: Work, whole: Sequence[Instruction]) -> None:
        instructions = [instruction for instruction in whole if not work.skips(instruction.microbatch)]
        for place, instruction in enumerate(instructions):
            if isinstance(instruction, COMPUTES):
                self._start_receives(work, instructions[place + 1:])
                with self.recorder.span(instruction.word, stage=instruction.stage, microbatch=instruction.microbatch):
                    self._compute(work, instruction)
            elif isinstance(instruction, SENDS):
                self._start_send(instruction)
            else:
                self._receive(work, instruction)
        self._let_go(wait=True)

    def _compute(self, work: Work, instruction: Instruction) -> None:
        stage, microbatch = instruction.stage, instruction.microbatch
        if isinstance(instruction, Forward):
            y = work.forward(stage, microbatch, self._values.pop(RecvActivation(stage, microbatch), None))
            if y is not None:
                self._values[RecvActivation(stage + 1, microbatch)] = y
        elif isinstance(instruction, (Backward, BackwardInput)):
            dx = work.backward(stage, microbatch, self._values.pop(RecvGradient(stage, microbatch), None),
                               whole=isinstance(instruction, Backward))
            if dx is not None:
                self._values[RecvGradient(stage - 1, microbatch)] = dx
        else:
            work.backward_weights(stage, microbatch)

    def _start_send(self, send: Instruction) -> None:
        receive = received_as(send)
        self._let_go()
        self._leaving.append(self.group.start_send(self._values.pop(receive), dst=self.schedule.rank_of(receive.stage)))

    def _let_go(self, *, wait: bool = False) -> None:
        """Forget the messages that have left; `wait`: until all have."""
        gone = [pending for pending in self._leaving if wait or pending.done()]
        self._leaving = [pending for pending in self._leaving if pending not in gone]
        for pending in gone:
            pending.wait()

    def _start_receives(self, work: Work, following: list[Instruction]) -> None:
        """Begin to receive what the next compute needs."""
        for instruction in following:
            if isinstance(instruction, COMPUTES):
                return
            if isinstance(instruction, RECEIVES):
                self._start_receive(work, instruction)

    def _start_receive(self, work: Work, receive: Instruction) -> None:
        self._arriving[receive] = self.group.start_recv(self.schedule.rank_of(sent_as(receive).stage),
                                                        out=work.room(receive))

    def _receive(self, work: Work, receive: Instruction) -> None:
        if receive not in self._arriving:
            self._start_receive(work, receive)
        with self.recorder.span(f"wait: {receive.word}", stage=receive.stage, microbatch=receive.microbatch):
            self._values[receive] = self._arriving.pop(receive).wait()


def computes_of(timelines: Iterable[Any]) -> list[Span]:
    """The computes that ranks recorded (`observe.Timeline`s), as the checker's spans: to check and draw like a clock's.
    """
    kinds = {kind.word: kind for kind in COMPUTES}
    return [Span(timeline.rank, kinds[span.name](span.details["stage"], span.details["microbatch"]), span.start,
                 span.stop) for timeline in timelines for span in timeline.spans
            if span.name in kinds and "microbatch" in span.details]
