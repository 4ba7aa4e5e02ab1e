"""Jobs that really run, each with one fault: diagnosis names the culprit and the cause, and a clean
job nobody."""

import pytest
from sick_jobs import KINDS, STUCK, Fault, faults, found, judge, sick_job

from minidist.observe.diagnose.laggards import SLOW, SLOW_USUALLY
from minidist.observe.diagnose.step_table import BUSY_STREAK, STREAK, StepTable
from minidist.observe.rank_steps import read_rank_steps

SAMPLE = [
    Fault("bad weight", 1, 3, at=2, steps=5),
    Fault("slow compute", 2, 4, at=3, steps=20),
    Fault("behind", 0, 3, at=2, steps=5),
    Fault("wrong order", 1, 4, at=2, steps=4),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.kind)
def test_a_fault_is_named(fault, tmp_path):
    run = sick_job(tmp_path, fault)
    assert judge(fault, run.found) == (True, True), run.found


def test_a_clean_job_names_nobody(tmp_path):
    assert sick_job(tmp_path, Fault("none", 0, 3, steps=8)).found == []


@pytest.mark.soak
def test_300_faults(tmp_path):
    """The culprit is right in 99 % of 300 faults, the cause in 95 %; a hang is reported at most 1 s
    after its limit."""
    wrong = []
    uncaused = []
    late = []
    for number, fault in enumerate(faults(300)):
        run = sick_job(tmp_path / str(number), fault)
        culprit, cause = judge(fault, run.found)
        wrong += [] if culprit else [(fault, run.found)]
        uncaused += [] if cause else [(fault, run.found)]
        late += (
            [(fault, run.seconds)] if fault.kind == "behind" and run.seconds > STUCK + 1.0 else []
        )
    assert len(wrong) <= 3, wrong
    assert len(uncaused) <= 15, uncaused
    assert not late, late


def is_slow(folder, fault):
    """Return whether the ranks compute alike before the fault, and from then on the victim
    SLOW_USUALLY times as long."""
    ratios = {
        step: row[fault.victim]["cpu"] / row[1 - fault.victim]["cpu"]
        for step, row in StepTable(read_rank_steps(folder)).rows.items()
    }
    return all(
        1 / SLOW < ratio < SLOW if step < fault.at else ratio >= SLOW_USUALLY
        for step, ratio in ratios.items()
        if step < fault.at + STREAK
    )


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["slow compute", "late reader", "uneven data", "hog"])
@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_is_named_within_five_steps(kind, seed, tmp_path):
    """Steps of 50 ms or more: STREAK of them last long enough (LONG). Processor time, shared cores:
    BUSY_STREAK.

    Where a core is slower for a while, the rank may not be slow beside the other: then the job runs
    again.
    """
    fault = Fault(kind, seed % 2, 2, at=8, seed=seed, steps=24, rows=100)
    for turn in range(10):
        folder = tmp_path / str(turn)
        sick_job(folder, fault)
        if kind != "slow compute" or is_slow(folder, fault):
            break
    else:
        pytest.fail("in ten jobs the cores differed by as much as the ranks")
    shared = kind == "slow compute" and StepTable(read_rank_steps(folder)).shared([0, 1])
    first = next(
        step
        for step in range(fault.at, 24)
        if judge(fault, found(folder, before=step + 1)) == (True, True)
    )
    print(
        f"{kind}: named in its {first - fault.at + 1}. step{', on shared cores' if shared else ''}"
    )
    assert first - fault.at < (BUSY_STREAK if shared else STREAK)


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(25))
def test_10_000_clean_steps_name_nobody(turn, tmp_path):
    assert (
        sick_job(
            tmp_path, Fault("none", 0, (4, 8, 3, 5)[turn % 4], seed=100 + turn, steps=400)
        ).found
        == []
    )


def test_every_kind_of_fault_is_injected():
    assert {fault.kind for fault in faults(300)} == set(KINDS) and len(KINDS) >= 12
