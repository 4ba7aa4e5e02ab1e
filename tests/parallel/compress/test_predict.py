"""Prediction: what repeats is not sent again; what both sides predict is the same."""

import numpy as np
import pytest
from summing import gradients, sum_by

from minidist.parallel.compress.predict import OrNothing
from minidist.parallel.compress.quantise import Quantiser
from minidist.parallel.compress.two_phase import RandomStream

N = 257


@pytest.mark.sampled
@pytest.mark.parametrize(
    "text", ["predict", "predict:codec=sign", "predict:codec=8bit,tolerance=0"]
)
def test_owners_know_what_the_ranks_predict(text: str) -> None:
    """s of all chunks is the sum of all p, and q the same on every rank, though no prediction ever
    travels."""
    sums = sum_by(text, 3, steps=20)
    owners = np.concatenate([private["s.0"] for private in sums.private])
    np.testing.assert_allclose(
        owners, sum(private["p.0"] for private in sums.private), rtol=1e-11, atol=1e-12
    )
    for private in sums.private:
        np.testing.assert_array_equal(private["q.0"], sums.private[0]["q.0"])
    assert np.abs(owners).max() > 0.1


def test_equals_a_plain_reference() -> None:
    """One rank of two phases in plain NumPy: DIANA's differences with the errors fed back, by 8-bit
    codes."""
    codec = Quantiser(8, block=128, book="linear", rounding="nearest")
    rate = 0.1
    draw = RandomStream("", 0, 0)

    def coded(values: np.ndarray) -> np.ndarray:
        return codec.decode(codec.encode(values, draw), len(values), values.dtype)

    given = [gradients(rank, 15, 128) for rank in range(2)]
    p = np.zeros((2, 128))
    worker = np.zeros((2, 128))
    q = np.zeros(128)
    server = np.zeros(128)
    sums = []
    for step in range(15):
        summed = np.zeros(128)
        for rank in range(2):
            for chunk in (slice(0, 64), slice(64, 128)):
                difference = given[rank][step, chunk] + worker[rank, chunk] - p[rank, chunk]
                sent = coded(difference)
                worker[rank, chunk] = difference - sent
                summed[chunk] += p[rank, chunk] + sent
                p[rank, chunk] += rate * sent
        for chunk in (slice(0, 64), slice(64, 128)):
            difference = summed[chunk] + server[chunk] - q[chunk]
            sent = coded(difference)
            server[chunk] = difference - sent
            sums.append(q[chunk] + sent)
            q[chunk] += rate * sent
    found = sum_by(
        "predict:codec=8bit,tolerance=0", 2, given=given.__getitem__, shapes=((128,),)
    ).results[0]
    np.testing.assert_allclose(found.reshape(-1, 64), np.array(sums), rtol=1e-9, atol=1e-9)


def test_silence_keeps_the_sum_near() -> None:
    """Gradients that repeat: after a while nothing is sent, and what is applied is on average what
    was given."""
    sums = sum_by(
        "predict:codec=8bit,rate=0.5,tolerance=0.2",
        3,
        given=lambda rank: np.repeat(gradients(rank, 1, N), 40, axis=0),
    )
    wanted = sum(gradients(rank, 1, N)[0] for rank in range(3))
    np.testing.assert_allclose(
        sums.results[0].mean(axis=0), wanted, atol=0.02 * np.abs(wanted).max()
    )


def test_one_byte_for_nothing() -> None:
    codec = OrNothing(Quantiser(4, block=128, book="linear", rounding="nearest"))
    numbers = np.random.default_rng(0).normal(size=100).astype(np.float32)
    payload = codec.encode(numbers, RandomStream("", 0, 0))
    silence = np.zeros(1, np.uint8)
    stream = np.concatenate([silence, payload])
    assert payload.size == codec.length(payload, 100, numbers.dtype) == 55
    assert codec.length(stream, 100, numbers.dtype) == 1
    assert codec.length(stream, 0, numbers.dtype) == 0
    assert not codec.decode(silence, 100, numbers.dtype).any()
    assert (
        np.abs(codec.decode(payload, 100, numbers.dtype) - numbers).max()
        <= np.abs(numbers).max() / 14 * 1.001
    )
