"""deadlock and arbiter: which waits are in vain, how that is told, and that nothing in motion is
taken for stuck."""

import itertools
from dataclasses import replace

import pytest

from minidist.comm import wire
from minidist.comm.health import deadlock
from minidist.comm.health.deadlock_arbiter import PAUSE, RETRY, Arbiter
from minidist.comm.health.wait_state import State, Wait
from minidist.comm.signature import Signature

numbers = itertools.count()


def collective(group, sequence, verb="all_reduce", **fields):
    signature = Signature(
        group, sequence, verb, "ring", "sum", None, "<f4", (3,), f"{verb}.py:{sequence}"
    )
    return signature._replace(**fields)


def message(verb, place):
    return Signature(0, 1, verb, None, None, None, None, None, place)


def wait(call, *peers, members=(0, 1, 2), incoming=True):
    return Wait(next(numbers), call, members, peers, f"a message from {peers}", incoming, 0.2)


def states(*waits, **changes):
    """One settled state a rank; of rank r `waits[r]`, a wait or several."""
    return {
        rank: State(each if isinstance(each, tuple) else (each,), settled=True, **changes)
        for rank, each in enumerate(waits)
        if each is not None
    }


def stuck(said, ended=None):
    return sorted({node.rank for node in deadlock.hopeless(said, ended or {}, strict=True)})


def told(said, ended=None):
    return deadlock.verdict(deadlock.hopeless(said, ended or {}, strict=True), said, ended or {})


def test_a_cycle_is_spelled_out_and_who_waits_for_it_is_stuck_too():
    said = states(
        wait(message("recv", "a.py:14"), 2),
        wait(message("send", "c.py:1"), 0, incoming=False),
        wait(message("recv", "a.py:9"), 0),
    )
    error, text, ranks = told(said)
    assert (error, ranks) == ("DeadlockError", [0, 1, 2])
    assert text.startswith(
        "no rank can continue: 0 waits for 2 at a.py:14, 2 waits for 0 at a.py:9\n"
    )
    assert "rank 1 calls send(), its call 1, at c.py:1, and has waited 0.2 s for" in text


def test_who_waits_for_one_that_computes_is_not_stuck():
    recv = message("recv", "a.py:1")
    assert stuck(states(wait(recv, 1), wait(recv, 2), None)) == []
    assert stuck(states(wait(recv, 1), wait(recv, 2), ())) == []


def test_who_waits_for_one_that_has_ended_is_stuck_unless_a_message_is_in_flight():
    said = states(
        wait(message("recv", "a.py:1"), 1), None, wait(collective(0, 3), 0, members=(0, 2, 5))
    )
    assert told(said, {1: State()}).text.startswith(
        "no rank can continue: 0 waits for 1 at a.py:1, rank 1 has ended\n"
    )
    assert told(said, {1: State()}).ranks == [0, 2, 5], "and who will come to the same collective"
    assert stuck(said, {1: State()}) == [0, 2]
    assert stuck(said, {1: State(sent={0: 1})}) == []


def test_a_message_in_flight_is_hope_for_its_receiver_alone():
    recv = message("recv", "a.py:1")
    said = states(wait(recv, 1), wait(recv, 0))
    assert stuck(said) == [0, 1]
    assert stuck({**said, 1: State(said[1].waits, sent={0: 5}, settled=True)}) == []
    assert stuck(
        {
            0: State(said[0].waits, taken={1: 5}, settled=True),
            1: State(said[1].waits, sent={0: 5}, settled=True),
        }
    ) == [0, 1]
    send = message("send", "a.py:1")
    full = states(wait(send, 1, incoming=False), wait(send, 0, incoming=False), sent={0: 1, 1: 1})
    assert stuck(full) == [0, 1], "both links are full of what nobody takes"
    assert stuck({**full, 1: replace(full[1], reads=frozenset({0}))}) == [], (
        "one is being taken; then the other may be"
    )
    assert stuck({0: full[0], 1: replace(full[1], reads=frozenset({0}), taken={0: 1})}) == [0, 1], (
        "it has been taken"
    )
    assert stuck({0: full[0]}, {1: replace(full[1], reads=frozenset({0}))}) == [0], (
        "who has ended takes nothing"
    )


def test_a_thread_that_does_not_wait_is_hope_but_not_for_a_call_that_another_is_in():
    recv = message("recv", "a.py:1")
    call = collective(7, 1)
    said = states(wait(recv, 1), wait(recv, 0))
    assert stuck({**said, 1: State(said[1].waits, settled=False)}) == []
    said = states(wait(call, 1), wait(call, 0))
    assert stuck({rank: State(state.waits, settled=False) for rank, state in said.items()}) == [
        0,
        1,
    ]


