"""Exercise 04: filled rightly it passes, and each wrong filling fails under its name; wirings
counted by hand."""

import time
from pathlib import Path

import pytest
from filling import assert_named, graded, right

from minidist import launch, lessons
from minidist.grading import load_module
from minidist.simulate.cluster import Cluster

RIGHT = right("04")
WRONG = {
    "one way round only": {1: "(b - a) % size"},
    "a line, not a ring": {1: "abs(a - b)"},
    "links inside the half": {2: "sum(a in half and b in half for a, b in links)"},
    "each link counted twice": {2: "sum((a in half) != (b in half) for a, b in links) * 2"},
    "a rank missing on its own machine": {
        3: "[other for other in range(len(nodes)) if nodes[other] == nodes[rank] and other != rank]"
    },
    "ranks that follow each other": {
        3: "range(nodes.index(nodes[rank]), nodes.index(nodes[rank]) + nodes.count(nodes[rank]))"
    },
    "the wrong ranks of a machine": {
        3: "[other for other in range(len(nodes)) if nodes[other] != nodes[rank]]"
    },
    "machines' numbers are not ranks": {4: "sorted(set(nodes))"},
    "not one rank of each machine": {4: "range(len(nodes))"},
    "a leader without other machines' sums": {5: "tree.plain_reduce(leaders, total, root=0)"},
    "not a ring of the leaders": {
        5: "total + sum(leaders.exchange(total, dst=(leaders.rank + k) % leaders.size, "
        "src=(leaders.rank - k) % leaders.size) for k in range(1, leaders.size))"
    },
    "parts are added more than once": {5: "ring.plain_all_reduce(leaders, total) * leaders.size"},
    "a leader has its own array, not a sum": {6: "x"},
    "a leader has lost its own machine's sum": {5: "ring.plain_all_reduce(leaders, x)"},
    "every rank in the sum once: parts are added more than once": {
        6: "ring.plain_all_reduce(node, total)"
    },
    "a rank is never told": {6: "total"},
    "ranks wait for each other": {6: "ring.plain_all_reduce(node, total) if node.rank else total"},
    "whole tensors round the ring": {7: "2 * (size - 1) * (alpha + nbytes * beta)"},
    "half of the ring": {8: "(machines - 1) * (alpha + nbytes / machines * beta)"},
    "α and β swapped": {9: "tuple(np.polyfit(sizes, seconds, 1))"},
}
wiring = load_module(lessons.find("04").part("wiring.py"), "04")


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("04", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.sampled(every=16)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("04", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("04", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_04.py line" in result.results[-1].line()
    )


@pytest.mark.parametrize(
    ("make", "size", "links", "most", "bisection"),
    [
        ("ring", 8, 8, 4, 2),
        ("torus", 8, 12, 3, 4),
        ("torus", 9, 18, 2, 8),
        ("torus", 5, 5, 2, 2),
        ("switch", 6, 6, 2, 3),
        ("two_machines", 6, 7, 3, 1),
        ("full", 5, 10, 1, 6),
        ("ring", 2, 1, 1, 1),
    ],
)
def test_wirings_counted_by_hand(
    make: str, size: int, links: int, most: int, bisection: int
) -> None:
    wires = getattr(wiring, make)(size)
    assert (len(wires.links), max(wiring.hops(wires)), wiring.bisection(wires)) == (
        links,
        most,
        bisection,
    )


@pytest.mark.parametrize("sizes", [(7, 9, 27), pytest.param((64,), marks=pytest.mark.soak)])
def test_both_ways_round_a_torus(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The story's table is what the messages give, and equals the formula; a torus of three dims,
    counted by hand."""
    story = lessons.find("04").part("README.md").read_text(encoding="utf-8")
    lesson = load_module(lessons.find("04").part("lesson.py"), "04")
    assert set(sizes) < set(lesson.BOXES)
    monkeypatch.setattr(lesson, "BOXES", sizes)
    for *cells, told in lesson.on_tori():
        assert told == "ok" and f"| {' | '.join(map(str, cells))} |" in story
    assert len(wiring.box((3, 3, 3)).links) == 81 and max(wiring.hops(wiring.box((3, 3, 3)))) == 3
    assert wiring.torus(8) == wiring.box((2, 4))


def test_a_message_is_shared_among_its_shortest_ways() -> None:
    assert wiring.load(wiring.ring(4), [(0, 2, 10)]) == {(0, 1): 5, (1, 2): 5, (0, 3): 5, (3, 2): 5}


def test_only_messages_to_other_machines_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    links = load_module(lessons.find("04").part("links.py"), "04")
    start = links.Delayed.start_send
    held = []

    def start_send(self, peer, *args):
        held.append((self.world_rank, peer))
        return start(self, peer, *args)

    monkeypatch.setattr(links.Delayed, "start_send", start_send)

    def ranks(world, nodes):
        with links.machines(world, nodes, alpha=0.1, beta=0.0) as cluster:
            world.barrier()
            begin = time.perf_counter()
            assert float(cluster.all_reduce(world.rank + 1.0, algorithm="hierarchical")) == 6
            assert cluster.nodes == tuple(nodes)
            return time.perf_counter() - begin

    launch.run(ranks, [0, 0, 0], size=3)
    assert held == []
    across = launch.run(ranks, [0, 0, 1], size=3)
    # what agrees goes round
    assert {frozenset(pair) for pair in held} == {frozenset({0, 2}), frozenset({1, 2})}
    assert min(across) > 0.29  # a header, and the leaders' two messages


def test_two_hosts_say_what_crosses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = load_module(lessons.find("04").part("hosts.py"), "04")
    assert hosts.bytes_per_second("200mbit") == 25e6
    assert (hosts.crossing("ring", 8, 2), hosts.crossing("hierarchical", 8, 2)) == (1.75, 1.0)
    assert (hosts.waits("ring", 8, 2), hosts.waits("hierarchical", 8, 2)) == (14, 2)
    assert (hosts.seconds_of("250us"), hosts.seconds_of("2ms"), hosts.seconds_of("1s")) == (
        250e-6,
        2e-3,
        1.0,
    )
    monkeypatch.setattr("sys.argv", ["hosts.py", "--delay", "soon"])
    with pytest.raises(SystemExit):
        hosts.main()
    assert "'soon' is no delay; choose one like 2ms" in capsys.readouterr().err
    monkeypatch.setattr(hosts, "missing", lambda: "network namespaces are made by root")
    monkeypatch.setattr("sys.argv", ["hosts.py"])
    hosts.main()
    assert (
        capsys.readouterr().out
        == "no two hosts on this machine: network namespaces are made by root\n"
    )


@pytest.mark.soak
def test_two_hosts_measured(tmp_path: Path) -> None:
    hosts = load_module(lessons.find("04").part("hosts.py"), "04")
    if hosts.missing() is not None:
        pytest.skip(hosts.missing())
    measured = hosts.measure("200mbit")
    times = {(algorithm, nbytes): took for algorithm, nbytes, took in measured["rows"]}
    assert times["hierarchical", hosts.SIZES[-1]] < 0.85 * times["ring", hosts.SIZES[-1]]
    hosts.draw(measured, tmp_path)
    assert (tmp_path / "hosts.png").stat().st_size > 10_000


def test_adaptive_routing_never_waits_where_cables_suffice_and_static_does() -> None:
    """16 machines, four spines: the story's table."""
    spines = load_module(lessons.find("04").part("spines.py"), "04")
    static = spines.fabric("static")
    adaptive = spines.fabric("adaptive")
    half = spines.fabric("adaptive", 2.0)
    for steps in spines.traffic().values():
        for pairs in steps:
            assert spines.slowest(adaptive, pairs) == 1.0 <= spines.slowest(static, pairs)
            assert spines.slowest(half, pairs) <= 2.0
    assert spines.slowest(static, spines.shift(1)) == 1.0  # a ring in the machines' order
    drawn = [spines.slowest(static, pairs) for pairs in spines.permutations(spines.DRAWN)]
    assert (sum(drawn) / len(drawn), max(drawn)) == (pytest.approx(2.5, abs=0.005), 4.0)


def test_bytes_cross_on_the_axis_that_does_not_lie_inside() -> None:
    """A ring of P ranks sends 2(P-1)/P n over each link: dp's four pairs 2 n each, tp's two rings 3
    n at two links."""
    spines = load_module(lessons.find("04").part("spines.py"), "04")
    cluster = Cluster.parse("h100:2x4")
    crossed = [
        tuple(spines.across(axis, dealt.places, cluster)[0] for axis in ("tp", "dp"))
        for dealt in spines.dealings()
    ]
    assert crossed == [(0.0, 8.0), (6.0, 0.0), (12.0, 0.0)]


@pytest.mark.soak
def test_two_hosts_far_from_each_other() -> None:
    """Short arrays wait: 14 times for a flat ring of eight, twice for two leaders."""
    hosts = load_module(lessons.find("04").part("hosts.py"), "04")
    if hosts.missing() is not None:
        pytest.skip(hosts.missing())
    measured = hosts.measure("200mbit", "5ms")
    times = {(algorithm, nbytes): took for algorithm, nbytes, took in measured["rows"]}
    assert times["ring", hosts.SIZES[0]] > 14 * 5e-3
    assert 2 * 5e-3 < times["hierarchical", hosts.SIZES[0]] < 0.6 * times["ring", hosts.SIZES[0]]
    assert measured["by_kernel"] == hosts.delays()


def test_the_storys_loads_of_eight_ranks_are_the_lessons() -> None:
    """Two machines carry four arrays where every rank talks to the other side; the three ways round
    a torus."""
    story = " ".join(lessons.find("04").part("README.md").read_text(encoding="utf-8").split())
    lesson = load_module(lessons.find("04").part("lesson.py"), "04")
    tables = []

    class Page:
        def __init__(self, writes: bool) -> None:
            self.writes = writes

        def table(
            self, title: str, columns: list[str], rows: list[list[str]], note: str = ""
        ) -> None:
            if self.writes:
                tables.append(
                    {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
                )

    launch.run(lambda group: lesson.same_messages(group, Page(group.rank == 0)), size=8)
    (loads,) = tables
    assert max(float(load["two machines"].split()[0]) for load in loads.values()) == 4
    assert loads["pairwise"]["two machines"] == "4.00 n"
    assert "four times the array if every rank talks to the other side" in story
    both, grid, ring = (loads[name]["torus"] for name in ("torus-both", "torus", "ring"))
    assert (
        f"link carries {both}, where the torus algorithm's carries {grid} and the ring's {ring}"
        in story
    )


def test_a_message_leaves_the_server_sooner_than_it_crosses_it() -> None:
    """N4's server: 4 lanes to the CPU, 24.6 / 4 GB/s; a card of 23 GB/s below the GPUs' own switch.
    Where two GPUs share a link, two messages take twice as long."""
    server = load_module(lessons.find("04").part("server.py"), "04")
    cluster = Cluster.parse("a100-pcie:2x8")
    ways = {
        trip.to: [server.stop(link) for link in server.route(Cluster.parse(trip.cluster), 0, dst)]
        for trip in server.TRIPS
        for dst in [trip.partner(0)]
    }
    assert ways["GPU 2, below another PLX"] == ["PLX", "CPU", "PLX", "GPU"]
    assert ways["GPU 0 of the next server"] == ["PLX", "HCA", "IB switch", "HCA", "PLX", "GPU"]
    inside = server.seconds(cluster, [(0, 2)])
    out = server.seconds(cluster, [(0, 8)])
    assert inside / out == pytest.approx(3.7, abs=0.05)
    assert inside == pytest.approx(server.NBYTES / (7.9e9 * 0.78) + 2e-6)
    assert server.seconds(cluster, [(0, 8), (1, 9)]) == pytest.approx(2 * out, rel=0.01)
    assert server.seconds(cluster, [(0, 1), (1, 0)]) == server.seconds(cluster, [(0, 1)])
