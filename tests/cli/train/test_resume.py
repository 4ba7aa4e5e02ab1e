"""`minidist train --save-every`, stopped and resumed: the same bits as a run that nothing happened
to."""

import json
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import torchrun

import minidist as md
from minidist.cli import main
from minidist.cli.train import command as command_module
from minidist.cli.train import saving, settings
from minidist.console import Parser
from minidist.parallel.state.manifest import checkpoints, step_of

TINY = [
    "train",
    "--quiet",
    "--batch",
    "4",
    "--context",
    "8",
    "--layers",
    "2",
    "--width",
    "8",
    "--heads",
    "2",
    "--dtype",
    "float64",
]
STEPS = 7
STOP = 4


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of two thousand symbols."""
    file = tmp_path_factory.mktemp("data") / "book.txt"
    file.write_text(
        "".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50))
    )
    return file


def train(*options: object) -> int:
    return main([*TINY, *map(str, options)])


def metrics_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "metrics.json").read_text()))


def steps_in(run: Path) -> list[int | None]:
    return [step_of(folder) for folder in checkpoints(run)]


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """From now on a rank is told to stop when so many steps are done."""
    monkeypatch.setattr(
        saving.Saver, "stopping", lambda self: 15 if self.trainer.steps_done == step else 0
    )


def soak(*options: str) -> Any:
    return pytest.param(options, marks=pytest.mark.soak)


@pytest.mark.parametrize(
    "options",
    [
        ("-n", "2", "--plan", "tp=2", "--dropout", "0.1"),
        soak("--dtype", "float32", "--precision", "fp16", "--tied"),
        soak("--strategy", "data-parallel", "--replicas", "2"),
        soak("-n", "4", "--plan", "dp=2,tp=2", "--zero", "1"),
        soak(),
        soak("-n", "3"),
        soak("-n", "2", "--zero", "2", "--accumulate", "2"),
        soak("-n", "3", "--strategy", "parameter-server", "--servers", "2"),
        soak("-n", "2", "--dtype", "float32", "--precision", "fp8", "--zero", "3"),
        soak(
            "-n",
            "2",
            "--dtype",
            "float32",
            "--precision",
            "bf16",
            "--plan",
            "pp=2",
            "--schedule",
            "zb-h1",
        ),
        soak(
            "-n",
            "4",
            "--plan",
            "dp=2,ep=2",
            "--experts",
            "4",
            "--balance",
            "bias",
            "--gate-noise",
            "0.1",
        ),
        soak("-n", "4", "--plan", "cp=2,tp=2", "--zero", "3", "--sequence-parallel"),
        soak("-n", "2", "--zero", "2", "--offload", "optimizer"),
        soak("-n", "2", "--offload", "all"),
        soak(
            "--optimizer",
            "sgd",
            "--lr-schedule",
            "constant",
            "--positions",
            "learned",
            "--checkpoint-blocks",
        ),
    ],
)
def test_a_run_that_was_stopped_and_resumed_has_the_same_bits(
    options: tuple[str, ...],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    words = [*options, "--transport", "threads", "--data", book, "--steps", STEPS]
    assert train(*words, "--out", tmp_path / "whole") == 0
    behind = ["--save-async"] if "tp=2" in options else []
    with monkeypatch.context() as patch:
        stop_after(patch, STOP)
        assert (
            train(*words, "--out", tmp_path / "run", "--save-every", 3, "--keep", 2, *behind) == 75
        )
    assert (
        steps_in(tmp_path / "run") == [3, STOP] and not (tmp_path / "run" / "metrics.json").exists()
    )
    assert f"told to stop after step {STOP} of {STEPS}, saved in " in capfd.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert capfd.readouterr() == ("", "")
    whole = metrics_of(tmp_path / "whole")
    run = metrics_of(tmp_path / "run")
    for key in ("losses", "weights_sha256", "validation_loss", "plan", "skipped_steps"):
        assert run[key] == whole[key], key
    assert (run["resumed_from"], run["steps"], run["checkpoint"]["steps"]) == (
        STOP,
        STEPS - STOP,
        [6, STEPS],
    )
    assert (whole["resumed_from"], whole["steps"], whole["checkpoint"]) == (None, STEPS, None)
    assert steps_in(tmp_path / "run") == [6, STEPS]
    assert_measured_is_formula(run)


def assert_measured_is_formula(metrics: dict[str, Any]) -> None:
    """Bytes are of the steps of the resumed job alone."""
    for axis, expected in metrics["formula"].get("axes", {}).items():
        assert (
            sum(sum(rank["sent_bytes"].get(axis, {}).values()) for rank in metrics["ranks"])
            == expected
        )
    if "by_rank" in metrics["formula"]:
        for rank, counts in zip(metrics["ranks"], metrics["formula"]["by_rank"], strict=True):
            assert sum(rank["sent_bytes"].get("dp", {}).values()) == counts[0]
    for rank in metrics["ranks"]:
        assert rank.get("moved_bytes") == rank.get("moved_formula")


@pytest.fixture(scope="module")
def saved(book: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with the checkpoints of steps 2, 4 and 6; not to be changed."""
    run = tmp_path_factory.mktemp("saved") / "run"
    assert train("--data", book, "--steps", 6, "--save-every", 2, "--out", run) == 0
    return run


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def flip(file: Path, at: int) -> None:
    """One bit of a file."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


# tests/survive/test_plan_pairs.py, tests/cli/test_checkpoint.py; the next test has more steps
@pytest.mark.soak
def test_on_another_plan_and_for_more_steps(
    saved: Path, book: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A constant rate, so that the number of steps changes none; the new plan's options come
    anew."""
    words = ["--data", book, "--lr-schedule", "constant"]
    assert train(*words, "--steps", 9, "--out", tmp_path / "whole") == 0
    assert (
        train(*words, "--steps", 4, "--save-every", 2, "--zero", "0", "--out", tmp_path / "run")
        == 0
    )
    assert (
        main(
            [
                "train",
                "--resume",
                str(tmp_path / "run"),
                "-n",
                "2",
                "--transport",
                "threads",
                "--plan",
                "tp=2",
                "--steps",
                "9",
                "--quiet",
            ]
        )
        == 0
    )
    whole = metrics_of(tmp_path / "whole")
    run = metrics_of(tmp_path / "run")
    assert (run["plan"]["tp"], run["size"], run["resumed_from"]) == (2, 2, 4)
    assert run["losses"][:4] == whole["losses"][:4]
    np.testing.assert_allclose(run["losses"], whole["losses"], rtol=0, atol=1e-10)
    assert steps_in(tmp_path / "run") == [6, 8, 9]


