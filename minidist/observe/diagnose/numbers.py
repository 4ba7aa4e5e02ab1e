"""Rules about numbers: one that is not finite, replicas that drifted apart, a loss that jumped, memory that grows.

    cause               named from
    not finite          the first number: rank, layer, op and step
    replicas differ     one bit, at the next digest (--digest-every)
    loss jumps          JUMP nats, in two steps in a row: of one rank beside the others', and SPREADS times its spread
                        before; of all, and SPREADS times the spread of the BEFORE changes before
    leak                LEAK bytes a step, over GROWTH steps or more, in most of them
"""

import statistics
from collections import Counter
from typing import Any

from minidist.observe.diagnose.fault import CERTAIN, LIKELY, POSSIBLE, Fault, ranks_text
from minidist.observe.diagnose.step_table import StepTable
from minidist.observe.rank_steps import RankSteps

JUMP, SPREADS, BEFORE = 0.5, 8.0, 6
MIB = 1 << 20
LEAK, GROWTH, WARM = 0.9 * MIB, 10, 5


def wrong_numbers(table: StepTable) -> list[Fault]:
    """Not finite, or differing replicas, or a jump of the loss: the first that is found."""
    return not_finite(table) or drifted(table) or loss_jumps(table)


def not_finite(table: StepTable) -> list[Fault]:
    """The first number that was not finite: the others got it through sums over the ranks."""
    found = [(line["bad"][4] if table.ranks[rank].host == next(iter(table.ranks.values())).host else 0.0,
              line["step"], rank, line["bad"]) for rank, each in table.ranks.items() for line in each.steps
             if "bad" in line]
    if not found:
        return []
    step = min(each[1] for each in found)
    _, _, rank, (layer, op, way, kind, _) = min(each for each in found if each[1] == step)
    later = sorted({other for _, _, other, _ in found} - {rank})
    by = f"made by {op} " if way == "forward" else ""
    evidence = [f"step {step}, {way}: the first {kind} {by}in {layer} of rank {rank}"]
    evidence += [f"{ranks_text(later)} had some later"] if later else []
    weight = op.removeprefix("weight ")
    advice = (f"the weight {weight} was bad before the step: look at what wrote it, at rank {rank}'s memory, and at "
              "the learning rate" if op.startswith("weight ") else
              f"look at the input of {op} in {layer}; clip gradients, lower the learning rate, check the data of step "
              f"{step}")
    alone = len({each[2] for each in found if each[1] == step}) == 1
    return [Fault("not finite", (rank,), f"{layer}: {op}", f"rank {rank} had the first {kind}: {layer}, {op}, {way}, "
                  f"step {step}", tuple(evidence), CERTAIN if alone else LIKELY, advice)]


def drifted(table: StepTable) -> list[Fault]:
    """The first step whose digests differ among ranks that hold the same weights."""
    digests: dict[tuple[int, str], dict[int, str]] = {}
    for rank, each in table.ranks.items():
        for line in each.steps:
            for group, digest in line.get("digest", {}).items():
                digests.setdefault((line["step"], group), {})[rank] = digest
    for (step, group), by_rank in sorted(digests.items()):
        counts = Counter(by_rank.values()).most_common()
        if len(counts) > 1:
            tie = counts[0][1] == counts[1][1]
            wrong = sorted(by_rank) if tie else [rank for rank, each in sorted(by_rank.items()) if each != counts[0][0]]
            equal = [before for before, other in digests if other == group and before < step]
            since = f"they were equal at step {max(equal)}" if equal else "no earlier step has a digest"
            return [Fault("replicas differ", tuple(wrong), "",
                          f"the weights of {ranks_text(wrong)} differ"
                          + ("" if tie else " from the others'") + f" at step {step}",
                          (f"digests of group {group}: " + ", ".join(f"rank {rank} {digest}" for rank, digest
                                                                     in sorted(by_rank.items())[:8]), since),
                          POSSIBLE if tie else CERTAIN,
                          "load the newest checkpoint from before; look for an update, a random number or a sum that "
                          "one rank makes alone, and at its memory")]
    return []


