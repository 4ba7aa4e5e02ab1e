"""Chapter 11 · The executor: runs one rank's list of instructions on any kind of work.

It moves arrays between ranks in the order of the list, and asks the work to compute. The message
that the next compute needs arrives during the present compute, and results leave during the next
one:

    compute      forward 2           | forward 3           | backward 0 …
    leaves       activation 1 ------>  activation 2 ------>
    arrives      activation 3 ------>  gradient 0 -------->
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Protocol

from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import ScheduleError
from minidist.parallel.pipeline.instructions import (
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


class StageWork(Protocol):
    """The computations of the stages of one rank."""

    def skips(self, microbatch: int) -> bool:
        """Return whether a microbatch has nothing to compute on any rank; then its instructions are
        left out."""

    def room(self, receive: Instruction) -> Array | None:
        """Return the array that takes the message of a receive; None: a new one."""

    def forward(self, stage: int, microbatch: int, x: Array | None) -> Array | None:
        """Return the activation of this stage (None on the last), from that of the previous stage
        (None on the first)."""

    def backward(
        self, stage: int, microbatch: int, dy: Array | None, *, whole: bool
    ) -> Array | None:
        """Return the gradient of the stage's input, from that of its output; if `whole`, compute
        the weights' gradients too."""

    def backward_weights(self, stage: int, microbatch: int) -> None:
        """Compute the gradients of weights that an earlier backward deferred."""


class Executor:
    """The machine that runs a rank's list of instructions.

    Raises:  ScheduleError if the schedule is for another number of ranks than `group` has, or not
             checked.
    """

    def __init__(
        self, schedule: Schedule, group: Group, *, recorder: Recorder | None = None
    ) -> None:
        if schedule.ranks != group.size:
            raise ScheduleError(
                f"schedule {schedule.name} is for {schedule.ranks} ranks, and the group has "
                f"{group.size}; make it for {group.size}"
            )
        if not schedule.checked:
            raise ScheduleError(
                f"schedule {schedule.name} was not checked, and might never end; pass what "
                f"schedule_checker.check(schedule) returns"
            )
        self.schedule = schedule
        self.group = group
        self.recorder = recorder or Silent()
        # receive -> its array: arrived, or about to be sent
        self._values: dict[Instruction, Array] = {}
        self._arriving: dict[Instruction, Pending] = {}
        self._leaving: list[Pending] = []

    def run(self, work: StageWork, *, backwards: bool = True) -> None:
        """Run the list once, until all is computed and sent; backwards=False (to evaluate): without
        backwards and their messages."""
        instructions = [
            instruction
            for instruction in self.schedule.lists[self.group.rank]
            if (backwards or isinstance(instruction, (Forward, SendActivation, RecvActivation)))
            and not work.skips(instruction.microbatch)
        ]
        self._start_receives(work, instructions)
        for number, instruction in enumerate(instructions, start=1):
            details: dict[str, Any] = {
                "stage": instruction.stage,
                "microbatch": instruction.microbatch,
            }
            if isinstance(instruction, COMPUTES):
                self._start_receives(work, instructions[number:])
                with self.recorder.span(instruction.word, **details):
                    self._compute(work, instruction)
            elif isinstance(instruction, SENDS):
                self._start_send(instruction)
            else:
                with self.recorder.span(f"wait: {instruction.word}", **details):
                    self._values[instruction] = self._arriving.pop(instruction).wait()
        self._end_sends(wait=True)

    def _compute(self, work: StageWork, instruction: Instruction) -> None:
        stage = instruction.stage
        microbatch = instruction.microbatch
        if isinstance(instruction, Forward):
            y = work.forward(
                stage, microbatch, self._values.pop(RecvActivation(stage, microbatch), None)
            )
            if y is not None:
                self._values[RecvActivation(stage + 1, microbatch)] = y
        elif isinstance(instruction, (Backward, BackwardInput)):
            dx = work.backward(
                stage,
                microbatch,
                self._values.pop(RecvGradient(stage, microbatch), None),
                whole=isinstance(instruction, Backward),
            )
            if dx is not None:
                self._values[RecvGradient(stage - 1, microbatch)] = dx
        else:
            work.backward_weights(stage, microbatch)

    def _start_send(self, send: Instruction) -> None:
        self._end_sends()
        receive = received_as(send)
        self._leaving.append(
            self.group.start_send(
                self._values.pop(receive), dst=self.schedule.rank_of(receive.stage)
            )
        )

    def _end_sends(self, *, wait: bool = False) -> None:
        """Drop the sends that are complete; `wait`: wait for all of them."""
        for pending in [pending for pending in self._leaving if wait or pending.done()]:
            pending.wait()
            self._leaving.remove(pending)

    def _start_receives(self, work: StageWork, following: Sequence[Instruction]) -> None:
        """Start the receives that stand before the next compute."""
        for instruction in takewhile(lambda other: not isinstance(other, COMPUTES), following):
            if isinstance(instruction, RECEIVES):
                source = self.schedule.rank_of(sent_as(instruction).stage)
                self._arriving[instruction] = self.group.start_recv(
                    source, out=work.room(instruction)
                )
