"""When messages leave and arrive: by hand for three small calls; and the last when the walk of the
whole call ends."""

import pytest

from minidist.comm.collectives.select import ALGORITHMS
from minidist.observe.events import GroupCall
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import Device
from minidist.simulate.message_times import message_times
from minidist.simulate.messages import Operands
from minidist.simulate.topology import Topology, Wire
from minidist.simulate.walk import call_cost


def even(size: int, alpha: float = 1.0) -> Cluster:
    """Links that are all alike, on which only α takes time."""
    links = Topology(size, Wire("link", alpha, float("inf"), 0.0, 0.0, 0.0))
    return Cluster("links", "links", Device("rank", {"float64": 1.0}, 1, 1.0), 1, size, links)


@pytest.mark.parametrize(
    ("verb", "algorithm", "moments"),
    [
        ("all_reduce", "naive", [(1, 0, 0, 1), (2, 0, 1, 2), (0, 1, 2, 3), (0, 2, 3, 4)]),
        (
            "all_reduce",
            "ring",
            [(rank, (rank + 1) % 3, step, step + 1) for step in range(4) for rank in range(3)],
        ),
        ("broadcast", "tree", [(0, 1, 0, 1), (0, 2, 0, 1)]),
        (
            "all_to_all",
            "pairwise",
            [(src, dst, 0, 1) for src in range(3) for dst in range(3) if src != dst],
        ),
    ],
)
def test_by_hand(verb: str, algorithm: str, moments: list[tuple[int, int, int, int]]) -> None:
    found = message_times(verb, algorithm, Operands(24, itemsize=8), even(3), range(3))
    assert [(each.src, each.dst, each.start, each.stop) for each in found] == moments
    assert (
        sum(each.nbytes for each in found)
        == {"naive": 96, "ring": 96, "tree": 48, "pairwise": 144}[algorithm]
    )


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_the_last_message_arrives_when_the_call_ends(size: int) -> None:
    for algorithm in ALGORITHMS["all_reduce"]:
        if algorithm in ("native", "shared", "hierarchical"):
            continue
        whole = call_cost(
            GroupCall("w", "all_reduce", algorithm, 8 * size, itemsize=8),
            range(size),
            even(size, 0.5),
        )
        last = max(
            each.stop
            for each in message_times(
                "all_reduce",
                algorithm,
                Operands(8 * size, itemsize=8),
                even(size, 0.5),
                range(size),
            )
        )
        assert last == pytest.approx(whole.seconds, rel=1e-12), algorithm
