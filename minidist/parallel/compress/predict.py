"""predict: each rank sends what its gradient differs from a prediction, or nothing.

Sender and receiver keep the same prediction of the next numbers: a moving average of what was sent
before. Rank r's prediction is p_r; the owner of a chunk keeps s, the sum of all ranks' p_r of its
chunk. So no prediction ever travels:

    phase 1   rank r sends c = C(g_r - p_r) for each chunk, and p_r += rate × c
              the owner has the sum s + Σ c, and s += rate × Σ c
    phase 2   the same again: the owner sends how the sum differs from q, the average of the sums
              before, which all have

Where the difference of a chunk is at most `tolerance` times as long as what it would complete, a
payload says "as predicted" in one byte. What C or silence loses is kept (error feedback).

It pays as far as a gradient resembles those before it. The gradients of small batches are mostly
noise, which cannot be predicted: then differences are as long as gradients, and the bytes those of
only the codec.

    codec=4bit       C: 8bit, 4bit (quantise.py) or sign
    rate=0.1         of the moving averages; 0 predicts zero
    tolerance=0.5    0: nothing is left unsent

State: worker and server errors, and p, s, q: 3n + 2n/P numbers a rank (ZeRO: 2n + n/P, no q).

Cost: as two_phase.py's with b(m) = 1 + the codec's bytes of m numbers, or 1; 0 for an empty chunk.

notes:   N2 §11.2 梯度预测 (N2:502)
Source:  Mishchenko et al. 2019, "DIANA" (differences to a moving average).
"""

import math
from collections.abc import Sequence

import numpy as np

from minidist.comm.chunks import bounds
from minidist.device.backend import Array, array_module, to_host
from minidist.errors import ConfigError
from minidist.parallel.compress.pending_sum import WORKER, zeros_for
from minidist.parallel.compress.quantise import BITS, KERNEL_BLOCK, Quantiser
from minidist.parallel.compress.sign import Sign
from minidist.parallel.compress.two_phase import Codec, RandomStream, TwoPhase
from minidist.parallel.step.scheme import GradientRun

CODECS = ("8bit", "4bit", "sign")
SILENCE = b"\0"  # the whole payload of a chunk that is as predicted; another begins with 1


class OrNothing(Codec):
    """Numbers by another codec, or one byte for zeros. Args: inner."""

    def __init__(self, inner: Codec) -> None:
        self.inner = inner

    def encode(self, values: Array, draw: RandomStream) -> Array:
        xp = array_module(values)
        return xp.concatenate(
            [xp.ones(min(1, len(values)), np.uint8), self.inner.encode(values, draw)]
        )

    def decode(self, payload: Array, count: int, kind: np.dtype) -> Array:
        if len(payload) <= 1:
            return array_module(payload).zeros(count, kind)
        return self.inner.decode(payload[1:], count, kind)

    def nbytes(self, count: int, kind: np.dtype) -> int:
        return -1 if count else 0

    def length(self, stream: Array, count: int, kind: np.dtype) -> int:
        if not count:
            return 0
        return 1 + self.inner.nbytes(count, kind) * (to_host(stream[:1]).tobytes() != SILENCE)


class Predict(TwoPhase):
    """Sums differences to predictions. Args: as above."""

    def __init__(self, inner: Codec, *, rate: float, tolerance: float) -> None:
        super().__init__("predict", OrNothing(inner), feedback=True)
        if not (0 <= rate < 1 and 0 <= tolerance < 1):
            raise ConfigError(
                f"compress predict: rate={rate:g}, tolerance={tolerance:g}; choose both from 0 "
                f"to below 1"
            )
        self.rate = rate
        self.tolerance = tolerance

    def attach(self, runs: Sequence[GradientRun]) -> None:
        super().attach(runs)
        for index, run in enumerate(runs):
            if run.group.size > 1:
                start, stop = bounds(run.size, run.group.size)[run.group.rank : run.group.rank + 2]
                self.private[f"p.{index}"] = zeros_for(run, run.size)
                self.private[f"s.{index}"] = zeros_for(run, stop - start)
                if run.verb == "all_reduce":
                    self.private[f"q.{index}"] = zeros_for(run, run.size)

    def encode(self, side: str, index: int, values: Array, number: int, first: int) -> Array:
        start = bounds(self.runs[index].size, self.runs[index].group.size)[number]
        kept = self.errors[side, index][first : first + len(values)]
        predicted = self.private[f"{'p' if side == WORKER else 'q'}.{index}"][
            start : start + len(values)
        ]
        with np.errstate(over="ignore", invalid="ignore"):
            kept += values
            length = float(kept @ kept)
            kept -= predicted
            if (
                len(kept)
                and math.isfinite(length)
                and float(kept @ kept) <= self.tolerance**2 * length
            ):
                return array_module(values).zeros(1, np.uint8)
            payload = self.codec.encode(kept, self.draw(side, index, number))
            sent = self.codec.decode(payload, len(kept), kept.dtype)
            kept -= sent
        if side == WORKER:
            self._learn(predicted, sent)  # q learns when the sum is there, on all ranks
        kept[~array_module(kept).isfinite(kept)] = 0
        return payload

    def add_up(self, index: int, payloads: Sequence[Array], count: int, kind: np.dtype) -> Array:
        predicted = self.private[f"s.{index}"]
        total = predicted.copy()
        for payload in payloads:
            sent = self.codec.decode(payload, count, kind)
            with np.errstate(over="ignore", invalid="ignore"):
                total += sent
            self._learn(predicted, sent)
        return total

    def restore(self, index: int, first: int, sent: Array) -> Array:
        predicted = self.private[f"q.{index}"][first : first + len(sent)]
        total = predicted + sent
        self._learn(predicted, sent)
        return total

    def _learn(self, predicted: Array, sent: Array) -> None:
        """Add rate × sent to the prediction, but for an overflow. `sent` is scratch afterwards."""
        overflow = ~array_module(sent).isfinite(sent)
        with np.errstate(invalid="ignore"):
            sent *= self.rate
        sent[overflow] = 0
        predicted += sent


def make(name: str, *, codec: str = "4bit", rate: float = 0.1, tolerance: float = 0.5) -> Predict:
    """Return the scheme."""
    if codec not in CODECS:
        raise ConfigError(f"compress predict: codec={codec!r}; choose one of {', '.join(CODECS)}")
    inner = (
        Sign()
        if codec == "sign"
        else Quantiser(BITS[codec], block=KERNEL_BLOCK, book="linear", rounding="nearest")
    )
    return Predict(inner, rate=rate, tolerance=tolerance)
