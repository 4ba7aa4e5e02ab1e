"""PyTorch's counterpart of each kernel of `minidist bench kernels`, as its users would write it,
eager and compiled.

A peer is a function of (torch, tensors by name, wrap) that returns the work to time; `wrap` is
torch.compile, or the identity. Gradients are PyTorch's own backward of a forward that ran before.
Attention's peer is the flash backend of scaled_dot_product_attention; the peer of block-sparse
attention is the same function with a mask.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from minidist.bench.kernels.case import COMPILED, EAGER, Inputs, KernelCase, every
from minidist.bench.kernels.flat_cases import BETAS, DECAY, LR, TAKEN
from minidist.bench.kernels.gpu import as_torch
from minidist.bench.kernels.row_cases import RATE

Tensors = dict[str, Any]
Work = Callable[[], Any]
Peer = Callable[[Any, Tensors, Any], Work]

INSTALL = 'PyTorch was left out: it is not installed; pip install "minidist[bench]"'


def find() -> tuple[Any, str]:
    """Return (torch, ""), or (None, the reason why PyTorch cannot use a GPU here)."""
    try:
        import torch  # noqa: PLC0415 - only where it is asked for: it takes seconds
    except ImportError:
        return None, INSTALL
    if not torch.cuda.is_available():
        return None, f"PyTorch was left out: {torch.__version__} sees no GPU"
    return torch, ""


def peers_of(
    torch: Any, names: Sequence[str], case: KernelCase, inputs: Inputs
) -> tuple[dict[str, Work], list[str]]:
    """Return {name: work} of the named peers (EAGER, COMPILED), and a line for each that does not
    run, as timing.Peers does.

    The first line of PyTorch's error is the reason why a peer was left out.
    """
    works: dict[str, Work] = {}
    left_out = []
    ways = {EAGER: lambda function: function, COMPILED: torch.compile}
    torch.cuda.empty_cache()  # memory of the previous kernel
    for name in names:
        wrap = ways[name]
        torch.compiler.reset()  # else it gives up compiling after a few functions
        try:
            works[name] = PEERS[case.name](torch, tensors(torch, inputs), wrap)
            works[name]()
        except (
            RuntimeError,
            TypeError,
            ValueError,
            NotImplementedError,
            AttributeError,
            ImportError,
            BufferError,
        ) as error:
            works.pop(name, None)
            left_out.append(
                f"{case.name}, {name}: {(str(error) or type(error).__name__).splitlines()[0]}"
            )
    return works, left_out


def tensors(torch: Any, inputs: Inputs) -> Tensors:
    """Return the inputs as PyTorch's tensors over the same memory; other values stay."""
    return {
        name: [as_torch(torch, one) for one in value]
        if isinstance(value, list)
        else as_torch(torch, value)
        if next(every([value]), None) is not None
        else value
        for name, value in inputs.items()
    }


def _call(function: Any, *names: str) -> Peer:
    """Return the peer of a forward: function(torch, *tensors of these names)."""

    def peer(torch: Any, t: Tensors, wrap: Any) -> Work:
        wrapped = wrap(lambda *given: function(torch, *given))
        return lambda: wrapped(*(t[name] for name in names))

    return peer


def _back(function: Any, *names: str, dy: str = "dy") -> Peer:
    """Return the peer of a backward whose forward ran before; `names`: tensors that get
    gradients."""

    def peer(torch: Any, t: Tensors, wrap: Any) -> Work:
        config: Any = importlib.import_module("torch._functorch.config")
        if hasattr(config, "donated_buffer"):  # else a compiled backward runs only once
            config.donated_buffer = False
        leaves = [t[name].detach().requires_grad_() for name in names]
        y = wrap(lambda *given: function(torch, *given))(*leaves)
        return lambda: torch.autograd.grad(y, leaves, t[dy], retain_graph=True)

    return peer


def _cross_entropy(torch: Any, t: Tensors, wrap: Any) -> Work:
    """Return the work of forward and backward; our kernel does both, too."""
    logits = t["logits"].detach().requires_grad_()
    loss = wrap(lambda x, targets: torch.nn.functional.cross_entropy(x, targets))

    def work() -> Any:
        mean = loss(logits, t["targets"])
        return mean, *torch.autograd.grad(mean, [logits])

    return work


