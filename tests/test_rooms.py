"""The rooms of the house: imports run downwards, the tests of a module are found by its path, and a
class name stands for one class. All of them read every module, which one process parses once."""

import re
from collections import defaultdict
from configparser import ConfigParser
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from imports import ROOT, Import, classes, imports, modules

ELSEWHERE = (("lessons",), ("kernels",), ("benchmarks",), ("clusters",))
"""Folders of tests that belong to no folder of minidist/."""
FLOORS = [
    ["minidist.__main__", "minidist.reference", "minidist.site"],
    ["minidist.cli"],
    ["minidist.lessons"],
    ["minidist.bench"],
    ["minidist.plan"],
    ["minidist.simulate"],
    ["minidist.graded_apart"],
    ["minidist.console", "minidist.grading", "minidist.progress", "minidist.terminal"],
    ["minidist.holes", "minidist.own_work"],
    ["minidist.observe"],
    ["minidist.survive"],
    ["minidist"],  # the public names: each is loaded when it is asked for
    ["minidist.parallel.hybrid"],
    ["minidist.parallel.state"],
    ["minidist.parallel.pipeline"],
    ["minidist.parallel.experts", "minidist.parallel.context"],
    ["minidist.parallel.tensor"],
    ["minidist.parallel.memory"],
    ["minidist.parallel.compress"],
    ["minidist.parallel.zero"],
    ["minidist.parallel.data"],
    ["minidist.parallel.precision"],
    ["minidist.parallel.step"],
    ["minidist.nn", "minidist.optim", "minidist.data"],
    ["minidist.autograd"],
    ["minidist.testing"],
    ["minidist.launch"],
    ["minidist.comm.transports", "minidist.comm.records"],
    ["minidist.comm.group"],
    ["minidist.comm.verbs", "minidist.comm.point_to_point", "minidist.comm.subgroups"],
    ["minidist.comm.collectives"],
    ["minidist.comm.calls"],
    ["minidist.comm.transport"],
    ["minidist.comm.cost"],
    ["minidist.comm.health"],
    ["minidist.comm.device_lane"],
    ["minidist.comm.ledger", "minidist.comm.native"],
    ["minidist.comm.wire"],
    [
        "minidist.comm.serialization",
        "minidist.comm.chunks",
        "minidist.comm.limits",
        "minidist.comm.flight",
    ],
    ["minidist.comm.observers"],
    ["minidist.comm.handle", "minidist.comm.signature", "minidist.comm.call_site"],
    ["minidist.kernels"],
    ["minidist.device"],
    ["minidist.reading"],
    ["minidist.files", "minidist.streams"],
    ["minidist.errors"],
]
"""Each line is a floor; rooms on one floor do not import each other."""

NO_ROOM = ("minidist.comm", "minidist.parallel")  # only a docstring


KNOWN: set[tuple[str, str]] = set()
"""Arrows that still run upwards. The list may only get shorter."""


def test_every_arrow_runs_downwards() -> None:
    wrong = [found for module in modules() for found in imports(module) if not _downwards(found)]
    new = [str(found) for found in wrong if (found.importer, found.imported) not in KNOWN]
    assert not new, "\n".join(new)
    assert {(found.importer, found.imported) for found in wrong} == KNOWN, (
        "an arrow of KNOWN is gone: take it out"
    )


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    """Floors inside a package may lie above and below another package; together they still have
    one order."""
    below: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for found in imports(module):
            importer, imported = (name.split(".")[1:2] for name in found[:2])
            if importer and imported and importer != imported:
                below[importer[0]].add(imported[0])
    TopologicalSorter(below).prepare()  # raises CycleError, which names the circle


def test_every_module_has_a_room() -> None:
    assert len(modules()) > 300
    assert [
        module for module in modules() if _place(module) is None and module not in NO_ROOM
    ] == []


def test_a_wrong_arrow_is_seen() -> None:
    below = Import("minidist.errors", "minidist.device.backend", ROOT / "minidist/errors.py", 7)
    assert not _downwards(below)
    assert str(below) == "minidist/errors.py:7: minidist.errors imports minidist.device.backend"
    assert not _downwards(
        below._replace(importer="minidist.nn.gpt", imported="minidist.optim.adam")
    )
    assert _downwards(below._replace(importer="minidist.nn.gpt", imported="minidist.nn.layers"))


def test_setup_cfg_lists_every_package() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    assert sorted(listed) == sorted(
        name for name, path in modules().items() if path.name == "__init__.py"
    )


def test_contributing_lists_the_rooms_floor_by_floor() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(__main__ .*?)```", text, re.DOTALL)
    assert block, "CONTRIBUTING.md has a block of rooms"
    listed = [line.split("  ")[0].split() for line in block[1].splitlines()]
    floors = [
        [room.removeprefix("minidist").removeprefix(".") or "." for room in floor]
        for floor in FLOORS
    ]
    assert listed == floors


@pytest.mark.parametrize("folder", ["minidist", "kernels", "benchmarks"])
def test_a_test_is_found_by_the_path_of_its_module(folder: str) -> None:
    """A test file named after a module lies where the module does; others test a whole folder of
    that path."""
    tests = ROOT / "tests" / ("" if folder == "minidist" else folder)
    folders = defaultdict(list)
    for path in (ROOT / folder).rglob("*.py"):
        folders[path.name].append(path.parent)
    assert len(folders) > 10
    for path in tests.rglob("test_*.py"):
        inside = path.relative_to(tests).parent
        if folder == "minidist" and inside.parts[:1] in ELSEWHERE:
            continue
        assert (ROOT / folder / inside).is_dir(), f"{path}: there is no folder {folder}/{inside}"
        name = path.name.removeprefix("test_")
        homes = folders[name]
        assert not homes or ROOT / folder / inside in homes or _is_general(path), (
            f"{path} belongs to {homes}"
        )


def test_a_class_name_stands_for_one_class() -> None:
    homes = defaultdict(list)
    for module, path in modules().items():
        for name, line in classes(module):
            homes[name].append(f"{path.relative_to(ROOT)}:{line}")
    assert len(homes) > 250
    twice = {name: places for name, places in homes.items() if len(places) > 1}
    assert not twice, twice


def _is_general(path: Path) -> bool:
    """Named after a subject that happens to be the name of a module elsewhere."""
    return path.name in ("test_gpu.py",)


def _downwards(found: Import) -> bool:
    importer = _place(found.importer)
    imported = _place(found.imported)
    return importer is None or imported is None or importer == imported or importer[0] < imported[0]


@cache
def _place(module: str) -> tuple[int, str] | None:
    """Floor and room of a module: the longest name of a room that it begins with."""
    rooms = [
        (floor, room)
        for floor, rooms in enumerate(FLOORS)
        for room in rooms
        if module == room or (room != "minidist" and module.startswith(f"{room}."))
    ]
    return max(rooms, key=lambda place: len(place[1]), default=None)
