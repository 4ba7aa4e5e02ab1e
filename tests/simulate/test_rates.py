"""Seconds of a kernel, by hand; and profiles."""

from typing import NamedTuple

import pytest

from minidist.errors import ConfigError
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import DEFAULT, Efficiency
from minidist.simulate.rates import CostProfile, Rates

H100 = Rates.of(Cluster.parse("h100:1x8").device)


def seconds(kernel, rates):
    return rates.seconds(kernel)


class One(NamedTuple):
    kind: str
    dtype: str = "bfloat16"
    flops: float = 0.0
    nbytes: float = 0.0
    size: tuple[int, ...] = ()


def cube(side):
    return One("matmul", "bfloat16", 2 * side**3, 6 * side**2, (1, side, side, side))


BEST = 989.4e12 * 0.803
SHARE = DEFAULT.matmul_share
LEAST = DEFAULT.launch + DEFAULT.shortest


def test_a_large_product_runs_at_a_share_of_the_best():
    assert seconds(cube(1 << 15), H100) == pytest.approx(2 * 2**45 / (BEST * SHARE), rel=0.02)


def product(m, k, n, count=1):
    return One("matmul", "bfloat16", 2.0 * count * m * k * n, 0.0, (count, m, k, n))


def test_a_wave_takes_as_long_if_it_is_not_full():
    """132 units, tiles of 256 x 128: 66 x 2 tiles are a full wave, one row more begins another."""
    one = seconds(product(66 * 256, 4096, 256), H100)
    assert seconds(product(66 * 256 + 1, 4096, 256), H100) > 1.25 * one
    assert seconds(product(2 * 66 * 256, 4096, 256), H100) == pytest.approx(2 * one - LEAST)
    tile = 2.0 * 256 * 128 * (4096 + DEFAULT.half)
    assert one == pytest.approx(LEAST + 132 * tile / (BEST * SHARE))


def test_a_product_of_few_tiles_is_divided_along_k():
    """Two tiles of a long k: 132 units would wait for 2; divided into parts all have work."""
    thin = seconds(product(256, 1 << 17, 256), H100)
    assert thin < seconds(product(256 * 66, 1 << 17, 256), H100) / 40


@pytest.mark.parametrize("sides", [(512, 4096, 4096), (4096, 64, 4096), (100, 100, 100)])
def test_a_smaller_product_is_never_slower(sides):
    larger = tuple(2 * side for side in sides)
    assert seconds(product(*sides), H100) <= seconds(product(*larger), H100)


def test_a_device_without_units_has_no_tiles():
    tpu = Rates.of(Cluster.parse("tpu-v4:4").device)
    slower = 1 + DEFAULT.half * (1 / 512 + 1 / 1024 + 1 / 2048)
    expected = 2 * 512 * 1024 * 2048 * slower / (275e12 * 0.8 * SHARE)
    assert seconds(product(512, 1024, 2048), tpu) == pytest.approx(LEAST + expected)
    assert tpu.issue([(product(512, 1024, 2048), 3)]) == 0.0


def test_a_host_launches_each_kernel():
    mixed = [(cube(64), 3), (cube(64), 1), (One("host", nbytes=1e6), 50)]
    assert H100.issue(mixed) == pytest.approx(4 * DEFAULT.host)


def test_scores_and_logits_that_pass_through_memory_take_its_time():
    passing = Rates(H100.device, Efficiency(scores=10.0, logits=20.0))
    for kernel, nbytes in (
        (One("attention", flops=1e12, size=(10**9,)), 1e10),
        (One("loss", nbytes=4e9, size=(10**9,)), 2e10),
        (One("memory", nbytes=4e9), 0.0),
    ):
        more = seconds(kernel, passing) - seconds(kernel, H100)
        assert more == pytest.approx(nbytes / (3350e9 * DEFAULT.memory_share))


def test_memory_kernels_go_by_bytes_and_a_short_one_by_its_launch():
    assert seconds(One("memory", nbytes=1e9), H100) == pytest.approx(
        LEAST + 1e9 / (3350e9 * DEFAULT.memory_share)
    )
    assert seconds(One("memory", nbytes=4), H100) == pytest.approx(LEAST)
    assert LEAST > 3e-6


