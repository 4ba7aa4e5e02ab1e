"""`minidist train` tells of each step: metrics.jsonl, --metrics-port, energy by rank."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from minidist.cli import main
from minidist.observe.energy import ASSUMED_WATTS, Meter
from minidist.observe.exporter import Exporter
from minidist.observe.other_load import OtherLoad
from minidist.observe.step_log import MOST_BYTES, StepState, read_step_log

TINY = [
    "train",
    "--steps",
    "4",
    "--batch",
    "4",
    "--context",
    "8",
    "--layers",
    "1",
    "--width",
    "8",
    "--heads",
    "1",
]
THREADS = ["-n", "2", "--transport", "threads"]


@pytest.fixture
def book(tmp_path: Path) -> str:
    (tmp_path / "book.txt").write_text("a b c d e f g\n" * 200)
    return str(tmp_path / "book.txt")


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_each_step_is_a_line_and_energy_without_counters_is_an_estimate(
    book: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on appends its steps."""
    monkeypatch.setattr("minidist.cli.train.telemetry.POWERCAP", tmp_path / "none")
    run = tmp_path / "run"
    assert main([*TINY, *THREADS, "--data", book, "--out", str(run), "--save-every", "2"]) == 0
    printed = capfd.readouterr()
    metrics = json.loads((run / "metrics.json").read_text())
    energy = metrics["energy"]
    lines = read_step_log(run / "metrics.jsonl")
    assert [line["loss"] for line in lines] == metrics["losses"] and [
        line["step"] for line in lines
    ] == [1, 2, 3, 4]
    assert all(
        len(line) <= MOST_BYTES
        for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    )
    assert lines[-1]["sent_bytes"] == metrics["ranks"][0]["sent_bytes"]
    assert [line["joules"] for line in lines] == sorted(line["joules"] for line in lines)
    assert energy["source"] == lines[-1]["energy_source"] == "estimate" and energy["watts_assumed"]
    assert (
        energy["watts"] == ASSUMED_WATTS["cpu"]
        and len(energy["by_rank"]) == 2
        and min(energy["by_rank"]) > 0
    )
    assert (
        energy["joules"]
        == sum(energy["by_rank"])
        == pytest.approx(10 * sum(energy["busy_seconds"]))
    )
    assert (
        energy["joules_a_step"] == energy["joules"] / 4
        and energy["joules_a_token"] == energy["joules"] / 4 / 32
    )
    assert printed.err == "" and "\nenergy, an estimate: " in printed.out
    assert (
        "(busy seconds × watts; no energy counter was read; 10 W, assumed: --watts W gives yours)"
        in printed.out
    )

    assert (
        main(["train", *THREADS, "--quiet", "--resume", str(run), "--steps", "6", "--watts", "4"])
        == 0
    )
    energy = json.loads((run / "metrics.json").read_text())["energy"]
    assert [line["step"] for line in read_step_log(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert (energy["watts"], energy["watts_assumed"]) == (4.0, False)
    assert energy["joules_a_step"] == energy["joules"] / 2


def test_counters_of_the_host_are_counted_once_for_its_ranks(
    book: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that spends 3 J in all, of which two ranks read each."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    for name, text in (
        ("name", "package-0"),
        ("max_energy_range_uj", "1000000000"),
        ("energy_uj", "999000000"),
    ):
        (zone / name).write_text(text)
    stop = Meter.stop

    def spend(meter: Meter) -> None:
        (zone / "energy_uj").write_text("2000000")
        stop(meter)

    monkeypatch.setattr("minidist.cli.train.telemetry.POWERCAP", zone.parent)
    monkeypatch.setattr(Meter, "stop", spend)
    assert main([*TINY, *THREADS, "--data", book, "--out", str(tmp_path / "run")]) == 0
    energy = json.loads((tmp_path / "run" / "metrics.json").read_text())["energy"]
    assert energy["source"] == "rapl" and energy["joules"] == 3.0 and not energy["estimate"]
    assert sum(energy["by_rank"]) == pytest.approx(3.0) and min(energy["by_rank"]) > 0
    assert [counter["ranks"] for counter in energy["counters"].values()] == [[0, 1]]
    printed = capfd.readouterr()
    assert "\nenergy: 0.75 J a step, 0.0234 J a token, 3 J in all, by rank " in printed.out
    assert "estimate" not in printed.out and printed.err == ""


def test_counters_that_cannot_be_read_are_one_line(
    book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "powercap" / "intel-rapl:0").mkdir(parents=True)  # without a file
    monkeypatch.setattr("minidist.cli.train.telemetry.POWERCAP", tmp_path / "powercap")
    assert main([*TINY, *THREADS, "--data", book, "--out", str(tmp_path / "run")]) == 0
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and error.endswith("energy_uj; energy is an estimate\n")
    assert (
        json.loads((tmp_path / "run" / "metrics.json").read_text())["energy"]["source"]
        == "estimate"
    )


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("options", "says"), [([], 1), (["--threads", "2"], 0), (["--quiet"], 0), (THREADS, 0)]
)
def test_threads_of_one_process_on_busy_cores_are_told_once(
    options: list[str],
    says: int,
    book: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("minidist.cli.train.telemetry.LOOK", 0.0)
    monkeypatch.setattr(
        "minidist.cli.train.command.limit_blas_threads", lambda threads, local_size: 2
    )
    monkeypatch.setattr("minidist.device.cores.of_all_ranks", lambda: 2)
    monkeypatch.setattr(OtherLoad, "cores", lambda load: 1.8)
    assert main([*TINY, *options, "--data", book, "--out", str(tmp_path / "run")]) == 0
    assert (
        capfd.readouterr().out.count(
            "other programs keep 1.8 of 2 cores busy, so BLAS's 2 threads wait"
        )
        == says
    )


def test_the_port_shows_each_step_and_is_free_after_the_run(
    book: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    seen = []
    show = Exporter.show

    def show_and_scrape(exporter: Exporter, state: StepState) -> None:
        show(exporter, state)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            seen.append(
                {
                    family.name: family.samples
                    for family in text_string_to_metric_families(answer.read().decode())
                }
            )

    monkeypatch.setattr(Exporter, "show", show_and_scrape)
    run = tmp_path / "run"
    assert (
        main(
            [
                *TINY,
                *THREADS,
                "--data",
                book,
                "--out",
                str(run),
                "--quiet",
                "--metrics-port",
                str(port),
            ]
        )
        == 0
    )
    metrics = json.loads((run / "metrics.json").read_text())
    assert [found["minidist_step"][0].value for found in seen] == [1, 2, 3, 4]
    assert [found["minidist_loss"][0].value for found in seen] == metrics["losses"]
    sent = {
        (sample.labels["axis"], sample.labels["verb"]): sample.value
        for sample in seen[-1]["minidist_sent_bytes"]
    }
    assert sent == {
        (axis, verb): nbytes
        for axis, verbs in metrics["ranks"][0]["sent_bytes"].items()
        for verb, nbytes in verbs.items()
    }
    assert {"total", "parameters"} <= {
        sample.labels["category"] for sample in seen[-1]["minidist_memory_bytes"]
    }
    with pytest.raises(URLError):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        pytest.param(THREADS, "rank 0: ", id="threads"),
        pytest.param(["-n", "2"], "", id="ranks", marks=pytest.mark.soak),
    ],
)
def test_a_port_that_is_taken_is_one_line(
    ranks: list[str], said: str, book: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert (
            main(
                [
                    *TINY,
                    *ranks,
                    "--data",
                    book,
                    "--out",
                    str(tmp_path / "run"),
                    "--quiet",
                    "--metrics-port",
                    port,
                ]
            )
            == 2
        )
    assert capfd.readouterr().err == (
        f"minidist train: {said}--metrics-port {port}: Address already in use; choose "
        "another port, or leave it out\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [[], ["-n", "2"]])
def test_lines_are_whole_after_kill_9(ranks: list[str], book: str, tmp_path: Path) -> None:
    words: list[Any] = [
        sys.executable,
        "-m",
        "minidist",
        *TINY,
        *ranks,
        "--steps",
        "1000000",
        "--data",
        book,
        "--out",
        tmp_path / "run",
    ]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as run:
        assert run.stdout is not None
        shown = [
            line
            for line, _ in zip(
                (line for line in run.stdout if line.startswith("step ")), range(2), strict=False
            )
        ]
        os.killpg(run.pid, signal.SIGKILL)
    steps = [line["step"] for line in read_step_log(tmp_path / "run" / "metrics.jsonl")]
    assert steps == [*range(1, len(steps) + 1)] and len(steps) >= int(shown[-1].split()[1])
