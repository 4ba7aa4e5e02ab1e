"""`minidist train`: teach a GPT a text, on the ranks that started it or on ranks it starts itself.

mpirun -n 4 minidist train                # the ranks mpirun started
minidist train -n 4                       # four ranks, started here
minidist train -n 4 --transport threads   # four ranks as threads of this process, for a debugger
minidist train                            # one process
minidist train --resume RUN               # continues from the newest checkpoint (--save-every)
"""

import argparse
import time
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from minidist.cli.limits import keep_to_cores, limits_of, require_own_ranks
from minidist.cli.train import from_published
from minidist.cli.train.adapting import Adapting, check_adapt
from minidist.cli.train.arguments import add_arguments
from minidist.cli.train.attempts import by_itself, together
from minidist.cli.train.axis_traffic import stage_layers
from minidist.cli.train.elastic import (
    Lives,
    check_elastic,
    check_one_host,
    check_starts,
    elastic_process,
    elastic_steps,
    start_elastic,
)
from minidist.cli.train.metrics import Metrics, result_metrics, run_metrics
from minidist.cli.train.progress import make_console
from minidist.cli.train.report import print_report
from minidist.cli.train.rings import drop_rings, keep_ring
from minidist.cli.train.run_folder import WEIGHTS, run_folder, write_results, write_views
from minidist.cli.train.sample import sample
from minidist.cli.train.saving import Saver, Saves, Stopped, Told, hearing
from minidist.cli.train.settings import Settings, as_arguments, check
from minidist.cli.train.steps import Course, train_steps
from minidist.cli.train.telemetry import Telemetry
from minidist.cli.train.verify import verify
from minidist.cli.train.watching import report_of
from minidist.comm.group import Group
from minidist.comm.records import hand_out_record, unhurried
from minidist.console import fail, plural, write_json
from minidist.device import account
from minidist.errors import ConfigError
from minidist.launch import init, spawn
from minidist.launch import run as run_function
from minidist.launch.arguments import MOST_SECONDS
from minidist.launch.generations import is_elastic_process
from minidist.launch.launchers import Launch
from minidist.launch.membership import limit_blas_threads
from minidist.launch.own_python import module_command
from minidist.launch.transports import THREADS
from minidist.launch.which_mpi import find_launch
from minidist.nn import GPT
from minidist.nn.attention_pattern import shown_pattern
from minidist.observe.foresight import foresight
from minidist.observe.step_record import record_step
from minidist.observe.timeline import Timeline
from minidist.observe.why import typical_step, why
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.terminal import Console

__all__ = ["add_arguments", "run", "train_steps"]

TRACE_SPANS = 5000
"""Spans of a rank that trace.json keeps: about the first and the last 75 steps, a few megabytes for
four ranks."""

WAIT_LIMIT = 120.0
"""Limit of one wait of ranks that are threads, in seconds, as in md.init; the whole run has no
limit in practice."""


def run(args: argparse.Namespace) -> int:
    """Train; with `-n` and no launcher, start the ranks first. Returns the exit status.

    Raises:  ConfigError if the options or the data make the run impossible.
    """
    if is_elastic_process():
        return elastic_process(check(args, begins=False), train)
    check_one_host(args)
    launch = find_launch()
    settings = check(args)
    check_elastic(args)
    if settings.resume is not None:
        settings.resume.choose_ranks(args, launch)
    as_threads = args.transport in THREADS
    require_own_ranks(args, launch, as_threads=as_threads)
    starts_ranks = launch.launcher == "alone" and (
        (args.ranks or 1) > 1 or as_threads or bool(args.memory_limit)
    )
    check_starts(args, launch, starts_ranks=starts_ranks)
    if not starts_ranks:
        _check_started(args, launch, as_threads=as_threads)
    size = (args.ranks or 1) if starts_ranks else launch.world_size
    plan = settings.plan(size)
    plan.require(size, settings.config)
    plan.require_model(settings.config)
    check_adapt(args, plan)
    here = size if starts_ranks else launch.local_size
    settings.require_memory(plan, here, processes=0 if as_threads else here)
    if starts_ranks and args.transport == "mpi":
        fail(f"--transport mpi: its ranks are mpirun's to start: mpirun -n {size} minidist train")
    saves = hearing(launch) if args.save_every else nullcontext()
    if as_threads or not starts_ranks:
        keep_to_cores(args, launch)
    if as_threads:
        threads = limit_blas_threads(args.threads, size * plan.replicas)
        with saves as told, run_folder(settings.out):
            return int(
                max(
                    run_function(
                        _train_in_thread,
                        settings,
                        threads,
                        told,
                        size=size,
                        transport=args.transport,
                        limit=MOST_SECONDS,
                    )
                )
            )
    if starts_ranks:
        return _start_ranks(args, settings, size)
    threads = limit_blas_threads(args.threads, launch.local_size * plan.replicas)
    world = init(transport=args.transport, threads=threads, patience=args.patience)
    settings = settings.with_one_folder(world)
    with saves as told, run_folder(settings.out) if world.rank == 0 else nullcontext():
        return train(settings, world, threads, told)


