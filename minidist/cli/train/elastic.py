"""`minidist train --elastic`: the launcher's side, and one of its processes."""

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext

from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.run_folder import run_folder
from minidist.cli.train.settings import Settings, as_arguments
from minidist.cli.train.steps import Course
from minidist.comm.group import Group
from minidist.console import fail, shown
from minidist.errors import PlanError, ShardError
from minidist.launch.elastic_job import spawn_elastic
from minidist.launch.generation import Elastic
from minidist.launch.generations import Generations, warm_up
from minidist.launch.template import fork_on_demand
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.survive.elastic import Survivor, go_on, rehearse

RECORD = "elastic.jsonl"


def bounds(text: str) -> tuple[int, int]:
    """"4:8" -> the fewest and the most ranks that may work. Raises: ConfigError."""
    least, _, most = text.partition(":")
    if not (least.isdigit() and most.isdigit() and len(text) < 12 and 1 <= int(least) <= int(most)):
        fail(f"--elastic: {shown(text)} is not LEAST:MOST, two numbers of ranks, as 4:8")
    return int(least), int(most)


def check_elastic(args: Namespace) -> None:
    """Raise ConfigError for options that need --elastic, or do not go with it."""
    if args.elastic is None:
        for option in ("max_restarts", "spares", "elastic_wait", "peer_copies"):
            if getattr(args, option) is not None:
                fail(f"--{option.replace('_', '-')}: is for an elastic job; add --elastic LEAST:MOST")
        return
    bounds(args.elastic)
    if args.verify or args.graph or args.strategy != "ddp":
        fail("--elastic: ranks come and go between synchronous steps; leave out --verify, --graph and --strategy")
    if args.save_every or args.resume:
        fail("--elastic: its state is in memory; leave out --save-every and --resume")
    if args.transport not in (None, "auto", "tcp", "shm"):
        fail(f"--elastic: its ranks are processes that meet again after a loss, over auto, tcp or shm; "
             f"--transport {args.transport} cannot")


def start_elastic(settings: Settings, size: int) -> int:
    """Start the processes of an elastic job of `size` ranks, and wait for them; the exit status."""
    args = settings.args
    least, most = bounds(args.elastic)
    if not least <= size <= most:
        fail(f"-n {size}: --elastic {args.elastic} allows {least} to {most} ranks")
    elastic = Elastic(tuple(count for count in range(least, size + 1) if _fits(settings, count)),
                      restarts=args.max_restarts or 0, spares=args.spares or 0, wait=args.elastic_wait or 0.0)
    return spawn_elastic([sys.executable, "-m", "minidist", "train", *as_arguments(args)], elastic,
                         record=settings.out / RECORD, patience=args.patience, forks=args.device == "cpu")


def _fits(settings: Settings, size: int) -> bool:
    try:
        plan = settings.plan(size)
        plan.require(size, settings.config)
        plan.require_model(settings.config)
    except (PlanError, ShardError):
        return False
    return True


def elastic_process(settings: Settings, train: Callable[[Settings, Group, int, None, Survivor], int]) -> int:
    """Be a process of an elastic job, and a rank of one generation after another; the exit status."""
    args = settings.args
    rehearse(args.zero or 0)
    warm_up(args.transport)
    fork_on_demand()
    survivor = Survivor(Generations.from_environment(), every=args.peer_copies or 1)

    def work(world: Group) -> int:
        with run_folder(settings.out) if world.rank == 0 else nullcontext():
            return train(settings, world, args.threads or 1, None, survivor)

    return go_on(survivor, work, transport=args.transport, threads=args.threads)


def elastic_steps(trainer: Trainer, settings: Settings, report: ProgressReport, survivor: Survivor) -> Course:
    """Make every step that is not made yet."""
    args, ledger = settings.args, trainer.world.ledger
    survivor.begin(trainer)
    try:
        for step in range(trainer.steps_done, args.steps):
            start = time.perf_counter()
            loss = trainer.step(settings.training_batch(step))
            seconds = time.perf_counter() - start
            survivor.after_step(trainer, loss, seconds)
            sent = sum(sum(verbs.values()) for axis, verbs in ledger.sent_bytes("step").items() if axis != "control")
            report.step(step + 1, loss, args.batch * args.context / seconds, sent)
    finally:
        report.close()
    return Course(survivor.losses, survivor.seconds)
