"""`minidist train --resume RUN`: the options and the state of a run, read from its newest
checkpoint.

Options that define the numbers (model, data, batch, seed, optimizer) cannot change. Options for how
they are computed may be given again: ranks, transport, device, the plan and its options. A new
--plan resets its options: those that are not given with it have their defaults again. In the same
way -n, --plan and --elastic reset the options of an elastic job. A run without local steps may
continue with --local-steps, and then with another --lr: each rank begins with the common weights
and state. A run with local steps is not elastic: if an elastic job saved the checkpoint, the run
continues without --elastic.

More --steps move the end of the learning rate's schedule, and nothing else of it
(LearningRate.extended); if this makes the rate jump, a line says so before the first step.

A job that its launcher has started again (Slurm's --requeue, torchrun's --max-restarts) continues
without --resume, with its original command line.
"""

import argparse
import hashlib
import os
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidist.cli.train.rate import extend_rate, jump, learning_rate
from minidist.comm.health.failure import say_line
from minidist.console import Parser, fail, plural
from minidist.data.text import NAMED, Text
from minidist.errors import CheckpointError, ConfigError
from minidist.launch import Launch, detect
from minidist.launch.launchers import restarts
from minidist.launch.transports import THREADS
from minidist.nn import GPTConfig
from minidist.observe.step_log import STEP_LOG, read_step_log
from minidist.parallel.hybrid.hybrid import AXES, Plan, Trainer
from minidist.parallel.hybrid.plan_checks import options_that_need
from minidist.parallel.state.manifest import (
    checkpoints,
    read_manifest,
    require_run,
    require_told,
    step_of,
    unpacked,
)

NEVER_KEPT = (
    "command",
    "cores",
    "given",
    "hosts",
    "json",
    "memory_limit",
    "metrics_port",
    "out",
    "patience",
    "quiet",
    "ranks",
    "resume",
    "ssh",
    "verify",
    "watch",
    "why",
)
"""Options that do not affect the run's numbers, and hold for one command only."""

OF_THE_PLAN = (
    "plan",
    "order",
    "placement",
    "zero",
    "shard",
    "keep_gathered",
    "schedule",
    "microbatches",
    "stages_per_rank",
    "stage_layers",
    "attention",
    "sequence_parallel",
    "strategy",
    "replicas",
    "servers",
    "devices",
    "server_device",
    "server_dtype",
)
OF_AN_ELASTIC_JOB = ("elastic", "max_restarts", "spares", "elastic_wait", "peer_copies")
MAY_CHANGE = (
    "adapt",
    *OF_THE_PLAN,
    *OF_AN_ELASTIC_JOB,
    "ranks",
    "transport",
    "bucket_bytes",
    "device",
    "graph",
    "threads",
    "cores",
    "memory_limit",
    "patience",
    "accumulate",
    "checkpoint_blocks",
    "keep_activations",
    "activation_memory",
    "offload",
    "offload_dir",
    "device_memory",
    "compress",
    "data",
    "validate",
    "steps",
    "save_every",
    "interruptions_per_day",
    "save_async",
    "keep",
    "resume",
    "out",
    "json",
    "quiet",
    "why",
    "metrics_port",
    "watch",
    "watts",
    "digest_every",
    "expert_placement",
)


