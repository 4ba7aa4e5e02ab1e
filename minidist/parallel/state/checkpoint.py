"""Chapter 26 · Checkpoints: each rank writes its own numbers, and any other plan can continue from
them.

The idea. A training that stops loses everything except the files on a disk. Writing it whole
through one rank would take the memory and the time of one rank; so each rank writes its shards. A
machine may stop while they are written; so the manifest, which says what the shards hold, is
written last, and a folder without a manifest is no checkpoint. The job that continues may have
other ranks; so the manifest says which numbers of each whole tensor a shard has, and a rank reads
the numbers that it needs.

    rank 0 of 2   [0, 7)   -> shard 0 --+                         +-> [0, 5)    rank 0 of 3
    rank 1 of 2   [7, 13)  -> shard 1 --+-- manifest: 0-6, 7-12 --+-> [5, 9)    rank 1, from both
                                                                  +-> [9, 13)   rank 2

The state: weights or their float32 masters, the optimizer's moments and the number of updates of
each tensor, the loss scale and fp8's histories, and the number of steps. Everything else follows
from seed and step: dropout, data, learning rate. So a run that continues under the same plan gives
the same bits as one that never stopped.

Cost, of a save: state bytes / ranks written by each rank, an fsync, and small records under
`control`; of a load: the bytes that a rank wants, in whole blocks of 256 KiB.

notes:   N2 §12.4 抢占式实例 (N2:555), 资源弹性调度 (N2:557); N2 §10.5 多租户支持 (N2:432); 实时调整并行策略 (N2:360)
Source:  Li et al. 2024, "ByteCheckpoint" (2407.20143), resharding on load; Eisenman et al. 2022,
         "Check-N-Run".
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.comm.records import gather_records, hand_out_record, share_records, unhurried
from minidist.device.backend import device_of, dtype_name, to_device, to_host
from minidist.errors import CheckpointError
from minidist.files import scratch
from minidist.optim import Optimizer
from minidist.parallel.compress.outer import OF_OUTER
from minidist.parallel.state.manifest import (
    publish,
    read_manifest,
    require_told,
    shard_name,
    write_manifest,
)
from minidist.parallel.state.scheme_state import is_schemes
from minidist.parallel.state.shard_file import ShardLayout, ShardReader, ShardWriter, require_size
from minidist.parallel.state.state_map import (
    Place,
    merged_state,
    of_all,
    of_rank,
    overlap,
    ranks_apart,
    require_together,
    runs_of,
    set_small_state,
    small_state,
    state_arrays,
    state_places,
    stripes_of,
    taken_by,
)
from minidist.parallel.step.strategy import Strategy
from minidist.reading import visible


def plain_save(group: Group, chunk: np.ndarray, size: int, folder: Path) -> None:
    """Write a vector of `size` numbers; each rank has and writes its chunk; the manifest is written
    last."""
    file = folder / f"{group.rank}.bin"
    chunk.tofile(file)
    digest = np.frombuffer(hashlib.sha256(file.read_bytes()).digest(), np.uint8)
    digests = group.all_gather(digest[None])  # now all shards are written
    if group.rank == 0:
        (folder / "draft").write_text(
            json.dumps({"size": size, "sha256": [d.tobytes().hex() for d in digests]})
        )
        os.replace(folder / "draft", folder / "manifest.json")  # at once: it is there or not


def plain_load(group: Group, folder: Path) -> np.ndarray:
    """Return this rank's chunk of the vector; the group may have another size than the group that
    wrote it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    old, new = (bounds(manifest["size"], ranks) for ranks in (len(manifest["sha256"]), group.size))
    start = new[group.rank]
    stop = new[group.rank + 1]
    parts = []
    for rank, digest in enumerate(manifest["sha256"]):
        first, last = max(start, old[rank]), min(stop, old[rank + 1])
        if first < last:  # this shard has some of my numbers
            file = folder / f"{rank}.bin"
            if hashlib.sha256(file.read_bytes()).hexdigest() != digest:
                raise CheckpointError(f"{file}: is damaged")
            parts.append(np.fromfile(file)[first - old[rank] : last - old[rank]])
    return np.concatenate(parts)


