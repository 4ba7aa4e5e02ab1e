"""This machine as a cluster: links and rates of a profile."""

import json
from dataclasses import replace
from typing import NamedTuple

import pytest

from minidist.comm.cost.critical_path import PATHS
from minidist.comm.cost.link_model import ComputationCost, LinkCost, Profile, save_profile
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.here import here
from minidist.simulate.rates import Rates
from minidist.simulate.simulate import simulate
from minidist.simulate.walk import call_cost

LINK = LinkCost("tcp", 2, 20e-6, 4e-6, 0.3e-9, 0.1e-9, 0.1, 0.05e-9)
ONE = ComputationCost(1, {"float32": 100e9, "float64": 50e9}, 10.0, 1e-6, 10e9, 1e6, 3.0, 0.2)
TWO = ComputationCost(2, {"float32": 80e9, "float64": 40e9}, 10.0, 1e-6, 6e9, 1e6, 3.0, 0.2)
PROFILE = Profile([LINK], {"processor": "test", "cores": 2}, (ONE, TWO))


class Asked(NamedTuple):
    verb: str
    algorithm: str
    nbytes: int
    blocks: tuple[int, ...] = ()
    itemsize: int = 4
    dims: int = 1


class Kernel(NamedTuple):
    kind: str
    dtype: str = "float32"
    flops: float = 0.0
    nbytes: float = 0.0
    size: tuple[int, ...] = ()


def test_links_are_those_measured():
    cluster = here(4, "tcp", PROFILE, cores=4)
    cost = call_cost(Asked("all_reduce", "pairwise", 4096), (0, 1, 2, 3), cluster)
    assert cost.seconds == pytest.approx(
        LINK.seconds(PATHS["all_reduce", "pairwise"](4).work(4096))
    )


def test_rates_are_those_of_as_many_ranks_at_once():
    product = Kernel("matmul", flops=2e9, size=(1, 1000, 1000, 1000))
    alone, two = (Rates.of(here(ranks, "tcp", PROFILE, cores=2).device) for ranks in (1, 2))
    assert alone.seconds(product) == pytest.approx(1e-6 + 2e9 * 1.03 / 100e9)
    assert two.seconds(product) == pytest.approx(1e-6 + 2e9 * 1.03 / 80e9)
    assert alone.seconds(Kernel("memory", nbytes=9e6)) == pytest.approx(1e-6 + 9e6 / 10e9)
    assert alone.seconds(Kernel("memory", nbytes=9e5)) == pytest.approx(1e-6 + 9e5 / 30e9)


def test_more_ranks_than_cores_take_turns():
    product = Kernel("matmul", flops=2e9, size=(1, 1000, 1000, 1000))
    two, six = (Rates.of(here(ranks, "tcp", PROFILE, cores=2).device) for ranks in (2, 6))
    assert six.seconds(product) == pytest.approx(3 * two.seconds(product))
    assert six.device.memory_bytes == pytest.approx(two.device.memory_bytes / 3, rel=0.01)


def test_where_ranks_fill_the_cores_nothing_is_hidden():
    """DDP on two ranks: with two cores the step is computation and calls, one after the other; with
    four it is less."""
    config = GPTConfig(vocabulary=64, context=32, layers=2, width=64, heads=2)
    plan = Plan(dp=2, bucket_bytes=1 << 16)
    full, free = (
        simulate(plan, config, here(2, "tcp", PROFILE, cores=cores), batch=8) for cores in (2, 4)
    )
    assert free.step_seconds < full.step_seconds
    calls = full.axes["dp"].seconds
    assert full.parts["exposed"]["dp"] == pytest.approx(calls)
    assert free.parts["exposed"]["dp"] < 0.9 * calls
    assert full.step_seconds == pytest.approx(sum(full.parts["busy"].values()) + calls, rel=0.01)


