"""Grades exercise 26: ranks as threads write and read your checkpoints; numpy.array_split is the
answer key."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np

from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.errors import CheckpointError
from minidist.files import scratch
from minidist.grading import Mistake, Result, judge
from minidist.launch import run
from minidist.parallel.state.checkpoint import plain_load, plain_save
from minidist.survive.interval import best_interval, goodput

SIZE = 13
WRITERS = 3
READERS = (3, 2, 5)
MORE = 2  # numbers behind a shard's own
OTHER = -1.0
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
        try:
            run(_save, exercise, str(folder), size=WRITERS, limit=LIMIT)
        except FileNotFoundError:  # the exercise reads the file that hole 1 has to write
            yield _shards(folder)
            raise
        yield _shards(folder)
        yield _manifest(folder)
        yield _at_once(manifest.stat().st_ino == inode)
        for size in READERS:
            yield _read(exercise, folder, size, 0)
        yield _damaged(exercise, folder)
    with scratch() as folder:
        _write_more(folder)
        yield _read(exercise, folder, READERS[1], MORE)
    for save, between in ((20.0, 7200.0), (3.0, 600.0)):
        yield _interval(exercise, save, between)


def _save(group: Group, exercise: ModuleType, folder: str) -> None:
    """Run the student's save."""
    edges = bounds(SIZE, group.size)
    exercise.plain_save(
        group, NUMBERS[edges[group.rank] : edges[group.rank + 1]], SIZE, Path(folder)
    )
    group.barrier()


def _shards(folder: Path) -> Result:
    """Check that every rank's file has its chunk."""
    found = [
        np.fromfile(folder / f"{rank}.bin") if (folder / f"{rank}.bin").exists() else None
        for rank in range(WRITERS)
    ]
    right = np.array_split(NUMBERS, WRITERS)
    wrong = [
        rank
        for rank, (shard, numbers) in enumerate(zip(found, right, strict=True))
        if shard is None or not np.array_equal(shard, numbers)
    ]
    rank = wrong[0] if wrong else 0
    shard = found[rank]
    return judge(
        f"{WRITERS} ranks write {SIZE} numbers",
        not wrong,
        f"{rank}.bin has {_text(right[rank])}" if wrong else "each its chunk",
        f"{rank}.bin has {_text(shard)}" if wrong else "each its chunk",
        "numbers are lost, or others are there",
        "each rank saves its whole chunk in its own file: section 1, step 1 (hole 1)",
        signs={
            "your code has written no such file": shard is None,
            "the right numbers in another order": shard is not None
            and np.array_equal(np.sort(shard), right[rank]),
            "other bytes than float64: the digest is right, and a reader cannot read them": (
                shard is not None
                and (folder / f"{rank}.bin").stat().st_size != 8 * right[rank].size
                and not set(shard) & set(right[rank])
            ),
        },
    )


def _text(numbers: np.ndarray | None) -> str:
    """Return a few numbers as a student reads them."""
    if numbers is None:
        return "no numbers: there is no such file"
    shown = ", ".join(f"{number:.3g}" for number in numbers[:5])
    return f"{len(numbers)} numbers: {shown}{', …' * (len(numbers) > 5)}"


def _manifest(folder: Path) -> Result:
    """Check that the manifest lists every shard."""
    manifest = folder / "manifest.json"
    if not manifest.exists() or manifest.read_text() == OLD:
        return Result(
            "the manifest",
            False,
            "manifest.json",
            "none of this save",
            "no manifest",
            "the draft gets the name manifest.json: section 1, step 5 (hole 3)",
        )
    digests = json.loads(manifest.read_text())["sha256"]
    right = [_digest(folder, rank) for rank in range(WRITERS)]
    other = next(
        (rank for rank, (one, its) in enumerate(zip(digests, right, strict=False)) if one != its), 0
    )
    counted = len(digests) != len(right)
    return judge(
        "the manifest",
        digests == right,
        f"{len(right)} digests, one per shard"
        if counted
        else f"entry {other}: that of {other}.bin",
        f"{len(digests)} entries" if counted else f"entry {other}: {_whose(digests[other], right)}",
        "not every shard's digest",
        "each rank gives its digest as one row, and gets the rows of all ranks in rank order: section "
        "1, step 3 (hole 2)",
        signs={
            "your code makes each byte of a digest an entry": len(digests) in (32, 32 * WRITERS),
            "only one rank's digest": len(digests) == 1,
            "one rank's digest for every shard": len(set(digests)) == 1 < len(digests),
            "your digests are in another order": sorted(digests) == sorted(right),
        },
    )


