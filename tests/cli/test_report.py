"""`minidist report` of real runs: its exit status, the page's place, and that its tables are those
of the terminal."""

import json
import re
from pathlib import Path

import pytest
from report_runs import write_run

from minidist.cli import main

TINY = [
    "train",
    "--transport",
    "threads",
    "--steps",
    "3",
    "--batch",
    "6",
    "--context",
    "8",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "1",
    "--quiet",
]


def missing(page: Path) -> list[str]:
    return re.findall(r"<p class=missing>(.*?)</p>", page.read_text(encoding="utf-8"))


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minidist.cli.train.sample.WRITTEN", 5)
    for name in ("draw_loss", "draw_why"):
        monkeypatch.setattr(
            f"minidist.cli.train.run_folder.{name}",
            lambda path, *about, **options: path.write_text(""),
        )


@pytest.mark.usefixtures("no_figure")
def test_a_run_has_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main([*TINY, "-n", "3", "--why", "--out", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    assert "report.html" in capsys.readouterr().out
    page = run / "report.html"
    assert missing(page) == []
    text = page.read_text(encoding="utf-8")
    assert all(
        f'data-chart="{key}"' in text
        for key in (
            "losses",
            "seconds",
            "timeline",
            "overlap",
            "causes",
            "rank_steps",
            "memory",
            "memory_step",
            "traffic",
            "stragglers",
            "watts",
        )
    )
    _causes_are_those_of_the_terminal(run, text)
    assert (
        "minidist train -n 3 " in text
        and "2(P-1)/P × " in text
        and "have no one receiver" not in text
    )


def _causes_are_those_of_the_terminal(run: Path, text: str) -> None:
    """The milliseconds by cause of the step that --why chose; trace.json has whole nanoseconds."""
    why = json.loads((run / "metrics.json").read_text())["why"]
    numbers = json.loads(
        re.findall(r'<script type="application/json" id="numbers">(.*?)</script>', text)[0]
    )["overlap"]
    (step,) = [step for step in numbers["steps"] if step["step"] == why["step"]]
    for place, cause in enumerate(numbers["causes"]):
        ms = 1e3 * why["causes"].get(cause, 0)
        assert sum(still[place] for still in step["still"]) == pytest.approx(ms, abs=0.02), cause


@pytest.mark.soak
@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize(
    "words",
    [
        "-n 1",
        "-n 3 --strategy parameter-server",
        "--strategy data-parallel --replicas 3",
        "-n 2 --plan pp=2 --layers 2",
        "-n 2 --zero 3 --offload all",
        "-n 4 --plan dp=2,ep=2 --experts 4",
        "-n 2 --local-steps 3",
        "-n 2 --compress top-k",
    ],
)
def test_runs_of_every_kind(words: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    kind = [
        word
        for word in TINY
        if "data-parallel" not in words or word not in ("--transport", "threads")
    ]
    assert main([*kind, *words.split(), "--out", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    assert all(
        "--why" in line or "No memory inside" in line for line in missing(run / "report.html")
    )


def test_results_without_what_is_made_of_them_are_shown(tmp_path: Path) -> None:
    """metrics.json of a run that died when its results were written has neither its ranks nor its
    formulas."""
    run = write_run(tmp_path / "run")
    metrics = json.loads((run / "metrics.json").read_text())
    losses = len(metrics["losses"])
    results = {name: metrics[name] for name in metrics if name not in ("ranks", "formula")}
    (run / "metrics.json").write_text(json.dumps(results | {"validation_loss": None}))
    assert main(["report", str(run)]) == 0
    lines = missing(run / "report.html")
    assert any("validation loss" in line for line in lines)
    assert not any("cannot be read" in line for line in lines)
    assert f"{losses} steps" in (run / "report.html").read_text(encoding="utf-8")


def test_the_page_goes_where_out_says(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--out", str(tmp_path / "one.html")]) == 0
    assert (tmp_path / "one.html").stat().st_size > 1 << 20 and not (run / "report.html").exists()


@pytest.mark.parametrize("words", [["nothing"], ["."], ["run", "--out", "no/folder/one.html"], []])
def test_bad_input_is_one_line_and_status_2(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    assert main(["report", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
