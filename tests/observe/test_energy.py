"""Energy: counters of a fake powercap tree to the microjoule, shared ones counted once, and an
estimate called one."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from minidist.observe import energy, energy_counters
from minidist.observe.energy import ASSUMED_WATTS, Meter, energy_in_words, energy_of_run
from minidist.observe.energy_counters import host_id, open_counters, rapl_zones

RANGE = 262_143_328_850  # microjoules, of a real package


def zone(tree: Path, folder: str, name: str, microjoules: int) -> Path:
    """A zone of a fake tree; its counter."""
    place = tree / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n")
    counter = place / "energy_uj"
    counter.write_text(f"{microjoules}\n")
    return counter


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Two sockets, with all that must not be counted a second time."""
    (tmp_path / "intel-rapl").mkdir()
    for number in range(2):
        zone(tmp_path, f"intel-rapl:{number}", f"package-{number}", 1000)
        zone(tmp_path, f"intel-rapl:{number}:0", "core", 0)
        zone(tmp_path, f"intel-rapl:{number}:1", "dram", 0)
        zone(tmp_path, f"intel-rapl-mmio:{number}", f"package-{number}", 1000)
    zone(tmp_path, "intel-rapl:2", "psys", 0)
    return tmp_path


def spend(tree: Path, folder: str, joules: float) -> None:
    """Its counter goes on, and begins again at 0 above its range."""
    counter = tree / folder / "energy_uj"
    counter.write_text(f"{(int(counter.read_text()) + round(1e6 * joules)) % RANGE}\n")


def record(microjoules: dict[str, int], busy: float = 1.0, **others: Any) -> dict[str, Any]:
    """Of a rank that reads these counters; without one, of an estimate at 10 W."""
    return {
        "source": "rapl" if microjoules else "estimate",
        "busy_seconds": busy,
        "microjoules": microjoules,
        "watts": None if microjoules else 10.0,
        "assumed": False,
        **others,
    }


def test_two_packages_and_their_memory_are_counted_once(tree: Path) -> None:
    meter = Meter(powercap=tree)
    assert [*rapl_zones(tree)] == ["package-0", "package-0/dram", "package-1", "package-1/dram"]
    for folder, joules in (
        ("intel-rapl:0", 50),
        ("intel-rapl:0:0", 30),
        ("intel-rapl:0:1", 7),
        ("intel-rapl:1", 20),
        ("intel-rapl-mmio:0", 50),
        ("intel-rapl:2", 90),
    ):
        spend(tree, folder, joules)
    assert meter.read() == 77 and meter.source == "rapl" and meter.problem is None
    host = host_id()
    assert meter.record()["microjoules"] == {
        f"{host}/package-0": 50_000_000,
        f"{host}/package-0/dram": 7_000_000,
        f"{host}/package-1": 20_000_000,
        f"{host}/package-1/dram": 0,
    }
    meter.stop()


def test_a_counter_that_wraps_around_many_times_is_exact(tree: Path) -> None:
    meter = Meter(powercap=tree)
    spent = 0
    for step in range(20):
        spend(tree, "intel-rapl:1", 100_000 + step)  # more than a third of the range
        spent += 100_000 + step
        assert meter.read() == spent
    assert spent > 7 * RANGE / 1e6
    meter.stop()
    spend(tree, "intel-rapl:1", 5)  # after the last step: not the run's
    assert (
        meter.read() == spent
        and meter.record()["microjoules"][f"{host_id()}/package-1"] == 1_000_000 * spent
    )
    meter.stop()


def test_a_read_opens_no_file(tree: Path) -> None:
    meter = Meter(powercap=tree)
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        meter.read()
    assert len(os.listdir("/proc/self/fd")) == opened
    meter.stop()
    assert len(os.listdir("/proc/self/fd")) == opened - 4


def test_a_zone_that_goes_away_stays_where_it_was(tree: Path) -> None:
    meter = Meter(powercap=tree)
    spend(tree, "intel-rapl:0", 3)
    assert meter.read() == 3
    (tree / "intel-rapl:0" / "energy_uj").write_text("")
    assert meter.read() == 3
    meter.stop()


@pytest.mark.parametrize("wrong", ["unreadable", "no number", "no file"])
def test_counters_that_cannot_be_read_are_one_line_and_an_estimate(
    wrong: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tree / "intel-rapl:1" / "energy_uj"
    real = os.open
    opened = len(os.listdir("/proc/self/fd"))
    if wrong == "unreadable":  # also for root, who may run the tests

        def refuse(path: Any, *flags: Any) -> int:
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *flags)

        monkeypatch.setattr(energy_counters.os, "open", refuse)
    elif wrong == "no number":
        file.write_text("?\n")
    else:
        file.unlink()
    meter = Meter(powercap=tree)
    assert meter.source == "estimate" and meter.problem and "\n" not in meter.problem
    assert f"energy counters in {tree} cannot be read" in meter.problem
    assert (
        wrong != "unreadable"
        or "(Permission denied); since 2020 only root may, unless root allows it: chmod a+r "
        in meter.problem
    )
    assert len(os.listdir("/proc/self/fd")) == opened
    assert meter.record()["watts"] == ASSUMED_WATTS["cpu"]