# The real one below saves any strategy: its numbers lie in many tensors and anywhere in them
# (state/state_map.py), and if several ranks have the same numbers, one writes them. Checksums are
# of blocks, so that a rank reads and checks only what it needs. Each file is on the disk before the
# manifest is written. If one rank cannot write, every rank raises.


def save(
    folder: Path, strategy: Strategy, optimizer: Optimizer, group: Group, about: dict[str, Any]
) -> None:
    """Write a checkpoint. Every rank calls it, between two steps; a folder of this name is replaced
    at the end.

    Args:    group: all ranks; about: on rank 0: facts for a reader, as JSON.
    Raises:  CheckpointError on every rank if one cannot write; then nothing is left, and an older
             folder stays.
    """
    places = state_places(strategy, optimizer)
    mine = share_out(places, group)
    arrays = chosen(state_arrays(strategy, optimizer, changes=False), mine)
    layout = layout_of([places[index] for index in mine])
    about = about | {"optimizer": type(optimizer).__name__}
    with unhurried(group):  # the slowest rank's disk decides
        write_checkpoint(folder, about, layout, arrays, small_state(strategy, optimizer), group)


def write_checkpoint(
    folder: Path,
    about: dict[str, Any],
    layout: ShardLayout,
    arrays: Iterable[Any],
    small: dict[str, Any],
    group: Group,
) -> None:
    """Write the shards of all ranks, then the manifest. Every rank calls it with its arrays and its
    small state.

    Cost:    under `control`, a broadcast, two gathers and a broadcast: only rank 0 needs to know
             what all have written.
    Raises:  as save.
    """

    def finish(told: list[Any]) -> str:
        try:
            state = merged_state([small for _, small in told])
            write_manifest(
                draft, about | {"state": state, "ranks": group.size}, [shard for shard, _ in told]
            )
            publish(draft, folder)
        except OSError as error:
            return f"rank 0 cannot write {error.filename or folder}: {error.strerror}"
        return ""

    with ExitStack() as stack:
        draft = _common_draft(stack, folder, group)
        problem = ""
        described = None
        try:
            described = write_shard(draft / shard_name(group.rank), layout, arrays)
        except OSError as error:
            problem = f"rank {group.rank} cannot write {error.filename or draft}: {error.strerror}"
        if problem := _verdict(group, problem, [described, small], finish):
            raise CheckpointError(_not_saved(folder, problem))


def load(folder: Path, strategy: Strategy, optimizer: Optimizer, group: Group) -> dict[str, Any]:
    """Load the state of a checkpoint that any plan has written. Every rank calls it, between two
    steps.

    Ranks with a state of their own (local steps) may be more or fewer than the P ranks that saved.
    Rank r loads the state of rank r mod P. If fewer ranks load, the changes of the other ranks
    since the last exchange are lost. If the checkpoint was saved without local steps, each rank
    begins with its state, and an outer optimizer begins without momentum.

    Returns: the `about` that `save` was given.
    Raises:  CheckpointError on every rank if one finds a file missing or damaged, or not of this
             model; then the state of this training is of no use.
    """
    problem = ""
    about = dict[str, Any]()
    there = set[str]()
    places = list[Place]()
    read = ""
    try:
        require_together(strategy)
        manifest = read_manifest(folder)
        read = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        about = manifest["about"]
        there = {array["key"] for shard in manifest["shards"] for array in shard["arrays"]}
        require_told(folder, about, "state", "optimizer")
        state = about.pop("state")
        places = state_places(strategy, optimizer, state)
        if about["optimizer"] != type(optimizer).__name__:
            raise CheckpointError(
                f"{folder}: was trained by {about['optimizer']}, this training uses "
                f"{type(optimizer).__name__}; use the same optimizer"
            )
        apart = ranks_apart(there)
        if apart and strategy.common_state_of is None:
            raise CheckpointError(
                f"{folder}: was saved with local steps by {apart} ranks, each with its own state; "
                "continue with local steps"
            )
        if apart:
            require_told(folder, state, "local steps")
            places = [of_rank(place, group.rank % apart) for place in places]
            there -= {key for key in there if taken_by(key) >= group.size}
        elif strategy.common_state_of is not None:
            places = [of_all(place) for place in places]
            state["local steps"] = about.get("steps_done", 0)
        wanted = zip(
            places, state_arrays(strategy, optimizer, changes=True, saved=state), strict=True
        )
        read_state(folder, manifest["shards"], wanted if apart else _without_outer(wanted))
        set_small_state(strategy, optimizer, state, group.rank)
    except (CheckpointError, OSError) as error:
        problem = f"rank {group.rank}: {error}"

    def unknown(told: list[tuple[str, list[str]]]) -> str:
        if others := [rank for rank, (digest, _) in enumerate(told) if digest != told[0][0]]:
            return f"rank {others[0]} reads another checkpoint than rank 0; give all the same"
        taken = [keys for _, keys in told]
        left = sorted(key for key in there.difference(*taken) if not is_schemes(key))
        return (
            (
                f"{folder}: has {left[0]} and {len(left) - 1} other tensors that this training "
                "has not; it is of another model"
            )
            if left
            else ""
        )

    mine = sorted({place.key for place in places if place.size})
    with unhurried(group):  # the slowest rank's disk decides
        problem = _verdict(group, problem, [read, mine], unknown)
    if problem:
        raise CheckpointError(problem)
    strategy.state_replaced()
    return about


