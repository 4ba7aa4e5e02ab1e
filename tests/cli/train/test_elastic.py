"""Elastic jobs of `minidist train`: their options, and jobs that save, stop and go on with the same
bits."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jobs import torchrun
from leftovers import nothing_left

from minidist.cli import main
from minidist.cli.train import elastic
from minidist.cli.train import settings as train_settings
from minidist.cli.train.command import add_arguments
from minidist.cli.train.run_folder import run_folder
from minidist.console import Parser
from minidist.parallel.state.manifest import checkpoints, read_manifest, step_of, unpacked

TINY = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--batch", "8"]
SAME = ("losses", "weights_sha256", "validation_loss")
PROCESS = str(Path(__file__).parents[2] / "support" / "elastic_train.py")


def settings_of(*options):
    parser = Parser()
    add_arguments(parser)
    return train_settings.check(parser.parse_args([*TINY, *options]))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        (["--elastic=2:4"], (2, 3, 4)),
        (["--elastic=1:4", "--plan=dp=2,tp=2"], (2, 4)),
        (["--elastic=2:4", "--zero=1", "--shard=2"], (2, 4)),
        (["--elastic=4:8"], (4,)),
    ],
)
def test_the_plan_says_which_numbers_of_ranks_are_possible(options, sizes, monkeypatch, tmp_path):
    """The inner axes stay, and dp shrinks."""
    started = []
    monkeypatch.setattr(
        elastic, "spawn_elastic", lambda command, bounds, **_: started.append(bounds) or 0
    )
    settings = settings_of(*options, f"--out={tmp_path}", "--max-restarts=7", "--spares=1")
    assert elastic.start_elastic(settings, 4, None) == 0
    assert (started[0].sizes, started[0].restarts, started[0].spares) == (sizes, 7, 1)
    assert [settings.plan(size).size for size in sizes] == list(sizes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--spares=1"], "--spares: is for an elastic job; add --elastic LEAST:MOST"),
        (["-n4", "--elastic=4"], "'4' is not LEAST:MOST, two numbers of ranks, as 4:8"),
        (["-n4", "--elastic=5:8"], "-n 4: --elastic 5:8 allows 5 to 8 ranks"),
        (
            ["--elastic=1:1"],
            "--elastic 1:1: is for ranks that are started here; give -n, without another launcher",
        ),
        (
            ["-n4", "--elastic=2:4", "--strategy=parameter-server"],
            "leave out --graph and other strategies",
        ),
        (
            ["-n4", "--elastic=2:4", "--local-steps=4", "--steps=8"],
            "--elastic with --local-steps is not offered: save with --save-every N, and continue "
            "with --resume RUN",
        ),
        (
            ["-n4", "--elastic=2:4", "--strategy=parameter-server", "--asynchronous"],
            "--elastic with --asynchronous is not offered: leave out --elastic",
        ),
        (
            [
                "-n4",
                "--elastic=2:4",
                "--strategy=parameter-server",
                "--asynchronous",
                "--local-steps=4",
                "--steps=8",
            ],
            "--elastic with --asynchronous is not offered: leave out --elastic",
        ),
        (["-n4", "--elastic=2:4", "--transport=mpi"], "--transport mpi cannot"),
    ],
)
def test_what_is_refused(options, said, capsys, tmp_path):
    assert main(["train", *TINY, *options, f"--out={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--hosts=a:3,b:4"], "--hosts: minidist train starts its ranks on this host only"),
        (["--hosts=a:3,b:4", "--ssh=ssh -p 2"], "--hosts: minidist train starts its ranks on"),
        (["--ssh=ssh -p 2"], "--ssh: minidist train starts its ranks on this host only"),
        (
            ["--hosts=a:3,b:4", "--elastic=4:7"],
            "…, with --save-every N and --resume RUN in place of --elastic",
        ),
    ],
)
def test_several_hosts_are_those_of_launch(options, said, capsys, tmp_path):
    assert main(["train", *TINY, *options, f"--out={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert said in error and "use minidist launch --hosts a:3,b:4 -m minidist train" in error
    assert error.count("\n") == 1


def test_hosts_are_no_option_of_the_help():
    parser = Parser()
    add_arguments(parser)
    assert "--hosts" not in parser.format_help() and "--ssh" not in parser.format_help()


def test_ranks_of_another_launcher_are_not_ours_to_replace(capsys, tmp_path, monkeypatch):
    for name, value in torchrun(0, size=1).items():
        monkeypatch.setenv(name, value)
    assert main(["train", *TINY, "--elastic=1:2", f"--out={tmp_path / 'run'}"]) == 2
    assert (
        "minidist train: --elastic 1:2: torchrun started this rank, and only the "
        in capsys.readouterr().err
    )


@pytest.fixture(scope="module")
def book(tmp_path_factory):
    """A text of two thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50))
    )
    return file


