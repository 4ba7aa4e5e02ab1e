"""A question to the simulator: what if the products of fp8 multiplied bytes?

    simulate(Plan(dp=8, precision="fp8"), model("gpt2"), "h100:1x8", batch=64, traces=multiplying_bytes)

Training widens the bytes to bf16 before each product, because cuBLAS through CuPy multiplies no
bytes (parallel/precision/float8.py). Here nothing is widened: a product reads bytes, runs at the
device's float8 peak, and gives bf16. Rounding to bytes stays. So this is the time of a training
that minidist does not have.
"""

from typing import Any

from minidist.parallel.precision.float8 import MULTIPLIES_BYTES
from minidist.simulate.one_rank import run_rank
from minidist.simulate.trace import RankTrace


def multiplying_bytes(*args: Any, **options: Any) -> RankTrace:
    """Run one rank as run_rank, on a GPU that multiplies bytes."""
    before = MULTIPLIES_BYTES.set(True)
    try:
        return run_rank(*args, **options)
    finally:
        MULTIPLIES_BYTES.reset(before)