# ----------------------------------------------------------------------------------------- one rank


def layout_of(places: list[Place]) -> ShardLayout:
    """Return the layout of the file of a rank that writes these places."""
    return ShardLayout(
        [
            (place.key, place.dtype, place.shape, stripes_of(place.runs), place.size)
            for place in places
        ]
    )


def write_shard(file: Path, layout: ShardLayout, arrays: Iterable[Any]) -> dict[str, Any]:
    """Write one rank's file; return its part of the manifest. Raises: OSError."""
    writer = ShardWriter(file, layout)
    try:
        for index, array in enumerate(arrays):
            writer.write(index, to_host(array))
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    return {"file": file.name, **writer.described()}


def read_state(
    folder: Path, shards: list[dict[str, Any]], wanted: Iterable[tuple[Place, Any]]
) -> None:
    """Fill arrays with their numbers from shard files; only files that have some of them are
    opened.

    Args:    wanted: each place with its flat array.
    Raises:  CheckpointError if a number is in no shard, has another dtype, or is damaged.
    """
    having: dict[str, list[tuple[int, int]]] = {}
    for number, shard in enumerate(shards):
        for index, array in enumerate(shard["arrays"]):
            having.setdefault(array["key"], []).append((number, index))
    readers: dict[int, ShardReader] = {}
    sized: set[int] = set()
    try:
        for place, array in wanted:
            numbers = np.empty(place.size, place.dtype)
            filled: list[np.ndarray] = []
            for number, index in having.get(place.key, []):
                # else what the manifest claims may be more than memory holds
                if number not in sized:
                    require_file(folder, shards[number])
                    sized.add(number)
                copies = overlap(runs_of(shards[number]["arrays"][index]["stripes"]), place.runs)
                if not len(copies):
                    continue
                if number not in readers:
                    readers[number] = ShardReader(folder / shards[number]["file"], shards[number])
                entry = readers[number].entries[index]
                if (entry.dtype, tuple(entry.shape)) != (
                    dtype_name(place.dtype),
                    tuple(place.shape),
                ):
                    raise CheckpointError(
                        f"{folder}: {place.key} is {entry.dtype} {tuple(entry.shape)}, this "
                        f"training has {dtype_name(place.dtype)} {tuple(place.shape)}; build the "
                        "same model"
                    )
                readers[number].copy(entry, copies, numbers)
                filled.append(copies[:, 1:])
            if missing := place.size - _covered(filled):
                raise CheckpointError(
                    f"{folder}: lacks {missing:,} of {place.size:,} numbers of {place.key}"
                    f"; it belongs to another model or optimizer"
                )
            array[...] = to_device(numbers, device_of(array))
    finally:
        for reader in readers.values():
            reader.close()