def test_without_a_tree_it_is_an_estimate_of_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 102.5, 107.0, 108.0])
    monkeypatch.setattr(energy.time, "process_time", lambda: next(now))
    meter = Meter(watts=8.0, powercap=tmp_path / "none")
    assert meter.source == "estimate" and meter.problem is None
    assert meter.read() == 20.0
    meter.stop()
    assert meter.record() == {
        "source": "estimate",
        "busy_seconds": 7.0,
        "microjoules": {},
        "watts": 8.0,
        "assumed": False,
    }


def test_ranks_of_one_host_share_its_package_by_busy_seconds() -> None:
    found = energy_of_run(
        [
            record({"a/package-0": 90_000_000}, 1.0),
            record({"a/package-0": 90_000_400}, 2.0),
            record({"b/package-0": 10_000_000}, 5.0),
        ],
        steps=10,
        tokens=1000,
    )
    assert found["joules"] == 100.0004 and found["source"] == "rapl" and not found["estimate"]
    assert found["by_rank"] == pytest.approx([90.0004 / 3, 2 * 90.0004 / 3, 10.0])
    assert found["joules_a_step"] == 10.00004 and found["joules_a_token"] == pytest.approx(
        0.1000004
    )
    assert found["counters"] == {
        "a/package-0": {"joules": 90.0004, "ranks": [0, 1]},
        "b/package-0": {"joules": 10.0, "ranks": [2]},
    }
    assert "ranks that share a counter share its joules by busy seconds" in found["how"]
    words = energy_in_words(found)
    assert words.startswith(
        "energy: 10 J a step, 0.1 J a token, 100 J in all, by rank 30, 60, 10 ("
    )
    assert "estimate" not in words and "all programs on a host" in words


def test_idle_ranks_share_evenly() -> None:
    found = energy_of_run(
        [record({"a": 2_000_000}, 0.0), record({"a": 2_000_000}, 0.0)], steps=0, tokens=0
    )
    assert (
        found["by_rank"] == [1.0, 1.0]
        and found["joules_a_step"] is None
        and found["joules_a_token"] is None
    )
    assert energy_in_words(found).startswith("energy: 2 J in all, by rank 1, 1 (")


@pytest.mark.parametrize("assumed", [False, True])
def test_an_estimate_is_called_one(assumed: bool) -> None:
    found = energy_of_run(
        [record({}, 1.5, assumed=assumed), record({}, 0.5, assumed=assumed)], steps=4, tokens=8
    )
    assert found["source"] == "estimate" and found["estimate"] and found["joules"] == 20.0
    assert found["by_rank"] == [15.0, 5.0] and (found["watts"], found["watts_assumed"]) == (
        10.0,
        assumed,
    )
    words = energy_in_words(found)
    assert words.startswith(
        "energy, an estimate: 5 J a step, 2.5 J a token, 20 J in all, by rank 15, 5 (busy seconds"
    )
    assert ("10 W, assumed: --watts W gives yours)" in words) == assumed


def test_one_rank_without_a_counter_makes_it_an_estimate() -> None:
    found = energy_of_run([record({"a": 4_000_000}), record({}, 0.5)], steps=1, tokens=1)
    assert found["source"] == "estimate + rapl" and found["estimate"] and found["joules"] == 9.0
    assert energy_in_words(found).startswith("energy, an estimate: ")


class _NvmlError(Exception):
    """Of the fake library."""


def _fake_nvml(
    monkeypatch: pytest.MonkeyPatch, millijoules: list[int], *, counts: bool = True
) -> None:
    """A pynvml with one GPU, whose counter goes through the list."""

    def total(gpu: str) -> int:
        if not counts:
            raise _NvmlError("Not Supported")
        return millijoules.pop(0)

    fake: Any = ModuleType("pynvml")
    vars(fake).update(
        NVMLError=_NvmlError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda bus: f"gpu at {bus}",
        nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}",
        nvmlDeviceGetTotalEnergyConsumption=total,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)


def test_a_gpu_is_counted_beside_the_packages(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_nvml(monkeypatch, [5000, 5000, 12_500])
    meter = Meter("cuda", gpu="0000:01:00.0", powercap=tree)
    spend(tree, "intel-rapl:0", 2)
    assert meter.read() == 9.5 and meter.source == "nvml + rapl"
    assert open_counters("cpu", powercap=tree).source == "rapl"


def test_a_gpu_without_counter_leaves_an_estimate_of_all_seconds(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fake_nvml(monkeypatch, [], counts=False)
    now = iter([10.0, 13.0])
    monkeypatch.setattr(
        energy,
        "time",
        SimpleNamespace(perf_counter=lambda: next(now), thread_time=None, process_time=None),
    )
    meter = Meter("cuda", gpu="0000:01:00.0", watts=300.0, powercap=tree)
    assert (
        meter.source == "estimate"
        and meter.problem == "the GPU's energy counter cannot be read (Not Supported)"
    )
    assert meter.read() == 900.0
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert open_counters("cuda", gpu="0").problem == (
        "the GPU's energy counter is read by pynvml; pip install nvidia-ml-py"
    )
