"""minidist checkpoint and minidist sample: what lies in a run's folder is verified, exported,
resharded, and writes."""

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import threadpoolctl
from safetensors import safe_open
from safetensors.numpy import load, load_file

from minidist.cli import main
from minidist.parallel.state.manifest import checkpoints, read_manifest
from minidist.survive.whole import read_whole


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks with tied ends, its results and the checkpoints of steps 1 and 2; not to
    be changed."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "book.txt").write_text(
        "".join(f"{i}: a quick brown fox jumps over {i * i} dogs.\n" for i in range(50))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "minidist.cli.train.run_folder.draw_loss", lambda path, losses, **options: path.touch()
        )
        assert (
            main(
                [
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
                    "--precision",
                    "bf16",
                    "--tied",
                    "--steps",
                    "2",
                    "--save-every",
                    "1",
                    "-n",
                    "2",
                    "--zero",
                    "2",
                    "--transport",
                    "threads",
                    "--data",
                    str(folder / "book.txt"),
                    "--out",
                    str(folder / "run"),
                ]
            )
            == 0
        )
    return folder / "run"


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "run"))


def test_what_it_holds(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", str(saved), "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["good"] and [
        (one["step"], one["ranks"], one["problems"]) for one in found["checkpoints"]
    ] == [(1, 2, []), (2, 2, [])]
    for one in found["checkpoints"]:
        assert (
            f"{one['folder']}: step {one['step']}, 2 ranks (dp=2, ZeRO-2), 2 layers of width 8, "
            "AdamW" in printed
        )
        on_disk = {file.name: file.stat().st_size for file in Path(one["folder"]).glob("shard-*")}
        assert {shard["file"]: shard["nbytes"] for shard in one["shards"]} == on_disk
        assert one["bytes"] == sum(on_disk.values()) and one["plan"]["zero"] == 2
    assert printed.count("every byte as written") == 4


def test_a_flipped_bit_names_shard_and_tensor(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "step-000002" / "shard-00001.safetensors"
    header = int.from_bytes(file.read_bytes()[:8], "little")
    tensors = json.loads(file.read_bytes()[8 : 8 + header])
    for key, entry in list(tensors.items())[:3]:
        content = bytearray(file.read_bytes())
        content[8 + header + entry["data_offsets"][0]] ^= 16
        file.write_bytes(content)
        assert main(["checkpoint", str(run)]) == 1
        printed = capsys.readouterr().out
        assert f"damaged: {file}: {key.split('@')[0]} is damaged in its bytes 0 to " in printed, (
            printed
        )
        content[8 + header + entry["data_offsets"][0]] ^= 16
        file.write_bytes(content)
    assert main(["checkpoint", str(run / "step-000002")]) == 0


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (
            lambda folder: (folder / "manifest.json").unlink(),
            "step-000002: no complete checkpoint is here",
        ),
        (
            lambda folder: (folder / "shard-00000.safetensors").unlink(),
            "shard-00000.safetensors: No such file",
        ),
        (
            lambda folder: (folder / "shard-00000.safetensors").write_bytes(b""),
            "shard-00000.safetensors: has 0 bytes",
        ),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "is damaged or no manifest"),
    ],
)
def test_other_damage(harm: Any, says: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harm(run / "step-000002")
    assert main(["checkpoint", str(run)]) == 1
    printed = capsys.readouterr()
    assert says in printed.out and printed.err == "" and "step-000001: step 1" in printed.out
    assert main(["checkpoint", str(run), "--export", str(run / "out.safetensors")]) == 2
    assert (
        "is damaged, so nothing is written" in capsys.readouterr().err
        and not (run / "out.safetensors").exists()
    )


def test_an_export_to_what_is_no_regular_file_leaves_it_in_its_place(
    saved: Path, tmp_path: Path
) -> None:
    """A pipe here; the library renames a file over it, as over /dev/null where root asks for
    that."""
    os.mkfifo(tmp_path / "pipe")
    found: list[bytes] = []
    reader = threading.Thread(
        target=lambda: found.append((tmp_path / "pipe").read_bytes()), daemon=True
    )
    reader.start()
    assert main(["checkpoint", str(saved), "--export", str(tmp_path / "pipe")]) == 0
    assert (tmp_path / "pipe").is_fifo()
    reader.join(30)
    assert load(found[0]).keys() == load_file(saved / "model.safetensors").keys()


def test_resharding_is_for_as_many_ranks_as_one_host_plays(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["checkpoint", str(saved), "--out", str(tmp_path / "other"), "--reshard"]
    assert main([*words, "dp=1000000"]) == 2
    assert "--reshard: 1,000,000 ranks are more than 1,024" in capsys.readouterr().err


def test_export_is_the_model_that_the_run_wrote(saved: Path, tmp_path: Path) -> None:
    """The masters, whole, of the last step."""
    assert main(["checkpoint", str(saved), "--export", str(tmp_path / "model.safetensors")]) == 0
    exported = load_file(tmp_path / "model.safetensors")
    model = load_file(saved / "model.safetensors")
    assert exported.keys() == model.keys()
    for name, array in model.items():
        assert exported[name].dtype == np.float32
        np.testing.assert_array_equal(exported[name], array)
    configs = []
    for file in (saved / "model.safetensors", tmp_path / "model.safetensors"):
        with safe_open(file, "numpy") as opened:
            configs.append(json.loads(opened.metadata()["config"]))
    assert configs[0] == configs[1]


@pytest.mark.parametrize(
    ("plan", "options", "ranks"),
    [
        ("pp=2", [], 2),
        pytest.param("pp=2,tp=2", [], 4, marks=pytest.mark.soak),
        pytest.param("dp=3", ["--zero", "3"], 3, marks=pytest.mark.soak),
        pytest.param("dp=1", [], 1, marks=pytest.mark.soak),
    ],
)
def test_resharding_keeps_every_bit(
    plan: str,
    options: list[str],
    ranks: int,
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """There, and back to the ranks that wrote it, file by file; the new run can be resumed."""
    there = tmp_path / "there"
    back = tmp_path / "back"
    assert main(["checkpoint", str(saved), "--reshard", plan, *options, "--out", str(there)]) == 0
    assert (
        main(["checkpoint", str(there), "--reshard", "dp=2", "--zero", "2", "--out", str(back)])
        == 0
    )
    assert f"minidist train --resume {there} goes on" in capsys.readouterr().out
    for kind in ("weight", "m", "v"):
        arrays = read_whole(there / "step-000002", kind)
        before = read_whole(saved / "step-000002", kind)
        assert arrays.keys() == before.keys() and len(before) > 5
        for name, array in before.items():
            np.testing.assert_array_equal(arrays[name], array)
    for file in (saved / "step-000002").glob("shard-*"):
        assert (back / "step-000002" / file.name).read_bytes() == file.read_bytes()
    old, new = (read_manifest(folder / "step-000002")["about"] for folder in (saved, there))
    assert (
        new["ranks"] == ranks and new["state"] == old["state"] and new["metrics"] == old["metrics"]
    )
    assert (
        main(["train", "--resume", str(there), "--quiet", "--steps", "3", "--transport", "threads"])
        == 0
    )
    assert (
        len(checkpoints(there)) == 2
        and len(json.loads((there / "metrics.json").read_text())["ranks"]) == ranks
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["checkpoint", "NOWHERE"], "no checkpoint is here"),
        (["checkpoint", "RUN", "--reshard", "dp=2"], "name a new run folder with --out"),
        (["checkpoint", "RUN", "--reshard", "dp=2", "--out", "RUN"], "holds checkpoints"),
        (["checkpoint", "RUN", "--reshard", "tp=4", "--out", "NOWHERE"], "heads"),
        (["checkpoint", "RUN", "--out", "NOWHERE"], "--out: is for --reshard"),
        (["checkpoint", "RUN", "--export", "NOWHERE/x"], "there is no folder"),
        (["sample", "NOWHERE"], "no run that can write text is here"),
        (["sample", "RUN", "--prompt", "a fox: ß"], "does not have the symbols 'ß'"),
        (["sample", "RUN", "--prompt", ""], "--prompt: '' is not a value"),
        (["sample", "RUN/step-000009"], "no complete checkpoint is here"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], says: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(saved.rglob("*"))
    command = [
        word.replace("RUN", str(saved)).replace("NOWHERE", str(tmp_path / "nowhere"))
        for word in words
    ]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"minidist {words[0]}: ") and says in error and error.count("\n") == 1
    ), error
    assert sorted(saved.rglob("*")) == before


def test_text_from_results_and_from_a_sharded_checkpoint_is_the_same(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--prompt", "a quick", "--tokens", "20", "--seed", "3"]
    file = tmp_path / "text.json"
    told = []
    for place in (saved, saved / "step-000002", saved / "step-000001"):
        assert main(["sample", str(place), *words, "--json", str(file)]) == 0
        told.append((capsys.readouterr().out, json.loads(file.read_text())))
    (first, results), (second, sharded), (_, older) = told
    assert first == second and first.startswith("a quick") and first == f"{results['text']}\n"
    assert len(results["text"]) == len("a quick") + 20
    assert (results["source"], sharded["source"]) == (
        f"{saved}/model.safetensors",
        f"{saved}/step-000002",
    )
    assert (results["step"], sharded["step"], older["step"]) == (2, 2, 1)


def test_text_is_written_by_one_thread(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Others would wait for each other at each product of one row."""
    with threadpoolctl.threadpool_limits(2):
        assert main(["sample", str(saved), "--tokens", "1"]) == 0
        assert {
            pool["num_threads"]
            for pool in threadpoolctl.threadpool_info()
            if pool["user_api"] == "blas"
        } == {1}


def test_the_newest_state_writes(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A run that was stopped has no results yet, or those of fewer steps."""
    metrics = json.loads((run / "metrics.json").read_text())
    (run / "metrics.json").write_text(json.dumps(metrics | {"losses": metrics["losses"][:1]}))
    for _ in range(2):
        assert (
            main(["sample", str(run), "--tokens", "3", "--json", str(tmp_path / "text.json")]) == 0
        )
        assert json.loads((tmp_path / "text.json").read_text())["source"] == f"{run}/step-000002"
        (run / "metrics.json").unlink(missing_ok=True)
