"""Cases of `minidist bench kernels` that work row by row: softmax, loss, norms, activations,
dropout, tables, experts."""

from typing import Any

import numpy as np

from minidist.autograd.ops.experts import Placement, place_rows
from minidist.bench.kernels.case import Draw, Inputs, KernelCase, wide
from minidist.bench.step.ranks import Model
from minidist.device.backend import random_bits, stream_key
from minidist.kernels import (
    activation,
    add,
    cross_entropy,
    dropout,
    embedding,
    norm,
    permute,
    rotary,
    softmax,
)

# the mixture of experts to which tokens are sent
EXPERTS = 8
CHOICES = 2
# dropout's rate, and the random stream that it draws from
RATE = 0.1
STREAM = ("bench", 1)


def _rows(model: Model) -> int:
    return model.batch * model.context


def _elements(name: str, times: float) -> Any:
    """Return a function of the operations: `times` per element of an input."""
    return lambda i: times * i[name].size


# ------------------------------------------------------------------------------------ softmax, loss


def _scores(model: Model, draw: Draw) -> Inputs:
    return {"x": draw.normal(_rows(model) * model.heads, model.context, scale=3.0)}


def _probabilities(model: Model, draw: Draw) -> Inputs:
    shape = (_rows(model) * model.heads, model.context)
    return {"y": abs(draw.normal(*shape, scale=1.0 / model.context)), "dy": draw.normal(*shape)}


def _logits(model: Model, draw: Draw) -> Inputs:
    return {
        "logits": draw.normal(_rows(model), model.vocab, scale=3.0),
        "targets": draw.integers(model.vocab, _rows(model)),
    }


def _loss_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    scale = 1 / len(i["logits"])
    return list(
        cross_entropy.cross_entropy_reference(wide(i["logits"][rows]), i["targets"][rows], scale)
    )


# -------------------------------------------------------------------------------------------- norms


def _normed(model: Model, draw: Draw) -> Inputs:
    return {
        "x": draw.normal(_rows(model), model.width),
        "w": draw.normal(model.width),
        "b": draw.normal(model.width),
    }


def _scaled(model: Model, draw: Draw) -> Inputs:
    return {"x": draw.normal(_rows(model), model.width), "w": draw.normal(model.width)}


def _layer_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    x = wide(i["x"][rows])
    scale = 1 / np.sqrt(x.var(axis=-1) + norm.EPS)
    return [norm.norm_reference(x, wide(i["w"]), wide(i["b"])), x.mean(axis=-1), scale]


def _rms_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    x = wide(i["x"][rows])
    return [
        norm.norm_reference(x, wide(i["w"]), None),
        1 / np.sqrt((x * x).mean(axis=-1) + norm.EPS),
    ]


def _with_dy(draw_inputs: Any, first: str) -> Any:
    """Return a draw function of the same inputs and the gradient of an output shaped like
    `first`."""

    def drawn(model: Model, draw: Draw) -> Inputs:
        inputs = draw_inputs(model, draw)
        return {**inputs, "dy": draw.normal(*inputs[first].shape)}

    return drawn


def _layer_back(i: Inputs, version: int) -> Any:
    kept = norm.layer_norm(i["x"], i["w"], i["b"], version=version)[1:]
    return lambda: norm.layer_norm_gradient(i["x"], i["w"], i["dy"], *kept, version=version)


def _rms_back(i: Inputs, version: int) -> Any:
    scale = norm.rms_norm(i["x"], i["w"], version=version)[1]
    return lambda: norm.rms_norm_gradient(i["x"], i["w"], i["dy"], scale, version=version)


def _norm_back_wanted(*, centre: bool) -> Any:
    def wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
        results = norm.norm_gradient_reference(
            wide(i["x"]), wide(i["w"]), wide(i["dy"]), centre=centre
        )
        return list(results[: 3 if centre else 2])

    return wanted


# -------------------------------------------------------------------------------------- activations


def _hidden(model: Model, draw: Draw) -> Inputs:
    return {"x": draw.normal(_rows(model), 4 * model.width), "bias": draw.normal(4 * model.width)}


def _gated(model: Model, draw: Draw) -> Inputs:
    shape = (_rows(model), 4 * model.width)
    return {"gate": draw.normal(*shape), "up": draw.normal(*shape)}


# -------------------------------------------------------------------------- dropout, rotary, tables


