"""Rules about numbers: a number that is not finite, replicas that differ, a loss that jumps, memory
that grows.

    cause               named from
    not finite          the first number: rank, layer, op and step
    replicas differ     one bit, at the next digest (--digest-every)
    loss jumps          JUMP nats and SPREADS times its spread, in two steps in a row: of one rank
                        compared with the others', or of all
    leak                LEAK bytes per step, over GROWTH steps or more, in most of them

The spread of a loss is the standard deviation of its changes from step to step: over the run so
far, or over the newest RECENT changes if that is larger. A few numbers may be close to each other
by chance: of fewer than RECENT changes the spread is their whole range.
"""

import math
import statistics
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minidist.observe.diagnose.fault import CERTAIN, LIKELY, POSSIBLE, Fault, ranks_text
from minidist.observe.diagnose.step_table import Line, StepTable
from minidist.observe.rank_steps import RankSteps

JUMP = 0.5  # nats
SPREADS = 8.0  # standard deviations of the run's own changes
BEFORE = 6  # changes that are needed to compute them
RECENT = 20  # changes whose spread is taken, next to the spread of the whole run
QUARTERS = 1.349  # standard deviations between the quartiles of normal numbers
MIB = 1 << 20
LEAK = 0.9 * MIB
GROWTH = 10
WARM = 5
STEADY = 3.0


def wrong_numbers(table: StepTable) -> list[Fault]:
    """Return the findings of the first rule that finds something: a number that is not finite,
    differing replicas, a jump of the loss."""
    return not_finite(table) or drifted(table) or loss_jumps(table)


def not_finite(table: StepTable) -> list[Fault]:
    """Return the finding about the first number that was not finite; sums over the ranks carry it
    to the other ranks."""
    found = [
        (
            line["bad"][4]
            if table.ranks[rank].host == next(iter(table.ranks.values())).host
            else 0.0,
            line["step"],
            rank,
            line["bad"],
        )
        for rank, each in table.ranks.items()
        for line in each.steps
        if "bad" in line
    ]
    if not found:
        return []
    step = min(each[1] for each in found)
    _, _, rank, (layer, op, way, kind, _) = min(each for each in found if each[1] == step)
    later = sorted({other for _, _, other, _ in found} - {rank})
    by = f"made by {op} " if way == "forward" else ""
    evidence = [f"step {step}, {way}: the first {kind} {by}in {layer} of rank {rank}"]
    evidence += [f"{ranks_text(later)} had some later"] if later else []
    weight = op.removeprefix("weight ")
    advice = (
        f"the weight {weight} was bad before the step: look at what wrote it, at rank {rank}'s "
        "memory, and at the learning rate"
        if op.startswith("weight ")
        else f"look at the input of {op} in {layer}; clip gradients, lower the learning rate, "
        f"check the data of step {step}"
    )
    alone = len({each[2] for each in found if each[1] == step}) == 1
    return [
        Fault(
            "not finite",
            (rank,),
            f"{layer}: {op}",
            f"rank {rank} had the first {kind}: {layer}, {op}, {way}, step {step}",
            tuple(evidence),
            CERTAIN if alone else LIKELY,
            advice,
        )
    ]


def drifted(table: StepTable) -> list[Fault]:
    """Return the finding about the first step whose digests differ among ranks that should hold the
    same weights."""
    digests: dict[tuple[int, str], dict[int, str]] = {}
    for rank, each in table.ranks.items():
        for line in each.steps:
            for group, digest in line.get("digest", {}).items():
                digests.setdefault((line["step"], group), {})[rank] = digest
    for (step, group), by_rank in sorted(digests.items()):
        counts = Counter(by_rank.values()).most_common()
        if len(counts) > 1:
            tie = counts[0][1] == counts[1][1]
            wrong = (
                sorted(by_rank)
                if tie
                else [rank for rank, each in sorted(by_rank.items()) if each != counts[0][0]]
            )
            equal = [before for before, other in digests if other == group and before < step]
            since = (
                f"they were equal at step {max(equal)}" if equal else "no earlier step has a digest"
            )
            return [
                Fault(
                    "replicas differ",
                    tuple(wrong),
                    "",
                    f"the weights of {ranks_text(wrong)} differ"
                    + ("" if tie else " from the others'")
                    + f" at step {step}",
                    (
                        f"digests of group {group}: "
                        + ", ".join(
                            f"rank {rank} {digest}" for rank, digest in sorted(by_rank.items())[:8]
                        ),
                        since,
                    ),
                    POSSIBLE if tie else CERTAIN,
                    "load the newest checkpoint from before; look for an update, a random "
                    "number or a sum that only one rank makes, and at its memory",
                )
            ]
    return []


