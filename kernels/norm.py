"""Layer norm and RMS norm along the last dim and their gradients: references, then the launchers of
norm.cu's versions.

    y, mean, scale = layer_norm(x, w, b)                   # mean and scale: float32, one per row
    dx, dw, db = layer_norm_gradient(x, w, dy, mean, scale)
    y, scale = rms_norm(x, w)
    dx, dw = rms_norm_gradient(x, w, dy, scale)

x (…, columns), w and b (columns,), of one dtype, contiguous, NumPy (CPU build) or CuPy: float32,
float16 or bfloat16; version 1, the naive one, only float32. Sums are float32, in an order that
depends only on the shape. Bytes moved: at the head of norm.cu.
"""

import numpy as np

from minidist.device.backend import Array, array_module
from minidist.errors import KernelError, ShapeError
from minidist.kernels.checks import check_version
from minidist.kernels.loader import FLOATS, Source, c_type, launch, version_for

VERSIONS = (1, 2, 3)
SOURCE = Source(
    "norm.cu",
    [
        "norm_v1<float>",
        "norm_gradient_v1<float>",
        "norm_weights_v1<float>",
        *(
            f"{name}<{kind}>"
            for name in (
                "norm_v2",
                "norm_v3",
                "norm_gradient_v2",
                "norm_weights_v2",
                "norm_gradient_v3",
                "norm_sum_parts",
            )
            for kind in FLOATS
        ),
    ],
)
BLOCK = 128  # threads
# the most blocks that share the rows for dw and db: two for each of 132 multiprocessors
PARTS = 264
PARTS_OF_ROWS = 1056  # of version 3, whose blocks are small: eight for each
MOST_PACKS = 1024  # of 16 bytes per row in version 3: a thread each
EPS = 1e-5

Arrays = tuple[Array, ...]


def norm_reference(
    x: np.ndarray, w: np.ndarray, b: np.ndarray | None, eps: float = EPS
) -> np.ndarray:
    """Return the layer norm, or RMS norm if b is None, in x's dtype."""
    apart = x if b is None else x - x.mean(axis=-1, keepdims=True)
    y = apart / np.sqrt((apart * apart).mean(axis=-1, keepdims=True) + eps) * w
    return y if b is None else y + b


