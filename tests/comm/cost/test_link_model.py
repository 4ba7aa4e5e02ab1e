"""The α-β profile: fitted from samples, kept in a file, agreed upon by a job, and obeyed by
auto."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from helpers import MIXED, run

import minidist as md
from minidist.comm.collectives.select import ALGORITHMS, choose
from minidist.comm.cost.critical_path import PATHS, fastest
from minidist.comm.cost.link_model import (
    LinkCost,
    LinkWork,
    Profile,
    Sample,
    fit,
    load_profile,
    profile_path,
    save_profile,
)
from minidist.comm.cost.volume import FORMULAS, Case, chunk_bytes
from minidist.errors import ConfigError

SLOW_START = LinkCost(
    "tcp", 2, alpha=1e-3, overhead=1e-6, beta=1e-9, gamma=1e-10, misfit=0.0, crowd=0.0
)
WORKS = [
    LinkWork(1, 1, n, added * n) for n in (0, 1 << 10, 1 << 16, 1 << 22) for added in (0, 1)
] + [LinkWork(1, 8, 0, 0), *(LinkWork(1, 3, n, 0, n) for n in (1 << 10, 1 << 20))]


def sampled(cost, wrong=lambda index: 1.0):
    return [Sample(work, cost.seconds(work) * wrong(index)) for index, work in enumerate(WORKS)]


@pytest.fixture
def home(monkeypatch, tmp_path):
    """A user without a profile."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path


# ---------------------------------------------------------------- the fit


def test_a_fit_finds_the_numbers_that_made_the_samples():
    cost = fit("tcp", 2, sampled(SLOW_START))
    for name in ("alpha", "overhead", "beta", "gamma", "crowd"):
        assert getattr(cost, name) == pytest.approx(getattr(SLOW_START, name), rel=1e-6, abs=1e-15)
    crowded = replace(SLOW_START, crowd=3e-9)
    assert fit("tcp", 2, sampled(crowded)).crowd == pytest.approx(3e-9, rel=1e-6)
    assert cost.misfit < 1e-9


def test_a_fit_to_disturbed_samples_is_near_and_says_how_far_off_it_is():
    """Each sample is off by up to 10 %: by parts, not by microseconds, so small messages count as
    much as large."""
    cost = fit("tcp", 2, sampled(SLOW_START, wrong=lambda index: 1.1 if index % 2 else 0.9))
    assert cost.alpha == pytest.approx(SLOW_START.alpha, rel=0.12)
    assert cost.beta == pytest.approx(SLOW_START.beta, rel=0.15)
    worst = max(
        abs(cost.seconds(sample.work) / sample.seconds - 1)
        for sample in sampled(SLOW_START, wrong=lambda index: 1.1 if index % 2 else 0.9)
    )
    assert cost.misfit == pytest.approx(worst)
    assert 0.05 < cost.misfit < 0.25


def test_a_long_message_that_was_disturbed_leaves_the_latency_alone():
    """4 MiB took 30 % more, 1.3 ms: a hundred times the latency, which a fit to seconds would bend
    to it."""
    quick = LinkCost("shm", 2, alpha=1e-5, overhead=1e-6, beta=1e-9, gamma=0.0, misfit=0.0)
    cost = fit(
        "shm", 2, sampled(quick, wrong=lambda index: 1.3 if WORKS[index].moved == 1 << 22 else 1.0)
    )
    assert cost.alpha == pytest.approx(1e-5, rel=0.1)


def test_no_number_is_below_zero():
    """Adding was faster than storing: γ is 0, and the other three are fitted without it."""
    samples = [
        Sample(work, 1e-5 + 1e-9 * work.moved - 1e-10 * work.added + 1e-6 * (work.messages - 1))
        for work in WORKS
    ]
    cost = fit("shm", 2, samples)
    assert cost.gamma == 0
    assert cost.alpha == pytest.approx(1e-5, rel=0.05)
    # between the two: not as if γ were below 0
    assert cost.beta == pytest.approx(0.95e-9, rel=0.03)


# ---------------------------------------------------------------- paths


@pytest.mark.sampled
@pytest.mark.parametrize(("verb", "algorithm"), PATHS)
@pytest.mark.parametrize("size", range(1, 9))
def test_a_path_is_a_share_of_what_all_ranks_send(verb, algorithm, size):
    """The longest path has no more messages and bytes than all ranks together, and no less than
    their average."""
    # 840: divisible by 1 to 8
    path = PATHS[verb, algorithm](size)
    n = 840 * 4
    case = Case(size, nbytes=n, blocks=chunk_bytes(840, 4, size))
    formula = FORMULAS[verb, algorithm]
    assert formula.messages_of(case) / size <= path.messages <= formula.messages_of(case)
    assert formula.bytes_of(case) / size - 1e-6 <= path.moved * n <= formula.bytes_of(case) + 1e-6
    assert 0 <= path.waits <= path.messages
    assert path.added <= path.moved
    assert path.crowded == (path.moved if algorithm in ("direct", "pairwise") and size > 2 else 0)
    assert algorithm in ALGORITHMS[verb]


