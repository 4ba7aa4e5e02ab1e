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


def test_a_large_product_runs_at_a_share_of_the_peak():
    assert seconds(cube(1 << 15), H100) == pytest.approx(2 * 2**45 / (989.4e12 * 0.78), rel=0.02)


@pytest.mark.parametrize(("side", "share"), [(1024, 0.58), (4096, 0.70), (8192, 0.75)])
def test_smaller_products_reach_less_as_cutlass_says(side, share):
    busy = seconds(cube(side), H100) - DEFAULT.launch
    assert cube(side).flops / busy / 989.4e12 == pytest.approx(share, abs=0.02)


def test_memory_kernels_go_by_bytes_and_a_short_one_by_its_launch():
    assert seconds(One("memory", nbytes=1e9), H100) == pytest.approx(0.9e-6 + 1e9 / (3350e9 * 0.85))
    assert seconds(One("memory", nbytes=4), H100) == pytest.approx(3.8e-6)
    assert DEFAULT.launch == 0.9e-6


def test_a_thin_product_is_bound_by_memory():
    """A vector and a matrix: every weight is read for two FLOPs."""
    thin = One("matmul", "bfloat16", 2 * 8192**2, 2 * 8192**2, (1, 8192, 8192, 8192))
    assert seconds(thin, H100) == pytest.approx(0.9e-6 + 2 * 8192**2 / (3350e9 * 0.85))


def test_attention_and_a_segment():
    flash = One("attention", flops=1e12)
    assert seconds(flash, H100) == pytest.approx(0.9e-6 + 1e12 / (989.4e12 * 0.5))
    short = One("memory", nbytes=4)
    assert H100.segment([(flash, 3), (short, 2)]) == pytest.approx(
        3 * seconds(flash, H100) + 2 * 3.8e-6
    )


def test_what_offloading_computes_goes_by_the_hosts_memory():
    """Two sockets of 307 GB/s for eight devices."""
    assert H100.seconds(One("host", nbytes=1e9)) == pytest.approx(1e9 / (2 * 307.2e9 / 8 * 0.85))
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
            '{"format": 1, "cluster": "h100", "rates": {"matmulshare": 1}}',
            "did you mean matmul_share",
        ),
        ('{"format": 1, "cluster": "h100", "rates": {"half": -1}}', "half is -1"),
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