def test_any_thread_of_a_rank_may_help():
    recv = message("recv", "a.py:1")
    said = states(wait(recv, 1), (wait(recv, 0), wait(recv, 2)), None)
    assert stuck(said) == []
    assert stuck(states(wait(recv, 1), (wait(recv, 0), wait(recv, 2)), wait(recv, 1))) == [0, 1, 2]


def test_a_wait_for_the_own_worker_goes_on_with_it():
    call = collective(0, 4)
    said = states((wait(call, 1), wait(call)), wait(message("recv", "b.py:2"), 0))
    error, text, ranks = told(said)
    assert (error, ranks) == ("MismatchError", [0, 1, 2])
    assert stuck(states(wait(call), wait(message("recv", "b.py:2"), 0))) == [], (
        "the worker is at it"
    )


def test_a_rank_that_waits_for_itself():
    text = told(states(wait(message("recv", "a.py:3"), 0))).text
    assert text.startswith("no rank can continue: 0 waits for 0 at a.py:3")


def test_several_peers_in_the_same_call_have_come():
    call = collective(0, 2)
    assert stuck(states(wait(call, 1, 2), wait(call, 0, 2), wait(call, 0, 1))) == []
    assert stuck(states(wait(call, 1, 2), wait(call, 0, 2), None), {2: State()}) == [0, 1]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("verb", "reduce"),
        ("dtype", "<f8"),
        ("shape", (4,)),
        ("op", "max"),
        ("algorithm", "tree"),
        ("root", 1),
    ],
)
def test_one_call_with_two_signatures_is_a_mismatch_at_once(field, value):
    said = states(wait(collective(0, 5), 2), None, wait(collective(0, 5, **{field: value}), 0))
    error, text, ranks = deadlock.disagreement(said)
    assert (error, ranks) == ("MismatchError", [0, 1, 2]), (
        "rank 1 has not said yet that it waits, or comes later"
    )
    assert text.startswith(f"ranks disagree in {field}:\n  rank 0 calls all_reduce(")
    assert "its call 5, at all_reduce.py:5" in text
    assert (
        deadlock.disagreement(
            states(wait(collective(0, 5), 2), wait(collective(0, 6, **{field: value}), 0))
        )
        is None
    )


def test_two_groups_in_another_order_are_a_mismatch():
    error, text, _ = told(states(wait(collective(1, 1), 1), wait(collective(2, 1), 0)))
    assert error == "MismatchError"
    assert text.startswith("ranks disagree in group:\n")


def test_states_travel_and_nonsense_does_not():
    state = State(
        (wait(collective(1 << 63, 1), 1), wait(None, 2, members=())),
        {1: 4},
        {2: 5},
        True,
        "x.py:3",
        frozenset({2, 5}),
        frozenset({1}),
    )
    assert State.unpacked(wire.unpack(wire.pack(state.packed()))) == state
    for nonsense in (
        None,
        3,
        [],
        [[], {}, {}, True],
        [[[1, [], [], [], "", True, 0.1]], {}, {}, True, "", [], []],
        [[], [1], {}, True, "", [], []],
        [[[1, None, ["x"], [], "", True, 0.1]], {}, {}, True, "", [], []],
        [[], {}, {}, True, "", 3, []],
        [[], {}, {}, True, "", ["x"], []],
        [[], {}, {}, True, "", [], ["x"]],
    ):
        with pytest.raises((TypeError, ValueError)):
            State.unpacked(nonsense)


def test_the_table_says_who_is_late():
    said = states(wait(collective(0, 2), 1), State.waits, None)
    text = deadlock.table({0: said[0], 1: State(doing="train.py:8")}, {2: State()}, 4)
    assert text.splitlines()[1:] == [
        "  rank 1 waits for no rank, at train.py:8; late by 0.2 s",
        "  rank 2 has ended",
        "  rank 3 waits for no rank and does not answer",
    ]


# --- the arbiter
# -----------------------------------------------------------------------------------------------------


class Court:
    """An arbiter whose time is ours."""

    def __init__(self, monkeypatch):
        self.asked = []
        self.told = []
        self.now = 0.0
        monkeypatch.setattr(
            "minidist.comm.health.deadlock_arbiter.time.monotonic", lambda: self.now
        )
        self.arbiter = Arbiter(
            lambda ranks, number: self.asked.append((ranks, number)), self.told.append
        )

    def hear(self, said, number=0):
        for rank, state in said.items():
            self.arbiter.heard(rank, state, number)

    def tick(self):
        self.now += self.arbiter.due()
        self.arbiter.tick()

    def round(self, said):
        self.tick()
        self.hear(said, self.asked[-1][1])


RECV = message("recv", "a.py:1")


@pytest.fixture
def court(monkeypatch):
    return Court(monkeypatch)


