"""The options of `minidist train`, and what they mean once they are checked."""

import argparse
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minidist.backend import module_for
from minidist.cli.common import fail, number_of_bytes, positive
from minidist.data import text
from minidist.launch.transports import PROCESSES
from minidist.nn import GPTConfig
from minidist.parallel.activations import chosen
from minidist.parallel.common.disk import writable
from minidist.parallel.common.update import Batch
from minidist.parallel.hybrid import OPTIMIZERS, SCHEDULES, Plan
from minidist.parallel.mixed_precision import check_dtype
from minidist.parallel.plan import OFFLOADS, PRECISIONS, STRATEGIES, ZERO_STAGES
from minidist.parallel.schedules import ORDERS

VALIDATION_ROWS = 512
"""Sequences of held-out text that the validation loss is taken over, at most."""

PLAN_OPTIONS = (
    "zero",
    "shard",
    "keep_gathered",
    "accumulate",
    "schedule",
    "microbatches",
    "precision",
    "strategy",
    "servers",
    "asynchronous",
    "checkpoint_blocks",
    "offload",
    "device_memory",
)
"""Options that are fields of Plan."""

STALENESS = 2
"""How many steps an asynchronous worker may be ahead, unless told otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `minidist train`."""
    job = parser.add_argument_group("the job")
    job.add_argument("-n", "--ranks", type=positive, metavar="N",
                     help="start N ranks here (without mpirun or another launcher)")
    job.add_argument("--transport", choices=PROCESSES,
                     help="how ranks exchange bytes (default: mpi under mpirun, else sockets)")
    job.add_argument("--plan", metavar="dp=N,pp=N,tp=N",
                     help="how the job is cut: ranks along the data, pipeline and tensor axes (default: dp=all)")
    job.add_argument("--zero", type=int, choices=ZERO_STAGES,
                     help="divide among ranks: 1 the optimizer's state, 2 gradients too, 3 parameters too (default: 0; "
                          "with --offload all 3)")
    job.add_argument("--shard", type=positive, metavar="N",
                     help="with --zero: N neighbours share one copy of the state, and every N others have a copy of "
                          "their own: hybrid sharding (default: all ranks share one)")
    job.add_argument("--keep-gathered", action="store_true",
                     help="with --zero 3: keep weights from forward to backward, a third less traffic for more memory")
    job.add_argument("--strategy", choices=STRATEGIES, default="ddp",
                     help="ddp: equal ranks; data-parallel: one process, a thread a replica; parameter-server: the "
                          "last ranks keep the weights for the others (default: ddp)")
    job.add_argument("--replicas", type=positive, metavar="R", help="of data-parallel: its devices (default: 2)")
    job.add_argument("--servers", type=positive, default=1, metavar="S",
                     help="of parameter-server: ranks that are servers (default: 1)")
    job.add_argument("--asynchronous", action="store_true",
                     help="of parameter-server: update by each worker's gradient as it comes")
    job.add_argument("--staleness", type=int, metavar="K",
                     help="how many steps an asynchronous worker may be ahead; below 0: any number (default: 2)")
    job.add_argument("--accumulate", type=positive, default=1, metavar="A",
                     help="take each rank's sequences in A passes, for less activation memory (default: 1)")
    job.add_argument("--schedule", choices=list(ORDERS), default="1f1b",
                     help="who computes what when, with pp=2 or more (default: 1f1b)")
    job.add_argument("--microbatches", type=positive, metavar="M",
                     help="with pp=2 or more: in how many pieces a pass goes through the pipeline (default: 4 a stage)")
    job.add_argument("--checkpoint-blocks", nargs="?", const="all", default="none", metavar="WHICH",
                     help="keep of blocks their inputs alone and compute the rest again in backward: all (default with "
                          "the option), numbers as in 0,2, or of attention the scores")
    job.add_argument("--offload", choices=OFFLOADS, default="none",
                     help="keep off the device: the optimizer's state and update, on the host; or all that lasts, on "
                          "disk (default: none)")
    job.add_argument("--offload-dir", metavar="DIR",
                     help="where --offload all puts its files, which vanish with the run (default: with the system's "
                          "temporary files)")
    job.add_argument("--device-memory", type=number_of_bytes, metavar="SIZE",
                     help="the most that a rank's device may hold, as 64MiB; what passes it is an error (default: no "
                          "limit)")
    job.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where arrays live (default: cpu)")
    job.add_argument("--threads", type=positive, metavar="N",
                     help="BLAS threads a rank (default: this machine's cores // ranks on it)")
    data = parser.add_argument_group("the data")
    data.add_argument("--data", default="python", metavar="PATH",
                      help="a text file, a folder of them, `shakespeare`, or `python`: the reference of every CPython")
    data.add_argument("--batch", type=positive, default=16, metavar="SEQUENCES",
                      help="sequences a step, of the whole job (default: 16)")
    data.add_argument("--context", type=positive, default=128, metavar="TOKENS",
                      help="tokens a sequence (default: 128)")
    model = parser.add_argument_group("the model")
    model.add_argument("--layers", type=positive, default=4, metavar="N", help="blocks (default: 4)")
    model.add_argument("--width", type=positive, default=128, metavar="N", help="model width (default: 128)")
    model.add_argument("--heads", type=positive, default=4, metavar="N", help="attention heads (default: 4)")
    model.add_argument("--vocab", type=positive, metavar="N",
                       help="embedding rows, at least the data's symbols; the rest unused (default: the symbols)")
    model.add_argument("--positions", choices=["learned", "rotary"], default="rotary",
                       help="how a token knows its place (default: rotary)")
    model.add_argument("--tied", action="store_true", help="one matrix for embedding and output")
    model.add_argument("--dropout", type=fraction, default=0.0, metavar="RATE", help="(default: 0)")
    model.add_argument("--dtype", choices=["float64", "float32"], default="float32", help="(default: float32)")
    model.add_argument("--precision", choices=PRECISIONS, default="fp32",
                       help="weights and gradients as --dtype says (fp32), or in bf16 or fp16 beside float32 master "
                       "weights; fp16 with a loss scale; fp8: bf16, and products of one byte (default: fp32)")
    training = parser.add_argument_group("the training")
    training.add_argument("--steps", type=positive, default=500, metavar="K", help="optimizer steps (default: 500)")
    training.add_argument("--seed", type=int, default=0, metavar="S", help="of weights and batches (default: 0)")
    training.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(default: adamw)")
    training.add_argument("--lr", type=positive_number, default=4e-3, metavar="RATE", help="peak rate (default: 0.004)")
    training.add_argument("--lr-schedule", choices=SCHEDULES, default="cosine",
                          help="after a warm-up of a twentieth of the steps (default: cosine)")
    training.add_argument("--clip", type=not_negative, default=1.0, metavar="NORM",
                          help="bound of the gradients' norm; 0: none (default: 1)")
    result = parser.add_argument_group("the result")
    result.add_argument("--out", metavar="DIR", help="run folder (default: runs/DATE-TIME)")
    result.add_argument("--json", metavar="FILE", help="also write metrics.json here")
    result.add_argument("--verify", action="store_true",
                        help="then repeat the first 20 steps on one process and compare the weights")
    result.add_argument("--quiet", action="store_true", help="print nothing")


