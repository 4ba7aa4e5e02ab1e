"""One program for all ranks, and all ranks at once: the same as the messages of each rank, one by
one."""

import pytest

from minidist.comm.calls.call import Call
from minidist.comm.collectives.select import ALGORITHMS
from minidist.errors import ConfigError
from minidist.simulate import turned_walk
from minidist.simulate.cluster import Cluster
from minidist.simulate.messages import Operands, ProgramCall, record, record_turned
from minidist.simulate.program import TurnedProgram
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.turned_walk import TurnedWalk
from minidist.simulate.walk import walk

ALL = [(verb, name) for verb, names in ALGORITHMS.items() for name in names if name != "native"]
TURNED = {
    ("all_gather", "ring"),
    ("all_reduce", "direct"),
    ("all_to_all", "pairwise"),
    ("barrier", "dissemination"),
    ("all_reduce", "ring"),
    ("reduce_scatter", "ring"),
}
"""Those that every size of ranks can walk at once, if the parts are equal."""
WIRE = Wire("near", 2e-6, 1e9, 0.5e-6, 0.3e-9, 0.2e-9)
FAR = Wire("far", 7e-6, 2e8, 1.5e-6, 0.3e-9, 0.1e-9)


def clusters(size):
    """Links of each rank; nodes of three behind one card; a line; routes that meet at spines."""
    device = Cluster.parse("h100:1x8").device
    topologies = [
        Topology(size, WIRE),
        Topology(3, WIRE, between=FAR, nics=1, slow={"node1.*": 1.7}),
        Topology(1, WIRE, "", torus=(size,)),
        Topology(2, WIRE, "pcie", between=FAR, nics=2, nodes_per_leaf=2, spines=2),
    ]
    return [
        Cluster("test", "test", device, -(-size // each.per_node), each.per_node, each)
        for each in topologies
    ]


def places(size):
    """In order, and dealt round robin over three."""
    return [tuple(range(size)), tuple(sorted(range(size), key=lambda place: (place % 3, place)))]


def operands(verb, size, nbytes=3000):
    each = nbytes // (4 * size) * 4 * size if verb in ("all_reduce", "reduce_scatter") else nbytes
    return Operands(each, (), 4)


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), ALL)
@pytest.mark.parametrize("size", [2, 3, 5, 8, 9, 13])
def test_all_at_once_is_message_by_message(verb, algorithm, size):
    turned = record_turned(verb, algorithm, operands(verb, size), size)
    assert turned is not None or (verb, algorithm) not in TURNED
    if turned is None:
        return
    each = record(verb, algorithm, operands(verb, size), size)
    assert (turned.messages, turned.sent_bytes) == (each.messages, each.sent_bytes)
    for cluster in clusters(size):
        for members in places(size):
            one = walk(turned, members, cluster)
            other = walk(each, members, cluster)
            assert one == (pytest.approx(other.seconds, rel=1e-12), *other[1:])


@pytest.mark.parametrize("length", [0, 1, 7, 1001])
@pytest.mark.parametrize(
    ("verb", "algorithm"),
    [("all_reduce", "ring"), ("reduce_scatter", "ring"), ("all_reduce", "halving-doubling")],
)
def test_unequal_chunks_are_not_taken_for_equal_ones(verb, algorithm, length):
    """If one program is taken for all ranks, then all ranks have the same bytes, in each
    message."""
    for size in (3, 7, 12, 16):
        turned = record_turned(verb, algorithm, Operands(4 * length, (), 4), size)
        if turned is not None:
            each = record(verb, algorithm, Operands(4 * length, (), 4), size)
            assert sorted(each.nbytes.tolist()) == sorted(turned.nbytes.tolist() * size)


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), sorted(TURNED))
@pytest.mark.parametrize("size", [17, 24, 33])
def test_ranks_that_did_not_run_do_the_same(verb, algorithm, size):
    """Six ranks are run for all; here all are."""
    turned = record_turned(verb, algorithm, operands(verb, size, 12000), size)
    each = record(verb, algorithm, operands(verb, size, 12000), size)
    cluster = clusters(size)[1]
    one = walk(turned, range(size), cluster)
    other = walk(each, range(size), cluster)
    assert one == (pytest.approx(other.seconds, rel=1e-12), *other[1:])


def test_one_rank_that_differs_is_seen(monkeypatch):
    """The last rank sends twice as much: no program stands for all."""

    def exchange(self, dst, outgoing, src, into, reduce=None, **told):
        twice = ProgramCall.workspace(self, 2 * len(outgoing), outgoing.dtype)
        more = outgoing if self.rank < self.size - 1 else twice
        Call.exchange(self, dst, more, src, into, reduce, **told)

    assert isinstance(
        record_turned("reduce_scatter", "ring", Operands(4096, (), 4), 8), TurnedProgram
    )
    monkeypatch.setattr(ProgramCall, "exchange", exchange)
    assert record_turned("reduce_scatter", "ring", Operands(4096, (), 4), 8) is None


def test_a_planted_bug_is_seen(monkeypatch):
    """Messages that share a link and all go at once come too early."""
    cluster = clusters(6)[1]
    program = record_turned("all_to_all", "pairwise", Operands(3000, (), 4), 6)
    right = walk(program, range(6), cluster).seconds
    monkeypatch.setattr("minidist.simulate.turned_walk._Crossing._in_turn", lambda *_: None)
    assert TurnedWalk(program, range(6), cluster).run() < right


def test_rounds_are_left_out_only_when_all_clocks_go_on_alike(monkeypatch):
    """Routes that meet at spines: the first rounds differ. All of them played, or most left out:
    the same."""
    cluster = clusters(24)[3]
    program = record_turned("all_gather", "ring", Operands(3000), 24)
    short = walk(program, range(24), cluster)
    rounds = played(monkeypatch)
    walk(program, range(24), cluster)
    assert 1 < len(rounds) < 23
    monkeypatch.setattr(turned_walk, "EVEN", -1.0)
    rounds.clear()
    assert short == (
        pytest.approx(walk(program, range(24), cluster).seconds, rel=1e-12),
        *short[1:],
    )
    assert len(rounds) == 23
    monkeypatch.setattr(turned_walk, "EVEN", 1e9)  # planted: after one round, whatever it did
    assert walk(program, range(24), cluster).seconds != pytest.approx(short.seconds, rel=1e-3)


def played(monkeypatch):
    """A list that each round which is played adds to."""
    rounds = []
    play = turned_walk._Play
    monkeypatch.setattr(turned_walk, "_Play", lambda *given: rounds.append(play(*given)))
    return rounds


def test_unknown_algorithms_are_refused():
    with pytest.raises(ConfigError, match="all_reduce has no algorithm 'rings'"):
        record_turned("all_reduce", "rings", Operands(8), 4)