def test_a_thin_product_is_bound_by_memory():
    """A few rows and a matrix: every weight is read for few FLOPs."""
    thin = One("matmul", "bfloat16", 2 * 8192**2, 2 * 8192**2, (1, 1, 8192, 8192))
    assert seconds(thin, H100) == pytest.approx(
        LEAST + 2 * 8192**2 / (3350e9 * DEFAULT.memory_share)
    )


def test_attention_and_a_segment():
    flash = One("attention", flops=1e12)
    assert seconds(flash, H100) == pytest.approx(LEAST + 1e12 / (BEST * DEFAULT.attention_share))
    short = One("memory", nbytes=4)
    assert H100.segment([(flash, 3), (short, 2)]) == pytest.approx(
        3 * seconds(flash, H100) + 2 * LEAST
    )


def test_what_offloading_computes_goes_by_the_hosts_memory():
    """Two sockets of 307 GB/s for eight devices."""
    assert H100.seconds(One("host", nbytes=1e9)) == pytest.approx(
        1e9 / (2 * 307.2e9 / 8 * DEFAULT.memory_share)
    )
    with pytest.raises(ConfigError, match="host memory; do not offload"):
        Rates.of(Cluster.parse("tpu-v4:4").device).seconds(One("host", nbytes=1.0))


def test_what_a_host_pays_beside_flops_and_bytes():
    """Each start of an inner loop, each matrix of a stack, and each byte of a product that left the
    cache."""
    plain = Rates(H100.device, Efficiency())
    rates = Rates(H100.device, Efficiency(loop=1e-8, matrix=2e-6, cold=1e-10))
    one = cube(256)
    stack = One("matmul", "bfloat16", 2 * 256**3, 6 * 256**2, (8, 128, 128, 128))
    whole = One("memory", nbytes=1e6)
    gaps = One("memory", nbytes=1e6, size=(50,))
    beside = [
        seconds(kernel, rates) - seconds(kernel, plain) for kernel in (one, stack, whole, gaps)
    ]
    assert beside == pytest.approx([6 * 256**2 * 1e-10, 6 * 256**2 * 1e-10 + 16e-6, 0.0, 50e-8])


def test_a_dtype_without_a_rate_is_refused():
    with pytest.raises(
        ConfigError, match="V100.*no rate for bfloat16; use --precision fp32 or fp16"
    ):
        Rates.of(Cluster.parse("v100:1x8").device).seconds(cube(64))
    with pytest.raises(ConfigError, match="not 'matmull'"):
        seconds(One("matmull"), H100)


def test_a_profile_comes_back_as_it_was_written(tmp_path):
    profile = CostProfile(
        "h100",
        Efficiency(matmul_share=0.6, half=200.0),
        {"nvlink4": {"alpha": 1e-6}},
        1.1,
        {"error": 0.04},
    )
    profile.save(tmp_path / "profile.json")
    assert CostProfile.load(tmp_path / "profile.json") == profile
    changed = profile.applied(Cluster.parse("h100:1x8"))
    assert changed.topology.alpha(0, 1) == 1e-6
    assert changed.topology.inside.bandwidth == Cluster.parse("h100:1x8").topology.inside.bandwidth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "is not a cost profile"),
        (
            '{"format": 2, "cluster": "h100", "rates": {"matmulshare": 1}}',
            "did you mean matmul_share",
        ),
        ('{"format": 2, "cluster": "h100", "rates": {"half": -1}}', "half is -1"),
        ('{"format": 1, "cluster": "h100"}', "older cost model.*fit again"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        CostProfile.load(path)
    assert "\n" not in str(raised.value)


def test_a_profile_slows_everything_that_it_says():
    slow = Rates.of(Cluster.parse("h100:1x8").device, CostProfile("h100", slowdown=1.5))
    assert slow.seconds(cube(4096)) == pytest.approx(1.5 * H100.seconds(cube(4096)))
