"""Test what diagnose finds, as the report shows it: with its evidence, and what a slow rank
costs."""

import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import texts, two_ranks, write_run
from step_records import MIB, linked, run_of, table, write_records
from watched import WatchedRun

from minidist.cli import main
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.report import diagnosis, links, ranks
from minidist.observe.report.run_files import RunFiles, read_run
from minidist.observe.report.steps import recorded_steps


@pytest.mark.parametrize(
    "records",
    [
        table(cpu=1.5),
        table(5, input=lambda step, line: 0.03),
        linked(),
        table(steps=40, rss=lambda step, line: 80 * MIB + 2 * MIB * (step - 8)),
    ],
    ids=["slow", "late", "link", "leak"],
)
def test_the_report_shows_what_diagnose_finds_with_its_evidence(records: Any) -> None:
    run = run_of(records)
    found = diagnosis.findings_of(run)
    assert found == diagnose([], records.ranks).findings and len(found) == 1
    section = diagnosis.section(run, found)
    what, evidence = section.tables
    assert what.rows[0][1:3] == [found[0].cause, found[0].sure]
    assert section.lines[1].lower() == f"{found[0].what}. what to do: {found[0].advice}.".lower()
    assert [row[2] for row in evidence.rows] == [*found[0].evidence] != []
    assert found[0].advice in texts(section) and "in steps/" in section.lines[0]


def test_what_recorders_and_records_tell_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank comes late to its calls, and its records say why: diagnosis names the cause, as on the
    command line."""
    WatchedRun(tmp_path, steps=30, slow=2, alive=False).end(0, 1, 2, 3)
    write_records(tmp_path, table(4, 30, cpu=1.5))
    found = diagnosis.findings_of(read_run(tmp_path))
    assert found is not None and [(one.cause, one.ranks) for one in found] == [
        ("slow compute", (2,))
    ]
    assert main(["diagnose", str(tmp_path)]) == 1 and found[0].what in capsys.readouterr().out
    section = diagnosis.section(read_run(tmp_path), found)
    assert "in flight/ and steps/" in section.lines[0]


def test_what_a_slow_rank_costs_is_replayed() -> None:
    """In each recorded step rank 1 computes 3 ms longer than rank 0."""
    sick = table(2, 20, victim=1, at=5, cpu=1.5)
    run = RunFiles(Path("run"), timelines=two_ranks(12), records=sick.ranks)
    found = diagnosis.findings_of(run)
    (line,) = diagnosis.section(run, found, recorded_steps(run.timelines)).lines[2:]
    assert (
        line.endswith("would take 7 ms in place of 10 ms, by a replay of its events.")
        and "work of rank 1" in line
    )
    (number,) = re.findall(r"step (\d+) would", line)
    assert 5 < int(number) < 12
    # none, none of its steps, no waits
    for timelines in ([], two_ranks(5), two_ranks(12, waits=False)):
        run.timelines = timelines
        assert len(diagnosis.section(run, found, recorded_steps(timelines)).lines) == 2


def test_a_clean_run_and_one_without_records() -> None:
    clean = run_of(table())
    assert (
        diagnosis.findings_of(clean) == []
        and "nothing wrong" in diagnosis.section(clean, []).lines[0]
    )
    nothing = RunFiles(Path("run"))
    assert diagnosis.findings_of(nothing) is None
    assert [
        len(part.missing)
        for part in (
            diagnosis.section(nothing, None),
            ranks.section(nothing),
            links.section(nothing),
        )
    ] == [1, 1, 1]


def test_records_that_make_no_sense_are_no_diagnosis() -> None:
    records = table()
    records.ranks[1].steps[5]["cpu"] = "much"
    run = run_of(records)
    assert (
        diagnosis.findings_of(run) is None
        and "cannot be judged" in diagnosis.section(run, None).missing[0]
    )


def test_a_run_that_keeps_no_recorders_is_diagnosed_from_its_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So is one that was told to stop."""
    assert main(["diagnose", str(write_records(tmp_path, table(cpu=1.5)))]) == 1
    told = capsys.readouterr().out
    assert "rank 2 computes" in told
    assert told.startswith(
        "ranks 0-3, only by the records of their steps: no flight recorder is here"
    )


def test_a_folder_of_records_alone_is_a_run(tmp_path: Path) -> None:
    write_records(tmp_path, table(3, cpu=1.5))
    run = read_run(tmp_path)
    assert run.ranks == 3 and sorted(run.records) == [0, 1, 2]
    assert main(["report", str(tmp_path)]) == 0
    assert "Rank 2 computes 1.5" in (tmp_path / "report.html").read_text()
    assert sorted(read_run(write_run(tmp_path / "whole")).records) == [0, 1]