@pytest.mark.parametrize("verb", ["reduce", "all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("size", [2, 4, 7])
def test_no_path_beats_the_bounds(verb, size):
    """Whoever combines P arrays waits log2 P times for one message, unless P-1 come at once, and
    adds (P-1)/P of n."""
    for (of, algorithm), path in PATHS.items():
        if of == verb:
            assert path(size).messages >= (size - 1).bit_length(), algorithm
            assert path(size).added >= (size - 1) / size - 1e-12, algorithm


# ---------------------------------------------------------------- auto


def test_auto_changes_where_the_costs_cross():
    """P=2, α=1 ms, β=1 ns, γ=0.1 ns: direct takes α + n(β+γ), the ring 2α + n(β + γ/2): equal at n
    = α/(γ/2)."""
    crossing = 1e-3 / (SLOW_START.gamma / 2)  # 20 MB
    one_wait = {"direct", "doubling"}  # the same for two ranks
    assert fastest("all_reduce", round(0.9 * crossing), 2, SLOW_START, "ring") in one_wait
    assert fastest("all_reduce", round(1.1 * crossing), 2, SLOW_START, "direct") not in one_wait
    assert choose("all_reduce", "auto", 10 << 20, 2, SLOW_START) in one_wait
    assert choose("all_reduce", "auto", 10 << 20, 2) == "ring"  # without a profile


def test_auto_weighs_waits_messages_and_bytes():
    """Eight ranks. Where waiting is all, one wait; where every message costs, log2 P; where bytes
    do, the least."""

    def auto(verb, nbytes, alpha, overhead, beta, size=8, crowd=0.0):
        return fastest(
            verb,
            nbytes,
            size,
            LinkCost("shm", size, alpha, overhead, beta, 0.0, 0.0, crowd),
            "naive",
        )

    assert auto("all_reduce", 64, 1e-3, 0, 0) == "direct"
    assert auto("all_reduce", 64, 1e-3, 1e-3, 0) == "doubling"
    assert auto("all_reduce", 1 << 20, 1e-6, 1e-6, 1e-9) == "halving-doubling"
    assert auto("reduce_scatter", 1 << 20, 1e-3, 1e-6, 1e-9) == "pairwise"
    assert auto("all_reduce", 1 << 26, 1e-6, 1e-7, 1e-9, size=3) == "pairwise"
    assert auto("all_reduce", 1 << 26, 1e-6, 1e-7, 1e-9, size=3, crowd=1e-10) == "ring"
    assert auto("reduce", 64, 1e-3, 1e-3, 0) == "tree"
    assert auto("broadcast", 64, 1e-3, 1e-3, 0) == "naive"  # its receivers do not know the length


def test_auto_stays_with_the_usual_where_the_model_cannot_tell():
    """Eight ranks: the ring takes 14 waits, halving-doubling 6. A model that is off by 20 % cannot
    tell them apart."""
    # 1.75 n·β + 140 µs or 60 µs: 4 % apart
    sharp = LinkCost("shm", 8, 1e-5, 1e-5, 1e-9, 0.0, misfit=0.0)
    assert fastest("all_reduce", 1 << 20, 8, sharp, "ring") == "halving-doubling"
    assert fastest("all_reduce", 1 << 20, 8, replace(sharp, misfit=0.2), "ring") == "ring"
    assert fastest("all_reduce", 1 << 10, 8, replace(sharp, misfit=0.2), "ring") == "doubling"


@pytest.mark.parametrize("verb", ALGORITHMS)
def test_auto_by_a_profile_is_an_algorithm_of_the_verb(verb):
    for size in range(1, 10):
        for nbytes in (0, 1 << 10, 1 << 26):
            assert choose(verb, "auto", nbytes, size, SLOW_START) in ALGORITHMS[verb]


def algorithm_of(world, nbytes):
    seen = []
    world.ledger.subscribe(
        lambda event: seen.append(event.details["algorithm"]) if event.kind == "call" else None
    )
    world.all_reduce(np.ones(nbytes // 4, np.float32))
    return seen[0]


def a_profile(**costs):
    """Links of two ranks each: name=(alpha, beta)."""
    return Profile(
        [LinkCost(name, 2, alpha, alpha, beta, beta, 0.0) for name, (alpha, beta) in costs.items()],
        {},
    )


def test_a_job_goes_by_the_profile_of_its_transport(home):
    """4 MiB go round the ring by default; where α is a second and a byte costs nothing,
    directly."""

    def over_tcp():
        return set(md.run(algorithm_of, 4 << 20, size=2, transport="tcp"))

    assert over_tcp() == {"ring"}
    save_profile(
        a_profile(tcp=(1.0, 0.0), shm=(2.0, 0.0), network=(3.0, 0.0), threads=(0.0, 1.0)),
        profile_path(),
    )
    assert over_tcp() == {"direct"}
    # they share memory
    assert md.run(lambda world: world.link.alpha, size=2, transport="auto") == [2.0] * 2
    assert run(lambda world: world.link.alpha, size=2, transport=MIXED) == [3.0] * 2
    assert set(md.run(algorithm_of, 4 << 20, size=2, transport="threads")) <= {
        "ring",
        "pairwise",
        "halving-doubling",
    }


def test_a_profile_with_the_name_of_before_is_read(tmp_path):
    file = tmp_path / "profile.json"
    save_profile(a_profile(sockets=(1.0, 0.0)), file)
    profile = load_profile(file)
    assert profile is not None and [cost.link for cost in profile.links] == ["tcp"]


def test_ranks_choose_alike_though_their_files_differ(tmp_path):
    """Launched ranks with a home each: rank 0's profile counts, on every rank, and no other is as
    much as read."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        f"os.environ['XDG_CONFIG_HOME'] = {str(tmp_path)!r} + '/home' + os.environ['RANK']\n"
        "import minidist as md, numpy as np\n"
        "world = md.init(transport='tcp')\n"
        "link = world.link\n"
        "world.all_reduce(np.ones(1 << 20, np.float32))\n"  # a MismatchError, did they choose apart
        "sys.stdout.write(f'{world.rank} {link.alpha}\\n')\n"
    )
    save_profile(a_profile(tcp=(1.0, 1e-9)), tmp_path / "home0" / "minidist" / "profile.json")
    torn = tmp_path / "home1" / "minidist" / "profile.json"
    torn.parent.mkdir(parents=True)
    torn.write_text("torn")
    job = subprocess.run(
        [sys.executable, "-m", "minidist", "launch", "-n", "2", str(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
    )
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")[:2]) == ["0 1.0", "1 1.0"]


def test_the_nearest_count_of_ranks_and_the_network_between_hosts():
    costs = [
        LinkCost(name, ranks, ranks * 1e-6, 0, 0, 0, 0)
        for name, ranks in (("shm", 2), ("shm", 4), ("network", 2))
    ]
    profile = Profile(costs, {})
    assert profile.link("shm", [0, 0, 2]) == costs[2]  # two machines
    assert profile.link("tcp", [0, 0]) is None  # never measured
    assert [profile.link("shm", [7] * size) for size in (2, 3, 4, 9)] == [
        costs[0],
        costs[0],
        costs[1],
        costs[1],
    ]
    assert Profile(costs[1:2], {}).link("shm", [0, 0]) == costs[1]  # fewer were never measured


def test_groups_that_are_split_off_have_the_link_of_their_own_size():
    costs = [LinkCost("threads", ranks, ranks * 1e-6, 0, 0, 0, 0) for ranks in (2, 4)]

    def body(world):
        return world.link, world.split(world.rank // 2).link

    from minidist.comm.transports.threads import run_threads

    assert run_threads(body, size=4, profile=Profile(costs, {})) == [(costs[1], costs[0])] * 4
    assert run(body, size=2) == [(None, None)] * 2


# ---------------------------------------------------------------- the file


def test_a_profile_that_is_written_is_read_again(home):
    assert load_profile() is None
    profile = Profile([SLOW_START], {"processor": "abacus"})
    save_profile(profile, profile_path())
    assert load_profile() == profile
    assert list((home / "minidist").iterdir()) == [profile_path()]  # no draft is left


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ('{"format": 9}', 'it does not say "format": 1'),
        ('{"format": 1, "links": []}', "it lacks its links or its machine"),
        (
            '{"format": 1, "machine": {}, "links": [{"link": "shm"}]}',
            "a link must have exactly the fields alpha, beta",
        ),
        (
            json.dumps({**Profile([SLOW_START], {}).as_json()}).replace("0.001", "-1"),
            "a number of link 'tcp'",
        ),
        (
            json.dumps({**Profile([SLOW_START], {}).as_json()}).replace("0.001", "NaN"),
            "a number of link 'tcp'",
        ),
        (b"\xff", "codec can't decode"),
    ],
)
def test_a_file_that_is_no_profile_is_one_clear_line(home, text, why):
    profile_path().parent.mkdir()
    profile_path().write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError, match=why) as caught:
        md.run(algorithm_of, 64, size=2)
    message = str(caught.value)
    assert str(profile_path()) in message
    assert "run `minidist bench calibrate` again, or delete it" in message
    assert "\n" not in message
