"""Follows the records of all ranks' steps (observe/rank_steps.py) while the ranks write them.

    follower = StepsFollower(run)
    follower.poll()     # repeatedly: as read_rank_steps, but only the newest KEPT steps per rank

A poll reads only the new bytes of each file, and keeps only the newest steps.
"""

from pathlib import Path
from typing import Any

from minidist.files import open_regular, read_rest
from minidist.observe.rank_steps import FOLDER, RankSteps, of_newest_job, take_lines
from minidist.reading import MOST_BYTES

KEPT = 240  # steps of a rank
_STEP = b'{"step"'  # so begins the line of a step


class StepsFollower:
    """A reader of the newest steps of all ranks of a run."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self._files: dict[Path, _RankFile] = {}

    def poll(self) -> dict[int, RankSteps]:
        """Return the steps up to now, by rank; {} if the run has no records."""
        paths = sorted(self.folder.glob("[0-9]*.jsonl"))
        self._files = {path: self._files.get(path) or _RankFile(path) for path in paths}
        for file in self._files.values():
            file.poll()
        return of_newest_job((file.about, file.steps) for file in self._files.values())


class _RankFile:
    """The file of one rank, and the steps read from it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.about: dict[str, Any] = {}
        self.steps: dict[int, dict[str, Any]] = {}
        # the file's first bytes, which identify its run; number of bytes read
        self._begin = b""
        self._read = 0

    def poll(self) -> None:
        try:
            with open(open_regular(self.path, member=True), "rb") as stream:
                begin = stream.read(128)
                if not self._begin or not begin.startswith(self._begin):  # of another run
                    self._begin = begin
                    self._read = 0
                    self.about = {}
                    self.steps = {}
                stream.seek(self._read)
                new = read_rest(stream, MOST_BYTES)
        except OSError:
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._read += len(whole)
        lines = whole.splitlines()
        newest = [number for number, line in enumerate(lines) if line.startswith(_STEP)][-KEPT:]
        first = newest[0] if newest else len(lines)
        take_lines(
            (
                line
                for number, line in enumerate(lines)
                if number >= first or not line.startswith(_STEP)
            ),
            self.about,
            self.steps,
        )
        for step in sorted(self.steps)[:-KEPT]:
            del self.steps[step]
