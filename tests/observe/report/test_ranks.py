"""The steps of each rank, as the report shows them: what it did, its memory, its digests."""

from report_runs import texts
from step_records import MIB, run_of, table

from minidist.observe.report import ranks


def test_each_value_is_shown_by_rank_and_step() -> None:
    section = ranks.section(run_of(table(3, 20, victim=1, at=12, input=lambda step, line: 0.03)))
    data = section.charts[0].data
    assert (section.charts[0].key, data["ranks"], data["steps"], data["every"]) == (
        "rank_steps",
        [0, 1, 2],
        [*range(20)],
        1,
    )
    assert data["values"]["waiting for data"] == {
        "unit": "ms",
        "rows": [[1.0] * 20, [1.0] * 12 + [30.0] * 8, [1.0] * 20],
    }
    assert data["values"]["targets"]["rows"][0] == [512.0] * 20
    medians = section.tables[0]
    assert medians.head[:3] == ["rank", "own computation, ms", "waiting for data, ms"]
    assert [row[2] for row in medians.rows] == ["1.00"] * 3 and [
        row[4] for row in medians.rows
    ] == ["2.00"] * 3


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
    chart = section.charts[1]
    memory = section.tables[1]
    assert chart.key == "rank_memory" and [line["rank"] for line in chart.data["lines"]] == [
        0,
        1,
        2,
    ]
    assert chart.data["lines"][1]["mib"]["mean"][-1] == 138.5
    assert memory.rows == [
        ["0", "80.0", "+0.0", "0.000"],
        ["1", "138.5", "+51.0", "1.500"],
        ["2", "80.0", "+0.0", "0.000"],
    ]
    threads = table(2)
    for each in threads.ranks.values():
        for line in each.steps:
            del line["rss"], line["others"]
    section = ranks.section(run_of(threads))
    assert len(section.charts) == 1 and "ranks that are threads share one process" in texts(section)
    assert "other threads" not in section.charts[0].data["values"] and section.missing == []
    short = ranks.section(run_of(table(2, 3)))
    assert [row[1:] for row in short.tables[1].rows] == [["80.0", "+0.0", "not known"]] * 2


def test_digests_that_are_equal_and_that_differ() -> None:
    assert "--digest-every" in texts(ranks.section(run_of(table())))
    drifted = table(4)
    for rank, each in drifted.ranks.items():
        for line in each.steps[3::4]:
            line["digest"] = {
                f"dp.{rank // 2}": "odd" if rank == 3 and line["step"] > 8 else "even"
            }
    assert ranks.section(run_of(drifted)).tables[-1].rows == [
        ["dp.0", "ranks 0-1", "5", "19", "equal"],
        ["dp.1", "ranks 2-3", "5", "19", "they differ from step 11 on"],
    ]


def test_the_line_of_a_busy_thread_is_shown() -> None:
    records = table(others=lambda step, line: 0.06)
    for line in records.ranks[2].steps[8:]:
        line["busy"] = "hog.py:7" if line["step"] % 3 else "hog.py:9"
    section = ranks.section(run_of(records))
    assert section.tables[0].head[-1] == "line of the busy other thread"
    assert [row[-1] for row in section.tables[0].rows] == ["", "", "hog.py:7", ""]