def require_file(folder: Path, shard: dict[str, Any]) -> None:
    """Raise CheckpointError unless a shard's file is there, and as long as the manifest says."""
    file = folder / shard["file"]
    try:
        size = os.lstat(file).st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; take an older checkpoint") from error
    require_size(file, size, shard["nbytes"])


def _covered(pieces: list[np.ndarray]) -> int:
    """Return the number of different numbers in the pieces, rows of (place, length); pieces may
    overlap."""
    if len(pieces) == 1 and len(pieces[0]) == 1:
        return int(pieces[0][0, 1])
    rows = np.concatenate([np.empty((0, 2), np.int64), *pieces])
    rows = rows[np.argsort(rows[:, 0])]
    ends = np.maximum.accumulate(rows.sum(axis=1))
    starts = np.maximum(rows[:, 0], np.concatenate([[0], ends[:-1]]))
    return int((ends - np.minimum(starts, ends)).sum())


# ---------------------------------------------------------------------------------------- all ranks


def share_out(places: list[Place], group: Group) -> list[int]:
    """Return which of its places this rank writes. If several ranks have a place, the one with the
    fewest bytes so far writes it."""
    told = share_records(
        group,
        [
            [place.key, stripes_of(place.runs), place.size * place.dtype.itemsize]
            for place in places
        ],
    )
    holders: dict[str, list[tuple[int, int, int]]] = {}
    for rank, record in enumerate(told):
        for index, (key, stripes, nbytes) in enumerate(record):
            if nbytes:
                holders.setdefault(json.dumps([key, stripes]), []).append((rank, index, nbytes))
    loads = [0] * group.size
    mine = []
    for candidates in holders.values():
        rank, index, nbytes = min(
            candidates, key=lambda candidate: (loads[candidate[0]], candidate[0])
        )
        loads[rank] += nbytes
        if rank == group.rank:
            mine.append(index)
    return sorted(mine)


def chosen(arrays: Iterable[Any], indices: list[int]) -> Iterable[Any]:
    """Return those of `arrays` that have these indices."""
    wanted = set(indices)
    return (array for index, array in enumerate(arrays) if index in wanted)


def _common_draft(stack: ExitStack, folder: Path, group: Group) -> Path:
    """Return a folder next to `folder` that rank 0 makes, and that lives as long as the stack."""
    draft = ""
    problem = ""
    if group.rank == 0:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            # scratch itself is private
            inside = stack.enter_context(scratch(folder.parent)) / folder.name
            inside.mkdir()  # follows the umask, as files do
            draft = str(inside)
        except OSError as error:
            problem = f"rank 0 cannot make a folder in {folder.parent}: {error.strerror}"
    name, problem = hand_out_record(group, [os.fsencode(draft), visible(problem)])
    if problem:
        raise CheckpointError(_not_saved(folder, problem))
    return Path(os.fsdecode(name))


def _without_outer(wanted: Iterable[tuple[Place, Any]]) -> Iterable[tuple[Place, Any]]:
    """Yield the places that training without local steps has, too; set the state of the outer
    optimizer to zero."""
    for place, array in wanted:
        if place.kind.startswith(OF_OUTER):
            array[...] = 0
        else:
            yield place, array


def _not_saved(folder: Path, problem: str) -> str:
    return f"{folder} was not saved: {problem}; checkpoints before it stay"


def _verdict(group: Group, problem: str, value: Any, judge: Callable[[list[Any]], str]) -> str:
    """Return the problem, the same text on every rank; "" if there is none.

    It is the problem of the lowest rank that has one. If no rank has one, rank 0 calls `judge` with
    the values of all ranks.
    """
    told = gather_records(group, [visible(problem), value])
    if told is not None:
        problem = next((text for text, _ in told if text), "") or judge(
            [value for _, value in told]
        )
    return str(hand_out_record(group, visible(problem)))
