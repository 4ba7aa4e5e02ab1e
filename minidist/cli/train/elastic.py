"""`minidist train --elastic`: the launcher's side, and the side of each of its processes."""

import re
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from minidist.cli.limits import limits_of
from minidist.cli.process import may_fork
from minidist.cli.train.arguments import add_arguments
from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.run_folder import run_folder
from minidist.cli.train.saving import Saver, Saves, Told, hearing
from minidist.cli.train.settings import Settings, as_arguments, check
from minidist.cli.train.steps import Course
from minidist.cli.train.verify import STEPS, Weights
from minidist.comm.group import Group
from minidist.comm.health.failure import say_line
from minidist.comm.records import share_records
from minidist.comm.wire import pack, unpack
from minidist.console import Parser, fail, shown
from minidist.errors import PlanError, ShardError
from minidist.launch import Launch
from minidist.launch.elastic_job import spawn_elastic
from minidist.launch.generation import Elastic
from minidist.launch.generations import Generations, warm_up
from minidist.launch.membership import current
from minidist.launch.own_python import module_command
from minidist.launch.template import fork_on_demand, fork_template
from minidist.observe.timeline import Timeline
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.state.manifest import checkpoints
from minidist.survive.elastic import Regrouping, Survivor, go_on, rehearse
from minidist.survive.peer_copies import PeerCopies

RECORD = "elastic.jsonl"
MOST_SPANS = 10000
SPANS_EACH = 2500
"""Spans of a process that trace.json keeps: of the whole job, and of one generation (its first and
last 35 steps)."""


class Lives(Survivor):
    """A process of an elastic training: it keeps its state and its records over all generations.

    Attributes: saves: the checkpoints that were written; timeline; resumed_from: number of steps of
                the run that --resume names; early: with --verify, the weights after the first
                steps.
    """

    def __init__(self, job: Generations, settings: Settings) -> None:
        super().__init__(
            job,
            copies=PeerCopies(settings.args.peer_copies or 1),
            newest=lambda: _newest(settings),
        )
        self.saves = Saves()
        self.timeline = Timeline(0)
        self.resumed_from = None if settings.resume is None else 0
        self.verifies = bool(settings.args.verify)
        self.early = cast(Weights | None, None)

    def begin(self, trainer: Trainer) -> None:
        """Begin a generation: the state (Survivor.begin), and the records that some ranks may
        lack."""
        super().begin(trainer)
        if self.job.saves:
            known = share_records(trainer.world, asdict(self.saves))
            self.saves = Saves(**max(known, key=lambda saves: len(saves["steps"])))
        if self.verifies:
            self._share_early(trainer.world)
        if self.resumed_from is not None:
            self.resumed_from = self.generations.count(0)

    def _share_early(self, world: Group) -> None:
        """Share the early weights from the first rank that has them."""
        have = share_records(world, self.early is not None)
        if any(have) and not all(have):
            source = have.index(True)
            with world.ledger.control():
                packed = world.broadcast(
                    np.frombuffer(pack(self.early), np.uint8) if world.rank == source else None,
                    root=source,
                )
            self.early = unpack(packed.tobytes())

    def follow(self, world: Group) -> Timeline:
        """Continue the timeline in a new world, and return it."""
        self.timeline.go_on(
            world.rank,
            world.ledger,
            limit=min(MOST_SPANS, len(self.timeline.spans) + SPANS_EACH),
            generation=self.job.number,
            process=self.job.process,
        )
        return self.timeline

    def add_to(self, metrics: dict[str, Any], world: Group) -> None:
        """Add what only an elastic job has to the metrics of its last generation.

        Every rank calls it.
        """
        metrics["elastic"] = self.records(world)
        metrics["generation"] = self.job.number
        metrics["generations"] = self.generations
        metrics["resumed_from"] = self.resumed_from


def _newest(settings: Settings) -> list[Path]:
    """Return the checkpoints of the run, the newest first.

    Those that --resume names, of another folder, are at the end.
    """
    found = checkpoints(settings.out)[::-1]
    return found + [
        folder
        for folder in (settings.resume.folders if settings.resume else [])
        if folder not in found
    ]


def bounds(text: str) -> tuple[int, int]:
    """Return the fewest and the most ranks of "4:8". Raises: ConfigError."""
    match = re.fullmatch("([0-9]{1,5}):([0-9]{1,5})", text)
    least, most = match.groups() if match else ("0", "0")
    if not 1 <= int(least) <= int(most):
        fail(f"--elastic: {shown(text)} is not LEAST:MOST, two numbers of ranks, as 4:8")
    return int(least), int(most)


def check_one_host(args: Namespace) -> None:
    """Raise ConfigError for the hidden options --hosts and --ssh, which belong to launch."""
    if args.hosts is None and args.ssh is None:
        return
    option = "--ssh" if args.hosts is None else "--hosts"
    saves = ", with --save-every N and --resume RUN in place of --elastic" if args.elastic else ""
    fail(
        f"{option}: minidist train starts its ranks on this host only; use minidist launch "
        f"--hosts {args.hosts or 'a:3,b:4'} -m minidist train …{saves}"
    )