def loss_jumps(table: StepTable) -> list[Fault]:
    """A jump of the loss of some ranks' own data, or of all."""
    jumps = _away_from_the_others(table)
    for rank, each in table.ranks.items() if not jumps else ():
        losses = [(line["step"], line["loss"]) for line in each.steps if line.get("loss") is not None]
        if found := _jump(losses):
            jumps[rank] = found
    if not jumps:
        return []
    step = min(found[0] for found in jumps.values())
    first = [rank for rank, found in sorted(jumps.items()) if found[0] == step]
    _, before, after = jumps[first[0]]
    everyone = len(first) > len(table.ranks) / 2
    who = "all ranks" if everyone else ranks_text(first)
    return [Fault("loss jumps", () if everyone else tuple(first), "",
                  f"the loss of {who} jumps at step {step}: from {before:.3f} to {after:.3f}",
                  tuple(f"rank {rank}: from {found[1]:.3f} to {found[2]:.3f} at step {found[0]}"
                        for rank, found in sorted(jumps.items())[:4]),
                  LIKELY, "look at the learning rate and the batch of that step; resume from the checkpoint before it"
                  if everyone else f"look at the data of {ranks_text(first)} from step {step} on: the others' loss "
                                   "stays")]


def _away_from_the_others(table: StepTable) -> dict[int, tuple[int, float, float]]:
    """{rank: as _jump's} of ranks whose loss leaves the others'."""
    found = {}
    rows = {step: {rank: line["loss"] for rank, line in row.items() if line.get("loss") is not None}
            for step, row in table.rows.items()}
    for rank in table.ranks:
        gaps = [(step, row[rank] - statistics.median([loss for other, loss in row.items() if other != rank]), row[rank])
                for step, row in rows.items() if rank in row and len(row) > 2]
        for at in range(BEFORE, len(gaps) - 1):
            spread = 1.4826 * statistics.median(abs(gap) for _, gap, _ in gaps[at - BEFORE:at])
            bound = max(JUMP, SPREADS * spread)
            if gaps[at][1] > bound and gaps[at + 1][1] > bound:
                found[rank] = gaps[at][0], gaps[at - 1][2], gaps[at][2]
                break
    return found


def _jump(losses: list[tuple[int, float]]) -> tuple[int, float, float] | None:
    """(step, loss before, loss after) of the first jump."""
    for at in range(BEFORE, len(losses) - 1):
        window = [loss for _, loss in losses[at - BEFORE:at]]
        changes = [after - before for before, after in zip(window, window[1:], strict=False)]
        usual = statistics.median(changes)
        spread = 1.4826 * statistics.median(abs(change - usual) for change in changes)
        bound = max(window[-3:]) + max(JUMP, SPREADS * spread)
        if losses[at][1] > bound and losses[at + 1][1] > bound:
            return losses[at][0], window[-1], losses[at][1]
    return None


def leaks(table: StepTable) -> list[Fault]:
    """Ranks whose memory grows step by step: the median growth over half of the steps, so one jump is no leak."""
    found: list[tuple[int, float, float, list[Any]]] = []
    for rank, each in table.ranks.items():
        best, sizes = memory_growth(each)
        if best >= LEAK:
            found.append((rank, best, sizes[-1][1] - sizes[0][1], sizes))
    if not found:
        return []
    ranks = [rank for rank, *_ in found]
    return [Fault("leak", tuple(ranks), "", f"the memory of {ranks_text(ranks)} grows in every step",
                  tuple(f"rank {rank}: {growth / MIB:.2g} MiB a step, {total / MIB:,.0f} MiB since step {sizes[0][0]}"
                        for rank, growth, total, sizes in found[:4]),
                  CERTAIN if min(growth for _, growth, *_ in found) > 2 * LEAK else LIKELY,
                  "look for lists, caches and graphs that hold arrays of earlier steps: tracemalloc shows their lines")]


def memory_growth(each: RankSteps) -> tuple[float, list[tuple[int, float]]]:
    """How steadily a rank's memory grows.

    Returns: (bytes a step in the 2 GROWTH steps in which it grows most, [(step, bytes after it)]), without the first
             WARM steps.
    """
    sizes = [(line["step"], line["rss"]) for line in each.steps[WARM:] if line.get("rss")]
    return max((_growth(sizes[at:at + 2 * GROWTH]) for at in range(0, max(1, len(sizes) - GROWTH), GROWTH)),
               default=0.0), sizes


def _growth(sizes: list[tuple[int, float]]) -> float:
    """Bytes a step, between steps that lie half of the list apart: the smallest but a quarter of them."""
    half = len(sizes) // 2
    if len(sizes) < GROWTH:
        return 0.0
    rates = sorted((sizes[at + half][1] - sizes[at][1]) / max(1, sizes[at + half][0] - sizes[at][0])
                   for at in range(len(sizes) - half))
    return rates[len(rates) // 4]
