"""Differentiable functions of Tensors. Every op takes Tensors, arrays or numbers; options are
keywords.

    import minidist.autograd.ops as ops

    y = ops.gelu(ops.linear(x, w, b))

How an op is written: tape.py.
"""

from minidist.autograd.ops.activation import gelu, log_softmax, relu, silu, softmax, swiglu
from minidist.autograd.ops.arithmetic import (
    add,
    cast,
    div,
    exp,
    log,
    mul,
    neg,
    power,
    sqrt,
    sub,
    tanh,
    where,
)
from minidist.autograd.ops.attention import causal_attention, causal_attention_packed
from minidist.autograd.ops.block_sparse import sparse_attention
from minidist.autograd.ops.experts import from_experts, grouped_linear, to_experts
from minidist.autograd.ops.gather import embedding, take
from minidist.autograd.ops.linear import linear, matmul, unembed
from minidist.autograd.ops.loss import cross_entropy
from minidist.autograd.ops.norm import layer_norm, rms_norm
from minidist.autograd.ops.random import dropout
from minidist.autograd.ops.reduction import max, mean, sum, var  # noqa: A004 - named as NumPy names them
from minidist.autograd.ops.rotary import rotary
from minidist.autograd.ops.shape import concat, getitem, reshape, split, transpose

__all__ = [
    "add",
    "cast",
    "causal_attention",
    "causal_attention_packed",
    "concat",
    "cross_entropy",
    "div",
    "dropout",
    "embedding",
    "exp",
    "from_experts",
    "gelu",
    "getitem",
    "grouped_linear",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "mean",
    "mul",
    "neg",
    "power",
    "relu",
    "reshape",
    "rms_norm",
    "rotary",
    "silu",
    "softmax",
    "sparse_attention",
    "split",
    "sqrt",
    "sub",
    "sum",
    "swiglu",
    "take",
    "tanh",
    "to_experts",
    "transpose",
    "unembed",
    "var",
    "where",
]
