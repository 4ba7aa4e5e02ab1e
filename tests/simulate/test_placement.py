"""Ranks of a plan on the devices of a cluster, and their groups."""

import pytest

from minidist.errors import ConfigError
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.placement import RankPlaces


def test_ranks_lie_as_the_mesh_has_them():
    placement = RankPlaces(Plan(dp=4, pp=2, tp=2), Cluster.parse("h100:2x8"))
    assert placement.places == list(range(16))
    assert placement.members("tp", 5) == (4, 5)
    assert placement.members("pp", 5) == (5, 7)
    assert placement.members("dp", 5) == (1, 5, 9, 13)
    assert placement.members("dp,pp", 5) == (1, 3, 5, 7, 9, 11, 13, 15)
    assert placement.members("world", 5) == tuple(range(16))


def test_another_order_moves_places_and_leaves_ranks():
    """dp inside nodes: tensor groups then cross them."""
    placement = RankPlaces({"dp": 4, "tp": 2}, Cluster.parse("h100:2x4"), order=["tp", "dp"])
    assert placement.members("tp", 0) == (0, 1)
    assert [placement.place_of(rank) for rank in placement.members("tp", 0)] == [0, 4]
    assert [placement.place_of(rank) for rank in placement.members("dp", 0)] == [0, 1, 2, 3]
    assert sorted(placement.places) == list(range(8))


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="dp=4 × tp=4 are 16 ranks, and h100:1x8 has 8 devices"):
        RankPlaces({"dp": 4, "tp": 4}, Cluster.parse("h100:1x8"))
    with pytest.raises(ConfigError, match="name different axes of dp, pp, ep, cp, tp"):
        RankPlaces({"dp": 2}, order=["dp", "xp"])
    with pytest.raises(ConfigError, match="no group 'xp'"):
        RankPlaces({"dp": 2}).members("xp", 0)