@dataclass
class Resumption:
    """The checkpoints from which a run may continue, the newest first, and the record in the first
    readable one.

    Attributes: run: the run folder; problems: a line for each checkpoint that cannot be used.
    """

    run: Path
    folders: list[Path]
    about: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """Return the losses of all steps before this job's."""
        return unpacked(self.about["metrics"]["losses"])

    @property
    def step_seconds(self) -> float:
        """Return the seconds per step of the job before, from the checkpoint or as the median of
        its log; 0: unknown."""
        if "step_seconds" in self.about["metrics"]:
            return float(self.about["metrics"]["step_seconds"])
        with suppress(OSError):
            seconds = [
                line["seconds"] for line in read_step_log(self.run / STEP_LOG) if "seconds" in line
            ]
            return statistics.median(seconds) if seconds else 0.0
        return 0.0

    @property
    def how_saved(self) -> str:
        """Return the ranks and the plan that saved the checkpoint: "4 ranks (dp=2,tp=2)"."""
        plan = self.about["plan"]
        axes = ",".join(f"{axis}={plan[axis]}" for axis in AXES if plan[axis] > 1)
        zero = f" with ZeRO-{plan['zero']}" if plan["zero"] else ""
        return plural(self.about["ranks"], "rank") + (f" ({axes})" if axes else "") + zero

    def recorded(self, args: argparse.Namespace) -> argparse.Namespace:
        """Return the options that the run had.

        Options that it did not know have the values of `args`.
        """
        return argparse.Namespace(**{**vars(args), **self.about["options"]})

    def tell_jump(self, trainer: Trainer, args: argparse.Namespace) -> None:
        """Print on rank 0, before the first step, how the learning rate jumps, if it does."""
        line = jump(
            learning_rate(self.recorded(args)),
            trainer.learning_rate,
            trainer.updates_done,
            trainer.steps_done,
        )
        if line is not None and trainer.world.rank == 0:
            say_line(f"minidist train: {line}")

    def choose_ranks(self, args: argparse.Namespace, launch: Launch) -> None:
        """Set the options that depend on the launcher and were not given.

        Without a launcher the number of ranks is the plan's, if --plan was given, else the run's.
        An elastic run wants the same number as at its start; under another launcher it is no longer
        elastic.
        """
        given = getattr(args, "given", ())
        if launch.launcher != "alone" and "elastic" not in given:
            vars(args).update(dict.fromkeys(OF_AN_ELASTIC_JOB))
        if launch.launcher == "alone" and args.ranks is None and args.elastic:
            args.ranks = int(args.elastic.partition(":")[2])
        elif launch.launcher == "alone" and args.ranks is None:
            args.ranks = Plan.parse(args.plan).size if "plan" in given else self.about["ranks"]
        if "transport" not in given and (
            (args.transport == "mpi" and not launch.by_mpirun)
            or (args.transport in THREADS and launch.launcher != "alone")
        ):
            args.transport = None

    def require_text(self, text: Text) -> None:
        """Raise ConfigError unless the text is the one that the run began with."""
        if text_digest(text) != self.about["data"]["sha256"]:
            fail(
                f"--resume {self.run}: the text {text.source} is not the one that the run learns "
                "from: it has changed since; give that text with --data, or start a new run"
            )

    def load(self, trainer: Trainer) -> None:
        """Load the newest undamaged checkpoint into a trainer.

        Every rank calls it; rank 0 prints why others were skipped.

        Raises:  ConfigError if none is undamaged.
        """
        problems = [*self.problems]
        for folder in self.folders:
            try:
                about = trainer.load(folder)
                require_run(folder, about)
                self.about = about
                break
            except CheckpointError as error:
                problems.append(str(error))
        else:
            fail(f"--resume {self.run}: no checkpoint can be used: {problems[0]}")
        if trainer.world.rank == 0:
            for problem in problems:
                say_line(
                    f"minidist train: {problem.removesuffix('; take an older checkpoint')}; "
                    f"taking {folder.name}"
                )


def resumed(args: argparse.Namespace, *, begins: bool = True) -> Resumption | None:
    """Find the checkpoints that --resume names, and fill `args` with the run's options.

    Return None without --resume.

    Args:    begins: the job begins with this process; if its launcher has restarted it, it
             continues from the checkpoints in --out.
    Raises:  ConfigError, one line: there is no checkpoint, or an option is given that cannot
             change.
    """
    again = bool(
        begins and restarts() and args.out and args.save_every and checkpoints(Path(args.out))
    )
    if again:
        if args.verify and detect().world_rank == 0:
            say_line(
                "minidist train: --verify is left out: the first steps were made before the job "
                "was started again"
            )
        args.resume = args.out
        args.verify = False
        args.given = [*getattr(args, "given", ()), "resume"]
    if args.resume is None:
        return None
    given = set(getattr(args, "given", ()))
    if args.verify:
        fail(
            "--verify: compares the first steps of a run, which a resumed one has made before; "
            "leave it out"
        )
    found = _find(Path(args.resume))
    options = _options(found, args)
    if again:  # the same command line also names options that cannot change
        given -= {
            name for name in given - {*MAY_CHANGE} if options.get(name) == getattr(args, name)
        } | {"verify"}
        args.given = sorted(given)
    _refuse_changes(given, args, options)
    vars(args).update(_kept(given, args, options))
    if args.steps != options["steps"]:
        extend_rate(args, found.recorded(args))
    args.out = args.out or str(found.run)
    return found


