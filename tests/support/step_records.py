"""Records of steps (observe/rank_steps.py) of jobs that never ran, and run folders that hold
them."""

import json
from pathlib import Path

from minidist.observe.diagnose.step_table import StepTable
from minidist.observe.rank_steps import RankSteps, steps_file
from minidist.observe.report.run_files import RunFiles

MIB = 1 << 20
STEP = {
    "seconds": 0.1,
    "cpu": 0.05,
    "others": 0.002,
    "input": 0.001,
    "calls": 0.04,
    "rss": 80 * MIB,
    "tokens": 512,
}


def table(size=4, steps=20, *, alike=None, at=8, victim=2, hosts=None, **changed):
    """Records of ranks that differ by a little, and from step `at` on the victim's in what is
    `changed`.

    A change is a factor, or a function of (step, line) to the new value. What the victim computes
    longer, the others wait longer in their calls: here it is in calls so much shorter.
    """
    ranks = {}
    for rank in range(size):
        lines = []
        for step in range(steps):
            line = {"step": step, "time": 100.0 + step / 10, "loss": 3.0 - 0.05 * step, **STEP}
            line["cpu"] *= 1 + 0.02 * ((rank + step) % 3)
            for name, change in changed.items() if rank == victim and step >= at else ():
                line[name] = change(step, line) if callable(change) else line[name] * change
            line["calls"] -= (
                max(0.0, line["cpu"] - 1.04 * STEP["cpu"]) if "calls" not in changed else 0.0
            )
            lines.append(line)
        ranks[rank] = RankSteps(
            rank,
            size,
            (hosts or {}).get(rank, "here"),
            1e6,
            100.0,
            (alike or {}).get(rank, ""),
            lines,
        )
    return StepTable(ranks)


def linked(slow=3.0, late=0.0, hosts=None, ahead=0.0, steps=30, during=range(1 << 30)):
    """Records of a ring of four ranks, a message a link and step of 10 ms; from 1 to 2 `slow` times
    as long `during`.

    Args:    late: rank 3's receive is posted so many seconds after the message was sent. ahead:
             rank 2's clock.
    """
    ring = table(4, steps, hosts=hosts)
    shift = {rank: int(1e6 * ahead) if rank == 2 else 0 for rank in range(4)}
    for rank, each in ring.ranks.items():
        for line in each.steps:
            at = 1_000_000 * line["step"]
            source = (rank - 1) % 4
            takes = 30_000 if rank == 2 and slow == 3.0 and line["step"] in during else 10_000
            posted = at + int(1e6 * late) if rank == 3 else at - 5_000
            line["out"] = [[(rank + 1) % 4, 7, line["step"], 50_000, at + shift[rank]]]
            line["in"] = [
                [
                    source,
                    7,
                    line["step"],
                    50_000,
                    posted + shift[rank],
                    max(posted, at + takes) + shift[rank],
                ],
                [
                    (rank + 1) % 4,
                    8,
                    line["step"],
                    50_000,
                    at - 1 + shift[rank],
                    at + 10_000 + shift[rank],
                ],
            ]
            line["out"].append([source, 8, line["step"], 50_000, at + shift[rank]])
    return ring


def write_records(folder: Path, records: StepTable, *, ends_at: float | None = None) -> Path:
    """Write the records as the ranks do. Args: ends_at: the time of day of the last step (default:
    as they are)."""
    newest = max(line["time"] for each in records.ranks.values() for line in each.steps)
    shift = 0.0 if ends_at is None else ends_at - newest
    for rank, each in records.ranks.items():
        file = steps_file(folder, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "time": each.since + shift,
            "rank": rank,
            "size": each.size,
            "pid": 1,
            "alike": each.alike,
            "host": each.host,
            "clock": each.clock,
        }
        lines = [about, *({**line, "time": line["time"] + shift} for line in each.steps)]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def run_of(records: StepTable) -> RunFiles:
    """A run folder, as the report reads it, of which nothing is there but these records."""
    return RunFiles(Path("run"), records=records.ranks)