def positive_number(text: str) -> float:
    """A finite number above 0."""
    value = not_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def fraction(text: str) -> float:
    """A number in [0, 1)."""
    value = not_negative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction in [0, 1)")
    return value


@dataclass(frozen=True)
class Settings:
    """Options that were checked, and what was read by them. Equal on all ranks."""

    args: argparse.Namespace
    text: text.Text
    config: GPTConfig
    out: Path

    def training_batch(self, step: int) -> Batch:
        """The global batch of step `step`: by seed and step alone."""
        args = self.args
        return text.batch(self.text.train, step, batch=args.batch, context=args.context, seed=args.seed)

    def validation_batches(self) -> list[Batch]:
        """Held-out text, in order, in global batches."""
        inputs, targets = (rows[:VALIDATION_ROWS] for rows in
                           text.windows(self.text.validation, context=self.args.context))
        size = self.args.batch
        return [(inputs[at:at + size], targets[at:at + size]) for at in range(0, len(inputs), size)]

    def plan(self, size: int) -> Plan:
        """The plan for a job of `size` ranks."""
        plan = Plan.parse(self.args.plan) if self.args.plan else Plan(dp=size)
        args = self.args
        chosen = {option: getattr(args, option) for option in PLAN_OPTIONS}
        if args.zero is None:
            chosen["zero"] = 3 if args.offload == "all" else 0
        ahead = STALENESS if args.staleness is None else args.staleness
        return replace(plan, replicas=args.replicas or 1 + (args.strategy == "data-parallel"),
                       staleness=None if ahead < 0 else ahead, **chosen)

    def trainer_options(self) -> dict[str, Any]:
        """What Trainer takes beside plan, config and world."""
        args = self.args
        return {"seed": args.seed, "optimizer": args.optimizer, "lr": args.lr, "lr_schedule": args.lr_schedule,
                "warmup": -(-args.steps // 20), "steps": args.steps, "clip": args.clip or None,
                "device": args.device, "offload_dir": args.offload_dir}


def check(args: argparse.Namespace) -> Settings:
    """Everything that can be found wrong before a rank starts.

    Raises:  ConfigError (DataError, DeviceError, PlanError, ShardError) in one line.
    """
    if args.plan:
        Plan.parse(args.plan)
    module_for(args.device)
    data = text.load(args.data)
    data.check(context=args.context, vocabulary=args.vocab)
    config = GPTConfig(vocabulary=args.vocab or len(data.symbols), context=args.context, layers=args.layers,
                       width=args.width, heads=args.heads, positions=args.positions, tied=args.tied,
                       dropout=args.dropout, dtype=args.dtype)
    chosen(args.checkpoint_blocks, args.layers)
    check_dtype(args.precision, args.dtype)
    if args.staleness is not None and not args.asynchronous:
        fail(f"--staleness {args.staleness}: synchronous workers are never ahead; add --asynchronous, or leave it out")
    if args.asynchronous and args.verify:
        fail("--verify: an asynchronous run equals no run of one process; leave out --asynchronous or --verify")
    if args.offload == "all":
        writable(args.offload_dir)
    elif args.offload_dir:
        fail(f"--offload-dir {args.offload_dir}: only --offload all has files; add it, or leave --offload-dir out")
    out = Path(args.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S"))
    check_writable("--out", out / "metrics.json")
    if args.json:
        check_writable("--json", Path(args.json), folder_must_exist=True)
    return Settings(args, data, config, out)


def check_writable(option: str, file: Path, *, folder_must_exist: bool = False) -> None:
    """Fail if `file` could not be written, its missing folders made first; leaves nothing behind."""
    if file.is_dir():
        fail(f"{option} {file}: is a folder; name a file")
    folder = file.parent
    if folder_must_exist and not folder.exists():
        fail(f"{option} {file}: there is no folder {folder}")
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        fail(f"{option} {file.parent}: {folder} is not a folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        fail(f"{option} {file.parent}: no permission to write in {folder}")


def as_arguments(args: argparse.Namespace) -> list[str]:
    """The command-line words that give `args` again, but for how many ranks to start."""
    words: list[str] = []
    for name, value in vars(args).items():
        if name in ("ranks", "command") or value is None or value is False or callable(value):
            continue
        option = "--" + name.replace("_", "-")
        words.append(option if value is True else f"{option}={value}")
    return words
