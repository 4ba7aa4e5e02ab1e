"""`minidist bench compress`: checks the options, starts the ranks, and runs one of its two
measurements."""

import argparse
from typing import Any

from minidist.bench.compress import check, time_to_loss
from minidist.bench.compress.bounds import AskedBound, bounds_of_advice, bounds_of_times
from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.links import ALL, FEW, bandwidths
from minidist.bench.compress.ranks import MODULE
from minidist.bench.compress.time_to_loss import Links
from minidist.bench.compress.ways import LOCAL_STEPS, PLAIN, SendingWay, split_ways, way_of
from minidist.bench.jobs import Job, closed_at_the_end, start_workers
from minidist.bench.step import command as step
from minidist.bench.step.ranks import Model
from minidist.console import counts, positive, positive_number
from minidist.data import text
from minidist.errors import ConfigError
from minidist.launch.transports import current_name
from minidist.parallel.hybrid.plan import Plan
from minidist.progress import Progress

MODEL = Model(layers=2, width=64, heads=4, context=64, batch=1, vocab=128)
FULL = Model(layers=4, width=256, heads=4, context=64, batch=1, vocab=128)
"""3.2 million parameters, 64 tokens per rank and step."""
WAYS = "none,fp16,8bit,top-k,1-bit,powersgd,adaptive,local-steps"
MOST_SECONDS = 120  # largest seconds of a step of plain buckets over the slowest link
MEANS = {
    "layers": "blocks (2; with --full 4)",
    "width": "model width (64; with --full 256)",
    "heads": "attention heads (4)",
    "context": "tokens a sequence (64)",
    "batch": "sequences a rank (1)",
    "vocab": "embedding rows (128)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist bench compress`."""
    parser.add_argument(
        "--ways",
        type=split_ways,
        metavar="WAY,WAY",
        help="schemes of `minidist train --compress` with their options, and "
        f"{LOCAL_STEPS}:every=H,outer=…,lr=…,momentum=…,fragments=F,delay=D,mix=A,compress=NAME,rate=FACTOR "
        f"({WAYS}; with --advise {check.SCHEMES})",
    )
    parser.add_argument(
        "-n", "--ranks", type=counts, metavar="N", help="ranks (4; with --advise 2,4)"
    )
    parser.add_argument(
        "--bandwidths",
        type=bandwidths,
        metavar="SPEED,SPEED",
        help=f"of the links ({FEW}; with --full or --advise {ALL})",
    )
    parser.add_argument(
        "--alpha",
        type=positive_number,
        default=50e-6,
        metavar="SECONDS",
        help="latency of the links (5e-5)",
    )
    parser.add_argument(
        "--full", action="store_true", help="3.2 million parameters, eight bandwidths, 1000 steps"
    )
    parser.add_argument(
        "--steps", type=positive, metavar="K", help="steps of a training (200; with --full 1000)"
    )
    parser.add_argument(
        "--every",
        type=positive,
        metavar="K",
        help="steps from loss to loss (a fiftieth of --steps)",
    )
    parser.add_argument(
        "--target",
        type=positive_number,
        metavar="LOSS",
        help=f"the validation loss to reach ({100 * time_to_loss.SLACK:g} %% above the last of "
        "`none`)",
    )
    parser.add_argument(
        "--lr",
        type=positive_number,
        default=2e-3,
        metavar="RATE",
        help="peak of the learning rate, of all ways (2e-3)",
    )
    parser.add_argument(
        "--data", default="python", metavar="PATH", help="the text, as of `minidist train` (python)"
    )
    parser.add_argument(
        "--rounds", type=positive, default=3, metavar="K", help="turns each way gets (3)"
    )
    parser.add_argument(
        "--through",
        type=bandwidths,
        default=bandwidths("100Mbit"),
        metavar="SPEED",
        help="where the best way is run to its end, beside `none` over the fastest link (100Mbit)",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "tcp", "shm"),
        default="auto",
        metavar="NAME",
        help="below the throttled links: auto, tcp or shm (auto)",
    )
    parser.add_argument(
        "--advise",
        action="store_true",
        help="say where each scheme is faster than plain buckets, by the link model and a step "
        "over a link of no time; and what 1-bit Adam saves",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="with --advise: measure each cell, and count right advice",
    )
    parser.add_argument(
        "--resume",
        metavar="FILE",
        help="keep what was measured in this file, and measure only what it lacks: an interrupted "
        "run goes on",
    )
    parser.add_argument(
        "--hold",
        action="store_true",
        help="with --full, or --advise --check: end with 1 unless every bound is held that the "
        "notes below the table name",
    )
    for name, means in MEANS.items():
        parser.add_argument(f"--{name}", type=positive, metavar="N", help=means)


