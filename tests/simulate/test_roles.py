"""Ranks of one role leave equal traces, and ranks with equal traces share a role."""

from typing import Any

import pytest

import minidist as md
from minidist.comm.group import Group
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.nn.config import MixtureConfig
from minidist.observe.events import Busy
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.group_ranks import group_ranks
from minidist.simulate.one_rank import run_rank
from minidist.simulate.roles import first_of, roles

SMALL: dict[str, Any] = {"vocabulary": 48, "context": 16, "layers": 2, "width": 16, "heads": 4}


def events(plan: Plan, config: GPTConfig, rank: int, rows: int) -> list[Any]:
    """Return what a rank does, segments spelled out."""
    trace = run_rank(plan, config, rank, rows=rows, steps=1)
    found: list[Any] = trace.events
    return [
        event._replace(work=trace.segments[event.work]) if isinstance(event, Busy) else event
        for event in found
    ]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(dp=3), {}),
        (Plan(dp=2, pp=2, tp=2), {"tied": True}),
        (Plan(cp=3), {}),
        (Plan(tp=4, sequence_parallel=True, precision="bf16"), {"kv_heads": 2}),
        (Plan(cp=4, attention="all-to-all"), {}),
        (Plan(dp=2, ep=2), {"mixture": MixtureConfig(experts=4)}),
        (Plan(dp=4, strategy="parameter-server"), {}),
        (Plan(tp=3), {}),
    ],
    ids=str,
)
def test_equal_events_are_one_role(plan: Plan, options: dict[str, Any]) -> None:
    config = GPTConfig(**(SMALL | options))
    rows = 16
    role_of = roles(plan, config, rows)
    ran = [events(plan, config, rank, rows) for rank in range(plan.size)]
    same = [[a == b for b in ran] for a in ran]
    assert same == [[a == b for b in role_of] for a in role_of]
    assert [role_of[rank] for rank in first_of(role_of)] == list(range(max(role_of) + 1))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "plan",
    [Plan(dp=4, zero=1), Plan(dp=4, zero=3), Plan(dp=4, zero=2, shard=2), Plan(dp=2, tp=2, zero=1)],
    ids=str,
)
def test_zero_s_ranks_differ_in_their_pieces_alone(plan: Plan) -> None:
    """Ranks of a role make the same calls, and compute as much to 10 % in these small models: edges
    of chunks."""
    config = GPTConfig(**SMALL)
    rows = 16
    role_of = roles(plan, config, rows)
    ran = [events(plan, config, rank, rows) for rank in range(plan.size)]
    for rank, mine in enumerate(ran):
        first = ran[first_of(role_of)[role_of[rank]]]
        assert [type(event) for event in mine] == [type(event) for event in first]
        calls = [[getattr(event, "call", None) for event in some] for some in (mine, first)]
        assert [call and call[:3] for call in calls[0]] == [call and call[:3] for call in calls[1]]
        flops = [
            sum(
                kernel.flops * times
                for event in some
                if isinstance(event, Busy)
                for kernel, times in _segment(event)
            )
            for some in (mine, first)
        ]
        assert flops[0] == pytest.approx(flops[1], rel=0.1)


def _segment(event: Busy) -> Any:
    return event.work


def test_a_thousand_ranks_have_few_roles() -> None:
    config = GPTConfig(vocabulary=128256, context=8192, layers=80, width=8192, heads=64, kv_heads=8)
    found = roles(Plan(dp=16, pp=8, tp=8, zero=1, microbatches=16), config, 1024)
    assert len(found) == 1024
    assert max(found) + 1 == 8 * 2  # stages; the first of tp counts undivided weights in the norm
    assert (
        max(roles(Plan(dp=16, pp=8, tp=8, zero=1, microbatches=16), config, 1024, norm=False)) + 1
        == 8
    )


def test_groups_are_those_of_the_mesh() -> None:
    plan = Plan(dp=2, pp=2, tp=2)
    config = GPTConfig(**SMALL)

    def meshed(world: Group) -> dict[str, tuple[int, ...]]:
        mesh = Mesh(world, **plan.axes)
        return {
            ",".join(axes): mesh[axes].world_ranks
            for axes in (("dp",), ("pp",), ("tp",), ("dp", "tp"), ("ep",))
        }

    for rank, found in enumerate(md.run(meshed, size=8)):
        for name, ranks in found.items():
            assert group_ranks(plan, config, name, rank) == ranks


def test_groups_of_groups() -> None:
    config = GPTConfig(**(SMALL | {"kv_heads": 2}))
    assert group_ranks(Plan(dp=8, zero=1, shard=2), config, "dp.shard", 5) == (4, 5)
    assert group_ranks(Plan(dp=8, zero=1, shard=2), config, "dp.replicas", 5) == (1, 3, 5, 7)
    assert group_ranks(Plan(pp=4), config, "pp.ends", 0) == (0, 3)
    assert group_ranks(Plan(tp=4), config, "tp.sharers", 3) == (2, 3)
    assert group_ranks(Plan(dp=4, strategy="parameter-server"), config, "dp.peers", 1) == (0, 1, 2)
    assert group_ranks(Plan(dp=4, strategy="parameter-server"), config, "dp.peers", 3) == (3,)
    assert group_ranks(Plan(dp=3), config, "world", 1) == (0, 1, 2)
    for name in ("qp", "dp.friends"):
        with pytest.raises(ConfigError, match="simulate: no"):
            group_ranks(Plan(dp=3), config, name, 1)
