"""What diagnose finds, the steps of each rank, and the links, as the report shows them."""

import re
from pathlib import Path
from typing import Any

import pytest
from report_runs import two_ranks, write_run
from step_records import MIB, linked, table, write_records
from watched import WatchedRun

from minidist.cli import main
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.report import diagnosis, links, ranks
from minidist.observe.report.run_files import RunFiles, read_run
from minidist.observe.report.section import Section
from minidist.observe.report.steps import recorded_steps


def run_of(records: Any) -> RunFiles:
    return RunFiles(Path("run"), records=records.ranks)


def texts(section: Section) -> str:
    """All that the section shows."""
    cells = [cell for found in section.tables for row in (found.head, *found.rows) for cell in row]
    return "\n".join([*section.lines, *section.missing, *cells])


@pytest.mark.parametrize("records", [
    table(cpu=1.5), table(5, input=lambda step, line: 0.03), linked(),
    table(steps=40, rss=lambda step, line: 80 * MIB + 2 * MIB * (step - 8))], ids=["slow", "late", "link", "leak"])
def test_the_report_shows_what_diagnose_finds_with_its_evidence(records: Any) -> None:
    run = run_of(records)
    found = diagnosis.findings_of(run)
    assert found == diagnose([], records.ranks).findings and len(found) == 1
    section = diagnosis.section(run, found)
    what, evidence = section.tables
    assert what.rows[0][1] == found[0].cause and what.rows[0][3] == found[0].what
    assert [row[2] for row in evidence.rows] == [*found[0].evidence] != []
    assert found[0].advice in texts(section) and "in steps/" in section.lines[0]


