"""A SymmetricProgram, one rank's messages for all ranks, costs what the Program of each rank's
messages does; rounds that are skipped cost what they would cost if they were played."""

import pytest

from minidist.comm.calls.call import Call
from minidist.comm.collectives.select import ALGORITHMS
from minidist.errors import ConfigError
from minidist.simulate.cluster import Cluster
from minidist.simulate.links import CallLinks
from minidist.simulate.messages import Operands, ProgramCall, record, record_symmetric
from minidist.simulate.program import SymmetricProgram
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.walk import MessageWalk, walk

ALL = [(verb, name) for verb, names in ALGORITHMS.items() for name in names if name != "native"]
SYMMETRIC = {
    ("all_gather", "ring"),
    ("all_reduce", "direct"),
    ("all_to_all", "pairwise"),
    ("barrier", "dissemination"),
    ("all_reduce", "ring"),
    ("reduce_scatter", "ring"),
}
"""Algorithms in which all ranks do the same for every number of ranks, if the parts are equal."""
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
def test_a_symmetric_program_costs_what_each_ranks_program_costs(verb, algorithm, size):
    symmetric = record_symmetric(verb, algorithm, operands(verb, size), size)
    assert symmetric is not None or (verb, algorithm) not in SYMMETRIC
    if symmetric is None:
        return
    each = record(verb, algorithm, operands(verb, size), size)
    assert (symmetric.messages, symmetric.sent_bytes) == (each.messages, each.sent_bytes)
    for cluster in clusters(size):
        for members in places(size):
            one = walk(symmetric, members, cluster)
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
        symmetric = record_symmetric(verb, algorithm, Operands(4 * length, (), 4), size)
        if symmetric is not None:
            each = record(verb, algorithm, Operands(4 * length, (), 4), size)
            assert sorted(each.nbytes.tolist()) == sorted(symmetric.nbytes.tolist() * size)


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), sorted(SYMMETRIC))
@pytest.mark.parametrize("size", [17, 24, 33])
def test_ranks_that_did_not_run_do_the_same(verb, algorithm, size):
    """Six ranks are run for all; here all are."""
    symmetric = record_symmetric(verb, algorithm, operands(verb, size, 12000), size)
    each = record(verb, algorithm, operands(verb, size, 12000), size)
    cluster = clusters(size)[1]
    one = walk(symmetric, range(size), cluster)
    other = walk(each, range(size), cluster)
    assert one == (pytest.approx(other.seconds, rel=1e-12), *other[1:])


def test_one_rank_that_differs_is_seen(monkeypatch):
    """The last rank sends twice as much: no program stands for all."""

    def exchange(self, dst, outgoing, src, into, reduce=None, **told):
        twice = ProgramCall.workspace(self, 2 * len(outgoing), outgoing.dtype)
        more = outgoing if self.rank < self.size - 1 else twice
        Call.exchange(self, dst, more, src, into, reduce, **told)

    assert isinstance(
        record_symmetric("reduce_scatter", "ring", Operands(4096, (), 4), 8), SymmetricProgram
    )
    monkeypatch.setattr(ProgramCall, "exchange", exchange)
    assert record_symmetric("reduce_scatter", "ring", Operands(4096, (), 4), 8) is None


def test_messages_that_do_not_take_turns_are_seen(monkeypatch):
    """Planted: messages that share a link all go at once, and so arrive too early."""
    cluster = clusters(6)[1]
    program = record_symmetric("all_to_all", "pairwise", Operands(3000, (), 4), 6)
    right = walk(program, range(6), cluster).seconds
    monkeypatch.setattr(
        CallLinks,
        "take_in_turn",
        lambda self, link, ready, busy, *_: self.take(link, ready, busy),
    )
    assert walk(program, range(6), cluster).seconds < right


def test_rounds_are_skipped_only_after_one_that_delays_all_equally(monkeypatch):
    """Routes that meet at spines: the first rounds differ. All rounds played, or most skipped: the
    same cost."""
    cluster = clusters(24)[3]
    program = record_symmetric("all_gather", "ring", Operands(3000), 24)
    short = walk(program, range(24), cluster)
    rounds = played(monkeypatch)
    walk(program, range(24), cluster)
    assert 1 < len(rounds) < 23
    monkeypatch.setattr("minidist.simulate.walk.EVEN", -1.0)
    rounds.clear()
    assert short == (
        pytest.approx(walk(program, range(24), cluster).seconds, rel=1e-12),
        *short[1:],
    )
    assert len(rounds) == 23
    # planted: all rounds after the first are skipped
    monkeypatch.setattr("minidist.simulate.walk.EVEN", 1e9)
    assert walk(program, range(24), cluster).seconds != pytest.approx(short.seconds, rel=1e-3)


def played(monkeypatch):
    """Return a list to which each round that is played is added."""
    rounds = []
    run = MessageWalk.run

    def noted(self):
        rounds.append(self.program)
        return run(self)

    monkeypatch.setattr(MessageWalk, "run", noted)
    return rounds


@pytest.mark.parametrize("verb", ["all_gather", "all_reduce"])
def test_a_ring_of_many_ranks_has_few_rounds(verb):
    """The rounds that add, and those that store: each kind is one small program."""
    program = record_symmetric(verb, "ring", Operands(4 * 512, (), 4), 512)
    rounds = list(program.rounds())
    assert [times for _, times in rounds] == [511] * len(rounds)
    assert [len(part.src) for part, _ in rounds] == [512] * len(rounds)
    assert [bool(part.adds.all()) for part, _ in rounds] == [True, False][-len(rounds) :]
    assert len(rounds) == {"all_gather": 1, "all_reduce": 2}[verb]


def test_unknown_algorithms_are_refused():
    with pytest.raises(ConfigError, match="all_reduce has no algorithm 'rings'"):
        record_symmetric("all_reduce", "rings", Operands(8), 4)
