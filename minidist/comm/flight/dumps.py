"""A flight recorder as JSON, with the keys of PyTorch's dumps (version 2.10), and in addition our
own records.

    version, rank, pg_config {group: name, desc, ranks}, pg_status {group: last_…_collective}
    entries      each call, and each message in one direction, in the form of PyTorch's analysis:
                 record_id, pg_id, process_group [group, axis], collective_seq_id, p2p_seq_id,
                 op_id, profiling_name ("gloo:all_reduce", "gloo:send 1->2"), time_created_ns,
                 time_discovered_started_ns, time_discovered_completed_ns, duration_ms, input_sizes,
                 input_dtypes, output_sizes, output_dtypes, state, is_p2p, retired, timeout_ms,
                 frames [{name, filename, line}]
    minidist     the ring's header and its records unchanged, also of steps and waits (slots.py)

PyTorch names its own library in profiling_name; we write "gloo" because the analysis refuses names
that it does not know. Its loader reads only pickles, which we do not write; its build_db takes a
JSON value.
"""

import json
from pathlib import Path
from typing import Any

import msgspec

from minidist.comm.flight.slots import CALL, MESSAGE, Entry, FlightHeader, FlightRecord
from minidist.errors import ConfigError
from minidist.files import private, whole
from minidist.reading import converted, read_json

VERSION = "2.10"
_STATES = {"made": "scheduled", "begun": "started", "ended": "completed", "failed": "started"}
_STATUS = {
    "last_enqueued_collective": ("made", "begun", "ended", "failed"),
    "last_started_collective": ("begun", "ended", "failed"),
    "last_completed_collective": ("ended",),
}


class _DumpHeader(msgspec.Struct):
    groups: dict[str, Any]


class _DumpOwn(msgspec.Struct):
    header: _DumpHeader
    entries: list[FlightRecord]


class _DumpFile(msgspec.Struct):
    minidist: _DumpOwn


def write_dump(
    path: str | Path, header: dict[str, Any], entries: list[Entry], *, member: bool = False
) -> None:
    """Write the whole file or nothing, readable only for this user. Args: member: as for
    files.whole. Raises: OSError."""
    with (
        whole(path, member=member) as draft,
        open(draft, "w", opener=private, encoding="utf-8") as stream,
    ):
        stream.write(json.dumps(as_json(header, entries)) + "\n")


def read_dump(path: str | Path, *, member: bool = False) -> tuple[dict[str, Any], list[Entry]]:
    """Return what write_dump has written: (header, entries). Args, Raises: as read_ring."""
    try:
        own = read_json(path, _DumpFile, member=member)["minidist"]
        header = {
            **own["header"],
            "groups": {int(group): found for group, found in own["header"]["groups"].items()},
        }
        converted(header, FlightHeader)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path} is not a flight recorder's dump ({why}); give one that SIGUSR2 or "
            "flight.dump() has written"
        ) from error
    return header, own["entries"]


def as_json(header: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    """Return the value to write into the file."""
    groups = {group: (axis, [*ranks]) for group, (axis, ranks) in header["groups"].items()}
    calls = [entry for entry in entries if entry["kind"] in (CALL, MESSAGE)]
    return {
        "version": VERSION,
        "rank": header["rank"],
        "pg_config": {
            f"{group:x}": {"name": f"{group:x}", "desc": axis, "ranks": str(ranks)}
            for group, (axis, ranks) in groups.items()
        },
        "pg_status": {f"{group:x}": _status(entries, group) for group in groups},
        "entries": [_entry(entry, header, groups) for entry in calls],
        "minidist": {"header": header, "entries": entries},
    }


def _status(entries: list[Entry], group: int) -> dict[str, int]:
    calls = [entry for entry in entries if entry["kind"] == CALL and entry["group"] == group]
    return {
        name: max((entry["sequence"] for entry in calls if entry["state"] in states), default=-1)
        for name, states in _STATUS.items()
    }


def _entry(
    entry: Entry, header: dict[str, Any], groups: dict[int, tuple[str, list[int]]]
) -> dict[str, Any]:
    group = entry["group"]
    message = entry["kind"] == MESSAGE
    axis, ranks = groups.get(group, ("", []))
    sizes = _sizes(entry, len(ranks))
    filename, _, line = entry["where"].rpartition(":")
    started, completed = (
        _nanoseconds(entry[name], header) if entry[name] else None for name in ("begun", "ended")
    )
    return {
        "record_id": entry["number"],
        "pg_id": [*groups].index(group) if group in groups else -1,
        "process_group": [f"{group:x}", axis],
        "collective_seq_id": 0 if message else entry["sequence"],
        "p2p_seq_id": message * entry["sequence"],
        "op_id": entry["number"],
        "profiling_name": f"gloo:{_name(entry, header['rank'], ranks)}",
        "time_created_ns": _nanoseconds(entry["made"], header),
        "time_discovered_started_ns": started,
        "time_discovered_completed_ns": completed,
        "duration_ms": 1000 * (entry["ended"] - entry["begun"]) if entry["ended"] else None,
        "input_sizes": [sizes[0]],
        "input_dtypes": [entry["dtype"]],
        "output_sizes": [sizes[1]],
        "output_dtypes": [entry["dtype"]],
        "state": _STATES[entry["state"]],
        "is_p2p": message,
        "retired": entry["state"] in ("ended", "failed"),
        "timeout_ms": 0,
        "frames": [
            {
                "name": entry["verb"],
                "filename": filename,
                "line": int(line) if line.isdigit() else 0,
            }
        ],
    }


def _nanoseconds(seconds: float, header: dict[str, Any]) -> int:
    """Return the time of day in nanoseconds."""
    return int((seconds + header["clock"]) * 1e9)


def _name(entry: Entry, world_rank: int, ranks: list[int]) -> str:
    """Return a verb; for a message with its direction, as places among the group's sorted world
    ranks, which PyTorch uses."""
    if entry["kind"] == CALL or not ranks:
        return str(entry["verb"])
    here = sorted(ranks).index(world_rank)
    there = ranks[entry["src"] if entry["dst"] is None else entry["dst"]]
    return (
        f"recv {here}<-{sorted(ranks).index(there)}"
        if entry["dst"] is None
        else f"send {here}->{sorted(ranks).index(there)}"
    )


def _sizes(entry: Entry, size: int) -> tuple[list[int], list[int]]:
    """Return the shapes of a call's argument and result in PyTorch's form, in which all parts have
    equal size."""
    shape = [1 if dim is None else dim for dim in entry["shape"] or []]
    if entry["verb"] in ("all_gather", "gather"):
        return shape, [size * (shape or [1])[0], *shape[1:]]
    if entry["verb"] in ("reduce_scatter", "scatter"):
        part = -(-_product(shape) // max(1, size))
        return [part * size], [part]
    return shape, shape


def _product(shape: list[int]) -> int:
    total = 1
    for dim in shape:
        total *= dim
    return total
