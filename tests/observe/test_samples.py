"""Memory over time: a sample at each change, exact peaks, and steps to draw."""

import numpy as np

from minidist.device import account
from minidist.observe.samples import SampledAccount, stairs


def test_a_sample_for_each_change() -> None:
    """Also for a death that nobody looked at."""
    with account.use(SampledAccount()) as memory:
        one = memory.hold(np.zeros(10), "parameters")
        two = memory.hold(np.zeros(5), "gradients")
        memory.hold(one[2:], "gradients")  # the same buffer: no change
        del two
        three = memory.hold(np.zeros(1), "gradients")
    samples = memory.samples()
    seen = [(now["parameters"], now["gradients"], now["total"]) for _, now in samples]
    assert seen == [(80, 0, 80), (80, 40, 120), (80, 0, 80), (80, 8, 88)]
    moments = [moment for moment, _ in samples]
    assert moments == sorted(moments) and memory.peak["total"] == 120 and three.nbytes == 8


def test_stairs() -> None:
    samples = [(1.0, {"gradients": 4}), (2.0, {"gradients": 6}), (4.0, {"gradients": 1})]
    assert stairs(samples, "gradients", start=1.5, stop=3.0) == ([0.0, 500.0, 1500.0], [4, 6, 6])
    assert stairs(samples, "gradients", start=0.5, stop=0.75) == ([0.0, 250.0], [0, 0])
