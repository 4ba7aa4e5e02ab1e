"""Which lessons' checks this user has passed, and when: passed.json beside the profile of `bench calibrate`."""

import json
import time
from contextlib import suppress

from minidist.comm.cost.link_model import profile_path
from minidist.errors import ConfigError
from minidist.files import whole

FILE = "passed.json"


def when() -> dict[str, str]:
    """{lesson: date}, "2026-11-23"; empty if there is no such file, or it cannot be read."""
    with suppress(OSError, ValueError, ConfigError):
        found = json.loads(profile_path().with_name(FILE).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return {str(lesson): str(date) for lesson, date in found.items()}
    return {}


def keep(lesson: str) -> None:
    """Note that the lesson's check passed today; a home that cannot be written to keeps nothing."""
    with suppress(OSError, ConfigError):
        path = profile_path().with_name(FILE)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as draft:
            draft.write_text(json.dumps({**when(), lesson: time.strftime("%Y-%m-%d")}) + "\n", encoding="utf-8")
