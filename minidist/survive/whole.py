"""Whole tensors out of a checkpoint's shards, in one process; and every byte of them verified."""

from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.device.backend import dtype
from minidist.errors import CheckpointError
from minidist.parallel.hybrid.state_map import WEIGHT, Place
from minidist.survive.checkpoint import read_state
from minidist.survive.manifest import read_manifest
from minidist.survive.shard_file import BLOCK, ShardReader

AT_ONCE = 64 * BLOCK        # bytes that `verify` reads at a time


class VerifiedShard(NamedTuple):
    """One file of a checkpoint, of which every byte was read.

    Attributes: arrays: how many it has; problems: each damaged array's, or the file's; none: every byte is as written.
    """

    file: str
    nbytes: int
    arrays: int
    problems: list[str]


def read_whole(folder: Path, kind: str = WEIGHT) -> dict[str, np.ndarray]:
    """All tensors of a kind, whole, by dotted path: the weights, of mixed precision the masters.

    Raises:  CheckpointError if a file is missing or damaged.
    """
    shards = read_manifest(folder)["shards"]
    entries = {entry["key"]: entry for shard in shards for entry in shard["arrays"]}
    places = [Place(kind, key.removeprefix(f"{kind}/"), tuple(entry["shape"]),
                    np.array([[0, prod(entry["shape"])]], np.int64), dtype(entry["dtype"]))
              for key, entry in sorted(entries.items()) if key.startswith(f"{kind}/")]
    arrays = [np.empty(place.size, place.dtype) for place in places]
    read_state(folder, shards, zip(places, arrays, strict=True))
    return {place.name: array.reshape(place.shape) for place, array in zip(places, arrays, strict=True)}


def verify(folder: Path) -> Iterator[VerifiedShard]:
    """Read every byte of a checkpoint; a record of each shard. Raises: CheckpointError if the manifest is damaged."""
    for shard in read_manifest(folder)["shards"]:
        yield VerifiedShard(shard["file"], shard["nbytes"], len(shard["arrays"]), [*_problems(folder, shard)])


def _problems(folder: Path, shard: dict[str, Any]) -> Iterator[str]:
    try:
        reader = ShardReader(folder / shard["file"], shard)
    except CheckpointError as error:
        yield str(error)
        return
    for entry in reader.entries:
        try:
            for begin in range(0, entry.nbytes, AT_ONCE):
                reader.checked(entry, begin, min(begin + AT_ONCE, entry.nbytes))
        except CheckpointError as error:
            yield str(error)
    reader.close()