def _check_started(args: argparse.Namespace, launch: Launch, *, as_threads: bool) -> None:
    """Raise ConfigError if the options do not suit the ranks that a launcher has started."""
    if args.ranks and args.ranks != launch.world_size:
        fail(f"-n {args.ranks}: {launch.launcher} started {launch.world_size} ranks; leave -n out")
    if as_threads:
        fail(
            f"--transport {args.transport}: its ranks are threads of one process, and "
            f"{launch.launcher} started several; run: minidist train -n {launch.world_size} "
            f"--transport {args.transport}"
        )


def _start_ranks(args: argparse.Namespace, settings: Settings, size: int) -> int:
    """Start a process for each rank, and wait for all. Returns the exit status."""
    args.out = str(settings.out)  # the same for all ranks: its default is the time of day
    if args.elastic:
        return start_elastic(settings, size, train)
    with run_folder(settings.out):
        status = spawn(
            module_command("minidist", "train", *as_arguments(args)),
            size,
            patience=args.patience,
            limits=limits_of(args, settings.out),
        )
        drop_rings(settings.out, status)
        return status


def _train_in_thread(world: Group, settings: Settings, threads: int, told: Told | None) -> int:
    """Run one rank of `--transport threads`, where all ranks are in this process (useful in a
    debugger)."""
    world.transport.limit = WAIT_LIMIT
    settings = replace(settings, args=copy(settings.args))  # a rank may change its own
    return train(settings, world, threads, told)


def train(
    settings: Settings,
    world: Group,
    threads: int,
    told: Told | None = None,
    lives: Lives | None = None,
) -> int:
    """Run everything from the first step to the report; only rank 0 prints and writes files.
    Returns: the exit status."""
    settings.require_alike(world)
    args = settings.args
    speaks = world.rank == 0 and not args.quiet
    console, on_terminal = make_console() if speaks else (Console(quiet=True), False)
    timeline = (
        Timeline(world.world_rank, limit=TRACE_SPANS) if lives is None else lives.follow(world)
    )
    if lives is None:
        timeline.follow(world.ledger, waits=args.why, receives=True)
    start = time.perf_counter()
    trainer = Trainer(
        settings.plan_on(world),
        settings.config,
        world,
        recorder=timeline,
        **settings.trainer_options(),
    )
    made = time.perf_counter() - start
    settings = replace(settings, config=trainer.config)
    trainer.require_room(args.batch)
    timeline.follow_memory(trainer.account)
    keep_ring(settings.out, world)
    if lives is not None:
        lives.begin(trainer)
    elif settings.resume is not None:
        settings.resume.load(trainer)
    else:
        from_published.begin(args, trainer)
    if speaks and (lives is None or not lives.job.begun):
        announce(console, settings, trainer)
    if settings.resume is not None and (lives is None or not lives.job.begun):
        settings.resume.tell_jump(trainer, args)
    report = Telemetry(
        report_of(settings, console, on_terminal=on_terminal), trainer, settings, threads=threads
    )
    adapting = Adapting(trainer, settings, report, made=made) if args.adapt else None
    saves = Saves() if lives is None else lives.saves
    saver = Saver(trainer, settings, told or Told(), report, saves) if args.save_every else None
    try:
        course = (
            train_steps(trainer, settings, report, saver, adapting)
            if lives is None
            else elastic_steps(trainer, settings, report, lives, saver)
        )
        return conclude(
            trainer,
            settings,
            course,
            saver,
            report,
            timeline,
            console,
            threads=threads,
            lives=lives,
        )
    except Stopped:
        assert saver is not None
        trainer.close()
        world.barrier()
        return saver.farewell()
    finally:
        report.end()


def conclude(
    trainer: Trainer,
    settings: Settings,
    course: Course,
    saver: Saver | None,
    report: Telemetry,
    timeline: Timeline,
    console: Console,
    *,
    threads: int,
    lives: Lives | None,
) -> int:
    """Write the results, then everything made from them.

    Every rank calls it. Returns: the exit status.

    The other ranks wait while rank 0 works.

    Raises:  Stopped; MismatchError if the replicas differ; on rank 0 ConfigError or OSError if the
             results, or the file of --json, cannot be written.
    """
    world = trainer.survivors()
    memory = trainer.account.snapshot()  # first: later work takes memory of its own
    metrics, problem = _write_results(trainer, settings, course, saver, threads=threads)
    with unhurried(world):
        written = hand_out_record(world, problem is None)
    status = 0
    if written:
        trainer.check_replicas()
        _complete(trainer, settings, metrics, memory, report, saver, lives)
        if course.early is not None:
            status = verify(course.early, settings, world, metrics, console)
        timelines = together(world, "trace.json", partial(timeline.collect, world))
        if world.rank == 0:
            problem = _present(trainer, settings, metrics, timelines, console)
    trainer.close()
    with unhurried(world):
        world.barrier()  # no rank ends the job before rank 0 has written its files
    if problem is not None:
        raise problem  # the other ranks have ended well, so only this one prints a line
    return status


