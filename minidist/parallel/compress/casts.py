"""fp16 and bf16: numbers are rounded to two bytes before they travel, and added in float32.

Half the bytes of float32, and no state. float16 keeps 11 significant bits of numbers up to 65,504;
bfloat16 keeps 8 of any float32. Finite numbers beyond the range are sent as its largest; infinity
and NaN stay what they are.

    scheme   bytes of m numbers     relative error       range
    fp16     2m                     2^-11                6e-8 … 65,504
    bf16     2m                     2^-8                 as float32
"""

import ml_dtypes
import numpy as np

from minidist.device import backend
from minidist.device.backend import Array, array_module, narrow, widen
from minidist.parallel.compress.two_phase import Codec, RandomStream, TwoPhase

DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


class Cast(Codec):
    """Numbers of two bytes. Args: name: of the scheme."""

    def __init__(self, name: str) -> None:
        self.kind = backend.dtype(DTYPES[name])
        self.most = float(ml_dtypes.finfo(self.kind).max)

    def encode(self, values: Array, draw: RandomStream) -> Array:
        xp = array_module(values)
        with np.errstate(over="ignore", invalid="ignore"):
            inside = xp.where(xp.isfinite(values), xp.clip(values, -self.most, self.most), values)
            return narrow(inside.astype(np.float32), self.kind).view(np.uint8)

    def decode(self, payload: Array, count: int, kind: np.dtype) -> Array:
        return widen(payload.view(self.kind)).astype(kind)

    def nbytes(self, count: int, kind: np.dtype) -> int:
        return 2 * count


def make(name: str, *, feedback: bool = False) -> TwoPhase:
    """Return the scheme; feedback: keep what rounding loses, for the next step's gradients."""
    return TwoPhase(name, Cast(name), feedback=feedback)
