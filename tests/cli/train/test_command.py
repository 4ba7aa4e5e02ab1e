"""`minidist train`, as a user runs it: under mpirun, on ranks of its own, alone; and with
mistakes."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import minidist as md
from minidist.cli import main
from minidist.cli.train import command as train
from minidist.cli.train import settings as train_settings
from minidist.comm.cost.link_model import LinkCost, Profile, profile_path, save_profile
from minidist.console import Parser
from minidist.data import text
from minidist.parallel.data.accumulation import elements_sent
from minidist.parallel.step.replicas import weights_digest

TINY = [
    "--steps",
    "4",
    "--batch",
    "5",
    "--context",
    "16",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--dtype",
    "float64",
]
MINIDIST = [sys.executable, "-m", "minidist"]


NO_FIGURE = """import os
if "0" in (os.environ.get("RANK"), os.environ.get("PMI_RANK")):
    from minidist.cli.train import run_folder
    run_folder.draw_loss = lambda path, losses, **options: path.write_text(str(len(losses)))
"""
"""A sitecustomize.py: Python runs it when it starts. In processes of their own, runs do without
matplotlib, too."""


def starting(folder: Path, text: str = "") -> str:
    """PYTHONPATH for processes that begin with NO_FIGURE and `text`."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(NO_FIGURE + text)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def execute(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`; a busy machine has a hundred seconds."""
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": starting(folder / "start")}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def execute_here(words: list[str]) -> subprocess.CompletedProcess[str]:
    """The same in this process."""
    out = io.StringIO()
    err = io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(words)
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def on_threads(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    folder: Path,
    options: list[str],
    nodes: tuple[int, ...] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Return what `minidist train -n N` prints and its metrics, with threads for the processes that
    it would start: each parses its command line. `runs` has the processes. nodes: the node of each
    rank."""

    def threads(command: list[str], size: int, patience: float, limits: Any) -> int:
        def rank(world: Any) -> int:
            parser = Parser()
            train.add_arguments(parser)
            world.nodes = nodes or world.nodes
            return train.train(
                train_settings.check(parser.parse_args(command[command.index("train") + 1 :])),
                world,
                1,
            )

        return max(md.run(rank, size=size))

    monkeypatch.setattr(train, "spawn", threads)
    monkeypatch.chdir(folder)
    assert main(["train", *TINY, *options, "--out", "run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out, json.loads((folder / "run" / "metrics.json").read_text())


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of a few thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(
            f"Line {i}: the quick brown fox jumps over {i * i} lazy dogs.\n" for i in range(120)
        )
    )
    return file


@pytest.fixture(scope="module")
def runs(
    book: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], str, Path]]:
    """The same training alone, on two ranks of ours and on two of mpirun's: metrics, what it
    printed, its folder.

    Alone it runs in this process. tests/observe/test_plots.py draws the figure.
    """
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name, prefix, options in (
        ("alone", [], ["--verify"]),
        ("ours", [], ["-n", "2", "--verify"]),
        ("mpirun", ["mpirun", "-n", "2"], []),
    ):
        words = [
            "train",
            *TINY,
            "--data",
            str(book),
            "--out",
            str(folder / name),
            "--json",
            str(folder / f"{name}.json"),
            *options,
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "minidist.cli.train.run_folder.draw_loss",
                lambda path, losses, **options: path.touch(),
            )
            done = (
                execute([*prefix, *MINIDIST, *words], folder)
                if name != "alone"
                else execute_here(words)
            )
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        found[name] = (
            json.loads((folder / f"{name}.json").read_text()),
            done.stdout,
            folder / name,
        )
    return found


def test_json_holds_what_the_design_says(runs: dict[str, Any]) -> None:
    for name, (metrics, printed, _) in runs.items():
        size = 1 if name == "alone" else 2
        assert ("of what ranks of one host share" in printed) == (name == "ours")
        assert metrics["plan"]["dp"] == metrics["size"] == size
        assert (
            metrics["transport"]
            == {"alone": metrics["transport"], "ours": "shm", "mpirun": "mpi"}[name]
        )
        assert metrics["threads"] >= 1 and metrics["versions"]["numpy"] == np.__version__
        assert len(metrics["losses"]) == 4 and metrics["losses"][-1] < metrics["losses"][0]
        assert metrics["tokens_per_second"] == pytest.approx(5 * 16 / metrics["step_seconds"])
        assert metrics["validation_loss"] > 0 and len(metrics["weights_sha256"]) == 64
        assert [rank["rank"] for rank in metrics["ranks"]] == list(range(size))
        for rank in metrics["ranks"]:
            assert rank["coordinates"] == {"dp": rank["rank"]}
            nbytes = 8 * metrics["parameters"]
            for category, expected in (
                ("parameters", nbytes),
                ("gradients", nbytes),
                ("optimizer", 2 * nbytes),
            ):
                memory = rank["memory"][category]
                # declared, not yet drawn
                assert memory["now"] == expected <= memory["peak"] <= expected + 64
            assert (
                rank["memory"]["total"]["peak"] >= 4 * nbytes + rank["memory"]["activations"]["now"]
            )
            assert (rank["shared_bytes"] > 4 << 20) == (name == "ours")  # rings inside a node
            if size > 1:
                assert rank["sent_bytes"]["dp"] == {"all_reduce": 4 * 2 * nbytes // 2}
                assert rank["sent_bytes"]["control"]
        for kind in ("sent_bytes", "messages"):
            total = sum(rank[kind].get("dp", {}).get("all_reduce", 0) for rank in metrics["ranks"])
            assert metrics["formula"][kind] == total


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    "plan", [[], ["--zero", "1"], ["--zero", "3"], ["--plan", "tp=2"], ["--plan", "pp=2"]]
)
def test_why(
    plan: list[str], book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recorded step: its causes add up to what the ranks stood still, on the screen and in
    metrics.json."""
    run = tmp_path / "run"
    assert (
        main(
            [
                "train",
                *TINY,
                "--data",
                str(book),
                "-n",
                "2",
                "--transport",
                "threads",
                "--out",
                str(run),
                "--why",
                *plan,
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    metrics = json.loads((run / "metrics.json").read_text())
    report = metrics["why"]
    assert 1 <= report["step"] < 4 and f"why step {report['step']} took as long" in printed
    assert sum(row["seconds"] for row in report["rows"]) == pytest.approx(sum(report["exposed"]))
    assert sum(report["causes"].values()) == pytest.approx(sum(report["exposed"]))
    assert 0 < max(report["computing"]) <= report["bound"] * 1.001 <= report["seconds"] * 1.002
    assert report["rows"][0]["cause"] in printed
    assert report["foresight"]["known"] == report["foresight"]["calls"] > 0
    assert (run / "why.png").read_bytes().startswith(b"\x89PNG") and "why.png" in metrics["files"]


@pytest.mark.parametrize("size", [pytest.param("4KiB", marks=pytest.mark.soak), "auto"])
def test_bucket_bytes(
    size: str,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Take the size that is given, or the one by the measured link; without a measured link auto is
    refused."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    words = [
        "train",
        *TINY,
        "--data",
        str(book),
        "-n",
        "2",
        "--transport",
        "threads",
        "--out",
        str(tmp_path / "run"),
        "--bucket-bytes",
        size,
    ]
    if size == "auto":
        assert main(words) == 2
        assert (
            "what messages over threads cost was not measured; run `minidist bench cal"
            in capsys.readouterr().err
        )
        save_profile(
            Profile([LinkCost("threads", 2, 1.0, 0.0, 1e-6, 0.0, 0.0)], {}), profile_path()
        )
    assert main(words) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    whole = -(-8 * metrics["parameters"] // 1024) * 1024
    assert metrics["plan"]["bucket_bytes"] == (4096 if size == "4KiB" else max(64 << 10, whole))
    assert (
        metrics["formula"]["buckets"] > 3 if size == "4KiB" else metrics["formula"]["buckets"] == 1
    )


def test_without_why_there_is_no_report(runs: dict[str, Any]) -> None:
    for metrics, printed, folder in runs.values():
        assert (
            "why" not in metrics and "why step" not in printed and not (folder / "why.png").exists()
        )


def test_ranks_as_threads_of_one_process(
    runs: dict[str, Any],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`--transport threads`, for debugging: the run that two processes make."""
    monkeypatch.setattr(train, "spawn", None)  # no process is started
    assert (
        main(
            [
                "train",
                *TINY,
                "--data",
                str(book),
                "-n",
                "2",
                "--transport",
                "threads",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert capsys.readouterr().err == ""
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    there = runs["ours"][0]
    assert (metrics["transport"], metrics["size"], len(metrics["ranks"])) == ("threads", 2, 2)
    for key in ("losses", "weights_sha256", "formula"):
        assert metrics[key] == there[key], key


def test_every_way_to_start_trains_the_same(runs: dict[str, Any]) -> None:
    alone, ours, mpirun = (runs[name][0] for name in ("alone", "ours", "mpirun"))
    np.testing.assert_allclose(ours["losses"], alone["losses"], rtol=1e-12)
    assert ours["weights_sha256"] == mpirun["weights_sha256"] and ours["losses"] == mpirun["losses"]
    assert ours["verify"]["largest"] <= 1e-10 and alone["verify"]["largest"] == 0


def test_the_run_folder(runs: dict[str, Any]) -> None:
    for metrics, _, folder in runs.values():
        names = {file.name for file in folder.iterdir()}
        assert names == {
            "metrics.json",
            "metrics.jsonl",
            "trace.json",
            "loss.png",
            "model.safetensors",
            "flight",
            "steps",
        }
        rings = sorted(file.name for file in (folder / "flight").iterdir())
        assert rings == [f"{rank:05d}.ring" for rank in range(metrics["size"])]
        assert json.loads((folder / "metrics.json").read_text()) == metrics
        weights = load_file(folder / "model.safetensors")
        assert weights_digest(weights) == metrics["weights_sha256"]
        assert sum(array.size for array in weights.values()) == metrics["parameters"]
        with safe_open(folder / "model.safetensors", "numpy") as file:
            assert json.loads(file.metadata()["config"])["width"] == 16
        events = json.loads((folder / "trace.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == set(range(metrics["size"]))
        assert {"forward", "backward", "optimizer"} <= {event["name"] for event in events}
        assert metrics["size"] == 1 or any(
            event["name"].startswith("all_reduce bucket") for event in events
        )


def test_what_is_printed(runs: dict[str, Any]) -> None:
    for name, (metrics, printed, _) in runs.items():
        for words in (
            "step 1 of 4",
            "step 4 of 4",
            "tokens/s",
            "sent so far",
            "training loss",
            "validation loss",
            "a sample: lines it has not seen",
            "parameters + gradients + optimizer",
            "trace.json",
        ):
            assert words in printed, f"{name}: {words!r} is missing in\n{printed}"
        assert ("2(P-1)/P" in printed) == (metrics["size"] > 1)
        assert f"{8 * metrics['parameters']:,}" in printed
        assert printed.count("step 4 of 4") == 1  # rank 0 alone speaks


def test_a_long_run_keeps_the_begin_and_the_end_of_its_trace(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "TRACE_SPANS", 40)  # of which some are before the first step
    printed, metrics = on_threads(
        monkeypatch, capsys, tmp_path, ["-n", "2", "--steps", "8", "--data", str(book)]
    )
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    for rank in (0, 1):
        shown = [
            event["args"].get("step")
            for event in events
            if (event["ph"], event["pid"]) == ("X", rank)
        ]
        assert len(shown) == 40 and {0, 7} <= {*shown} and not {3, 4} & {*shown}
    left_out = sum(event["args"]["spans"] for event in events if event["ph"] == "i")
    assert metrics["trace"] == {"spans": 80, "left_out": left_out}
    assert f"80 spans, {left_out} between them are left out" in printed


@pytest.mark.sampled
@pytest.mark.parametrize("most", [1, 7])
def test_validate_bounds_the_held_out_text(
    most: int,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The batches of 7 sequences are 5 and 2: fewer than the three ranks."""
    _, metrics = on_threads(
        monkeypatch, capsys, tmp_path, ["-n", "3", "--data", str(book), "--validate", str(most)]
    )
    model = md.nn.GPT(md.nn.GPTConfig(**metrics["config"]))
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    held_out = text.load(str(book))
    inputs, targets = (rows[:most] for rows in text.windows(held_out.validation, context=16))
    assert metrics["validation_loss"] == pytest.approx(
        float(model.loss(inputs, targets).data), rel=1e-9
    )


@pytest.mark.soak  # test_precision has ZeRO-2, and test_experts ZeRO-1: their bytes, and --verify
@pytest.mark.parametrize(
    ("stage", "options", "says"),
    [
        (2, ["--accumulate", "3"], "8 + 2.67 + 5.33 = 16 bytes"),
        (3, ["--tied", "--batch", "2"], "2.67 + 2.67 + 5.33 = 10.67 bytes"),
    ],
)
def test_zero(
    stage: int,
    options: list[str],
    says: str,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same weights, and ranks send and hold what theory says, in the file and on the screen."""
    printed, metrics = on_threads(
        monkeypatch,
        capsys,
        tmp_path,
        ["-n", "3", "--zero", str(stage), "--data", str(book), "--verify", *options],
    )
    count = metrics["parameters"]
    ranks = metrics["ranks"]
    assert metrics["plan"]["zero"] == stage and metrics["verify"]["largest"] <= 1e-10
    for kind in ("sent_bytes", "messages"):
        assert sum(sum(rank[kind]["dp"].values()) for rank in ranks) == metrics["formula"][kind]
    root = metrics["config"]["vocabulary"] * 16 if stage == 3 else 0
    sent = elements_sent(
        count, ranks=3, zero=stage, accumulate=metrics["plan"]["accumulate"], root=root
    )
    assert metrics["formula"]["sent_bytes"] == 4 * 8 * sent
    for rank in ranks:
        for category, each in (
            ("parameters", 8 if stage < 3 else 8 / 3),
            ("gradients", 8 / 3),
            ("optimizer", 16 / 3),
        ):
            assert rank["memory"][category]["now"] == pytest.approx(each * count, abs=100)
    assert "gradients and weights" in printed
    assert says in printed


def test_weights_that_never_moved_are_not_called_equal(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A gradient times float16's first scale overflows, so that the only step is skipped."""
    monkeypatch.chdir(tmp_path)
    # validation goes through it symbol by symbol
    Path("short.txt").write_text(book.read_text()[:900])
    status = main(
        [
            "train",
            *TINY,
            "--dtype",
            "float32",
            "--precision",
            "fp16",
            "--steps",
            "1",
            "--batch",
            "1",
            "--context",
            "1",
            "--verify",
            "--data",
            "short.txt",
            "--out",
            "run",
        ]
    )
    printed = capfd.readouterr().out
    assert status == 1 and "NOTHING TO COMPARE" in printed and "Equal" not in printed
    assert "1 step skipped, whose gradients overflowed float16" in printed
    assert json.loads((tmp_path / "run" / "metrics.json").read_text())["skipped_steps"] == 1


def test_experts(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a plan with ep, compared with one process; each expert's load, in the table and the
    JSON."""
    options = [
        "-n",
        "4",
        "--plan",
        "dp=2,ep=2",
        "--experts",
        "4",
        "--capacity",
        "0.9",
        "--gate-noise",
        "0.1",
        "--zero",
        "1",
        "--data",
        str(book),
        "--verify",
    ]
    printed, metrics = on_threads(monkeypatch, capsys, tmp_path, options)
    chosen, taken = (np.array(metrics["experts"][kind]) for kind in ("chosen", "taken"))
    assert chosen.shape == (1, 4) and chosen.sum() == 4 * 5 * 16 * 2 and (taken <= chosen).all()
    assert (
        f"{1 - taken.sum() / chosen.sum():.1%}" in printed
        and "most / even" in printed
        and "Equal: " in printed
    )
    sent = sum(sum(rank["sent_bytes"]["ep"].values()) for rank in metrics["ranks"])
    assert (
        0 < sent == metrics["formula"]["axes"]["ep"]
        and f"{sent / 4:,.1f}".removesuffix(".0") in printed
    )
    assert metrics["config"]["mixture"]["experts"] == 4 and metrics["plan"]["ep"] == 2


# test_experts has a plan with ep; tests/parallel/experts/test_node_experts.py has the nodes
@pytest.mark.soak
@pytest.mark.parametrize("placed", [False, True])
def test_experts_on_two_nodes(
    placed: bool,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Limited to one node, and --verify's one process knows of the two; then placed by what that
    run measured."""
    options = ["-n", "4", "--plan", "ep=4", "--experts", "8", "--data", str(book)]
    printed, metrics = on_threads(
        monkeypatch, capsys, tmp_path, [*options, "--node-limit", "1", "--verify"], (0, 0, 1, 1)
    )
    assert "Equal: " in printed and metrics["config"]["mixture"]["nodes"] == [4, 4]
    sent = sum(
        sum(
            count
            for axis, verbs in rank["sent_bytes"].items()
            if axis.startswith("ep")
            for count in verbs.values()
        )
        for rank in metrics["ranks"]
    )
    assert sent == metrics["formula"]["axes"]["ep"]
    far = sum(rank["sent_to_nodes"]["ep"] for rank in metrics["ranks"])
    copies = metrics["experts"]["copies"]
    tokens = metrics["steps"] * 5 * 16  # all of them are looked at
    assert far == 8 * (4 * metrics["config"]["width"] + 2 * 2) * round(tokens * sum(copies["now"]))
    assert f"to experts on other nodes: {far / 4:,.0f} bytes a step" in printed
    if placed:
        again = ["--node-limit", "1", "--expert-placement", str(tmp_path / "run"), "--verify"]
        (tmp_path / "again").mkdir()
        printed, found = on_threads(
            monkeypatch, capsys, tmp_path / "again", [*options, *again], (0, 0, 1, 1)
        )
        assert "Equal: " in printed
        assert found["config"]["mixture"]["placement"] == metrics["experts"]["placement"]


# test_a_composed_plan has stages and zb-h1; tests/parallel/pipeline/ has the schedules
@pytest.mark.soak
@pytest.mark.parametrize(
    ("cut", "options", "stages"),
    [
        ("pp=2", ["--schedule", "zb-v", "--tied"], [1, 1, 1, 1]),
        ("dp=2,pp=2", ["--schedule", "pipedream", "--clip", "0", "--microbatches", "3"], [2, 2]),
        ("pp=2", ["--schedule", "interleaved", "--stages-per-rank", "3"], [0, 1, 1, 1, 1, 0]),
        ("dp=2,pp=2", ["--schedule", "dualpipe-v", "--zero", "1"], [1, 1, 1, 1]),
    ],
)
def test_schedules_of_a_pipeline(
    cut: str,
    options: list[str],
    stages: list[int],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every schedule but PipeDream trains as one process does; its stages and bytes are compared
    with the formula."""
    verify = [] if "pipedream" in options else ["--verify"]
    ranks = str(md.Plan.parse(cut).size)
    _, metrics = on_threads(
        monkeypatch,
        capsys,
        tmp_path,
        ["-n", ranks, "--plan", cut, *options, "--layers", "4", "--data", str(book), *verify],
    )
    assert metrics["stage_layers"] == stages and metrics["plan"]["schedule"] == options[1]
    assert not verify or metrics["verify"]["largest"] <= 1e-10
    assert metrics["losses"][-1] < metrics["losses"][0]
    for axis, expected in metrics["formula"]["axes"].items():
        assert (
            sum(sum(rank["sent_bytes"].get(axis, {}).values()) for rank in metrics["ranks"])
            == expected
        )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--schedule", "pipedream"], "--clip 0"),
        (["--schedule", "pipedream", "--clip", "0", "--verify"], "leave out"),
        (["--schedule", "zb-v", "--stages-per-rank", "3"], "two stages per rank, not 3"),
        (["--schedule", "pipedream", "--clip", "0", "--tied"], "tied=False"),
    ],
)
def test_what_a_pipeline_cannot_do(words: list[str], says: str, book: Path) -> None:
    done = execute_here(["train", *TINY, "-n", "2", "--plan", "pp=2", "--data", str(book), *words])
    assert done.returncode and says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("cut", "options", "axes"),
    [
        (
            "pp=2,tp=2",
            ["--schedule", "zb-h1", "--microbatches", "3", "--tied", "--stage-layers", "1,0"],
            {"pp", "tp"},
        ),
        pytest.param(
            "cp=2,tp=2",
            ["--zero", "2", "--sequence-parallel", "--dropout", "0.1"],
            {"dp,cp", "cp", "tp"},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "dp=2,pp=2",
            ["--zero", "3", "--keep-gathered", "--tied"],
            {"dp", "pp"},
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "pp=2,cp=2",
            ["--attention", "all-to-all"],
            {"dp,cp", "cp", "pp"},
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_composed_plan(
    cut: str,
    options: list[str],
    axes: set[str],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same weights; what each axis sent stands beside its formula, which it meets."""
    printed, metrics = on_threads(
        monkeypatch,
        capsys,
        tmp_path,
        ["-n", "4", "--plan", cut, *options, "--data", str(book), "--verify"],
    )
    for name, value in zip(options, options[1:], strict=False):
        if not value.startswith("--") and name != "--dropout":
            assert str(metrics["plan"][name[2:].replace("-", "_")]) == value
    # even: [0, 1]
    stages = [1, 0] if "--stage-layers" in options else [0, 1] if "pp" in cut else None
    assert metrics["stage_layers"] == stages
    assert ("in stages of" in printed) == (stages is not None)
    assert stages is None or f"(in stages of {stages[0]}, {stages[1]})" in printed
    assert metrics["verify"]["largest"] <= 1e-10
    outer, inner = (pair.split("=")[0] for pair in cut.split(","))
    assert [rank["coordinates"] for rank in metrics["ranks"]] == [
        {"dp": 0, outer: one, inner: other} for one in range(2) for other in range(2)
    ]
    assert metrics["formula"]["axes"].keys() == axes
    for axis, expected in metrics["formula"]["axes"].items():
        assert (
            sum(sum(rank["sent_bytes"].get(axis, {}).values()) for rank in metrics["ranks"])
            == expected
        )
        assert f"{expected // 4:,}" in printed
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert weights_digest(weights) == metrics["weights_sha256"]
    assert sum(array.size for array in weights.values()) == metrics["parameters"]


@pytest.mark.parametrize(
    ("options", "who"),
    [
        (
            [
                "--strategy",
                "data-parallel",
                "--replicas",
                "3",
                "--accumulate",
                "2",
                "--checkpoint-blocks",
                "--dropout",
                "0.1",
                "--verify",
            ],
            ["device 0", "device 2"],
        ),
        pytest.param(
            ["-n", "3", "--strategy", "parameter-server", "--servers", "2", "--verify"],
            ["worker 0", "server 1"],
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["-n", "3", "--strategy", "parameter-server", "--asynchronous", "--staleness=-1"],
            ["worker 1", "server 0"],
            marks=pytest.mark.soak,
        ),
    ],
)
def test_one_place_that_everything_passes(
    options: list[str],
    who: list[str],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """data-parallel and parameter-server: who sent what is the formula, device by device or rank by
    rank; replicas share a process's cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.chdir(tmp_path)
    status = main(["train", *TINY, *options, "--data", str(book), "--out", "run"])
    printed, error = capfd.readouterr()
    assert (status, error) == (0, "")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert len(metrics["losses"]) == 4 and metrics["losses"][-1] < metrics["losses"][0]
    assert metrics["threads"] == 2 or "data-parallel" not in options
    assert "--asynchronous" in options or metrics["verify"]["largest"] <= 1e-10
    for rank, expected in zip(metrics["ranks"], metrics["formula"]["by_rank"], strict=True):
        assert [
            sum(rank[kind].get("dp", {}).values()) for kind in ("sent_bytes", "messages")
        ] == expected
    for words in (*who, "what each sent in a step"):
        assert words in printed
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert weights_digest(weights) == metrics["weights_sha256"] and np.isfinite(
        metrics["validation_loss"]
    )


MORTAL = """
if os.environ.get("RANK") == "1":
    import signal
    from minidist.parallel.data.async_parameter_server import AsyncParameterServer

    def step(self, *args, at=AsyncParameterServer.start_step, **options):
        if self.pushes == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        return at(self, *args, **options)

    AsyncParameterServer.start_step = step
"""
"""Of a sitecustomize.py. Rank 1 kills itself, because a signal from outside may come late."""


# tests/comm/test_expendable.py kills a rank under the launcher
@pytest.mark.soak
def test_a_worker_that_is_killed_is_missed_by_nobody(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In its 11th step. An asynchronous run goes on without it, evaluates, and writes its folder;
    the launcher says who it was."""
    monkeypatch.setenv("PYTHONPATH", starting(tmp_path / "start", MORTAL))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.chdir(tmp_path)
    status = main(
        [
            "train",
            *TINY,
            "--steps",
            "30",
            "-n",
            "3",
            "--strategy",
            "parameter-server",
            "--asynchronous",
            "--data",
            str(book),
            "--out",
            "run",
        ]
    )
    printed, error = capfd.readouterr()
    assert status == 0, error
    assert "step 30 of 30" in printed
    assert "rank 1" in error and "was killed by SIGKILL; the job continues without it" in error
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["formula"]["lost"] == [1] and [rank["rank"] for rank in metrics["ranks"]] == [
        0,
        2,
    ]
    assert len(metrics["losses"]) == 30 and metrics["validation_loss"] < 4


@pytest.mark.soak  # test_saving.py tells a launcher to stop, the next test looks at the folder
@pytest.mark.parametrize(
    "by",
    [["train", "-n", "2"], ["launch", "-n", "2", "-m", "minidist", "train"]],
    ids=["train", "launch"],
)
def test_a_run_whose_launcher_is_told_to_stop_leaves_no_empty_folder(
    by: list[str], book: Path, tmp_path: Path
) -> None:
    run = subprocess.Popen(
        [*MINIDIST, *by, *TINY, "--steps", "100000", "--data", str(book), "--out", "runs/one"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert next(line for line in run.stdout if line.startswith("step "))
    run.send_signal(signal.SIGTERM)
    _, error = run.communicate(timeout=30)
    assert run.returncode == 143
    assert (
        "was told to stop by SIGTERM; its 2 ranks were ended" in error and error.count("\n") == 1
    ), error
    assert os.listdir(tmp_path / "runs" / "one") == ["metrics.jsonl"]  # of the steps that it made


def test_a_run_of_one_process_that_is_terminated_leaves_no_empty_folder(
    book: Path, tmp_path: Path
) -> None:
    run = subprocess.Popen(
        [*MINIDIST, "train", *TINY, "--steps", "100000", "--data", str(book), "--out", "runs/one"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    assert next(line for line in run.stdout if line.startswith("step "))
    run.send_signal(signal.SIGTERM)
    run.communicate(timeout=30)
    assert run.returncode == -signal.SIGTERM
    assert os.listdir(tmp_path / "runs" / "one") == ["metrics.jsonl"]


def test_quiet_prints_nothing(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status = main(
        [
            "train",
            *TINY,
            "--steps",
            "1",
            "--data",
            str(book),
            "--quiet",
            "--tied",
            "--positions",
            "rotary",
            "--dropout",
            "0.1",
            "--optimizer",
            "sgd",
            "--clip",
            "0",
            "--lr-schedule",
            "constant",
        ]
    )
    assert (status, *capfd.readouterr()) == (0, "", "")
    assert len(list((tmp_path / "runs").iterdir())) == 1


# ----------------------------------------------------------------------------------------- mistakes


def refusals() -> list[tuple[list[str], str]]:
    """Options a user may get wrong, and words of the one line that says so."""
    return [
        (["--data", "no-such-file.txt"], "no-such-file.txt"),
        (["--data", "SHORT"], "too few"),
        (["--batch", "0"], "--batch"),
        (["--batch", "many"], "--batch"),
        (["--width", "30", "--heads", "4"], "width 32"),
        (["--vocab", "3"], "vocabulary of 3"),
        (["--zero", "7"], "--zero"),
        (["--accumulate", "0"], "--accumulate"),
        (
            ["-n", "2", "--plan", "ep=2"],
            "no experts to divide; use dp=2, or a mixture (--experts 4)",
        ),
        (["-n", "2", "--plan", "ep=2", "--experts", "3"], "3 experts do not divide among 2 ranks"),
        (["--top-k", "2"], "--top-k is for a mixture of experts; add --experts 8"),
        (["--node-limit", "1"], "--node-limit is for a mixture of experts"),
        (
            ["--experts", "4", "--expert-nodes", "2"],
            "matters only with a limit; add --node-limit 1",
        ),
        (
            ["--experts", "4", "--expert-nodes", "3,2", "--node-limit", "1"],
            "each 1 or more, 4 in all",
        ),
        (
            ["--experts", "4", "--expert-placement", "nowhere"],
            "no metrics.json of a run can be read there",
        ),
        (["--experts", "2", "--top-k", "3"], "top_k from 1 to the number of experts"),
        (["-n", "4", "--plan", "dp=2,tp=4"], "is for 8 ranks, the job has 4; use dp=4"),
        (["-n", "4", "--plan", "pp=4"], "use dp=4, or at least 2 layers"),
        (["-n", "4", "--plan", "tp=4"], "use dp=4, or at least 4 heads"),
        (
            ["-n", "4", "--plan", "cp=4", "--attention", "all-to-all"],
            "use dp=4 without attention, or attention=ring",
        ),
        (["-n", "2", "--sequence-parallel"], "use tp=2, or cp=2"),
        (["-n", "2", "--microbatches", "2"], "use accumulate=2"),
        (["--plan", "dp=3"], "use dp=1"),
        (["-n", "2", "--plan", "dp=3"], "use dp=2"),
        (["--strategy", "parameter-server"], "start 2 or more"),
        (["-n", "2", "--strategy", "parameter-server", "--servers", "2"], "start 3 or more"),
        (["-n", "2", "--strategy", "parameter-server", "--staleness", "3"], "add --asynchronous"),
        (["--graph"], "add --device cuda --precision bf16"),
        (["-n", "2", "--graph", "--device", "cuda", "--precision", "bf16"], "leave -n out"),
        (["-n", "2", "--strategy", "parameter-server", "--zero", "1"], "are for strategy ddp"),
        (["-n", "4", "--strategy", "data-parallel"], "use replicas=4"),
        (["--replicas", "2"], "are for strategy data-parallel"),
        (["--asynchronous"], "there is no server; use strategy=parameter-server"),
        (["--bucket-bytes", "0"], "a bucket holds at least one byte"),
        (
            ["-n", "2", "--strategy", "data-parallel", "--why"],
            "--why: explains a step that all ranks make together",
        ),
        (
            ["-n", "2", "--strategy", "parameter-server", "--asynchronous", "--verify"],
            "equals no run of one process",
        ),
        (["--optimizer", "adamx"], "did you mean adam"),
        (["--dtype", "float16"], "float32"),
        (["--lr", "0"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--dropout", "1"], "--dropout"),
        (["--transport", "pigeon"], "shm"),
        (["-n", "2", "--transport", "mpi"], "mpirun -n 2 minidist train"),
        (["--stepz", "3"], "did you mean --steps"),
        (["--device", "cuda"], "CuPy"),
        (["--out", "BOOK/run"], "not a folder"),
        (["--json", "no-such-folder/x.json"], "no-such-folder"),
        (["--json", "FOLDER"], "is a folder"),
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("options", "says"), refusals(), ids=[" ".join(options) for options, _ in refusals()]
)
def test_a_mistake_is_one_line(
    options: list[str],
    says: str,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if options[0] == "--device":
        monkeypatch.setitem(sys.modules, "cupy", None)  # as if it were not installed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.txt").write_text("too short")
    places = {"SHORT": "short.txt", "BOOK/run": f"{book}/run", "FOLDER": str(tmp_path)}
    words = [places.get(word, word) for word in options]
    status = main(["train", *TINY, *([] if "--data" in words else ["--data", str(book)]), *words])
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert (
        printed.err.startswith("minidist train: ")
        and says in printed.err
        and printed.err.count("\n") == 1
    )
    assert not (tmp_path / "runs").exists()


def test_a_mistake_under_mpirun_is_one_line_too(book: Path, tmp_path: Path) -> None:
    done = execute(
        ["mpirun", "-n", "3", *MINIDIST, "train", "--data", str(book), "--plan", "dp=2"], tmp_path
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("minidist")]
    assert len(lines) == 1 and "use dp=3" in lines[0] and "Traceback" not in done.stderr


# --------------------------------------------------------------------------------------- the pieces


def test_precision(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bf16 under ZeRO-2: held and sent is what the formula says, in 2 and 12 bytes; masters are
    saved."""
    printed, metrics = on_threads(
        monkeypatch,
        capsys,
        tmp_path,
        [
            "-n",
            "2",
            "--dtype",
            "float32",
            "--precision",
            "bf16",
            "--zero",
            "2",
            "--data",
            str(book),
            "--verify",
        ],
    )
    assert "2 + 1 + 6 = 9 bytes a parameter" in printed
    assert "of the way that training went apart; the bound is 3e-01 in bf16" in printed
    count = metrics["parameters"]
    assert metrics["plan"]["precision"] == "bf16" and metrics["parameter_bytes"] == 2 * count
    for rank in metrics["ranks"]:
        assert rank["memory"]["optimizer"]["now"] == pytest.approx(12 * count / 2, rel=0.01)
    sent = sum(nbytes for rank in metrics["ranks"] for nbytes in rank["sent_bytes"]["dp"].values())
    assert sent == metrics["formula"]["sent_bytes"] == 4 * 2 * 2 * count
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert {array.dtype for array in weights.values()} == {np.dtype("float32")}
    assert main(["train", *TINY, "--precision", "fp16", "--data", str(book)]) == 2
    assert "keeps float32 master weights" in capsys.readouterr().err


@pytest.mark.parametrize("late", [False, True])
def test_a_loss_is_waited_for_when_the_next_step_is_on_its_way(late: bool) -> None:
    """Or at once, where it is there. Every step is reported once, in order, and seconds do not
    overlap."""
    told: list[str] = []

    class Failure:
        def __init__(self, number: int) -> None:
            self.number = number

        def done(self) -> bool:
            return not late

        def wait(self) -> float:
            told.append(f"loss {self.number}")
            return float(self.number)

    def start_step(batch: int) -> Failure:
        told.append(f"step {batch}")
        return Failure(batch)

    trainer: Any = SimpleNamespace(
        start_step=start_step,
        steps_done=0,
        world=SimpleNamespace(
            ledger=SimpleNamespace(
                sent_bytes=lambda phase: (
                    {"dp": {"all_reduce": 3}, "control": {"all_gather": 8}}
                    if phase == "step"
                    else {}
                )
            )
        ),
    )
    settings: Any = SimpleNamespace(
        args=SimpleNamespace(
            steps=3, batch=2, context=4, verify=False, graph=False, given=["steps"]
        ),
        resume=None,
        training_batch=lambda step: step,
    )
    report: Any = SimpleNamespace(
        step=lambda number, loss, speed, sent: told.append(f"report {number} {loss} {sent}"),
        input=nullcontext,
        close=lambda: told.append("closed"),
    )
    begun = time.perf_counter()
    course = train.train_steps(trainer, settings, report)
    whole = time.perf_counter() - begun
    assert course.losses == [0.0, 1.0, 2.0]
    assert len(course.seconds) == 3 and min(course.seconds) > 0 and sum(course.seconds) <= whole
    end = ["loss 2", "report 3 2.0 3", "closed"]
    first = (
        ["step 0", "step 1", "loss 0", "report 1 0.0 3", "step 2", "loss 1", "report 2 1.0 3"]
        if late
        else ["step 0", "loss 0", "report 1 0.0 3", "step 1", "loss 1", "report 2 1.0 3", "step 2"]
    )
    assert told == first + end