def _refuse_changes(given: set[str], args: argparse.Namespace, options: dict[str, Any]) -> None:
    """Raise ConfigError for a given option that a resumed run cannot change. Args: options: of the
    checkpoint."""
    may_change = {*MAY_CHANGE}
    if options.get("local_steps") is None and "local_steps" in given:  # local steps begin here
        may_change |= {"local_steps", "lr", *options_that_need("local steps")}
    if wrong := sorted(given - may_change):
        was = options.get(wrong[0])
        was = "off" if was is False else "on" if was is True else "none" if was is None else was
        fail(
            f"--{wrong[0].replace('_', '-')}: a resumed run keeps what it has ({was}); leave the "
            "option out, or start a new run"
        )
    if "steps" in given and args.steps < options["steps"]:
        fail(
            f"--steps {args.steps}: the run is to make {options['steps']}, and may make more, "
            "but not fewer"
        )


def _kept(given: set[str], args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the checkpoint that the resumed run keeps."""
    kept = {
        name: value for name, value in options.items() if name not in given and hasattr(args, name)
    }
    if "plan" in given:
        kept = {name: value for name, value in kept.items() if name not in OF_THE_PLAN}
    if given & {"plan", "ranks", "elastic"}:
        kept = {name: value for name, value in kept.items() if name not in OF_AN_ELASTIC_JOB}
    if kept.get("local_steps", args.local_steps) is not None:
        if kept.get("elastic") is not None and detect().launcher == "alone":
            say_line("minidist train: the run was an elastic job and continues without --elastic")
        kept = {name: value for name, value in kept.items() if name not in OF_AN_ELASTIC_JOB}
    return kept


def _options(found: Resumption, args: argparse.Namespace) -> dict[str, Any]:
    """Return the options in the checkpoint, parsed as the command line parses them.

    Raises: ConfigError.
    """
    # here: it imports settings.py, which imports this module
    from minidist.cli.train.arguments import add_arguments

    told = {
        name: value
        for name, value in found.about["options"].items()
        if name not in NEVER_KEPT and hasattr(args, name) and value != ""
    }  # "" means left out
    parser = Parser(prog="minidist train", add_help=False)
    add_arguments(parser)
    words = [
        f"--{name.replace('_', '-')}" if value is True else f"--{name.replace('_', '-')}={value}"
        for name, value in told.items()
        if value is not None and value is not False
    ]
    where = f"--resume {found.run}: the options in the checkpoint {found.folders[0].name}"
    try:
        read = vars(parser.parse_args(words))
    except ConfigError as error:
        fail(f"{where} are none of minidist train: {error}")
    if not isinstance(told.get("steps"), int):
        fail(f"{where} do not say how many steps the run is to make; take an older checkpoint")
    for name, value in told.items():
        if value is not None and (type(value), value) != (type(read.get(name)), read.get(name)):
            fail(f"{where} are none of minidist train: {name} is {value!r}")
    return told


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that define a run, for its checkpoints.

    The path of the data is made absolute.
    """
    options = {
        name: value
        for name, value in vars(args).items()
        if name not in NEVER_KEPT and (value is None or isinstance(value, str | int | float))
    }
    return options | {"data": args.data if args.data in NAMED else os.path.abspath(args.data)}


def text_digest(text: Text) -> str:
    """Return the digest of a text, in hexadecimal."""
    digest = hashlib.sha256(text.symbols.encode())
    for ids in (text.train, text.validation):
        digest.update(ids.astype("<i4").data)
    return digest.hexdigest()


def _find(place: Path) -> Resumption:
    """Return the checkpoints that `place` names. Raises: ConfigError if none can be used."""
    asked = f"--resume {place}"
    try:
        if step_of(place) is not None:
            folders = [
                place,
                *(
                    older
                    for older in reversed(checkpoints(place.parent))
                    if (step_of(older) or 0) < (step_of(place) or 0)
                ),
            ]
        else:
            folders = checkpoints(place)[::-1]
    except OSError as error:
        fail(f"{asked}: {error.strerror}")
    problems: list[str] = []
    for folder in folders:
        try:
            about = read_manifest(folder)["about"]
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if not {"options", "metrics", "data"} <= about.keys():
            fail(
                f"{asked}: {folder} was saved by another program than minidist train; load it "
                "with Trainer.load"
            )
        try:
            require_told(folder, about, "plan", "ranks", "config", "steps_done")
            require_run(folder, about)
            GPTConfig.of(about["config"])
        except (CheckpointError, ConfigError) as error:
            problems.append(str(error))
            continue
        break
    else:
        fail(
            f"{asked}: "
            f"{problems[0] if problems else 'there is no complete checkpoint; train with --save-every'}"
        )
    return Resumption(folder.parent, folders[len(problems) :], about, problems)