def train(monkeypatch, deaths, *options):
    """The exit status of `minidist train`, whose processes die as DEATHS says
    (elastic_train.py)."""
    spawn = elastic.spawn_elastic

    def spawn_elastic(command, bounds, **rest):
        return spawn([sys.executable, PROCESS, json.dumps(deaths), *command[3:]], bounds, **rest)

    with monkeypatch.context() as patch, nothing_left():
        patch.setattr(elastic, "spawn_elastic", spawn_elastic)
        patch.setattr(
            "minidist.cli.train.run_folder.draw_loss",
            lambda path, losses, **options: path.write_text(""),
        )
        return main(["train", "--quiet", *map(str, options)])


def metrics_of(run):
    return json.loads((run / "metrics.json").read_text())


def test_all_processes_of_a_job_are_forked_of_its_launcher(book, tmp_path):
    """Python starts once, and so loads once. Killed, the launcher takes all with it, and another
    may begin at once."""
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(
        f"import os; os.write(os.open({str(tmp_path / 'starts')!r}, os.O_CREAT | os.O_WRONLY | "
        "os.O_APPEND), b'.')"
    )
    run = tmp_path / "run"
    with nothing_left() as environment:
        job = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "minidist",
                "train",
                "-n2",
                "--elastic=2:2",
                "--spares=1",
                *TINY,
                "--steps=100000",
                f"--data={book}",
                f"--out={run}",
                "--quiet",
            ],
            env={**environment, "PYTHONPATH": str(tmp_path / "start")},
            stderr=subprocess.PIPE,
        )
        while not (
            (run / elastic.RECORD).exists() and "stepped" in (run / elastic.RECORD).read_text()
        ):
            assert job.poll() is None, job.stderr.read()
            time.sleep(0.01)
        job.kill()
        job.wait()
        with run_folder(run):
            pass
    job.stderr.close()
    assert (tmp_path / "starts").read_text() == "."


@pytest.mark.soak
def test_an_elastic_run_that_loses_all_copies_is_stopped_and_goes_on(
    book, tmp_path, monkeypatch, capfd
):
    """A rank and its partner die, and the spares take the newest checkpoint; then all are told to
    stop. Same bits."""
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    words = [*TINY, "--dtype=float64", "--zero=1", f"--data={book}", "--steps=12"]
    assert train(monkeypatch, {}, *words, "-n2", "--transport=threads", f"--out={whole}") == 0
    deaths = {"0": (6, "kill"), "1": (6, "kill"), "2": (8, "tell")}
    assert (
        train(
            monkeypatch,
            deaths,
            *words,
            "-n2",
            "--elastic=2:2",
            "--spares=2",
            "--save-every=4",
            "--keep=2",
            f"--out={run}",
        )
        == 75
    )
    error = capfd.readouterr().err
    assert (
        f"continuing from {run / 'step-000004'}" in error
        and "told to stop after step 9 of 12, saved in " in error
    )
    assert [step_of(folder) for folder in checkpoints(run)] == [8, 9]
    assert (
        unpacked(read_manifest(run / "step-000009")["about"]["metrics"]["generations"])
        == [1] * 4 + [2] * 5
    )
    assert (
        train(
            monkeypatch,
            {"1": (10, "kill")},
            f"--resume={run}",
            "--elastic=2:2",
            "--spares=1",
            "--save-async",
        )
        == 0
    )
    ours = metrics_of(run)
    theirs = metrics_of(whole)
    assert [ours[key] for key in SAME] == [theirs[key] for key in SAME]
    assert (ours["resumed_from"], ours["generation"], ours["checkpoint"]["steps"]) == (9, 2, [12])
    assert ours["generations"] == [0] * 9 + [1] + [2] * 2
    first, second = ours["elastic"]
    assert (first["step"], second["step"], second["joined"], first["ended"] > first["began"]) == (
        9,
        10,
        [2],
        True,
    )
    assert [(rank["process"], rank["rank"], rank["steps"]) for rank in first["ranks"]] == [
        (0, 0, 1)
    ]
    sent = first["ranks"][0]["sent_bytes"]["dp"]
    assert sent and ours["ranks"][0]["sent_bytes"]["dp"].keys() == sent.keys()
    spans = [
        event["args"]
        for event in json.loads((run / "trace.json").read_text())["traceEvents"]
        if event["ph"] == "X"
    ]
    assert {(span["generation"], span["process"]) for span in spans} == {(1, 0), (2, 0), (2, 2)}
    names = [json.loads(line)["event"] for line in (run / "elastic.jsonl").read_text().splitlines()]
    assert names.count("end") == 2


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        ["--zero=3", "--save-every=3"],
        ["--plan=dp=1,tp=3", "--width=24", "--heads=3", "--save-every=5", "--save-async"],
        ["--save-every=1", "--save-async"],
        ["--zero=2", "--save-every=2"],
    ],
)
@pytest.mark.parametrize(
    ("every", "deaths"),
    [
        (1, {"0": (7, "kill"), "1": (7, "kill"), "2": (7, "kill")}),
        (1, {"1": (6, "kill"), "2": (6, "kill")}),
        (1, {"0": (1, "kill"), "1": (1, "kill"), "2": (1, "kill")}),
        (3, {"2": (5, "kill"), "3": (9, "kill")}),
        (1, {"1": (6, "kill"), "2": (6, "tell")}),
        (2, {"0": (1, "tell")}),
    ],
)
def test_however_ranks_die_and_stop(options, every, deaths, book, tmp_path, monkeypatch):
    """With spares and replacements the run, resumed where it was stopped, has the bits of one that
    nothing disturbs."""
    words = [*TINY, "--dtype=float64", f"--data={book}", "--steps=12", *options, "-n3"]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    assert train(monkeypatch, {}, *words, "--transport=threads", f"--out={whole}") == 0
    elastic = [
        "--elastic=3:3",
        "--spares=1",
        f"--peer-copies={every}",
        "--max-restarts=3",
        "--elastic-wait=60",
    ]
    status = train(monkeypatch, deaths, *words, *elastic, f"--out={run}")
    assert status == (75 if "tell" in str(deaths) else 0)
    if status:
        assert train(monkeypatch, {"1": (11, "kill")}, f"--resume={run}") == 0
    ours = metrics_of(run)
    theirs = metrics_of(whole)
    assert [ours[key] for key in SAME] == [theirs[key] for key in SAME]
    assert len(ours["generations"]) == 12 and len(ours["elastic"]) == ours["generation"] > 1
    assert step_of(checkpoints(run)[-1]) == 12


