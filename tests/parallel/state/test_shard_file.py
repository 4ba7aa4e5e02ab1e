"""Shard files: a rank reads the blocks that it wants and no others; the safetensors library reads
the same numbers."""

import os
import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import make, saved, whole_state
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import minidist as md
from minidist.parallel.state import shard_file
from minidist.parallel.state.manifest import read_manifest
from minidist.parallel.state.shard_file import ShardLayout, ShardReader, ShardWriter
from minidist.parallel.state.state_map import stripes_of

CHANGES = {"width": 24, "heads": 3}


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("writer", "reader", "share"),
    [
        ({"dp": 2, "zero": 1}, {"dp": 4, "zero": 3}, 1 / 4),
        ({"dp": 4, "zero": 3}, {"dp": 4, "zero": 3}, 1 / 4),
        ({}, {"pp": 2}, 1 / 2),
        ({"dp": 3, "zero": 3}, {}, 1),
    ],
    ids=["other ranks", "same plan", "stages", "all"],
)
def test_a_rank_reads_what_it_wants(
    writer: dict[str, Any],
    reader: dict[str, Any],
    share: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its part of the bytes, and the blocks at the edges; the headers of the files that it
    opens."""
    block = 128
    monkeypatch.setattr(shard_file, "BLOCK", block)
    folder = str(tmp_path / "a")
    md.run(saved, folder, writer, CHANGES, {}, 1, size=md.Plan(**writer).size)
    read = Counter[int]()
    pread = os.pread

    def counting(descriptor: int, count: int, start: int) -> bytes:
        read[threading.get_ident()] += count
        return pread(descriptor, count, start)

    def load(world: Any) -> int:
        trainer = make(world, reader, CHANGES, {})
        before = read[threading.get_ident()]
        trainer.load(folder)
        trainer.close()
        return read[threading.get_ident()] - before

    monkeypatch.setattr(os, "pread", counting)
    shards = read_manifest(Path(folder))["shards"]
    headers = sum(shard["header"][0] for shard in shards)
    everything = sum(shard["nbytes"] for shard in shards) - headers
    edges = 2 * block * sum(len(shard["arrays"]) for shard in shards)
    ranks = md.run(load, size=md.Plan(**reader).size)
    assert sum(ranks) >= everything  # and all of it is checked
    for count in ranks:
        assert count <= 1.1 * share * everything + headers + edges * share
    assert edges * share < 0.5 * everything


@pytest.mark.parametrize("changes", [{"dtype": "float64"}, {"dtype": "float32"}])
def test_the_safetensors_library_reads_the_same(changes: dict[str, Any], tmp_path: Path) -> None:
    """Each file by itself; whole tensors have their shapes."""
    folder = tmp_path / "a"
    md.run(saved, str(folder), {"dp": 2, "zero": 1, "bucket_bytes": 4000}, changes, {}, 1, size=2)
    whole, _ = whole_state(folder)
    seen = 0
    for shard in read_manifest(folder)["shards"]:
        tensors = load_file(folder / shard["file"])
        with safe_open(folder / shard["file"], framework="numpy") as opened:
            assert {*opened.keys()} == {*tensors} == {array["key"] for array in shard["arrays"]}
        for array in shard["arrays"]:
            ((start, length, _, count),) = array["stripes"]
            ours = whole[array["key"]][start : start + length]
            theirs = tensors[array["key"]]
            assert (
                count == 1
                and np.array_equal(ours, theirs.reshape(-1))
                and ours.dtype == theirs.dtype
            )
            seen += theirs.shape == tuple(array["shape"])
    assert seen > 20


@given(
    numbers=st.integers(0, 50),
    dtype=st.sampled_from([np.float64, np.float32, np.float16, ml_dtypes.bfloat16]),
    edges=st.lists(st.integers(0, 50), max_size=6),
    block=st.sampled_from([8, 16, 64]),
)
def test_any_copies_of_any_array(
    numbers: int, dtype: Any, edges: list[int], block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What is written comes back, in pieces of any sizes."""
    arrays = [np.arange(numbers).astype(dtype), (np.arange(7) * 0.5).astype(dtype)]
    runs = [np.array([[0, len(array)]]) for array in arrays]
    file = tmp_path_factory.mktemp("shard") / "a.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_file, "BLOCK", block)
        writer = ShardWriter(
            file,
            ShardLayout(
                [
                    (name, array.dtype, [len(array)], stripes_of(run), len(array))
                    for name, array, run in zip("ab", arrays, runs, strict=True)
                ]
            ),
        )
        for index, array in enumerate(arrays):
            writer.write(index, array)
        writer.close()
        reader = ShardReader(file, writer.described())
        cuts = sorted({0, numbers, *(edge for edge in edges if edge < numbers)})
        copies = np.array([[a, a, b - a] for a, b in pairwise(cuts)][::2], np.int64).reshape(-1, 3)
        out = np.zeros(numbers, dtype)
        if len(copies):
            reader.copy(reader.entries[0], copies, out)
        for a, _, count in copies.tolist():
            assert np.array_equal(out[a : a + count], arrays[0][a : a + count])
        whole = np.empty(7, dtype)
        reader.copy(reader.entries[1], np.array([[0, 0, 7]]), whole)
        assert np.array_equal(whole, arrays[1])
        reader.close()
    assert len(shard_file.header_bytes({})) % 8 == 0