def _embedding(torch: Any, t: Tensors, wrap: Any) -> Work:
    table = torch.zeros((t["count"], t["dy"].shape[1]), dtype=t["dy"].dtype, device=t["dy"].device)
    lookup = lambda torch, table: torch.nn.functional.embedding(t["ids"], table)  # noqa: E731
    return _back(lookup, "table")(torch, {**t, "table": table}, wrap)


def _adam(torch: Any, t: Tensors, wrap: Any) -> Work:
    """Return the work of fused AdamW without clipping; weights and gradients are in float32, as its
    users keep them."""
    weights = [master.clone().requires_grad_() for master in t["masters"]]
    for weight, gradient in zip(weights, t["gradients"], strict=True):
        weight.grad = gradient.float()
    step = wrap(torch.optim.AdamW(weights, lr=LR, betas=BETAS, weight_decay=DECAY, fused=True).step)
    return lambda: step()


def _norm(torch: Any, *gradients: Any) -> Any:
    return torch.linalg.vector_norm(
        torch.stack([n.float() for n in torch._foreach_norm(list(gradients))])
    )


def _global_norm(torch: Any, t: Tensors, wrap: Any) -> Work:
    wrapped = wrap(lambda: _norm(torch, *t["gradients"]))
    return lambda: wrapped()


def _swiglu(torch: Any, gate: Any, up: Any) -> Any:
    return torch.nn.functional.silu(gate) * up


def _gelu(torch: Any, x: Any, bias: Any) -> Any:
    return torch.nn.functional.gelu(x + bias, approximate="tanh")


def _layer(torch: Any, x: Any, w: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)


def _rms(torch: Any, x: Any, w: Any) -> Any:
    return torch.nn.functional.rms_norm(x, x.shape[-1:], w, 1e-5)


def _softmax(torch: Any, x: Any) -> Any:
    return torch.softmax(x, -1)


def _dropout(torch: Any, x: Any, residual: Any) -> Any:
    return residual + torch.nn.functional.dropout(x, RATE)


def _rotary(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _fp8(torch: Any, x: Any, scale: Any) -> Any:
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn), x.abs().max()


def _quantise(bits: int) -> Any:
    largest = {8: 127, 4: 7}[bits]

    def quantise(torch: Any, x: Any) -> Any:
        groups = x.view(-1, 128)
        scales = groups.abs().amax(1) / largest
        codes = (groups / scales[:, None]).round().clamp(-largest, largest).to(torch.int8)
        if bits == 4:
            codes = codes[:, ::2] & 15 | codes[:, 1::2] << 4
        return codes.view(-1), scales

    return quantise


def _restore(torch: Any, codes: Any, scales: Any) -> Any:
    return (codes.view(-1, 128) * scales[:, None]).view(-1)


def _pack(torch: Any, x: Any) -> Any:
    bits = (x.view(-1, 32) >= 0).to(torch.int32)
    words = (bits << torch.arange(32, dtype=torch.int32, device=x.device)).sum(1, dtype=torch.int32)
    return words, x.view(-1, 1024).abs().mean(1)


def _unpack(torch: Any, words: Any, scales: Any) -> Any:
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return ((2 * bits - 1).view(-1, 1024) * scales[:, None]).view(-1)


