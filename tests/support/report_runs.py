"""Run folders for the tests of the report: timelines made by hand, whose times are known."""

import json
import shutil
from pathlib import Path
from typing import Any

from step_records import table, write_records

from minidist.observe.report.section import Section
from minidist.observe.timeline import Span, Timeline

MODEL_OF_A_VILLAIN = (
    "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
)
MS = 1e-3


def two_ranks(steps: int = 3, *, waits: bool = True) -> list[Timeline]:
    """Each step takes 10 ms: rank 1 computes 8 ms, rank 0 only 5 and waits for it; the all-reduce
    itself takes 1 ms."""
    timelines = [Timeline(rank) for rank in range(2)]
    for timeline in timelines:
        for step in range(steps):
            _step(timeline, step, step * 10 * MS, waits=waits)
    return timelines


def _step(timeline: Timeline, step: int, begin: float, *, waits: bool) -> None:
    rank = timeline.rank
    asked = begin + (5 + 3 * rank) * MS
    end = begin + 9 * MS

    def add(name: str, row: str, start: float, stop: float, **details: Any) -> None:
        timeline.add(Span(name, row, start, stop, {"step": step, **details}))

    add("forward", "compute", begin, begin + 2 * MS)
    add("backward", "compute", begin + 2 * MS, end)
    call = {
        "axis": "dp",
        "verb": "all_reduce",
        "algorithm": "ring",
        "op": "sum",
        "nbytes": 4096,
        "size": 2,
        "sequence": step + 1,
        "where": "minidist/parallel/data/ddp.py:155",
    }
    known = {"group": "7", "messages": 2, "queued": 0.0, "blocking": False} if waits else {}
    add("all_reduce bucket 0", "communication", asked, end, **call, **known)
    name = {
        "src": rank,
        "dst": 1 - rank,
        "axis": "dp",
        "verb": "all_reduce",
        "algorithm": "ring",
        "nbytes": 2048,
    }
    add(
        f"all_reduce to rank {1 - rank}",
        "messages",
        begin + 8 * MS,
        end,
        **name,
        message=f"7.{step + 1}.1",
    )
    got = {**name, "src": 1 - rank, "dst": rank}
    add(
        f"all_reduce from rank {1 - rank}", "receives", asked, end, **got, message=f"7.{step + 1}.1"
    )
    if waits:
        add(
            "wait",
            "waits",
            asked,
            end,
            group="7",
            **{key: call[key] for key in ("axis", "verb", "sequence", "where")},
        )
    add("wait for gradients", "compute", asked, end)
    add("optimizer", "compute", end, begin + 10 * MS)
    add("step", "compute", begin, begin + 10 * MS)
    if step < 2:
        timeline.memory += [
            (begin + at * MS, {"parameters": 100, "activations": nbytes, "total": 100 + nbytes})
            for at, nbytes in ((1, 10), (3, 50), (6, 20))
        ]


