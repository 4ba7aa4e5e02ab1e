"""`minidist plan --cluster a100-80g:64x8 --model gpt3-175b --batch 1536`: the plan that fits best,
and why.

    minidist plan --cluster h100:16x8 --model llama3-70b --batch 256 --top 10 --explain
    minidist plan --cluster h100:16x8 --model llama3-70b --batch 256 --tokens 15e12 \\
        --interruptions-per-day 6
    minidist plan --here -n 4 --layers 8 --width 256 --heads 4 --sequence 128 --vocab 512 \\
        --batch 16 --run 3

Plans are ranked by formulas with the constants of `minidist simulate`. By default about three of
the best are also simulated; --confirm sets their number.
"""

import argparse
from dataclasses import asdict
from typing import Any

from minidist.cli.simulate import (
    FLOAT32_GRADIENTS,
    config_of,
    model_arguments,
    tokens_number,
)
from minidist.cli.train.settings import MIXTURE_OPTIONS
from minidist.console import fail, positive, positive_number, whole_number, write_json
from minidist.files import check_writable
from minidist.parallel.hybrid.plan_checks import PRECISIONS
from minidist.plan.explain import advice, explain
from minidist.plan.forecast import SPOT_INTERRUPTIONS, UNITS, Prices, forecast
from minidist.plan.ranking import AFFORDABLE, MOST_CONFIRMED, OBJECTIVES, Ranking, plan_for
from minidist.plan.scaling import scaling_curves
from minidist.progress import progress
from minidist.simulate.cluster import Cluster
from minidist.simulate.rates import CostProfile, Rates
from minidist.terminal import Console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist plan` to the parser."""
    add = parser.add_argument_group("the cluster").add_argument
    add(
        "--cluster",
        metavar="NAME:NODESxDEVICES",
        help="as h100:128x8; FILE:NAME:… for one of yours",
    )
    add(
        "--here",
        action="store_true",
        help="this machine, as `minidist bench calibrate` measured it",
    )
    add(
        "-n",
        type=positive,
        metavar="RANKS",
        help="with --here: processes (default: as many as cores)",
    )
    add(
        "--profile",
        metavar="FILE",
        help="constants that `minidist calibrate` fitted to measured steps",
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
    add("--precision", choices=PRECISIONS, help="as of train (default: bf16, with --here fp32)")
    add(
        "--optimizer",
        choices=("adamw", "adam", "sgd", "rmsprop"),
        default="adamw",
        help="(default: adamw)",
    )
    add("--float32-gradients", action="store_true", help=FLOAT32_GRADIENTS)
    add = parser.add_argument_group("the choice").add_argument
    add(
        "--objective",
        choices=OBJECTIVES,
        default="time",
        help="what is to be least (default: time)",
    )
    add(
        "--confirm",
        type=whole_number(0, 10**9),
        metavar="K",
        help="run the best K through the simulator too, and show them first (default: about "
        f"{MOST_CONFIRMED}, as long as that takes less than about {AFFORDABLE:g} s; 0: none)",
    )
    add(
        "--run",
        type=positive,
        metavar="K",
        help="with --here: simulate the best K, train with these and a random one",
    )
    add = parser.add_argument_group("the result").add_argument
    add(
        "--top", type=positive, default=5, metavar="K", help="how many plans are shown (default: 5)"
    )
    add(
        "--explain",
        action="store_true",
        help="why the best one wins, what binds it, and what the notes advise",
    )
    add(
        "--scaling",
        action="store_true",
        help="the best plan on 1, 2, 4, … nodes: with this batch, and with its share",
    )
    add(
        "--tokens",
        type=tokens_number,
        metavar="N",
        help="days, energy and money for so many tokens, as 15e12",
    )
    add(
        "--interruptions-per-day",
        type=positive_number,
        default=SPOT_INTERRUPTIONS,
        metavar="N",
        help=f"of spot machines, of the whole job (default: {SPOT_INTERRUPTIONS:g}, assumed)",
    )
    add(
        "--assume",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help=f"another premise of the forecast, which lists all of them: {', '.join(UNITS)}; "
        "several times",
    )
    add("--json", metavar="FILE", help="write all figures here")


def run(args: argparse.Namespace) -> int:
    """Rank the plans and print them. Returns: 0. Raises: ConfigError."""
    from minidist.cli import plan_report as report

    check_writable("--json", args.json)
    if bool(args.cluster) == args.here:
        fail("--cluster NAME:NODESxDEVICES or --here: give one of the two, as --cluster h100:16x8")
    if args.float32_gradients and args.here:
        fail(
            "--float32-gradients is a question about other machines: training here keeps gradients "
            "in the dtype of their weights; leave it out"
        )
    if (args.run or args.n) and not args.here:
        fail(
            f"{'--run' if args.run else '-n'} goes with --here; for another cluster, write "
            "--cluster h100:16x8"
        )
    prices = Prices.given(args.assume)
    cluster = Cluster.parse(
        ("here" + (f":{args.n}" if args.n else "")) if args.here else args.cluster
    )
    profile = CostProfile.load(args.profile) if args.profile else None
    cluster = profile.applied(cluster) if profile else cluster
    config = config_of(args)
    console = Console(highlight=False)
    rates = Rates.of(cluster.device, profile) if profile else None
    confirm = max(args.confirm or 0, args.run) if args.run else args.confirm
    with progress("ranking the plans") as show:
        ranking = plan_for(
            config,
            cluster,
            batch=args.batch,
            objective=args.objective,
            optimizer=args.optimizer,
            float32_gradients=args.float32_gradients,
            precision=args.precision or ("fp32" if args.here else "bf16"),
            rates=rates,
            confirm=confirm,
            show=show,
        )
    report.print_ranking(console, ranking, args.top, model_words(args))
    found: dict[str, Any] = {
        "cluster": cluster.spec,
        "batch": args.batch,
        "config": config.as_dict(),
        "objective": args.objective,
        "enumerated": ranking.enumerated,
        "fit": len(ranking),
        "known_to": ranking.estimates.sure._asdict(),
        "plans": [
            choice.as_json()
            | {
                "known_to": ranking.estimates.sure.interval(choice.known_seconds),
                "tied_with_best": ranking.tied(choice),
            }
            for choice in ranking.top(args.top)
        ],
        "refused": [choice.as_json() for choice in ranking.refused],
    }
    found |= _asked(args, ranking, prices, rates, console)
    if args.json:
        write_json(args.json, found)
    return 0


def _asked(
    args: argparse.Namespace,
    ranking: Ranking,
    prices: Prices,
    rates: Rates | None,
    console: Console,
) -> dict[str, Any]:
    """Print the optional parts beyond the ranking, and return them for JSON."""
    from minidist.cli import plan_report as report

    found: dict[str, Any] = {}
    if args.explain:
        told = explain(ranking)
        notes = advice(ranking)
        report.print_explanation(console, told, notes)
        found["explanation"] = {
            "why": dict(told.why),
            "binds": told.binds,
            "twice": told.twice,
            "more": told.more,
            "chart": notes.chart,
            "row": notes.row,
            "differs": notes.differs,
        }
    if args.scaling:
        with progress("ranking the plans of other numbers of nodes"):
            curves = scaling_curves(ranking)
        report.print_scaling(console, curves)
        found["scaling"] = {
            name: [asdict(point) for point in points] for name, points in curves.items()
        }
    if args.tokens:
        taken = forecast(
            ranking.best,
            ranking,
            tokens=args.tokens,
            prices=prices,
            interruptions_a_day=args.interruptions_per_day,
        )
        report.print_forecast(console, taken)
        found["forecast"] = taken.as_json()
    if args.run:
        from minidist.plan.trial import try_plans

        with progress("training") as show:
            trials = try_plans(ranking, args.run, optimizer=args.optimizer, rates=rates, show=show)
        report.print_trials(console, trials)
        found["trials"] = [trial.as_json() for trial in trials]
    return found


def model_words(args: argparse.Namespace) -> list[str]:
    """Return the options that named the model, to print them in a command."""
    words = ["--model", args.model] if args.model else []
    for name in ("layers", "width", "heads", "sequence", "vocab"):
        if getattr(args, name):
            words += [f"--{name}", str(getattr(args, name))]
    for name in ("attention_pattern", "experts", *MIXTURE_OPTIONS):
        if (value := getattr(args, name, None)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words
