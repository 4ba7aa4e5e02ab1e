"""The links as a run has measured them, the slowest first."""

from step_records import linked, run_of, table

from minidist.observe.report import links


def test_the_slowest_link_stands_first() -> None:
    section = links.section(run_of(linked()))
    (found,) = section.tables
    assert found.rows[0][:4] == ["1", "2", "50,000", "30.000"] and len(found.rows) == 8
    assert {row[3] for row in found.rows[1:]} == {"10.000"}
    assert "from rank 1 to rank 2: a message of 50,000 bytes takes 30 ms there" in section.lines[0]
    assert "the middle of all 8 links is 10 ms" in section.lines[0]
    none = links.section(run_of(table()))
    assert none.tables == none.missing == [] and "No link could be measured" in none.lines[0]
