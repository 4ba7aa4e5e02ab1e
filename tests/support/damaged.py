"""Run folders that somebody else has filled: one file of a good run changed, with digests that fit,
or replaced."""

import hashlib
import io
import json
import os
import random
import shutil
import signal
import socket
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgpack

from minidist.cli import main
from minidist.comm.flight.slots import HEADER_BYTES, MAGIC, SLOT_BYTES, SLOTS
from minidist.parallel.state.manifest import MANIFEST, _with_digest

ESCAPE = "\x1b[31m[red]\x07</script><script>window.broken=1</script>\n\u202e\ud800"
DEEP = "@deep@"
JUNK = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    10**30,
    -(10**12),
    10**12,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "12",
    ESCAPE,
    "../../../etc/passwd",
    "a" * 5000,
    [],
    {},
    [[]],
    [None],
    [1, 2],
    ["x"],
    {"x": 1},
    {"": None},
    [10**12],
    [-1],
    [[1, 2, 3]],
    DEEP,
]


class Late(Exception):  # noqa: N818 - no error of a command
    """A command took longer than its limit."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise Late in the block after so many seconds, also in a system call."""

    def late(number: int, frame: FrameType | None) -> None:
        raise Late(f"after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome(words: Sequence[str], *, limit: float = 20.0) -> tuple[int | str, str]:
    """(exit status, or the traceback; what was printed) of a command, in this process."""
    said = io.StringIO()
    try:
        with limited(limit), redirect_stdout(said), redirect_stderr(said):
            status: int | str = main(list(words))
    except (Exception, SystemExit):
        status = traceback.format_exc()
    return status, said.getvalue()


def unsafe(text: str) -> str:
    """Return what of a terminal's output would act on the terminal; "" if nothing would."""
    return "".join(
        sorted(
            {
                letter
                for letter in text
                if (ord(letter) < 32 and letter not in "\n\t")
                or 127 <= ord(letter) < 160
                or letter in "\u202e"
                or 0xD800 <= ord(letter) < 0xE000
            }
        )
    )


# --------------------------------------------------------------------------------------------- JSON


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a JSON value, of a list only those of some elements."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in sorted({*range(min(3, len(value))), len(value) - 1} - {-1}):
            yield from places(value[index], (*path, index))


def changed(value: Any, choose: random.Random, within: tuple[Any, ...] = ()) -> tuple[Any, str]:
    """A JSON value with one change, and what it is. Args: within: the path that the change begins
    with."""
    inner = value
    for key in within:
        inner = inner[key]
    by_shape: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for path in places(inner):  # of thousands of similar places as many chances as of one
        by_shape.setdefault(tuple("#" if isinstance(key, int) else key for key in path), []).append(
            path
        )
    path = within + choose.choice(by_shape[choose.choice(sorted(by_shape, key=str))])
    if not path:
        new = choose.choice(JUNK)
        return new, f"all of it is {new!r:.60}"
    outer = value
    for key in path[:-1]:
        outer = outer[key]
    where = ".".join(map(str, path))
    key = path[-1]
    how = choose.choice(["drop", "junk", "junk", "junk", "junk", "near", "rename", "add"])
    if how == "drop":
        del outer[key]
    elif (
        how == "near" and isinstance(outer[key], (int, float)) and not isinstance(outer[key], bool)
    ):
        outer[key] = choose.choice(
            [outer[key] + 1, -outer[key], outer[key] * 1000, str(outer[key]), [outer[key]]]
        )
    elif how == "rename" and isinstance(outer, dict):
        outer[choose.choice([ESCAPE, "", f"{key}x", "../x"])] = outer.pop(key)
    elif how == "add":
        if isinstance(outer, dict):
            outer[ESCAPE] = choose.choice(JUNK)
        else:
            outer.append(choose.choice([*JUNK, outer[0]]))
    else:
        how = "junk"
        outer[key] = choose.choice(JUNK)
        where += f" = {outer[key]!r:.60}"
    return value, f"{how} {where}"


def text_of(value: Any, choose: random.Random) -> str:
    """The JSON, in which DEEP is a list in lists."""
    depth = choose.choice([70, 500, 5000, 200_000])
    return json.dumps(value).replace(f'"{DEEP}"', "[" * depth + "]" * depth)


def change_manifest(file: Path, choose: random.Random) -> str:
    """Another manifest, with its digest."""
    value = json.loads(file.read_text())
    del value["digest"]
    within = choose.choice(
        [
            (),
            ("about",),
            ("about", "options"),
            ("about", "config"),
            ("about", "state"),
            ("about", "metrics"),
            ("shards", 0, "arrays", 0),
            ("shards", 0),
        ]
    )
    with suppress(KeyError, TypeError, IndexError):
        value, told = changed(value, choose, within)
        file.write_bytes(
            _with_digest(
                text_of(value, choose).rstrip("}\n").encode()
                if isinstance(value, dict)
                else text_of(value, choose).encode()
            )
        )
        return f"{file.name}: {told}"
    return "nothing"


def change_header(file: Path, choose: random.Random) -> str:
    """Another header in a safetensors file, and in the manifest its checksum."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, told = changed(json.loads(content[8 : 8 + length]), choose)
    text = text_of(header, choose).encode()
    text += b" " * (-len(text) % 8)
    new = len(text).to_bytes(8, "little") + text
    file.write_bytes(new + content[8 + length :])
    manifest = file.parent / MANIFEST
    if manifest.exists():
        value = json.loads(manifest.read_text())
        del value["digest"]
        shard = next(shard for shard in value["shards"] if shard["file"] == file.name)
        shard["header"] = [len(new), zlib.crc32(new)]
        shard["nbytes"] = len(new) + len(content) - 8 - length
        for array in shard["arrays"]:
            array["offset"] += len(new) - 8 - length
        manifest.write_bytes(_with_digest(json.dumps(value)[:-1].encode()))
    return f"{file.name}: header, {told}"


def change_json(file: Path, choose: random.Random) -> str:
    value = json.loads(file.read_text())
    tops = [()] + [(key,) for key in value] * 2 if isinstance(value, dict) else [()]
    value, told = changed(value, choose, choose.choice(tops))
    file.write_text(text_of(value, choose))
    if file.name == "metrics.json" and isinstance(value, dict) and choose.random() < 0.2:
        value["files"] = {}
    return f"{file.name}: {told}"


def change_lines(file: Path, choose: random.Random) -> str:
    lines = file.read_text().splitlines()
    number = choose.randrange(len(lines))
    value, told = changed(json.loads(lines[number]), choose)
    which = choose.choice([[number], range(number, len(lines)), range(len(lines))])
    for at in which:
        lines[at] = text_of(
            {**json.loads(lines[at]), **value}
            if isinstance(value, dict) and at != number
            else value,
            choose,
        )
    file.write_text("\n".join(lines) + "\n")
    return f"{file.name}, line {number}: {told}"


def change_ring(file: Path, choose: random.Random) -> str:
    """Another header of a flight recorder, or other bytes or texts in its slots."""
    ring = bytearray(file.read_bytes())
    start = len(MAGIC) + 4
    if choose.random() < 0.5:
        length = int.from_bytes(ring[len(MAGIC) : start], "little")
        header = msgpack.unpackb(bytes(ring[start : start + length]), strict_map_key=False)
        header, told = changed(header, choose)
        try:
            packed = msgpack.packb(header, unicode_errors="surrogatepass")
        except (OverflowError, ValueError):
            packed = msgpack.packb({"rank": 0})
        ring[: start + len(packed)] = MAGIC + len(packed).to_bytes(4, "little") + packed
        told = f"header, {told}"
    else:
        used = [
            slot for slot in range(SLOTS) if any(ring[HEADER_BYTES + slot * SLOT_BYTES :][:8])
        ] or [0]
        for _ in range(choose.choice([1, 1, 10, 300])):
            at = HEADER_BYTES + choose.choice(used) * SLOT_BYTES
            where = choose.choice(
                [
                    choose.randrange(8, SLOT_BYTES - 8),
                    choose.randrange(8, 12),
                    choose.randrange(64, 90),
                ]
            )
            if choose.random() < 0.3:
                ring[at + where : at + min(where + 8, SLOT_BYTES - 8)] = choose.choice(
                    [b"\xff" * 8, bytes(8), b"\x7f\xf8" + bytes(6), bytes(6) + b"\xf8\x7f"]
                )[: min(8, 240 - where)]
            else:
                ring[at + where] = choose.randrange(256)
        told = "bytes of slots"
    file.write_bytes(ring)
    return f"{file.name}: {told}"


def change_bytes(file: Path, choose: random.Random) -> str:
    content = bytearray(file.read_bytes())
    how = choose.choice(["flip", "cut", "insert", "swap"])
    for _ in range(choose.choice([1, 4, 40])):
        end = len(content) + 1
        at = choose.randrange(end) if choose.random() < 0.5 else choose.randrange(min(300, end))
        if how == "flip" and at < len(content):
            content[at] = choose.randrange(256)
        elif how == "cut":
            del content[at:]
        elif how == "insert":
            content[at:at] = choose.choice(
                [
                    b"\xff\xfe",
                    b"\0" * 9,
                    b"[" * 3000,
                    b"\xed\xa0\x80",
                    b"NaN",
                    b"1e999",
                    b"\n",
                    b'{"step":1}\n',
                    b"9" * 5000,
                ]
            )
        else:
            content[at : at + 20] = content[at + 20 : at + 40]
    file.write_bytes(content)
    return f"{file.name}: bytes, {how}"


# -------------------------------------------------------------------------- other things than files


def replace(file: Path, choose: random.Random) -> str:
    """Something else in place of a file, or of a folder of files."""
    kinds: dict[str, Callable[[], object]] = {
        "fifo": lambda: os.mkfifo(file),
        "zero": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "tty": lambda: file.symlink_to("/dev/full"),
        "dangling": lambda: file.symlink_to("nowhere"),
        "loop": lambda: file.symlink_to(file.name),
        "empty": file.touch,
        "sparse": lambda: sparse(file),
        "socket": lambda: bind(file),
        "link": lambda: file.symlink_to("/etc/passwd"),
        "gone": lambda: None,
        "fifo link": lambda: (os.mkfifo(f"{file}.fifo"), file.symlink_to(f"{file}.fifo")),
        "file": lambda: file.write_bytes(b"\xff\x00" * 300),
    }
    how = choose.choice(sorted(kinds))
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink()
    kinds[how]()
    return f"{file.name}: is {how}"


def sparse(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def bind(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # the path of a socket has 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(file.name)
    finally:
        os.chdir(here)


def add_name(folder: Path, choose: random.Random) -> str:
    """A file or folder whose name is no word."""
    name = choose.choice(
        [
            "\x1b[31m.ring",
            "[red]x.json",
            "00009.ring",
            "step-000099",
            "step-٣٣٣٣٣٣",
            "99999.jsonl",
            "step-000001\n",
            "00000.json",
            "step-" + "9" * 60,
            "9\x1b.jsonl",
            "shard-00000.safetensors",
        ]
    )
    place = folder / name
    if place.exists():
        return "nothing"
    if choose.random() < 0.5:
        place.mkdir()
    else:
        place.write_bytes(
            choose.choice(
                [
                    b"",
                    b"{}",
                    b"[]",
                    b'{"minidist": 1}',
                    b"\xff" * 100,
                    MAGIC + b"\xff" * 100,
                    b'{"minidist": {"header": {"groups": {}}, "entries": [1]}}',
                ]
            )
        )
    return f"{name!r} is added to {folder.name}"


CHANGES = {
    "manifest.json": (change_manifest, 8),
    "metrics.json": (change_json, 8),
    "trace.json": (change_json, 3),
    "metrics.jsonl": (change_lines, 4),
    ".jsonl": (change_lines, 3),
    ".ring": (change_ring, 3),
    ".safetensors": (change_header, 2),
}


def damage(folder: Path, choose: random.Random) -> tuple[str, Path]:
    """Damage one file of a run folder. Returns: what was done, and where."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".png")
    kind = choose.choice(
        [
            "manifest.json",
            "metrics.json",
            "trace.json",
            "metrics.jsonl",
            ".jsonl",
            ".ring",
            ".safetensors",
            "manifest.json",
            "metrics.json",
        ]
    )
    mine = [
        file
        for file in files
        if file.name == kind or (file.suffix == kind and file.name != "metrics.jsonl")
    ]
    file = choose.choice(mine)
    how = choose.random()
    if how < 0.7:
        return CHANGES[kind][0](file, choose), file
    if how < 0.8:
        return change_bytes(file, choose), file
    if how < 0.85:
        return add_name(file.parent, choose), file
    if how < 0.9:
        inner = choose.choice([folder / "flight", folder / "steps", *folder.glob("step-*")])
        return replace(inner, choose), inner
    return replace(file, choose), file


def digests(folder: Path) -> None:
    """Write the digests of a run's files into its metrics.json again, if both can be read."""
    with suppress(OSError, ValueError, AttributeError, TypeError, KeyError):
        file = folder / "metrics.json"
        metrics = json.loads(file.read_text())
        metrics["files"] = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in metrics["files"]
        }
        file.write_text(json.dumps(metrics))


def commands(folder: Path, where: Path, scratch: Path) -> list[list[str]]:
    """The commands that read what was damaged."""
    run = str(folder)
    of_checkpoint = [
        ["checkpoint", run],
        ["checkpoint", run, "--export", str(scratch / "out.safetensors")],
        ["checkpoint", run, "--reshard", "dp=1", "--out", str(scratch / "other")],
        ["sample", run, "--tokens", "2"],
        ["train", "--resume", run, "--quiet", "--transport", "threads", "--steps", "9"],
    ]
    of_run = [
        ["diagnose", run],
        ["report", run, "--out", str(scratch / "report.html")],
        ["watch", run, "--once"],
        ["sample", run, "--tokens", "2"],
    ]
    inside = where.name.startswith("step-") or where.parent.name.startswith("step-")
    return of_checkpoint if inside else of_run