def _write_results(
    trainer: Trainer, settings: Settings, course: Course, saver: Saver | None, *, threads: int
) -> tuple[Metrics, Exception | None]:
    """Write the weights and the metrics known so far, on rank 0.

    Return the metrics, and an error if there was one.
    """
    weights = trainer.state_dict()
    if trainer.survivors().rank != 0:
        return {}, None
    metrics = result_metrics(trainer, settings, course, saver, weights, threads=threads)
    try:
        write_results(settings.out, metrics, weights)
    except (ConfigError, OSError) as error:
        return metrics, error
    return metrics, None


def _complete(
    trainer: Trainer,
    settings: Settings,
    metrics: Metrics,
    memory: dict[str, Any],
    report: Telemetry,
    saver: Saver | None,
    lives: Lives | None,
) -> None:
    """Add to the metrics what needs further work of all ranks."""
    world = trainer.survivors()

    def validate() -> float:
        held_out = report.validating(settings.validation_batches())
        return trainer.evaluate(held_out if saver is None else saver.heeding(held_out))

    metrics["validation_loss"] = together(world, "the validation", validate)
    metrics["energy"] = together(world, "the account of energy", report.energy)
    measure = partial(run_metrics, trainer, settings, memory)
    metrics.update(together(world, "the comparison with formulas", measure) or {})
    if lives is not None:
        lives.add_to(metrics, world)


def _present(
    trainer: Trainer,
    settings: Settings,
    metrics: Metrics,
    timelines: list[Timeline] | None,
    console: Console,
) -> Exception | None:
    """Explain, draw and print the results on rank 0.

    Return an error of writing the file of --json.
    """
    args = settings.args
    problem = None
    if timelines is not None:
        metrics["trace"] = {
            "spans": sum(len(each.spans) for each in timelines),
            "left_out": sum(each.dropped for each in timelines),
        }
        if args.why:
            with by_itself("--why"):
                step = typical_step(timelines)
                metrics["why"] = {
                    "step": step,
                    **why(record_step(timelines, step)),
                    "foresight": foresight(timelines, step),
                }
    write_views(settings.out, metrics, timelines)
    try:
        if args.json:
            write_json(args.json, metrics)
    except (ConfigError, OSError) as error:
        problem = error
    if not args.quiet and problem is None:
        written = None
        # without the run's memory limit
        with by_itself("the sample"), account.use(account.MemoryAccount()):
            written = sample(whole_model(trainer, settings.out), settings.text, seed=args.seed)
        with by_itself("the report"):
            print_report(console, metrics, written, settings.out)
    return problem


def whole_model(trainer: Trainer, out: Path) -> GPT:
    """Return a model that this rank can use without others: its own, or the one in the run
    folder."""
    if trainer.plan.zero < 3 and not trainer.plan.composed and trainer.plan.local_steps is None:
        return trainer.model
    from safetensors.numpy import load_file

    model = GPT(trainer.config)
    model.load_state_dict(load_file(out / WEIGHTS))
    return model


def announce(console: Console, settings: Settings, trainer: Trainer) -> None:
    """Print the data, the model and the ranks, and the step from which a resumed run continues."""
    config = settings.config
    text = settings.text
    world = trainer.world
    stages = stage_layers(trainer)
    split = f" (in stages of {', '.join(map(str, stages))})" if stages else ""
    pattern = config.attention_pattern
    attention = "" if pattern is None else f", attention {shown_pattern(pattern)}"
    console.print(
        f"{text.source}: {len(text.train):,} {text.unit} to learn from, {len(text.validation):,} "
        f"held out, {text.different} different; {plural(config.layers, 'layer')}{split} of "
        f"width {config.width}{attention}, {settings.args.batch} × {settings.args.context} tokens a "
        f"step, {plural(world.size, 'rank')} over {world.transport.name}",
        markup=False,
        soft_wrap=True,
    )
    if text.left_out:
        console.print(f"left out of {text.source}: {text.left_out}", markup=False, soft_wrap=True)
    if settings.resume is None and from_published.origin(settings.args) is not None:
        console.print(
            f"weights of {from_published.origin(settings.args)}", markup=False, soft_wrap=True
        )
    if settings.resume is not None:
        console.print(
            f"going on from step {trainer.steps_done} of {settings.args.steps}, as "
            f"{settings.resume.how_saved} saved it in {settings.resume.run}",
            markup=False,
            soft_wrap=True,
        )
