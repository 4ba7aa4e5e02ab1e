"""`minidist simulate --cluster h100:128x8 --model llama3-70b --plan dp=16,pp=8,tp=8`: a plan on a
cluster not at hand.

    minidist simulate --cluster h100:128x8 --model llama3-70b --batch 1024 --plan dp=16,pp=8,tp=8 --zero 1 \\
        --schedule 1f1b --microbatches 64
    minidist simulate --cluster a100-80g:1x8 --layers 24 --width 2048 --heads 16 --batch 64 --plan dp=8 --zero 3
    minidist simulate … --slow-rank 3:2.0 --slow-link "node1.nic*:4" --figure step.png --trace step.json

The modules that train run on arrays without data; their calls and kernels are then put on one
clock.
"""

import argparse
from contextlib import suppress
from dataclasses import replace
from typing import Any

from minidist.cli.train.arguments import division, experts, memory, pattern
from minidist.cli.train.settings import mixture_of, plan_options
from minidist.console import (
    decimal,
    fail,
    picture,
    plural,
    positive,
    positive_number,
    shown,
    write_json,
    written,
)
from minidist.errors import ConfigError
from minidist.files import check_writable
from minidist.nn import GPTConfig
from minidist.observe.timeline import write_perfetto
from minidist.parallel.hybrid.plan import PRECISIONS, Plan
from minidist.progress import progress
from minidist.simulate.byte_products import multiplying_bytes
from minidist.simulate.cluster import Cluster
from minidist.simulate.failure import describe, require_rank, stalls
from minidist.simulate.models import MODELS, model
from minidist.simulate.one_rank import run_rank
from minidist.simulate.rates import CostProfile, Rates
from minidist.simulate.simulate import simulate
from minidist.terminal import Console

DOES_NOT_FIT = 3
"""The exit status of a plan that does not fit into the devices' memory."""

MOST_TOKENS = 1e18

FLOAT32_GRADIENTS = (
    "gradients in float32 beside weights of two bytes, as Megatron keeps and sends them (only "
    "simulated: training here keeps a gradient in the dtype of its weight)"
)

SIZES = {"layers": 12, "width": 768, "heads": 12, "sequence": 1024, "vocab": 50257}
"""Of a model without a name (those of GPT-2); an option of a model with a name replaces the
name's."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist simulate`."""
    add = parser.add_argument_group("the cluster").add_argument
    add(
        "--cluster",
        required=True,
        metavar="NAME:NODESxDEVICES",
        help="as h100:128x8; FILE:NAME:… for one of yours",
    )
    add(
        "--profile",
        metavar="FILE",
        help="constants that `minidist calibrate` fitted to measured steps",
    )
    add(
        "--slow-rank",
        action="append",
        default=[],
        metavar="RANK:FACTOR",
        help="a straggler: this rank computes FACTOR times as long; may be given several times",
    )
    add(
        "--fail",
        metavar="RANK:SECONDS",
        help="also show how the others wait if this rank fails in the step",
    )
    add(
        "--slow-link",
        action="append",
        default=[],
        metavar="NAME:FACTOR",
        help="a byte takes FACTOR times as long on links of this name, as node3.nic0-out or "
        "node3.*",
    )
    model_arguments(parser)
    add = parser.add_argument_group("the step").add_argument
    add(
        "--batch",
        type=positive,
        required=True,
        metavar="SEQUENCES",
        help="sequences a step, of the whole job",
    )
    add("--precision", choices=PRECISIONS, default="bf16", help="as of train (default: bf16)")
    add(
        "--multiply-bytes",
        action="store_true",
        help="with --precision fp8: what if the GPU multiplied the bytes? Training widens them to "
        "bf16 before each product",
    )
    add(
        "--optimizer",
        choices=("adamw", "adam", "sgd", "rmsprop"),
        default="adamw",
        help="(default: adamw)",
    )
    add("--float32-gradients", action="store_true", help=FLOAT32_GRADIENTS)
    division(parser.add_argument_group("the plan").add_argument)
    memory(parser.add_argument_group("device memory").add_argument)
    add = parser.add_argument_group("the result").add_argument
    add("--tokens", type=tokens_number, metavar="N", help="also what so many tokens take, as 15e12")
    add(
        "--unfolded",
        action="store_true",
        help="a clock for each rank, also for ranks that do exactly the same",
    )
    add("--json", metavar="FILE", help="write all figures here")
    add("--trace", metavar="FILE", help="write some ranks' step here, for https://ui.perfetto.dev")
    add(
        "--figure",
        type=picture,
        metavar="FILE",
        help="draw ranks, memory and axes into a picture (png, svg, pdf)",
    )


