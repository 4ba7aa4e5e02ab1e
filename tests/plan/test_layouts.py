"""Test what calls take in a plan's groups: a short sum among many ranks, which is walked by one
rank's program."""

from collections import Counter

import pytest

from minidist.observe.events import GroupCall
from minidist.parallel.hybrid.plan_checks import AXES
from minidist.plan.layouts import Groups, Layouts
from minidist.simulate import walk
from minidist.simulate.cluster import Cluster
from minidist.simulate.walk import call_cost

SHORT = 256  # bytes: what ranks tell each other beside their gradients


def data_groups(layouts: Layouts, ranks: int) -> Groups:
    """All ranks in one data group."""
    return layouts.groups({**dict.fromkeys(AXES, 1), "dp": ranks}, AXES)["dp"]


def test_a_short_sum_takes_as_long_as_with_each_rank_walked() -> None:
    """96 ranks share 64 bytes: 32 of them have none. Rounded up to 96, the price differs by less
    than 0.01 %."""
    layouts = Layouts(Cluster.parse("h100:12x8"))
    groups = data_groups(layouts, 96)
    walked = call_cost(
        GroupCall("", "all_reduce", "ring", 64), groups[0], Cluster.parse("h100:12x8")
    ).seconds
    assert layouts.price(groups, "all_reduce", "ring", 64, ()) == pytest.approx(walked, rel=1e-4)


def test_the_ring_of_a_thousand_ranks_is_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded rank by rank, its two million messages take some 8 s of a processor, for each layout
    of a plan."""

    def each_rank(*_: object) -> None:
        raise AssertionError("walked rank by rank")

    monkeypatch.setattr(walk, "record", each_rank)
    layouts = Layouts(Cluster.parse("h100:128x8"))
    assert layouts.price(data_groups(layouts, 1024), "all_reduce", "ring", SHORT, ()) > 0


@pytest.mark.parametrize(
    ("verb", "nbytes"), [("all_reduce", 4096), ("all_reduce", 1 << 26), ("all_gather", 1 << 20)]
)
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_groups_that_share_links_take_as_long_as_the_bytes_on_each_link_say(
    axis: str, verb: str, nbytes: int
) -> None:
    layouts = Layouts(Cluster.parse("h100:4x8"))
    groups = layouts.groups(
        {**dict.fromkeys(AXES, 1), "dp": 16, "tp": 2}, ("tp", "pp", "ep", "cp", "dp")
    )[axis]
    links = layouts.cluster.links
    own, *others = (
        call_cost(GroupCall("", verb, "native", nbytes), group, layouts.cluster) for group in groups
    )
    loads = Counter(own.link_bytes)
    for other in others:
        loads.update(other.link_bytes)
    alone, shared = (
        max(sent[link] / links[link].bandwidth for link in own.link_bytes)
        for sent in (own.link_bytes, loads)
    )
    expected = own.seconds + shared - alone
    assert layouts.price(groups, verb, "native", nbytes, ()) == pytest.approx(expected, rel=1e-6)
