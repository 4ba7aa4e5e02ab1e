"""The walk of a collective's messages equals the formulas: bytes, messages, and seconds on links
that are alike."""

import time
from typing import NamedTuple

import pytest

from minidist.comm.calls.call import Call
from minidist.comm.collectives.select import ALGORITHMS
from minidist.comm.cost.critical_path import BETWEEN_LEADERS, PATHS, WIRED, Tiers
from minidist.comm.cost.link_model import LinkCost
from minidist.comm.cost.volume import FORMULAS, Case, chunk_bytes
from minidist.comm.limits import STRETCH_BYTES
from minidist.errors import ConfigError
from minidist.simulate.cluster import Cluster, Device
from minidist.simulate.messages import Operands, ProgramCall, record
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.walk import call_cost, walk

COST = LinkCost(
    "flat", 2, alpha=7e-6, overhead=1.5e-6, beta=1e-9, gamma=0.3e-9, misfit=0.0, crowd=0.2e-9
)
ALL = [(verb, name) for verb, names in ALGORITHMS.items() for name in names if name != "native"]
SEVENS = 840 * 9  # elements: divisible by 2 to 10


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
    return Cluster(
        "test",
        "test",
        Device("one", {"float32": 1e12}, 1 << 30, 1e11),
        nodes,
        topology.per_node,
        topology,
    )


def flat(size):
    """Every rank has a link out and a link in, all alike."""
    return cluster_of(Topology(size, wire()), 1)


def cost_on(cluster, size, verb, algorithm, nbytes, **more):
    return call_cost(Asked(verb, algorithm, nbytes, **more), tuple(range(size)), cluster)


# ---------------------------------------------------------------- seconds


def not_waited(size, cost):
    """Down a tree the path counts ceil(log2 P) waits, as lesson 02 does; floor(log2 P) messages
    wait for another."""
    return cost.alpha - cost.overhead if size & (size - 1) else 0.0


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), [*PATHS, *WIRED])
@pytest.mark.parametrize("size", range(2, 10))
def test_links_that_are_alike_give_the_critical_path(verb, algorithm, size):
    n = SEVENS * 4 * (4 if (verb, algorithm) in WIRED else 1)  # also the chunks of a part are equal
    expected = COST.seconds((PATHS | WIRED)[verb, algorithm](size).work(n))
    if (verb, algorithm) == ("all_reduce", "tree"):
        expected -= not_waited(size, COST)
    assert cost_on(flat(size), size, verb, algorithm, n).seconds == pytest.approx(
        expected, rel=1e-12
    )


@pytest.mark.parametrize("verb", BETWEEN_LEADERS)
@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (3, 2), (2, 4), (4, 3)])
def test_leaders_on_two_kinds_of_links(verb, nodes, each):
    """Inside a node links are faster; all leaders have a NIC."""
    inside = LinkCost("inside", 2, 2e-6, 0.5e-6, 0.1e-9, 0.05e-9, 0.0)
    between = LinkCost("between", 2, 7e-6, 1.5e-6, 1e-9, 0.3e-9, 0.0)
    topology = Topology(
        each,
        wire(inside, "inside"),
        between=wire(between, "between"),
        nics=each,
        spines=1,
        nodes_per_leaf=64,
    )
    n = 5040 * 4
    expected = Tiers(nodes, each, inside, between).seconds(verb, n)
    expected -= not_waited(each, inside) if verb == "all_reduce" else 0.0
    cost = cost_on(cluster_of(topology, nodes), nodes * each, verb, "hierarchical", n)
    assert cost.seconds == pytest.approx(expected, rel=1e-12)


def test_stretches_are_continued_exactly():
    """Nine stretches and a rest, walked in full and continued from three, on nodes of unequal
    speed."""
    uneven = Topology(
        2,
        wire(),
        between=wire(COST, "net")._replace(bandwidth=0.2e9),
        nics=1,
        slow={"node1.*": 1.7},
    )
    n = 9 * STRETCH_BYTES + 4096
    for algorithm in ("ring", "hierarchical", "torus"):
        cluster = cluster_of(uneven, 3)
        whole = walk(
            record("all_reduce", algorithm, Operands(n, (), 4), 6, (0, 0, 1, 1, 2, 2)),
            range(6),
            cluster,
        )
        assert cost_on(cluster, 6, "all_reduce", algorithm, n) == (
            pytest.approx(whole.seconds, rel=1e-9),
            *whole[1:],
        )