def _residual(model: Model, draw: Draw) -> Inputs:
    shape = (_rows(model), model.width)
    return {"x": draw.normal(*shape), "residual": draw.normal(*shape)}


def _dropout(i: Inputs, version: int) -> Any:
    key = int(stream_key(*STREAM))
    return lambda: (
        dropout.residual_dropout(i["x"], i["residual"], rate=RATE, key=key, version=version),
    )


def _dropout_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    places = rows[:, None] * i["x"].shape[1] + np.arange(i["x"].shape[1])
    return [
        dropout.residual_dropout_reference(
            wide(i["x"][rows]), wide(i["residual"][rows]), random_bits(*STREAM, places), RATE
        )
    ]


def _turned(model: Model, draw: Draw) -> Inputs:
    half = model.width // model.heads // 2
    angles = np.arange(model.context)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return {
        "x": draw.normal(model.batch * model.heads, model.context, 2 * half),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
    }


def _embedded(model: Model, draw: Draw) -> Inputs:
    """Return gradients and token ids distributed as in text: few tokens are frequent."""
    ids = (draw.rng.zipf(1.2, _rows(model)) - 1) % model.vocab
    return {
        "dy": draw.normal(_rows(model), model.width),
        "ids": ids.astype(np.int64),
        "count": model.vocab,
    }


def _sent(*names: str) -> Any:
    """Return a draw function of tokens that each choose two experts, with the arrays of these
    names."""

    def drawn(model: Model, draw: Draw) -> Inputs:
        tokens = _rows(model)
        width = model.width
        shapes = {"x": (tokens, width), "dy": (tokens, width), "results": (tokens * CHOICES, width)}
        inputs: Inputs = {name: draw.normal(*shapes[name]) for name in names if name in shapes}
        if "weights" in names:
            inputs["weights"] = draw.rng.random(tokens * CHOICES, np.float32)
        chosen = draw.rng.random((tokens, EXPERTS)).argsort(axis=1)[:, :CHOICES]
        return {**inputs, "chosen": np.ascontiguousarray(chosen)}

    return drawn


def _placement(i: Inputs) -> Placement:
    return place_rows(i["chosen"], experts=EXPERTS)


def _to(i: Inputs, version: int) -> Any:
    placement = _placement(i)
    return lambda: (permute.to_experts(i["x"], placement, version=version),)


def _from(i: Inputs, version: int) -> Any:
    placement = _placement(i)
    return lambda: (permute.from_experts(i["results"], i["weights"], placement, version=version),)


def _from_back(i: Inputs, version: int) -> Any:
    placement = _placement(i)
    return lambda: permute.from_experts_gradient(
        i["dy"], i["results"], i["weights"], placement, version=version
    )


