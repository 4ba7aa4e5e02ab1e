"""Every lesson as a whole: its five parts, its commands, its break-its, its figure, and that words
match files."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from minidist import launch, lessons
from minidist.cli import COMMANDS
from minidist.data import digits
from minidist.errors import MinidistError
from minidist.grading import load_module
from minidist.lessons.running import Break, run_break

ROOT = lessons.FOLDER.parent
IN_TURN = str(ROOT / "tests" / "support" / "in_turn.py")
NUMBERS = [lesson.number for lesson in lessons.every_lesson()]
BREAKS: dict[tuple[str, str], Break] = {
    (number, name): chosen
    for number in NUMBERS
    for name, chosen in load_module(lessons.find(number).part("lesson.py"), number).BREAKS.items()
}
THREADS_ONLY = [
    (number, name)
    for number, name in BREAKS
    if (number, name) not in {("01", "one-rank-dies"), ("01", "rank-in-program")}
]
SLOW_BREAKS = {
    ("05", "average-twice"),
    ("07", "average-twice"),
    ("07", "per-epoch"),
    ("07", "step-early"),
    ("08", "average-twice"),
    ("10", "no-gradient-back"),
    ("12", "no-f"),
    ("14", "average-twice"),
    ("14", "read-too-early"),
    ("15", "average-twice"),
    ("15", "forget-to-free"),
    ("15", "update-too-early"),
    ("16", "average-twice"),
    ("16", "forget-to-free"),
    ("16", "stale-weights"),
    ("17", "average-twice"),
    ("17", "norm-twice"),
    ("17", "own-norm"),
    ("17", "rows-by-rank"),
    ("20", "one-buffer"),
    ("20", "no-prefetch"),
    ("21", "lost-residual"),
    ("21", "no-masking"),
    ("22", "mask-off-by-one"),
    ("23", "forward-order"),
    ("23", "late-bucket"),
}
"""Those that compute for most of a second or longer: run with the soak tests. Every lesson keeps
others."""
SHORT = ["02"]
COMMAND = re.compile(r"^(?:CUDA_VISIBLE_DEVICES=\S+ )?(?:python|mpirun|minidist) .*$", re.MULTILINE)


def readme(number: str) -> str:
    """A lesson's story."""
    return lessons.find(number).part("README.md").read_text(encoding="utf-8")


def commands(number: str) -> list[str]:
    """The commands that stand in the story's code blocks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", readme(number), re.DOTALL | re.MULTILINE)
    return [line for language, block in blocks if not language for line in COMMAND.findall(block)]


def run(command: list[str], **options: object) -> str:
    """Run a command in the repository's root; its output, stdout and stderr together."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PATH": _path()}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def _path() -> str:
    """The search path with this interpreter's own programs first."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def test_the_lessons_that_there_are() -> None:
    assert NUMBERS == [
        "00",
        "01",
        "02",
        "03",
        "04",
        "05",
        "06",
        "07",
        "08",
        "09",
        "10",
        "11",
        "12",
        "13",
        "14",
        "15",
        "16",
        "17",
        "18",
        "19",
        "20",
        "21",
        "22",
        "23",
        "24",
        "25",
        "26",
    ]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_story_has_its_parts(number: str) -> None:
    text = readme(number)
    for part in (
        "## ",
        "Break it",
        "What the notes say",
        "Quiz",
        "<details>",
        "Your turn",
        "![",
        "figure.png",
    ):
        assert part in text, f"lesson {number} lacks {part}"
    assert lessons.find(number).part("figure.png").stat().st_size > 20_000
    for link in re.findall(r"`(minidist/[\w/.]+)`", text):
        assert (ROOT / link).exists(), f"lesson {number} names {link}"


@pytest.mark.parametrize("number", [number for number in NUMBERS if "```mermaid" in readme(number)])
def test_the_mermaid_diagram_is_the_recorded_one(number: str) -> None:
    block = re.findall(r"```mermaid\n(.*?)```", readme(number), re.DOTALL)
    assert block == [lessons.find(number).part("figure.mmd").read_text(encoding="utf-8")]


@pytest.mark.parametrize("number", NUMBERS)
def test_each_break_it_is_told_and_each_told_exists(number: str) -> None:
    told = {match[1] for match in re.finditer(r"--break ([\w-]+)", "\n".join(commands(number)))}
    assert told == {name for lesson, name in BREAKS if lesson == number}


@pytest.mark.parametrize("number", NUMBERS)
def test_the_commands_name_files_and_options_that_exist(number: str) -> None:
    known = {f"minidist {command}" for command in COMMANDS}
    for command in commands(number):
        words = command.split()
        assert words[0] in ("python", "mpirun", "minidist") or words[0].startswith("CUDA_"), command
        for word in words:
            assert (
                not word.endswith(".py") or word.startswith("exercise_") or (ROOT / word).is_file()
            ), command
        assert words[0] != "minidist" or " ".join(words[:2]) in known, command


@pytest.mark.sampled(every=12)
@pytest.mark.parametrize(
    "number,name",
    [
        pytest.param(*pair, marks=[pytest.mark.soak] if pair in SLOW_BREAKS else [])
        for pair in THREADS_ONLY
    ],
)
def test_break_it(number: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends in the error that it states, or prints what it states."""
    chosen = BREAKS[number, name]
    run_break(name, chosen)
    assert chosen.says in capsys.readouterr().out


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number,name", [pair for pair in BREAKS if pair not in THREADS_ONLY])
def test_break_it_in_processes(number: str, name: str) -> None:
    output = run([sys.executable, str(lessons.find(number).part("lesson.py")), "--break", name])
    assert BREAKS[number, name].says in output


