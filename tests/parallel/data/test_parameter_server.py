"""The parameter server: synchronous it equals one process, asynchronous it equals the replay of its
records."""

import os
import signal
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import difference, global_batch, tiny

import minidist as md
from minidist.device import account
from minidist.errors import CommError, ConfigError, MismatchError, PeerLostError, TimeoutError
from minidist.nn import GPT
from minidist.observe.timeline import Timeline
from minidist.optim import SGD, Adam, AdamW, RMSProp
from minidist.parallel.data import server_keys
from minidist.parallel.data.async_parameter_server import AsyncParameterServer
from minidist.parallel.data.bounded_staleness import Clocks, Service, Update
from minidist.parallel.data.parameter_server import ParameterServer
from minidist.parallel.data.replay_updates import replay
from minidist.parallel.step.single import Single

BOUND = 1e-10
SLOW_STEPS = 2  # of a slow rank: long ones in a short test
OPTIMIZERS: dict[str, Any] = {"adamw": AdamW, "adam": Adam, "rmsprop": RMSProp, "sgd": SGD}


def new_model(changes: dict[str, Any], frozen: tuple[str, ...] = ()) -> GPT:
    model = GPT(tiny(**changes))
    model.initialize(3)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen
    return model


def train(
    world: Any, servers: int, changes: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Return what a rank holds after some steps; 0 servers is one process. Options: of the
    strategy, and those named here.

    slow: seconds that a rank sleeps before each of its first steps, or a function of the step that
    returns them.
    """
    options = {
        "steps": 3,
        "sequences": 5,
        "optimizer": "adamw",
        "clip": 0.5,
        "frozen": (),
        "slow": {},
        "dies": {},
        "step_options": {},
        **options,
    }
    steps, sequences, name, clip, frozen, slow, dies, step_options = (
        options.pop(key)
        for key in (
            "steps",
            "sequences",
            "optimizer",
            "clip",
            "frozen",
            "slow",
            "dies",
            "step_options",
        )
    )
    memory = account.current()
    model = new_model(changes, tuple(frozen))
    kind = AsyncParameterServer if options.pop("asynchronous", False) else ParameterServer
    strategy: Any = kind(model, world, servers=servers, **options) if servers else Single(model)
    optimizer = OPTIMIZERS[name](
        [p for p in strategy.parameters if getattr(p, "requires_grad", True)], 1e-2
    )
    memory.reset_peak()
    losses = []
    with world.ledger.during("step"):
        for step in range(steps):
            if dies.get(world.rank) == step:
                die(world)
            pause = slow.get(world.rank, 0.0) if step < SLOW_STEPS else 0.0
            time.sleep(pause(step) if callable(pause) else pause)
            losses.append(
                strategy.step(
                    global_batch(step, sequences, model.config),
                    optimizer,
                    clip=clip,
                    **step_options,
                )
            )
        if servers:
            strategy.finish()
    return {
        "held": [piece.name for piece in strategy.parameters if piece.data.size],
        "weights": strategy.state_dict() if servers else model.state_dict(),
        "losses": losses,
        "sent": world.ledger.sent_bytes("step"),
        "messages": world.ledger.messages("step"),
        "memory": memory.snapshot(),
        "record": [list(update) for update in getattr(strategy, "record", [])],
        "lost": {worker: str(error) for worker, error in getattr(strategy, "lost", {}).items()},
    }


def die(world: Any) -> None:
    """As a thread dies, or a process is killed."""
    if world.transport.name.startswith("threads"):
        raise ArithmeticError("on purpose")
    os.kill(os.getpid(), signal.SIGKILL)


def run(
    workers: int,
    servers: int,
    changes: dict[str, Any] | None = None,
    *,
    transport: str = "threads",
    **options: Any,
) -> list[dict[str, Any]]:
    """`train` on that many ranks."""
    return md.run(
        train, servers, changes or {}, options, size=workers + servers, transport=transport
    )


# --------------------------------------------------------------------------- parallel equals serial


def check_equal(
    workers: int,
    servers: int,
    changes: dict[str, Any] | None = None,
    *,
    transport: str = "threads",
    **options: Any,
) -> list[dict[str, Any]]:
    """Synchronous ranks equal one process: each key is on one server, all ranks tell all weights,
    the same bits."""
    serial = run(1, 0, changes, **{**options, "step_options": {}})[0]
    ranks = run(workers, servers, changes, transport=transport, **options)
    assert difference(ranks[0]["weights"], serial["weights"]) < BOUND
    np.testing.assert_allclose(ranks[0]["losses"], serial["losses"], rtol=1e-12)
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert rank["weights"].keys() == serial["weights"].keys()
        assert all(
            np.array_equal(ranks[0]["weights"][name], array)
            for name, array in rank["weights"].items()
        )
    held = [name for rank in ranks[workers:] for name in rank["held"]]
    frozen = set(options.get("frozen", ()))
    assert sorted(held) == sorted(ranks[0]["weights"].keys() - frozen)  # each key is on one server
    return ranks


@pytest.mark.sampled
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (3, 2)])
def test_equals_one_process_after_twenty_steps(workers: int, servers: int) -> None:
    check_equal(workers, servers, steps=20, sequences=9)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "transport", ["threads-unbuffered", "tcp", pytest.param("mpi", marks=pytest.mark.soak)]
)
def test_same_bits_on_every_transport(transport: str) -> None:
    over_threads = run(2, 2)
    ranks = check_equal(2, 2, transport=transport)
    for name, array in over_threads[0]["weights"].items():
        assert np.array_equal(array, ranks[0]["weights"][name])


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads", "threads-unbuffered", "tcp", "shm", "mpi"])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_any_numbers_after_twenty_steps(workers: int, servers: int, transport: str) -> None:
    check_equal(workers, servers, transport=transport, steps=20, sequences=9)


any_job = given(
    workers=st.integers(1, 5),
    servers=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 9),
            "optimizer": st.sampled_from(list(OPTIMIZERS)),
            "clip": st.sampled_from([None, 0.1]),
            "frozen": st.sampled_from([(), ("tokens.weight", "blocks.0.mlp.up.bias")]),
            "changes": st.fixed_dictionaries({"tied": st.booleans(), "layers": st.just(1)}),
            "step_options": st.fixed_dictionaries({"accumulate": st.integers(1, 3)}),
        }
    ),
)


@settings(max_examples=3)
@any_job
def test_any_job(workers: int, servers: int, options: dict[str, Any]) -> None:
    """Uneven parts, workers without a row, accumulation, tied and frozen weights."""
    check_equal(workers, servers, steps=2, **options)


@pytest.mark.soak
@settings(max_examples=200)
@any_job
def test_very_many_jobs(workers: int, servers: int, options: dict[str, Any]) -> None:
    """The same, more often."""
    check_equal(workers, servers, steps=2, **options)


def test_float32_stays_close() -> None:
    serial, ranks = (
        run(workers, servers, {"dtype": "float32"}, optimizer="sgd")
        for workers, servers in ((1, 0), (3, 2))
    )
    # some hundred roundings of 6e-8
    assert difference(ranks[0]["weights"], serial[0]["weights"]) < 1e-5


def pushed_twice(right: Any, self: Any, batch: Any, accumulate: int) -> float:
    """Servers have the double of each gradient."""
    loss: float = right(self, batch, accumulate)
    for shard in self.shards:
        for vector in shard.gradients:
            vector *= 2
    return loss


def first_worker_only(right: Any, self: Any) -> None:
    """What the other workers send is received and not added."""
    for total, buffer in zip(self.shards[0].gradients, self._buffers, strict=True):
        self.group.recv(0, out=total)
        for worker in range(1, self.workers):
            self.group.recv(worker, out=buffer)


def pulled_from_one_server(right: Any, self: Any) -> None:
    """The keys of the second server stay as they were."""
    before = [vector.copy() for vector in self.shards[1].weights]
    right(self)
    for vector, old in zip(self.shards[1].weights, before, strict=True):
        vector[...] = old


BUGS = [
    Bug(
        "averages twice",
        ParameterServer,
        "forward",
        lambda right, self, part, divisor: (
            self.loss(part, divisor * 2) if len(part.inputs) else None
        ),
    ),
    Bug("pushes twice", ParameterServer, "gradients", pushed_twice),
    Bug("forgets a worker", ParameterServer, "collect", first_worker_only),
    Bug("pulls from one server", ParameterServer, "pull", pulled_from_one_server),
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check_equal, 2, 2, optimizer="sgd", clip=None), monkeypatch)


# ------------------------------------------------------------- asynchronous runs equal their replay


def check_replay(
    workers: int,
    servers: int,
    changes: dict[str, Any] | None = None,
    *,
    transport: str = "threads",
    steps: int = 8,
    sequences: int = 5,
    optimizer: str = "adam",
    clip: float | None = 0.5,
    **options: Any,
) -> tuple[list[dict[str, Any]], list[list[Update]]]:
    """The weights of an asynchronous run are those of its records' replay; returns the ranks, and
    the records."""
    ranks = run(
        workers,
        servers,
        changes,
        transport=transport,
        steps=steps,
        sequences=sequences,
        optimizer=optimizer,
        clip=clip,
        asynchronous=True,
        **options,
    )
    records = [
        [Update(worker, step, tuple(versions), lr) for worker, step, versions, lr in rank["record"]]
        for rank in ranks[workers:]
    ]
    model = new_model(changes or {})
    replay(
        model,
        records,
        lambda step: global_batch(step, sequences, model.config),
        lambda pieces: OPTIMIZERS[optimizer](pieces, 1e-2),
        workers=workers,
        clip=clip,
    )
    again = model.state_dict()
    for rank in filter(None, ranks):
        assert rank["weights"].keys() == again.keys()
        for name, array in rank["weights"].items():
            np.testing.assert_array_equal(array, again[name], err_msg=name)
    return ranks, records


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("workers", "servers", "transport", "optimizer"),
    [
        (1, 1, "threads", "sgd"),
        (3, 1, "threads", "rmsprop"),
        (2, 2, "tcp", "adam"),
        pytest.param(2, 1, "mpi", "adamw", marks=pytest.mark.soak),
    ],
)
def test_equals_the_replay_of_its_records(
    workers: int, servers: int, transport: str, optimizer: str
) -> None:
    ranks, records = check_replay(workers, servers, transport=transport, optimizer=optimizer)
    for record in records:
        assert sorted(update[:2] for update in record) == [
            (worker, step) for worker in range(workers) for step in range(8)
        ]
    assert all(rank["losses"][0] > 0 for rank in ranks[:workers])


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["threads", "threads-unbuffered", "tcp", "shm", "mpi"])
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_numbers_equal_their_replay(workers: int, servers: int, transport: str) -> None:
    check_replay(workers, servers, transport=transport, steps=20, slow={0: 0.002})


@pytest.mark.soak
def test_the_replay_test_sees_a_wrong_record() -> None:
    _, records = check_replay(2, 1, steps=5, slow={1: 0.004}, staleness=None)
    model = new_model({})

    def again(record: list[Update]) -> dict[str, np.ndarray]:
        copy = new_model({})
        replay(
            copy,
            [record],
            lambda step: global_batch(step, 5, tiny()),
            lambda pieces: Adam(pieces, 1e-2),
            workers=2,
            clip=0.5,
        )
        return copy.state_dict()

    right = again(records[0])
    assert any(update.versions[0] for update in records[0])
    for wrong in (
        [update._replace(versions=(0,)) for update in records[0]],
        [update._replace(worker=0) for update in records[0]],
        records[0][:-1],
    ):
        assert not difference(again(wrong), right) < 1e-6
    with pytest.raises(CommError, match="that it never makes"):
        again([records[0][0]._replace(versions=(3,))])
    assert model.state_dict().keys() == right.keys()


# -------------------------------------------------------------------------------- bounded staleness


def ahead(record: list[Update], workers: int, steps: int) -> int:
    """The most steps that a worker, still at work, was ahead of the slowest when it began a step,
    by this record."""
    done = [0] * workers
    most = 0
    for update in record:
        running = [other for other in range(workers) if done[other] < steps]
        most = max(most, update.step - min(done[other] for other in running))
        done[update.worker] += 1
    return most


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("staleness", [0, 2, None])
def test_a_straggler_holds_the_others_up_no_more_than_it_must(
    staleness: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 takes its first steps when the others have made all that they may before; and then
    some time, in which they could make more."""
    steps = 8
    done = Counter[int]()
    changed = threading.Condition()
    update = Service._update
    ahead_of = steps if staleness is None else staleness + 1

    def counted(self: Service, made: Update, *args: Any) -> None:
        update(self, made, *args)
        with changed:
            done[made.worker] += 1
            changed.notify_all()

    def late(step: int) -> float:
        with changed:
            assert changed.wait_for(
                lambda: min(done[0], done[2]) >= min(step + ahead_of, steps), 20
            ), done
        return 0.1

    monkeypatch.setattr(Service, "_update", counted)
    _, (record,) = check_replay(3, 1, steps=steps, slow={1: late}, staleness=staleness)
    # the bound is kept, and used
    assert ahead(record, 3, steps) == (steps - 1 if staleness is None else staleness)


def test_clocks() -> None:
    clocks = Clocks(2, staleness=1, limit=0.05)
    for worker in (0, 1):
        clocks.wait_turn(worker)
    clocks.tick(0)
    clocks.wait_turn(0)
    clocks.tick(0)
    with pytest.raises(
        TimeoutError, match="worker 0, 2 steps done, waited 0.05 s for worker 1, 0 done"
    ):
        clocks.wait_turn(0)
    clocks.limit = 10.0
    waiting = threading.Thread(target=clocks.wait_turn, args=(0,))
    waiting.start()
    clocks.leave(1)  # lost, or done: nobody waits for it
    waiting.join(10.0)
    assert not waiting.is_alive()
    clocks.leave(0)
    clocks.wait_end(0)
    clocks.fail(ArithmeticError("on purpose"))
    with pytest.raises(CommError, match="on purpose"):
        clocks.wait_turn(0)


# ----------------------------------------------------------------------------------------- the lost


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("transport", ["tcp", "threads"])
def test_a_lost_worker_slows_nobody(transport: str) -> None:
    """Although the bound would have the others wait for it."""
    ranks, records = check_replay(3, 2, transport=transport, steps=8, dies={1: 3}, staleness=1)
    assert ranks[1] is None
    for rank, record in zip(ranks[3:], records, strict=True):
        assert [sum(update.worker == worker for update in record) for worker in range(3)] == [
            8,
            3,
            8,
        ]
        assert rank["lost"].keys() == {1} and "rank 1" in rank["lost"][1]
        assert ("ArithmeticError" if transport == "threads" else "SIGKILL") in rank["lost"][1]
    assert np.isfinite(ranks[0]["losses"]).all() and len(ranks[0]["losses"]) == 8


@pytest.mark.sampled
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("transport", ["threads", "shm"])
def test_a_lost_server_is_named(transport: str, asynchronous: bool, tmp_path: Any) -> None:
    def job(world: Any) -> None:
        try:
            kind = AsyncParameterServer if asynchronous else ParameterServer
            strategy = kind(new_model({}), world, servers=2)
            optimizer = Adam(strategy.parameters, 1e-2)
            if world.rank == 3:
                if asynchronous:
                    world.recv(0), die(world)
                strategy.step(global_batch(0, 4, tiny()), optimizer)
                die(world)
            for step in range(1000):
                strategy.step(global_batch(step, 4, tiny()), optimizer)
        except PeerLostError as error:
            (tmp_path / str(world.rank)).write_text(f"{error.world_rank} {error}")
            raise

    with pytest.raises((ArithmeticError, PeerLostError), match="rank 3"):
        md.run(job, size=4, transport=transport)
    for worker in (0, 1):
        text = (tmp_path / str(worker)).read_text()
        assert text.startswith("3 parameter server 1 of 2 is lost, and its keys with it: rank 3"), (
            text
        )


def test_without_any_worker_the_server_ends() -> None:
    with pytest.raises(
        PeerLostError,
        match="all 2 workers are lost, worker [01] first: rank [01] failed with Arith",
    ):
        run(2, 1, dies={0: 1, 1: 1}, asynchronous=True, steps=3)


def test_a_lost_worker_ends_a_synchronous_job() -> None:
    with pytest.raises(ArithmeticError, match="rank 1"):
        run(2, 1, dies={1: 1})


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (4, 1), (2, 3), (7, 2)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_bytes_and_messages_are_the_formula(workers: int, servers: int, asynchronous: bool) -> None:
    steps = 2
    ranks = run(workers, servers, steps=steps, sequences=7, asynchronous=asynchronous)
    nbytes = sum(array.nbytes for array in ranks[0]["weights"].values())
    pulls = steps + asynchronous  # the last weights, once more
    for rank in ranks[:workers]:
        assert rank["sent"]["world"] == {"send": steps * nbytes}
        assert rank["messages"]["world"] == {"send": steps * servers}
    for rank in ranks[workers:]:
        own = sum(rank["weights"][name].nbytes for name in rank["held"])
        assert rank["sent"]["world"] == {"send": pulls * workers * own}
        assert rank["messages"]["world"] == {"send": pulls * workers}
    assert (
        sum(rank["sent"]["world"]["send"] for rank in ranks) == (steps + pulls) * workers * nbytes
    )
    for number, rank in enumerate(ranks):
        control = sum(rank["sent"]["control"].values())
        if not asynchronous:
            assert control == steps * 8 * (
                len(ranks) - 1 + (servers - 1 if number >= workers else 0)
            )
        else:
            assert control == 8 * (
                workers * 2 * (steps + 1)
                if number >= workers
                else servers * (steps * (5 + servers) + 1)
            )


@pytest.mark.sampled
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("servers", [1, 3])
def test_memory_by_role(servers: int, asynchronous: bool) -> None:
    workers = 3
    ranks = run(
        workers,
        servers,
        {"dtype": "float32", "width": 32, "vocabulary": 50},
        optimizer="adam",
        asynchronous=asynchronous,
    )
    nbytes = sum(array.nbytes for array in ranks[0]["weights"].values())
    for rank in ranks[:workers]:
        assert [
            rank["memory"][category]["now"] for category in ("parameters", "gradients", "optimizer")
        ] == [nbytes, nbytes, 0]
    for rank in ranks[workers:]:
        own = sum(rank["weights"][name].nbytes for name in rank["held"])
        memory = rank["memory"]
        assert own <= nbytes / servers + max(array.nbytes for array in ranks[0]["weights"].values())
        assert memory["gradients"]["now"] == own and memory["optimizer"]["now"] == 2 * own
        # one element a freed key
        assert own <= memory["parameters"]["now"] <= own + 64 * len(ranks[0]["weights"])
        rooms = (workers - 1 if asynchronous else 1) * own
        assert rooms <= memory["communication"]["now"] <= rooms + 512  # and what says whose
        assert memory["activations"]["peak"] == 0


# --------------------------------------------------------------------------------------------- keys


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=12), servers=st.integers(1, 12))
def test_keys_are_divided_by_size(sizes: list[int], servers: int) -> None:
    if servers > len(sizes):
        with pytest.raises(ConfigError, match=f"use 1 to {len(sizes)} servers"):
            server_keys.assign(sizes, servers)
        return
    shares = server_keys.assign(sizes, servers)
    assert sorted(key for share in shares for key in share) == list(range(len(sizes))) and all(
        shares
    )
    assert all(share == sorted(share) for share in shares)
    loads = [sum(sizes[key] for key in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes)


def test_the_next_key_goes_where_least_is() -> None:
    # as server_keys.py draws it
    assert server_keys.assign([80, 80, 32, 32, 24, 8], 2) == [[0, 2, 4], [1, 3, 5]]
    # by size, not by number
    assert server_keys.assign([10, 10, 100, 10, 10], 2) == [[2], [0, 1, 3, 4]]


# ----------------------------------------------------------------------------- records and mistakes


def test_the_timeline_tells_how_stale_each_update_was() -> None:
    ahead = threading.Event()  # worker 0 is: by three steps at least, and worker 1 by one at most

    def job(world: Any) -> list[tuple[int, int]]:
        model = new_model({})
        timeline = Timeline(world.rank)
        strategy = AsyncParameterServer(model, world, staleness=None, recorder=timeline)
        optimizer = SGD(strategy.parameters, 1e-2)
        for step in range(4):
            assert world.rank != 1 or step != 1 or ahead.wait(20)
            strategy.step(global_batch(step, 4, tiny()), optimizer)
            if world.rank == 0 and step == 2:
                ahead.set()
        strategy.finish()
        return [
            (span.details["worker"], span.details["stale"])
            for span in timeline.spans
            if span.name == "update"
        ]

    updates = md.run(job, size=3)[2]
    assert len(updates) == 8 and updates[0][1] == 0
    # the other worker was there meanwhile
    assert max(late for worker, late in updates if worker == 1) >= 2


def test_mistakes_are_refused() -> None:
    def job(world: Any) -> None:
        with pytest.raises(
            ConfigError, match="2 parameter servers in a job of 2 ranks leave no worker"
        ):
            ParameterServer(new_model({}), world, servers=2)
        with pytest.raises(ConfigError, match="staleness -1"):
            AsyncParameterServer(new_model({}), world, staleness=-1)
        model = GPT(tiny())
        model.initialize(world.rank)
        with pytest.raises(MismatchError, match=r"ranks \[1\] differ"):
            ParameterServer(model, world)

    md.run(job, size=2)
