"""For every op, a strategy of calls to check: small float64 arrays of drawn shapes, broadcasts and
options."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from minidist.autograd import ops
from minidist.autograd.ops.experts import Placement, place_rows
from minidist.autograd.ops.rotary import RopeScaling
from minidist.autograd.tensor import Tensor
from minidist.device.backend import beside

CASES: dict[str, st.SearchStrategy["Case"]] = {}


@dataclass
class Case:
    """`call` takes the arrays as Tensors, all of them differentiable."""

    call: Callable[..., Any]
    arrays: list[np.ndarray]


def case(name: str) -> Callable[[Callable[..., Case]], Callable[..., Case]]:
    """Register a composite strategy function as the one of op `name`."""

    def register(build: Callable[..., Case]) -> Callable[..., Case]:
        CASES[name] = st.composite(build)()
        return build

    return register


# ----------------------------------------------------------------------------------- shapes, values

seeds = st.integers(0, 2**16)
sizes = st.integers(1, 3)
shapes = st.lists(sizes, max_size=3).map(tuple)


def normal(draw: Any, shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    """Random numbers; some draws are not contiguous."""
    rng = np.random.default_rng(draw(seeds))
    if draw(st.booleans()):
        return np.asarray(rng.normal(size=shape[::-1]) * scale).T
    return np.asarray(rng.normal(size=shape) * scale)


def apart(draw: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Distinct numbers at least 0.1 from each other and from 0: no kink lies within a difference
    step."""
    n = int(np.prod(shape))
    values = (np.arange(n) - n // 2) * 0.2 + 0.1
    return np.random.default_rng(draw(seeds)).permutation(values).reshape(shape)


def positive(draw: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(np.random.default_rng(draw(seeds)).uniform(0.5, 2.0, size=shape))


def broadcast_pair(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that combine: dims of the whole dropped from the front or set to one."""
    whole = draw(shapes)

    def part() -> tuple[int, ...]:
        kept = whole[draw(st.integers(0, len(whole))) :]
        return tuple(n if draw(st.booleans()) else 1 for n in kept)

    return (whole, part()) if draw(st.booleans()) else (part(), whole)


def some_dims(draw: Any, ndim: int) -> Any:
    """None, one dim (maybe counted from the end), or several."""
    if ndim == 0 or draw(st.booleans()):
        return None
    dim = st.integers(-ndim, ndim - 1)
    several = st.lists(dim, max_size=ndim, unique_by=lambda d: d % ndim).map(tuple)
    return draw(dim) if draw(st.booleans()) else draw(several)


# --------------------------------------------------------------------------------------- arithmetic


def _binary(name: str, second: Callable[..., np.ndarray] = normal) -> None:
    def build(draw: Any) -> Case:
        a, b = broadcast_pair(draw)
        return Case(getattr(ops, name), [normal(draw, a), second(draw, b)])

    case(name)(build)


for _name in ("add", "sub", "mul"):
    _binary(_name)
_binary("div", positive)


def _unary(name: str, values: Callable[..., np.ndarray] = normal) -> None:
    case(name)(lambda draw: Case(getattr(ops, name), [values(draw, draw(shapes))]))


for _name in ("neg", "exp", "tanh", "silu"):
    _unary(_name)
for _name in ("log", "sqrt"):
    _unary(_name, positive)
_unary("relu", apart)


@case("gelu")
def _(draw: Any) -> Case:
    shape = (*draw(shapes), draw(sizes))
    return Case(
        ops.gelu, [normal(draw, shape), normal(draw, shape[-1:])][: draw(st.integers(1, 2))]
    )


@case("swiglu")
def _(draw: Any) -> Case:
    shape = draw(shapes)
    return Case(ops.swiglu, [normal(draw, shape), normal(draw, shape)])


@case("power")
def _(draw: Any) -> Case:
    exponent = draw(st.sampled_from([0, 1, 2, 3, 4, 5, -1, 0.5, -0.5, 1.7]))
    return Case(lambda a: ops.power(a, exponent), [positive(draw, draw(shapes))])


@case("where")
def _(draw: Any) -> Case:
    a, b = broadcast_pair(draw)
    condition = np.asarray(
        np.random.default_rng(draw(seeds)).random(np.broadcast_shapes(a, b)) < 0.5
    )
    return Case(
        lambda x, y: ops.where(beside(condition, x.data), x, y), [normal(draw, a), normal(draw, b)]
    )


@case("cast")
def _(draw: Any) -> Case:
    return Case(lambda a: ops.cast(a, a.dtype), [normal(draw, draw(shapes))])


# --------------------------------------------------------------------------------------- reductions


def _reduction(name: str, values: Callable[..., np.ndarray] = normal) -> None:
    def build(draw: Any) -> Case:
        shape = draw(shapes)
        options = {"dim": some_dims(draw, len(shape)), "keepdims": draw(st.booleans())}
        return Case(lambda x: getattr(ops, name)(x, **options), [values(draw, shape)])

    case(name)(build)


for _name in ("sum", "mean", "var"):
    _reduction(_name)
_reduction("max", apart)


@case("softmax")
def _(draw: Any) -> Case:
    shape = (*draw(shapes), draw(sizes))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return Case(lambda x: ops.softmax(x, dim=dim), [normal(draw, shape)])


@case("log_softmax")
def _(draw: Any) -> Case:
    shape = (*draw(shapes), draw(sizes))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    return Case(lambda x: ops.log_softmax(x, dim=dim), [normal(draw, shape)])


# ------------------------------------------------------------------------------------------- shapes


@case("reshape")
def _(draw: Any) -> Case:
    shape = draw(shapes)
    target = draw(st.sampled_from([(-1,), (1, -1), shape[::-1], (*shape, 1)]))
    return Case(lambda x: ops.reshape(x, target), [normal(draw, shape)])


@case("transpose")
def _(draw: Any) -> Case:
    shape = draw(shapes)
    dims = draw(st.none() | st.permutations(range(len(shape))))
    return Case(lambda x: ops.transpose(x, dims), [normal(draw, shape)])


@case("getitem")
def _(draw: Any) -> Case:
    index = draw(
        st.sampled_from(
            [
                0,
                -1,
                slice(1, None),
                (slice(None, None, -2), 1),
                (Ellipsis, None, 2),
                None,
                np.array([0, 1, 1]),
                (slice(None), np.array([[2, 0], [2, 2]])),
                np.array([[True, False, True], [False, True, True]]),
            ]
        )
    )
    return Case(lambda x: ops.getitem(x, index), [normal(draw, (2, 3))])


@case("take")
def _(draw: Any) -> Case:
    shape = (*draw(shapes), draw(sizes))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    index = np.random.default_rng(draw(seeds)).integers(0, shape[dim], size=draw(shapes))
    return Case(lambda x: ops.take(x, index, dim=dim), [normal(draw, shape)])


def placement(draw: Any) -> Placement:
    """Of a few tokens, each with a choice or two, some dropped."""
    shape = (draw(sizes), draw(st.integers(1, 2)))
    rng = np.random.default_rng(draw(seeds))
    return place_rows(rng.integers(0, 3, size=shape), rng.random(shape) < 0.7, experts=3)


def placed_beside(there: Placement, x: Tensor) -> Placement:
    """The placement on the device of x."""
    return Placement(
        there.shape,
        *(beside(array, x.data) for array in (there.choices, there.experts, there.counts)),
    )


@case("to_experts")
def _(draw: Any) -> Case:
    there = placement(draw)
    return Case(
        lambda x: ops.to_experts(x, placed_beside(there, x)),
        [normal(draw, (there.shape[0], draw(sizes)))],
    )


@case("from_experts")
def _(draw: Any) -> Case:
    there = placement(draw)
    rows = len(there.tokens)
    return Case(
        lambda x, w: ops.from_experts(x, w, placed_beside(there, x)),
        [normal(draw, (rows, draw(sizes))), normal(draw, (rows,))],
    )


@case("grouped_linear")
def _(draw: Any) -> Case:
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    k = draw(sizes)
    n = draw(sizes)
    return Case(
        lambda x, w: ops.grouped_linear(x, w, counts=counts),
        [normal(draw, (sum(counts), k)), normal(draw, (len(counts), k, n))],
    )


@case("concat")
def _(draw: Any) -> Case:
    shape = [draw(sizes), draw(sizes)]
    dim = draw(st.integers(-2, 1))
    arrays = []
    for n in draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)):
        shape[dim] = n
        arrays.append(normal(draw, tuple(shape)))
    return Case(lambda *parts: ops.concat(parts, dim=dim), arrays)


@case("split")
def _(draw: Any) -> Case:
    parts = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    sections = draw(st.sampled_from([parts, 1, max(1, sum(parts))]))
    dim = draw(st.integers(-2, 1))
    shape = [draw(sizes), draw(sizes)]
    shape[dim] = sum(parts)
    skipped = draw(st.integers(0, 3))  # outputs that nobody uses get a gradient of zeros

    def call(x: Any) -> Any:
        outputs = ops.split(x, sections, dim=dim)
        return outputs[skipped:] if skipped < len(outputs) else outputs

    return Case(call, [normal(draw, tuple(shape))])


# ------------------------------------------------------------------------------------------- layers


@case("matmul")
def _(draw: Any) -> Case:
    a, b = broadcast_pair(draw)
    m = draw(sizes)
    k = draw(sizes)
    n = draw(sizes)
    return Case(ops.matmul, [normal(draw, (*a, m, k)), normal(draw, (*b, k, n))])


@case("linear")
def _(draw: Any) -> Case:
    lead = draw(shapes)
    k = draw(sizes)
    n = draw(sizes)
    arrays = [normal(draw, (*lead, k)), normal(draw, (k, n))]
    return Case(ops.linear, arrays + [normal(draw, (n,))] * draw(st.booleans()))


@case("unembed")
def _(draw: Any) -> Case:
    n = draw(sizes)
    return Case(ops.unembed, [normal(draw, (*draw(shapes), n)), normal(draw, (draw(sizes), n))])


@case("layer_norm")
def _(draw: Any) -> Case:
    # of one number a row, the norm is 0 and its gradient a quotient of roundings
    n = draw(st.integers(2, 4))
    return Case(
        ops.layer_norm, [normal(draw, (*draw(shapes), n)), normal(draw, (n,)), normal(draw, (n,))]
    )


@case("rms_norm")
def _(draw: Any) -> Case:
    n = draw(st.integers(1, 4))
    return Case(ops.rms_norm, [normal(draw, (*draw(shapes), n)), normal(draw, (n,))])


@case("embedding")
def _(draw: Any) -> Case:
    count = draw(st.integers(1, 5))
    ids = np.random.default_rng(draw(seeds)).integers(0, count, size=draw(shapes))
    return Case(lambda table: ops.embedding(table, ids), [normal(draw, (count, draw(sizes)))])


@case("rotary")
def _(draw: Any) -> Case:
    t = draw(sizes)
    n = draw(st.sampled_from([2, 4]))
    positions = np.random.default_rng(draw(seeds)).integers(0, 1000, size=t)
    scaling = draw(st.sampled_from([None, RopeScaling(8.0, 0.02, 0.5, 12)]))
    return Case(
        lambda x: ops.rotary(x, beside(positions, x.data), base=50.0, scaling=scaling),
        [normal(draw, (*draw(shapes), t, n))],
    )


@case("causal_attention")
def _(draw: Any) -> Case:
    b = draw(st.integers(1, 2))
    kv_heads = draw(st.integers(1, 2))
    group = draw(sizes)
    t = draw(sizes)
    d = draw(sizes)
    kv = (b, kv_heads, t, d)
    return Case(
        ops.causal_attention,
        [normal(draw, (b, kv_heads * group, t, d)), normal(draw, kv), normal(draw, kv)],
    )


@case("causal_attention_packed")
def _(draw: Any) -> Case:
    heads = draw(st.integers(1, 2))
    d = draw(st.integers(1, 2))
    return Case(
        lambda x: ops.causal_attention_packed(x, heads=heads),
        [normal(draw, (draw(st.integers(1, 2)), draw(sizes), 3 * heads * d))],
    )


@case("sparse_attention")
def _(draw: Any) -> Case:
    kv_heads = draw(st.integers(1, 2))
    group = draw(sizes)
    t = draw(st.integers(1, 7))
    d = draw(sizes)
    side = draw(st.integers(1, 4))
    count = -(-t // side)
    blocks = np.random.default_rng(draw(seeds)).random((count, count)) < draw(
        st.sampled_from([0.3, 0.7, 1.0])
    )
    kv = (2, kv_heads, t, d)
    return Case(
        lambda q, k, v: ops.sparse_attention(q, k, v, blocks=blocks, side=side),
        [normal(draw, (2, kv_heads * group, t, d)), normal(draw, kv), normal(draw, kv)],
    )


@case("cross_entropy")
def _(draw: Any) -> Case:
    lead = draw(shapes)
    vocabulary = draw(st.integers(1, 4))
    targets = np.random.default_rng(draw(seeds)).integers(0, vocabulary, size=lead)
    divisor = draw(st.none() | st.integers(1, 100))
    return Case(
        lambda x: ops.cross_entropy(x, targets, divisor=divisor),
        [normal(draw, (*lead, vocabulary))],
    )


@case("dropout")
def _(draw: Any) -> Case:
    rate = draw(st.sampled_from([0.0, 0.3, 0.9]))
    step = draw(st.integers(0, 9))
    # x, perhaps a residual
    shape = (*draw(shapes), draw(sizes))
    arrays = draw(st.integers(1, 2))
    return Case(
        lambda *arrays: ops.dropout(*arrays, rate=rate, name="layer", seed=1, step=step),
        [normal(draw, shape) for _ in range(arrays)],
    )
