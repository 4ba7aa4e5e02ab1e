"""Adam and AdamW over all tensors in one launch, without decisions on the host: the reference, then
the launchers.

    tensors = AdamTensors(masters, decays=[0.1, 0.0], copies=weights)                   # tables, made once
    gradients = Gradients([p.grad for p in parameters])
    norm = global_norm(gradients, factor=1 / loss_scale)
    adam_step(tensors, gradients, lr=1e-3, norm=norm, limit=1.0, scale=1 / loss_scale)  # an overflow changes nothing

Master weights and both moments are float32, gradients and the copies of the weights of one dtype,
float32, float16 or bfloat16; version 1, the naive one, takes only float32. Bytes moved: at the head
of adam.cu.
"""

from collections.abc import Sequence

import numpy as np

from minidist.device.backend import Array, array_module, is_array
from minidist.errors import KernelError, ShapeError
from minidist.kernels.chunks import CHUNK
from minidist.kernels.global_norm import Gradients
from minidist.kernels.loader import FLOATS, Source, Table, begin_aligned, c_type, launch

VERSIONS = (1, 2, 3)
SOURCE = Source(
    "adam.cu",
    [
        "adam_prepare",
        "adam_v1<float>",
        *(f"adam_v{version}<{kind}>" for version in (2, 3) for kind in FLOATS),
    ],
)
BLOCK = 256  # threads


def adam_reference(
    p: np.ndarray,
    g: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    *,
    lr: float,
    step: int,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    apart: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return p, m and v after update number `step` by gradient g (scaled and clipped already);
    `apart`: AdamW's decay."""
    b1, b2 = betas
    p, g = (p * (1 - lr * decay), g) if apart else (p, g + decay * p)
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    return p - lr * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + eps), m, v


class AdamTensors:
    """The tensors of an optimizer and its state; the gradients are new in each step, and so a
    separate argument.

    Args:    masters: float32 weights, changed in place; decays: one for each tensor; copies:
             weights in the gradients' dtype, written in each step, or None; moments: lists of m and
             v, or None: zeros.
    Attributes: m, v    moments, float32, like masters
                count   int32 (1,) on the device: updates made
    Raises:  ShapeError if the lists or the shapes differ.
    """

    def __init__(
        self,
        masters: Sequence[Array],
        *,
        decays: Sequence[float],
        copies: Sequence[Array] | None = None,
        moments: tuple[Sequence[Array], Sequence[Array]] | None = None,
    ) -> None:
        xp = array_module(*masters)
        m, v = moments or ([xp.zeros(p.shape, np.float32) for p in masters] for _ in range(2))
        lists = [masters, m, v, *([copies] if copies is not None else [])]
        _same_shapes("AdamTensors", lists)
        if len(decays) != len(masters):
            raise ShapeError(
                f"AdamTensors: {len(decays)} decays for {len(masters)} tensors; pass one for each"
            )
        self.masters = Table(masters)
        self.m = Table(m)
        self.v = Table(v)
        self.decays = tuple(map(float, decays))
        self.decay_array = xp.asarray(np.array(self.decays, np.float32))
        self.copies = None if copies is None else Table(copies)
        self.count = xp.zeros((1,), np.int32)
        self.numbers = xp.empty((5,), np.float32)
        self.aligned = begin_aligned(*(array for arrays in lists for array in arrays))


def _same_shapes(caller: str, lists: Sequence[Sequence[Array]]) -> None:
    """Raise ShapeError if the lists differ in shapes."""
    shapes = [[array.shape for array in arrays] for arrays in lists]
    if any(other != shapes[0] for other in shapes):
        raise ShapeError(
            f"{caller}: masters {shapes[0]}, the others {shapes[1:]}; they must agree one by one"
        )


def adam_step(
    tensors: AdamTensors,
    gradients: Gradients,
    *,
    lr: float | Array,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    apart: bool = True,
    scale: float = 1.0,
    factor: Array | None = None,
    norm: Array | None = None,
    limit: float = 0.0,
    version: int | None = None,
) -> None:
    """Update every tensor once, in place. If norm is inf or NaN, no tensor changes and no update is
    counted.

    Args:    lr: the rate; or float64 (1,) on the device, read when the kernel runs.
             scale: gradients are multiplied by it (1 / loss scale), and by `factor`, float32 (1,)
             on the device.
             norm: global_norm(factor=scale), float32 (1,); None: no check for overflow, no
             clipping.
             limit: the largest norm, 0 for any; apart: AdamW's decay, else Adam's.
    Raises:  ShapeError if gradients do not fit; KernelError if version 3 is asked for and a tensor
             does not begin at a multiple of 16 bytes.
    """
    _same_shapes("adam_step", [tensors.masters.arrays, gradients.arrays])
    fits = tensors.aligned and gradients.aligned
    version = version or (3 if fits else 2)
    if version == 3 and not fits:
        raise KernelError(
            "adam_v3 loads 16 bytes at a time, and a tensor begins elsewhere; take version 2"
        )
    b1, b2 = betas
    rate, number = (lr, 0.0) if is_array(lr) else (None, lr)
    launch(
        SOURCE,
        "adam_prepare",
        grid=1,
        block=1,
        args=(
            norm,
            factor,
            rate,
            tensors.count,
            tensors.numbers,
            number,
            b1,
            b2,
            eps,
            limit,
            scale,
            apart,
        ),
    )
    constants = b1, b2, 1.0 - b1, 1.0 - b2, apart
    if version == 1:
        _a_launch_each(tensors, gradients, constants)
    elif len(gradients.chunks):
        kind = c_type(gradients.arrays[0])
        chunks = gradients.chunks
        launch(
            SOURCE,
            f"adam_v{version}<{kind}>",
            grid=len(chunks),
            block=BLOCK,
            args=(
                tensors.masters,
                gradients.table,
                tensors.m,
                tensors.v,
                tensors.copies,
                tensors.decay_array,
                chunks.owner,
                chunks.start,
                chunks.lengths,
                tensors.numbers,
                *constants,
                CHUNK,
            ),
        )


def _a_launch_each(
    tensors: AdamTensors, gradients: Gradients, constants: tuple[float, ...]
) -> None:
    """Run version 1: a launch for each tensor."""
    copies = [None] * len(tensors.decays) if tensors.copies is None else tensors.copies.arrays
    for p, g, m, v, copy, decay in zip(
        tensors.masters.arrays,
        gradients.arrays,
        tensors.m.arrays,
        tensors.v.arrays,
        copies,
        tensors.decays,
        strict=True,
    ):
        if p.size:
            launch(
                SOURCE,
                f"adam_v1<{c_type(g)}>",
                grid=-(-p.size // BLOCK),
                block=BLOCK,
                args=(p, g, m, v, copy, tensors.numbers, decay, *constants, p.size),
            )