def test_a_break_states_its_result() -> None:
    vague = [name for name, chosen in BREAKS.items() if len(chosen.says) < 10]
    assert vague == []
    assert MinidistError not in {chosen.error for chosen in BREAKS.values()}


@pytest.mark.sampled(every=11)
@pytest.mark.parametrize(
    "ranks", ["2", *(pytest.param(size, marks=pytest.mark.soak) for size in ("1", "3", "4", "5"))]
)
@pytest.mark.parametrize(
    "numbers",
    [
        SHORT,
        *([number for number in NUMBERS if number not in SHORT][turn::10] for turn in range(10)),
    ],
    ids=" ".join,
)
def test_under_mpirun(numbers: list[str], ranks: str, tmp_path: Path) -> None:
    """Run as `mpirun -n P python lesson.py` does, several lessons per start; a SHORT one in every
    run."""
    run(["mpirun", "-n", ranks, sys.executable, IN_TURN, str(tmp_path), *numbers])
    off = [
        (number, *where) for number in numbers for where in cells_off(tmp_path / f"{number}.json")
    ]
    assert off == []


def cells_off(file: Path) -> list[tuple[str, list[object]]]:
    """Return (table, row) of each verdict in a lesson's tables that measured and formula differ."""
    tables = json.loads(file.read_text(encoding="utf-8"))["tables"]
    differs = re.compile(r"off( [+-][\d.]+ %| by .+)?")
    return [
        (table["title"], row)
        for table in tables
        for row in table["rows"]
        if any(differs.fullmatch(str(cell)) for cell in row)
    ]


def test_a_difference_in_a_table_is_found(tmp_path: Path) -> None:
    file = tmp_path / "tables.json"
    rows = [
        ["a", 3, "ok"],
        ["b", 4, "off +0.1 %"],
        ["c", 5, "off by 2"],
        ["mean of means", "off 66%"],
    ]
    file.write_text(json.dumps({"tables": [{"title": "Bytes", "rows": rows}]}))
    assert cells_off(file) == [("Bytes", rows[1]), ("Bytes", rows[2])]


def test_on_ranks_of_our_own_launcher(tmp_path: Path) -> None:
    output = run(["minidist", "lesson", "03", "-n", "2", "--json", str(tmp_path / "tables.json")])
    assert "2 ranks over shm" in output
    tables = {
        table["title"]: table["rows"]
        for table in json.loads((tmp_path / "tables.json").read_text())["tables"]
    }
    assert tables["n = 840 KiB: the busiest rank's all-reduce"][1][:2] == [2, 2]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("number", ["03", "00"])
