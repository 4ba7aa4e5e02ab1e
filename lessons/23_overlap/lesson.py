"""Lesson 23: hiding communication: what made a step long, how short it could be, what helps.

python lessons/23_overlap/lesson.py                 # two ranks as threads; or under mpirun,
                                                    minidist launch, …
python lessons/23_overlap/lesson.py --break late-bucket             # see README.md, section 8
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import minidist as md
from minidist.comm.cost.bucket_size import best_bucket_bytes, exposed_seconds
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.group import Group
from minidist.console import positive
from minidist.grading import load_module
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.observe.foresight import foresight
from minidist.observe.step_bound import PathPart, lower_bound, plain_critical_path
from minidist.observe.step_record import StepRecord, record_step
from minidist.observe.timeline import Timeline
from minidist.observe.what_if import Change, predict
from minidist.observe.why import typical_step, why
from minidist.observe.why_report import causes_line, foresight_line, headline, place

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "23")
Job = lab.Job
MB = 1_000_000
LAYER = Job()
"""Eight layers, 3 ms forward and 6 ms backward each; 4 MB of gradients a layer over 1 GB/s and 50
µs: 4.1 ms."""
CASES = (
    ("as it should be", LAYER, 24 + 48 + 4.1 + 4),
    ("half the bandwidth", replace(LAYER, bandwidth=5e8), 24 + 6 + 8 * 8.1 + 4),
    ("one bucket", replace(LAYER, bucket=8 * LAYER.bucket), 24 + 48 + 32.1 + 4),
    ("buckets in forward order", replace(LAYER, order="forward"), 24 + 48 + 8 * 4.1 + 4),
    ("rank 1 takes 1.5 times as long", replace(LAYER, slow=1.5), 1.5 * (24 + 48) + 4.1 + 1.5 * 4),
    ("bucket 3 is 30 ms late", replace(LAYER, late={3: 0.030}), 24 + 24 + 34.1 + 4 * 4.1 + 4),
)
"""A step, and its milliseconds by hand."""
CHANGES = (
    ("ddp", Change(bandwidth=5e8)),
    ("ddp", Change(alpha=1e-3)),
    ("ddp", Change(bucket=8 * MB)),
    ("ddp", Change(bucket=12 * MB)),
    ("ddp", Change(bucket=32 * MB)),
    ("ddp", Change(bucket=MB)),
    ("ddp", Change(order="forward")),
    ("zero1", Change(bucket=32 * MB)),
    ("zero1", Change(bucket=12 * MB)),
    ("zero3", Change(ahead=0)),
    ("zero3", Change(ahead=2)),
    ("zero3", Change(bandwidth=5e8)),
)


def tour(group: Group, page: Page, turns: int = 0) -> None:
    """Run the lesson: all ranks make the steps of sections 3 and 6, rank 0 does the rest.

    Args:    turns: 0: the whole lesson. Otherwise only the training steps of section 6, in this
             number of turns.
    """
    if turns:
        training_in_turns(group, page, turns)
        return
    timelines = lab.recorded(group)
    sliced = [lab.sliced(group, priority) for priority in (False, True)]
    if group.rank == 0:
        page.heading("1  The path of a step, and how short the step could be")
        paths(page)
        page.heading("2  Every exposed millisecond has a cause")
        causes(page)
        page.heading("3  A step that really ran")
        really(page, timelines)
        page.heading("4  What if: predict, then run")
        what_if(page)
        page.heading("5  Which bucket size?")
        bucket_sizes(page)
        page.heading("6  Priorities: what is needed first goes first")
        priorities(page)
        priorities_run(page, *sliced)
        page.heading("7  Must transfers be predicted?")
        page.say(foresight_line(foresight(timelines, typical_step(timelines))))


# ----------------------------------------------------------------------------- 1, 2 path and causes


def paths(page: Page) -> None:
    """Show the step, its bound and its critical path, for each case but the last (section 2's)."""
    rows = []
    told = []
    for name, job, by_hand in CASES[:-1]:
        record = lab.run(job)
        path = plain_critical_path(record)
        bound = lower_bound(record)
        rows.append(
            [
                name,
                f"{by_hand:.1f}",
                f"{1e3 * record.seconds:.1f}",
                verdict(1e3 * record.seconds, by_hand, 1e-9),
                f"{1e3 * bound:.1f}",
                f"{record.seconds / bound:.2f}",
            ]
        )
        told.append([name, f"{1e3 * record.seconds:.1f}", in_words(path)])
    page.table(
        "A step of two ranks on a virtual clock (ms)",
        ["", "by hand", "step", "", "lower bound", "step / bound"],
        rows,
    )
    page.table(
        "The critical path (ms)", ["", "step", "from the begin to the end, without a gap"], told
    )


def in_words(path: Sequence[PathPart]) -> str:
    """Return the path as one line; consecutive calls are added up."""
    parts = list[list[Any]]()
    for part in path:
        kind = "calls" if part.rank is None else f"rank {part.rank}"
        if parts and parts[-1][0] == kind == "calls":
            parts[-1][1] += part.stop - part.start
            parts[-1][2] += 1
        else:
            parts.append([kind, part.stop - part.start, 1])
    return ", ".join(
        f"{kind if kind != 'calls' else f'{count} call' + 's' * (count > 1)} {1e3 * seconds:.1f}"
        for kind, seconds, count in parts
    )


def causes(page: Page) -> None:
    """Show each case's step, its bound and its milliseconds by cause, on both ranks; the causes add
    up to the waits."""
    cases = [*CASES, ("ZeRO-3 without prefetch", replace(LAYER, strategy="zero3", ahead=0), 0.0)]
    rows = []
    for name, job, _ in cases:
        record = lab.run(job)
        report = why(record)
        told = ", ".join(
            f"{cause} {1e3 * seconds:.1f}" for cause, seconds in report["causes"].items()
        )
        stood = sum(report["exposed"])
        rows.append(
            [
                name,
                f"{1e3 * record.seconds:.1f}",
                f"{1e3 * lower_bound(record):.1f}",
                f"{1e3 * stood:.1f}",
                told,
                verdict(sum(report["causes"].values()), stood, 1e-9),
            ]
        )
    page.table(
        "Where two ranks stood still (ms)",
        ["", "step", "bound", "both ranks", "by cause", ""],
        rows,
    )


# -------------------------------------------------------------------------------- 3 a recorded step


def middle(timelines: Sequence[Any]) -> StepRecord:
    """Return the step of median length."""
    return record_step(timelines, typical_step(timelines))


def really(page: Page, timelines: Sequence[Any]) -> None:
    """Show a step of DDP over delayed links: where its ranks waited, and why."""
    record = middle(timelines)
    report = why(record)
    page.say(headline(report))
    page.say(causes_line(report))
    page.table(
        "The longest waits (ms)",
        ["call", "rank", "ms", "cause", "asked for at"],
        [
            [
                row["call"],
                row["rank"],
                f"{1e3 * row['seconds']:.1f}",
                row["cause"],
                place(row["where"]),
            ]
            for row in report["rows"][:6]
        ],
    )
    stood = sum(row["seconds"] for row in report["rows"])
    page.table(
        "The accounts",
        ["", "ms", "of the record", ""],
        [
            [
                "all causes, all ranks",
                f"{1e3 * stood:.1f}",
                f"{1e3 * sum(report['exposed']):.1f}",
                verdict(stood, sum(report["exposed"]), 0.01),
            ],
            [
                "the path, end to end",
                f"{1e3 * length(record):.1f}",
                f"{1e3 * record.seconds:.1f}",
                verdict(length(record), record.seconds, 0.01),
            ],
        ],
    )


def length(record: StepRecord) -> float:
    """Return the seconds of the plain path's parts."""
    return sum(part.stop - part.start for part in plain_critical_path(record))


# ------------------------------------------------------------------------------------- 4, 5 what if


def link(job: Any) -> LinkCost:
    """Return the cost of the simulated link."""
    return LinkCost("made up", lab.RANKS, job.alpha, 0.0, 1 / job.bandwidth, 0.0, 0.0)


def followed(strategy: str, change: Change) -> tuple[float, float, float]:
    """Return the seconds of the recorded step, of the prediction from it, and of the changed step
    as it runs."""
    job = replace(LAYER, strategy=strategy)
    asked = {name: value for name, value in vars(change).items() if value is not None}
    record = lab.run(job)
    return (
        record.seconds,
        predict(record, change, link(job)),
        lab.run(replace(job, **asked)).seconds,
    )


def what_if(page: Page) -> None:
    """Compare each change as predicted from the record with its run on the clock."""
    rows = []
    for strategy, change in CHANGES:
        before, told, after = followed(strategy, change)
        name = ", ".join(
            f"{key}={value:g}" if isinstance(value, (int, float)) else f"{key}={value}"
            for key, value in vars(change).items()
            if value is not None
        )
        rows.append(
            [
                f"{strategy}: {name}",
                f"{1e3 * before:.1f}",
                f"{1e3 * told:.1f}",
                f"{1e3 * after:.1f}",
                f"{told / after - 1:+.1%}",
                verdict(told, after, 0.1),
            ]
        )
    page.table(
        "A recorded step under a change (ms)",
        ["", "recorded", "predicted", "run", "difference", "within 10 %"],
        rows,
    )


def bucket_sizes(page: Page) -> None:
    """Compare the formula's bucket size with the best of many on the clock."""
    rows = []
    for alpha in (50e-6, 1e-3):
        job = replace(LAYER, alpha=alpha)
        nbytes = job.layers * job.layer_bytes
        chosen = best_bucket_bytes(nbytes, lab.RANKS, link(job))
        for size in (MB, 2 * MB, 4 * MB, 8 * MB, 32 * MB):
            seconds = lab.run(replace(job, bucket=size)).seconds
            rows.append(
                [
                    f"α = {1e6 * alpha:.0f} µs, buckets of {size // MB} MB",
                    f"{1e3 * seconds:.2f}",
                    f"{1e3 * exposed_seconds(nbytes, lab.RANKS, link(job), size):.2f}",
                    f"{chosen / MB:.1f} MB",
                ]
            )
    page.table(
        "The step by bucket size (ms)",
        ["", "step on the clock", "cost by the formula", "the formula takes"],
        rows,
        note="minidist train --bucket-bytes auto takes the formula's, from the measured α and β",
    )


# ------------------------------------------------------------------------------------- 6 priorities


def priorities(page: Page) -> None:
    """Compare the seconds of a backward and the next forward, in turn and by urgency.

    Each layer's gradients travel whole, and in slices.
    """
    rows = []
    for bandwidth in (1e9, 5e8, 2.5e8):
        for slices in (1, 4, 16):
            job = replace(LAYER, bandwidth=bandwidth)
            record = lab.first_come(job, slices)
            told = predict(record, Change(priority=True))
            ran = lab.scheduled(job, slices, priority=True)
            rows.append(
                [
                    f"{bandwidth / 1e9:g} GB/s, {slices} slice{'s' * (slices > 1)} a layer",
                    f"{1e3 * record.seconds:.1f}",
                    f"{1e3 * told:.1f}",
                    f"{1e3 * ran:.1f}",
                    verdict(told, ran, 1e-9),
                ]
            )
    page.table(
        "Backward, then the next forward (ms)",
        ["", "in turn", "by urgency, predicted", "by urgency, run", ""],
        rows,
    )


def priorities_run(page: Page, in_turn: list[Timeline], urgent: list[Timeline]) -> None:
    """Show the same in real time: backward and the next forward of a replica, its sums in
    slices."""
    before = middle(in_turn)
    after = middle(urgent)
    link = LinkCost("delayed", len(in_turn), 50e-6, 0.0, lab.SUM / lab.BLOCK, 0.0, 0.0)
    told = predict(before, Change(priority=True), link)
    page.table(
        "With time that passes: backward, then the next forward (ms)",
        ["", "in turn", "by urgency, predicted", "by urgency, run"],
        [
            [
                f"{lab.CONFIG.layers} layers, {lab.SLICES} slices a layer",
                f"{1e3 * before.seconds:.1f}",
                f"{1e3 * told:.1f}",
                f"{1e3 * after.seconds:.1f}",
            ]
        ],
    )


def training_in_turns(group: Group, page: Page, turns: int) -> None:
    """Show the seconds of whole training steps by the way in which sums travel, measured in turns:
    the medians, and the least."""
    rows = []
    for seconds in (0.012, 0.025, 0.05):
        taken: dict[str, list[float]] = {way: [] for way in lab.WAYS}
        for _ in range(turns):
            for way in lab.WAYS:
                taken[way].append(1e3 * lab.training_seconds(group, way, seconds))
        rows += [
            [
                f"{1e3 * seconds:.0f} ms a layer, {way}",
                f"{median(taken[way]):.1f}",
                f"{min(taken[way]):.1f}",
                f"{median(taken[way]) / median(taken['DDP']) - 1:+.1%}",
            ]
            for way in lab.WAYS
        ]
    if group.rank == 0:
        page.table(
            f"A training step over slow links, {turns} turns (ms)",
            ["", "median", "least", "beside DDP"],
            rows,
        )


# ----------------------------------------------------------------------------------------- Break it


def told(name: str, report: dict[str, Any]) -> None:
    """Print a step's report in two lines."""
    print(f"{name}: {headline(report)}\n  {causes_line(report)}")


def compare(name: str, options: dict[str, Any]) -> StepRecord:
    """Return the record of the broken steps, run after the right ones on two threads."""
    for title, broken in (("as it should be", {}), (name, options)):
        record = middle(md.run(lab.recorded, broken, size=2, transport="threads")[0])
        told(title, why(record))
    return record


def forward_order() -> None:
    """Fill buckets from the first layer on: the first is complete only when backward ends."""
    compare("buckets in forward order", {"model": lab.BackToFront})


def late_bucket() -> None:
    """Send one message 30 ms late: show how much longer the step is, and what `why` says."""
    for row in why(compare(f"bucket {lab.HELD} is 30 ms late", {"hold": 0.030}))["rows"]:
        if row["cause"] == "slow transfer":
            print(
                f"  rank {row['rank']} waited {1e3 * row['seconds']:.1f} ms for {row['waited']}; "
                f"to blame: {row['call']}, asked for at {place(row['where'])}"
            )


def slow_rank() -> None:
    """Let one rank of two compute 1.5 times as long, on the clock."""
    for name, job, _ in (CASES[0], CASES[4]):
        told(name, why(lab.run(job)))


BREAKS = {
    "forward-order": Break(forward_order, says="buckets in forward order: the step took"),
    "late-bucket": Break(late_bucket, says="to blame: all_reduce bucket 2"),
    "slow-rank": Break(slow_rank, says="slower rank 36.0 ms"),
}


def main() -> None:
    """Parse the command line, then run."""
    parser = arguments(__doc__, BREAKS)
    parser.add_argument(
        "--turns",
        type=positive,
        default=0,
        metavar="N",
        help="only section 6's training steps: each way of sending sums in turn, N times",
    )
    options = parser.parse_args()
    run_lesson(options, partial(tour, turns=options.turns), BREAKS, alone=2)


if __name__ == "__main__":
    main()
