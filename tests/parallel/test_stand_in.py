"""Strategies on a GPU's stand-in, with arrays that may not meet the host's: the weights of one
process on the CPU.

What a real GPU is asked stands in test_gpu.py; this finds without one what is on the wrong side, or
of another dtype.
"""

from typing import Any

import fake_gpu
import pytest
from plans import check
from training import difference, global_batch, tiny, train

import minidist as md
from minidist.nn.config import MixtureConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer

PLANS: list[dict[str, Any]] = [
    {},
    {"accumulate": 2},
    {"zero": 1},
    {"zero": 2, "offload": "optimizer"},
    {"zero": 3},
    {"zero": 3, "checkpoint_blocks": "all"},
    {"strategy": "parameter-server"},
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_equals_one_process_on_the_cpu(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    config = tiny(layers=1, positions="rotary", activation="silu")
    serial = md.run(lambda world: train(world, config=config, steps=2), size=1)[0]
    ranks = md.run(
        lambda world: train(world, config=config, steps=2, device="cuda", **plan), size=2
    )
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.sampled
@pytest.mark.parametrize(
    "plan",
    [{"local_steps": 2}, {"local_steps": 2, "fragments": 2, "delay": 1, "mix": 0.5}],
    ids=str,
)
def test_local_steps_equal_those_on_the_cpu(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = md.run(lambda world: train(world, steps=3, **plan), size=2)
    fake_gpu.install(monkeypatch)
    gpu = md.run(lambda world: train(world, steps=3, device="cuda", **plan), size=2)
    assert difference(gpu[0]["weights"], cpu[0]["weights"]) < 1e-10
    assert len({rank["digest"] for rank in gpu}) == 1


COMPOSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"tp": 2}),
    ({"heads": 4, "tied": True}, {"tp": 2, "sequence_parallel": True, "dp": 2}),
    ({"layers": 2, "tied": True}, {"pp": 2, "microbatches": 2}),
    ({"context": 8}, {"cp": 2}),
    ({"mixture": MixtureConfig(experts=4, top_k=2)}, {"ep": 2}),
    ({"layers": 2, "tied": True}, {"pp": 2, "microbatches": 2, "offload": "optimizer"}),
    ({"tied": True}, {"tp": 2, "dp": 2, "zero": 3, "offload": "all", "sequence_parallel": True}),
    ({}, {"tp": 2, "dp": 2, "zero": 2, "shard": 1, "offload": "optimizer"}),
]


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    ("changes", "plan"),
    COMPOSED,
    ids=["tp", "sequence", "pp", "cp", "ep", "optimizer, pp", "all, tp", "optimizer, copies"],
)
def test_composed_plans_equal_one_process(
    changes: dict[str, Any], plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu.install(monkeypatch)
    check({"layers": 1, **changes}, plan, steps=2, device="cuda")


def test_experts_on_two_nodes_equal_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, choices within the limit, a placement, and the choices that it is measured by."""
    fake_gpu.install(monkeypatch)
    config = tiny(
        layers=1,
        mixture=MixtureConfig(
            experts=4, top_k=2, capacity=0.9, nodes=2, node_limit=1, placement=((2, 0, 1, 3),)
        ),
    )

    def rank(world: Any, device: str) -> dict[str, Any]:
        world.nodes = tuple(range(world.size))
        trainer = Trainer(
            Plan(ep=world.size), config, world, lr=1e-2, optimizer="sgd", device=device
        )
        for step in range(2):
            trainer.step(global_batch(step, 4, config))
        if world.size > 1:
            order, _ = trainer.loads.placed(trainer.mesh["pp"])
            assert sorted(order[0].tolist()) == [0, 1, 2, 3]
        return trainer.state_dict()

    assert difference(md.run(rank, "cuda", size=2)[0], md.run(rank, "cpu", size=1)[0]) < 1e-10
