"""Clusters by name, their shapes and sources, and files of a user."""

import pytest

from minidist.errors import ConfigError
from minidist.reading import read_toml
from minidist.simulate.cluster import OWN_FILE, Cluster, names

KNOWN = [
    *("a100-40g", "a100-80g", "a100-pcie", "b200", "gh200", "h100", "h100-500w", "h100-cxl"),
    *("h100-pcie", "h100-pcie6", "h200", "mi300x", "tpu-v4", "tpu-v5p", "v100"),
]
OWN = """
[wire.my-net]
bandwidth = 2e9
alpha = 5e-6
[cluster.rack]
device = "mine"
peak = { float32 = 1e12 }
memory_bytes = 8_000_000_000
memory_bandwidth = 1e11
per_node = 2
inside = "pcie4"
kind = "pcie"
network = "my-net"
spines = 2
nodes_per_leaf = 2
"""


def test_the_clusters_there_are():
    assert names() == KNOWN
    for name in KNOWN:
        cluster = Cluster.parse(f"{name}:8")
        assert cluster.size == 8
        assert cluster.device.peak("float16" if name == "v100" else "bfloat16") > 1e14
        assert len(cluster.route(0, 7)) >= 1


def test_a_variant_differs_only_in_what_it_says():
    """An H100 of 500 W: the memory of its own, the wires of an H100; its products are slower."""
    usual, variant = (Cluster.parse(f"{name}:8") for name in ("h100", "h100-500w"))
    assert variant.device.memory_bandwidth == 2400e9
    assert variant.device.units == usual.device.units == 132
    assert variant.topology.inside == usual.topology.inside
    assert variant.host_watts == pytest.approx(usual.host_watts)
    best = [cluster.device.best("bfloat16") for cluster in (usual, variant)]
    assert best[1] / best[0] == pytest.approx((500 / 700) ** 0.2)
    assert variant.device.peak("bfloat16") == usual.device.peak("bfloat16")


def test_a_variant_of_a_cluster_that_there_is_not(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text('[cluster.mine]\nlike = "h10"\nwatts = 500\n')
    with pytest.raises(ConfigError, match="mine is like 'h10'; did you mean h100"):
        Cluster.parse(f"{path}:mine:8")


def test_every_number_has_a_source():
    tables = read_toml(OWN_FILE)
    for kind in ("wire", "tier", "cluster"):
        for name, entry in tables[kind].items():
            numbers = {
                key
                for key, value in entry.items()
                if isinstance(value, int | float | dict) and key != "source"
            }
            lacking = numbers - set(entry["source"]) - {"torus_dims"}
            assert not lacking, f"{kind}.{name}: {sorted(lacking)} without a source"


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"),
    [
        ("h100:128x8", 128, 8),
        ("h100:1024", 128, 8),
        ("h100:4", 1, 4),
        ("a100-80g:2x4", 2, 4),
        ("tpu-v4:4x4x4", 16, 4),
    ],
)
def test_shapes(text, nodes, per_node):
    cluster = Cluster.parse(text)
    assert (cluster.nodes, cluster.per_node) == (nodes, per_node)


def test_a_torus_of_a_number_of_devices_is_the_most_even():
    assert Cluster.parse("tpu-v4:128").topology.torus == (4, 4, 8)
    assert Cluster.parse("tpu-v5p:27").topology.torus == (3, 3, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h10:8", "no cluster 'h10'; did you mean h100"),
        ("h100", "write NAME:NODESxDEVICES, such as h100:16x8"),
        ("h100:axb", "'axb' is no shape"),
        ("h100:12", "choose 8 or 16"),
        ("h100:0", "is no shape"),
        ("h100:2x2x2", "write nodes x devices, such as 2x2"),
        ("tpu-v4:8192", "more than the 4096"),
        ("tpu-v4:8x8", "3 dims"),
        ("/no/such.toml:x:2x2", "No such file"),
    ],
)
def test_mistakes_are_answered_in_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as raised:
        Cluster.parse(text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "spec"),
    [("H100:2x8", "h100:2x8"), ("A100-80G:8", "a100-80g:8"), ("TPU-v4:2x2x2", "tpu-v4:2x2x2")],
)
def test_upper_and_lower_case_are_alike(text, spec):
    assert Cluster.parse(text).spec == spec
    assert Cluster.parse(text).device == Cluster.parse(spec).device


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a100", "; did you mean a100-40g or a100-80g or a100-pcie?"),
        ("A100", "; did you mean a100-40g or a100-80g or a100-pcie?"),
        ("h10", "; did you mean h100 or h100-500w or h100-cxl or h100-pcie or h100-pcie6?"),
        ("tpu", "; did you mean tpu-v4 or tpu-v5p?"),
        ("x100", ""),
        ("100h", ""),
        ("gpu", ""),
    ],
)
def test_near_names_are_suggested_and_all_are_listed(name, told):
    with pytest.raises(ConfigError) as raised:
        Cluster.parse(f"{name}:8")
    known = ", ".join(KNOWN)
    assert str(raised.value) == (
        f"no cluster {name!r}{told}; choose from {known}, or give a file of yours"
    )


