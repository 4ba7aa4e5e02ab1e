"""Parameter servers on another device than the workers, or in a wider dtype: who holds what, and
the same training."""

from typing import Any

import fake_gpu
import numpy as np
import pytest
from planted import Bug, check_caught
from training import difference, global_batch, tiny, train

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.device.backend import device_of
from minidist.errors import PlanError
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.data import parameter_server
from minidist.parallel.data.server_keys import Shard
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.replicas import weights_digest
from minidist.parallel.step.step import part_of

SERVED = {"strategy": "parameter-server", "servers": 2}
NARROW = {"layers": 1, "dtype": "float32"}


# ----------------------------------------------------------------------------------- another device


def held_where(world: Any, device: str, server_device: str, asynchronous: bool) -> dict[str, Any]:
    """Two steps; and on which devices a rank has its weights, gradients and state."""
    config = tiny(layers=1)
    plan = Plan(
        dp=world.size, **SERVED, server_device=server_device, asynchronous=asynchronous, staleness=0
    )
    trainer = Trainer(plan, config, world, lr=1e-2, seed=3, device=device)
    losses = [trainer.step(global_batch(step, 5, config)) for step in range(2)]
    weights = trainer.state_dict()
    served: Any = trainer.strategy
    arrays = [
        array
        for slot in trainer.optimizer.slots
        for array in (slot.weights.data, *slot.state.values())
    ]
    arrays += [vector for shard in served.shards for vector in (*shard.weights, *shard.gradients)]
    trainer.close()
    return {
        "losses": losses,
        "weights": weights,
        "serves": served.serves,
        "devices": {*map(device_of, arrays)},
        "sent": world.ledger.sent_bytes("step"),
    }


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("device", "server_device"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "same")]
)
def test_workers_and_servers_on_different_devices(
    device: str, server_device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N3:37: GPU workers and CPU servers. The weights of one process, and the bytes that they send
    on one device."""
    config = tiny(layers=1)
    serial = md.run(lambda world: train(world, config=config, clip=1.0), size=1)[0]
    on_cpu = md.run(held_where, "cpu", "same", False, size=5)
    fake_gpu.install(monkeypatch)
    ranks = md.run(held_where, device, server_device, False, size=5)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert np.max(np.abs(np.subtract(ranks[0]["losses"], serial["losses"]))) < 1e-10
    for rank, there in zip(ranks, on_cpu, strict=True):
        assert rank["devices"] == {
            device if server_device == "same" or not rank["serves"] else server_device
        }
        assert rank["sent"] == there["sent"]
        assert all(
            np.array_equal(ranks[0]["weights"][name], array)
            for name, array in rank["weights"].items()
        )


def test_asynchronous_workers_of_a_server_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """They end with one another's weights."""
    fake_gpu.install(monkeypatch)
    ranks = md.run(held_where, "cuda", "cpu", True, size=4)
    assert [rank["devices"] for rank in ranks] == [{"cuda"}, {"cuda"}, {"cpu"}, {"cpu"}]
    assert len({weights_digest(rank["weights"]) for rank in ranks}) == 1


# ------------------------------------------------------------------------------------ another dtype


def served(
    world: Any, changes: dict[str, Any], plan: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    config = tiny(**changes)
    trainer = Trainer(
        Plan(dp=world.size, **{**SERVED, **plan}),
        config,
        world,
        **{"lr": 1e-2, "seed": 3, **options},
    )
    for step in range(3):
        trainer.step(global_batch(step, 5, config))
    result = {
        "weights": trainer.state_dict(),
        "digest": trainer.weights_sha256(),
        "sent": world.ledger.sent_bytes("step").get("dp", {}),
        "optimizer": {slot.weights.data.dtype.name for slot in trainer.optimizer.slots},
        "model": {p.dtype.name for p in trainer.model.parameters()},
    }
    trainer.close()
    return result


def in_one_process(workers: int, changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """Gradients of each worker's rows in float32, from rounded weights; sums and Adam in
    float64."""
    model = GPT(tiny(**changes))
    model.initialize(3)
    masters = [Parameter(p.data.astype(np.float64), name=p.name) for p in model.parameters()]
    optimizer = AdamW(masters, 1e-2)
    for step in range(3):
        batch = global_batch(step, 5, model.config)
        totals = [np.zeros(p.shape) for p in masters]
        for rank in range(workers):
            part = part_of(batch, size=workers, rank=rank)
            model.zero_grad()
            model.loss(part.inputs, part.targets, divisor=batch[1].size).backward()
            for total, p in zip(totals, model.parameters(), strict=True):
                total += p.grad
        for master, total in zip(masters, totals, strict=True):
            master.grad = total
        optimizer.step()
        for master, p in zip(masters, model.parameters(), strict=True):
            p.data[...] = master.data
    return {p.name: p.data for p in masters}


@pytest.mark.sampled
@pytest.mark.parametrize("workers", [1, 3])
def test_servers_in_float64_equal_one_process_that_does_the_same(workers: int) -> None:
    """To the bit; what travels stays float32, and every rank tells the servers' own weights."""
    ranks = md.run(served, NARROW, {"server_dtype": "float64"}, {"clip": None}, size=workers + 2)
    replay = in_one_process(workers, NARROW)
    for rank in ranks:
        assert all(np.array_equal(rank["weights"][name], array) for name, array in replay.items())
        assert rank["weights"].keys() == replay.keys() and rank["model"] == {"float32"}
        assert rank["optimizer"] == {"float64"}
    without = md.run(served, NARROW, {}, {"clip": None}, size=workers + 2)
    assert [rank["sent"] for rank in ranks] == [rank["sent"] for rank in without]
    assert ranks[0]["digest"] != without[0]["digest"]


@pytest.mark.parametrize(("workers", "servers", "clip"), [(1, 1, 0.5), (1, 3, None)])
def test_workers_in_bf16_equal_mixed_precision_on_one_process(
    workers: int, servers: int, clip: float | None
) -> None:
    """One worker's sums are one process's, so are the bits; masters in float32 on the servers
    alone. Half the bytes."""
    ranks = md.run(
        served,
        NARROW,
        {"precision": "bf16", "servers": servers},
        {"clip": clip},
        size=workers + servers,
    )

    def alone(world: Any) -> str:
        config = tiny(**NARROW)
        trainer = Trainer(Plan(precision="bf16"), config, world, lr=1e-2, seed=3, clip=clip)
        for step in range(3):
            trainer.step(global_batch(step, 5, config))
        return trainer.weights_sha256()

    assert {rank["digest"] for rank in ranks} == {md.run(alone, size=1)[0]}
    assert all(rank["model"] == {"bfloat16"} and rank["optimizer"] == {"float32"} for rank in ranks)
    wide = md.run(served, NARROW, {"servers": servers}, {"clip": clip}, size=workers + servers)
    assert [2 * sum(rank["sent"].values()) for rank in ranks] == [
        sum(rank["sent"].values()) for rank in wide
    ]


# ------------------------------------------------------------------------------- refusals, and bugs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dp": 2, "server_device": "cpu"}, "there is no server; use strategy=parameter-server"),
        ({"dp": 2, "server_dtype": "float64", "strategy": "data-parallel"}, "there is no server"),
        (
            {"dp": 2, "strategy": "parameter-server", "server_device": "gpu"},
            "choose one of same, cpu, cuda",
        ),
        (
            {
                "dp": 3,
                "strategy": "parameter-server",
                "asynchronous": True,
                "server_dtype": "float64",
            },
            "leave one of",
        ),
        (
            {"dp": 3, "strategy": "parameter-server", "precision": "fp16"},
            "also take precision=bf16",
        ),
        (
            {"dp": 3, "strategy": "parameter-server", "asynchronous": True, "precision": "bf16"},
            "are for strategy ddp",
        ),
    ],
)
def test_what_cannot_be_is_one_line(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(**options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_narrower_than_its_workers_is_refused() -> None:
    plan = Plan(dp=2, strategy="parameter-server", server_dtype="float32")
    with pytest.raises(
        PlanError, match="servers would round what workers sent; use .*server_dtype=float64"
    ):
        plan.require_model(tiny())
    with pytest.raises(PlanError, match="server_dtype=float64 with asynchronous"):
        Plan(dp=2, strategy="parameter-server", asynchronous=True, server_dtype="float64")


def narrow_sums(right: Any, self: Any) -> None:
    """What a server sums is rounded to the workers' dtype."""
    right(self)
    for total in self.shards[0].gradients:
        total[...] = total.astype(np.float32)


def rounded_masters(right: Any, self: Any) -> None:
    """The masters are rounded with the weights."""
    right(self)
    for master, weights in zip(self.masters, self.weights, strict=True):
        master[...] = weights


BUGS = [
    Bug("never rounded", Shard, "round", lambda right, self: None),
    Bug("sums in the workers' dtype", parameter_server.ParameterServer, "collect", narrow_sums),
    Bug("masters rounded", Shard, "round", rounded_masters),
]


def check_bits() -> None:
    """Three workers and two servers, wider than the workers, have the bits of one process."""
    ranks = md.run(served, NARROW, {"server_dtype": "float64"}, {"clip": None}, size=5)
    for name, array in in_one_process(3, NARROW).items():
        np.testing.assert_array_equal(ranks[0]["weights"][name], array)


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, check_bits, monkeypatch)
