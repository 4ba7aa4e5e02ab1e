"""The timeline: spans of every rank, on one clock, as a file that Perfetto opens."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import SOON
from training import SMALL_BUCKETS, global_batch, tiny

import minidist as md
from minidist.comm.ledger import Ledger
from minidist.comm.records import gather_records, hand_out_record
from minidist.device import account
from minidist.observe import timeline as timeline_module
from minidist.observe.timeline import ROWS, Span, Timeline, clock_offset, write_perfetto
from minidist.observe.why import typical_step
from minidist.parallel.hybrid.hybrid import Plan, Trainer

STEPS = 3
CONFIG = tiny(context=32, width=48, layers=3)


def traced(world: Any) -> list[Timeline] | None:
    """Three steps of DDP, recorded. Each backward ends when the first bucket's all-reduce has, if
    that ever begins."""
    timeline = Timeline(world.rank)
    timeline.follow(world.ledger)
    trainer = Trainer(
        Plan(dp=world.size, bucket_bytes=10 * SMALL_BUCKETS), CONFIG, world, recorder=timeline
    )

    def last_of_backward(model: Any) -> None:
        deadline = time.monotonic() + SOON
        while (
            not named(timeline, "all_reduce bucket 0", trainer.steps_done)
            and time.monotonic() < deadline
        ):
            time.sleep(0.002)

    trainer.model.register_backward_hook(last_of_backward)
    for step in range(STEPS):
        trainer.step(global_batch(step, 8, CONFIG))
    trainer.close()
    return timeline.collect(world)


@pytest.fixture(scope="module")
def timelines() -> list[Timeline]:
    """Return what rank 0 of two has collected."""
    collected = md.run(traced, size=2)
    assert collected[1] is None
    return collected[0]


def named(timeline: Timeline, prefix: str, step: int) -> list[Span]:
    """Spans of one training step by the beginning of their name."""
    return [
        span
        for span in timeline.spans
        if span.name.startswith(prefix) and span.details["step"] == step
    ]


def test_a_timeline_goes_on_in_another_world() -> None:
    """This happens in an elastic job: the rank is another, spans say so, and the limit is
    another."""
    timeline = Timeline(7, limit=1)
    ledgers = [Ledger(0), Ledger(1)]
    for rank, ledger in enumerate(ledgers):
        timeline.go_on(rank, ledger, limit=2 * rank + 2, generation=rank + 1)
        with timeline.span("step", step=5):
            ledger.publish_now("call", "barrier", 0.0, {"axis": "world"})
        with timeline.span("evaluate"):
            pass
    assert timeline.rank == 1 and timeline.dropped == 2
    assert [
        (span.name, span.details["rank"], span.details["generation"]) for span in timeline.spans
    ] == [("barrier", 0, 1), ("evaluate", 0, 1), ("barrier", 1, 2), ("evaluate", 1, 2)]
    assert timeline.gaps == {1: 1, 3: 1}


def test_one_row_a_rank_and_kind_of_work(timelines: list[Timeline]) -> None:
    assert [timeline.rank for timeline in timelines] == [0, 1]
    for timeline in timelines:
        for step in range(STEPS):
            for name in ("forward", "backward", "optimizer"):
                (span,) = named(timeline, name, step)
                assert span.row == "compute" and span.stop >= span.start
            buckets = named(timeline, "all_reduce bucket", step)
            assert [span.name for span in buckets] == [
                f"all_reduce bucket {i}" for i in range(len(buckets))
            ]
            assert len(buckets) > 2
            assert all(
                span.row == "communication" and span.details["nbytes"] > 0 for span in buckets
            )


def test_overlap_is_recorded(timelines: list[Timeline]) -> None:
    """The first bucket's all-reduce runs while backward does."""
    for timeline in timelines:
        for step in range(STEPS):
            (bucket,) = named(timeline, "all_reduce bucket 0", step)
            (backward,) = named(timeline, "backward", step)
            assert backward.start < bucket.start < bucket.stop < backward.stop


def test_messages_are_the_ledgers(timelines: list[Timeline]) -> None:
    """Two ranks: each bucket takes two messages, of half the bucket each."""
    for timeline in timelines:
        messages = [
            span
            for span in timeline.spans
            if span.row == "messages" and span.details["axis"] == "dp"
        ]
        buckets = [span for span in timeline.spans if span.name.startswith("all_reduce bucket")]
        assert len(messages) == 2 * len(buckets)
        assert sum(span.details["nbytes"] for span in messages) == sum(
            span.details["nbytes"] for span in buckets
        )
        assert {(span.details["src"], span.details["dst"]) for span in messages} == {
            (timeline.rank, 1 - timeline.rank)
        }


