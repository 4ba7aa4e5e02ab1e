"""Compute, exposed communication and waiting of recorded steps, to the millisecond."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from flights import VirtualJob, made

import minidist as md
from minidist.comm.group import Group
from minidist.observe.diagnose.flights import RankFlight, flights_of, read_flights
from minidist.observe.live.step_parts import last_to_arrive, mean, step_parts

MS = 1e-3


def approx(value: float) -> object:
    return pytest.approx(value, abs=1e-5)  # times of day have steps of 0.2 µs, `stood` is a float32


@pytest.mark.parametrize("size", [2, 3, 5])
def test_blocking_calls_wait_for_the_last_rank(size: int, tmp_path: Path) -> None:
    """Rank r computes 10 (r + 1) ms, then all reduce in 4 ms: the last waits for nobody."""
    job = VirtualJob(tmp_path, size)
    for step in range(3):
        for rank in range(size):
            job.step(rank, step, step)
            job.call(rank, step + 10 * MS * (rank + 1), step + 10 * MS * size + 4 * MS)
    parts = step_parts(read_flights(tmp_path))
    for rank in range(size):
        assert sorted(parts[rank]) == [0, 1]  # the third has not ended
        each = parts[rank][1]
        assert each.seconds == approx(1.0) and each.exposed == approx(4 * MS)
        assert each.waiting == approx(10 * MS * (size - 1 - rank))
        assert each.compute == approx(1.0 - each.exposed - each.waiting)
        assert each.sent == {0: 16} and each.stood == {0: approx(4 * MS)}
    assert last_to_arrive(read_flights(tmp_path)) == {
        step: (size - 1, approx(10 * MS)) for step in range(3)
    }


def test_a_started_call_counts_for_as_long_as_the_program_stood_still(tmp_path: Path) -> None:
    """The call runs for 50 ms: the other rank comes after 20. The program waits for the last 40: 10
    for the rank."""
    job = VirtualJob(tmp_path, 2)
    for rank, start in ((0, 0.1), (1, 0.12)):
        job.step(rank, 0, 0.0)
        with job.at(rank, start):
            number = made(
                job.flights[rank],
                0,
                1,
                "all_reduce",
                "ring",
                "sum",
                None,
                "<f4",
                (4,),
                "a.py:1",
                axis="dp",
                world_ranks=range(2),
            )
            job.flights[rank].begun(number)
        with job.at(rank, 0.15):
            job.flights[rank].ended(number, 64, 2)
            job.flights[rank].stood(number, 0.04 if rank == 0 else 0.0)
        job.step(rank, 1, 0.3)
    parts = step_parts(read_flights(tmp_path))
    assert parts[0][0].waiting == approx(0.01) and parts[0][0].exposed == approx(0.03)
    assert parts[1][0].waiting == parts[1][0].exposed == 0.0 and parts[1][0].compute == approx(0.3)


def test_a_receiver_waits_until_the_sender_begins(tmp_path: Path) -> None:
    job = VirtualJob(tmp_path, 3)
    for rank in (1, 2):
        job.step(rank, 0, 0.0)
    job.message(1, 0.5, 0.51, dst=2)
    with job.at(2, 0.2):
        number = job.flights[2].message(
            0, 1, "recv", "<f4", (4,), "pipe.py:7", axis="pp", world_ranks=range(3), src=1
        )
    with job.at(2, 0.6):
        job.flights[2].ended(number, stood=0.4)
    for rank in (1, 2):
        job.step(rank, 1, 1.0)
    parts = step_parts(read_flights(tmp_path))
    assert (
        parts[2][0].waiting == approx(0.3) and parts[2][0].exposed == approx(0.1) and parts[0] == {}
    )


def test_the_mean_of_steps(tmp_path: Path) -> None:
    assert mean([]) is None
    job = VirtualJob(tmp_path, 2)
    for step, late in enumerate((0.1, 0.3, 0.0)):
        for rank in range(2):
            job.step(rank, step, step)
            job.call(rank, step + late * rank, step + late)
    found = mean(step_parts(read_flights(tmp_path))[0].values())
    assert found is not None and found.waiting == approx(0.2) and found.sent == {0: 16}


def flights_of_ranks(work: Callable[[Group], None], size: int) -> list[RankFlight]:
    """The recorders of ranks that have run `work`, in threads."""

    def ran(world: Group) -> tuple[dict[str, object], list[dict[str, object]]]:
        work(world)
        world.barrier()
        return world.ledger.flight._header(), world.ledger.flight.entries()

    return flights_of(md.run(ran, size=size, transport="threads", limit=30))


def test_a_call_behind_computation_costs_no_time() -> None:
    """The program computes for 100 ms before it waits for its call, which lasts until rank 1 has
    come, too."""

    def work(world: Group) -> None:
        for step in range(3):
            world.tell_step(step)
            time.sleep(0.08 * world.rank)
            pending = world.start_all_reduce(np.ones(1000))
            time.sleep(0.1)
            pending.wait()
        world.tell_step(3)

    for mine in step_parts(flights_of_ranks(work, 2)).values():
        assert [each.compute > 0.099 for each in mine.values()] == [True] * 3


@pytest.mark.parametrize("started", [False, True])
def test_ranks_record_how_long_they_stood_still(started: bool) -> None:
    """Rank 1 is 100 ms late with each call; the ranks are threads, and their calls are blocking, or
    started."""

    def work(world: Group) -> None:
        for step in range(3):
            world.tell_step(step)
            if world.rank == 1:
                time.sleep(0.1)
            x = np.ones(1000)
            world.start_all_reduce(x).wait() if started else world.all_reduce(x)
        world.tell_step(3)

    parts = step_parts(flights_of_ranks(work, 3))
    assert all(each.compute > 0.09 for each in parts[1].values())
    waited = {rank: sum(each.waiting for each in parts[rank].values()) for rank in range(3)}
    assert min(waited[0], waited[2]) > max(0.1, waited[1])  # of 0.3 s; a busy machine takes a part
    for each in (each for mine in parts.values() for each in mine.values()):
        assert 0.0 <= each.waiting + each.exposed <= each.seconds + 1e-3 and each.sent[0] > 0
