"""The ranks' side of minidist bench compress: the rows that a curve's losses are of."""

import numpy as np

import minidist as md
from minidist.bench.compress.ranks import Training
from minidist.bench.step.ranks import Model
from minidist.comm.transports.throttled import delayed
from minidist.data import text


def test_the_rows_of_a_curve_are_spread_over_the_validation_text():
    model = Model(layers=1, width=8, heads=1, context=64, batch=1, vocab=128)
    inputs, _ = text.windows(text.load("python").validation, context=64)

    def job(world):
        with delayed(world, alpha=0.0, beta=0.0) as group:
            return Training(group, model, steps=10, lr=1e-3, rows=90).validation

    for found in md.run(job, size=3):
        some = found[False][0]
        whole = found[True][0]
        assert np.array_equal(whole, inputs[: len(inputs) // 3 * 3])
        stride = len(inputs) // 90
        assert len(some) in range(len(inputs) // stride - 2, len(inputs) // stride + 2)
        assert np.array_equal(some, inputs[::stride][: len(some)])
