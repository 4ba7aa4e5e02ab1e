"""Adam and AdamW over all tensors in one launch, with nothing decided on the host: the reference, then the launchers.

    tensors = AdamTensors(masters, gradients, decays=[0.1, 0.0], copies=weights)        # tables, made once
    norm = global_norm(tensors.gradients, factor=1 / loss_scale)
    adam_step(tensors, lr=1e-3, norm=norm, limit=1.0, loss_scale=loss_scale)            # an overflow changes nothing

Master weights and both moments are float32, gradients and the copies of the weights of one dtype, float32, float16 or
bfloat16; version 1, the naive one, takes float32 alone. Bytes moved: at the head of adam.cu.
"""

from collections.abc import Sequence

import numpy as np
from minidist.kernels.chunks import CHUNK
from minidist.kernels.global_norm import Gradients, begin_aligned
from minidist.kernels.loader import FLOATS, Source, Table, c_type, launch

from minidist.backend import Array, array_module
from minidist.errors import KernelError, ShapeError

VERSIONS = (1, 2, 3)
SOURCE = Source("adam.cu", ["adam_prepare", "adam_v1<float>",
                            *(f"adam_v{version}<{kind}>" for version in (2, 3) for kind in FLOATS)])
BLOCK = 256             # threads


def adam_reference(p: np.ndarray, g: np.ndarray, m: np.ndarray, v: np.ndarray, *, lr: float, step: int,
                   betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, decay: float = 0.0,
                   apart: bool = True) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """p, m and v after update number `step` by gradient g (scaled and clipped already); `apart`: AdamW's decay."""
    b1, b2 = betas
    p, g = (p * (1 - lr * decay), g) if apart else (p, g + decay * p)
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    return p - lr * (m / (1 - b1 ** step)) / (np.sqrt(v / (1 - b2 ** step)) + eps), m, v


class AdamTensors:
    """The tensors of an optimizer, with its state.

    Args:    masters: float32 weights, changed in place; gradients: like them, of one dtype; decays: of each tensor;
             copies: weights in the gradients' dtype, written in each step, or None.
    Attributes: m, v    moments, float32, like masters
                count   int32 (1,) on the device: updates made
    Raises:  ShapeError if the lists or the shapes differ.
    """

    def __init__(self, masters: Sequence[Array], gradients: Sequence[Array], *, decays: Sequence[float],
                 copies: Sequence[Array] | None = None) -> None:
        lists = [masters, gradients, *([copies] if copies is not None else [])]
        shapes = [[array.shape for array in arrays] for arrays in lists]
        if any(other != shapes[0] for other in shapes) or len(decays) != len(masters):
            raise ShapeError(f"AdamTensors: masters {shapes[0]}, the others {shapes[1:]}, {len(decays)} decays; "
                             f"they must agree one by one")
        xp = array_module(*masters)
        self.gradients = Gradients(gradients)
        self.masters, self.decays = Table(masters), tuple(map(float, decays))
        self.m, self.v = (Table([xp.zeros(p.shape, np.float32) for p in masters]) for _ in range(2))
        self.copies = None if copies is None else Table(copies)
        self.count, self.numbers = xp.zeros((1,), np.int32), xp.empty((4,), np.float32)
        self._decay_arrays: dict[float, Array] = {}
        self.aligned = begin_aligned([array for arrays in (*lists, self.m.arrays, self.v.arrays) for array in arrays])

    def decay_array(self, factor: float) -> Array:
        """factor x decays, float32, on the device; kept for the next call with the same factor."""
        if factor not in self._decay_arrays:
            decays = np.array([factor * decay for decay in self.decays], np.float32)
            self._decay_arrays = {factor: array_module(self.count).asarray(decays)}
        return self._decay_arrays[factor]


def adam_step(tensors: AdamTensors, *, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
              apart: bool = True, norm: Array | None = None, limit: float = 0.0, loss_scale: float = 1.0,
              version: int | None = None) -> None:
    """One update of every tensor, in place; none at all, and none counted, where norm is inf or NaN.

    Args:    norm: global_norm(factor=1 / loss_scale), float32 (1,); None: no overflow is looked for, nothing clipped.
             limit: the largest norm, 0 for any; loss_scale: gradients are divided by it.
             apart: AdamW's decay, else Adam's.
    Raises:  KernelError if version 3 is asked for and a tensor does not begin at a multiple of 16 bytes.
    """
    version = version or (3 if tensors.aligned else 2)
    if version == 3 and not tensors.aligned:
        raise KernelError("adam_v3 loads 16 bytes at a time, and a tensor begins elsewhere; take version 2")
    b1, b2 = betas
    launch(SOURCE, "adam_prepare", grid=1, block=1,
           args=(norm, tensors.count, tensors.numbers, lr, b1, b2, eps, limit, 1.0 / loss_scale))
    shared = (tensors.numbers,), (b1, b2, 1.0 - b1, 1.0 - b2, apart)
    if version == 1:
        _a_launch_each(tensors, lr if apart else 1.0, *shared)
    elif len(tensors.gradients.chunks):
        kind, chunks = c_type(tensors.gradients.arrays[0]), tensors.gradients.chunks
        launch(SOURCE, f"adam_v{version}<{kind}>", grid=len(chunks), block=BLOCK,
               args=(tensors.masters, tensors.gradients.table, tensors.m, tensors.v, tensors.copies,
                     tensors.decay_array(lr if apart else 1.0), chunks.owner, chunks.start, chunks.lengths,
                     *shared[0], *shared[1], CHUNK))


def _a_launch_each(tensors: AdamTensors, factor: float, numbers: tuple[Array], constants: tuple[float, ...]) -> None:
    copies = [None] * len(tensors.decays) if tensors.copies is None else tensors.copies.arrays
    for p, g, m, v, copy, decay in zip(tensors.masters.arrays, tensors.gradients.arrays, tensors.m.arrays,
                                       tensors.v.arrays, copies, tensors.decays, strict=True):
        if p.size:
            launch(SOURCE, f"adam_v1<{c_type(g)}>", grid=-(-p.size // BLOCK), block=BLOCK,
                   args=(p, g, m, v, copy, *numbers, factor * decay, *constants, p.size))