def metrics(steps: int = 3, *, ranks: int = 2) -> dict[str, Any]:
    """metrics.json of that run; the model's name would break a page that does not escape it."""
    memory = {
        name: {"now": 100, "peak": 100 + number}
        for number, name in enumerate(
            (
                "parameters",
                "gradients",
                "residuals",
                "optimizer",
                "activations",
                "communication",
                "workspace",
                "total",
            )
        )
    }
    sent = {"dp": {"all_reduce": 4096 * steps}, "control": {"all_gather": 8 * steps}}
    plan = {
        "dp": ranks,
        "pp": 1,
        "tp": 1,
        "cp": 1,
        "ep": 1,
        "strategy": "ddp",
        "compress": "none",
        "zero": 0,
        "shard": None,
        "local_steps": None,
        "precision": "fp32",
        "offload": "none",
    }
    return {
        "losses": [4.0 - 0.1 * step for step in range(steps)],
        "validation_loss": 3.5,
        "size": ranks,
        "transport": "threads",
        "parameters": 100,
        "parameter_bytes": 400,
        "optimizer_moments": 2,
        "step_seconds": 0.01,
        "tokens_per_second": 6400.0,
        "steps": steps,
        "plan": plan,
        "threads": 1,
        "device": "cpu",
        "config": {"vocabulary": 3, "name": MODEL_OF_A_VILLAIN},
        "options": {"seed": 1},
        "formula": {"sent_bytes": 2 * 4096 * steps, "messages": 4 * steps, "buckets": 1},
        "machine": {
            "command": f"minidist train -n {ranks} --data '{MODEL_OF_A_VILLAIN}'",
            "processor": "a <b>",
        },
        "versions": {"python": "3.12"},
        "weights_sha256": "0" * 64,
        "energy": {
            "source": "estimate",
            "joules": 30.0,
            "joules_a_step": 10.0,
            "joules_a_token": 0.1,
            "by_rank": [14.0, 16.0],
            "busy_seconds": [1.4, 1.6],
            "counters": {},
            "estimate": True,
            "watts": 10.0,
            "watts_assumed": True,
            "how": "busy seconds × watts; no energy counter was read",
        },
        "ranks": [
            {
                "rank": rank,
                "coordinates": {"dp": rank},
                "sent_bytes": sent,
                "memory": memory,
                "host": "one",
                "messages": {"dp": {"all_reduce": 2 * steps}, "control": {"all_gather": steps}},
                "sent_to": {str((rank + 1) % ranks): {"dp": 4096 * steps}},
            }
            for rank in range(ranks)
        ],
    }


def step_lines(steps: int = 3) -> str:
    """metrics.jsonl of that run."""
    lines = [
        {
            "step": step + 1,
            "time": 100 + 0.01 * step,
            "loss": 4.0 - 0.1 * step,
            "seconds": 0.01,
            "tokens_per_second": 6400.0,
            "joules": 0.1 * step,
            "energy_source": "estimate",
            "memory": {"parameters": 100, "total": 100},
            "sent_bytes": {"dp": {"all_reduce": 4096 * (step + 1)}},
        }
        for step in range(steps)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(
    folder: Path, steps: int = 3, *, waits: bool = True, without: tuple[str, ...] = ()
) -> Path:
    """A run folder without flight recorders, and without the files named. Its records of steps are
    of a clean job."""
    from minidist.observe.timeline import write_perfetto

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.json").write_text(json.dumps(metrics(steps)))
    (folder / "metrics.jsonl").write_text(step_lines(steps))
    write_perfetto(folder / "trace.json", two_ranks(steps, waits=waits))
    write_records(folder, table(2, steps))
    for name in without:
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        else:
            (folder / name).unlink()
    return folder


def many_ranks(ranks: int, *, steps: int = 30, calls: int = 40) -> list[Timeline]:
    """A large job: each rank has so many calls and messages a step, and its memory."""
    timelines = [Timeline(rank) for rank in range(ranks)]
    for timeline in timelines:
        for step in range(steps):
            begin = step * 100 * MS
            for call in range(calls):
                at = begin + (call * 2 + 0.137) * MS
                about = {"step": step, "axis": "dp", "nbytes": 4096 + call}
                timeline.add(
                    Span(
                        f"all_reduce bucket {call}",
                        "communication",
                        at,
                        at + MS,
                        about | {"verb": "all_reduce", "where": f"layer_{call}.py:{call}"},
                    )
                )
                timeline.memory.append(
                    (
                        at,
                        {
                            name: 1_000_000_007 * (call + 1)
                            for name in (
                                "parameters",
                                "gradients",
                                "optimizer",
                                "activations",
                                "communication",
                                "total",
                            )
                        },
                    )
                )
            timeline.add(Span("step", "compute", begin, begin + 99.9 * MS, {"step": step}))
        timeline.memory = timeline.memory[:1000]
    return timelines


def texts(section: Section) -> str:
    """All that a section shows."""
    cells = [cell for found in section.tables for row in (found.head, *found.rows) for cell in row]
    return "\n".join([*section.lines, *section.missing, *cells])
