"""Read whole tensors from a checkpoint's shards, in one process; and verify every byte of the
shards."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minidist.device.backend import dtype
from minidist.errors import CheckpointError, ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.state.checkpoint import read_state, require_file
from minidist.parallel.state.manifest import ITEMSIZE, read_manifest, require_told
from minidist.parallel.state.shard_file import BLOCK, ShardReader
from minidist.parallel.state.state_map import WEIGHT, Place

AT_ONCE = 64 * BLOCK  # bytes that `verify` reads at a time


class VerifiedShard(NamedTuple):
    """The result of reading every byte of one file of a checkpoint.

    Attributes: arrays: their number; problems: one for each damaged array, or for the file; empty:
                every byte is as written.
    """

    file: str
    nbytes: int
    arrays: int
    problems: list[str]


def read_whole(folder: Path, kind: str = WEIGHT) -> dict[str, np.ndarray]:
    """Return all tensors of a kind, whole, by dotted path (default: the weights).

    With mixed precision, the weights are the master weights.

    Raises:  CheckpointError if a file is missing or damaged.
    """
    shards = read_manifest(folder)["shards"]
    entries = {entry["key"]: entry for shard in shards for entry in shard["arrays"]}
    _require_held(folder, shards, kind)
    places = [
        Place(
            kind,
            key.removeprefix(f"{kind}/"),
            tuple(entry["shape"]),
            np.array([[0, prod(entry["shape"])]], np.int64),
            dtype(entry["dtype"]),
        )
        for key, entry in sorted(entries.items())
        if key.startswith(f"{kind}/")
    ]
    arrays = [np.empty(place.size, place.dtype) for place in places]
    read_state(folder, shards, zip(places, arrays, strict=True))
    return {
        place.name: array.reshape(place.shape) for place, array in zip(places, arrays, strict=True)
    }


def config_of(folder: Path, about: dict[str, Any], sizes: Iterable[int]) -> GPTConfig:
    """Return the config in a manifest.

    Args:    sizes: sizes of the model's tensors that the checkpoint has.
    Raises:  CheckpointError if it is not valid, or describes a larger model than these tensors.
    """
    require_told(folder, about, "config")
    try:
        config = GPTConfig.of(about["config"])
    except ConfigError as error:
        raise CheckpointError(
            f"{folder}: its model cannot be built: {error}; take an older checkpoint"
        ) from error
    numbers = list(sizes)
    if config.numbers > sum(numbers) or config.layers > len(numbers):
        raise CheckpointError(
            f"{folder}: is to be a model of {config.layers:,} layers and {config.numbers:,} "
            f"weights or more, and has {len(numbers):,} tensors of {sum(numbers):,}; take an "
            "older checkpoint"
        )
    return config


def sizes_of(shards: Sequence[dict[str, Any]], kind: str = WEIGHT) -> dict[str, int]:
    """Return the number of elements of each tensor of a kind, by its key."""
    return {
        entry["key"]: prod(entry["shape"])
        for shard in shards
        for entry in shard["arrays"]
        if entry["key"].startswith(f"{kind}/")
    }


def _require_held(folder: Path, shards: Sequence[dict[str, Any]], kind: str) -> None:
    """Raise CheckpointError if the shards' files hold less of a tensor of this kind than its
    size."""
    held: Counter[str] = Counter()
    for shard in shards:
        mine = [entry for entry in shard["arrays"] if entry["key"].startswith(f"{kind}/")]
        if mine:
            require_file(folder, shard)
        held.update({entry["key"]: entry["nbytes"] // ITEMSIZE[entry["dtype"]] for entry in mine})
    for key, size in sizes_of(shards, kind).items():
        if held[key] < size:
            raise CheckpointError(
                f"{folder}: lacks {size - held[key]:,} of {size:,} numbers of {key}; take an older "
                f"checkpoint"
            )


def verify(folder: Path) -> Iterator[VerifiedShard]:
    """Read every byte of a checkpoint; yield a record of each shard.

    Raises: CheckpointError if the manifest is damaged.
    """
    for shard in read_manifest(folder)["shards"]:
        yield VerifiedShard(
            shard["file"], shard["nbytes"], len(shard["arrays"]), [*_problems(folder, shard)]
        )


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
