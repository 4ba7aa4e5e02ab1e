"""The report of `minidist plan` on the terminal."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Column, Table

from minidist.cli.simulate_report import known_to
from minidist.console import exactly
from minidist.plan.estimate import TERMS
from minidist.plan.explain import TITLES, Advice, Explanation
from minidist.plan.forecast import KWH, TokenForecast
from minidist.plan.ranking import Choice, Ranking, command, replay_seconds
from minidist.plan.scaling import NEAR_LINEAR, ScalingPoint
from minidist.plan.trial import Trial

SMALLEST = 5e-3  # smaller shares of the step are not printed
GIB = 2.0**30
_UNITS = {"cost": ("$ a step",), "energy": ("J a step",)}


def print_ranking(console: Console, ranking: Ranking, count: int, model: Sequence[str]) -> None:
    """Print the best plans, those that the replay found too large, the cost terms of the best one,
    and the command that runs it."""
    best = ranking.best
    cluster = ranking.cluster
    console.print(
        f"\n{ranking.config.numbers / 1e9:,.3g} billion weights on {cluster.spec}, "
        f"{ranking.batch:,} "
        f"sequences of {ranking.config.context:,} tokens a step",
        markup=False,
    )
    console.print(
        f"{ranking.enumerated:,} plans enumerated, {len(ranking):,} fit into memory; "
        f"ranked by {ranking.objective}: {_ranked_by(ranking)}\n",
        markup=False,
        soft_wrap=True,
    )
    figures = ["s a step", "known to", "MFU", "GiB"]
    table = Table(
        *(Column(name, justify="right") for name in ("", *figures)),
        "known by",
        *(Column(name, justify="right") for name in _UNITS.get(ranking.objective, ())),
        "plan",
        header_style="bold",
    )
    for place, choice in enumerate(ranking.top(count), start=1):
        tie = "≈ " if place > 1 and ranking.tied(choice) else ""
        _add_row(table, f"{tie}{place}", choice, ranking)
    for choice in ranking.refused:
        _add_row(table, "-", choice, ranking)
    console.print(table)
    sure = ranking.estimates.sure
    if any(ranking.tied(choice) for choice in ranking.top(count)[1:]):
        console.print(
            f"≈: cannot be told from 1; two plans of a job can where they differ by more than "
            f"{sure.apart - 1:.0%}",
            markup=False,
        )
    console.print(known_to(sure, best.known_seconds), markup=False, soft_wrap=True)
    parts = [
        f"{TITLES[term]} {best.seconds[term] / best.step_seconds:.1%}"
        for term in TERMS
        if best.seconds[term] > SMALLEST * best.step_seconds
    ]
    console.print(f"the step of 1, estimated: {', '.join(parts)}", markup=False)
    console.print(f"run it: {command(best, model, ranking)}\n", markup=False, soft_wrap=True)


def _ranked_by(ranking: Ranking) -> str:
    """Return by what the plans are ranked: formulas, and for the best few the replay."""
    ran = len(ranking.confirmed)
    if ran:
        return f"by formulas, {ran} of the best by replay"
    seconds = replay_seconds(ranking.choice(0).plan, ranking.config)
    return (
        "by formulas (--confirm 1 simulates the best, which takes "
        f"{f'{seconds / 60:.0f} min' if seconds > 60 else f'{max(1.0, seconds):.0f} s'} or more)"
    )


def _add_row(table: Table, place: str, choice: Choice, ranking: Ranking) -> None:
    found = choice.confirmed
    figures = []
    if ranking.objective in _UNITS:
        cost, energy = (found.dollars, found.joules) if found else (choice.dollars, choice.joules)
        figures = [f"{(cost if ranking.objective == 'cost' else energy) or 0.0:.4g}"]
    table.add_row(
        place,
        f"{choice.known_seconds:.4g}",
        "{:.2g}–{:.2g}".format(*ranking.estimates.sure.interval(choice.known_seconds)),
        f"{ranking.mfu(choice):.1%}",
        f"{choice.known_total / GIB:.3g}",
        choice.known_by if choice.fits else "replayed:\ndoes not fit",
        *figures,
        choice.text,
    )


def print_explanation(console: Console, told: Explanation, notes: Advice) -> None:
    """Print why the best plan wins, what limits it, what more hardware gives, and the notes'
    advice."""
    console.rule("why", style="dim", align="left")
    if told.runner_up is not None:
        ahead = told.runner_up.step_seconds - told.winner.step_seconds
        console.print(f"runner-up: {told.runner_up.text}, {ahead:+.4g} s a step", markup=False)
        for term, spent in told.why:
            if abs(spent) > SMALLEST * told.winner.step_seconds / 2:
                console.print(
                    f"  {TITLES[term]}: {'saves' if spent > 0 else 'costs'} {abs(spent):.4g} s",
                    markup=False,
                )
    console.print(f"what binds: {told.binds}", markup=False)
    for name, share in told.twice.items():
        console.print(f"twice the {name}: the best step takes {share:.1%} of today's", markup=False)
    if told.more:
        console.print(
            f"one more node (a batch of {told.more['batch']:,.0f}): a sequence takes "
            f"{told.more['seconds of a sequence']:.1%} of today's, {told.more['ideal']:.1%} "
            "would be ideal",
            markup=False,
        )
    console.rule("what the notes advise", style="dim", align="left")
    console.print(f"chart of bottlenecks: {'; '.join(notes.chart)}", markup=False)
    console.print(f"table by model size: {notes.row}", markup=False)
    for line in notes.differs or ["the calculation agrees"]:
        console.print(f"  {line}", markup=False)
    console.print()


def print_forecast(console: Console, found: TokenForecast) -> None:
    """Print days, energy and money for the tokens."""
    console.rule(
        f"{found.tokens:.3g} tokens, {exactly(round(found.steps))} steps", style="dim", align="left"
    )
    table = Table(
        "machines",
        *(
            Column(name, justify="right")
            for name in ("days", "dollars", "kept work", "checkpoint every")
        ),
        header_style="bold",
    )
    for offer in (found.own, found.cloud, found.spot):
        table.add_row(
            offer.name,
            f"{offer.days:,.4g}",
            "" if offer.dollars is None else f"{offer.dollars:,.0f}",
            f"{offer.goodput:.1%}",
            f"{offer.interval / 60:,.0f} min",
        )
    console.print(table)
    if found.joules is not None:
        console.print(
            f"{found.days:,.4g} days without interruptions, {found.joules / KWH:,.0f} kWh\n",
            markup=False,
        )
    console.print("this rests on (--assume NAME=VALUE for others):", markup=False)
    for premise in found.premises:
        console.print(
            f"  {premise.name} = {premise.value:.3g} {premise.unit}: {premise.source}",
            markup=False,
            soft_wrap=True,
        )
    console.print()


def print_scaling(console: Console, curves: Mapping[str, Sequence[ScalingPoint]]) -> None:
    """Print the best plan for a growing number of nodes, strong and weak scaling, with the notes'
    claim."""
    for name, points in curves.items():
        console.rule(f"{name} scaling", style="dim", align="left")
        table = Table(
            *(
                Column(title, justify="right")
                for title in ("nodes", "batch", "s a step", "efficiency", "")
            ),
            "plan",
            header_style="bold",
        )
        for point in points:
            table.add_row(
                str(point.nodes),
                f"{point.batch:,}",
                f"{point.step_seconds:.4g}",
                f"{point.efficiency:.1%}",
                "near-linear" * point.near_linear,
                point.plan,
            )
        console.print(table)
    console.print(
        f"near-linear (N0:430, N1:100, N2:86; {NEAR_LINEAR:.0%}, assumed): sequences a second "
        "and device "
        "over those of the first row\n",
        markup=False,
        soft_wrap=True,
    )


def print_trials(console: Console, trials: Sequence[Trial]) -> None:
    """Print predicted and measured times of the trained plans."""
    console.rule("trained here: predicted beside measured", style="dim", align="left")
    table = Table(
        "plan",
        *(
            Column(name, justify="right")
            for name in ("predicted ms", "measured ms", "error", "two halves differ")
        ),
        header_style="bold",
    )
    for trial in trials:
        table.add_row(
            trial.choice.text + (" (random)" if trial.random else ""),
            f"{trial.predicted * 1e3:.4g}",
            f"{trial.measured * 1e3:.4g}",
            f"{trial.predicted / trial.measured - 1:+.1%}",
            f"{trial.spread:.1%}",
        )
    console.print(table)