def test_perfetto_file(timelines: list[Timeline], tmp_path: Path) -> None:
    write_perfetto(tmp_path / "trace.json", timelines)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    assert names == {(rank, row): name for rank in (0, 1) for row, name in enumerate(ROWS)}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {
        "rank 0",
        "rank 1",
    }
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == sum(len(timeline.spans) for timeline in timelines)
    assert min(e["ts"] for e in complete) == 0 and all(e["dur"] >= 0 for e in complete)
    # spans of a row lie side by side or inside one another, as Perfetto wants them
    for pid, row in names:
        if names[pid, row] == "compute":
            spans = sorted(
                (e["ts"], -e["dur"]) for e in complete if (e["pid"], e["tid"]) == (pid, row)
            )
            open_until: list[float] = []
            for start, minus in spans:
                while open_until and open_until[-1] <= start + 1e-2:
                    open_until.pop()
                assert not open_until or start - minus <= open_until[-1] + 1e-2
                open_until.append(start - minus)


def test_an_empty_trace_is_a_file_too(tmp_path: Path) -> None:
    write_perfetto(tmp_path / "trace.json", [Timeline(0)])
    assert json.loads((tmp_path / "trace.json").read_text())["displayTimeUnit"] == "ms"


def of_steps(count: int, *, limit: int) -> Timeline:
    """A timeline of so many short steps."""
    timeline = Timeline(0, limit=limit)
    for step in range(count):
        with timeline.span("work", step=step):
            pass
        with timeline.span("step", step=step):
            pass
    return timeline


@pytest.mark.parametrize(
    ("limit", "kept"),
    [(1, [4]), (2, [0, 4]), (5, [0, 0, 3, 4, 4]), (9, [0, 0, 1, 1, 2, 3, 3, 4, 4])],
)
def test_the_first_and_the_last_spans_are_kept_and_the_others_counted(
    limit: int, kept: list[int]
) -> None:
    timeline = of_steps(5, limit=limit)
    assert [span.details["step"] for span in timeline.spans] == kept
    assert timeline.dropped == 10 - limit and timeline.gaps == {limit // 2: 10 - limit}


def test_a_trace_says_where_spans_are_left_out(tmp_path: Path) -> None:
    whole = of_steps(5, limit=10)
    cut = of_steps(5, limit=6)
    collected = md.run(lambda world: (cut if world.rank else whole).collect(world), size=2)[0]
    assert [timeline.gaps for timeline in collected] == [{}, {3: 4}]
    write_perfetto(tmp_path / "trace.json", collected)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (told,) = [event for event in events if event["ph"] == "i"]
    assert (
        told["name"] == "4 spans are left out here"
        and told["args"]["spans"] == 4
        and told["args"]["seconds"] > 0
    )


def test_a_step_beside_a_gap_is_not_explained() -> None:
    timeline = of_steps(5, limit=5)  # step 3 has lost its work, not its end
    assert timeline.cut_steps() == {0, 3} and typical_step([timeline]) == 4


def test_clocks_that_differ_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's clock is ahead by 1000 s, as another host's may be; rank 2's is the same as rank
    0's."""
    import threading

    # not the thread's number: a rank that starts late is given that of one that has ended
    clock = threading.local()

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return time.perf_counter() + getattr(clock, "ahead", 0.0)

    monkeypatch.setattr(timeline_module, "time", Clock)

    def job(world: Any) -> float:
        if world.rank == 1:
            clock.ahead = 1000.0
        return clock_offset(world)

    offsets = md.run(job, size=3)
    assert offsets[0] == offsets[2] == 0.0 and offsets[1] == pytest.approx(-1000.0, abs=0.5)


def test_records_of_any_length() -> None:
    def job(world: Any) -> Any:
        return gather_records(
            world,
            {
                "rank": world.rank,
                "values": list(range(world.rank)),
                "text": "é" * world.rank,
                "array": np.arange(world.rank),
            },
        )

    gathered = md.run(job, size=4)
    assert gathered[1:] == [None] * 3
    for rank, record in enumerate(gathered[0]):
        assert (
            record["rank"] == rank
            and list(record["values"]) == list(range(rank))
            and record["text"] == "é" * rank
        )
        np.testing.assert_array_equal(record["array"], np.arange(rank))


def test_a_record_of_rank_0_is_on_every_rank() -> None:
    """Outside every memory account; what the others pass counts for nothing."""

    def job(world: Any) -> Any:
        with account.use(account.MemoryAccount(limit=100)) as memory:
            told = hand_out_record(world, ["why", {"rank": world.rank, "bytes": bytes(1000)}])
            return [told, memory.peak["total"]]

    assert md.run(job, size=3) == [[["why", {"rank": 0, "bytes": bytes(1000)}], 0]] * 3


@pytest.mark.sampled
@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_records_are_no_matter_of_device_memory(transport: str) -> None:
    """A run that kept to its limit must not break it when it is over."""

    def job(world: Any) -> list[int] | None:
        world.barrier()
        with account.use(account.MemoryAccount(limit=500)) as memory:
            gathered = gather_records(world, bytes(1000 * (1 + world.rank)))
            return gathered and [*map(len, gathered), memory.peak["total"]]

    assert md.run(job, size=3, transport=transport) == [[1000, 2000, 3000, 0], None, None]