CASES = [
    KernelCase(
        "softmax",
        "softmax",
        softmax.VERSIONS,
        _scores,
        lambda i, v: lambda: (softmax.softmax(i["x"], version=v),),
        lambda i, rows: [softmax.softmax_reference(wide(i["x"][rows]))],
        _elements("x", 5),
    ),
    KernelCase(
        "softmax_gradient",
        "softmax",
        softmax.VERSIONS,
        _probabilities,
        lambda i, v: lambda: (softmax.softmax_gradient(i["y"], i["dy"], version=v),),
        lambda i, rows: [
            softmax.softmax_gradient_reference(wide(i["y"][rows]), wide(i["dy"][rows]))
        ],
        _elements("y", 4),
    ),
    KernelCase(
        "cross_entropy",
        "cross_entropy",
        cross_entropy.VERSIONS,
        _logits,
        lambda i, v: (
            lambda: cross_entropy.cross_entropy(
                i["logits"], i["targets"], scale=1 / len(i["logits"]), version=v
            )
        ),
        _loss_wanted,
        _elements("logits", 6),
    ),
    KernelCase(
        "layer_norm",
        "norm",
        norm.VERSIONS,
        _normed,
        lambda i, v: lambda: norm.layer_norm(i["x"], i["w"], i["b"], version=v),
        _layer_wanted,
        _elements("x", 8),
        float32=(1,),
    ),
    KernelCase(
        "layer_norm_gradient",
        "norm",
        norm.VERSIONS,
        _with_dy(_normed, "x"),
        _layer_back,
        _norm_back_wanted(centre=True),
        _elements("x", 14),
        float32=(1,),
    ),
    KernelCase(
        "rms_norm",
        "norm",
        norm.VERSIONS,
        _scaled,
        lambda i, v: lambda: norm.rms_norm(i["x"], i["w"], version=v),
        _rms_wanted,
        _elements("x", 5),
        float32=(1,),
    ),
    KernelCase(
        "rms_norm_gradient",
        "norm",
        norm.VERSIONS,
        _with_dy(_scaled, "x"),
        _rms_back,
        _norm_back_wanted(centre=False),
        _elements("x", 10),
        float32=(1,),
    ),
    KernelCase(
        "bias_gelu",
        "activation",
        activation.VERSIONS,
        _hidden,
        lambda i, v: lambda: (activation.bias_gelu(i["x"], i["bias"], version=v),),
        lambda i, rows: [activation.bias_gelu_reference(wide(i["x"][rows]), wide(i["bias"]))],
        _elements("x", 10),
    ),
    KernelCase(
        "bias_gelu_gradient",
        "activation",
        activation.VERSIONS,
        _with_dy(_hidden, "x"),
        lambda i, v: lambda: activation.bias_gelu_gradient(i["x"], i["bias"], i["dy"], version=v),
        lambda i, rows: list(
            activation.bias_gelu_gradient_reference(*map(wide, (i["x"], i["bias"], i["dy"])))
        ),
        _elements("x", 25),
    ),
    KernelCase(
        "swiglu",
        "activation",
        activation.VERSIONS,
        _gated,
        lambda i, v: lambda: (activation.swiglu(i["gate"], i["up"], version=v),),
        lambda i, rows: [activation.swiglu_reference(wide(i["gate"][rows]), wide(i["up"][rows]))],
        _elements("gate", 10),
    ),
    KernelCase(
        "swiglu_gradient",
        "activation",
        activation.VERSIONS,
        _with_dy(_gated, "gate"),
        lambda i, v: lambda: activation.swiglu_gradient(i["gate"], i["up"], i["dy"], version=v),
        lambda i, rows: list(
            activation.swiglu_gradient_reference(*(wide(i[n][rows]) for n in ("gate", "up", "dy")))
        ),
        _elements("gate", 15),
    ),
    KernelCase(
        "residual_dropout",
        "dropout",
        dropout.VERSIONS,
        _residual,
        _dropout,
        _dropout_wanted,
        _elements("x", 20),
    ),
    KernelCase(
        "add",
        "add",
        add.VERSIONS,
        _residual,
        lambda i, v: lambda: (add.add(i["x"], i["residual"], version=v),),
        lambda i, rows: [add.add_reference(wide(i["x"][rows]), wide(i["residual"][rows]))],
        _elements("x", 1),
    ),
    KernelCase(
        "rotary",
        "rotary",
        rotary.VERSIONS,
        _turned,
        lambda i, v: lambda: (rotary.rotary(i["x"], i["cos"], i["sin"], version=v),),
        lambda i, rows: [
            rotary.rotary_reference(wide(i["x"][rows]), wide(i["cos"]), wide(i["sin"]))
        ],
        _elements("x", 3),
    ),
    KernelCase(
        "embedding_gradient",
        "embedding",
        embedding.VERSIONS,
        _embedded,
        lambda i, v: (
            lambda: (embedding.embedding_gradient(i["ids"], i["dy"], i["count"], version=v),)
        ),
        lambda i, rows: [
            embedding.embedding_gradient_reference(i["ids"], wide(i["dy"]), i["count"])
        ],
        _elements("dy", 1),
    ),
    KernelCase(
        "to_experts",
        "permute",
        permute.VERSIONS,
        _sent("x"),
        _to,
        lambda i, rows: [permute.to_experts_reference(wide(i["x"]), _placement(i))],
        _elements("x", 1),
    ),
    KernelCase(
        "from_experts",
        "permute",
        permute.VERSIONS,
        _sent("results", "weights"),
        _from,
        lambda i, rows: [
            permute.from_experts_reference(wide(i["results"]), wide(i["weights"]), _placement(i))
        ],
        _elements("results", 2),
    ),
    KernelCase(
        "from_experts_gradient",
        "permute",
        permute.VERSIONS,
        _sent("dy", "results", "weights"),
        _from_back,
        lambda i, rows: list(
            permute.from_experts_gradient_reference(
                wide(i["dy"]), wide(i["results"]), wide(i["weights"]), _placement(i)
            )
        ),
        _elements("results", 3),
    ),
]
