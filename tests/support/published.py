"""A small GPT-2 under its published names, and its computation, written without this package."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 50, 16, 24, 4, 2
GPT2_CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-05,
    "n_ctx": CONTEXT,
    "n_positions": CONTEXT,
    "n_embd": WIDTH,
    "n_head": HEADS,
    "n_layer": LAYERS,
    "vocab_size": VOCABULARY,
    "attn_pdrop": 0.1,
}


def gpt2_weights(kind: str = "float32") -> dict[str, np.ndarray]:
    """Return weights under the names of the published gpt2 file, with no array that is special."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "wte.weight": (VOCABULARY, WIDTH),
        "wpe.weight": (CONTEXT, WIDTH),
        "ln_f.weight": (WIDTH,),
        "ln_f.bias": (WIDTH,),
    }
    for layer in range(LAYERS):
        for part, shape in {
            "ln_1": (WIDTH,),
            "ln_2": (WIDTH,),
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, 4 * WIDTH),
            "mlp.c_proj": (4 * WIDTH, WIDTH),
        }.items():
            shapes[f"h.{layer}.{part}.weight"] = shape
            shapes[f"h.{layer}.{part}.bias"] = shape[-1:]
    return {name: rng.normal(0, 0.4, shape).astype(kind) for name, shape in shapes.items()}


def write_gpt2(folder: Path, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Write model.safetensors and config.json, and return the path of the first; `changes`: of
    config.json, where None leaves a field out."""
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    save_file(gpt2_weights() if weights is None else weights, file)
    about = {name: value for name, value in (GPT2_CONFIG | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(about))
    return file


def gpt2_logits(weights: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Return the logits (B, T, vocabulary) of GPT-2 in NumPy and float64, from its paper's formulas."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    tokens = ids.shape[1]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][:tokens]
    for layer in range(LAYERS):
        q, k, v = np.split(linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn"), 3, -1)
        mixed = np.empty_like(q)
        each = WIDTH // HEADS
        for head in range(HEADS):
            at = slice(head * each, (head + 1) * each)
            scores = q[..., at] @ k[..., at].swapaxes(-1, -2) / np.sqrt(each)
            scores[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[..., at] = weight / weight.sum(-1, keepdims=True) @ v[..., at]
        x = x + linear(mixed, f"h.{layer}.attn.c_proj")
        inner = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        inner = inner / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(inner, f"h.{layer}.mlp.c_proj")
    logits: np.ndarray = norm(x, "ln_f") @ w["wte.weight"].T
    return logits
