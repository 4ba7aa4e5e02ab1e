"""Run folders that somebody else has filled, with digests that fit: each command ends, in one line
where it must.

Each case changes one thing of a run of minidist train; support/damaged.py has the changes.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from damaged import ESCAPE, bind, commands, damage, outcome, sparse, unsafe
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minidist.cli import main
from minidist.parallel.state.manifest import MANIFEST, _with_digest

TRAIN = [
    "--transport",
    "threads",
    "-n",
    "2",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--steps",
    "4",
    "--save-every",
    "2",
    "--quiet",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "text").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    assert (
        main(["train", *TRAIN, "--data", str(folder / "text"), "--out", str(folder / "run")]) == 0
    )
    return folder / "run"


def check(folder: Path, words: list[str], page: Path) -> tuple[int, str]:
    """Run a command; it ends with a status, in time, and prints nothing that acts on a terminal or
    a browser."""
    status, said = outcome(words)
    assert isinstance(status, int), f"{words}: {status}"
    assert "Traceback" not in said and not unsafe(said), said
    if words[0] == "report" and status == 0:
        assert "<script>window.broken" not in page.read_text()
    return status, said


def everything(run: Path, scratch: Path, seed: str) -> None:
    """Damage a copy of the run, and read it with each command."""
    choose = random.Random(seed)
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(run, scratch / "run")
    _, where = damage(scratch / "run", choose)
    for words in commands(scratch / "run", where, scratch):
        check(scratch / "run", words, scratch / "report.html")


@pytest.mark.parametrize("seed", [3, 8, 18, 22, 26, 29, 32, 37, 42, 56])
def test_damages_that_ended_in_a_traceback(seed: int, run: Path, tmp_path: Path) -> None:
    """Without schemas: unhashable and deep values, a record of no kind, a history of none, a field
    that is missing."""
    everything(run, tmp_path / "scratch", str(seed))


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32))
def test_no_damage_ends_a_command_with_a_traceback(run: Path, tmp_path: Path, seed: int) -> None:
    everything(run, tmp_path / "scratch", str(seed))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_damages(run: Path, tmp_path: Path, seed: int) -> None:
    for number in range(250):
        everything(run, tmp_path / "scratch", f"{seed} {number}")


# ---------------------------------------------------------------------------------------- manifests

BOTH = {"train", "sample"}
TRAINING = {"train"}
SAMPLING = {"sample"}
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], object], set[str]]] = {
    "huge": (
        lambda value: array(value).update(
            shape=[10**12], stripes=[[0, 10**12, 0, 1]], nbytes=4 * 10**12
        ),
        BOTH,
    ),
    "huge stripes": (lambda value: array(value).update(stripes=[[0, 1, 0, 10**12]]), BOTH),
    "outside": (lambda value: value["shards"][0].update(file="../../other.safetensors"), BOTH),
    "missing": (lambda value: value["about"].pop("state"), TRAINING),
    "retyped": (lambda value: value["about"]["state"].update(updates=[1]), BOTH),
    "a layer too many": (lambda value: value["about"]["config"].update(layers=10**9), BOTH),
    "wide": (lambda value: value["about"]["config"].update(width=2**30, heads=1), SAMPLING),
    "no checksums": (lambda value: array(value).update(checksums=[]), BOTH),
    "no stage of ZeRO": (lambda value: value["about"]["plan"].pop("zero"), set()),
    "no precision": (lambda value: value["about"]["plan"].pop("precision"), set()),
    "no compression": (lambda value: value["about"]["plan"].pop("compress"), set()),
    "an option of another kind": (
        lambda value: value["about"]["options"].update(batch="many"),
        TRAINING,
    ),
    "an empty word": (lambda value: value["about"]["options"].update(plan=""), set()),
    "a place to write to": (
        lambda value: value["about"]["options"].update(json="/nowhere/at/all"),
        set(),
    ),
    "escapes": (lambda value: array(value).update(key=ESCAPE), BOTH),
    "escapes in a word": (
        lambda value: value["about"]["options"].update(optimizer=ESCAPE),
        TRAINING,
    ),
    "a history of objects": (
        lambda value: value["about"]["metrics"].update(losses={"O": "AAAA"}),
        TRAINING,
    ),
    "no base64": (lambda value: value["about"]["metrics"].update(losses={"<f8": "AA"}), TRAINING),
}
"""What is changed, and the commands that are refused then."""


def array(value: dict[str, Any]) -> Any:
    return next(one for one in value["shards"][0]["arrays"] if one["key"].startswith("weight/"))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_not_trusted_because_its_digest_fits(
    name: str, run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (change, refused) = MANIFESTS[name]
    for manifest in folder.glob(f"step-*/{MANIFEST}"):
        value = json.loads(manifest.read_text())
        del value["digest"]
        change(value)
        manifest.write_bytes(_with_digest(json.dumps(value)[:-1].encode()))
    (folder / "metrics.json").unlink()
    for words in commands(folder, manifest, tmp_path):
        status, said = check(folder, words, tmp_path / "report.html")
        assert status in (0, 1, 2)
        if words[0] in ("train", "sample"):
            assert status == (2 if words[0] in refused else 0), said
            assert said.count("\n") == 1 or status == 0, said


# -------------------------------------------------------------------------- other things than files

THINGS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zero": lambda file: file.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "sparse": sparse,
    "socket": bind,
    "link": lambda file: file.symlink_to("/etc/passwd"),
    "loop": lambda file: file.symlink_to(file),
}


FILES = [
    "metrics.json",
    "metrics.jsonl",
    "trace.json",
    "model.safetensors",
    "steps/00000.jsonl",
    "flight/00000.ring",
    f"step-000004/{MANIFEST}",
    "step-000004/shard-00000.safetensors",
]
PAIRS = [
    pytest.param(
        file, thing, marks=[] if (row + column) % len(THINGS) in (0, 3) else pytest.mark.soak
    )
    for row, file in enumerate(FILES)
    for column, thing in enumerate(THINGS)
]


@pytest.mark.parametrize(("file", "thing"), PAIRS)
def test_what_is_no_regular_file_is_not_waited_for(
    file: str, thing: str, run: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / file).unlink()
    THINGS[thing](folder / file)
    for words in commands(folder, folder / file, tmp_path):
        if words[0] != "train":  # it goes on from the checkpoint before
            check(folder, words, tmp_path / "report.html")


@pytest.mark.parametrize(
    "how", ["metrics.jsonl", "steps/00000.jsonl", "metrics.json", "report.html"]
)
def test_a_run_overwrites_no_file_that_a_link_leads_to(how: str, run: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    folder = tmp_path / "run"
    (folder / how).parent.mkdir(parents=True)
    (folder / how).symlink_to(target)
    text = run.parent / "text"
    assert main(["train", *TRAIN[:-3], "--quiet", "--data", str(text), "--out", str(folder)]) == 0
    assert main(["report", str(folder)]) == 0
    assert target.read_text() == "precious" and not (folder / how).is_symlink()
    (folder / "metrics.jsonl").read_text()


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every field of a manifest, of the first shard and array only."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value[:1]):
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from fields(inner, (*path, key))


@pytest.mark.soak
def test_no_field_of_a_manifest_may_be_missed_without_a_line(run: Path, tmp_path: Path) -> None:
    (newest,) = list(run.glob(f"step-*/{MANIFEST}"))[-1:]
    whole = json.loads(newest.read_text())
    del whole["digest"]
    for number, path in enumerate(fields(whole)):
        folder = shutil.copytree(run, tmp_path / str(number))
        value = json.loads(json.dumps(whole))
        *above, last = path
        held = value
        for key in above:
            held = held[key]
        del held[last]
        manifest = folder / newest.relative_to(run)
        manifest.write_bytes(_with_digest(json.dumps(value)[:-1].encode()))
        for words in commands(folder, manifest, tmp_path):
            status, said = check(folder, words, tmp_path / "report.html")
            assert status in (0, 1, 2), (path, words, said)
        shutil.rmtree(folder)
