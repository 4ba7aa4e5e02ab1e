"""A small GPT-2 and a small Llama under their published names, and their computations, written without
this package."""

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

KEY_HEADS, HIDDEN = 2, 40
LLAMA_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KEY_HEADS,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCABULARY,
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
    weights = gpt2_weights() if weights is None else weights
    return _write(folder, weights, GPT2_CONFIG | changes)


def write_llama(folder: Path, weights: dict[str, np.ndarray] | None = None, **changes: Any) -> Path:
    """Write a Llama's files, as write_gpt2."""
    weights = llama_weights() if weights is None else weights
    return _write(folder, weights, LLAMA_CONFIG | changes)


def write_shards(folder: Path, weights: dict[str, np.ndarray], **changes: Any) -> Path:
    """Write a Llama in two files with an index, and return the path of the index."""
    write_llama(folder, weights, **changes).unlink()
    half = len(weights) // 2
    places = {
        name: f"model-0000{1 + (at >= half)}-of-00002.safetensors"
        for at, name in enumerate(sorted(weights))
    }
    for place in set(places.values()):
        save_file({name: weights[name] for name in places if places[name] == place}, folder / place)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return index


def _write(folder: Path, weights: dict[str, np.ndarray], about: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "model.safetensors"
    save_file(weights, file)
    told = {name: value for name, value in about.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(told))
    return file


def gpt2_logits(
    weights: dict[str, np.ndarray], ids: np.ndarray, *, eps: float = 1e-5
) -> np.ndarray:
    """Return the logits (B, T, vocabulary) of GPT-2 in NumPy and float64, from its paper's formulas."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    tokens = ids.shape[1]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]

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


def llama_weights(kind: str = "float32") -> dict[str, np.ndarray]:
    """Return weights under the names of a published Llama: linear weights are (outputs, inputs)."""
    rng = np.random.default_rng(4)
    keys = KEY_HEADS * WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCABULARY, WIDTH),
    }
    for layer in range(LAYERS):
        for part, shape in {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (WIDTH, WIDTH),
            "self_attn.k_proj": (keys, WIDTH),
            "self_attn.v_proj": (keys, WIDTH),
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
        }.items():
            shapes[f"model.layers.{layer}.{part}.weight"] = shape
    return {name: rng.normal(0, 0.4, shape).astype(kind) for name, shape in shapes.items()}


def llama_biases(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return a bias for each linear layer of the blocks."""
    rng = np.random.default_rng(5)
    return {
        name.replace(".weight", ".bias"): rng.normal(0, 0.4, len(array)).astype(array.dtype)
        for name, array in weights.items()
        if "_proj." in name
    }


LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 0.02,
    "high_freq_factor": 0.5,
    "original_max_position_embeddings": 12,
}
"""As Llama 3.1 has it, with numbers by which the three pairs of a head of width 6 turn unchanged, in
between, and slower, where theta is 10000."""


def llama3_speeds(each: int, theta: float, scaling: dict[str, Any] | None = None) -> np.ndarray:
    """Return the angle between neighbouring tokens for each pair of a head: (each/2,), float64.

    Written pair by pair, from the wavelengths, as Llama 3.1's published program does.
    """
    found = []
    for pair in range(each // 2):
        speed = 1.0 / theta ** (2 * pair / each)
        if scaling is not None:
            length = 2 * np.pi / speed
            original = scaling["original_max_position_embeddings"]
            low = scaling["low_freq_factor"]
            high = scaling["high_freq_factor"]
            if length > original / low:
                speed = speed / scaling["factor"]
            elif length >= original / high:
                smooth = (original / length - low) / (high - low)
                speed = (1 - smooth) * speed / scaling["factor"] + smooth * speed
        found.append(speed)
    return np.array(found)


def llama_logits(
    weights: dict[str, np.ndarray],
    ids: np.ndarray,
    *,
    eps: float = 1e-5,
    theta: float = 10000.0,
    scaling: dict[str, Any] | None = None,
) -> np.ndarray:
    """Return the logits (B, T, vocabulary) of Llama in NumPy and float64, from its paper's formulas."""
    w = {name.removeprefix("model."): array.astype(np.float64) for name, array in weights.items()}
    tokens = ids.shape[1]
    each = WIDTH // HEADS

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        result: np.ndarray = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]
        return result

    def turned(x: np.ndarray) -> np.ndarray:
        """Pairs (i, i + each/2) of a head, as complex numbers, times exp(i angle)."""
        speeds = llama3_speeds(each, theta, scaling)
        pairs = x[..., : each // 2] + 1j * x[..., each // 2 :]
        pairs = pairs * np.exp(1j * np.arange(tokens)[:, None] * speeds)
        return np.concatenate([pairs.real, pairs.imag], -1)

    x = w["embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (y @ w[f"{at}.self_attn.{part}_proj.weight"].T for part in "qkv")
        mixed = np.empty_like(q)
        for head in range(HEADS):
            own = slice(head * each, (head + 1) * each)
            key = head * KEY_HEADS // HEADS
            shared = slice(key * each, (key + 1) * each)
            scores = turned(q[..., own]) @ turned(k[..., shared]).swapaxes(-1, -2) / np.sqrt(each)
            scores[:, np.triu(np.ones((tokens, tokens), bool), 1)] = -np.inf
            weight = np.exp(scores - scores.max(-1, keepdims=True))
            mixed[..., own] = weight / weight.sum(-1, keepdims=True) @ v[..., shared]
        x = x + mixed @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        gate = y @ w[f"{at}.mlp.gate_proj.weight"].T
        up = y @ w[f"{at}.mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.mlp.down_proj.weight"].T
    logits: np.ndarray = norm(x, "norm") @ w["lm_head.weight"].T
    return logits
