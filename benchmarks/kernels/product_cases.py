"""Cases of `minidist bench kernels` held against the rate of matrix products: the product itself,
and attention."""

from typing import Any

import numpy as np

from minidist.bench.kernels.case import MATRIX, Draw, Inputs, KernelCase, wide
from minidist.bench.step.ranks import Model
from minidist.kernels import attention, casts, matmul
from minidist.kernels.matmul_float8 import E4M3, matmul_float8, matmul_float8_reference

# sparse attention: number of blocks of 64 keys that a block of queries sees; its own is the last
BAND = 4


def _matrices(model: Model, draw: Draw) -> Inputs:
    """Return the operands of the first linear layer of an MLP: tokens and weights."""
    return {
        "a": draw.normal(model.batch * model.context, model.width),
        "b": draw.normal(model.width, 4 * model.width),
    }


def _bytes(model: Model, draw: Draw) -> Inputs:
    """Return the same operands in fp8, with scales."""
    one = np.ones(1, np.float32)
    return {
        **{
            name: casts.cast_reference(array, E4M3)[0].view(np.uint8)
            for name, array in _matrices(model, draw).items()
        },
        "scale_a": one,
        "scale_b": one,
    }


def _heads(model: Model, draw: Draw) -> Inputs:
    shape = (model.batch, model.heads, model.context, model.width // model.heads)
    return {name: draw.normal(*shape) for name in ("q", "k", "v")}


def _with_dy(model: Model, draw: Draw) -> Inputs:
    inputs = _heads(model, draw)
    return {**inputs, "dy": draw.normal(*inputs["q"].shape)}


def _banded(model: Model, draw: Draw) -> Inputs:
    side = -(-model.context // attention.MASK_SIDE)
    apart = np.arange(side)[:, None] - np.arange(side)
    return {**_heads(model, draw), "blocks": (apart >= 0) & (apart < BAND)}


def _attend(i: Inputs, version: int) -> Any:
    return lambda: attention.attention(
        i["q"], i["k"], i["v"], causal=True, blocks=i.get("blocks"), version=version
    )


def _back(i: Inputs, version: int) -> Any:
    kept = attention.attention(i["q"], i["k"], i["v"], causal=True)
    return lambda: attention.attention_gradient(
        i["q"], i["k"], i["v"], *kept, i["dy"], causal=True, version=version
    )


def _some_heads(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    """Return the chosen heads as those of one sequence: (1, heads, T, D) in float64."""
    return [
        wide(i[name].reshape(-1, *i[name].shape[2:])[rows])[None]
        for name in ("q", "k", "v", "dy")
        if name in i
    ]


def _attention_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    return list(
        attention.attention_reference(*_some_heads(i, rows), causal=True, blocks=i.get("blocks"))
    )


def _back_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    return list(attention.attention_gradient_reference(*_some_heads(i, rows), causal=True))


def pairs(i: Inputs) -> int:
    """Return the number of pairs of a query and a key that it sees, over all heads."""
    batch, heads, tokens, _ = i["q"].shape
    return int(batch * heads * attention.seen(tokens, tokens, True, i.get("blocks")).sum())


def _operations(products: int) -> Any:
    """Return a function of the operations: `products` of width D, two operations per number, for
    every seen pair."""
    return lambda i: 2.0 * products * i["q"].shape[-1] * pairs(i)


def _all_heads(i: Inputs) -> int:
    return int(i["q"].shape[0] * i["q"].shape[1])


CASES = [
    KernelCase(
        "matmul",
        "matmul",
        matmul.VERSIONS,
        _matrices,
        lambda i, v: lambda: (matmul.matmul(i["a"], i["b"], version=v),),
        lambda i, rows: [matmul.matmul_reference(wide(i["a"][rows]), wide(i["b"]))],
        lambda i: 2.0 * i["a"].size * i["b"].shape[1],
        held=MATRIX,
    ),
    KernelCase(
        "matmul_float8",
        "matmul_float8",
        (1,),
        _bytes,
        lambda i, v: lambda: (matmul_float8(i["a"], i["b"], (i["scale_a"], i["scale_b"])),),
        lambda i, rows: [matmul_float8_reference(i["a"][rows], i["b"], (1.0, 1.0))],
        lambda i: 2.0 * i["a"].size * i["b"].shape[1],
        held=MATRIX,
    ),
    KernelCase(
        "attention",
        "attention",
        attention.VERSIONS,
        _heads,
        _attend,
        _attention_wanted,
        _operations(2),
        rows=_all_heads,
        held=MATRIX,
        flash=True,
        sampled=4,
        slack=1.5,
    ),
    KernelCase(
        "attention_gradient",
        "attention",
        attention.VERSIONS,
        _with_dy,
        _back,
        _back_wanted,
        _operations(5),
        rows=_all_heads,
        held=MATRIX,
        sampled=4,
        slack=2.0,
    ),
    KernelCase(
        "block_sparse_attention",
        "attention",
        attention.VERSIONS,
        _banded,
        _attend,
        _attention_wanted,
        _operations(2),
        rows=_all_heads,
        held=MATRIX,
        sampled=4,
        slack=1.5,
    ),
]