def test_two_equal_rounds_are_a_deadlock(court):
    said = states(wait(RECV, 1), wait(RECV, 0))
    court.hear(said)
    assert not court.asked, "others may be about to say that they wait"
    court.round(said)
    assert not court.told
    court.round(said)
    assert [(verdict.error, verdict.ranks) for verdict in court.told] == [("DeadlockError", [0, 1])]
    court.hear(said)
    assert len(court.told) == 1
    assert court.arbiter.due() is None


@pytest.mark.parametrize(
    "change", [{"sent": {1: 1}}, {"taken": {1: 1}}, {"settled": False}, {"waits": ()}]
)
def test_what_moves_between_the_rounds_is_no_deadlock(court, change):
    said = states(wait(RECV, 1), wait(RECV, 0))
    court.hear(said)
    court.round(said)
    court.round({**said, 0: State(**{**vars(said[0]), **change})})
    assert not court.told
    if change != {"waits": ()}:
        court.hear(said)
        court.round(said)
        court.round(said)
        assert court.told, "it is looked at again"


def test_who_does_not_answer_is_asked_again_later(court):
    said = states(wait(RECV, 1), wait(RECV, 0))
    court.hear(said)
    court.tick()
    court.hear({0: said[0]}, 1)
    court.tick()
    assert court.arbiter.due() > 0
    court.round(said)
    court.round(said)
    assert court.told


def test_an_answer_to_an_old_question_is_news_at_most(court):
    said = states(wait(RECV, 1), wait(RECV, 0))
    court.hear(said)
    court.round(said)
    court.hear(said, 1)
    court.hear(said, 99)
    assert not court.told


def test_a_rank_that_ends_leaves_the_others_stuck(court):
    said = states(wait(RECV, 1), None)
    court.hear(said)
    assert court.arbiter.due() is None
    court.arbiter.left(1, State())
    court.round(said)
    court.round(said)
    assert "rank 1 has ended" in court.told[0].text


def test_another_wait_of_the_same_call_is_not_the_same_and_is_looked_at_again_at_once(court):
    """A rank that learns that its peer is gone waits on, now to hear why."""
    said, later = (states(wait(RECV, 1), wait(RECV, 0)) for _ in range(2))
    court.hear(said)
    court.round(said)
    court.round(later)
    assert not court.told
    assert court.arbiter.due() <= PAUSE
    court.round(later)
    assert court.told


@pytest.mark.parametrize("told", ["while it is asked", "afterwards"])
def test_a_state_that_is_told_is_looked_at_soon(court, told):
    """Between two hopeless waits a rank answers that it is in none; of the second it tells by
    itself."""
    said = states(wait(RECV, 1), wait(RECV, 0))
    court.hear(said)
    court.tick()
    court.hear({0: State(settled=True)}, court.asked[-1][1])
    if told == "while it is asked":
        court.hear({0: said[0]})
    court.hear({1: said[1]}, court.asked[-1][1])
    if told == "afterwards":
        assert court.arbiter.due() == RETRY
        court.hear({0: said[0]})
    assert court.arbiter.due() <= PAUSE
    court.round(said)
    court.round(said)
    assert court.told


def test_an_answer_that_comes_behind_the_last_word_says_nothing(court):
    """Else a rank that has gone would be asked for ever what it waits for."""
    said = states(wait(RECV, 1), wait(RECV, 2), wait(RECV, 1))
    court.hear({rank: said[rank] for rank in (0, 1)})
    court.arbiter.left(2, State())
    court.hear({2: said[2]}, 1)
    for _ in range(2):
        court.tick()
        assert court.asked[-1][0] == [0, 1]
        court.hear({rank: said[rank] for rank in (0, 1)}, court.asked[-1][1])
    assert "rank 2 has ended" in court.told[0].text


@pytest.mark.parametrize("rounds", [0, 1])
def test_who_ends_while_it_is_asked_is_not_waited_for(court, rounds):
    said = states(wait(RECV, 1), wait(RECV, 0))
    court.hear(said)
    for _ in range(rounds):
        court.round(said)
    court.tick()
    court.arbiter.left(1, State())
    assert court.arbiter.due() <= PAUSE
    court.round({0: said[0]})
    court.round({0: said[0]})
    assert "rank 1 has ended" in court.told[0].text


def test_packets_that_are_never_acknowledged_are_a_line_of_the_table():
    """Only between ranks that tell how they are: one that is lost has other words."""
    said = states(wait(collective(0, 3), 1), wait(collective(0, 3), 0))
    assert "packets" not in deadlock.table(said, {}, 2)
    said[0] = State(said[0].waits, resent=frozenset({1, 7}))
    last = deadlock.table(said, {}, 2).splitlines()[-1]
    assert last.startswith(
        "  packets are sent again and again and never acknowledged, from rank 0 to 1: "
    )
    assert "ip link set dev eth0 mtu 1200" in last
    assert State.unpacked(wire.unpack(wire.pack(said[0].packed()))) == said[0]
