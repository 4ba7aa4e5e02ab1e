"""Find the lessons: NN_name/ holds README.md, lesson.py, figure.py, exercise.py and check.py.

Shared modules: running.py starts a lesson or records its figure, lab.py has its models, batches
and differences, page.py prints its tables, figures.py has the look of its pictures; namespaces.py
makes two hosts of one machine for lesson 04; zero_lab.py and zero_figures.py are of lessons 14 to
16; late_group.py is of the checks of lessons 07 and 15, which ask for overlap. README.zh.md and
zh.toml hold a lesson in Chinese: twins.py compares the stories, phrases.py reads what the code says.
notebook.py writes a lesson for Jupyter.

A lesson is found by its folder: to add a lesson, add a folder. Title, notes and modules of
every table of lessons are read from the first lines of its README.md; table.py writes the tables of
the documents.

    # 03 · Ring all-reduce (环形全归约)

    | notes | module | run | grade |
    | --- | --- | --- | --- |
    | N1 Ring AllReduce, N4 §2 | `minidist/comm/collectives/ring.py` | `mpirun -n 4 …` | `minidist
    check 03` |
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from minidist.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
# of a story in a second language, with its tables; of an exercise
WORDS_A_MINUTE = 120
MINUTES_A_HOLE = 4
AFTER = {
    "01": "00",
    "02": "01",
    "03": "02",
    "04": "03",
    "05": "00",
    "06": "02 05",
    "07": "03 05",
    "08": "07",
    "09": "00 07",
    "10": "01",
    "11": "10",
    "12": "02 07",
    "13": "12",
    "14": "07",
    "15": "14",
    "16": "15",
    "17": "11 12 16",
    "18": "12",
    "19": "00",
    "20": "16",
    "21": "07 09",
    "22": "12",
    "23": "07 16 25",
    "24": "17",
    "25": "07",
    "26": "17",
}
"""{lesson: those that it builds on directly}; 00 builds on none."""
PARTS = ("README.md", "lesson.py", "figure.py", "exercise.py", "check.py")


@dataclass(frozen=True)
class Lesson:
    """One lesson: its folder, and the fields from the first lines of its README."""

    number: str  # "03"
    folder: Path
    title: str
    notes: str
    modules: tuple[str, ...]  # the module of the chapter first, as paths from the repository's root

    @property
    def module(self) -> str:
        """Return the modules as one line."""
        return ", ".join(self.modules)

    def part(self, name: str) -> Path:
        """Return the path of one of the five parts, e.g. `part("exercise.py")`."""
        return self.folder / name

    def story(self, language: str = "en") -> Path:
        """Return the path of the story in a language, "en" or "zh"; of one that is not in Chinese
        yet, the English."""
        chinese = self.part("README.zh.md")
        return chinese if language == "zh" and chinese.is_file() else self.part("README.md")

    def title_in(self, language: str) -> str:
        """Return the title in a language, as the story's first line has it."""
        return self.title if language == "en" else _title(self.story(language))

    @property
    def after(self) -> list[str]:
        """Return the lessons that it builds on directly."""
        return AFTER.get(self.number, "").split()

    @property
    def minutes(self) -> int:
        """Return about how many minutes the story and its exercise take, to 5 minutes: an estimate
        from their length."""
        words = len(re.findall(r"\w+", self.part("README.md").read_text(encoding="utf-8")))
        return 5 * round((words / WORDS_A_MINUTE + MINUTES_A_HOLE * self.holes) / 5)

    @property
    def holes(self) -> int:
        """Return the number of holes of its exercise."""
        exercise = self.part("exercise.py").read_text(encoding="utf-8")
        return len(set(re.findall(r"\bhole\(\s*(\d+)", exercise)))


def every_lesson() -> list[Lesson]:
    """Return all lessons in order of their numbers."""
    folders = sorted(path for path in FOLDER.iterdir() if re.fullmatch(r"\d\d_\w+", path.name))
    return [_read(folder) for folder in folders if all((folder / part).is_file() for part in PARTS)]


def in_order() -> list[Lesson]:
    """Return all lessons, each behind those that it builds on; otherwise in order of numbers."""
    left = every_lesson()
    found = list[Lesson]()
    while left:
        numbers = {lesson.number for lesson in left}
        following = next(lesson for lesson in left if not numbers & set(lesson.after))
        found.append(following)
        left.remove(following)
    return found


def find(number: str) -> Lesson:
    """Return the lesson with this number ("03", "3") or folder name ("03_ring").

    Raises: ConfigError, which lists all lessons.
    """
    wanted = number.split("_")[0].zfill(2)
    lessons = every_lesson()
    for lesson in lessons:
        if lesson.number == wanted and number in (number.split("_")[0], lesson.folder.name):
            return lesson
    there = ", ".join(lesson.number for lesson in lessons)
    raise ConfigError(f"there is no lesson {number[:20]!r}; choose one of {there}")


@cache
def _read(folder: Path) -> Lesson:
    """Return what the head of a lesson's README.md says."""
    story = folder / "README.md"
    lines = story.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines[:12] if line.startswith("|")]
    notes, named = (cell.strip() for cell in rows[2].strip("|").split("|")[:2])
    modules = tuple(re.findall("`(.+?)`", named))
    return Lesson(folder.name[:2], folder, _title(story), notes, modules)


def _title(story: Path) -> str:
    """Return the title in a story's first line."""
    with story.open(encoding="utf-8") as text:
        return text.readline().lstrip("# ").split("·", 1)[-1].strip()
