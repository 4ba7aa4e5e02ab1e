"""The options of `minidist bench`: one function per WHAT."""

import argparse

from minidist.bench import calibrate, collectives, overlap, overlap_step
from minidist.bench.compress import command as compress
from minidist.bench.step.device import PRECISIONS
from minidist.bench.step.ranks import MODELS, Model, stages
from minidist.bench.what_if import change
from minidist.comm.cost.link_model import profile_path
from minidist.console import (
    counts,
    number_of_bytes,
    picture,
    positive,
    positive_number,
    rank_count,
    sizes,
    whole_number,
)
from minidist.parallel.pipeline.schedules import ORDERS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist bench`."""
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for verb in collectives.VERBS.values():
        _add_collective(
            what.add_parser(
                verb.title, help="bus bandwidth over message size, as nccl-tests prints it"
            ),
            verb,
        )
    _add_step(what.add_parser("step", help="tokens/s and peak memory of a training step"))
    _add_overlap(
        what.add_parser("overlap", help="how much of an all-reduce hides behind matrix products")
    )
    _add_overlap_step(
        what.add_parser(
            "overlap-step", help="share of a step's communication hidden by computation"
        )
    )
    compress.add_arguments(
        what.add_parser(
            "compress",
            help="time to a loss by compression scheme and bandwidth; or when not to compress",
        )
    )
    _add_calibrate(
        what.add_parser(
            "calibrate",
            help="what messages cost, for auto, and computation, for simulate",
            description="Measure this machine: its links, and its computation. (To fit "
            "simulate's model to steps measured elsewhere: minidist calibrate.)",
        )
    )
    _add_save(
        what.add_parser(
            "save", help="checkpoints, blocking and in the background, beside PyTorch's"
        )
    )
    _add_kernels(
        what.add_parser(
            "kernels", help="each rung of each CUDA kernel beside PyTorch, on a GPU; or counted"
        )
    )
    for command in what.choices.values():
        command.add_argument("--json", metavar="FILE", help="write the figures for machines")
        command.add_argument("--figure", type=picture, metavar="FILE.png", help="draw the figures")


def _add_collective(parser: argparse.ArgumentParser, verb: collectives.Verb) -> None:
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=sizes("1KiB:64MiB"),
        metavar="FROM:TO",
        help="doubling; or a,b,c (1KiB:64MiB)",
    )
    parser.add_argument(
        "-n", "--ranks", type=counts, default=[2, 4], metavar="N,N", help="rank counts (2,4)"
    )
    parser.add_argument(
        "--only",
        metavar="NAME,NAME",
        help="contenders, of "
        + ", ".join((*collectives.OURS, *verb.peers))
        + "; shm:ring takes ours by that algorithm (else auto's)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="K", help="turns each contender gets (5)"
    )


def _add_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n",
        "--ranks",
        type=counts,
        metavar="N,N",
        help="rank counts (1,2; with --zero 2,4; with --plan the plan's)",
    )
    parser.add_argument(
        "--plan",
        action="append",
        default=[],
        metavar="pp=N,tp=N",
        help="how a job is cut, as `minidist train` takes it; several times for several plans, "
        "each beside PyTorch's: DDP, torch.distributed.pipelining, DTensor",
    )
    parser.add_argument("--schedule", choices=list(ORDERS), help="of plans with pp (1f1b)")
    parser.add_argument(
        "--microbatches", type=positive, metavar="M", help="of plans with pp (four a stage)"
    )
    parser.add_argument(
        "--zero",
        type=stages,
        metavar="S,S",
        help="ZeRO stages, of 0 (DDP), 1, 2, 3, each beside PyTorch's: DDP, "
        "ZeroRedundancyOptimizer, FSDP",
    )
    parser.add_argument(
        "--rounds", type=positive, default=4, metavar="K", help="turns each contender gets (4)"
    )
    parser.add_argument("--steps", type=positive, default=5, metavar="K", help="steps a turn (5)")
    parser.add_argument(
        "--transport",
        choices=("auto", "tcp", "shm", "sockets"),
        default="auto",
        metavar="NAME",
        help="ours, between ranks: auto, tcp or shm (auto)",
    )
    parser.add_argument(
        "--model", choices=list(MODELS), help="its sizes, but for those given; one process"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="time one process on it, beside PyTorch eager and "
        "torch.compile, under the measured roofline (with --model: cpu)",
    )
    parser.add_argument("--precision", choices=list(PRECISIONS), help="of one process (fp32)")
    parser.add_argument(
        "--graph",
        action="store_true",
        help="beside it ours again, the step captured as one CUDA "
        "graph (with --device cuda --precision bf16)",
    )
    _add_model(parser, Model())
    # None: the value of --model, or of the default model
    parser.set_defaults(**dict.fromkeys(vars(Model())))


def _add_overlap(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=rank_count, default=2, metavar="N", help="ranks (2)")
    parser.add_argument(
        "--only", metavar="NAME,NAME", help="contenders, of " + ", ".join(overlap.CONTENDERS)
    )
    parser.add_argument(
        "--bytes",
        type=number_of_bytes,
        default=4 << 20,
        metavar="SIZE",
        help="to all-reduce (4MiB)",
    )
    _add_links(parser, bandwidth=125 * 10**6)  # a gigabit network
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="K", help="turns each contender gets (5)"
    )


def _add_overlap_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--strategy",
        default=",".join(overlap_step.STRATEGIES),
        metavar="NAME,NAME",
        help="of " + ", ".join(overlap_step.STRATEGIES) + " (all)",
    )
    parser.add_argument("-n", "--ranks", type=rank_count, default=2, metavar="N", help="ranks (2)")
    parser.add_argument(
        "--only", metavar="NAME,NAME", help="links, of " + ", ".join(overlap_step.LINKS)
    )
    parser.add_argument(
        "--bucket",
        type=number_of_bytes,
        default=512 << 10,
        metavar="SIZE",
        help="largest size of a bucket, in bytes (512KiB)",
    )
    _add_links(parser, bandwidth=500 * 10**6)
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="K", help="turns each contender gets (3)"
    )
    parser.add_argument("--steps", type=positive, default=5, metavar="K", help="steps a turn (5)")
    parser.add_argument(
        "--why",
        action="store_true",
        help="explain a step of each: its critical path, the lower bound, and each millisecond in "
        "which a rank stood still, with its call, line and cause",
    )
    parser.add_argument(
        "--what-if",
        type=change,
        action="append",
        default=[],
        metavar="CHANGE",
        help="with --why: predict the step under a change from the recorded one, then run it: "
        "bucket=1MiB, alpha=1e-4, bandwidth=250MB, ahead=2 (prefetch of zero3), with commas for "
        "several at once; order=forward and priority=on are predicted alone; several times for "
        "several changes",
    )
    _add_model(parser, overlap_step.MODEL)


def _add_links(parser: argparse.ArgumentParser, *, bandwidth: int) -> None:
    parser.add_argument(
        "--alpha",
        type=positive_number,
        default=50e-6,
        metavar="SECONDS",
        help="latency of the delayed links (5e-5)",
    )
    parser.add_argument(
        "--bandwidth",
        type=number_of_bytes,
        default=bandwidth,
        metavar="SIZE",
        help=f"bytes a second of the delayed links ({bandwidth // 10**6}MB)",
    )


_MODEL = {
    "layers": "blocks",
    "width": "model width",
    "heads": "attention heads",
    "context": "tokens a sequence",
    "batch": "sequences a rank",
    "vocab": "embedding rows",
}
"""Help for each field of Model."""


def _add_model(parser: argparse.ArgumentParser, model: Model) -> None:
    for name, value in vars(model).items():
        parser.add_argument(
            f"--{name}", type=positive, default=value, metavar="N", help=f"{_MODEL[name]} ({value})"
        )


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-n", "--ranks", type=counts, default=[2, 4], metavar="N,N", help="rank counts (2,4)"
    )
    parser.add_argument(
        "--only",
        metavar="NAME,NAME",
        help="link classes, of " + ", ".join(calibrate.LINKS) + "; or computation",
    )
    parser.add_argument(
        "--sizes",
        type=sizes,
        default=sizes("256B:4MiB"),
        metavar="FROM:TO",
        help="doubling; or a,b,c (256B:4MiB)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="K", help="turns each link class gets (5)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        help=f"the profile to write ({profile_path()}, where auto finds it)",
    )


def _add_save(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=rank_count, default=2, metavar="N", help="ranks (2)")
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="K", help="turns each contender gets (5)"
    )
    parser.add_argument(
        "--every", type=positive, default=50, metavar="K", help="steps to a save (50)"
    )
    parser.add_argument(
        "--saves",
        type=positive,
        default=500,
        metavar="K",
        help="saves over which the resident memory is watched (500)",
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="on the disk to measure (that of temporary files)"
    )
    _add_model(parser, Model())


def _add_kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="modules of kernels/, or kernels of one (all)"
    )
    parser.add_argument(
        "--count",
        action="store_true",
        help="no GPU needed: count bytes and sectors of each rung on the CPU build, at small sizes",
    )
    parser.add_argument(
        "--peers",
        type=_torch_ways,
        default=list(_TORCH_WAYS.values()),
        metavar="NAME,NAME",
        help="PyTorch's contenders: eager, compile (which takes minutes), or none (eager,compile)",
    )
    parser.add_argument(
        "--rounds", type=positive, default=30, metavar="K", help="turns each contender gets (30)"
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**64 - 1),
        metavar="N",
        help="of the inputs (default: a new one each time)",
    )


_TORCH_WAYS = {"eager": "PyTorch eager", "compile": "torch.compile"}


def _torch_ways(text: str) -> list[str]:
    """Return the peers of a text: 'eager' -> ["PyTorch eager"]; 'none' -> []."""
    names = [] if text == "none" else text.split(",")
    for name in names:
        if name not in _TORCH_WAYS:
            raise argparse.ArgumentTypeError(
                f"{name!r} is no peer; choose of {', '.join(_TORCH_WAYS)}, or none"
            )
    return [_TORCH_WAYS[name] for name in names]
