"""The steps of `minidist train`: their losses, their times, and the saves after them."""

import itertools
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minidist.cli.train.adapting import Adapting
from minidist.cli.train.fitting import MEASURED, choose_steps, chooses_steps
from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.saving import Saver
from minidist.cli.train.settings import Settings
from minidist.cli.train.telemetry import sent_in_steps
from minidist.cli.train.verify import STEPS, Weights
from minidist.parallel.hybrid.cuda_graph import CapturedStep
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.late_loss import LateLoss


@dataclass
class Course:
    """The results of the steps.

    Attributes: losses: global, of all steps, including those before a resumed job; seconds: of each
                step of this job, on this rank; seconds_before: seconds per step of an earlier job;
                early: with --verify, the early weights; steps_before: steps before this job;
                adapt: with --adapt, the questions and the changes of plan.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seconds_before: float = 0.0
    early: Weights | None = None
    steps_before: int = 0
    adapt: dict[str, Any] | None = None

    @property
    def step_seconds(self) -> float:
        """Return the median; if this job has made no step, an earlier job's."""
        return statistics.median(self.seconds) if self.seconds else self.seconds_before


def begun(settings: Settings) -> Course:
    """Return the results of the steps before this job."""
    if settings.resume is None:
        return Course()
    return Course(settings.resume.losses, [], settings.resume.step_seconds)


class StartedStep(NamedTuple):
    """A step whose loss may not have arrived yet.

    Attributes: start: when it began. sent_bytes: of this rank when it returned, since the run began.
    """

    loss: LateLoss
    start: float
    sent_bytes: int


def _arrived(on_their_way: deque[StartedStep], leave: int) -> list[tuple[float, StartedStep]]:
    """Remove and return the steps whose losses have arrived, each as (loss, step); wait for all
    but `leave` of the others."""
    there = []
    while on_their_way and (len(on_their_way) > leave or on_their_way[0].loss.done()):
        step = on_their_way.popleft()
        there.append((step.loss.wait(), step))
    return there


def train_steps(
    trainer: Trainer,
    settings: Settings,
    report: ProgressReport,
    saver: Saver | None = None,
    adapting: Adapting | None = None,
) -> Course:
    """Make every step. A loss that is not known when its step returns is read after the next step
    was started.

    Raises:  Stopped, once the state is saved, if the saver says that the job is to stop.
    """
    course = begun(settings)
    course.steps_before = trainer.steps_done
    args = settings.args
    ledger = trainer.world.ledger
    choosing = chooses_steps(args)
    start_step = CapturedStep(trainer).start_step if args.graph else trainer.start_step
    tokens = args.batch * args.context
    last = 0.0
    on_their_way = deque[StartedStep]()

    def sent_bytes() -> int:
        """Return the bytes that this rank has sent in all steps so far."""
        return sum(
            sum(verbs.values())
            for axis, verbs in sent_in_steps(ledger).items()
            if axis != "control"
        )

    def read(leave: int = 0) -> None:
        """Record the losses that have arrived, and wait for all but `leave` of the others."""
        nonlocal last
        if there := _arrived(on_their_way, leave):
            since = max(there[0][1].start, last)
            last = time.perf_counter()
        for loss, made in there:  # the time is divided equally over losses that arrive together
            course.losses.append(loss)
            course.seconds.append((last - since) / len(there))
            report.step(len(course.losses), loss, tokens / course.seconds[-1], made.sent_bytes)
            if adapting is not None:
                adapting.step_done(len(course.losses), course.seconds[-1])

    def seconds_so_far() -> float:
        """Return the seconds per step, after waiting for all losses so far."""
        read()
        return course.step_seconds

    try:
        for step in itertools.count(len(course.losses)):
            if step == args.steps:
                break
            with report.input():
                batch = settings.training_batch(step)
            start = time.perf_counter()
            late = start_step(batch)
            # now: when the loss arrives, the next step may have sent too
            on_their_way.append(StartedStep(late, start, sent_bytes()))
            read(leave=1)
            if choosing and step + 1 == MEASURED:
                read()
                choose_steps(trainer, args, course.seconds, report)
            if step + 1 == args.steps:
                read()
            if args.verify and step + 1 == min(STEPS, args.steps):
                course.early = trainer.state_dict()
            if saver is not None:
                saver.after_step(course.losses, seconds_so_far)
            if adapting is not None and adapting.due(step + 1):
                read()
                adapting.look()
        if saver is not None:
            saver.settle()
    finally:
        report.close()
    if adapting is not None:
        course.adapt = adapting.record()
    return course
