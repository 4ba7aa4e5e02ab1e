"""A record of the lessons whose checks this user has passed, with dates: passed.json, in the folder
of the profile of `bench calibrate`."""

import json
import time
from contextlib import suppress

from minidist.comm.cost.link_model import profile_path
from minidist.errors import ConfigError
from minidist.files import whole
from minidist.reading import read_json

FILE = "passed.json"


def when() -> dict[str, str]:
    """Return {lesson: date}, such as "2026-11-23".

    Empty if there is no such file, or it cannot be read.
    """
    with suppress(OSError, ValueError, ConfigError):
        found: dict[str, str] = read_json(
            profile_path().with_name(FILE), dict[str, str], most=1 << 20
        )
        return found
    return {}


def keep(lesson: str) -> None:
    """Record that the lesson's check passed today; do nothing if the home cannot be written."""
    with suppress(OSError, ConfigError):
        path = profile_path().with_name(FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as draft:
            draft.write_text(
                json.dumps({**when(), lesson: time.strftime("%Y-%m-%d")}) + "\n", encoding="utf-8"
            )
