"""What md.run and md.init say of arguments that cannot work; md.init inside a function that md.run runs."""

import math
import sys
from typing import Any

import numpy as np
import pytest

import minidist as md
from minidist.comm.group import Group
from minidist.errors import LaunchError, TimeoutError

TRANSPORTS = ("threads", "threads-unbuffered", "tcp", "shm", "plain-tcp", "mpi")


def world_of(world: Group) -> tuple[bool, int, int]:
    """Return whether md.init gives this rank's world, and that world's place and size."""
    found = md.init()
    return found is world, found.rank, found.size


@pytest.mark.parametrize(
    "name, value",
    [
        ("size", 2.5), ("size", True), ("size", "4"), ("size", 0), ("size", -1), ("size", None), ("size", 10**9),
        ("limit", math.inf), ("limit", math.nan), ("limit", 0), ("limit", -1.0), ("limit", "5"), ("limit", None),
        ("limit", True), ("limit", 10**400), ("patience", math.nan), ("patience", math.inf), ("patience", 0),
        ("transport", None), ("transport", 5), ("transport", ["tcp"]), ("transport", "thread"), ("transport", ""),
    ],
)
def test_a_bad_argument_of_run_is_one_line(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {"size": 2, name: value}
    with pytest.raises(LaunchError) as caught:
        md.run(world_of, **arguments)
    said = str(caught.value)
    assert "\n" not in said and len(said) < 200
    assert name in said and (repr(value)[:10] in said or str(value) in said)


@pytest.mark.parametrize("function", [5, None, "print"])
def test_run_takes_a_function(function: Any) -> None:
    with pytest.raises(LaunchError, match="fn\\(world"):
        md.run(function, size=2)


@pytest.mark.parametrize("name, value", [("limit", math.inf), ("limit", "5"), ("threads", 0), ("threads", 1.5),
                                         ("patience", -1)])
def test_a_bad_argument_of_init_is_one_line(name: str, value: Any) -> None:
    with pytest.raises(LaunchError, match=name):
        md.init(**{name: value})


def test_numbers_of_numpy_are_numbers() -> None:
    size, limit = np.int16(2), np.float32(20)
    assert [found[2] for found in md.run(world_of, size=size, limit=limit)] == [2, 2]     # type: ignore[arg-type]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_init_inside_run_gives_the_world_of_run(transport: str) -> None:
    assert md.run(world_of, size=3, transport=transport) == [(True, rank, 3) for rank in range(3)]


def test_a_run_inside_a_run_has_its_own_world() -> None:
    def outer(world: Group) -> tuple[list[tuple[bool, int, int]], bool]:
        inner = md.run(world_of, size=3)
        return inner, md.init() is world

    assert md.run(outer, size=2) == [([(True, rank, 3) for rank in range(3)], True)] * 2


def test_init_inside_run_refuses_another_transport() -> None:
    def ask(world: Group) -> Group:
        return md.init(transport="mpi")

    with pytest.raises(LaunchError, match="'mpi'.*'threads'"):
        md.run(ask, size=2)


@pytest.mark.parametrize("transport", ["threads", "tcp"])
def test_a_program_without_stdout_and_stderr_runs(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert [found[2] for found in md.run(world_of, size=2, transport=transport)] == [2, 2]


def test_the_limit_of_run_counts_from_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are still to be forked when the limit arrives are named, and never started."""
    monkeypatch.setattr("minidist.launch.forked._only_this_process", None)      # no rank may run
    with pytest.raises(TimeoutError, match="2 of 2 ranks"):
        md.run(world_of, size=2, transport="tcp", limit=1e-9)