def test_the_figure_is_drawn_from_a_run(number: str, tmp_path: Path) -> None:
    run(["minidist", "lesson", number, "--figure", "--out", str(tmp_path)])
    assert (tmp_path / "figure.png").stat().st_size > 20_000
    assert (tmp_path / "figure.mmd").read_text() == lessons.find(number).part(
        "figure.mmd"
    ).read_text()


@pytest.mark.soak
@pytest.mark.parametrize(
    "number",
    [
        "01",
        "02",
        "04",
        "05",
        "06",
        "07",
        "08",
        "09",
        "10",
        "11",
        "12",
        "13",
        "14",
        "15",
        "16",
        "17",
        "18",
        "19",
        "20",
        "21",
        "22",
        "23",
        "24",
        "26",
    ],
)
def test_the_slow_figures_are_drawn_from_a_run(number: str, tmp_path: Path) -> None:
    run([sys.executable, str(lessons.find(number).part("figure.py")), "--out", str(tmp_path)])
    assert (tmp_path / "figure.png").stat().st_size > 20_000


@pytest.mark.soak  # tests/launch/test_spawning.py has two nodes of its own
def test_two_launchers_make_the_tables_of_the_notes(tmp_path: Path) -> None:
    output = run([sys.executable, str(lessons.find("01").part("lesson.py")), "--two-machines"])
    rows = re.findall(r"node(\d) +│ +GPU(\d) │ +(\d) │ +(\d) │ +(\d) ", output)
    assert rows == [
        (str(rank // 4), str(rank % 4), str(rank), str(rank % 4), str(rank // 4))
        for rank in range(8)
    ]


@pytest.mark.soak
def test_the_mnist_example_trains_the_same_model_on_any_number_of_ranks() -> None:
    pytest.importorskip("sklearn", reason="needs the extra `digits`")
    script = lessons.find("07").part("mnist.py")
    example = load_module(script, "07")
    alone, three = (launch.run(example.train, digits.load(), 1, size=size)[0] for size in (1, 3))
    assert (
        alone[0][:2] == pytest.approx(three[0][:2], rel=1e-6)
        and three[0][3] < 500 < alone[0][3] == 1437
    )
    output = run(["mpirun", "-n", "2", sys.executable, str(script), "--epochs", "1"])
    assert f"loss {alone[0][1]:.4f}" in output and "rank 0 of 2 read 719 of 1437" in output


@pytest.mark.parametrize(
    ("number", "place", "title", "told"),
    [
        ("04", 3, "all_reduce on tori", "the lesson's third table; bytes over the busiest link"),
        (
            "04",
            4,
            "two machines; between them",
            "Section 4 of the output has messages",
        ),
        ("10", 3, "N2:166", "The lesson's third table cuts a model of that size"),
    ],
)
def test_a_table_that_a_story_counts_is_at_that_place(
    number: str, place: int, title: str, told: str
) -> None:
    lesson = lessons.find(number)
    titles = re.findall(
        r"page\.table\(\s*f?\"(.+?)\"", lesson.part("lesson.py").read_text(encoding="utf-8")
    )
    assert title in titles[place - 1]
    assert told in " ".join(lesson.part("README.md").read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("number", "heading", "told"),
    [
        (
            "04",
            "5.1  One-sided",
            "Under `mpirun` section 5.1 of the output compares a **one-sided** message",
        ),
        ("04", "6  Several spines", "Section 6 of the output takes 16 machines"),
        ("04", "7  Where ranks lie", "both directions together (section 7 of the output)"),
        ("07", "3.2  Overlap over links", "section 3.2 of the lesson's output measures it"),
        ("07", "9  What the notes claim", "Section 9 of the lesson's output has that table"),
        ("07", "9  What the notes claim", "section 9 of the output, on simulated GPUs (lesson 24)"),
    ],
)
def test_a_section_that_a_story_names_is_that_section(number: str, heading: str, told: str) -> None:
    lesson = lessons.find(number)
    assert f'page.heading("{heading}' in lesson.part("lesson.py").read_text(encoding="utf-8")
    assert told in " ".join(lesson.part("README.md").read_text(encoding="utf-8").split())