def measure(args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Run the measurement that the options ask for. Raises: ConfigError for options that contradict
    each other."""
    if args.check and not args.advise:
        raise ConfigError("--check: measures what --advise predicts; add --advise")
    if args.hold and not (args.check or (args.full and not args.advise)):
        raise ConfigError(
            "--hold: bounds are for --full, and for --advise --check; add one of them"
        )
    sizes = args.ranks or ([2, 4] if args.advise else [4])
    if min(sizes) < 2 or (len(sizes) > 1 and not args.advise):
        raise ConfigError("choose -n of at least 2; several numbers of ranks only with --advise")
    base = FULL if args.full else MODEL
    model = Model(**{name: getattr(args, name) or getattr(base, name) for name in vars(base)})
    steps = args.steps or (1000 if args.full else 200)
    words = args.ways or split_ways(check.SCHEMES if args.advise else WAYS)
    ways = [way_of(word, steps) for word in [PLAIN, *(word for word in words if word != PLAIN)]]
    every = args.every or max(1, steps // 50)
    links = Links(
        args.alpha, args.bandwidths or bandwidths(ALL if args.full or args.advise else FEW)
    )
    _require(args, model, ways, sizes, links)
    result = {
        "what": "compress",
        "model": vars(model),
        "alpha": links.alpha,
        "bandwidths": list(links.bandwidths),
        "steps": steps,
        "lr": args.lr,
        "advise": args.advise,
        "transport": args.transport,
    }
    kept = KeptMeasurements(
        args.resume, {**result, "data": args.data, "ranks": sizes, "every": every}
    )
    if args.advise:
        result |= _advise(args, model, ways, sizes, links, steps, progress, kept)
        return _with_bounds(result, bounds_of_advice(result["advice"]) if args.check else [])
    jobs: list[Job] = []
    with closed_at_the_end(jobs):
        jobs.append(_start(args, model, sizes[0], steps))
        parameters = jobs[0].ask(what="open", way=PLAIN)[0]["parameters"]
        result |= {
            "ranks": sizes[0],
            "parameters": parameters,
            **time_to_loss.measure(
                jobs[0],
                ways,
                links,
                steps=steps,
                every=every,
                rounds=args.rounds,
                target=args.target,
                through=args.through[0],
                progress=progress,
                keep=progress.keep,
                kept=kept,
            ),
        }
    return _with_bounds(result, bounds_of_times(result) if args.full else [])


def _with_bounds(result: dict[str, Any], bounds: list[AskedBound]) -> dict[str, Any]:
    """Return the result with its bounds."""
    return {**result, "bounds": [{**bound._asdict(), "line": bound.line} for bound in bounds]}


def _require(
    args: argparse.Namespace, model: Model, ways: list[SendingWay], sizes: list[int], links: Links
) -> None:
    """Raise ConfigError, DataError or MemoryLimitError for a measurement that cannot finish."""
    text.load(args.data).check(context=model.context, vocabulary=model.vocab)
    step.require_memory(model, Plan(dp=max(sizes)))
    if any(way.name == LOCAL_STEPS for way in ways) and args.advise:
        raise ConfigError(
            "--advise: compares schemes with plain buckets, and local steps train otherwise; "
            "leave them out of --ways"
        )
    for size in sizes:
        for way in ways:
            way.plan(size)
    if sum(way.text == PLAIN for way in ways) != 1 or len({way.text for way in ways}) < len(ways):
        raise ConfigError("--ways: name each way once")
    seconds = 8 * model.config().numbers / min(links.bandwidths)
    if seconds > MOST_SECONDS:
        raise ConfigError(
            f"a plain step takes {seconds:,.0f} s over the slowest of --bandwidths; choose links "
            f"over which it takes {MOST_SECONDS} s at the most, or a smaller model"
        )


def _start(args: argparse.Namespace, model: Model, size: int, steps: int) -> Job:
    # the ranks are on this host
    transport = "shm" if args.transport == "auto" else current_name(args.transport)
    return start_workers(
        MODULE,
        "compress",
        size,
        [
            *model.arguments(),
            f"--steps={steps}",
            f"--lr={args.lr!r}",
            f"--data={args.data}",
            f"--transport={transport}",
        ],
    )


def _advise(
    args: argparse.Namespace,
    model: Model,
    ways: list[SendingWay],
    sizes: list[int],
    links: Links,
    steps: int,
    progress: Progress,
    kept: KeptMeasurements,
) -> dict[str, Any]:
    """Return the advice for each number of ranks, and the claims for the largest."""
    found = []
    claims = {}
    for size in sizes:
        jobs: list[Job] = []
        with closed_at_the_end(jobs):
            jobs.append(_start(args, model, size, steps))
            found.append(
                check.advise(
                    jobs[0],
                    size,
                    ways,
                    links,
                    rounds=args.rounds,
                    check=args.check,
                    progress=time_to_loss.after(f"{size} ranks", progress),
                    kept=kept,
                )
            )
            if size == max(sizes):
                one_bit = way_of("1-bit", steps)
                times = check.measure_rounds(
                    jobs[0],
                    [ways[0], one_bit],
                    Links(links.alpha, []),
                    args.rounds,
                    progress,
                    kept,
                    "claims: ",
                )
                claims = check.claims(
                    times.local_step(PLAIN), times.local_step(one_bit.text), size, links
                )
        progress.keep(f"{size} ranks: done")
    return {"advice": found, "claims": claims}