def _top(torch: Any, x: Any) -> Any:
    flat = x.view(-1)
    indices = torch.topk(flat.abs(), flat.numel() // TAKEN, sorted=False).indices.sort().values
    return indices, flat[indices]


def _threshold(torch: Any, x: Any) -> Any:
    flat = x.view(-1)
    indices = (flat.abs() >= 2.5).nonzero().view(-1)
    return indices, flat[indices]


def _rows_of(torch: Any, chosen: Any) -> Any:
    """Return each row's token, in the order of ops.experts.place_rows."""
    return torch.div(
        chosen.reshape(-1).argsort(stable=True), chosen.shape[1], rounding_mode="floor"
    )


def _to_experts(torch: Any, t: Tensors, wrap: Any) -> Work:
    tokens, wrapped = _rows_of(torch, t["chosen"]), wrap(lambda x, tokens: x[tokens])
    return lambda: wrapped(t["x"], tokens)


def _from_experts(torch: Any, t: Tensors, wrap: Any) -> Work:
    tokens = _rows_of(torch, t["chosen"])
    count = len(t["chosen"])

    def combine(results: Any, weights: Any) -> Any:
        weighed = results * weights[:, None].to(results.dtype)
        return torch.zeros(
            (count, results.shape[1]), dtype=results.dtype, device=results.device
        ).index_add(0, tokens, weighed)

    wrapped = wrap(combine)
    return lambda: wrapped(t["results"], t["weights"])


def _from_experts_back(torch: Any, t: Tensors, wrap: Any) -> Work:
    tokens = _rows_of(torch, t["chosen"])

    def back(dy: Any, results: Any, weights: Any) -> Any:
        rows = dy[tokens]
        return rows * weights[:, None].to(rows.dtype), (rows.float() * results).sum(1)

    wrapped = wrap(back)
    return lambda: wrapped(t["dy"], t["results"], t["weights"])


def _flash(peer: Peer) -> Peer:
    """Return the peer with only PyTorch's flash attention allowed, in forward and in a timed
    backward."""

    def flash(torch: Any, t: Tensors, wrap: Any) -> Work:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            work = peer(torch, t, wrap)

        def within() -> Any:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
                return work()

        return within

    return flash


def _float8_product(torch: Any, t: Tensors, wrap: Any) -> Work:
    """Return the work of PyTorch's product, which needs b by columns: the layout is changed before
    timing."""
    a = t["a"].view(torch.float8_e4m3fn)
    b = t["b"].t().contiguous().view(torch.float8_e4m3fn).t()
    wrapped = wrap(lambda a, b, *scales: torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16))
    return lambda: wrapped(a, b, t["scale_a"], t["scale_b"])


def _attend(torch: Any, q: Any, k: Any, v: Any) -> Any:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _masked(torch: Any, t: Tensors, wrap: Any) -> Work:
    tokens = t["q"].shape[2]
    side = 64
    mask = (
        t["blocks"].repeat_interleave(side, 0).repeat_interleave(side, 1)[:tokens, :tokens].tril()
    )
    wrapped = wrap(
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    )
    return lambda: wrapped(t["q"], t["k"], t["v"])


PEERS: dict[str, Peer] = {
    "softmax": _call(_softmax, "x"),
    "softmax_gradient": _back(_softmax, "y"),
    "cross_entropy": _cross_entropy,
    "layer_norm": _call(_layer, "x", "w", "b"),
    "layer_norm_gradient": _back(_layer, "x", "w", "b"),
    "rms_norm": _call(_rms, "x", "w"),
    "rms_norm_gradient": _back(_rms, "x", "w"),
    "bias_gelu": _call(_gelu, "x", "bias"),
    "bias_gelu_gradient": _back(_gelu, "x", "bias"),
    "swiglu": _call(_swiglu, "gate", "up"),
    "swiglu_gradient": _back(_swiglu, "gate", "up"),
    "residual_dropout": _call(_dropout, "x", "residual"),
    "rotary": _call(_rotary, "x", "cos", "sin"),
    "add": _call(lambda torch, x, residual: x + residual, "x", "residual"),
    "embedding_gradient": _embedding,
    "to_experts": _to_experts,
    "from_experts": _from_experts,
    "from_experts_gradient": _from_experts_back,
    "adam": _adam,
    "global_norm": _global_norm,
    "cast_bf16": _call(lambda torch, x: (x.to(torch.bfloat16), x.abs().max()), "x"),
    "cast_fp8": _call(_fp8, "x", "scale"),
    "ring_add": _call(
        lambda torch, came, own: (came.float() + own).to(came.dtype), "incoming", "own"
    ),
    "quantise_8": _call(_quantise(8), "x"),
    "quantise_4": _call(_quantise(4), "x"),
    "restore_8": _call(_restore, "codes", "scales"),
    "pack_signs": _call(_pack, "x"),
    "restore_signs": _call(_unpack, "words", "scales"),
    "top_k": _call(_top, "x"),
    "at_least": _call(_threshold, "x"),
    "matmul": _call(lambda torch, a, b: a @ b, "a", "b"),
    "matmul_float8": _float8_product,
    "attention": _flash(_call(_attend, "q", "k", "v")),
    "attention_gradient": _flash(_back(_attend, "q", "k", "v")),
    "block_sparse_attention": _masked,
}