def test_a_file_of_yours(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(OWN)
    cluster = Cluster.parse(f"{path}:rack:4x2")
    assert Cluster.parse("rack:4x2", path).device == cluster.device
    assert [cluster.links[number].name for number in cluster.route(0, 7)] == [
        "node0.up0",
        "node0.hca0-down",
        "node0.nic0-out",
        "leaf0.rail0.up1",
        "leaf1.rail0.down1",
        "node3.nic0-in",
        "node3.hca0-up",
        "node3.down1",
    ]
    assert cluster.device.price_an_hour is None
    assert Cluster.parse("h100:8", path).device.name.startswith("NVIDIA")
    path.write_text(OWN.replace("cluster.rack", "cluster.Rack"))
    assert Cluster.parse(f"{path}:RACK:4x2").spec == f"{path}:Rack:4x2"
    path.write_text(OWN.replace('"my-net"', '"mynet"'))
    with pytest.raises(ConfigError, match="no wire 'mynet'; did you mean my-net"):
        Cluster.parse(f"{path}:rack:4x2")
    path.write_text(OWN.replace("per_node = 2", ""))
    with pytest.raises(ConfigError, match="cluster rack lacks 'per_node'"):
        Cluster.parse(f"{path}:rack:4x2")
    path.write_text("[cluster")
    with pytest.raises(ConfigError, match="mine.toml"):
        Cluster.parse(f"{path}:rack:4x2")


def test_moves_take_the_tier_that_their_lane_names():
    cluster = Cluster.parse("h100:8")
    host = cluster.tiers["host"]
    disk = cluster.tiers["disk"]
    assert cluster.move_seconds("device to host", 10**9) == host.alpha + 10**9 / host.bandwidth
    assert cluster.move_seconds("host to disk", 10**9) == disk.alpha + 10**9 / disk.bandwidth


def test_a_cluster_like_another_has_its_other_keys():
    usual = Cluster.parse("h100:2x8")
    wider = Cluster.parse("h100-pcie6:2x8")
    assert wider.device == usual.device
    assert wider.tiers["host"].bandwidth == pytest.approx(121e9 * 0.78)
    assert wider.tiers["host"].nbytes == usual.tiers["host"].nbytes
    assert "on paper" in wider.sources["host"] and wider.sources["peak"] == usual.sources["peak"]


@pytest.mark.parametrize("like", ["h1000", "h100-cxl"])
def test_a_cluster_is_like_one_that_is_like_no_other(tmp_path, like):
    file = tmp_path / "own.toml"
    file.write_text(f'[cluster.mine]\nlike = "{like}"\n')
    with pytest.raises(ConfigError, match="mine.*h100"):
        Cluster.parse(f"{file}:mine:8")


def test_files_of_offloading_lie_on_the_disk_or_on_cxl_memory():
    usual = Cluster.parse("h100:1x8")
    cxl = Cluster.parse("h100-cxl:1x8")
    assert cxl.move_seconds("host to disk", 10**9) == pytest.approx(1e-6 + 1 / 31.5)
    assert usual.move_seconds("host to disk", 10**9) == pytest.approx(1e-4 + 1 / 3.8)
    assert cxl.move_seconds("device to host", 10**9) == usual.move_seconds("device to host", 10**9)
    assert cxl.tiers["disk"] == usual.tiers["disk"]  # where checkpoints go


def test_a_tier_that_there_is_not_is_refused(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text('[cluster.mine]\nlike = "h100"\nbelow = "cxl3"\n')
    with pytest.raises(ConfigError, match="cxl3.*cxl2"):
        Cluster.parse(f"{file}:mine:8")


@pytest.mark.parametrize(("per_node", "sharing"), [(8, 2), (1, 1)])
def test_devices_below_one_pcie_switch_share_its_lanes_to_the_host(per_node, sharing):
    cluster = Cluster.parse(f"a100-pcie:1x{per_node}")
    assert cluster.tiers["host"].bandwidth == pytest.approx(7.9e9 * 0.78 / sharing)
