"""The options of `minidist train` (arguments.py), checked and converted to plan, model and data."""

import argparse
import os
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from minidist.cli.train.from_published import load_data, origin, published_config
from minidist.cli.train.rate import check_rate, lr_options, warmup_steps
from minidist.cli.train.resume import (
    OF_AN_ELASTIC_JOB,
    Resumption,
    options_of,
    resumed,
    text_digest,
)
from minidist.comm.cost.bucket_size import best_bucket_bytes
from minidist.comm.group import Group
from minidist.comm.records import check_alike, hand_out_record
from minidist.console import fail, plural, require_memory
from minidist.data import text
from minidist.device.backend import dtype, module_for
from minidist.errors import ConfigError, MismatchError
from minidist.files import check_writable
from minidist.nn import GPTConfig, MixtureConfig
from minidist.observe.room import training_bytes
from minidist.parallel.data.accumulation import passes_until
from minidist.parallel.hybrid.hybrid import OPTIMIZERS, Plan
from minidist.parallel.memory.activations import chosen, ways_of
from minidist.parallel.memory.disk import writable
from minidist.parallel.pipeline.schedules import UPDATING
from minidist.parallel.precision.mixed_precision import check_dtype
from minidist.parallel.state.manifest import checkpoints
from minidist.parallel.step.step import Batch
from minidist.reading import Rank, read_json, require

MIXTURE_OPTIONS = {
    "top_k": "top_k",
    "capacity": "capacity",
    "gate_noise": "noise",
    "balance": "balance",
    "balance_weight": "balance_weight",
    "bias_rate": "bias_rate",
    "shared_experts": "shared",
    "expert_width": "hidden",
    "node_limit": "node_limit",
    "expert_nodes": "nodes",
    "expert_placement": "placement",
}
"""Options that are fields of MixtureConfig, in addition to --experts; the last two are words, read by
mixture_of."""

AUTO = "auto"
"""The value of --save-every and --bucket-bytes for which the value is computed."""

OF_THE_LAUNCHER = ("ranks", "cores", "memory_limit", "command", "given")
"""Options that our launcher does not pass on to the ranks that it starts."""

OF_A_RANK = ("data", "expert_placement", "offload_dir", "threads")
"""Options that may differ between ranks: paths (their contents are compared), and threads."""


class _ExpertsOfRun(msgspec.Struct):
    placement: list[list[Rank]] | None = None


class _PlacementOfRun(msgspec.Struct):
    """The fields of a run's metrics.json on its experts."""

    experts: _ExpertsOfRun = msgspec.field(default_factory=_ExpertsOfRun)


