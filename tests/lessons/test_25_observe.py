"""Exercise 25: filled rightly it passes, each wrong filling fails under its name; the rules judge
jobs of any size."""

from pathlib import Path

import numpy as np
import pytest
from filling import assert_named, graded, right

from minidist import lessons
from minidist.errors import ConfigError
from minidist.grading import load_module
from minidist.observe.diagnose.plain import (
    plain_behind,
    plain_first_bad,
    plain_growth,
    plain_slow_link,
    plain_waited_for,
)
from minidist.observe.power_cap import best_frequency, frequency_under, step_joules

lab = load_module(lessons.find("25").part("experiments.py"), "25")
RIGHT = right("25")
WRONG = {
    "blames the ranks that wait": {1: "[rank for rank, last in calls.items() if last == newest]"},
    "the culprit is missed": {3: "arrivals.argmin(axis=1)[delay > share * step]"},
    "not all that are behind": {
        1: "[rank for rank, last in calls.items() if last == min(calls.values())]"
    },
    "names only one of them": {1: "[min(calls, key=calls.get)]"},
    "of two late ranks neither is the only one": {2: "ordered[:, -1] - ordered[:, 0]"},
    "a false alarm": {3: "arrivals.argmax(axis=1)"},
    "only on the slow link the fastest are slow too": {4: "float(np.max(some))"},
    "the fastest are as fast as any": {4: "float(np.median(some))"},
    "changes by an array that is made or freed once": {
        5: "float(memory[-1] - memory[0]) / (len(memory) - 1)"
    },
    "gives the memory itself": {5: "float(np.median(memory))"},
    "takes the largest difference": {5: "float(np.max(np.diff(memory)))"},
    "not what most steps add": {5: "float(memory[-1] - memory[-2])"},
    "not the first number": {6: "min(bad, key=lambda one: one[1])[2:] if bad else None"},
    "pays the dynamic watts while it rests, too": {
        7: "(static + dynamic * frequency ** 3) * (work / frequency + rest)"
    },
    "takes as long at every frequency": {
        7: "static * (work / frequency + rest) + dynamic * frequency ** 3 * work"
    },
    "pays the static watts only while it rests": {
        7: "static * rest + dynamic * frequency ** 2 * work"
    },
    "pays the static watts only while it computes": {
        7: "static * work / frequency + dynamic * frequency ** 2 * work"
    },
    "adds dynamic watts to joules": {
        7: "static * (work / frequency + rest) + dynamic * frequency ** 3"
    },
    "your dynamic watts fall with f²": {
        7: "static * (work / frequency + rest) + dynamic * frequency * work"
    },
    "not the energy of a step": {7: "static + dynamic"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("25", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("25", mistake, WRONG[mistake], tmp_path)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("wrong", "mistake"),
    [
        ({2: "ordered[:, -2] - ordered[:, -1]"}, "the culprit is missed"),
        ({5: "float(memory[-1] - memory[0]) / (len(memory) - 1)"}, "not their mean"),
        ({6: "max(bad)[2:] if bad else None"}, "the culprit is missed"),
    ],
)
def test_a_leak_and_a_first_number(wrong: dict[int, str], mistake: str, tmp_path: Path) -> None:
    assert_named("25", mistake, wrong, tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("25", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_25.py line" in result.results[-1].line()
    )


@pytest.mark.parametrize("size", [2, 3, 7])
def test_each_rule_names_its_own_fault_alone(size: int) -> None:
    for seed in range(5):
        for kind in lab.KINDS:
            job = lab.sick_job(kind, size=size, seed=seed)
            leaking = [rank for rank in range(size) if plain_growth(job.memory[:, rank]) > lab.MIB]
            found = {
                "hang": plain_behind(job.calls) or None,
                "slow rank": plain_waited_for(job.arrivals),
                "slow link": plain_slow_link(job.links),
                "leak": leaking[0] if leaking else None,
                "not finite": plain_first_bad(job.bad),
            }
            assert found == {other: job.culprit if other == kind else None for other in found}, (
                kind,
                seed,
            )


def test_no_frequency_takes_less_energy_than_the_best() -> None:
    given = {"work": 2.0, "rest": 0.3, "static": 30.0, "dynamic": 100.0}
    least = step_joules(best_frequency(static=30.0, dynamic=100.0), **given)
    assert all(step_joules(f, **given) >= least for f in np.linspace(0.05, 1.0, 200).tolist())
    assert best_frequency(static=300.0, dynamic=100.0) == 1.0
    assert (
        frequency_under(130.0, static=30.0, dynamic=100.0)
        == frequency_under(500.0, static=30.0, dynamic=100.0)
        == 1
    )
    with pytest.raises(ConfigError, match="uses 30 W even at rest"):
        frequency_under(30.0, static=30.0, dynamic=100.0)


LEAVES = (
    "数据并行DP",
    "张量并行TP",
    "流水线并行PP",
    "序列并行SP",
    "自动并行化",
    "异构内存架构",
    "MoE专用优化",
    "长上下文支持",
    "FSDP异步聚合",
    "DeepSpeed异构优化",
    "Megatron硬件协同",
    "NVLink 4.0",
    "Grace Hopper",
    "InfiniBand NDR",
    "CXL互连",
    "策略选择2025",
    "拓扑优化",
    "调试工具",
    "成本效益",
)  # N2:584


def test_each_leaf_of_the_notes_mind_map_has_its_lessons() -> None:
    readme = lessons.find("25").part("README.md").read_text(encoding="utf-8")
    table = [line for line in readme.splitlines() if line.startswith("| ")]
    for leaf in LEAVES:
        (row,) = [line for line in table if leaf in line.split("|")[1]]
        assert "](../" in row or "this one" in row, leaf