def _digest(folder: Path, rank: int) -> str:
    return hashlib.sha256((folder / f"{rank}.bin").read_bytes()).hexdigest()


def _whose(digest: str, right: list[str]) -> str:
    """Whose digest this is."""
    return f"that of {right.index(digest)}.bin" if digest in right else "of none of the shards"


def _at_once(renamed: bool) -> Result:
    """Grade whether manifest.json is the draft's own file under another name."""
    how = "the draft, renamed" if renamed else "written"
    return Result(
        "how it came there",
        renamed,
        "the draft, renamed",
        how,
        "a torn manifest can be seen",
        "a reader can see half of a file that is being written; a new name shows the whole file: "
        "section 1, step 5 (hole 3)",
    )


def _write_more(folder: Path) -> None:
    """Write a whole checkpoint whose shards have MORE numbers of another array behind their own."""
    chunks = np.array_split(NUMBERS, WRITERS)
    for rank, chunk in enumerate(chunks):
        np.append(chunk, np.full(MORE, OTHER)).tofile(folder / f"{rank}.bin")
    digests = [_digest(folder, rank) for rank in range(WRITERS)]
    (folder / "manifest.json").write_text(json.dumps({"size": SIZE, "sha256": digests}))


def _in(start: int, stop: int, first: int, last: int) -> tuple[int, int]:
    """Return the overlap of [start, stop) and the shard [first, last)."""
    return max(start, first), min(stop, last)


def _cut(first: int, last: int, old: int, _: int) -> tuple[int, int]:
    """Return where the overlap [first, last) lies in a shard that begins at `old`."""
    return first - old, last - old


Overlap = Callable[[int, int, int, int], tuple[int, int]]  # my start and stop, the shard's
Cut = Callable[[int, int, int, int], tuple[int, int]]  # the overlap, the shard's start, my start

MISREAD: dict[str, tuple[Overlap, Cut, str]] = {
    "your overlap ends at the chunk's stop, though the shard ends before": (
        lambda start, stop, first, last: (max(start, first), stop),
        _cut,
        "an overlap ends at the earlier stop: section 3, step 1 (hole 4)",
    ),
    "your overlap begins at the chunk's start, though the shard begins later": (
        lambda start, stop, first, last: (start, min(stop, last)),
        _cut,
        "an overlap begins at the later start: section 3, step 1 (hole 4)",
    ),
    "your code takes whole shards, instead of what chunk and shard both have": (
        lambda start, stop, first, last: (min(start, first), max(stop, last)),
        _cut,
        "an overlap begins at the later start and ends at the earlier stop: section 3, step 1 (hole 4)",
    ),
    "your code takes the position in the vector for the position in the shard": (
        _in,
        lambda first, last, old, start: (first, last),
        "the file begins with the shard's first number: section 3, step 4 (hole 5)",
    ),
    "your code counts from the chunk's start, not from the shard's": (
        _in,
        lambda first, last, old, start: (first - start, last - start),
        "the file begins with the shard's first number: section 3, step 4 (hole 5)",
    ),
    "your code takes the first numbers of the shard each time": (
        _in,
        lambda first, last, old, start: (0, last - first),
        "the overlap may begin within the shard: section 3, step 4 (hole 5)",
    ),
    "your overlap ends at the later stop": (
        lambda start, stop, first, last: (max(start, first), max(stop, last)),
        _cut,
        "an overlap ends at the earlier stop: section 3, step 1 (hole 4)",
    ),
    "your overlap begins at the earlier start": (
        lambda start, stop, first, last: (min(start, first), min(stop, last)),
        _cut,
        "an overlap begins at the later start: section 3, step 1 (hole 4)",
    ),
    "your numbers begin where the overlap begins, and do not end where it ends": (
        _in,
        lambda first, last, old, start: (first - old, SIZE + MORE),
        "the overlap may end before the shard does: section 3, step 4 (hole 5)",
    ),
    "your code does not count the overlap's end from the shard's first number": (
        _in,
        lambda first, last, old, start: (first - old, last),
        "both ends are counted from the shard's first number: section 3, step 4 (hole 5)",
    ),
    "your code takes one number too few of each shard": (
        _in,
        lambda first, last, old, start: (first - old, last - old - 1),
        "stop is the first number that is not meant: section 3 (holes 4 and 5)",
    ),
    "your code takes one number too many of a shard": (
        _in,
        lambda first, last, old, start: (first - old, last - old + 1),
        "stop is the first number that is not meant: section 3 (holes 4 and 5)",
    ),
    "your overlap ends one number too late": (
        lambda start, stop, first, last: (max(start, first), min(stop, last) + 1),
        _cut,
        "stop is the first number that is not meant: section 3, step 1 (hole 4)",
    ),
    "your code takes all numbers of the shard up to the overlap's end": (
        _in,
        lambda first, last, old, start: (0, last - old),
        "the overlap may begin within the shard: section 3, step 4 (hole 5)",
    ),
}
"""What is read wrongly: {mistake: (overlap, cut, advice)}."""


