"""Lesson 22: kernels of attention and of the matrix product under the rooflines of GPUs, by the
bytes that the kernels read and write."""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np

from minidist import lessons
from minidist.grading import load_module
from minidist.kernels.matmul import read_bytes
from minidist.simulate.cluster import Cluster
from minidist.simulate.device import Device
from minidist.site.live import Control, Live, Picture, Prediction, Say
from minidist.site.live.plane import Plane

GPUS = ("v100", "a100-80g", "h100", "h200", "b200")
ATTENTION = (1, 2, 3)
PRODUCT = (1, 2, 3, 4, 5)
SIZES = tuple(64 * 2**n for n in range(11))  # tokens, or rows and columns
PLANE = Plane(64, 20, 534, 250, (0.1, 3000.0), (1e11, 5e15), log_x=True, log_y=True)
TERA = 1e12


@dataclass(frozen=True)
class Rung:
    """A version of a kernel at a size. Attributes: operations, nbytes: of one launch; dtype: of its
    products, a key of Device.peaks."""

    name: str
    operations: int
    nbytes: int
    dtype: str

    @property
    def intensity(self) -> float:
        """Return the operations per byte."""
        return self.operations / self.nbytes

    def rate(self, device: Device) -> float:
        """Return the most operations a second that a device's memory and arithmetic allow."""
        return min(device.peaks[self.dtype], self.intensity * device.memory_bandwidth)


@cache
def lab() -> Any:
    """Return the lesson's module with the bytes of attention."""
    return load_module(lessons.find("22").part("experiments.py"), "22")


def attention_rung(version: int, tokens: int) -> Rung:
    """Return one head of 64 columns."""
    kind = "float16" if version == 3 else "float32"
    moved = sum(lab().attention_bytes(version, tokens))
    return Rung(f"v{version}", 4 * tokens * tokens * lab().HEAD, moved, kind)


def product_rung(version: int, side: int) -> Rung:
    """Return a product of two square matrices."""
    kind = "float16" if version == 5 else "float32"
    itemsize = np.dtype(kind).itemsize
    moved = read_bytes(version, side, side, side, itemsize) + side * side * itemsize
    return Rung(f"v{version}", 2 * side**3, moved, kind)


KERNELS = [(attention_rung, each) for each in ATTENTION] + [(product_rung, n) for n in PRODUCT]
"""The positions of the first slider."""


@cache
def device_of(name: str) -> Device:
    """Return a GPU as its data sheet states it."""
    return Cluster.parse(f"{name}:1x1").device


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    attention, product = say("attention", "注意力"), say("product", "矩阵乘法")
    return Live(
        name="roofline",
        lesson="22",
        section="4",
        title=say("Kernels under the roofline", "屋顶线下的核函数"),
        predict=Prediction(
            say(
                "An H200 computes exactly as fast as an H100, and its memory is 1.43 times as fast. "
                "In a long sequence attention v3 makes 64 operations a byte; the ridge of an H100 is "
                "at 295. At most how many times as fast can v3 be on the H200?",
                "H200 的运算速度与 H100 完全一样，显存的速度是 1.43 倍。序列很长时，注意力 v3 "
                "每字节做 64 次运算；H100 的拐点在 295。v3 在 H200 上最多能快到几倍？",
            ),
            (
                say("1: it computes as fast as before", "1 倍：运算速度没有变"),
                say("1.2: half of its time is memory", "1.2 倍：有一半时间花在内存上"),
                "1.43",
            ),
            2,
            say(
                "1.43: 64 lies left of the ridge, so memory decides, and more arithmetic costs "
                "nothing. Choose v3, the largest size, and H100, then H200: its square rises with "
                "the slope, and the flat roof stays.",
                "1.43 倍：64 在拐点左边，由内存决定，多做运算不花时间。选 v3 和最大的长度，"
                "再从 H100 换到 H200：方块随斜线上升，水平的屋顶不动。",
            ),
        ),
        controls=(
            Control(
                say("kernel", "核函数"),
                (
                    *(f"{attention} v{version}" for version in ATTENTION),
                    *(f"{product} v{version}" for version in PRODUCT),
                ),
            ),
            Control(say("tokens, or rows", "词元数或行数"), tuple(f"{size:,}" for size in SIZES)),
            Control("GPU", tuple(name.upper() for name in GPUS)),
        ),
        size=(620, 318),
        picture=partial(_picture, say),
        start=(1, 0, 2),
    )


