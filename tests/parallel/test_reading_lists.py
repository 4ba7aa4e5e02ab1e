"""Test how much a reader of one chapter has to open: its module and what that imports inside
parallel/, without step/.

pytest tests/parallel/test_reading_lists.py -s          prints the table
"""

import pytest
from imports import lines, modules, reached

from minidist import lessons

PARALLEL = "minidist.parallel"
STEP = "minidist.parallel.step"
FILES = 5
LINES = 1190
"""20 % above the longest chapter of one subject after `ruff format` at 100 columns (ZeRO-3, 990):
nothing is packed or moved to fit a bound. What a reader meets in one step is what counts."""

CHAPTERS = {
    path.removeprefix("minidist/parallel/").removesuffix(".py").replace("/", "."): lesson.number
    for lesson in lessons.every_lesson()
    for path in lesson.modules
    if path.startswith("minidist/parallel/")
}
"""{module inside parallel/: its chapter}, from the heads of the stories."""

LARGER = {
    "hybrid.hybrid": (89, 20_600),
    "hybrid.hybrid_step": (40, 9100),
    "hybrid.parallelize": (77, 17_000),
    "hybrid.mesh": (25, 5440),
    "memory.offload_disk": (8, 1430),
    "pipeline.pipedream": (7, 1480),
    "compress.compress": (14, 2560),
    "state.checkpoint": (9, 2460),
}
"""20 % above what is measured: the chapter that composes all others (81, 33 and 21 files; the list
of all chapters' classes reaches 64), the disk half of chapter 20, the registry of chapter 21, which
imports every scheme (12 files, 2,130 lines), checkpoints of any strategy (7 files, 2,045 lines), and
PipeDream, which is a Pipeline (6 files, 1,233 lines)."""

TODAY: dict[str, tuple[int, int]] = {}
"""Those that are above the bound as yet, and by how much: numbers here may only fall, and rows only
go. They rose once, by the plain versions with which the modules begin."""


def measured(module: str) -> tuple[int, int]:
    """Files and lines that a reader of `module` opens."""
    found = reached(f"{PARALLEL}.{module}", PARALLEL, without=STEP)
    return len(found), sum(map(lines, found))


@pytest.mark.parametrize("module", CHAPTERS)
def test_a_chapter_is_short(module: str) -> None:
    files, total = measured(module)
    allowed = LARGER.get(module, (FILES, LINES))
    print(
        f"\n{CHAPTERS[module]} {module:28} {files:3} files {total:6} lines   (at most "
        f"{allowed[0]}, {allowed[1]})"
    )
    most = TODAY.get(module, allowed)
    assert files <= most[0], f"{module}: {reached(f'{PARALLEL}.{module}', PARALLEL, without=STEP)}"
    assert total <= most[1]
    assert module not in TODAY or files > allowed[0] or total > allowed[1], (
        "within the bound now: take the row out"
    )


def test_the_pipeline_with_what_is_read_beside_it() -> None:
    """The executor takes a checked schedule; the schedules and their checker are read beside the
    chapter."""
    chapter = set(reached(f"{PARALLEL}.pipeline.pipeline", PARALLEL, without=STEP))
    beside = {*chapter, *reached(f"{PARALLEL}.pipeline.schedules", PARALLEL, without=STEP)}
    assert beside - chapter == {
        f"{PARALLEL}.pipeline.schedules",
        f"{PARALLEL}.pipeline.schedule_checker",
    }
    assert len(beside) <= 9  # 20 % above what is measured: 8 files, 1,789 lines
    assert sum(map(lines, beside)) <= 2150


def test_step_is_no_cupboard() -> None:
    """Bound what all chapters share and the table leaves out: 20 % above what is measured (8 files,
    1,190 lines)."""
    found = [module for module in modules() if module.startswith(f"{STEP}.")]
    assert len(found) <= 10
    assert sum(map(lines, found)) <= 1430


def test_no_string_hides_a_module_from_the_table() -> None:
    sources = {
        module: path.read_text(encoding="utf-8")
        for module, path in modules().items()
        if module.startswith(f"{PARALLEL}.")
    }
    assert len(sources) > 80
    by_string = ("importlib", "import_module", "__import__")
    assert [m for m, text in sources.items() if any(word in text for word in by_string)] == []


def test_every_chapter_has_its_module() -> None:
    assert all(f"{PARALLEL}.{module}" in modules() for module in CHAPTERS)
    assert set(TODAY) | set(LARGER) <= set(CHAPTERS)
