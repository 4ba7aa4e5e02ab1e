"""Test what the records of steps tell: made-up records, one fault each, at the size from which it
is named and below it."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_records import MIB, linked, table

from minidist.observe.diagnose.laggards import laggards
from minidist.observe.diagnose.numbers import leaks, loss_jumps, wrong_numbers
from minidist.observe.diagnose.rules import diagnose
from minidist.observe.diagnose.slow_links import slow_links
from minidist.observe.diagnose.step_table import beside, column, others


def only(found):
    (fault,) = found
    return fault.cause, fault.ranks


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_clean_records_name_nobody(size):
    clean = table(size)
    assert laggards(clean) == wrong_numbers(clean) == leaks(clean) == slow_links(clean) == []
    assert diagnose_of(table(size)) == []


def diagnose_of(records):
    """The findings of records alone, of a job whose one recorder says nothing."""
    from minidist.observe.diagnose.flights import RankFlight

    flight = RankFlight(0, "here", 1, len(records.ranks), {}, [], "unknown", 0.0)
    return [
        found
        for found in diagnose([flight], records.ranks).findings
        if found.cause != "no recorder"
    ]


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"cpu": 1.5}, "slow compute"),
        ({"input": lambda step, line: 0.025}, "late reader"),
        ({"tokens": 1.4, "cpu": 1.3}, "uneven data"),
        ({"others": lambda step, line: 0.06}, "hogs the interpreter"),
    ],
)
@pytest.mark.parametrize("size", [2, 5])
def test_a_laggard_is_named_with_its_cause(size, changed, cause):
    assert only(diagnose_of(table(size, victim=1, **changed))) == (cause, (1,))


@pytest.mark.parametrize(
    "changed",
    [
        {"cpu": 1.15},
        {"input": lambda step, line: 0.01},
        {"tokens": 1.2, "cpu": 1.15},
        {"tokens": 1.5},
        {"others": lambda step, line: 0.006},
        {"cpu": lambda step, line: line["cpu"] * (2.0 if step % 2 else 1.0)},
        {"cpu": 1.5, "calls": 1.0},
    ],
    ids=[
        "a little slower",
        "reads a little",
        "a little more",
        "more, at no cost",
        "a little beside",
        "every other step",
        "slower, and nobody waits for it",
    ],
)
def test_less_names_nobody(changed):
    assert laggards(table(**changed)) == []


@given(
    st.lists(st.sampled_from([0.0, 0.1, 1.0, 1.5, 7.0]) | st.floats(0, 10), min_size=2, max_size=9)
)
def test_the_median_of_the_others(values):
    row = {3 * rank: {"cpu": value} for rank, value in enumerate(values)}
    cpu = column("cpu")
    assert beside(row, cpu) == {rank: pytest.approx(others(row, rank, cpu)) for rank in row}


def test_five_steps_are_enough_and_four_are_not():
    assert only(laggards(table(steps=13, at=8, cpu=1.5))) == ("slow compute", (2,))
    assert laggards(table(steps=12, at=8, cpu=1.5)) == []


def test_a_step_of_noise_does_not_end_a_streak():
    """The victim is slow in thirteen of sixteen steps, never in five in a row but once."""
    noisy = {"cpu": lambda step, line: line["cpu"] * (1.0 if step in (10, 15, 20) else 1.5)}
    assert only(laggards(table(steps=24, at=8, **noisy))) == ("slow compute", (2,))


def test_short_steps_take_more_of_them():
    """Five steps of 10 ms are a twentieth of a second, in which another program may have had the
    core."""
    short = {"seconds": lambda step, line: 0.01}
    assert laggards(table(steps=14, at=8, cpu=1.5, **short)) == []
    assert only(laggards(table(steps=60, at=8, cpu=1.5, **short))) == ("slow compute", (2,))


def slowed(*spans, steps=80, shared=False):
    """Records of four ranks, of which some are slow for a while: (rank, steps).

    Args:    shared: for a fifth of each step other programs had the cores.
    """
    records = table(4, steps)
    for rank, each in records.ranks.items():
        for line in each.steps:
            more = (
                0.5 * line["cpu"]
                if any(rank == slow and line["step"] in during for slow, during in spans)
                else 0.0
            )
            line["cpu"] += more
            line["calls"] -= more + (0.02 if shared else 0.0)
    return records


def test_ranks_that_are_slow_in_turn_are_not_named():
    """Each was on the slower core for a while. One that was so twice as long is named, and two at
    the same time."""
    assert laggards(slowed((1, range(10, 39)), (3, range(40, 55)))) == []
    assert only(laggards(slowed((1, range(10, 40)), (3, range(40, 55))))) == ("slow compute", (1,))
    assert {fault.ranks for fault in laggards(slowed((1, range(10, 39)), (3, range(30, 45))))} == {
        (1,),
        (3,),
    }


def test_on_shared_cores_a_slow_rank_takes_a_quarter_of_the_run():
    assert laggards(slowed((2, range(10, 109)), steps=401, shared=True)) == []
    assert only(laggards(slowed((2, range(10, 110)), steps=401, shared=True))) == (
        "slow compute",
        (2,),
    )
    assert only(laggards(slowed((2, range(10, 49)), steps=401))) == ("slow compute", (2,))


def test_stages_of_a_pipeline_are_not_compared():
    stages = {0: "pp0", 1: "pp0", 2: "pp1", 3: "pp1"}
    both = table(alike=stages, cpu=3.0, victim=2, at=0)
    for line in both.ranks[3].steps:
        line["cpu"] *= 3.0
    assert laggards(both) == []


def test_all_ranks_may_wait_for_their_data():
    late = table()
    for row in late.rows.values():
        for line in row.values():
            line["input"] = 0.05
    assert only(laggards(late)) == ("late reader", (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("bytes_a_step", "named"), [(MIB, True), (5 * MIB, True), (MIB // 2, False)]
)
def test_a_leak(bytes_a_step, named):
    found = leaks(table(steps=40, rss=lambda step, line: 80 * MIB + bytes_a_step * (step - 8)))
    assert [(fault.cause, fault.ranks) for fault in found] == ([("leak", (2,))] if named else [])


def test_one_large_array_is_no_leak():
    assert leaks(table(steps=40, rss=lambda step, line: 180 * MIB)) == []


def test_the_first_number_that_is_not_finite():
    bad = table()
    bad.ranks[1].steps[9]["bad"] = ["blocks.3", "gelu", "forward", "inf", 101.0]
    for rank in (0, 2, 3):
        bad.ranks[rank].steps[10]["bad"] = ["blocks.0", "linear", "forward", "nan", 101.1]
    (fault,) = wrong_numbers(bad)
    assert (fault.cause, fault.ranks, fault.where, fault.sure) == (
        "not finite",
        (1,),
        "blocks.3: gelu",
        "certain",
    )
    assert "step 9" in fault.what and "ranks 0,2-3 had some later" in fault.evidence[1]


def test_in_one_step_the_earlier_one_counts():
    bad = table()
    bad.ranks[0].steps[9]["bad"] = ["blocks.3", "linear", "forward", "nan", 101.2]
    bad.ranks[3].steps[9]["bad"] = ["blocks.1", "linear", "forward", "nan", 101.1]
    assert wrong_numbers(bad)[0].ranks == (3,)


@pytest.mark.parametrize(("size", "ranks", "sure"), [(3, (1,), "certain"), (2, (0, 1), "possible")])
def test_replicas_that_differ(size, ranks, sure):
    drifted = table(size)
    for rank, each in drifted.ranks.items():
        for line in each.steps[3::4]:
            line["digest"] = {"dp.1": "odd" if rank == 1 and line["step"] > 8 else "even"}
    (fault,) = wrong_numbers(drifted)
    assert (fault.cause, fault.ranks, fault.sure) == ("replicas differ", ranks, sure)
    assert "at step 11" in fault.what and "equal at step 7" in fault.evidence[1]


def test_a_loss_that_jumps_on_one_rank_and_on_all():
    one = table(loss=lambda step, line: line["loss"] + 1.0)
    assert only(wrong_numbers(one)) == ("loss jumps", (2,))
    everyone = table()
    for each in everyone.ranks.values():
        for line in each.steps[12:]:
            line["loss"] += 1.0
    assert only(wrong_numbers(everyone)) == ("loss jumps", ())
    assert wrong_numbers(table(loss=lambda step, line: line["loss"] + (step == 12))) == []  # once


def healthy(chance, kind, steps=400, size=2):
    """Records of a run of 32 tokens a step: its loss is noisy, and so is the memory of its
    ranks."""
    records = table(size, steps)
    noise = {
        "normal": lambda: chance.gauss(0.0, 0.3),
        "heavy tails": lambda: 0.2 * chance.gauss(0.0, 1.0) / max(0.1, abs(chance.gauss(0.0, 1.0))),
        "skewed": lambda: 0.3 * chance.lognormvariate(0.0, 0.7),
        "hard pages": lambda: chance.gauss(0.8 if chance.random() < 0.1 else 0.0, 0.2),
    }[kind]
    for each in records.ranks.values():
        for line in each.steps:
            line["loss"] = 2.0 + 2.0 * math.exp(-line["step"] / 100) + noise()
            line["rss"] = int((200 + 20 * chance.random() * (1 + noise())) * MIB)
    return records


KINDS = ["normal", "heavy tails", "skewed", "hard pages"]


def alarms(kind, runs, **options):
    """Return the numbers of healthy runs whose loss jumps, and whose memory leaks."""
    records = [healthy(random.Random(run), kind, **options) for run in range(runs)]
    return sum(map(bool, map(loss_jumps, records))), sum(map(bool, map(leaks, records)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_noisy_run_is_healthy(kind):
    assert alarms(kind, 10) == (0, 0)


@pytest.mark.soak
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_of_many_noisy_runs_hardly_one_is_called_sick(kind, size):
    """At most 1 of 200, of any length."""
    found = [alarms(kind, 50, size=size, steps=steps) for steps in (15, 40, 200, 800)]
    assert sum(jumps for jumps, _ in found) <= 1
    assert sum(leaking for _, leaking in found) <= 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_jump_beyond_the_noise_is_named(kind):
    for run in range(5):
        records = healthy(random.Random(run), kind)
        for each in records.ranks.values():
            for line in each.steps[300:]:
                line["loss"] += 8.0
        (fault,) = loss_jumps(records)
        assert fault.cause == "loss jumps"
        assert "jumps at step 300" in fault.what


@pytest.mark.parametrize("kind", KINDS)
def test_a_leak_beyond_the_noise_is_named(kind):
    for run in range(5):
        records = healthy(random.Random(run), kind)
        for line in records.ranks[1].steps:
            line["rss"] += 30 * MIB * line["step"]
        assert only(leaks(records)) == ("leak", (1,))


def test_a_shard_that_is_always_harder_is_no_jump():
    harder = table()
    for line in harder.ranks[2].steps:
        line["loss"] += 1.0
    assert wrong_numbers(harder) == []


def test_a_slow_link_is_named_one_way():
    (fault,) = diagnose_of(linked())
    assert (fault.cause, fault.ranks) == ("slow link", (1, 2))
    assert "from rank 2 to rank 1, it takes 0.01 s" in fault.evidence[1]
    assert slow_links(linked(slow=1.0)) == []


def test_a_link_that_was_slow_for_a_while_is_not_named():
    """Another program on a core did that: it went away again."""
    assert slow_links(linked(steps=200, during=range(60, 90))) == []
    (fault,) = slow_links(linked(steps=200, during=[*range(20, 35), *range(140, 200)]))
    assert fault.steps[0] > 100 and fault.sure == "certain"


def test_a_late_receiver_makes_no_link_slow():
    assert slow_links(linked(slow=1.0, late=0.5)) == []


def test_links_between_hosts_are_measured_on_aligned_clocks():
    assert slow_links(linked(slow=1.0, hosts={2: "far"}, ahead=3.0)) == []