def _picture(say: Say, kernel: int, size_at: int, gpu: int) -> Picture:
    rung_of, chosen = KERNELS[kernel]
    size, device = SIZES[size_at], device_of(GPUS[gpu])
    versions = [version for each, version in KERNELS if each is rung_of]
    rung = rung_of(chosen, size)
    picture = Picture(
        f'python -c "from minidist.site.live.roofline import *; r = {rung_of.__name__}({chosen}, '
        f"{size}); print(r.operations, r.nbytes, r.intensity, r.rate(device_of('{GPUS[gpu]}')))\""
    )
    PLANE.axes(
        picture,
        [(each, f"{each:g}") for each in (0.1, 1, 10, 100, 1000)],
        [(TERA * each, f"{each:g} T") for each in (0.1, 1, 10, 100, 1000)],
    )
    picture.text(PLANE.left + 4, 12, say("operations a second", "每秒运算次数"), "soft small")
    picture.text(
        PLANE.left + PLANE.width, 312, say("operations a byte", "每字节运算次数"), "end soft small"
    )
    _draw_roofs(picture, say, device)
    places: dict[tuple[float, float], list[Rung]] = {}
    for version in versions:
        other = rung_of(version, size)
        places.setdefault((other.intensity, other.rate(device)), []).append(other)
    for (intensity, rate), same in places.items():
        names = " ".join(each.name for each in same)
        x = PLANE.across(intensity)
        y = PLANE.up(rate)
        width = 24 * len(same)
        picture.box(x - width / 2, y - 10, width, 20, "c1" if rung in same else "c0", names)
    picture.facts = _facts(say, rung, device)
    return picture


def _draw_roofs(picture: Picture, say: Say, device: Device) -> None:
    """Draw what memory allows, and the peaks of float32 and of tensor cores."""
    low, high = PLANE.x
    roofs = (("float32", "float32", "c7"), ("float16", say("tensor cores", "张量核心"), "c2"))
    for dtype, words, look in roofs:
        peak = device.peaks[dtype]
        ridge = peak / device.memory_bandwidth
        PLANE.curve(picture, [(ridge, peak), (high, peak)], f"{look} thick")
        PLANE.curve(picture, [(ridge, peak), (ridge, PLANE.y[0])], "dashed")
        picture.text(PLANE.left + PLANE.width, PLANE.up(peak) - 6, words, "end small")
    top = device.peaks["float16"] / device.memory_bandwidth
    PLANE.curve(
        picture, [(each, each * device.memory_bandwidth) for each in (low, top)], "c0 thick"
    )


def _facts(say: Say, rung: Rung, device: Device) -> list[str]:
    """Return the numbers of a kernel, and which side of the ridge it lies on."""
    peak = device.peaks[rung.dtype]
    ridge = peak / device.memory_bandwidth
    rate = rung.rate(device)
    is_left = rung.intensity < ridge
    moved = f"{rung.nbytes:,}" if rung.nbytes < 1e9 else f"{rung.nbytes / 1e9:,.4g} G"
    made = f"{rung.operations:,}" if rung.operations < 1e9 else f"{rung.operations / 1e9:,.4g} G"
    return [
        say(
            f"{made} operations / {moved} bytes = {rung.intensity:.4g} operations a byte, in "
            f"{rung.dtype}; the ridge is at {ridge:.0f}.",
            f"{made} 次运算 / {moved} 字节 = 每字节 {rung.intensity:.4g} 次运算，{rung.dtype}；"
            f"拐点在 {ridge:.0f}。",
        ),
        say(
            f"At most {rate / TERA:.4g} TFLOP/s, {rate / peak:.0%} of the peak: "
            + ("memory decides." if is_left else "arithmetic decides."),
            f"最多 {rate / TERA:.4g} TFLOP/s，峰值的 {rate / peak:.0%}："
            + ("由内存决定。" if is_left else "由运算决定。"),
        ),
        say(
            f"At least {_seconds(rung.operations / rate)} for one launch, if every byte comes from "
            "global memory.",
            f"如果每个字节都来自全局内存，一次启动至少要 {_seconds(rung.operations / rate)}。",
        ),
    ]


def _seconds(seconds: float) -> str:
    """Return a short time: "3.1 µs", "0.25 ms"."""
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-4 else f"{seconds * 1e3:,.4g} ms"
