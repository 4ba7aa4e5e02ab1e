"""A simulated GPU that multiplies bytes: what its products read, and what stays."""

from collections import Counter
from collections.abc import Callable

from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.precision.float8 import MULTIPLIES_BYTES
from minidist.simulate.byte_products import multiplying_bytes
from minidist.simulate.one_rank import run_rank
from minidist.simulate.trace import RankTrace

CONFIG = GPTConfig(vocabulary=64, context=16, layers=2, width=32, heads=4)
PRODUCTS = 3 * 4 * 2  # y, dx and dw of the four linears of two blocks


def products(traces: Callable[..., RankTrace]) -> Counter[str]:
    """Return {dtype: matrix products of the last step}."""
    trace = traces(Plan(precision="fp8"), CONFIG, 0, rows=4)
    found = Counter[str]()
    for kernel, times in trace.kernels(trace.steps[-1]):
        if kernel.kind == "matmul":
            found["float8" if "float8" in kernel.dtype else kernel.dtype] += times
    return found


def test_only_the_products_of_blocks_multiply_bytes() -> None:
    """The output layer's three stay in bf16, and so do all products of training."""
    training = products(run_rank)
    assert products(multiplying_bytes) == {
        "float8": PRODUCTS,
        "bfloat16": training["bfloat16"] - PRODUCTS,
    }
    assert set(training) == {"bfloat16"}
    assert not MULTIPLIES_BYTES.get()