@pytest.mark.soak
def test_an_elastic_run_is_resumed_on_other_numbers_of_ranks(book, tmp_path, monkeypatch, capfd):
    """-n or --plan alone: elastic no longer. An elastic job wants as many ranks as at its start."""
    words = [*TINY, "--dtype=float64", f"--data={book}", "--steps=20", "--lr-schedule=constant"]
    whole = tmp_path / "whole"
    run = tmp_path / "run"
    assert train(monkeypatch, {}, *words, f"--out={whole}") == 0
    deaths = {"2": (3, "kill"), "0": (5, "tell")}
    assert (
        train(
            monkeypatch,
            deaths,
            *words,
            "--zero=1",
            "-n3",
            "--elastic=1:4",
            "--save-every=4",
            f"--out={run}",
        )
        == 75
    )
    assert read_manifest(checkpoints(run)[-1])["about"]["ranks"] == 2
    assert train(monkeypatch, {"0": (9, "tell")}, f"--resume={run}") == 75
    assert read_manifest(checkpoints(run)[-1])["about"]["ranks"] == 3
    assert train(monkeypatch, {"0": (14, "tell")}, f"--resume={run}", "-n2", "--elastic=1:2") == 75
    assert read_manifest(checkpoints(run)[-1])["about"]["ranks"] == 2
    assert train(monkeypatch, {}, f"--resume={run}", "-n2", "--zero=0", "--transport=threads") == 0
    assert "elastic" not in metrics_of(run)
    assert metrics_of(run)["losses"] == pytest.approx(metrics_of(whole)["losses"], abs=1e-10)


@pytest.mark.soak
@pytest.mark.parametrize("step", [3, 22])
def test_verify_compares_what_any_rank_has_kept(step, book, tmp_path, monkeypatch):
    """Rank 0 is lost before or after the steps that are compared; the others have their weights."""
    run = tmp_path / "run"
    assert (
        train(
            monkeypatch,
            {"0": (step, "kill")},
            *TINY,
            "--dtype=float64",
            "--zero=3",
            f"--data={book}",
            "--verify",
            "--steps=24",
            "-n3",
            "--elastic=2:3",
            f"--out={run}",
        )
        == 0
    )
    told = metrics_of(run)
    assert told["verify"]["compared"] < 1e-10 and told["generation"] == 2
