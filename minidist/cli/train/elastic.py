"""`minidist train --elastic`: the launcher's side, and one of its processes."""

import sys
import time
from argparse import ArgumentTypeError, Namespace

from minidist.cli.train.progress import ProgressReport, sent_bytes
from minidist.cli.train.settings import Settings, as_arguments
from minidist.console import fail, shown
from minidist.errors import PlanError, ShardError
from minidist.launch.elastic_job import spawn_elastic
from minidist.launch.generation import Elastic
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.survive.elastic import Survivor

RECORD = "elastic.jsonl"


def bounds(text: str) -> tuple[int, int]:
    """"4:8" -> the fewest and the most ranks that may work. Raises: ArgumentTypeError."""
    least, _, most = text.partition(":")
    if not (least.isdigit() and most.isdigit() and len(text) < 12 and 1 <= int(least) <= int(most)):
        raise ArgumentTypeError(f"{shown(text)} is not LEAST:MOST, two numbers of ranks, as 4:8")
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
                         record=settings.out / RECORD, patience=args.patience)


def _fits(settings: Settings, size: int) -> bool:
    try:
        plan = settings.plan(size)
        plan.require(size, settings.config)
        plan.require_model(settings.config)
    except (PlanError, ShardError):
        return False
    return True


def elastic_steps(trainer: Trainer, settings: Settings, report: ProgressReport, survivor: Survivor) -> None:
    """Make every step that is not made yet."""
    args = settings.args
    survivor.begin(trainer)
    try:
        for step in range(trainer.steps_done, args.steps):
            start = time.perf_counter()
            loss = trainer.step(settings.training_batch(step))
            seconds = time.perf_counter() - start
            survivor.after_step(trainer, loss, seconds)
            report.step(step + 1, loss, args.batch * args.context / seconds,
                        sent_bytes(trainer.world.ledger))
    finally:
        report.close()
