"""The walk of a collective's messages equals the formulas: bytes, messages, and seconds on links that are alike."""

from typing import NamedTuple

import pytest

from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.critical_path import BETWEEN_LEADERS, PATHS, Tiers
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.cost.volume import FORMULAS, Case, chunk_bytes
from minidist.comm.limits import STRETCH_BYTES
from minidist.errors import ConfigError
from minidist.simulate.cluster import Cluster, Device
from minidist.simulate.messages import Operands, record
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.walk import call_cost

COST = LinkCost("flat", 2, alpha=7e-6, overhead=1.5e-6, beta=1e-9, gamma=0.3e-9, misfit=0.0, crowd=0.2e-9)
ALL = [(verb, name) for verb, names in ALGORITHMS.items() for name in names if name != "native"]
SEVENS = 840 * 9        # elements: divisible by 2 to 10


class Asked(NamedTuple):
    verb: str
    algorithm: str
    nbytes: int = 0
    blocks: tuple[int, ...] = ()
    itemsize: int = 4
    dims: int = 1


def wire(cost=COST, name="flat"):
    return Wire(name, cost.alpha, 1 / cost.beta, cost.overhead, cost.gamma, cost.crowd)


def cluster_of(topology, nodes):
    return Cluster("test", "test", Device("one", {"float32": 1e12}, 1 << 30, 1e11), nodes, topology.per_node, topology)


def flat(size):
    """Every rank has a link out and a link in, all alike."""
    return cluster_of(Topology(size, wire()), 1)


def cost_on(cluster, size, verb, algorithm, nbytes, **more):
    return call_cost(Asked(verb, algorithm, nbytes, **more), tuple(range(size)), cluster)


# ---------------------------------------------------------------- seconds


@pytest.mark.parametrize(("verb", "algorithm"), PATHS)
@pytest.mark.parametrize("size", range(2, 10))
def test_links_that_are_alike_give_the_critical_path(verb, algorithm, size):
    n = SEVENS * 4
    expected = COST.seconds(PATHS[verb, algorithm](size).work(n))
    assert cost_on(flat(size), size, verb, algorithm, n).seconds == pytest.approx(expected, rel=1e-12)