def test_what_recorders_and_records_tell_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank comes late to its calls, and its records say why: diagnosis names the cause, as on the command line."""
    WatchedRun(tmp_path, steps=30, slow=2, alive=False).end(0, 1, 2, 3)
    write_records(tmp_path, table(4, 30, cpu=1.5))
    found = diagnosis.findings_of(read_run(tmp_path))
    assert found is not None and [(one.cause, one.ranks) for one in found] == [("slow compute", (2,))]
    assert main(["diagnose", str(tmp_path)]) == 1 and found[0].what in capsys.readouterr().out
    section = diagnosis.section(read_run(tmp_path), found)
    assert "in flight/ and steps/" in section.lines[0]


def test_what_a_slow_rank_costs_is_replayed() -> None:
    """In each recorded step rank 1 computes 3 ms longer than rank 0."""
    sick = table(2, 20, victim=1, at=5, cpu=1.5)
    run = RunFiles(Path("run"), timelines=two_ranks(12), records=sick.ranks)
    found = diagnosis.findings_of(run)
    (line,) = diagnosis.section(run, found, recorded_steps(run.timelines)).lines[1:]
    assert line.endswith("would take 7 ms in place of 10 ms, by a replay of its events.") and "work of rank 1" in line
    (number,) = re.findall(r"step (\d+) would", line)
    assert 5 < int(number) < 12
    for timelines in ([], two_ranks(5), two_ranks(12, waits=False)):        # none, none of its steps, no waits
        run.timelines = timelines
        assert len(diagnosis.section(run, found, recorded_steps(timelines)).lines) == 1


def test_a_clean_run_and_one_without_records() -> None:
    clean = run_of(table())
    assert diagnosis.findings_of(clean) == [] and "nothing wrong" in diagnosis.section(clean, []).lines[0]
    nothing = RunFiles(Path("run"))
    assert diagnosis.findings_of(nothing) is None
    assert [len(part.missing) for part in (diagnosis.section(nothing, None), ranks.section(nothing),
                                           links.section(nothing))] == [1, 1, 1]


def test_records_that_make_no_sense_are_no_diagnosis() -> None:
    records = table()
    records.ranks[1].steps[5]["cpu"] = "much"
    run = run_of(records)
    assert diagnosis.findings_of(run) is None and "cannot be judged" in diagnosis.section(run, None).missing[0]


def test_a_run_that_keeps_no_recorders_is_diagnosed_from_its_records(tmp_path: Path,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """So is one that was told to stop."""
    assert main(["diagnose", str(write_records(tmp_path, table(cpu=1.5)))]) == 1
    told = capsys.readouterr().out
    assert "rank 2 computes" in told and told.startswith("ranks 0-3, steps alone: no flight recorder is there")


def test_each_value_is_shown_by_rank_and_step() -> None:
    section = ranks.section(run_of(table(3, 20, victim=1, at=12, input=lambda step, line: 0.03)))
    data = section.charts[0].data
    assert (section.charts[0].key, data["ranks"], data["steps"], data["every"]) == ("rank_steps", [0, 1, 2],
                                                                                    [*range(20)], 1)
    assert data["values"]["waiting for data"] == {"unit": "ms", "rows": [[1.0] * 20, [1.0] * 12 + [30.0] * 8,
                                                                         [1.0] * 20]}
    assert data["values"]["targets"]["rows"][0] == [512.0] * 20
    medians = section.tables[0]
    assert medians.head[:3] == ["rank", "own computation, ms", "waiting for data, ms"]
    assert [row[2] for row in medians.rows] == ["1.00"] * 3 and [row[4] for row in medians.rows] == ["2.00"] * 3


def test_many_steps_and_ranks_keep_their_highest_values_and_the_culprits() -> None:
    once = table(60, 500, victim=57, at=333, cpu=lambda step, line: 0.5 if step == 333 else 0.05)
    section = ranks.section(run_of(once), culprits={57})
    data = section.charts[0].data
    assert len(data["ranks"]) == ranks.MOST_RANKS and data["ranks"][-1] == 57 and data["every"] == 5
    row = data["values"]["own computation"]["rows"][-1]
    assert len(row) == 100 <= ranks.MOST_COLUMNS and max(row) == row[333 // 5] == 500.0
    assert "48 of 60 ranks" in texts(section) and len(section.tables[0].rows) == 60
    assert len(section.charts[1].data["lines"]) == ranks.MOST_LINES
    assert 57 in [line["rank"] for line in section.charts[1].data["lines"]]


def test_the_memory_of_each_rank_and_its_growth() -> None:
    leak = table(3, 40, victim=1, at=0, rss=lambda step, line: 80 * MIB + 3 * MIB * step // 2)
    section = ranks.section(run_of(leak))
    chart, memory = section.charts[1], section.tables[1]
    assert chart.key == "rank_memory" and [line["rank"] for line in chart.data["lines"]] == [0, 1, 2]
    assert chart.data["lines"][1]["bytes"]["mean"][-1] == 80 * MIB + 3 * MIB * 39 // 2
    assert memory.rows == [["0", "80.0", "+0.0", "0.000"], ["1", "138.5", "+51.0", "1.500"],
                           ["2", "80.0", "+0.0", "0.000"]]
    threads = table(2)
    for each in threads.ranks.values():
        for line in each.steps:
            del line["rss"], line["others"]
    section = ranks.section(run_of(threads))
    assert len(section.charts) == 1 and "ranks that are threads share one process" in texts(section)
    assert "other threads" not in section.charts[0].data["values"] and section.missing == []
    short = ranks.section(run_of(table(2, 3)))
    assert [row[1:] for row in short.tables[1].rows] == [["80.0", "+0.0", "0.000"]] * 2


def test_digests_that_are_equal_and_that_differ() -> None:
    assert "--digest-every" in texts(ranks.section(run_of(table())))
    drifted = table(4)
    for rank, each in drifted.ranks.items():
        for line in each.steps[3::4]:
            line["digest"] = {f"dp.{rank // 2}": "odd" if rank == 3 and line["step"] > 8 else "even"}
    assert ranks.section(run_of(drifted)).tables[-1].rows == [
        ["dp.0", "ranks 0-1", "5", "19", "equal"], ["dp.1", "ranks 2-3", "5", "19", "they differ from step 11 on"]]


def test_the_line_of_a_busy_thread_is_shown() -> None:
    records = table(others=lambda step, line: 0.06)
    for line in records.ranks[2].steps[8:]:
        line["busy"] = "hog.py:7" if line["step"] % 3 else "hog.py:9"
    section = ranks.section(run_of(records))
    assert section.tables[0].head[-1] == "line of the busy other thread"
    assert [row[-1] for row in section.tables[0].rows] == ["", "", "hog.py:7", ""]


def test_the_slowest_link_stands_first() -> None:
    section = links.section(run_of(linked()))
    (found,) = section.tables
    assert found.rows[0][:4] == ["1", "2", "50,000", "30.000"] and len(found.rows) == 8
    assert {row[3] for row in found.rows[1:]} == {"10.000"}
    assert "from rank 1 to rank 2: a message of 50,000 bytes takes 30 ms there" in section.lines[0]
    assert "the middle of all 8 links is 10 ms" in section.lines[0]
    none = links.section(run_of(table()))
    assert none.tables == none.missing == [] and "No link could be measured" in none.lines[0]


def test_a_folder_of_records_alone_is_a_run(tmp_path: Path) -> None:
    write_records(tmp_path, table(3, cpu=1.5))
    run = read_run(tmp_path)
    assert run.ranks == 3 and sorted(run.records) == [0, 1, 2]
    assert main(["report", str(tmp_path)]) == 0
    assert "rank 2 computes 1.5" in (tmp_path / "report.html").read_text()
    assert sorted(read_run(write_run(tmp_path / "whole")).records) == [0, 1]