def check_elastic(args: Namespace) -> None:
    """Raise ConfigError for options that need --elastic, or do not go with it."""
    if args.elastic is None:
        for option in ("max_restarts", "spares", "elastic_wait", "peer_copies"):
            if getattr(args, option) is not None:
                fail(
                    f"--{option.replace('_', '-')}: is for an elastic job; add --elastic LEAST:MOST"
                )
        return
    bounds(args.elastic)
    if args.node_limit is not None and args.expert_nodes is None:
        fail(
            "--elastic: with --node-limit the choice of experts would change with the number of "
            "nodes; give the number of nodes for the experts, with --expert-nodes 2"
        )
    if args.asynchronous:
        fail(
            "--elastic with --asynchronous is not offered: leave out --elastic; the servers "
            "continue without a lost worker"
        )
    if args.local_steps is not None:
        fail(
            "--elastic with --local-steps is not offered: save with --save-every N, and continue "
            "with --resume RUN on any number of ranks"
        )
    if args.graph or args.strategy != "ddp":
        fail(
            "--elastic: ranks join and leave between steps of ddp; leave out --graph and other "
            "strategies"
        )
    if args.transport not in (None, "auto", "tcp", "shm"):
        fail(
            "--elastic: its ranks are processes that join again after a loss, over auto, tcp or "
            f"shm; --transport {args.transport} cannot"
        )


def check_starts(args: Namespace, launch: Launch, *, starts_ranks: bool) -> None:
    """Raise ConfigError if this process cannot start the ranks of an elastic job."""
    if args.elastic and launch.launcher != "alone":
        fail(
            f"--elastic {args.elastic}: {launch.launcher} started this rank, and only the "
            "launcher of an elastic job can put another in its place; use minidist train -n N "
            f"--elastic {args.elastic} on one host, or --save-every without --elastic"
        )
    if args.elastic and not starts_ranks:
        fail(
            f"--elastic {args.elastic}: is for ranks that are started here; give -n, without "
            "another launcher"
        )


Train = Callable[[Settings, Group, int, Told | None, "Lives"], int]


def start_elastic(settings: Settings, size: int, train: Train) -> int:
    """Start the processes of an elastic job of `size` ranks, and wait for them.

    Return the exit status.

    If the processes are forks of this one, it returns in each of them, too, after their training.
    """
    args = settings.args
    least, most = bounds(args.elastic)
    if not least <= size <= most:
        fail(f"-n {size}: --elastic {args.elastic} allows {least} to {most} ranks")
    elastic = Elastic(
        tuple(count for count in range(least, size + 1) if _fits(settings, count)),
        restarts=args.max_restarts or 0,
        spares=args.spares or 0,
        wait=args.elastic_wait or 0.0,
    )
    args.elastic = f"{least}:{size}"  # so a checkpoint says how many ranks the job wants
    words = as_arguments(args)
    template = None
    if may_fork() and args.device == "cpu" and not (args.cores or args.memory_limit):
        try:
            template = fork_template()
        except OSError:
            pass  # the template is started as a process, or there is none
        else:
            if template is None:
                return elastic_process(_of_a_process(words), train)
    try:
        with run_folder(settings.out):  # locked after the fork: a copy would hold the lock, too
            return spawn_elastic(
                module_command("minidist", "train", *words),
                elastic,
                template=template,
                record=settings.out / RECORD,
                patience=args.patience,
                forks=args.device == "cpu",
                limits=limits_of(args, settings.out),
            )
    finally:
        if template is not None:
            template.close()


def _of_a_process(words: list[str]) -> Settings:
    """Return the settings of a process of an elastic job with these words."""
    parser = Parser(prog="minidist train")
    add_arguments(parser)
    return check(parser.parse_args(words), begins=False)


def _fits(settings: Settings, size: int) -> bool:
    try:
        plan = settings.plan(size)
        plan.require(size, settings.config)
        plan.require_model(settings.config)
    except (PlanError, ShardError):
        return False
    return True


def elastic_process(settings: Settings, train: Train) -> int:
    """Run a process of an elastic job, as a rank of one generation after another.

    Return the exit status.
    """
    args = settings.args
    rehearse(args.zero or 0)
    libraries = warm_up(args.transport)
    fork_on_demand()
    job = Generations.from_environment(libraries)
    lives = Lives(job, settings)

    def work(world: Group) -> int:
        if told is not None and (member := current()) is not None:
            member.saves_when_told()
        with run_folder(settings.out) if world.rank == 0 else nullcontext():
            return train(settings, world, args.threads or 1, told, lives)

    job.saves = bool(args.save_every)
    with hearing(Launch("minidist")) if job.saves else nullcontext() as told:
        return go_on(lives, work, transport=args.transport, threads=args.threads)


def elastic_steps(
    trainer: Trainer, settings: Settings, report: ProgressReport, lives: Lives, saver: Saver | None
) -> Course:
    """Make every step that is not made yet.

    Raises: Stopped as train_steps, and the errors of Survivor.after_step.
    """
    args = settings.args
    ledger = trainer.world.ledger

    def save() -> None:
        if args.verify and trainer.steps_done == min(STEPS, args.steps):
            lives.early = trainer.state_dict()
        if saver is not None:
            saver.after_step(
                lives.losses, lambda: float(np.median(lives.seconds)), generations=lives.generations
            )

    try:
        for step in range(trainer.steps_done, args.steps):
            start = time.perf_counter()
            with report.input():
                batch = settings.training_batch(step)
            loss = trainer.step(batch)
            lives.after_step(trainer, loss, time.perf_counter() - start, then=save)
            sent = sum(
                sum(verbs.values())
                for axis, verbs in ledger.sent_bytes("step").items()
                if axis != "control"
            )
            report.step(step + 1, loss, args.batch * args.context / lives.seconds[-1], sent)
        if saver is not None:
            saver.settle()
        if trainer.world.rank == 0:
            lives.job.tell("trained", step=trainer.steps_done)
    except Regrouping:
        if saver is not None:
            saver.settle()  # no save may continue after the world is closed
        raise
    finally:
        report.close()
    if args.verify and lives.early is None and trainer.world.rank == 0:
        say_line(
            f"minidist train: --verify: the weights after step {STEPS} were lost with the ranks "
            "that had them; nothing is compared"
        )
    return Course(lives.losses, lives.seconds, early=lives.early)