def norm_gradient_reference(
    x: np.ndarray, w: np.ndarray, dy: np.ndarray, *, centre: bool, eps: float = EPS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of x, w and b; centre: False for RMS norm, which has no b and ignores
    the third."""
    apart = x - x.mean(axis=-1, keepdims=True) if centre else x
    scale = 1 / np.sqrt((apart * apart).mean(axis=-1, keepdims=True) + eps)
    hat = apart * scale
    g = dy * w
    level = g.mean(axis=-1, keepdims=True) if centre else 0
    dx = scale * (g - level - hat * (g * hat).mean(axis=-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    return dx, (dy * hat).sum(axis=rows), dy.sum(axis=rows)


def layer_norm(
    x: Array, w: Array, b: Array, *, eps: float = EPS, version: int | None = None
) -> Arrays:
    """Return y like x; mean and scale, float32 (…). Raises: ShapeError, KernelError if w, b or
    `version` do not fit x."""
    return _norm("layer_norm", x, w, b, eps, version)


def rms_norm(x: Array, w: Array, *, eps: float = EPS, version: int | None = None) -> Arrays:
    """Return y like x; scale, float32 (…)."""
    return _norm("rms_norm", x, w, None, eps, version)


def layer_norm_gradient(
    x: Array, w: Array, dy: Array, mean: Array, scale: Array, *, version: int | None = None
) -> Arrays:
    """Return dx, dw and db; mean and scale: from layer_norm. Raises: as layer_norm."""
    return _gradient("layer_norm_gradient", x, w, dy, mean, scale, version)


def rms_norm_gradient(
    x: Array, w: Array, dy: Array, scale: Array, *, version: int | None = None
) -> Arrays:
    """Return dx and dw; scale: from rms_norm. Raises: as layer_norm."""
    return _gradient("rms_norm_gradient", x, w, dy, None, scale, version)


def _check(name: str, x: Array, *others: tuple[str, Array, tuple[int, ...]]) -> None:
    for argument, array, shape in others:
        if array.shape != shape:
            raise ShapeError(
                f"{name}: {argument} {array.shape} does not fit x {x.shape}; it needs shape {shape}"
            )


def _norm(
    name: str, x: Array, w: Array, b: Array | None, eps: float, version: int | None
) -> Arrays:
    xp = array_module(x)
    lead = x.shape[:-1]
    columns = x.shape[-1]
    weights = [w] if b is None else [w, b]
    _check(name, x, *(("w" if array is w else "b", array, (columns,)) for array in weights))
    y = xp.empty(x.shape, x.dtype)
    scale = xp.empty(lead, np.float32)
    mean = None if b is None else xp.empty(lead, np.float32)
    if x.size:
        version = version_for(name, version, x, *weights, packed=3)
        kernel = f"norm_v{version}<{c_type(x)}>"
        rows = x.size // columns
        arrays = (x, w, b, y, mean, scale)
        if version == 2:
            launch(SOURCE, kernel, grid=rows, block=BLOCK, args=(*arrays, columns, eps))
        else:
            a_block = BLOCK if version == 1 else BLOCK // 32
            launch(
                SOURCE,
                kernel,
                grid=-(-rows // a_block),
                block=BLOCK,
                args=(*arrays, rows, columns, eps),
            )
    return (y, scale) if mean is None else (y, mean, scale)


def _gradient(
    name: str, x: Array, w: Array, dy: Array, mean: Array | None, scale: Array, version: int | None
) -> Arrays:
    columns = x.shape[-1]
    check_version(name, version, VERSIONS)
    _check(
        name,
        x,
        ("w", w, (columns,)),
        ("dy", dy, x.shape),
        ("scale", scale, x.shape[:-1]),
        *([("mean", mean, x.shape[:-1])] if mean is not None else []),
    )
    xp = array_module(x)
    dx = xp.empty(x.shape, x.dtype)
    sums = [xp.empty((columns,), x.dtype) for _ in range(1 if mean is None else 2)]
    if x.size == 0:
        for each in sums:
            each[...] = 0.0
    else:
        wide = columns * x.dtype.itemsize > 16 * MOST_PACKS
        if version == 3 and wide:
            raise KernelError(
                f"{name}_v3 takes rows of at most {16 * MOST_PACKS} bytes, not "
                f"{columns * x.dtype.itemsize}; take version 2"
            )
        version = version or (2 if wide else version_for(name, None, x, w, dy, packed=3))
        version_for(name, version, x, w, dy, packed=3)
        {1: _gradient_v1, 2: _gradient_v2, 3: _gradient_v3}[version](
            x, w, dy, mean, scale, dx, sums
        )
    return dx, *sums


def _gradient_v1(
    x: Array, w: Array, dy: Array, mean: Array | None, scale: Array, dx: Array, sums: list[Array]
) -> None:
    columns = x.shape[-1]
    rows = x.size // columns
    launch(
        SOURCE,
        f"norm_gradient_v1<{c_type(x)}>",
        grid=-(-rows // BLOCK),
        block=BLOCK,
        args=(x, w, dy, mean, scale, dx, rows, columns),
    )
    launch(
        SOURCE,
        f"norm_weights_v1<{c_type(x)}>",
        grid=-(-columns // BLOCK),
        block=BLOCK,
        args=(x, dy, mean, scale, *_two(sums), rows, columns),
    )


def _gradient_v2(
    x: Array, w: Array, dy: Array, mean: Array | None, scale: Array, dx: Array, sums: list[Array]
) -> None:
    columns = x.shape[-1]
    rows = x.size // columns
    parts = [array_module(x).empty((min(PARTS, -(-rows // 8)), columns), np.float32) for _ in sums]
    launch(
        SOURCE,
        f"norm_gradient_v2<{c_type(x)}>",
        grid=rows,
        block=BLOCK,
        args=(x, w, dy, mean, scale, dx, columns),
    )
    launch(
        SOURCE,
        f"norm_weights_v2<{c_type(x)}>",
        grid=(-(-columns // 32), len(parts[0])),
        block=(32, 8),
        args=(x, dy, mean, scale, *_two(parts), rows, columns),
    )
    _sum_parts(parts, sums)


def _gradient_v3(
    x: Array, w: Array, dy: Array, mean: Array | None, scale: Array, dx: Array, sums: list[Array]
) -> None:
    columns = x.shape[-1]
    rows = x.size // columns
    packs = columns * x.dtype.itemsize // 16
    parts = [array_module(x).empty((min(PARTS_OF_ROWS, rows), columns), np.float32) for _ in sums]
    launch(
        SOURCE,
        f"norm_gradient_v3<{c_type(x)}>",
        grid=len(parts[0]),
        block=-(-packs // 32) * 32,
        args=(x, w, dy, mean, scale, dx, *_two(parts), rows, columns),
    )
    _sum_parts(parts, sums)


def _two(arrays: list[Array]) -> list[Array | None]:
    return [*arrays, None][:2]


def _sum_parts(parts: list[Array], sums: list[Array]) -> None:
    for part, result in zip(parts, sums, strict=True):
        count, columns = part.shape
        launch(
            SOURCE,
            f"norm_sum_parts<{c_type(result)}>",
            grid=-(-columns // 32),
            block=(32, 32),
            args=(part, result, count, columns),
        )
