"""Flipped bits, and files that are cut, swapped, missing or foreign: each is found, and named in
one line."""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import resumed, saved

import minidist as md
from minidist.device.backend import dtype
from minidist.errors import CheckpointError
from minidist.parallel.state import manifest, shard_file
from minidist.parallel.state.checkpoint import read_state
from minidist.parallel.state.manifest import MANIFEST, read_manifest
from minidist.parallel.state.state_map import Place

PLAN: dict[str, Any] = {"dp": 2, "zero": 2, "precision": "fp16"}
CHANGES: dict[str, Any] = {"layers": 1, "dtype": "float32"}


@pytest.fixture(scope="module")
def good() -> Iterator[Any]:
    """Small blocks, so that arrays have several, and one that is not full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "BLOCK", 512)
        yield


@pytest.fixture(scope="module")
def folder(good: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("damage") / "step-000002"
    md.run(saved, str(folder), PLAN, CHANGES, {}, 2, size=2)
    assert read_everything(folder) == ""
    return folder


def read_everything(folder: Path) -> str:
    """Why the state cannot be read, as a rank that wants all of it is told; empty if it can."""
    try:
        shards = read_manifest(folder)["shards"]
        entries = {entry["key"]: entry for shard in shards for entry in shard["arrays"]}
        places = [
            Place(
                *key.split("/"),
                tuple(entry["shape"]),
                np.array([[0, prod(entry["shape"])]]),
                dtype(entry["dtype"]),
            )
            for key, entry in entries.items()
        ]
        read_state(folder, shards, [(place, np.empty(place.size, place.dtype)) for place in places])
    except CheckpointError as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def place_of(shards: list[dict[str, Any]], file: str, at: int) -> str:
    """Return what the message names for byte `at` of a file."""
    if file == MANIFEST:
        return MANIFEST
    for shard in shards:
        for entry in shard["arrays"]:
            if shard["file"] == file and entry["offset"] <= at < entry["offset"] + entry["nbytes"]:
                first = (at - entry["offset"]) // 512 * 512
                return f"{file}: {entry['key']} is damaged in its bytes {first:,} to "
    return f"{file}: has another header"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 11))]
)
def test_two_hundred_flipped_bits(seed: int, folder: Path, tmp_path: Path) -> None:
    """200 of 200 are found, with shard and tensor named."""
    choose = random.Random(f"flips {seed}")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    names = sorted(file.name for file in folder.iterdir())
    shards = read_manifest(folder)["shards"]
    headers = {shard["file"]: shard["header"][0] for shard in shards}
    assert len(names) == 3
    for number in range(200):
        file = copy / choose.choice(names)
        content = file.read_bytes()
        # headers too
        some = headers.get(file.name, len(content)) if number % 5 == 0 else len(content)
        at = choose.randrange(some)
        bit = 1 << choose.randrange(8)
        file.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        told = read_everything(copy)
        assert place_of(shards, file.name, at) in told, (file.name, at, bit, told)
        file.write_bytes(content)
    assert read_everything(copy) == ""


def test_the_case_of_every_letter_of_a_manifest_counts(tmp_path: Path) -> None:
    """Also in 1e-07 and \\u00e9, which mean the same in both cases."""
    about = {"text": "é", "rate": 1e-7}
    manifest.write_manifest(tmp_path, about, [])
    assert read_manifest(tmp_path)["about"] == about
    content = (tmp_path / MANIFEST).read_bytes()
    for at in range(len(content)):
        (tmp_path / MANIFEST).write_bytes(
            content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :]
        )
        with pytest.raises(CheckpointError, match=MANIFEST):
            read_manifest(tmp_path)


def cut(folder: Path) -> None:
    file = folder / "shard-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def swap(folder: Path) -> None:
    one, two = (folder / f"shard-0000{rank}.safetensors" for rank in range(2))
    one.rename(folder / "other")
    two.rename(one)
    (folder / "other").rename(two)


def foreign(folder: Path) -> None:
    file = folder / "shard-00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))


def of_another_run(folder: Path) -> None:
    """The manifest of a run with other weights, whose shards have the same names and sizes."""
    other = folder.parent / "other" / "step-000002"
    md.run(saved, str(other), PLAN, CHANGES, {"seed": 4}, 2, size=2)
    shutil.copy(other / MANIFEST, folder / MANIFEST)


def of_another_format(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content | {"format": 4}))


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def no_shard(folder: Path) -> None:
    (folder / "shard-00001.safetensors").unlink()


def a_folder(folder: Path) -> None:
    (folder / "shard-00001.safetensors").unlink()
    (folder / "shard-00001.safetensors").mkdir()


def empty(folder: Path) -> None:
    (folder / MANIFEST).write_text("")


def no_table(folder: Path) -> None:
    (folder / MANIFEST).write_text("[1]")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut, r"shard-00001.safetensors: has [\d,]+ bytes, the manifest says"),
        (swap, "shard-0000[01].safetensors: "),
        (foreign, "shard-00000.safetensors: has another header"),
        (of_another_run, "shard-0000.*is damaged"),
        (of_another_format, "has format 4, this minidist reads 1 to 3"),
        (no_manifest, "no complete checkpoint is here"),
        (no_shard, "shard-00001.safetensors: No such file"),
        (a_folder, "shard-00001.safetensors: "),
        (empty, "manifest.json: is damaged"),
        (no_table, "manifest.json: is damaged"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_not_the_checkpoint_is_refused(
    damage: Callable[[Path], None], says: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy")
    assert re.search(says, told := read_everything(tmp_path / "copy")), told


def refusal(world: Any, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        resumed(world, folder, PLAN | {"dp": 3}, CHANGES, {})
    return str(caught.value)


def test_every_rank_is_told_of_damage_that_one_finds(folder: Path, tmp_path: Path) -> None:
    """Three ranks read other parts of the two shards; the last block is not for rank 0."""
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "shard-00001.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (told,) = set(md.run(refusal, str(tmp_path / "copy"), size=3))
    assert re.search("^rank [12]: .*shard-00001.safetensors: v/.* is damaged", told)