# ---------------------------------------------------------------- bytes and messages


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), ALL)
@pytest.mark.parametrize("size", [2, 3, 4, 5, 7, 9])
def test_messages_and_bytes_are_those_of_the_formulas(verb, algorithm, size):
    length = 1001
    nodes = (
        tuple(rank * 3 // size for rank in range(size))
        if algorithm == "hierarchical"
        else (0,) * size
    )
    if verb in ("gather", "all_gather", "scatter", "all_to_all"):
        blocks = tuple(7 * (rank + 1) for rank in range(size))
        if verb == "scatter":
            blocks = tuple(chunk_bytes(length, 4, size))
        operands = Operands(4 * length, () if verb == "scatter" else blocks, 4, 2)
    else:
        blocks = tuple(chunk_bytes(length, 4, size))
        operands = Operands(4 * length, (), 4)
    if verb == "broadcast":
        blocks = tuple(chunk_bytes(4 * length, 1, size))
    case = Case(size, 0 if verb == "barrier" else 4 * length, blocks, [blocks] * size, 2, 4, nodes)
    program = record(verb, algorithm, operands, size, nodes)
    formula = FORMULAS[verb, algorithm]
    assert (program.messages, program.sent_bytes) == (
        formula.messages_of(case),
        formula.bytes_of(case),
    )
    cost = cost_on(flat(size), size, verb, algorithm, 4 * length) if not operands.blocks else None
    assert cost is None or cost.seconds > 0


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "verb", ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
)
def test_shared_memory_in_pieces(verb, size):
    n = 5 << 20
    blocks = tuple(chunk_bytes(n // 4, 4, size)) if verb == "reduce_scatter" else (n,) * size
    case = Case(size, n, blocks, [(n,) * size] * size, 1, 4)
    program = record(verb, "shared", Operands(n, (), 4), size)
    formula = FORMULAS[verb, "shared"]
    assert (program.messages, program.sent_bytes) == (
        formula.messages_of(case),
        formula.bytes_of(case),
    )


def test_what_a_link_carries():
    """Around a ring of four each link carries 2(P-1)/P of the array."""
    cost = cost_on(flat(4), 4, "all_reduce", "ring", 4000)
    assert cost.link_bytes == dict.fromkeys(range(8), 6000)


def test_a_rank_adds_more_than_an_int32_counts():
    """Two ranks that tell each other 6 GiB: each adds 6 GiB, more than 2^31 bytes."""
    n = 6 << 30
    expected = COST.seconds(PATHS["all_reduce", "direct"](2).work(n))
    cost = cost_on(flat(2), 2, "all_reduce", "direct", n)
    assert cost.seconds == pytest.approx(expected, rel=1e-12)


# ---------------------------------------------------------------- links that are not alike


def test_messages_that_share_a_link_take_turns():
    """Four devices behind one NIC: each pair of nodes moves four messages at the NIC's pace."""
    net = Wire("net", 0.0, 1e9)
    cluster = cluster_of(Topology(4, Wire("in", 0.0, 1e12), between=net, nics=1), 2)
    program = record("all_to_all", "pairwise", Operands(10**6, (10**6,) * 8), 8)
    seconds = walk(program, range(8), cluster).seconds
    # four send four parts each to the other node
    assert seconds == pytest.approx(4 * 4 * 1e6 / 1e9, rel=0.01)


def test_a_slow_link_slows_the_ring_by_its_factor():
    quick = flat(8)
    slow = flat(8).slowed({"node0.out3": 4.0})
    n = 8 << 20
    ratio = (
        cost_on(slow, 8, "all_reduce", "ring", n).seconds
        / cost_on(quick, 8, "all_reduce", "ring", n).seconds
    )
    assert 2.9 < ratio < 4


def test_a_ring_of_ranks_dealt_round_robin_crosses_a_nic_at_each_hop():
    """Two devices of a V100's node share a NIC."""
    cluster = Cluster.parse("v100:8x8")
    near = tuple(range(64))
    far = tuple(rank % 8 * 8 + rank // 8 for rank in range(64))
    ring = [
        call_cost(Asked("all_reduce", "ring", 4 << 20), members, cluster).seconds
        for members in (near, far)
    ]
    assert ring[1] > 1.5 * ring[0]


def test_many_ranks_take_seconds():
    """Around 256 ranks: 130,560 messages."""
    start = time.process_time()
    assert cost_on(flat(256), 256, "all_reduce", "ring", 1 << 20).messages == 2 * 256 * 255
    assert time.process_time() - start < 5  # 0.6 on an idle core


@pytest.mark.soak
def test_a_thousand_ranks_take_seconds():
    start = time.process_time()
    assert cost_on(flat(1024), 1024, "all_reduce", "ring", 1 << 20).messages == 2 * 1024 * 1023
    assert time.process_time() - start < 30  # 6.4 on an idle core


# ---------------------------------------------------------------- mistakes


def test_unknown_algorithms_are_refused():
    with pytest.raises(
        ConfigError, match="all_reduce has no algorithm 'rings'.*choose naive, tree, ring"
    ):
        cost_on(flat(2), 2, "all_reduce", "rings", 8)


def test_one_rank_costs_nothing():
    assert cost_on(flat(1), 1, "all_reduce", "ring", 8) == (0.0, {}, 0, 0)


def test_a_planted_bug_is_seen(monkeypatch):
    """A ring that sends each chunk to the rank after the next: bytes and messages are right, the
    route is not."""

    def exchange(self, dst, outgoing, src, into, reduce=None, **told):
        ahead = (self.rank + 2) % self.size, (self.rank - 2) % self.size
        Call.exchange(self, ahead[0], outgoing, ahead[1], into, reduce, **told)

    line = cluster_of(Topology(1, wire(), torus=(5,)), 5)
    right = cost_on(line, 5, "reduce_scatter", "ring", 5 * 4096)
    monkeypatch.setattr(ProgramCall, "exchange", exchange)
    wrong = walk(record("reduce_scatter", "ring", Operands(5 * 4096, (), 4), 5), range(5), line)
    assert (wrong.messages, wrong.sent_bytes) == (right.messages, right.sent_bytes)
    assert wrong.seconds > 1.5 * right.seconds
    assert sum(wrong.link_bytes.values()) == 2 * sum(right.link_bytes.values())


def test_a_message_that_nobody_receives_is_seen(monkeypatch):
    monkeypatch.setattr(ProgramCall, "start_recv", lambda self, src, into, reduce=None: _Nothing())
    with pytest.raises(AssertionError, match="every message is received"):
        record("all_reduce", "direct", Operands(64, (), 4), 3)


class _Nothing:
    def wait(self):
        pass
