"""A record of the checks that this user has passed, with dates, and of those that are half done:
passed.json and begun.json, in the folder of the profile of `bench calibrate`."""

import json
import time
from contextlib import suppress
from typing import Any, TypeVar

from minidist.comm.cost.link_model import profile_path
from minidist.errors import ConfigError
from minidist.files import whole
from minidist.reading import read_json

PASSED = "passed.json"
BEGUN = "begun.json"
T = TypeVar("T")


def when() -> dict[str, str]:
    """Return {lesson: date of the first pass}, such as "2026-11-23"."""
    return _read(PASSED, dict[str, str])


def begun() -> dict[str, tuple[int, int]]:
    """Return {lesson: (holes left, holes)} of the checks that are not passed yet."""
    return _read(BEGUN, dict[str, tuple[int, int]])


def keep(lesson: str) -> None:
    """Record that the lesson's check passed today; do nothing if the home cannot be written."""
    _write(PASSED, {lesson: time.strftime("%Y-%m-%d")} | when())
    _write(BEGUN, {other: state for other, state in begun().items() if other != lesson})


def keep_begun(lesson: str, left: int, holes: int) -> None:
    """Record how many holes of the lesson's exercise are left; do nothing if the home cannot be
    written, or the check was passed before."""
    if lesson not in when():
        _write(BEGUN, begun() | {lesson: (left, holes)})


def _read(name: str, kind: type[dict[str, T]]) -> dict[str, T]:
    """Return a record; empty if there is none, or it cannot be read."""
    with suppress(OSError, ValueError, ConfigError):
        found: dict[str, T] = read_json(profile_path().with_name(name), kind, most=1 << 20)
        return found
    return {}


def _write(name: str, record: dict[str, Any]) -> None:
    with suppress(OSError, ConfigError):
        path = profile_path().with_name(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as draft:
            draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
