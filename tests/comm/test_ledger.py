"""The ledger: what is counted under which phase, axis, verb and algorithm; and the events."""

import threading

import numpy as np
from helpers import run

from minidist.comm.ledger import Event, Ledger

KIB = np.ones(128)  # 1,024 bytes


def test_counts_by_phase_axis_verb_and_algorithm():
    def ranks(world):
        ledger = world.ledger
        world.broadcast(KIB, algorithm="naive")
        with ledger.during("step"):
            pair = world.split(world.rank // 2, axis="dp")
            pair.all_reduce(KIB, algorithm="ring")
            pair.all_reduce(KIB, algorithm="ring")
            with ledger.control():
                pair.all_reduce(KIB[:1], algorithm="direct")
            world.send(KIB, dst=(world.rank + 1) % 4)
        world.recv(src=(world.rank - 1) % 4)
        return (
            ledger.sent_bytes("setup"),
            ledger.sent_bytes("step"),
            ledger.messages("step"),
            ledger.sent_bytes(),
            {(row["verb"], row["algorithm"]) for row in ledger.rows()},
        )

    for rank, (setup, step, messages, everything, pairs) in enumerate(run(ranks, size=4)):
        assert setup == {"world": {"broadcast": 3 * 1024 if rank == 0 else 0}}
        split = 3 * 32  # this is what a split sends: three blocks of four integers
        assert step == {
            "dp": {"all_reduce": 2 * 1024},
            "world": {"send": 1024},
            "control": {"all_gather": split, "all_reduce": 8},
        }
        assert messages == {
            "dp": {"all_reduce": 4},
            "world": {"send": 1},
            "control": {"all_gather": 3, "all_reduce": 1},
        }
        assert everything["world"] == {"broadcast": setup["world"]["broadcast"], "send": 1024}
        assert pairs == {
            ("broadcast", "naive"),
            ("all_gather", "ring"),
            ("all_reduce", "ring"),
            ("all_reduce", "direct"),
            ("send", "direct"),
        }


def test_the_verb_counted_is_the_one_the_user_called():
    def ranks(world):
        for algorithm in ("naive", "tree", "ring"):
            world.all_reduce(KIB, algorithm=algorithm)
        world.all_gather(KIB, algorithm="naive")
        return world.ledger.sent_bytes()

    assert all(
        set(counted["world"]) == {"all_reduce", "all_gather"} for counted in run(ranks, size=3)
    )


def test_a_started_call_counts_where_it_was_started():
    def ranks(world):
        with world.ledger.during("step"), world.ledger.control():
            pending = world.start_all_reduce(KIB, algorithm="ring")
        with world.ledger.during("later"):
            pending.wait()
        return world.ledger.sent_bytes("step"), world.ledger.sent_bytes("later")

    assert run(ranks, size=2) == [({"control": {"all_reduce": 1024}}, {})] * 2


def test_control_holds_for_the_thread_that_said_it():
    ledger = Ledger()
    seen = []
    with ledger.control():
        thread = threading.Thread(target=lambda: seen.append(ledger.in_control))
        thread.start()
        thread.join()
        with ledger.control():
            pass
        assert ledger.in_control
    assert not ledger.in_control
    assert seen == [False]


def test_phases_nest():
    ledger = Ledger()
    with ledger.during("outer"):
        with ledger.during("inner"):
            assert ledger.phase == "inner"
        assert ledger.phase == "outer"
    assert ledger.phase == "setup"


def test_a_thread_aside_has_a_phase_of_its_own():
    ledger = Ledger()
    seen = []
    with ledger.during("step"):
        with ledger.aside("save"):
            thread = threading.Thread(target=lambda: seen.append(ledger.phase))
            thread.start()
            thread.join()
            assert ledger.phase == "save"
            with ledger.during("later"):
                assert ledger.phase == "save"
        assert ledger.phase == "step"
    assert ledger.phase == "setup"
    assert seen == ["step"]


def test_nothing_is_lost_between_threads():
    ledger = Ledger()

    def count():
        for _ in range(2000):
            ledger.record("dp", "all_reduce", "ring", 3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.sent_bytes() == {"dp": {"all_reduce": 24000}}
    assert ledger.messages() == {"dp": {"all_reduce": 8000}}
    ledger.clear()
    assert ledger.sent_bytes() == {}


def test_events_of_messages_and_calls():
    def ranks(world):
        events: list[Event] = []
        unsubscribe = world.ledger.subscribe(events.append)
        world.all_reduce(KIB, algorithm="ring")
        world.start_all_reduce(KIB, algorithm="ring").wait()
        world.exchange(KIB, dst=1 - world.rank, src=1 - world.rank)
        unsubscribe()
        world.barrier()
        return [
            (
                event.kind,
                event.name,
                event.start <= event.stop,
                event.world_rank,
                event.thread,
                event.details,
            )
            for event in events
        ]

    for rank, events in enumerate(run(ranks, size=2)):
        kinds = [(kind, name) for kind, name, *_ in events]
        assert kinds == [*[("message", "all_reduce")] * 2, ("call", "all_reduce")] * 2 + [
            ("message", "exchange")
        ]
        assert all(ordered and world_rank == rank for _, _, ordered, world_rank, _, _ in events)
        assert [thread for *_, thread, _ in events] == [
            *[f"rank {rank}"] * 3,
            *[f"rank {rank} world"] * 3,
            f"rank {rank}",
        ]
        message = events[0][-1]
        call = events[2][-1]
        exchange = events[-1][-1]
        assert message == {
            "axis": "world",
            "verb": "all_reduce",
            "algorithm": "ring",
            "src": rank,
            "dst": 1 - rank,
            "nbytes": 512,
            "label": f"c{1 - rank}",
            "step": 0,
            "chunk": 1 - rank,
        }
        where = call.pop("where")
        assert call == {
            "axis": "world",
            "verb": "all_reduce",
            "algorithm": "ring",
            "op": "sum",
            "nbytes": 1024,
            "size": 2,
            "sequence": 1,
        }
        assert "test_ledger.py:" in where
        assert (exchange["src"], exchange["dst"], exchange["nbytes"]) == (rank, 1 - rank, 1024)


def test_watchers_get_waits_and_what_tells_calls_apart():
    def ranks(world):
        events = []
        others = []
        leave = world.ledger.subscribe(events.append, waits=True)
        stay = world.ledger.subscribe(others.append)
        pending = world.start_all_reduce(KIB, algorithm="ring")
        pending.wait()
        leave()
        world.start_all_reduce(KIB, algorithm="ring").wait()
        stay()
        world.barrier()
        return [event for event in events if event.kind != "message"], [
            event.kind for event in others
        ]

    for (call, wait), others in run(ranks, size=2):
        assert (call.kind, wait.kind) == ("call", "wait") and "wait" not in others
        assert (call.details["group"], call.details["sequence"]) == (
            wait.details["group"],
            wait.details["sequence"],
        )
        assert call.details["queued"] >= 0 and call.details["messages"] == 2
        assert (
            wait.start <= wait.stop
            and call.stop <= wait.stop
            and "test_ledger.py:" in wait.details["where"]
        )


def test_watchers_get_the_wait_for_a_call_that_has_ended_too():
    def waits(world):
        events = []
        world.ledger.subscribe(events.append, waits=True)
        pending = world.start_all_reduce(KIB, algorithm="ring")
        pending.wait()
        pending.wait()  # the call has ended
        return [event.kind for event in events].count("wait")

    assert run(waits, size=2) == [2, 2]


def test_receives_are_told_to_those_who_ask_and_match_their_sends():
    def ranks(world):
        events = []
        others = []
        world.ledger.subscribe(events.append, receives=True)
        world.ledger.subscribe(others.append)
        world.all_reduce(KIB, algorithm="ring")
        world.all_gather(KIB, algorithm="ring")
        # its ranks compare headers first, which carry nothing
        world.broadcast(KIB, root=0, algorithm="naive")
        world.gather(KIB, root=1, algorithm="naive")
        pending = [world.start_send(KIB, dst=1 - world.rank) for _ in range(2)]
        for _ in range(2):
            world.recv(src=1 - world.rank)
        for one in pending:
            one.wait()
        world.exchange(KIB, dst=1 - world.rank, src=1 - world.rank)
        world.exchange(KIB, dst=world.rank, src=world.rank)  # to itself: nothing leaves it
        return events, [event.kind for event in others]

    told = run(ranks, size=2)
    assert all("receive" not in kinds for _, kinds in told)
    ends = [
        {
            (
                event.details["src"],
                event.details["dst"],
                event.details["message"],
                event.details["nbytes"],
            )
            for events, _ in told
            for event in events
            if event.kind == kind
        }
        for kind in ("message", "receive")
    ]
    assert ends[0] == ends[1] and len(ends[0]) == 2 * (2 + 1 + 2 + 1) + 2


def test_bytes_are_counted_by_receiver():
    def ranks(world):
        with world.ledger.during("step"):
            world.all_reduce(KIB, algorithm="ring")
            with world.ledger.control():
                world.exchange(KIB, dst=(world.rank + 1) % 3, src=(world.rank + 2) % 3)
            world.broadcast(KIB if world.rank == 2 else None, root=2, algorithm="naive")
        world.barrier()
        return world.ledger.sent_to("step"), world.ledger.sent_to(), world.ledger.sent_bytes("step")

    for rank, (sent, of_all, by_axis) in enumerate(run(ranks, size=3)):
        assert {axis: sum(axes.get(axis, 0) for axes in sent.values()) for axis in by_axis} == {
            axis: sum(verbs.values()) for axis, verbs in by_axis.items()
        }
        assert rank not in of_all and sent[(rank + 1) % 3]["control"] == KIB.nbytes
        assert (rank == 2) == ({KIB.nbytes} <= {axes.get("world", 0) for axes in sent.values()})
    ledger = Ledger()
    ledger.record("dp", "send", "direct", 8, to={1: 8})
    ledger.clear()
    assert ledger.sent_to() == {}


def test_a_phase_that_begins_anew_loses_no_count():
    ledger = Ledger()
    for nbytes in (8, 16, 32):
        ledger.record("dp", "send", "direct", nbytes, phase="step", to={1: nbytes})
        if nbytes < 32:
            ledger.set_aside("step", "before")
    assert ledger.sent_bytes("step") == {"dp": {"send": 32}}
    assert ledger.sent_bytes("before") == {"dp": {"send": 24}}
    assert ledger.messages() == {"dp": {"send": 3}}
    assert (ledger.sent_to("step"), ledger.sent_to()) == ({1: {"dp": 32}}, {1: {"dp": 56}})


def test_two_subscribers_and_only_one_leaves():
    ledger = Ledger()
    first = []
    second = []
    leave = ledger.subscribe(first.append)
    ledger.subscribe(second.append)
    event = Event("call", "barrier", 0.0, 1.0, 0, "main")
    ledger.publish(event)
    leave()
    ledger.publish(event)
    assert (len(first), len(second)) == (1, 2)
