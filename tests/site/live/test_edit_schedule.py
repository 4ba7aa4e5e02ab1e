"""The numbers of the live figure `edit_schedule`, computed another way."""

from dataclasses import replace

import pytest
from live_figures import figure

from minidist.comm.group import Group
from minidist.errors import CommError
from minidist.grading import load_module
from minidist.launch import run
from minidist.lessons import FOLDER
from minidist.parallel.pipeline.executor import Executor
from minidist.parallel.pipeline.instructions import Schedule
from minidist.parallel.pipeline.schedule_checker import Times
from minidist.site.live import edit_schedule
from minidist.site.live.edit_schedule import SWAPS


def executed(group: Group, schedule: Schedule) -> bool:
    """Return whether the executor comes to the end of a schedule that nobody has checked."""
    lab = load_module(FOLDER / "11_pipeline" / "experiments.py", "11")
    executor = Executor(replace(schedule, checked=True), group)
    try:
        executor.run(lab.Sleeper(schedule, Times(0.0, 0.0, 0.0, 0.0)))
    except CommError:  # a deadlock; or the others, which wait for a rank that has ended
        return False
    return True


@pytest.mark.parametrize("name", edit_schedule.NAMES)
def test_ranks_run_a_swapped_schedule_if_the_figure_says_so(name: str) -> None:
    """All swaps that the checker passes, in one run; and each deadlock of rank 0 in its own."""
    kinds = {swap: edit_schedule.verdict(edit_schedule.swapped(name, *swap), 0.0) for swap in SWAPS}
    for (rank, at), (timed, said, deadlock) in kinds.items():
        schedule = edit_schedule.swapped(name, rank, at)
        assert deadlock == ("deadlock" in said)
        if timed or (deadlock and rank == 0):
            came = run(executed, schedule, size=3)
            assert all(came) == (timed is not None), (rank, at)


def test_the_swap_that_is_asked_about_takes_the_time_that_is_told() -> None:
    """In 1F1B with messages of half a forward rank 0 gets gradient 0 at 9, so activation 2 is on
    rank 1 at 9.5, which began to wait for it at 8.5: one forward is lost."""
    live = figure("edit_schedule", "en")
    swap = 1 + SWAPS.index((0, 5))
    lengths = [live.picture(2, at, message).facts[0] for at in (0, swap) for message in (0, 1)]
    for told, length in zip(lengths, (15, 18, 15, 19), strict=True):
        assert f"lasts {length} forwards" in told
    assert "wait for each other" in live.picture(1, swap, 0).facts[0]
