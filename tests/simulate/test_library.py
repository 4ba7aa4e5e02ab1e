"""Algorithm native: what NCCL's rings, trees and pairs put on the links."""

import time
from collections import Counter
from functools import cache

import pytest
from asked import Asked

from minidist.simulate.cluster import Cluster
from minidist.simulate.library import PROTOCOLS, Library, zigzag
from minidist.simulate.messages import Operands
from minidist.simulate.walk import call_cost

GIB = 1 << 30


def bus_bandwidth(cluster, members, nbytes=GIB):
    """As nccl-tests prints it for all-reduce."""
    size = len(members)
    return (
        2
        * (size - 1)
        / size
        * nbytes
        / call_cost(Asked("all_reduce", nbytes), tuple(members), cluster).seconds
    )


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_zigzags_use_every_pair_once_each_way(size):
    pairs = Counter(
        (path[step], path[step + 1])
        for start in range(size)
        for path in [zigzag(range(size), start)]
        for step in range(size - 1)
    )
    assert len(pairs) == size * (size - 1)
    assert set(pairs.values()) == {1}
    assert sorted(zigzag(range(size), 0)) == list(range(size))


def test_in_a_node_the_bus_bandwidth_is_the_links():
    """Oracle measured 232 to 235 GB/s of 10 GiB on 8 A100s; NCCL's table has 240."""
    cluster = Cluster.parse("a100-80g:1x8")
    assert bus_bandwidth(cluster, range(8), 10 * GIB) == pytest.approx(238e9, rel=0.01)


@cache
def library(cluster):
    """Return the library of all devices."""
    cluster = Cluster.parse(cluster)
    return Library(range(cluster.size), cluster)


def chosen(cluster, nbytes):
    """Return the way and the protocol of an all-reduce of all devices."""
    way = library(cluster).taken("all_reduce", Operands(nbytes))
    return way.name, way.protocol


def test_longer_arrays_take_protocols_with_more_bandwidth():
    found = [chosen("a100-80g:1x8", 1 << shift)[1] for shift in range(10, 32)]
    order = ["LL", "LL128", "Simple"]
    assert sorted(found, key=order.index) == found
    assert set(found) == set(order)
    assert found[20 - 10] == "LL" and found[24 - 10] == "LL128" and found[26 - 10] == "Simple"


def test_an_h100_node_changes_to_the_switch_after_a_mebibyte():
    """As seen on one: "8B~1MB: RING, LL; 2MB~16GB: NVLS" (NVIDIA/nccl-tests, issue 309)."""
    assert {chosen("h100:1x8", 1 << shift) for shift in range(3, 21)} == {("ring", "LL")}
    assert {chosen("h100:1x8", 1 << shift) for shift in range(21, 35)} == {("switch", "Simple")}


def test_ll128_does_not_cross_pcie():
    found = {chosen("a100-pcie:1x8", 1 << shift)[1] for shift in range(10, 32)}
    assert found == {"LL", "Simple"}


