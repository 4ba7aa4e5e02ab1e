"""Keeps the results of a measurement in a file, so that an interrupted measurement can continue.

A file of JSON lines. The first line has the setting (model, steps, text …); then one line per
result: a training, or a turn of steps over each link. A second run with the same options reads the
lines, and measures what is missing.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from minidist.errors import ConfigError
from minidist.files import whole
from minidist.reading import parse_json, read_text


class KeptMeasurements:
    """A store of results; each result is measured once over all runs.

    Args:    path: of the file, made if it does not exist; None: nothing is kept. setting: the
             options that all measurements share.
    Raises:  ConfigError if the file has another setting, or is not such a file.
    """

    def __init__(self, path: str | None = None, setting: dict[str, Any] | None = None) -> None:
        self.path = path
        self.found = dict[str, Any]()
        head = {"setting": _plain(setting)}
        if path is None:
            return
        try:
            text = read_text(path) if Path(path).exists() else ""
            # a killed run may have cut its last line short
            lines = text[: text.rfind("\n") + 1].splitlines()
            first, *rest = [parse_json(line.encode()) for line in lines] or [head]
            self.found = {line["name"]: line["value"] for line in rest}
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"--resume {path}: cannot be read as measurements ({error}); name a new file"
            ) from error
        if not lines and not json.dumps(head).startswith(text):  # no first line that was cut short
            first = None
        if first != head:
            raise ConfigError(
                f"--resume {path}: has measurements with other options "
                f"({_differences(first, head)}); give the same, or name a new file"
            )
        try:
            with whole(path) as draft:
                draft.write_text(
                    "".join(f"{line}\n" for line in lines or [json.dumps(head)]), encoding="utf-8"
                )
        except OSError as error:
            raise ConfigError(f"--resume {path}: cannot be written ({error})") from error

    def once(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the value kept under a name; if there is none, measure and keep it. Values are
        JSON values: lists, not tuples."""
        if name not in self.found:
            self.found[name] = _plain(measure())
            self._add({"name": name, "value": self.found[name]})
        return self.found[name]

    def _add(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            with open_kept(self.path, "a") as file:
                file.write(json.dumps(line) + "\n")


@contextmanager
def open_kept(path: str, mode: str) -> Iterator[IO[str]]:
    """Open the file for writing. Raises: ConfigError if it cannot be written."""
    try:
        with open(path, mode, encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"--resume {path}: cannot be written ({error})") from error


def _plain(value: Any) -> Any:
    """Return a value as it is after writing to and reading from a file."""
    return json.loads(json.dumps(value))


def _differences(first: Any, head: dict[str, Any]) -> str:
    """Return a text with the options that differ, by name."""
    was = first.get("setting") if isinstance(first, dict) else None
    if not isinstance(was, dict):
        return "it does not begin as such a file"
    now = head["setting"]
    return ", ".join(
        f"{key}: {was.get(key)}, now {now.get(key)}"
        for key in {**was, **now}
        if was.get(key) != now.get(key)
    )
