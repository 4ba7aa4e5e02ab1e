"""Routes: which links a message crosses, on each kind of node and network."""

import pytest

from minidist.errors import ConfigError
from minidist.simulate.cluster import Cluster
from minidist.simulate.topology import Topology, Wire, most_even

NEAR = Wire("near", 1e-6, 100e9)
FAR = Wire("far", 5e-6, 10e9)


def crossed(topology, src, dst):
    return [topology.links[number].name for number in topology.route(src, dst)]


@pytest.mark.parametrize(
    ("kind", "links"),
    [
        ("switch", ["node0.out1", "node0.in3"]),
        ("mesh", ["node0.pair1-3"]),
        ("pcie", ["node0.up1", "node0.root-up0", "node0.root-down1", "node0.down3"]),
    ],
)
def test_inside_a_node(kind, links):
    topology = Topology(4, NEAR, kind)
    assert crossed(topology, 1, 3) == links
    assert topology.alpha(1, 3) == pytest.approx(1e-6)
    assert topology.route(2, 2) == ()


def test_two_devices_below_one_pcie_switch_stay_there():
    assert crossed(Topology(4, NEAR, "pcie"), 0, 1) == ["node0.up0", "node0.down1"]


@pytest.mark.parametrize(
    ("dst", "links"),
    [
        (8, "up0 hca0-down nic0-out nic0-in hca0-up down0"),
        (11, "up0 hca0-down nic0-out leaf0.rail0.up1 leaf0.rail1.down1 nic1-in hca1-up down3"),
    ],
)
def test_a_message_to_another_node_passes_its_switch_and_its_card(dst, links):
    topology = Topology(8, NEAR, "pcie", between=FAR, nics=4)
    route = [name.replace("node0.", "").replace("node1.", "") for name in crossed(topology, 0, dst)]
    assert route == links.split()


def test_a_card_below_another_switch_is_reached_by_the_processor():
    """One card for eight devices: those of the first switch have it below their own."""
    topology = Topology(8, NEAR, "pcie", between=FAR)
    assert "node0.root-up0" not in crossed(topology, 1, 9)
    assert crossed(topology, 7, 9)[:4] == [
        "node0.up7",
        "node0.root-up3",
        "node0.root-down0",
        "node0.hca0-down",
    ]


def test_an_uplink_is_a_wire_of_its_own():
    topology = Topology(4, NEAR, "pcie", uplink=Wire("lanes", 2e-6, 5e9))
    assert topology.bandwidth(0, 2) == 5e9
    assert topology.bandwidth(0, 1) == 100e9
    assert topology.alpha(0, 2) == pytest.approx(3e-6)


def test_a_routes_latency_does_not_depend_on_which_route_is_first():
    """Two PCIe nodes: a message inside a node and one to the other node go through one link up."""
    pairs = [(0, 1), (0, 2)]
    latencies = []
    for order in (pairs, pairs[::-1]):
        topology = Topology(2, NEAR, "pcie", between=FAR, nics=2)
        for src, dst in order:
            topology.route(src, dst)
        latencies.append([topology.alpha(src, dst) for src, dst in pairs])
    assert latencies[0] == latencies[1] == pytest.approx([1e-6, 6e-6])


def test_rails_meet_at_their_own_leaf():
    """GPU i uses NIC i * nics / per_node; equal NICs of all nodes meet at one leaf."""
    topology = Topology(4, NEAR, between=FAR, nics=2)
    assert crossed(topology, 0, 5) == ["node0.nic0-out", "node1.nic0-in"]
    assert crossed(topology, 0, 7)[1][:10] == "leaf0.rail"  # another rail: by a spine
    assert topology.alpha(0, 5) == pytest.approx(5e-6)
    assert topology.bandwidth(0, 5) == 10e9


def test_leaves_and_spines():
    """Two nodes a leaf, no rails: node 0 reaches node 1 at the leaf, node 2 by a spine that a hash
    picks."""
    topology = Topology(
        1, NEAR, between=FAR, rails=False, nodes_per_leaf=2, spines=2, oversubscription=4.0
    )
    assert crossed(topology, 0, 1) == ["node0.nic0-out", "node1.nic0-in"]
    by_spine = crossed(topology, 0, 2)
    assert by_spine in (
        ["node0.nic0-out", f"leaf0.up{spine}", f"leaf1.down{spine}", "node2.nic0-in"]
        for spine in "01"
    )
    assert topology.bandwidth(0, 2) == 10e9 * 2 / 4 / 2  # two ports a leaf, 4:1, over two spines
    spines = {crossed(topology, src, dst)[1] for src in (0, 1) for dst in range(2, 12)}
    assert len(spines) == 2  # static: all pairs together use both


def test_adaptive_routing_has_the_width_of_all_spines():
    static = Topology(1, NEAR, between=FAR, rails=False, nodes_per_leaf=2, spines=4)
    adaptive = Topology(
        1, NEAR, between=FAR, rails=False, nodes_per_leaf=2, spines=4, routing="adaptive"
    )
    assert (
        adaptive.links[adaptive.route(0, 2)[1]].bandwidth
        == 4 * static.links[static.route(0, 2)[1]].bandwidth
    )


def test_a_torus_goes_the_shorter_way_round_each_dim():
    topology = Topology(1, NEAR, torus=(4, 4, 5))
    assert crossed(topology, 0, 4) == ["chip0.0.0.z-"]
    assert crossed(topology, 0, 2) == ["chip0.0.0.z+", "chip0.0.1.z+"]
    assert len(topology.route(0, 2 * 20 + 2 * 5 + 2)) == 2 + 2 + 2
    assert topology.coordinates(79) == (3, 3, 4)


@pytest.mark.parametrize(
    ("size", "dims", "torus"),
    [(64, 3, (4, 4, 4)), (24, 3, (2, 3, 4)), (7, 2, (1, 7)), (8, 1, (8,))],
)
def test_the_most_even_torus(size, dims, torus):
    assert most_even(size, dims) == torus


def test_a_slow_link():
    cluster = Cluster.parse("h100:2x8").slowed({"node1.nic3-*": 4.0, "nothing": 2.0})
    assert (
        cluster.topology.bandwidth(3, 11) == Cluster.parse("h100:2x8").topology.bandwidth(3, 11) / 4
    )
    assert cluster.topology.bandwidth(2, 10) == Cluster.parse("h100:2x8").topology.bandwidth(2, 10)
    with pytest.raises(
        ConfigError, match="no link is called 'nothing'; links are called node0.nic3-out"
    ):
        cluster.topology.check_slow()