@pytest.mark.parametrize("ranks, cores", [(2, 2), (4, 2)])
def test_a_rank_is_as_fast_as_alone_while_the_others_wait(ranks, cores):
    """With one microbatch the stages of a pipeline compute one after another; replicas compute all
    at once."""
    config = GPTConfig(vocabulary=64, context=32, layers=ranks, width=64, heads=2)
    both = replace(PROFILE, computation=(ONE, replace(TWO, launch=3e-6)))
    fast = replace(PROFILE, computation=(ONE,))

    def busy(plan, profile, cores):
        parts = simulate(plan, config, here(ranks, "tcp", profile, cores=cores), batch=ranks).parts[
            "busy"
        ]
        return parts["forward"] + parts["backward"]

    line = Plan(pp=ranks, microbatches=1)
    replicas = Plan(dp=ranks)
    # the ends overlap a bit
    assert busy(line, both, cores) == pytest.approx(busy(line, fast, cores=9), rel=0.06)
    assert busy(replicas, both, cores) == pytest.approx(
        busy(replicas, both, cores=9) * ranks / cores, rel=0.01
    )
    assert busy(replicas, both, cores) > 1.5 * ranks / cores * busy(replicas, fast, cores=9)


def test_the_command_lets_ranks_be_as_fast_as_alone(tmp_path, monkeypatch):
    """The command gives the same time as simulate(): rates passed by hand would price every kernel
    with all cores busy."""
    from minidist.cli import main

    monkeypatch.setattr(Cluster, "parse", lambda _: here(4, "tcp", PROFILE, cores=2))
    sizes = {"vocabulary": 64, "context": 32, "layers": 4, "width": 64, "heads": 2}
    plan = Plan(pp=4, microbatches=4)
    cluster = Cluster.parse("here:4")
    found = simulate(plan, GPTConfig(**sizes, positions="rotary"), cluster, batch=16)
    file = tmp_path / "found.json"
    named = {"vocabulary": "vocab", "context": "sequence"}
    words = [f"--{named.get(name, name)}={size}" for name, size in sizes.items()]
    words += ["--cluster=here:4", "--plan=pp=4", "--microbatches=4", "--batch=16"]
    assert main(["simulate", *words, "--precision=fp32", f"--json={file}"]) == 0
    assert json.loads(file.read_text())["step_seconds"] == found.step_seconds


def test_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="run `minidist bench calibrate` first"):
        Cluster.parse("here:2")
    save_profile(PROFILE, tmp_path / "minidist" / "profile.json")
    assert Cluster.parse("here:tcp:2").size == 2
    for text, message in (
        ("here:4", "links of shm were not measured .only tcp.; run .* shm,computation -n 4"),
        ("here:2x2", "write here:RANKS"),
        ("here:tpc:2", "did you mean tcp"),
        ("here:tcp:0", "one rank"),
    ):
        with pytest.raises(ConfigError, match=message):
            Cluster.parse(text)


def test_shared_memory_is_written_and_read_once():
    """Two ranks, 1 MiB: each shows half and reads half, twice; nothing waits but for all to
    come."""
    cluster = here(2, "tcp", PROFILE, cores=2)
    n = 1 << 20
    cost = call_cost(Asked("all_reduce", "shared", n), (0, 1), cluster)
    assert cost.seconds == pytest.approx(2 * LINK.alpha + n * LINK.beta + n / 2 * LINK.gamma)
    assert cost.messages == 4


def test_a_call_of_fewer_ranks_costs_less():
    """Beside its messages: `pair` of two ranks, `call` of all, and between them of three; a message
    is of two."""
    known = replace(PROFILE, links=[replace(LINK, ranks=4, call=4e-4, pair=1e-4)])
    bare, whole = (here(4, "tcp", profile, cores=4) for profile in (PROFILE, known))
    for size, more in ((2, 1e-4), (3, 2.5e-4), (4, 4e-4)):
        call = Asked("all_reduce", "pairwise", 4096)
        assert call_cost(call, range(size), whole).seconds == pytest.approx(
            call_cost(call, range(size), bare).seconds + more
        )
    send = Asked("send", "", 4096)
    assert call_cost(send, (0, 1), whole).seconds == pytest.approx(
        call_cost(send, (0, 1), bare).seconds + 1e-4
    )
