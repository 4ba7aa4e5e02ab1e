"""Alpha, beta and drift of links, from messages with known times."""

import pytest

from minidist.observe.link_times import link_profiles, messages_of
from minidist.observe.rank_steps import RankSteps

ALPHA = 0.001
BETA = 1e-8


def records(steps=40, *, late=(), slower_from=None, times=2.0):
    """Two ranks; rank 0 sends 1 MB in even steps and 1 kB in odd ones. late: steps in which the
    core was busy."""
    out = []
    come = []
    for step in range(steps):
        nbytes = 1_000_000 if step % 2 == 0 else 1000
        seconds = (ALPHA + nbytes * BETA) * (
            times if slower_from is not None and step >= slower_from else 1.0
        )
        seconds += 0.5 if step in late else 0.0
        at = 1_000_000 * (step + 1)
        out.append({"step": step, "out": [[1, 3, step, nbytes, at]]})
        come.append(
            {"step": step, "in": [[0, 3, step, nbytes, at - 10, at + round(1e6 * seconds)]]}
        )
    return {0: RankSteps(0, 2, "a", 0.0, 0.0, "", out), 1: RankSteps(1, 2, "a", 0.0, 0.0, "", come)}


@pytest.mark.parametrize("late", [(), tuple(range(0, 40, 3))])
def test_alpha_and_beta_are_found_also_on_a_busy_core(late):
    link = link_profiles(records(late=late))[0, 1]
    assert (link.alpha, link.beta, link.drift) == pytest.approx((ALPHA, BETA, 1.0), rel=0.01)
    assert (
        link.seconds(10**6) == pytest.approx(ALPHA + 10**6 * BETA, rel=0.01) and link.messages == 40
    )


def test_a_link_that_slows_down_drifts():
    assert link_profiles(records(slower_from=20))[0, 1].drift == pytest.approx(2.0)


def test_a_message_with_one_end_or_a_late_receiver_is_left_out():
    found = records(4)
    found[0].steps[1]["out"][0][2] = 99
    found[1].steps[2]["in"][0][4] += 100
    assert [message.step for message in messages_of(found)[0, 1]] == [0, 3]
    assert link_profiles(found) == {}