def test_the_ranks_that_a_resumed_run_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are told what was given anew, and take the rest from the checkpoint. Threads stand for
    the processes.

    A save that takes long is shown.
    """

    def threads(command: list[str], size: int, patience: float, limits: Any) -> int:
        def rank(world: Any) -> int:
            parser = Parser()
            command_module.add_arguments(parser)
            return command_module.train(
                settings.check(parser.parse_args(command[command.index("train") + 1 :])), world, 1
            )

        assert {*command[command.index("train") + 1 :]} == {
            f"--resume={run}",
            "--steps=8",
            f"--out={run}",
        } and size == 2
        return max(md.run(rank, size=size))

    monkeypatch.setattr(command_module, "spawn", threads)
    monkeypatch.setattr(saving, "LONG", 0.0)
    assert main(["train", "--resume", str(run), "-n", "2", "--steps", "8"]) == 0
    printed = capsys.readouterr().out
    assert f"going on from step 6 of 8, as 1 rank saved it in {run}" in printed
    assert f"saved {run}/step-000008 in " in printed
    metrics = metrics_of(run)
    assert (metrics["size"], len(metrics["losses"]), metrics["checkpoint"]["steps"]) == (2, 8, [8])


@pytest.fixture
def own_sigterm() -> Iterator[None]:
    """A rank of a launcher ends with SIGTERM ignored; here its process goes on to other tests."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("own_sigterm")