def loss_jumps(table: StepTable) -> list[Fault]:
    """Return the finding about a jump of the loss, on the data of some ranks or of all."""
    jumps = _away_from_the_others(table)
    for rank, each in table.ranks.items() if not jumps else ():
        losses = [(line["step"], line["loss"]) for line in each.steps if _has_loss(line)]
        if found := _jump(losses):
            jumps[rank] = found
    if not jumps:
        return []
    step = min(found[0] for found in jumps.values())
    first = [rank for rank, found in sorted(jumps.items()) if found[0] == step]
    _, before, after = jumps[first[0]]
    everyone = len(first) > len(table.ranks) / 2
    who = "all ranks" if everyone else ranks_text(first)
    return [
        Fault(
            "loss jumps",
            () if everyone else tuple(first),
            "",
            f"the loss of {who} jumps at step {step}: from {before:.3f} to {after:.3f}",
            tuple(
                f"rank {rank}: from {found[1]:.3f} to {found[2]:.3f} at step {found[0]}"
                for rank, found in sorted(jumps.items())[:4]
            ),
            LIKELY,
            "look at the learning rate and the batch of that step; resume from the checkpoint "
            "before it"
            if everyone
            else f"look at the data of {ranks_text(first)} from step {step} on: the others' loss "
            "stays",
        )
    ]


def _away_from_the_others(table: StepTable) -> dict[int, tuple[int, float, float]]:
    """Return {rank: (step, loss before, loss after)} of ranks whose loss jumps away from the
    others'."""
    found = {}
    for rank in table.ranks:
        gaps = list[tuple[int, float]]()
        losses = dict[int, float]()
        for step, row in table.rows.items():
            known = {other: line["loss"] for other, line in row.items() if _has_loss(line)}
            if rank in known and len(known) > 2:
                losses[step] = known.pop(rank)
                gaps.append((step, losses[step] - statistics.median(known.values())))
        if jump := _jump(gaps):
            before = max(step for step in losses if step < jump[0])
            found[rank] = jump[0], losses[before], losses[jump[0]]
    return found


def _has_loss(line: Line) -> bool:
    return line.get("loss") is not None and math.isfinite(line["loss"])


def _jump(losses: list[tuple[int, float]]) -> tuple[int, float, float] | None:
    """Return (step, loss before, loss after) of the first jump."""
    values = [loss for _, loss in losses]
    changes = [after - before for before, after in pairwise(values)]
    ordered = list[float]()  # the changes so far
    for at in range(1, len(values) - 1):
        if at >= BEFORE:
            spread = max(
                _spread(ordered), _spread(sorted(changes[max(0, at - 1 - RECENT) : at - 1]))
            )
            bound = max(values[max(0, at - 3) : at]) + max(JUMP, SPREADS * spread)
            if values[at] > bound and values[at + 1] > bound:
                return losses[at][0], values[at - 1], values[at]
        insort(ordered, changes[at - 1])
    return None


def _spread(ordered: Sequence[float]) -> float:
    """Return the standard deviation of sorted numbers by their quartiles; of fewer than RECENT
    numbers, their range."""
    count = len(ordered)
    if count < RECENT:
        return ordered[-1] - ordered[0] if ordered else 0.0
    return _quartiles(ordered)


def _quartiles(ordered: Sequence[float]) -> float:
    """Return the standard deviation of sorted numbers, by their quartiles."""
    count = len(ordered)
    return (ordered[3 * count // 4] - ordered[count // 4]) / QUARTERS


def leaks(table: StepTable) -> list[Fault]:
    """Return the finding about ranks whose memory grows in most steps (_growth); one jump is no
    leak."""
    found: list[tuple[int, float, float, list[Any]]] = []
    for rank, each in table.ranks.items():
        best, sizes = memory_growth(each)
        if best >= LEAK:
            found.append((rank, best, sizes[-1][1] - sizes[0][1], sizes))
    if not found:
        return []
    ranks = [rank for rank, *_ in found]
    return [
        Fault(
            "leak",
            tuple(ranks),
            "",
            f"the memory of {ranks_text(ranks)} grows in every step",
            tuple(
                f"rank {rank}: {growth / MIB:.2g} MiB a step, {total / MIB:,.0f} MiB since step "
                f"{sizes[0][0]}"
                for rank, growth, total, sizes in found[:4]
            ),
            CERTAIN if min(growth for _, growth, *_ in found) > 2 * LEAK else LIKELY,
            "look for lists, caches and graphs that hold arrays of earlier steps: tracemalloc "
            "shows their lines",
        )
    ]


def memory_growth(each: RankSteps) -> tuple[float, list[tuple[int, float]]]:
    """Measure how fast a rank's memory grows.

    Returns: (bytes per step in the 2 GROWTH steps with the most growth, [(step, bytes after it)]),
             without the first WARM steps.
    """
    sizes = [(line["step"], line["rss"]) for line in each.steps[WARM:] if line.get("rss")]
    return max(
        (
            _growth(sizes[at : at + 2 * GROWTH])
            for at in range(0, max(1, len(sizes) - GROWTH), GROWTH)
        ),
        default=0.0,
    ), sizes


def _growth(sizes: list[tuple[int, float]]) -> float:
    """Return the lower quartile of bytes per step, between steps at a distance of half the list.

    0.0 if memory changes so strongly from step to step that the growth may be chance.
    """
    half = len(sizes) // 2
    if len(sizes) < GROWTH:
        return 0.0
    grown = sorted(sizes[at + half][1] - sizes[at][1] for at in range(len(sizes) - half))
    changes = sorted(after - before for (_, before), (_, after) in pairwise(sizes))
    if grown[len(grown) // 4] < STEADY * _quartiles(changes):
        return 0.0
    rates = sorted(
        (sizes[at + half][1] - sizes[at][1]) / max(1, sizes[at + half][0] - sizes[at][0])
        for at in range(len(sizes) - half)
    )
    return rates[len(rates) // 4]
