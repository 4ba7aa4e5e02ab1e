"""Cases of `minidist bench kernels` over all numbers of a model: optimizer, norm, casts, and
kernels for messages (ring addition, quantisation, selection)."""

from typing import Any

import numpy as np

from minidist.bench.kernels.case import Draw, Inputs, KernelCase, Outputs, once, wide
from minidist.bench.step.ranks import Model
from minidist.device.backend import Array
from minidist.kernels import adam, casts, global_norm, quantise, ring_add, selection
from minidist.nn import GPT

ROW = 1024  # numbers that are checked together; a multiple of every group size
LR = 1e-3
BETAS = (0.9, 0.999)
DECAY = 0.1
LIMIT = 1.0
LOOKED_AT = 6  # checked tensors of adam: the tables and the first block's
TAKEN = 100  # one of this number of numbers is selected


def shapes(model: Model) -> list[tuple[int, ...]]:
    """Return the shapes of the model's parameters; its output layer is the embedding's table."""
    return [parameter.shape for parameter in GPT(model.config(tied=True)).parameters()]


def _count(model: Model) -> int:
    """Return the number of rows of ROW numbers in a model."""
    return sum(int(np.prod(shape)) for shape in shapes(model)) // ROW


def _flat(kind: str | None, name: str = "x") -> Any:
    """Return a draw function of one array with about as many numbers as the model."""
    return lambda model, draw: {name: draw.normal(_count(model), ROW, kind=kind)}


def _activations(kind: str) -> Any:
    """Return a draw function of the output of an MLP's first linear layer, and a scale."""
    return lambda model, draw: {
        "x": draw.normal(model.batch * model.context, 4 * model.width, kind=kind),
        "scale": np.array([16.0], np.float32),
    }


# ----------------------------------------------------------------------------------- adam, the norm


def _gradients(model: Model, draw: Draw) -> Inputs:
    return {"gradients": [draw.normal(*shape) for shape in shapes(model)]}


def _state(model: Model, draw: Draw) -> Inputs:
    """Return weights in float32, gradients and copies in the bench's dtype."""
    given = _gradients(model, draw)
    return {
        **given,
        "masters": [draw.normal(*g.shape, kind="float32", scale=0.02) for g in given["gradients"]],
        "copies": [np.zeros_like(g) for g in given["gradients"]],
    }


def _norm(i: Inputs, version: int) -> Any:
    tensors = global_norm.Gradients(i["gradients"])
    return lambda: (global_norm.global_norm(tensors, version=version),)


def _adam(i: Inputs, version: int) -> Any:
    tensors = adam.AdamTensors(i["masters"], copies=i["copies"], decays=[DECAY] * len(i["masters"]))
    gradients = global_norm.Gradients(i["gradients"])
    norm = global_norm.global_norm(gradients)

    def work() -> Outputs:
        adam.adam_step(
            tensors, gradients, lr=LR, betas=BETAS, norm=norm, limit=LIMIT, version=version
        )
        return (*tensors.masters.arrays[:LOOKED_AT], *i["copies"][:LOOKED_AT])

    return work


def _adam_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    """Return the weights after the first update, from moments of zero."""
    norm = global_norm.global_norm_reference(i["gradients"])
    factor = min(1.0, LIMIT / (norm + 1e-6))
    weights = []
    for p, g in zip(i["masters"][:LOOKED_AT], i["gradients"], strict=False):
        zero = np.zeros(p.shape)
        weights.append(
            adam.adam_reference(
                wide(p), wide(g) * factor, zero, zero, lr=LR, betas=BETAS, step=1, decay=DECAY
            )[0]
        )
    return weights * 2


def _adam_moved(i: Inputs, outputs: Outputs) -> int:
    """Return the least bytes: master, m and v in and out, the gradient in, the copy out."""
    return sum(24 * g.size + 2 * g.nbytes for g in i["gradients"])


def _numbers(i: Inputs) -> int:
    return sum(g.size for g in i["gradients"])


# ------------------------------------------------------------------------------------- for messages


def _fp8(i: Inputs, version: int) -> Any:
    return lambda: casts.cast(i["x"], "float8_e4m3fn", i["scale"], version=version)


def _fp8_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    y, _ = casts.cast_reference(i["x"][rows], "float8_e4m3fn", float(i["scale"][0]))
    return [y.view(np.uint8), np.array([float(abs(i["x"]).max())])]


def _half_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    return [
        wide(casts.cast_reference(i["x"][rows], "bfloat16")[0]),
        np.array([float(abs(i["x"]).max())]),
    ]


