"""The table that decides which operations run a CUDA kernel of this project.

The forward or gradient of an op calls `kernel("softmax", x)`. For arrays on a GPU, in a dtype that
kernels take, it returns the launcher named in the table. Otherwise it returns None, and the op
computes the same with array arithmetic of NumPy or CuPy. The optimizer and the sums of ranks that
share a GPU use the table too.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from minidist.device.backend import Array, device_of, dtype

TABLE = {
    # name                module of minidist.kernels and its launcher
    "add": ("add", "add"),
    "softmax": ("softmax", "softmax"),
    "softmax_gradient": ("softmax", "softmax_gradient"),
    "gelu": ("activation", "bias_gelu"),
    "gelu_gradient": ("activation", "bias_gelu_gradient"),
    "swiglu": ("activation", "swiglu"),
    "swiglu_gradient": ("activation", "swiglu_gradient"),
    "cross_entropy": ("cross_entropy", "cross_entropy"),
    "attention": ("attention", "attention"),
    "attention_gradient": ("attention", "attention_gradient"),
    "attention_packed": ("attention", "attention_packed"),
    "attention_packed_gradient": ("attention", "attention_packed_gradient"),
    "dropout": ("dropout", "residual_dropout"),
    "layer_norm": ("norm", "layer_norm"),
    "layer_norm_gradient": ("norm", "layer_norm_gradient"),
    "rms_norm": ("norm", "rms_norm"),
    "rms_norm_gradient": ("norm", "rms_norm_gradient"),
    "rotary": ("rotary", "rotary"),
    "rotary_gradient": ("rotary", "rotary_gradient"),
    "embedding_runs": ("embedding", "runs"),
    "embedding_gradient": ("embedding", "embedding_gradient"),
    "to_experts": ("permute", "to_experts"),
    "from_experts": ("permute", "from_experts"),
    "from_experts_gradient": ("permute", "from_experts_gradient"),
    "sum_of_squares": ("global_norm", "sum_of_squares"),
    "gradients": ("global_norm", "Gradients"),
    "adam_tensors": ("adam", "AdamTensors"),
    "adam": ("adam", "adam_step"),
    "ring_add": ("ring_add", "ring_add"),
    "to_float8": ("casts", "cast"),
    "from_float8": ("casts", "restore"),
    "quantise": ("quantise", "quantise"),
    "restore_quantised": ("quantise", "restore"),
    "top_k": ("selection", "top_k"),
    "at_least": ("selection", "at_least"),
}
DTYPES = frozenset(map(dtype, ("float32", "float16", "bfloat16")))


def kernel(name: str, *arrays: Array) -> Callable[..., Any] | None:
    """Return the launcher of `name`, or None unless all arrays are on a GPU, contiguous, and of a
    dtype in DTYPES."""
    if all(device_of(a) == "cuda" and a.dtype in DTYPES and a.flags.c_contiguous for a in arrays):
        return launcher(name)
    return None


@cache
def launcher(name: str) -> Callable[..., Any]:
    """Return the launcher of `name`, imported at its first use on a GPU: a CPU needs no module of
    kernels/."""
    module, function = TABLE[name]
    found: Callable[..., Any] = getattr(
        importlib.import_module(f"minidist.kernels.{module}"), function
    )
    return found