def model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name the model, or describe it."""
    add = parser.add_argument_group("the model").add_argument
    add("--model", metavar="NAME", help=f"one of {', '.join(MODELS)}; the options below change it")
    for name, what in (
        ("layers", "blocks"),
        ("width", "model width"),
        ("heads", "attention heads"),
        ("sequence", "tokens a sequence"),
        ("vocab", "embedding rows"),
    ):
        add(
            f"--{name}",
            type=positive,
            metavar="N",
            help=f"{what} (default: the model's, or {SIZES[name]:,})",
        )
    pattern(add)
    experts(parser.add_argument_group("a mixture of experts").add_argument)


def tokens_number(text: str) -> float:
    """Return the value of --tokens: beyond what positive_number takes. Raises:
    ArgumentTypeError."""
    with suppress(ValueError):
        if 0 < (tokens := decimal(text)) < MOST_TOKENS:
            return tokens
    raise argparse.ArgumentTypeError(f"{shown(text)} is not a number above 0; write 15e12")


def run(args: argparse.Namespace) -> int:
    """Simulate the plan, and print the report. Returns: 0, or DOES_NOT_FIT. Raises: ConfigError."""
    from minidist.cli.simulate_report import print_simulation

    for option in ("json", "trace", "figure"):
        check_writable(f"--{option}", getattr(args, option))
    cluster = Cluster.parse(args.cluster)
    config = config_of(args)
    fails = _factors("--fail", [args.fail] if args.fail else [])
    profile = CostProfile.load(args.profile) if args.profile else None
    cluster = profile.applied(cluster) if profile else cluster
    plan = replace(
        Plan.parse(args.plan) if args.plan else Plan(dp=cluster.size), **plan_options(args)
    )
    stragglers = {
        int(rank): factor for rank, factor in _factors("--slow-rank", args.slow_rank).items()
    }
    for rank in fails:
        require_rank(int(rank), plan.size)
    if args.multiply_bytes and (plan.precision != "fp8" or cluster.device.kind == "cpu"):
        raise ConfigError("--multiply-bytes asks about fp8 on a GPU; add --precision fp8")
    with progress(f"simulating {plural(plan.size, 'rank')}"):
        found = simulate(
            plan,
            config,
            cluster,
            batch=args.batch,
            stragglers=stragglers,
            slow_links=_factors("--slow-link", args.slow_link),
            folded=not args.unfolded,
            optimizer=args.optimizer,
            float32_gradients=args.float32_gradients,
            rates=Rates.of(cluster.device, profile) if profile else None,
            traces=multiplying_bytes if args.multiply_bytes else run_rank,
        )
    # before the report: a moment behind the step's end is refused, and nothing is printed
    failures = [
        describe(found, stalls(found, int(rank), seconds)) for rank, seconds in fails.items()
    ]
    print_simulation(
        Console(highlight=False), found, args.tokens, multiplies_bytes=args.multiply_bytes
    )
    for failure in failures:
        Console(highlight=False).print(failure, markup=False)
    if args.json:
        asked = {"multiply_bytes": True} if args.multiply_bytes else {}
        write_json(args.json, found.as_json(args.tokens) | asked)
    if args.trace:
        from minidist.simulate.draw import shown_ranks
        from minidist.simulate.timelines import timelines

        with written("--trace", args.trace) as draft:
            write_perfetto(draft, timelines(found, shown_ranks(found)))
    if args.figure:
        from minidist.simulate.draw import draw_simulation

        with written("--figure", args.figure) as draft:
            draw_simulation(draft, found)
    return 0 if found.fits else DOES_NOT_FIT


def config_of(args: argparse.Namespace) -> GPTConfig:
    """Return the model that the options name or describe. Raises: ConfigError."""
    given: dict[str, Any] = {
        "vocabulary" if name == "vocab" else "context" if name == "sequence" else name: size
        for name in SIZES
        if (size := getattr(args, name) or not args.model and SIZES[name])
    }
    if (mixture := mixture_of(args)) is not None:
        given["mixture"] = mixture
    if args.attention_pattern is not None:
        given["attention_pattern"] = args.attention_pattern
    return (
        replace(model(args.model), **given)
        if args.model
        else GPTConfig(positions="rotary", **given)
    )


def _factors(option: str, texts: list[str]) -> dict[str, float]:
    """Return {"3": 2.0} of ["3:2.0"]. Raises: ConfigError."""
    found = {}
    for text in texts:
        name, colon, factor = text.rpartition(":")
        try:
            found[name] = positive_number(factor)
        except argparse.ArgumentTypeError:
            colon = ""
        if not colon or not name or option != "--slow-link" and not name.isdecimal():
            example = "node3.nic0-out:2.0" if option == "--slow-link" else "3:2.0"
            what = (
                "when it fails, in seconds" if option == "--fail" else "how many times slower it is"
            )
            fail(f"{option} {shown(text)}: write the name and {what}, as {example}")
    return found