def _read_so(size: int, more: int, overlap: Overlap, cut: Cut) -> list[list[float]]:
    """Return what `size` ranks read with this overlap and this cut."""
    shards = [np.append(x, np.full(more, OTHER)) for x in np.array_split(NUMBERS, WRITERS)]
    old = bounds(SIZE, WRITERS)
    new = bounds(SIZE, size)
    found = []
    for start, stop in pairwise(new):
        mine: list[float] = []
        for shard, (first, last) in zip(shards, pairwise(old), strict=True):
            begin, end = overlap(start, stop, first, last)
            if begin < end:
                mine += shard[slice(*cut(begin, end, first, start))].tolist()
        found.append(mine)
    return found


def _read(exercise: ModuleType, folder: Path, size: int, more: int) -> Result:
    """Check that ranks of another number read their chunks."""

    def load(group: Group) -> list[float] | str:
        try:
            return np.asarray(exercise.plain_load(group, folder)).tolist()
        except (CheckpointError, FileNotFoundError) as error:
            return str(error)

    target = [chunk.tolist() for chunk in np.array_split(NUMBERS, size)]
    found = run(load, size=size, limit=LIMIT)
    rank = next((rank for rank in range(size) if found[rank] != target[rank]), 0)
    behind = ", behind whose numbers the shards have others" * bool(more)
    return judge(
        f"{size} ranks read it{behind}",
        found == target,
        f"rank {rank}: {_places(target[rank])}",
        f"rank {rank}: {_places(found[rank])}",
        "other ranks' numbers",
        "an overlap begins at the later start and ends at the earlier stop; in the shard it is "
        "counted from the shard's own start: section 3 (holes 4 and 5)",
        signs={
            name: Mistake(_read_so(size, more, overlap, cut) == found, advice)
            for name, (overlap, cut, advice) in MISREAD.items()
        },
    )


def _places(numbers: list[float] | str) -> str:
    """Return where in the vector these numbers lie, in words."""
    if isinstance(numbers, str):
        return numbers
    if not numbers:
        return "no numbers"
    known = NUMBERS.tolist()
    places = [str(known.index(x)) if x in known else "another array's" for x in numbers]
    return (
        f"{len(places)} numbers, from positions {', '.join(places[:8])}{', …' * (len(places) > 8)}"
    )


def _damaged(exercise: ModuleType, folder: Path) -> Result:
    """Check that a shard with another byte is refused."""
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
        "the manifest needs the digest of each file as it was written: section 1, step 3 (hole 2)",
    )


def _interval(exercise: ModuleType, save: float, between: float) -> Result:
    """Check the interval, and the share of time that it keeps."""
    target = best_interval(save, between)
    found = float(exercise.interval(save, between))
    share = goodput(found, save=save, between=between) if 0 < found < 1e9 else 0.0
    best = goodput(target, save=save, between=between)

    def gives(value: float) -> bool:
        return abs(found - value) < 1e-9 * abs(value)

    return judge(
        f"a save of {save:g} s, an interruption every {between:g} s",
        gives(target),
        f"{target:.1f} s, which keeps {best:.1%} of the time",
        f"{found:.1f} s, which keeps {share:.1%} of the time",
        "not the best interval",
        "set the two parts of section 5 equal, and solve for τ (hole 6)",
        signs={
            "your interruption loses a whole interval, not half of one": gives(
                (save * between) ** 0.5
            ),
            "your factor 2 is on the wrong side": gives((save * between / 2) ** 0.5),
            "your 2 stands before the root, not under it": gives(2 * (save * between) ** 0.5),
            "your value is the square of τ, not yet τ": gives(2 * save * between),
            "your value is the part of the time that is lost, not the interval": gives(
                (2 * save / between) ** 0.5
            ),
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "26", *sys.argv[1:]]))