def test_a_job_that_its_launcher_starts_again_goes_on_by_itself(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the very same command line, as Slurm and torchrun give it. Any other job overwrites
    nothing."""
    words = ["--data", book, "--steps", STEPS, "--lr-schedule", "constant", "--verify"]
    assert train(*words, "--out", tmp_path / "whole") == 0
    words += ["--save-every", 3, "--out", tmp_path / "run"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    with monkeypatch.context() as patch:
        stop_after(patch, STOP)
        assert train(*words) == 75
    assert train(*words) == 2
    assert (
        f"--out {tmp_path / 'run'}: holds checkpoints of a run; continue with --resume"
        in capfd.readouterr().err
    )
    for name, value in torchrun(0, size=1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(*words, "--width", "16") == 2
    assert capfd.readouterr().err == (
        "minidist train: --verify is left out: the first steps were made before the job was "
        "started again\n"
        "minidist train: --width: a resumed run keeps what it has (8); leave the option out, or "
        "start a new run\n"
    )
    assert train(*words) == 0
    whole = metrics_of(tmp_path / "whole")
    run = metrics_of(tmp_path / "run")
    assert (run["losses"], run["weights_sha256"]) == (whole["losses"], whole["weights_sha256"])
    assert (run["resumed_from"], run["steps"]) == (STOP, STEPS - STOP)
    assert train(*words[:-1], tmp_path / "other") == 0  # no checkpoint yet: it begins
    assert metrics_of(tmp_path / "other")["resumed_from"] is None


def test_going_back_to_an_older_checkpoint(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Those after it belong to a past that is given up: they go when the first new one is
    complete."""
    whole = metrics_of(run)
    assert (
        main(["train", "--resume", str(run / "step-000002"), "--save-every", "3", "--quiet"]) == 0
    )
    assert metrics_of(run)["losses"] == whole["losses"] and metrics_of(run)["resumed_from"] == 2
    assert steps_in(run) == [2, 3, 6]


def test_a_finished_run_can_be_reported_again(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = metrics_of(run)
    (run / "metrics.json").unlink()
    assert main(["train", "--resume", str(run)]) == 0
    printed = capfd.readouterr().out
    assert "going on from step 6 of 6, as 1 rank saved it" in printed
    assert (
        f"minidist train --resume {run} --steps 12" in printed
        and f"minidist sample {run}" in printed
    )
    again = metrics_of(run)
    assert (again["steps"], again["weights_sha256"]) == (0, whole["weights_sha256"])
    assert again["step_seconds"] > 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(("file", "at"), [("shard-00000.safetensors", -9), ("manifest.json", 400)])
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken(
    file: str, at: int, run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = metrics_of(run)
    flip(run / "step-000006" / file, at)
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    printed = capfd.readouterr()
    assert (
        printed.err.count("\n") == 1
        and "damaged" in printed.err
        and printed.err.endswith("; taking step-000004\n")
    )
    assert metrics_of(run)["resumed_from"] == 4
    for key in ("losses", "weights_sha256"):
        assert metrics_of(run)[key] == whole[key]
    assert main(["checkpoint", str(run)]) == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "options", [("--offload", "all"), ("--zero", "3"), ("--zero", "2", "--offload", "optimizer")]
)
def test_stopped_in_validation_and_then_damaged(
    options: tuple[str, ...],
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The state of the last step is saved already; where it cannot be read, what was read of it
    does no harm."""
    words = [*options, "-n", "2", "--transport", "threads", "--data", book, "--steps", 4]
    assert train(*words, "--out", tmp_path / "whole") == 0
    run = tmp_path / "run"
    calls = list[int]()

    def stopping(self: saving.Saver) -> int:
        calls.append(self.trainer.steps_done)
        # two of each rank: after the step, before the first batch
        return 15 if calls.count(4) > 4 else 0

    with monkeypatch.context() as patch:
        patch.setattr(
            saving.Saver,
            "stopping",
            lambda self: self.trainer.world.all_reduce(
                np.array([stopping(self) * (self.trainer.world.rank == 0)]), op="max"
            )[0],
        )
        assert train(*words, "--out", run, "--save-every", 2) == 75
    assert steps_in(run) == [2, 4] and "after step 4 of 4, saved in" in capfd.readouterr().err
    flip(run / "step-000004" / "shard-00001.safetensors", -9)
    assert main(["train", "--resume", str(run), "--quiet"]) == 0
    assert "taking step-000002" in capfd.readouterr().err
    for key in ("losses", "weights_sha256", "validation_loss"):
        assert metrics_of(run)[key] == metrics_of(tmp_path / "whole")[key]


def test_no_checkpoint_is_whole(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for folder in checkpoints(run):
        flip(folder / "shard-00000.safetensors", -9)
    assert main(["train", "--resume", str(run), "--quiet"]) == 2
    error = capfd.readouterr().err
    assert (
        error.count("\n") == 1 and "no checkpoint can be used" in error and "step-000006" in error
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--seed", "0"], "--seed: a resumed run keeps what it has (0)"),
        (["--tied"], "--tied: a resumed run keeps"),
        (["--steps", "5"], "may make more, but not fewer"),
        (["--verify"], "--verify"),
        (["--data", "CHANGED"], "it has changed since"),
        (["--asynchronous"], "--asynchronous"),
        (["-n", "2", "--plan", "dp=3"], "use dp=2"),
        (["--out", "RUN2"], "holds checkpoints of a run"),
    ],
)
def test_what_cannot_change_is_one_line(
    options: list[str], says: str, run: Path, book: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    changed = run / "changed.txt"
    changed.write_text(book.read_text() + "one more line")
    if "RUN2" in options:
        shutil.copytree(run, run / "again")
    words = [
        {"CHANGED": str(changed), "RUN2": str(run / "again")}.get(word, word) for word in options
    ]
    assert main(["train", "--resume", str(run), *words]) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and says in printed.err


def test_what_cannot_be_resumed_or_saved_is_one_line(
    saved: Path, book: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        (["--resume", str(tmp_path)], "there is no complete checkpoint"),
        (
            ["--data", str(book), "--out", str(saved)],
            "holds checkpoints of a run; continue with --resume",
        ),
        (
            [
                "--data",
                str(book),
                "-n",
                "2",
                "--strategy",
                "parameter-server",
                "--asynchronous",
                "--save-every",
                "2",
            ],
            "--save-every: workers of asynchronous servers",
        ),
    ):
        assert main(["train", *words]) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and says in error


def test_a_save_that_fails_is_told_and_the_run_goes_on(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The disk is full at the second save: the first stays, the third is there."""
    save = saving.Saver.save

    def on_a_full_disk(self: saving.Saver, *args: Any) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.trainer.steps_done == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        try:
            save(self, *args)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(saving.Saver, "save", on_a_full_disk)
    assert train("--data", book, "--steps", 6, "--save-every", 2, "--out", tmp_path / "run") == 0
    error = capfd.readouterr().err
    assert error.count("\n") == 1 and "step-000004 was not saved: rank 0 cannot write" in error
    assert "File too large; checkpoints before it stay; the run continues" in error
    assert steps_in(tmp_path / "run") == [2, 6]
    assert metrics_of(tmp_path / "run")["checkpoint"]["failed"] == 1
