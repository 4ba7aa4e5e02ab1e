"""What the documents show of a command's output is what it prints, and no block is older than its
code."""

import json
from pathlib import Path

import pytest

from minidist.errors import ConfigError
from minidist.lessons import drawn, printed, stamps

PRINTOUTS = {found.name: found for found in printed.every_printout()}
TABLES = [
    {
        "title": "Bytes of a step",
        "columns": ["", "sent", "", "rounds by"],
        "rows": [["ring", 60288, "ok", "2.8e-06"], ["a|b", 7, "ok", "0e+00"]],
    }
]
STORY = """# A story

<!-- printed by: python lessons/03_ring/lesson.py; Bytes -->
| | sent | rounds by |
| --- | --- | --- |
| `ring` | 60,288 | 9.1e-06 |
| a\\|b | 7 | 0e+00 |

<!-- printed by: python lessons/03_ring/lesson.py; Rows -->
```text
one
```
"""


def written(folder: Path, text: str) -> printed.Printout:
    """The first printout of a document with this text."""
    document = folder / "README.md"
    document.write_text(text, encoding="utf-8")
    return next(printed.Printout(document, *key) for key in printed.marked_blocks(document))


def advice(printout: printed.Printout, files: list[str]) -> str:
    """Return what is older, where it stands, and the command that makes it again."""
    lines = ", ".join(str(block.line) for block in printout.blocks)
    number = printout.folder.name[:2]
    kind = "measured" if printout.measured else "printed"
    where = f"{stamps.label(printout.document)}, line {lines}"
    return (
        f"{where}: older than {', '.join(files[:4])}{' …' * (len(files) > 4)}; make it again "
        f"(python -m minidist.lessons.drawn --redraw {number} --only {kind}), or look at it and "
        "say --same or --later"
    )


def test_no_printed_block_is_older_than_its_code() -> None:
    found = stamps.older([*PRINTOUTS.values()], stamps.read_stamps(printed.STAMPS))
    assert not found, "\n".join(advice(PRINTOUTS[name], files) for name, files in found.items())


def test_a_block_that_is_known_to_be_older_is_older() -> None:
    kept = stamps.read_stamps(printed.STAMPS)
    assert set(kept) == set(PRINTOUTS)
    known = [name for name, stamp in kept.items() if stamp.get("older")]
    assert [name for name in known if not stamps.changed(PRINTOUTS[name], kept[name])] == []


@pytest.mark.parametrize("document", printed.documents(), ids=stamps.label)
def test_every_block_that_shows_output_names_its_command(document: Path) -> None:
    assert [
        f"{stamps.label(document)}:{line}: {what}"
        for line, what in printed.unmarked(document.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("```\nminidist lesson 03\nrank 0: 6 messages\n```", 3),
        ("a\n\n```text\nrank 0: 6 messages\n```", 3),
        ("| | step |\n| --- | --- |\n| ring | 12.5 ms |", 1),
        ("    ConfigError: no such lesson", 1),
        ("<!-- by hand: as sold -->\n| a |\n| --- |\n| 3 GB/s |\n\n| a |\n| --- |\n| 1,024 |", 6),
        (
            "```\nminidist train \\\n    --steps 3\n```\n\n| bytes | `2(P-1)/P n` |\n| --- | "
            "--- |\n| N2 §12.1 | 4 |",
            None,
        ),
    ],
)
def test_output_without_a_command_is_found(text: str, line: int | None) -> None:
    assert [found for found, _ in printed.unmarked(text)] == [line] * (line is not None)


def test_a_table_is_printed_by_its_head_and_keeps_its_dress(tmp_path: Path) -> None:
    printout = written(tmp_path, STORY)
    table, text = printout.blocks
    assert (table.line, table.title, table.is_table, text.lines, text.is_table) == (
        3,
        "Bytes",
        True,
        ("one",),
        False,
    )
    fresh = printed.table_lines(table, TABLES)
    assert fresh == [*table.lines[:2], "| `ring` | 60,288 | 2.8e-06 |", "| a\\|b | 7 | 0e+00 |"]
    assert printed.alike(table.lines, fresh)
    assert not printed.alike(table.lines, [line.replace("60,288", "60,289") for line in fresh])
    assert not printed.alike(table.lines, [line.replace("2.8e-06", "2.8e-04") for line in fresh])
    assert not printed.alike(table.lines, [line.replace("2.8e-06", "0.0e+00") for line in fresh])
    assert printed.alike(("off by 4e-16",), ["off by 0e+00"])
    assert not printed.alike(("off by 0e+00",), ["off by 4e-16"])
    assert printed.text_lines(text, "Rows of a run\n    two\n    three\n\nfour") == ["two", "three"]


@pytest.mark.parametrize(
    ("story", "says"),
    [
        (STORY.replace("| sent |", "| got |"), "has no column 'got'"),
        (STORY.replace("; Bytes", "; Seconds"), "0 titles begin"),
        (
            STORY.replace("| | sent | rounds", "| | sent | sent | rounds"),
            "has no column 'sent', or too few",
        ),
    ],
)
def test_what_a_command_does_not_print_is_said(story: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        printed.table_lines(written(tmp_path, story).blocks[0], TABLES)


def test_a_mark_without_a_block_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: the mark needs a table"):
        written(tmp_path, "<!-- printed by: python a.py; Bytes -->\n\n| a |\n")


def test_a_command_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="begins with one of python, minidist"):
        printed.run_command("make all", tmp_path, None)
    with pytest.raises(
        ConfigError, match=r"^python -c 1/0: status 1: ZeroDivisionError: division by zero$"
    ):
        printed.run_command("python -c 1/0", tmp_path, None)


def test_a_changed_block_is_named_and_renewed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place, and nothing else of the document."""

    def ran(command: str, folder: Path, file: Path | None) -> str:
        assert file
        file.write_text(json.dumps({"tables": TABLES}))
        return "Rows of a run\ntwo\nthree\n"

    monkeypatch.setattr(printed, "run_command", ran)
    monkeypatch.setattr(printed, "label", lambda file: file.name)
    printout = written(tmp_path, STORY.replace("60,288", "60,289"))
    kept = {printout.name: stamps.read_stamps(drawn.STAMPS)["lessons/03_ring/figure.py"]}
    assert "Bytes" in stamps.older([printout], kept)[printout.name]
    assert printout.renew()
    assert printout.document.read_text() == STORY.replace("9.1e-06", "2.8e-06").replace(
        "one\n```", "two\nthree\n```"
    )
    assert "README.md:3: Bytes: changed" in capsys.readouterr().out
    assert stamps.older([printout], {printout.name: printout.stamp()}) == {}


@pytest.mark.soak
@pytest.mark.parametrize(
    "name", [name for name, printout in PRINTOUTS.items() if not printout.measured]
)
def test_the_documents_show_what_the_commands_print(name: str) -> None:
    for block, lines in PRINTOUTS[name].fresh().items():
        assert printed.alike(block.lines, lines), (
            f"{stamps.label(PRINTOUTS[name].document)}:{block.line}"
        )