@dataclass(frozen=True)
class Settings:
    """Checked options, with the text and the model's sizes.

    Equal on all ranks, except for `begun`.
    """

    args: argparse.Namespace
    text: text.Text
    config: GPTConfig
    out: Path
    resume: Resumption | None = None
    begun: float = field(default_factory=time.monotonic, compare=False)

    def require_alike(self, world: Group) -> None:
        """Raise ConfigError if the text or the options that define a run differ between its ranks.

        Every rank calls it.

        Raises:  ConfigError, the same line on every rank: which rank has what.
        """
        symbols = len(self.text.train) + len(self.text.validation)
        digest = text_digest(self.text)[:16]
        parts: dict[str, Any] = {"the text": f"{symbols:,} symbols with digest {digest}"}
        options = options_of(self.args)
        for name in ("verify", "why"):  # not options of the run, but all ranks take part in them
            options[name] = getattr(self.args, name)
        for name in options.keys() - {*OF_A_RANK}:
            parts[f"--{name.replace('_', '-')}"] = options[name]
        try:
            check_alike(
                world,
                parts,
                advice="give every rank the same text and options; `python` is "
                "another text in another version of CPython",
            )
        except MismatchError as error:
            raise ConfigError(f"the ranks disagree (MismatchError): {error}") from error

    def training_batch(self, step: int) -> Batch:
        """Return the global batch of step `step`, which depends only on seed and step."""
        args = self.args
        return text.batch(
            self.text.train, step, batch=args.batch, context=args.context, seed=args.seed
        )

    def validation_batches(self) -> list[Batch]:
        """Return held-out text in order, in global batches: at most --validate sequences."""
        inputs, targets = (
            rows[: self.args.validate]
            for rows in text.windows(self.text.validation, context=self.args.context)
        )
        size = self.args.batch
        return [
            (inputs[at : at + size], targets[at : at + size]) for at in range(0, len(inputs), size)
        ]

    def plan(self, size: int) -> Plan:
        """Return the plan for a job of `size` ranks: the options named like fields of Plan, over
        the axes of --plan.

        An elastic job of fewer ranks keeps the inner axes.
        """
        plan = Plan.parse(self.args.plan) if self.args.plan else Plan(dp=size)
        inner = plan.size // plan.dp
        if self.args.elastic and size < plan.size and size % inner == 0:
            plan = replace(plan, dp=size // inner)
        args = self.args
        named = len(args.devices.split(",")) if args.devices else 2
        given: dict[str, Any] = {
            "replicas": args.replicas or (named if args.strategy == "data-parallel" else 1)
        }
        if args.staleness is not None:  # otherwise Plan's default
            given["staleness"] = None if args.staleness < 0 else args.staleness
        if args.elastic and plan.copies == 1:
            given["compress"] = "none"  # only one rank is left on the data axis
        plan = replace(plan, **{**plan_options(args), **given})
        if plan.local_steps is not None and args.batch < plan.workers:
            fail(
                f"--batch {args.batch}: with --local-steps each of {plan.workers} ranks trains "
                f"on its own sequences; give at least {plan.workers}"
            )
        return plan

    def plan_on(self, world: Group) -> Plan:
        """Return the plan for the ranks of a job that have joined.

        With --bucket-bytes auto the cost of their link decides.

        Raises:  ConfigError if the link was not measured.
        """
        plan = self.plan(world.size)
        if self.args.bucket_bytes != AUTO:
            return plan
        if world.link is None:
            fail(
                f"--bucket-bytes auto: what messages over {world.transport.name} cost was not "
                "measured; run `minidist bench calibrate` first, or give a size"
            )
        itemsize = dtype(self.args.dtype if self.args.precision == "fp32" else "float16").itemsize
        return replace(
            plan,
            bucket_bytes=best_bucket_bytes(itemsize * self.config.numbers, world.size, world.link),
        )

    def with_one_folder(self, world: Group) -> "Settings":
        """Return the settings with rank 0's run folder on all ranks, if no option names a folder.

        The default name contains a rank's own clock and process number, so each rank's would
        differ.

        Cost:    without --out a broadcast of its name, counted under `control`.
        """
        if self.args.out or world.size == 1:
            return self
        return replace(self, out=Path(hand_out_record(world, str(self.out))))

    def require_memory(self, plan: Plan, ranks: int, *, processes: int) -> None:
        """Raise MemoryLimitError if these `ranks` ranks of the plan, in `processes` processes,
        cannot fit here."""
        args = self.args
        optimizer: Any = OPTIMIZERS[args.optimizer]
        if args.device == "cpu":
            needed = training_bytes(
                self.config, plan, args.batch, moments=len(optimizer.state_names)
            )
            require_memory(
                f"{plural(args.layers, 'layer')} of width {args.width} on "
                f"{plural(plan.size, 'rank')}",
                needed * ranks // plan.size,
                processes=processes,
            )

    def trainer_options(self) -> dict[str, Any]:
        """Return Trainer's keyword arguments, except the recorder."""
        args = self.args
        return {
            "seed": args.seed,
            "optimizer": args.optimizer,
            "lr": args.lr,
            "lr_schedule": args.lr_schedule,
            "warmup": warmup_steps(args),
            "steps": args.steps,
            "lr_options": lr_options(args),
            "clip": args.clip or None,
            "device": args.device,
            "offload_dir": args.offload_dir,
        }


def plan_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are named like fields of Plan, except those whose default depends on
    others."""
    given = {
        each.name: getattr(args, each.name)
        for each in fields(Plan)
        if each.name not in ("staleness", "replicas", "bucket_bytes") and hasattr(args, each.name)
    }
    if isinstance(getattr(args, "bucket_bytes", None), int):
        given["bucket_bytes"] = args.bucket_bytes
    if args.zero is None:
        given["zero"] = 3 if args.offload == "all" else 0
    return given


def check(args: argparse.Namespace, *, begins: bool = True) -> Settings:
    """Check everything that can be checked before a rank starts; return the settings.

    Args:    begins: the job begins with this process; otherwise its run folder may already hold its
             checkpoints.
    Raises:  ConfigError (DataError, DeviceError, PlanError, ShardError), a message of one line.
    """
    resume = resumed(args, begins=begins)
    if args.plan:
        Plan.parse(args.plan)
    if args.graph and ((args.device, args.precision) != ("cuda", "bf16") or (args.ranks or 1) > 1):
        fail(
            "--graph: a step is captured on a GPU, in bf16, by one process; add --device cuda "
            "--precision bf16 and leave -n out, or leave out --graph"
        )
    module_for(args.device)
    if args.devices and args.device != "cuda":
        fail(
            f"--devices {args.devices}: these are numbers of GPUs; add --device cuda, or leave "
            "--devices out"
        )
    if args.server_device != "same":
        module_for(args.server_device)
    data = load_data(args)
    if resume is not None:
        resume.require_text(data)
    if origin(args) is not None:
        config = published_config(args, resume)
    data.check(context=args.context, vocabulary=args.vocab)
    if origin(args) is None:
        config = model_config(args, data, resume)
    check_batch(args)
    chosen(args.checkpoint_blocks, args.layers)
    check_dtype(args.precision, args.dtype)
    check_ways(args)
    check_saving(args)
    check_verify(args)
    if args.offload == "all":
        writable(args.offload_dir)
    elif args.offload_dir:
        fail(
            f"--offload-dir {args.offload_dir}: only --offload all has files; add it, or leave "
            "--offload-dir out"
        )
    out = out_folder(args.out, resume) if begins else Path(args.out)
    check_writable("--json", args.json)
    return Settings(args, data, config, out, resume)


def model_config(args: argparse.Namespace, data: text.Text, resume: Resumption | None) -> GPTConfig:
    """Return the config that the options describe. Raises: ConfigError."""
    return GPTConfig(
        vocabulary=args.vocab or len(data.symbols),
        context=args.context,
        layers=args.layers,
        width=args.width,
        heads=args.heads,
        positions=args.positions,
        tied=args.tied,
        dropout=args.dropout,
        dtype=args.dtype,
        mixture=mixture_of(args, resume),
        attention_pattern=args.attention_pattern,
    )


def check_batch(args: argparse.Namespace) -> None:
    """Convert --accumulate-tokens to a batch.

    Raises: ConfigError for an impossible batch, rate or division.
    """
    check_rate(args)
    if args.accumulate_tokens is not None:  # a second call changes nothing
        passes = passes_until(args.accumulate_tokens, sequences=args.batch, length=args.context)
        args.batch = args.batch * passes
        args.accumulate = args.accumulate * passes
    for option in ("accumulate", "microbatches"):
        if (getattr(args, option) or 1) > args.batch:
            fail(
                f"--{option} {getattr(args, option)}: a step has "
                f"{plural(args.batch, 'sequence')}; choose at most as many, or a larger --batch"
            )


def check_ways(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that do not work together."""
    if args.staleness is not None and not args.asynchronous:
        fail(
            f"--staleness {args.staleness}: synchronous workers are never ahead; add "
            "--asynchronous, or leave it out"
        )
    if args.local_steps is not None and (rest := args.steps % args.local_steps):
        every = args.local_steps
        ways = " or ".join(
            str(steps) for steps in (args.steps - rest, args.steps - rest + every) if steps
        )
        fail(
            f"--steps {args.steps}: with --local-steps {every} ranks exchange weights after each "
            f"{every} steps, and the last {rest} would have no effect; choose {ways}"
        )
    if args.schedule in UPDATING and args.clip:
        fail(
            f"--schedule {args.schedule}: each stage updates separately after each microbatch, "
            "and no rank knows the norm of all gradients; add --clip 0"
        )
    if args.why and (
        args.elastic or args.asynchronous or args.graph or args.strategy == "data-parallel"
    ):
        fail(
            "--why: explains a step that all ranks make together, each in a process or thread "
            "of its own; leave out --elastic, --asynchronous, --graph and --strategy "
            "data-parallel, or --why"
        )
    if args.watch and args.quiet:
        fail("--watch: --quiet prints nothing; leave out one of the two")


def check_saving(args: argparse.Namespace) -> None:
    """Raise ConfigError for options of saving that do not work together."""
    if args.asynchronous and args.save_every:
        fail(
            "--save-every: workers of asynchronous servers are never at the same step; leave "
            "out --asynchronous or --save-every"
        )
    if args.save_every == AUTO and not args.interruptions_per_day:
        fail(
            "--save-every auto: how often to save follows from how often the run is "
            "interrupted; add --interruptions-per-day N, or give a number of steps"
        )
    if args.interruptions_per_day and not args.save_every:
        fail(
            "--interruptions-per-day: nothing is saved without --save-every; add --save-every "
            "auto, or leave it out"
        )
    if args.save_async and not args.save_every:
        fail(
            "--save-async: nothing is saved without --save-every; add it, or leave --save-async out"
        )


def check_verify(args: argparse.Namespace) -> None:
    """Raise ConfigError for --verify if the run's results cannot equal those of one process."""
    if not args.verify:
        return
    if args.local_steps is not None:
        fail(
            "--verify: ranks that exchange weights seldom do not equal a run of one process; "
            "leave out "
            "--local-steps or --verify"
        )
    if args.compress != "none":
        fail(
            "--verify: compressed gradients are not those of one process; leave out --compress "
            "or --verify"
        )
    if args.asynchronous:
        fail(
            "--verify: an asynchronous run equals no run of one process; leave out "
            "--asynchronous or --verify"
        )
    if args.schedule in UPDATING:
        fail(
            f"--verify: under --schedule {args.schedule} stages use older weights, which one "
            "process does not; leave out --verify, or choose 1f1b"
        )
    if "8bit" in ways_of(args.keep_activations) and (
        args.dtype != "float64" or args.activation_memory
    ):
        fail(
            "--verify: float32's rounding and measured choices of blocks change which numbers "
            "8bit rounds up; add --dtype float64 and --checkpoint-blocks, or leave 8bit or "
            "--verify out"
        )


def out_folder(name: str | None, resume: Resumption | None) -> Path:
    """Return the run folder.

    Raises: ConfigError if it cannot be written, or holds the checkpoints of another run.
    """
    out = Path(name or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    check_folder("--out", out)
    if (resume is None or os.path.realpath(out) != os.path.realpath(resume.run)) and checkpoints(
        out
    ):
        fail(
            f"--out {out}: holds checkpoints of a run; continue with --resume {out}, or name "
            "another folder"
        )
    return out


def mixture_of(args: argparse.Namespace, resume: Resumption | None = None) -> MixtureConfig | None:
    """Return the mixture of experts that the options describe, or None.

    Raises: ConfigError without --experts.
    Args:    resume: the run that continues: its experts keep their nodes, and their placement
             unless --expert-placement is given again.
    """
    given = {
        option: value
        for option in MIXTURE_OPTIONS
        if (value := getattr(args, option, None)) is not None
    }
    if args.experts is None:
        if given:
            fail(
                f"--{next(iter(given)).replace('_', '-')} is for a mixture of experts; add "
                "--experts 8, or leave it out"
            )
        return None
    if "expert_nodes" in given:
        if "node_limit" not in given:
            fail(
                "--expert-nodes: the number of nodes for the experts matters only with a limit; "
                "add --node-limit 1, or leave it out"
            )
        counts = tuple(map(int, given["expert_nodes"].split(",")))
        given["expert_nodes"] = counts if len(counts) > 1 else counts[0]
    if resume is not None:
        before = resume.about["config"]["mixture"]
        given["expert_nodes"] = before.get("nodes")
    if resume is not None and "expert_placement" not in getattr(args, "given", ()):
        given["expert_placement"] = before.get("placement")
    elif "expert_placement" in given:
        given["expert_placement"] = placement_of(Path(given["expert_placement"]))
    return MixtureConfig(
        experts=args.experts, **{MIXTURE_OPTIONS[name]: value for name, value in given.items()}
    )


def placement_of(run: Path) -> list[list[int]]:
    """Return the order of the experts of each layer that a run measured.

    Raises: ConfigError if it measured none.
    """
    asked = f"--expert-placement {run}"
    try:
        metrics = read_json(run / "metrics.json", member=True)
    except (OSError, ConfigError) as error:
        fail(
            f"{asked}: no metrics.json of a run can be read there ({error}); name the folder of "
            "a finished run"
        )
    found = None
    with suppress(ConfigError):
        found = require(metrics, _PlacementOfRun).get("experts", {}).get("placement")
    if not found:
        fail(
            f"{asked}: that run measured no placement: its experts were not divided over several "
            "nodes; train with --plan ep=2 or more on two nodes first"
        )
    return found  # type: ignore[no-any-return]


def check_folder(option: str, folder: Path) -> None:
    """Raise ConfigError if files cannot be written in `folder`, or in the nearest existing folder
    above it."""
    there = next(place for place in (folder, *folder.parents, Path()) if os.path.exists(place))
    if not there.is_dir():
        fail(f"{option} {folder}: {there} is not a folder")
    check_writable(option, there / "metrics.json")


def as_arguments(args: argparse.Namespace) -> list[str]:
    """Return the command-line words that give `args` again, without the number of ranks to start
    and their limits.

    For a resumed run only what was given again: each rank reads the rest from the checkpoint.
    """
    words: list[str] = []
    for name, value in vars(args).items():
        if name in OF_THE_LAUNCHER or value is None or value is False or callable(value):
            continue
        if name == "steps" and name not in getattr(
            args, "given", ()
        ):  # each rank chooses, as fitting.py says
            continue
        if args.resume is not None and name not in (*args.given, *OF_AN_ELASTIC_JOB, "out"):
            continue
        option = "--" + name.replace("_", "-")
        words.append(option if value is True else f"{option}={value}")
    return words
