"""Grades exercise 26: ranks as threads write and read your checkpoints; numpy.array_split is the
answer key."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.errors import CheckpointError
from minidist.files import scratch
from minidist.grading import Result, judge
from minidist.launch import run
from minidist.parallel.state.checkpoint import plain_load, plain_save
from minidist.survive.interval import best_interval, goodput

SIZE = 13
WRITERS = 3
READERS = (3, 2, 5)
LIMIT = 60.0
OLD = "{}"
NUMBERS = np.sqrt(np.arange(1.0, SIZE + 1))  # no two alike

CUT_FROM = (plain_save, plain_load)
ANSWERS = {6: "(2 * save * between) ** 0.5"}
"""The right code of the holes beyond the plain versions."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """What lies in the folder, how the manifest came there, what other ranks read; then the
    interval."""
    with scratch() as folder:
        draft = folder / "draft"
        manifest = folder / "manifest.json"
        draft.write_text("")  # that the student's lines are written into this file
        manifest.write_text(OLD)  # as an earlier save has left it
        inode = draft.stat().st_ino
        run(_save, exercise, str(folder), size=WRITERS, limit=LIMIT)
        yield _shards(folder)
        yield _manifest(folder)
        yield _at_once(manifest.stat().st_ino == inode)
        for size in READERS:
            yield _read(exercise, folder, size)
        yield _damaged(exercise, folder)
    for save, between in ((20.0, 7200.0), (3.0, 600.0)):
        yield _interval(exercise, save, between)


def _save(group: Group, exercise: ModuleType, folder: str) -> None:
    """The student's save."""
    edges = bounds(SIZE, group.size)
    exercise.plain_save(
        group, NUMBERS[edges[group.rank] : edges[group.rank + 1]], SIZE, Path(folder)
    )
    group.barrier()


def _shards(folder: Path) -> Result:
    """Every rank's file has its chunk."""
    task = f"{WRITERS} ranks write {SIZE} numbers"
    target = "5, 4 and 4 numbers, in order"
    found = [
        np.fromfile(folder / f"{rank}.bin") if (folder / f"{rank}.bin").exists() else None
        for rank in range(WRITERS)
    ]
    right = np.array_split(NUMBERS, WRITERS)
    said = (
        ", ".join("no file" if shard is None else f"{np.size(shard)}" for shard in found)
        + " numbers"
    )
    passed = all(
        shard is not None and np.array_equal(shard, numbers)
        for shard, numbers in zip(found, right, strict=True)
    )
    return Result(
        task,
        passed,
        target,
        said,
        "numbers are lost",
        "each rank saves its whole chunk in its own file: section 1 (hole 1)",
    )


def _manifest(folder: Path) -> Result:
    """It lists every shard."""
    import json

    manifest = folder / "manifest.json"
    if not manifest.exists() or manifest.read_text() == OLD:
        return Result(
            "the manifest",
            False,
            "manifest.json",
            "none of this save",
            "no manifest",
            "os.replace gives the draft its name: section 1 (hole 3)",
        )
    digests = json.loads(manifest.read_text())["sha256"]
    right = run(_digests, str(folder), size=1)[0]
    return Result(
        "the manifest",
        digests == right,
        f"{WRITERS} digests, one a shard",
        f"{len(digests)} digests",
        "not every shard's digest",
        "all_gather the digest as one row: section 1 (hole 2)",
    )


def _digests(group: Group, folder: str) -> list[str]:
    import hashlib

    return [
        hashlib.sha256((Path(folder) / f"{rank}.bin").read_bytes()).hexdigest()
        for rank in range(WRITERS)
    ]


def _at_once(renamed: bool) -> Result:
    """Grade whether manifest.json is the draft's own file under another name."""
    how = "the draft, renamed" if renamed else "written"
    return Result(
        "how it came there",
        renamed,
        "the draft, renamed",
        how,
        "a torn manifest can be seen",
        "a file that is being written is half there; os.replace is not: section 1 (hole 3)",
    )


def _read(exercise: ModuleType, folder: Path, size: int) -> Result:
    """Ranks of another number have their chunks."""

    def load(group: Group) -> list[float] | str:
        try:
            return np.asarray(exercise.plain_load(group, folder)).tolist()
        except (CheckpointError, FileNotFoundError) as error:
            return str(error)

    task = f"{size} ranks read it"
    target = [chunk.tolist() for chunk in np.array_split(NUMBERS, size)]
    found = run(load, size=size, limit=LIMIT)
    counts = ", ".join(str(len(part)) for part in found)
    return judge(
        task,
        found == target,
        f"{', '.join(str(len(part)) for part in target)} numbers",
        f"{counts} numbers",
        "other ranks' numbers",
        "an overlap begins at the later start and ends at the earlier stop; in the shard it is "
        "counted from the shard's own start: section 3 (holes 4 and 5)",
        signs={"numbers are lost": sum(map(len, found)) < SIZE},
    )


def _damaged(exercise: ModuleType, folder: Path) -> Result:
    """A shard with another byte is refused."""
    data = bytearray((folder / "1.bin").read_bytes())
    data[-1] ^= 1
    (folder / "1.bin").write_bytes(data)

    def load(group: Group) -> str:
        try:
            exercise.plain_load(group, folder)
        except CheckpointError as error:
            return str(error).rpartition("/")[2]
        return "read it"

    found = run(load, size=1, limit=LIMIT)[0]
    return Result(
        "one bit of shard 1 turned over",
        found == "1.bin: is damaged",
        "1.bin: is damaged",
        found,
        "damage is not seen",
        "the digest of what was written: section 4 (hole 2)",
    )


def _interval(exercise: ModuleType, save: float, between: float) -> Result:
    """The interval, and what it keeps."""
    target = best_interval(save, between)
    found = float(exercise.interval(save, between))
    share = goodput(found, save=save, between=between) if 0 < found < 1e9 else 0.0
    return Result(
        f"a save of {save:g} s, an interruption every {between:g} s",
        abs(found - target) < 1e-9 * target,
        f"{target:.1f} s",
        f"{found:.1f} s, which keeps {share:.1%} of the time",
        "not the best interval",
        "save / τ = τ / (2 between), for τ: section 5 (hole 6)",
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "26", *sys.argv[1:]]))
