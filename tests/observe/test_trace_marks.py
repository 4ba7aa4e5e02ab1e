"""Arrows and counters of trace.json: each arrow has both ends, and the bytes of a step are those of
the ledger."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.observe.read_trace import read_trace
from minidist.observe.timeline import MEMORY_EVERY, Span, Timeline, write_perfetto
from minidist.observe.trace_marks import sent_in_steps
from minidist.parallel.hybrid.hybrid import Plan, Trainer

STEPS = 2


def traced(world: Any) -> tuple[list[Timeline] | None, dict[str, int]]:
    """Steps of a pipeline of two stages on two replicas, and what the ledger has of them."""
    timeline = Timeline(world.rank)
    config = tiny(layers=2)
    timeline.follow(world.ledger, receives=True)
    trainer = Trainer(Plan(dp=2, pp=2, microbatches=3), config, world, recorder=timeline)
    timeline.follow_memory(trainer.account)
    for step in range(STEPS):
        trainer.step(global_batch(step, 6, config))
    trainer.close()
    sent = {axis: sum(verbs.values()) for axis, verbs in world.ledger.sent_bytes("step").items()}
    return timeline.collect(world), sent


@pytest.fixture(scope="module")
def ran() -> list[Any]:
    return md.run(traced, size=4)


def events_of(timelines: list[Timeline], folder: Path) -> list[dict[str, Any]]:
    write_perfetto(folder / "trace.json", timelines)
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def test_every_message_has_an_arrow_with_both_ends(ran: list[Any], tmp_path: Path) -> None:
    events = events_of(ran[0][0], tmp_path)
    starts, ends = (
        {event["id"]: event for event in events if event["ph"] == kind} for kind in "sf"
    )
    spans = [event for event in events if event["ph"] == "X"]
    sends = [event for event in spans if event["cat"] == "messages"]
    receives = [event for event in spans if event["cat"] == "receives"]
    assert starts.keys() == ends.keys() and len(starts) == len(sends) == len(receives) > 30
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"] and end["bp"] == "e"
        sent = [one for one in sends if (one["pid"], one["ts"]) == (start["pid"], start["ts"])]
        got = [
            one
            for one in receives
            if one["pid"] == end["pid"] and one["ts"] <= end["ts"] <= one["ts"] + one["dur"]
        ]
        ways = {(one["args"]["src"], one["args"]["dst"], one["args"]["message"]) for one in sent}
        assert ways & {
            (one["args"]["src"], one["args"]["dst"], one["args"]["message"]) for one in got
        }
        assert any(one["args"]["dst"] == end["pid"] for one in sent)
    for one in sends:  # what is sent arrives: the same bytes under the same name
        (other,) = [
            got
            for got in receives
            if all(got["args"][key] == one["args"][key] for key in ("src", "dst", "message"))
        ]
        assert other["args"]["nbytes"] == one["args"]["nbytes"]
        assert other["args"]["verb"] in (one["args"]["verb"], "recv")


def test_an_arrow_that_lost_an_end_is_left_out(tmp_path: Path) -> None:
    sender = Timeline(0)
    receiver = Timeline(1)
    for number in ("7.1", "7.2"):
        sender.add(Span("send", "messages", 1.0, 2.0, {"src": 0, "dst": 1, "message": number}))
    receiver.add(Span("recv", "receives", 1.5, 2.5, {"src": 0, "dst": 1, "message": "7.2"}))
    receiver.add(Span("recv", "receives", 1.5, 2.5, {"src": 0, "dst": 1, "message": "7.3"}))
    events = [event for event in events_of([sender, receiver], tmp_path) if event["ph"] in "sf"]
    assert [(event["ph"], event["pid"], event["ts"]) for event in events] == [
        ("s", 0, 0.0),
        ("f", 1, 1499999.999),
    ]


def test_bytes_of_a_step_are_those_of_the_ledger(ran: list[Any], tmp_path: Path) -> None:
    events = events_of(ran[0][0], tmp_path)
    for rank, (_, sent) in enumerate(ran):
        counters = [
            event["args"]
            for event in events
            if event["ph"] == "C" and event["name"] == "sent bytes" and event["pid"] == rank
        ]
        assert len(counters) == STEPS
        assert {axis: sum(each[axis] for each in counters) for axis in counters[0]} == sent
    assert sent_in_steps(Timeline(0)) == {}


def test_memory_is_recorded_to_its_peak_and_read_again(ran: list[Any], tmp_path: Path) -> None:
    timelines = ran[0][0]
    events = events_of(timelines, tmp_path)
    again = read_trace(tmp_path / "trace.json")
    assert [timeline.rank for timeline in again] == [0, 1, 2, 3]
    for one, other in zip(timelines, again, strict=True):
        assert [span.name for span in other.spans] == [span.name for span in one.spans]
        assert [span.row for span in other.spans] == [span.row for span in one.spans]
        highest = max(now["total"] for _, now in one.memory)
        assert max(sum(now.values()) for _, now in other.memory) == highest
    assert any(
        event["ph"] == "C" and event["args"]["activations"] > 0
        for event in events
        if event["name"] == "memory"
    )


def test_following_memory_keeps_the_highest_moment_and_ends_at_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("minidist.observe.timeline.time.perf_counter", lambda: now[0])
    memory = account.MemoryAccount()
    timeline = Timeline(0)
    held = []
    timeline.follow_memory(memory, limit=3)
    for moment, nbytes in ((0.0, 8), (0.5, 80), (0.9, 0), (1.2, 16), (2.4, 8), (9.0, 8), (9.1, 8)):
        now[0] = moment * MEMORY_EVERY
        if nbytes == 0:
            held.pop()
        held.append(memory.hold(np.empty(max(nbytes, 1), np.uint8), "workspace"))
    assert [(round(moment / MEMORY_EVERY, 3), now["total"]) for moment, now in timeline.memory] == [
        (0.5, 88),
        (1.2, 25),
        (2.4, 33),
    ]
    assert memory.follower is None