def _adding(model: Model, draw: Draw) -> Inputs:
    """Return half of a model's numbers twice: incoming and own, for a ring of two ranks."""
    rows = max(1, _count(model) // 2)
    return {"incoming": draw.normal(rows, ROW), "own": draw.normal(rows, ROW, kind="float32")}


def _ring_add(i: Inputs, version: int) -> Any:
    outgoing = _like(i["incoming"])

    def work() -> Outputs:
        ring_add.ring_add(i["incoming"], i["own"], outgoing=outgoing, version=version)
        return (outgoing,)

    return work


def _like(x: Array) -> Array:
    """Return an array like x with all bits set."""
    y = x.copy()
    y.reshape(-1).view(np.uint8)[...] = 0xFF
    return y


def _quantised(bits: int) -> Any:
    def wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
        codes, scales = quantise.quantise_reference(i["x"][rows], bits)
        return [
            codes if bits == 8 else (codes[::2] & 15 | codes[1::2] << 4).astype(np.int8),
            wide(scales),
        ]

    return wanted


def _codes(model: Model, draw: Draw) -> Inputs:
    rows = _count(model)
    return {
        "codes": draw.rng.integers(-127, 128, (rows, ROW), np.int8).reshape(-1),
        "scales": draw.rng.random(rows * ROW // quantise.GROUP, np.float32),
    }


def _restored_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    scales = i["scales"].reshape(-1, ROW // quantise.GROUP)[rows].reshape(-1)
    return [quantise.restore_reference(i["codes"].reshape(-1, ROW)[rows].reshape(-1), wide(scales))]


def _signs_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    bits, scales = quantise.pack_signs_reference(wide(i["x"][rows]))
    return [np.packbits(bits, bitorder="little").view(np.uint32), scales]


def _words(model: Model, draw: Draw) -> Inputs:
    rows = _count(model)
    return {
        "words": draw.rng.integers(0, 2**32, rows * ROW // 32, np.uint32),
        "scales": draw.rng.random(rows, np.float32),
    }


def _signs_restored(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    bits = np.unpackbits(i["words"].reshape(-1, ROW // 32)[rows].view(np.uint8), bitorder="little")
    return [np.where(bits, 1.0, -1.0) * np.repeat(wide(i["scales"][rows]), ROW)]


def _of_token(model: Model, draw: Draw) -> Inputs:
    """Return as many numbers as a layer's activations; not more, because the reference sorts
    them."""
    return {"x": draw.normal(model.batch * model.context, model.width, kind="float32")}


def _top_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    indices = selection.top_k_reference(i["x"], i["x"].size // TAKEN)
    return [indices, wide(i["x"].reshape(-1)[indices])]


def _threshold_wanted(i: Inputs, rows: np.ndarray) -> list[np.ndarray]:
    indices = selection.at_least_reference(i["x"], 2.5)
    return [indices, wide(i["x"].reshape(-1)[indices])]


def _six_reads(i: Inputs, outputs: Outputs) -> int:
    """Return the bytes of radix selection, which reads x in four rounds and twice more to
    gather."""
    return 5 * int(i["x"].nbytes) + once(i, outputs)


def _size(times: float, name: str = "x") -> Any:
    return lambda i: times * i[name].size


_ROWS_OF_CODES: Any = lambda i: i["codes"].size // ROW  # noqa: E731 - a field of KernelCase
CASES = [
    KernelCase(
        "adam",
        "adam",
        adam.VERSIONS,
        _state,
        _adam,
        _adam_wanted,
        lambda i: 14.0 * _numbers(i),
        _adam_moved,
        float32=(1,),
        slack=1.5,
    ),
    KernelCase(
        "global_norm",
        "global_norm",
        global_norm.VERSIONS,
        _gradients,
        _norm,
        lambda i, rows: [np.array([global_norm.global_norm_reference(i["gradients"])])],
        lambda i: 2.0 * _numbers(i),
        float32=(1,),
        slack=5.0,
    ),
    KernelCase(
        "cast_bf16",
        "casts",
        casts.VERSIONS,
        _activations("float32"),
        lambda i, v: lambda: casts.cast(i["x"], "bfloat16", version=v),
        _half_wanted,
        _size(3),
    ),
    KernelCase(
        "cast_fp8", "casts", casts.VERSIONS, _activations("bfloat16"), _fp8, _fp8_wanted, _size(3)
    ),
    KernelCase(
        "ring_add",
        "ring_add",
        ring_add.VERSIONS,
        _adding,
        _ring_add,
        lambda i, rows: [ring_add.ring_add_reference(i["incoming"][rows], wide(i["own"][rows]))],
        _size(1, "own"),
    ),
    KernelCase(
        "quantise_8",
        "quantise",
        quantise.VERSIONS,
        _flat("float32"),
        lambda i, v: lambda: quantise.quantise(i["x"], bits=8, version=v),
        _quantised(8),
        _size(5),
    ),
    KernelCase(
        "quantise_4",
        "quantise",
        quantise.VERSIONS,
        _flat("float32"),
        lambda i, v: lambda: quantise.quantise(i["x"], bits=4, version=v),
        _quantised(4),
        _size(5),
    ),
    KernelCase(
        "restore_8",
        "quantise",
        (1,),
        _codes,
        lambda i, v: lambda: (quantise.restore(i["codes"], i["scales"], i["codes"].size, bits=8),),
        _restored_wanted,
        _size(1, "codes"),
        rows=_ROWS_OF_CODES,
    ),
    KernelCase(
        "pack_signs",
        "quantise",
        quantise.SIGN_VERSIONS,
        _flat("float32"),
        lambda i, v: lambda: quantise.pack_signs(i["x"], version=v),
        _signs_wanted,
        _size(3),
    ),
    KernelCase(
        "restore_signs",
        "quantise",
        (1,),
        _words,
        lambda i, v: (
            lambda: (quantise.restore_signs(i["words"], i["scales"], 32 * i["words"].size),)
        ),
        _signs_restored,
        _size(32, "words"),
        rows=lambda i: len(i["scales"]),
    ),
    KernelCase(
        "top_k",
        "selection",
        selection.VERSIONS,
        _of_token,
        lambda i, v: lambda: selection.top_k(i["x"], i["x"].size // TAKEN, version=v),
        _top_wanted,
        _size(10),
        _six_reads,
        left_out={1: "it reads all numbers once for each of them"},
    ),
    KernelCase(
        "at_least",
        "selection",
        (1,),
        _of_token,
        lambda i, v: lambda: selection.at_least(i["x"], 2.5),
        _threshold_wanted,
        _size(2),
    ),
]