def test_a_tree_changes_its_protocol_where_its_table_ends():
    """On two nodes of A100s 1 GiB takes only 1.43 times as long as 512 MiB (oke-a100.csv)."""
    assert chosen("a100-40g:2x8", GIB // 2) == ("tree", "LL128")
    assert chosen("a100-40g:2x8", GIB) == ("tree", "Simple")
    cluster = Cluster.parse("a100-40g:2x8")
    half, whole = (
        call_cost(Asked("all_reduce", nbytes), tuple(range(16)), cluster).seconds
        for nbytes in (GIB // 2, GIB)
    )
    assert whole / half == pytest.approx(9187.8 / 6436.0, rel=0.06)


@pytest.mark.parametrize(("nodes", "times"), [(2, 1), (4, 2), (8, 2)])
def test_a_tree_sends_the_array_once_to_one_other_node_and_twice_to_several(nodes, times):
    cluster = Cluster.parse(f"h100:{nodes}x8")
    way = Library(range(cluster.size), cluster).taken("all_reduce", Operands(GIB))
    assert way.name == "switches"
    leaving = {
        load
        for number, load in way.load.per_byte.items()
        if "nic" in cluster.links[number].name and "out" in cluster.links[number].name
    }
    assert leaving == {times / 8}


def test_what_is_chosen_does_not_depend_on_what_is_measured():
    """NCCL takes its tables' word: on an A100's node LL128 for 16 MiB, though Simple is faster."""
    cluster = Cluster.parse("a100-80g:1x8")
    library = Library(range(8), cluster)
    taken = library.chosen("all_reduce", Operands(16 << 20))
    simple = taken._replace(protocol=PROTOCOLS[-1])
    assert library.expected(taken, 16 << 20) < library.expected(simple, 16 << 20)
    assert library.seconds(taken, 16 << 20) > library.seconds(simple, 16 << 20)


def test_a_switch_that_adds_beats_the_ring():
    """An H100's node: the array crosses each link once, not twice 7/8 of it; not with two
    devices."""
    cluster = Cluster.parse("h100:1x8")
    assert bus_bandwidth(cluster, range(8), 4 * GIB) == pytest.approx(
        2 * 7 / 8 * 450e9 * 0.824 * 0.74, rel=0.02
    )
    assert bus_bandwidth(cluster, range(2), 4 * GIB) == pytest.approx(450e9 * 0.824, rel=0.01)
    slow = cluster.slowed({"node0.in3": 2.0})
    ratio = bus_bandwidth(cluster, range(8), 4 * GIB) / bus_bandwidth(slow, range(8), 4 * GIB)
    assert ratio == pytest.approx(2, rel=0.01)


def test_between_nodes_all_nics_are_busy_alike():
    cluster = Cluster.parse("h100:4x8")
    cost = call_cost(Asked("all_gather", GIB // 32), tuple(range(32)), cluster)
    leaving = {
        cluster.links[number].name: nbytes
        for number, nbytes in cost.link_bytes.items()
        if "nic" in cluster.links[number].name and "out" in cluster.links[number].name
    }
    assert len(leaving) == 4 * 8
    assert set(leaving.values()) == {round(31 / 32 * GIB / 8)}
    assert cost.messages == 32


def test_one_device_a_node_has_one_nic():
    """A data-parallel group across nodes beside seven others: its own NIC is all that it has."""
    cluster = Cluster.parse("h100:8x8")
    assert bus_bandwidth(cluster, range(0, 64, 8)) == pytest.approx(50e9 * 0.92, rel=0.02)


def test_a_full_mesh_uses_all_links():
    """Seven links of 50 GB/s (64 on paper) each way."""
    assert 300e9 < bus_bandwidth(Cluster.parse("mi300x:1x8"), range(8)) < 350e9


def test_short_arrays_between_many_nodes_go_along_a_tree():
    cluster = Cluster.parse("h100:64x8")
    library = Library(range(512), cluster)
    short = library.cost("all_reduce", Operands(1024))[0]
    ring_alone = library.cost("all_gather", Operands(2))[0]  # as many hops once as a ring's half
    assert short < ring_alone / 2
    assert bus_bandwidth(cluster, range(512), 4 * GIB) > 300e9


def test_latency_grows_and_bandwidth_stays_with_the_size():
    cluster = Cluster.parse("h100:8x8")
    times = [
        call_cost(Asked("all_reduce", 1 << shift), tuple(range(64)), cluster).seconds
        for shift in range(10, 33)
    ]
    assert times == sorted(times)
    assert times[-1] / times[-2] == pytest.approx(2, rel=0.05)
    assert times[1] / times[0] < 1.1


def test_an_all_to_all_is_bound_by_the_nics():
    """Each device sends 56 of its 63 parts to other nodes."""
    cluster = Cluster.parse("h100:8x8")
    part = 1 << 22
    seconds = call_cost(Asked("all_to_all", part), tuple(range(64)), cluster).seconds
    assert seconds == pytest.approx(56 * part / (50e9 * 0.92), rel=0.05)


def test_a_box_of_a_torus_uses_its_links_both_ways():
    """All of a 4 x 4 x 4 torus: six links a chip; a line of four: two."""
    cluster = Cluster.parse("tpu-v4:4x4x4")
    link = 50e9 * 0.92
    assert bus_bandwidth(cluster, range(64), 8 * GIB) == pytest.approx(6 * link, rel=0.1)
    assert bus_bandwidth(cluster, range(4), 8 * GIB) == pytest.approx(2 * link, rel=0.1)
    odd = call_cost(Asked("all_reduce", GIB), (0, 1, 5), cluster)  # no box: a ring with detours
    assert odd.seconds > GIB / link


def test_gathers_of_unequal_blocks_and_chains():
    cluster = Cluster.parse("h100:1x4")
    even = call_cost(Asked("all_gather", 1 << 26), (0, 1, 2, 3), cluster)
    same = call_cost(
        Asked("all_gather", 0, blocks=(1 << 25, 1 << 27, 1 << 26, 1 << 25)), (0, 1, 2, 3), cluster
    )
    assert even.sent_bytes == same.sent_bytes == 1 << 28
    assert even.seconds == same.seconds
    assert call_cost(Asked("broadcast", GIB), (0, 1, 2, 3), cluster).seconds < 1.1 * GIB / (
        450e9 * 0.824
    )
    assert call_cost(Asked("barrier", 0), (0, 1, 2, 3), cluster).seconds < 50e-6


def test_a_slow_nic_slows_every_ring_through_it():
    cluster = Cluster.parse("h100:8x8")
    slow = cluster.slowed({"node5.nic2-out": 4.0})
    quick = call_cost(Asked("all_reduce", GIB), tuple(range(64)), cluster).seconds
    assert call_cost(Asked("all_reduce", GIB), tuple(range(64)), slow).seconds > 3.5 * quick


def test_groups_by_the_thousand_are_priced_quickly():
    cluster = Cluster.parse("h100:256x8")
    start = time.process_time()
    groups = [tuple(range(first, first + 8)) for first in range(0, 2048, 8)]
    groups += [tuple(range(first, 2048, 64)) for first in range(64)]
    for _ in range(4):
        for group in groups:
            call_cost(Asked("all_reduce", 1 << 24), group, cluster)
    assert (time.process_time() - start) / (4 * len(groups)) < 2e-3  # 0.1 ms on an idle core


def test_a_message_crosses_its_route():
    cluster = Cluster.parse("h100:2x8")
    cost = call_cost(Asked("send", 1 << 20), (0, 8), cluster)
    assert cost.seconds == pytest.approx(2.7e-6 + (1 << 20) / (50e9 * 0.92))
    assert set(cost.link_bytes.values()) == {1 << 20}
    assert call_cost(Asked("send", 8), (3, 3), cluster) == (0.0, {}, 0, 0)
