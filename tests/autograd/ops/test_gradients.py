"""Every op, every differentiable argument: gradients against finite differences, in low precision,
and on a GPU."""

import numpy as np
import pytest
from gradcheck import check_gradients, nodes_behind, outputs_of, weigh
from hypothesis import given, settings
from op_strategies import CASES

from minidist.autograd import ops
from minidist.autograd.tape import REGISTRY
from minidist.autograd.tensor import tensor
from minidist.device import backend
from minidist.errors import DtypeError

WITH_RANKS = "minidist.autograd.ops.collectives"  # they run on ranks
OPS = sorted(
    name
    for name, op in REGISTRY.items()
    if op.__module__.startswith("minidist.autograd.ops.") and op.__module__ != WITH_RANKS
)


def examples(usual):
    """Decorates a test of (…, count): `usual` examples by default, 100 in the soak tests."""
    return pytest.mark.parametrize(
        "count", [usual, pytest.param(100, marks=pytest.mark.soak)], ids=["", "many"]
    )


def test_every_op_has_a_case_and_is_offered():
    assert sorted(CASES) == OPS
    assert set(OPS) <= set(ops.__all__)


@examples(8)
@pytest.mark.parametrize("name", OPS)
def test_gradients_match_finite_differences(name, count):
    checked = set()

    @settings(max_examples=count)
    @given(CASES[name])
    def run(case):
        leaves = [tensor(a, requires_grad=True) for a in case.arrays]
        for node in nodes_behind(case.call(*leaves)):
            checked.update(
                (node.op.name, node.op.argument_name(edge.argument)) for edge in node.edges
            )
        check_gradients(case.call, case.arrays)

    run()
    assert checked >= {(name, argument) for argument in REGISTRY[name].gradients}


def _run(case, kind, xp=np, *, result_is_wide=False):
    """Results and gradients of a case in another dtype or on another device, as float64 host
    arrays.

    `result_is_wide`: a result for low precision is float32, as a loss is; gradients are in the
    arguments' dtype.
    """
    leaves = [tensor(xp.asarray(a).astype(kind), requires_grad=True) for a in case.arrays]
    result = case.call(*leaves)
    weigh(result).backward()
    outputs = [output.data for output in outputs_of(result)]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    if result_is_wide:
        assert all(output.dtype == backend.widen(leaves[0].data).dtype for output in outputs)
    else:
        assert all(output.dtype == kind for output in outputs), [output.dtype for output in outputs]
    assert all(gradient.dtype == kind for gradient in gradients), [
        gradient.dtype for gradient in gradients
    ]
    arrays = outputs + gradients
    return [backend.to_host(array).astype("float64") for array in arrays]


@pytest.mark.sampled(every=9)
@examples(8)
@pytest.mark.parametrize("low", ["float16", "bfloat16"])
# ties differ once rounded
@pytest.mark.parametrize("name", [name for name in OPS if name != "max"])
def test_low_precision_is_float32_rounded_once(name, low, count):
    kind = backend.dtype(low)
    # one unit in the last place, relative
    eps = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[low]

    @settings(max_examples=count)
    @given(CASES[name])
    def run(case):
        case.arrays = [a.astype(kind).astype("float64") for a in case.arrays]
        rounded = _run(case, kind, result_is_wide=name == "cross_entropy")
        wide = _run(case, np.dtype("float32"))
        for a, b in zip(rounded, wide, strict=True):
            np.testing.assert_allclose(
                a, b, rtol=4 * eps, atol=4 * eps * max(1.0, np.abs(b).max(initial=0))
            )

    run()


@pytest.mark.sampled
@examples(1)
@pytest.mark.parametrize("name", OPS)
def test_the_other_byte_order_is_refused(name, count):
    @settings(max_examples=count)
    @given(CASES[name])
    def run(case):
        for low in ("float16", "bfloat16", "float32", "float64"):
            strange = backend.dtype(low).newbyteorder()
            with pytest.raises(
                DtypeError, match=rf"[<>]{low} .* byte order; pass x.astype\('{low}'\)"
            ):
                case.call(*(tensor(a.astype(strange)) for a in case.arrays))

    run()


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_cupy_agrees_with_numpy(name):
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU that CuPy can use")

    @given(CASES[name])
    def run(case):
        for a, b in zip(
            _run(case, np.dtype("float64"), cupy), _run(case, np.dtype("float64")), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)

    run()
