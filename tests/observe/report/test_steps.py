"""Recorded steps: which the page keeps, their spans and arrows, their memory, and where their ranks
stood still."""

from dataclasses import replace
from pathlib import Path

import pytest
from report_runs import MS, two_ranks

from minidist.observe.report import exposed, steps
from minidist.observe.report.run_files import RunFiles
from minidist.observe.report.steps import kept, middle, recorded_steps
from minidist.observe.timeline import Span
from minidist.observe.why import CAUSES


def run_of(count: int = 3, *, waits: bool = True) -> RunFiles:
    return RunFiles(Path("run"), timelines=two_ranks(count, waits=waits))


def test_a_step_is_recorded_when_all_ranks_have_it_whole() -> None:
    run = run_of()
    run.timelines[1].spans = [
        span for span in run.timelines[1].spans if (span.name, span.details["step"]) != ("step", 2)
    ]
    found = recorded_steps(run.timelines)
    assert [step.step for step in found] == [0, 1]
    assert all(
        {span.details["step"] for spans in step.spans for span in spans} == {step.step}
        for step in found
    )
    assert recorded_steps([]) == []


def test_a_span_over_two_steps_is_in_both() -> None:
    run = run_of()
    run.timelines[0].add(Span("save", "moves", 5 * MS, 15 * MS))
    assert [
        any(span.name == "save" for span in step.spans[0]) for step in recorded_steps(run.timelines)
    ] == [True, True, False]


def test_the_page_keeps_the_middle_first_last_and_slowest_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timelines = two_ranks(200)
    (slow,) = [
        span for span in timelines[0].spans if (span.name, span.details["step"]) == ("step", 120)
    ]
    timelines[0].spans[timelines[0].spans.index(slow)] = replace(slow, stop=slow.stop + 5 * MS)
    found = recorded_steps(timelines)
    numbers = [step.step for step in kept(found)]
    assert len(numbers) == steps.MOST_STEPS and numbers == sorted(numbers)
    assert {0, 1, 2, 120, 199, middle(found).step} <= {*numbers}
    monkeypatch.setattr(steps, "MOST_SPANS", 1)
    assert [step.step for step in kept(found)] == [middle(found).step]


def test_spans_are_packed_from_the_steps_begin() -> None:
    run = run_of()
    found = recorded_steps(run.timelines)
    section = steps.section(run, found, kept(found))
    data = section.charts[0].data
    first = data["steps"][1]
    assert (first["step"], first["us"]) == (1, 10000)
    flat = first["spans"][1]
    spans = {
        data["kinds"][flat[at]]["name"]: (flat[at + 1], flat[at + 2])
        for at in range(0, len(flat), 3)
    }
    assert spans == {
        "forward": (0, 2000),
        "backward": (2000, 7000),
        "all_reduce bucket 0": (8000, 1000),
        "wait for gradients": (8000, 1000),
        "all_reduce to rank 0": (8000, 1000),
        "all_reduce from rank 0": (8000, 1000),
        "optimizer": (9000, 1000),
    }
    assert sorted(first["arrows"]) == [[0, 8000, 1, 9000], [1, 8000, 0, 9000]]
    assert first["memory"][0] == {
        "us": [0, 1000, 3000, 6000, 10000],
        "bytes": {"parameters": [100] * 5, "activations": [20, 10, 50, 20, 20]},
    }
    assert [len(step["memory"]) for step in data["steps"]] == [2, 2, 0]


def test_every_exposed_millisecond_has_its_cause() -> None:
    run = run_of()
    found = recorded_steps(run.timelines)
    section = exposed.section(run, found, found)
    step = section.charts[0].data["steps"][1]
    slower = CAUSES.index("slower rank")
    late = CAUSES.index("late bucket")
    assert step["length"] == pytest.approx([10, 10])
    assert step["still"][0][slower] == pytest.approx(3) and step["still"][0][late] == pytest.approx(
        1
    )
    assert step["still"][1][slower] == 0 and step["still"][1][late] == pytest.approx(1)
    assert [(row["rank"], row["cause"], row["by"]) for row in step["rows"]][:1] == [(0, slower, 1)]
    assert step["rows"][0]["where"] == "minidist/parallel/data/ddp.py:155"


def test_without_waits_there_are_sums_alone() -> None:
    run = run_of(waits=False)
    found = recorded_steps(run.timelines)
    section = exposed.section(run, found, found)
    data = section.charts[0].data
    assert data["causes"] == ["stood still"] and data["steps"][0]["rows"] == []
    assert data["steps"][0]["still"] == [[pytest.approx(4)], [pytest.approx(1)]]
    assert [row[1:] for row in section.tables[0].rows] == [
        ["6.00", "4.00", "0.00", "4.00", "0.0"],
        ["9.00", "1.00", "0.00", "1.00", "0.0"],
    ]
