"""Experts on several nodes: equal to one process, at the cost that the docstring states; bugs
planted and seen."""

from typing import Any

import numpy as np
import pytest
from experts import MOE, check_equal, train
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import BOUND
from planted import Bug, check_caught
from training import difference, global_batch, tiny

import minidist as md
from minidist.errors import PlanError
from minidist.nn import MixtureConfig
from minidist.optim import SGD
from minidist.parallel.experts import node_experts, split_experts
from minidist.parallel.experts.node_experts import NodeExperts, plain_node_experts
from minidist.parallel.hybrid.hybrid import Plan, Trainer

ITEM = 8
WIDTH = 16
SWAPPED = ((4, 2, 0, 1, 3), (1, 2, 3, 4, 0))


def on_nodes(nodes: tuple[int, ...], moe: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return what each rank holds after training, with the node of each, and what it sent to ranks
    of other nodes."""

    def rank(world: Any) -> dict[str, Any]:
        world.nodes = nodes
        found = train(world, moe, {}, **options)
        sent = world.ledger.sent_to("step")
        far = {
            axis: sum(
                axes.get(axis, 0) for to, axes in sent.items() if nodes[to] != nodes[world.rank]
            )
            for axis in ("ep", "ep.inside", "control")
        }
        return {**found, "far": far}

    return md.run(rank, size=len(nodes))


def in_one_process(moe: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Return what one process holds after training."""
    return md.run(lambda world: train(world, moe, {}, **options), size=1)[0]


def check(
    nodes: tuple[int, ...],
    moe: dict[str, Any],
    *,
    of_serial: dict[str, Any] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    ranks = on_nodes(nodes, moe, **options)
    alone = in_one_process({**moe, **(of_serial or {})}, **{**options, "checkpoint": "none"})
    check_equal(ranks, alone)
    return ranks


def sent(ranks: list[dict[str, Any]], axis: str) -> int:
    return sum(rank["sent"].get(axis, {}).get("all_to_all", 0) for rank in ranks)


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("nodes", "moe", "of_serial", "options"),
    [
        ((0, 0, 1, 1), {"top_k": 3}, {}, {}),
        ((0, 0, 1), {"node_limit": 1}, {"nodes": (4, 1)}, {}),
        ((0, 1, 0, 1), {"capacity": 0.8, "balance": "bias", "shared": 1}, {}, {"accumulate": 2}),
        (
            (0, 0, 0, 1),
            {"placement": SWAPPED, "top_k": 2},
            {"placement": None},
            {"checkpoint": "all"},
        ),
        (
            (0, 0, 1, 1),
            {"placement": SWAPPED, "nodes": (3, 2), "node_limit": 1},
            {},
            {"sequences": 2},
        ),
    ],
    ids=["even", "limit", "in turn, dropped", "placed, computed again", "placed and limited"],
)
def test_equals_one_process(
    nodes: tuple[int, ...], moe: dict[str, Any], of_serial: dict[str, Any], options: dict[str, Any]
) -> None:
    """Five experts on three and four ranks; SGD, because Adam forgives a wrong scale."""
    if moe.get("node_limit") == 1 and "nodes" not in moe:
        moe = {**moe, "top_k": 1}  # one node has a single expert
    ranks = check(
        nodes, moe, of_serial=of_serial, **{"steps": 2, "optimizer": SGD, "clip": 0.05, **options}
    )
    top_k = {**MOE, **moe}["top_k"]
    times = 3 if options.get("checkpoint") else 2
    copies, rows = (sum(rank[kind] for rank in ranks) for kind in ("copies", "rows"))
    assert sent(ranks, "ep") == ITEM * times * (2 * WIDTH + top_k) * copies
    assert sent(ranks, "ep.inside") == ITEM * times * 2 * WIDTH * rows
    assert not any(rank["far"]["ep.inside"] for rank in ranks)
    own = [len(part) for part in np.array_split(np.arange(MOE["experts"]), len(nodes))]
    counts = sum((nodes.count(node) - 1) * held for node, held in zip(nodes, own, strict=True))
    forwards = 2 * options.get("accumulate", 1) * ranks[0]["config"]["layers"]
    assert sent(ranks, "control") == ITEM * (times - 1) * (top_k * copies + forwards * counts)


any_job = given(
    nodes=st.lists(st.integers(0, 2), min_size=2, max_size=5),
    moe=st.fixed_dictionaries(
        {
            "experts": st.integers(5, 8),
            "top_k": st.integers(1, 3),
            "capacity": st.sampled_from([None, 0.8]),
            "noise": st.sampled_from([0.0, 0.5]),
            "balance": st.sampled_from(["loss", "bias"]),
            "bias_rate": st.just(0.05),
        }
    ),
    options=st.fixed_dictionaries(
        {"sequences": st.integers(1, 6), "accumulate": st.integers(1, 2)}
    ),
)


@settings(max_examples=2)
@any_job
def test_any_job(nodes: list[int], moe: dict[str, Any], options: dict[str, Any]) -> None:
    check(tuple(nodes), moe, steps=1, **options)


@pytest.mark.soak
@settings(max_examples=150)
@any_job
def test_very_many_jobs(nodes: list[int], moe: dict[str, Any], options: dict[str, Any]) -> None:
    """The same, more often."""
    check(tuple(nodes), moe, steps=3, **options)


def test_the_plain_loop() -> None:
    """Two nodes of two ranks: each token goes to the other node at most once."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(22, 5))
    weights = rng.random((22, 4)) * (rng.random((22, 4)) < 0.6)
    experts = rng.normal(size=(4, 5, 5))
    right = np.einsum("nh,ehk,ne->nk", x, experts, weights)

    def rank(world: Any) -> Any:
        across = world.split(world.rank % 2, axis="across")
        inside = world.split(world.rank // 2, axis="inside")
        mine = np.array_split(np.arange(22), 4)[world.rank]
        y = plain_node_experts(
            x[mine], weights[mine], lambda rows: rows @ experts[world.rank], across, inside
        )
        away = weights[mine][:, 2:] if world.rank < 2 else weights[mine][:, :2]
        return y, world.ledger.sent_bytes(), int(away.any(axis=1).sum())

    found = md.run(rank, size=4)
    np.testing.assert_allclose(np.concatenate([y for y, *_ in found]), right, rtol=1e-12)
    here = sum(ledger["across"]["all_to_all"] for _, ledger, _ in found)
    assert here == ITEM * (5 + 2 + 5) * sum(count for *_, count in found)


def trained(
    world: Any,
    nodes: tuple[int, ...],
    mixture: MixtureConfig,
    plan: dict[str, Any],
    *,
    load: Any = None,
    save: Any = None,
) -> Any:
    """Losses and weights of two steps of a plan, from a checkpoint and to one."""
    world.nodes = nodes
    config = tiny(mixture=mixture)
    trainer = Trainer(Plan(**plan), config, world, lr=1e-2, optimizer="sgd", seed=3)
    if load is not None:
        trainer.load(load)
    losses = [trainer.step(global_batch(trainer.steps_done, 5, config)) for _ in range(2)]
    if save is not None:
        trainer.save(save)
    found = trainer.loads.placed(trainer.mesh["pp"])
    result = losses, trainer.state_dict(), trainer.config.mixture, found
    trainer.close()
    return result


PLANS: list[dict[str, Any]] = [
    {"ep": 4, "zero": 1},
    {"ep": 2, "tp": 2, "zero": 3},
    {"dp": 2, "ep": 2, "order": "ep,dp"},
    {"pp": 2, "ep": 2, "order": "ep,pp", "zero": 2},
]


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: ",".join(f"{key}={value}" for key, value in plan.items())
)
def test_in_a_plan_and_through_a_checkpoint(plan: dict[str, Any], tmp_path: Any) -> None:
    """A limit takes its nodes from the ranks; a checkpoint goes on with experts placed otherwise,
    under another plan."""
    nodes = (0, 1, 0, 1) if plan.get("tp") else (0, 0, 1, 1)
    plan = {**plan, "placement": "rank"} if plan.get("tp") else plan
    limited = MixtureConfig(experts=4, top_k=2, node_limit=1)
    ranks = md.run(
        lambda world: trained(world, nodes, limited, plan, save=tmp_path / "step-000002"), size=4
    )
    losses, weights, settled, found = ranks[0]
    expected = None if plan.get("tp") else (2, 2)
    assert settled.nodes == ((4,) if expected is None else expected)
    alone = md.run(lambda world: trained(world, (0,), settled, {}), size=1)[0]
    assert difference(weights, alone[1]) < BOUND
    np.testing.assert_allclose(losses, alone[0], rtol=1e-12)
    placed = MixtureConfig(experts=4, top_k=2, placement=((3, 1, 0, 2), (0, 2, 1, 3)))
    again = md.run(
        lambda world: trained(world, (0, 1), placed, {"ep": 2}, load=tmp_path / "step-000002"),
        size=2,
    )[0]
    other = md.run(
        lambda world: trained(
            world, (0,), MixtureConfig(experts=4, top_k=2), {}, load=tmp_path / "step-000002"
        ),
        size=1,
    )[0]
    assert difference(again[1], other[1]) < BOUND
    if expected is not None:
        order, copies = found
        assert [sorted(layer) for layer in order.tolist()] == [[0, 1, 2, 3]] * 2
        assert (copies[:, 2] <= copies[:, 1]).all() and all(
            (found[0] == rank[3][0]).all() for rank in ranks
        )


@pytest.mark.soak
def test_nodes_stay_when_the_plan_changes() -> None:
    """The limit is that of the ranks that began, also where the experts then lie on one node, and
    in an evaluation."""

    def rank(
        world: Any, nodes: tuple[int, ...], mixture: MixtureConfig, plans: list[dict[str, Any]]
    ) -> Any:
        world.nodes = nodes
        config = tiny(mixture=mixture)
        trainer = Trainer(Plan(**plans[0]), config, world, lr=1e-2, optimizer="sgd")
        trainer.step(global_batch(0, 5, config))
        if plans[1:]:
            trainer.change_plan(Plan(**plans[1]))
        trainer.step(global_batch(1, 5, config))
        return (
            trainer.state_dict(),
            trainer.evaluate([global_batch(7, 5, config)]),
            trainer.config.mixture,
        )

    limited = MixtureConfig(experts=8, node_limit=1)
    weights, loss, settled = md.run(
        rank, (0, 0, 1, 1), limited, [{"ep": 4}, {"dp": 2, "ep": 2}], size=4
    )[0]
    alone = md.run(rank, (0,), settled, [{}], size=1)[0]
    assert (
        settled.nodes == (4, 4)
        and difference(weights, alone[0]) < BOUND
        and abs(loss - alone[1]) < 1e-12
    )


@pytest.mark.sampled
@pytest.mark.parametrize("top_k", [2, 3])
def test_measured_copies_are_those_that_travel(top_k: int) -> None:
    """What is computed from the choices is what the ranks sent; and what a placement is to save, it
    saves."""
    moe: dict[str, Any] = {"noise": 0.0, "experts": 8, "top_k": top_k, "capacity": 1.0}
    before = on_nodes((0, 0, 1, 1), moe, steps=1)
    order, copies = before[0]["placed"]
    assert copies[:, 0].tolist() == [5 * 6] * 2 and copies[:, 1].sum() == sum(
        rank["copies"] for rank in before
    )
    assert all((rank["placed"][0] == order).all() for rank in before)
    after = on_nodes((0, 0, 1, 1), {**moe, "placement": tuple(map(tuple, order.tolist()))}, steps=1)
    assert sum(rank["copies"] for rank in after) == copies[:, 2].sum() < copies[:, 1].sum()


def test_ranks_that_lie_differently_are_told_what_to_say() -> None:
    def rank(world: Any, nodes: tuple[int, ...], plan: dict[str, Any]) -> None:
        world.nodes = nodes
        Trainer(Plan(**plan), tiny(mixture=MixtureConfig(experts=4, top_k=1, node_limit=1)), world)

    with pytest.raises(
        PlanError, match=r"lie on nodes \(0, 0\), \(0, 1\), .*give the number of nodes .*nodes=2"
    ):
        md.run(rank, (0, 0, 0, 1, 1, 1), {"dp": 3, "ep": 2}, size=6)
    with pytest.raises(PlanError, match=r"\(0, 1, 0, 1\)"):
        md.run(rank, (0, 1, 0, 1), {"ep": 4, "placement": "rank"}, size=4)


# --------------------------------------------------------------------------- parity sees these bugs


def placement_of_rows_alone(
    right: Any, self: Any, experts: Any, group: Any, order: Any = None
) -> None:
    """Rows go by the placement, weights of experts lie by number."""
    right(self, experts, group, None)
    self.place_of = np.argsort(order)


BUGS = [
    # the sum on the node forgets the gate's weights
    Bug(
        "sums without weights",
        node_experts.ops,
        "from_experts",
        lambda right, rows, weights, placement: right(rows, weights * 0 + 1, placement),
    ),
    Bug(
        "dropped choices travel",
        NodeExperts,
        "mixed",
        lambda right, self, x, weights, chosen, kept: right(self, x, weights, chosen, kept | True),
    ),
    Bug(
        "placement of rows alone",
        split_experts.SplitExperts,
        "__init__",
        placement_of_rows_alone,
    ),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"optimizer": SGD, "clip": None, "steps": 2}
    alone = in_one_process({"capacity": 0.8}, **options)  # its ops are those of the ranks

    def check() -> None:
        moe = {"placement": SWAPPED, "capacity": 0.8}
        check_equal(on_nodes((0, 0, 1, 1), moe, **options), alone)

    check_caught(bug, check, monkeypatch)
