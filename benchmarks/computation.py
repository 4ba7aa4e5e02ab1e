"""The second part of `minidist bench calibrate`: the cost of computation on this machine, for one
rank and for several at once.

Each rank is a process of one BLAS thread, as in training; all compute at once, so that the effect
of shared cores, caches and memory bandwidth is measured. Measured are

    matmul   products of several sizes            call + 2mkn / peak · (1 + half · (1/m + 1/k +
                                                  1/n)); the term of half is left out for small ones
    stack    stacks of products, as attention's   the same, and a time per matrix
    pass     NumPy's passes over arrays           call + bytes / bandwidth, faster while the bytes
                                                  fit the cache
    gaps     passes over views with gaps          the same, and a time per innermost loop
    step     training steps of small models       time of Python, tape and modules per result of an
                                                  op; bandwidth of a step's passes, whose arrays are
                                                  new or were just written; factor between its
                                                  products and the products measured separately;
                                                  time per byte of matrices that left the cache

A pass is the mean of the passes of a transformer's step (add, subtract, multiply, exp, sum, copy),
with new arrays. A figure is the time of the slowest rank: median over repetitions, minimum over
rounds (a disturbance only adds time); for steps the median over rounds, because trainings are
disturbed by the same amount. The fit is weighted least squares on the relative error. Chapter 24
uses it for the seconds of kernels (simulate/here.py).
"""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.bench.jobs import (
    Job,
    answer,
    closed_at_the_end,
    slowest,
    start_workers,
    worker_arguments,
)
from minidist.comm.cost.link_model import ComputationCost
from minidist.comm.group import Group
from minidist.device.allocator import tune_allocator
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.observe.events import Busy
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.here import cores_here, device_of
from minidist.simulate.one_rank import run_rank
from minidist.simulate.rates import Rates
from minidist.simulate.trace import Kernel

MODULE = "minidist.bench.computation"
PRODUCTS = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (768, 768, 768),
    (64, 32, 64),
    (96, 80, 96),
    (32, 192, 768),
    (192, 32, 768),
    (16, 256, 1024),
    (64, 256, 1024),
    (96, 320, 1280),
    (512, 256, 1024),
    (512, 1024, 256),
    (1024, 64, 1024),
    (1024, 1024, 64),
)
"""m, k, n of products: cubes, and those of a transformer."""
STACKS = ((32, 64, 64, 64), (32, 64, 32, 64), (16, 128, 64, 64), (16, 64, 128, 64))
"""Number of matrices, m, k, n: products of attention, whose heads are adjacent in memory."""
PASSES = tuple(1 << shift for shift in range(8, 23, 2))
"""Elements of float32 arrays: 1 KiB to 16 MiB."""
GAPS = ((4096, 16), (4096, 32), (1024, 64), (512, 128))
"""Rows, and elements per row: the half of a head that rotary positions rotate, heads, blocks."""
BYTES_A_PASS = (12 + 12 + 8 + 8 + 4 + 8) / 6  # per element: read and written, mean of six passes
Figure = tuple[str, str, tuple[int, ...]]
FIGURES: list[Figure] = [
    *(("matmul", dtype, size) for dtype in ("float32", "float64") for size in PRODUCTS),
    *(("stack", "float32", size) for size in STACKS),
    *(("pass", "float32", (elements,)) for elements in PASSES),
    *(("gaps", "float32", size) for size in GAPS),
    *(
        ("step", "float32", size)
        for size in (
            (32, 16, 2, 1),
            (32, 16, 8, 8),
            (128, 64, 8, 1),
            (128, 64, 16, 8),
            (192, 32, 8, 8),
            (256, 128, 1, 1),
            (256, 128, 8, 1),
            (256, 128, 8, 8),
            (256, 64, 8, 2),
            (384, 128, 4, 1),
            (384, 64, 8, 4),
            (512, 64, 4, 2),
        )
    ),
]
"""A step: model width, tokens per sequence, sequences, passes that they are divided into. The first
steps are almost only Python and launches, the last has arrays larger than the cache."""
BUDGET = 0.03  # seconds of all repetitions of one figure
# bounds: a step's byte costs at most DEAREST times a plain pass's; in the cache at least 1/DEAREST
DEAREST = 4.0
PRODUCTS_BY = (0.8, 1.2)  # bounds of that factor: a step's operands may still be in the cache
# tried limits: largest bytes of a pass whose arrays may be in the cache
CACHES = tuple(1 << shift for shift in range(17, 23))
TURNS = 8  # iterations of the fit of the steps
INNER = 2  # runs between two readings of the clock
# pairs of operands of a product, used in turn: each layer has its own weights and activations
MOST_PAIRS = 16
MOST_BYTES = 64 << 20  # bytes of all pairs and their results


def measure_all(
    ranks: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> list[ComputationCost]:
    """Measure and fit one rank, and each number of ranks at once, up to the number of cores.

    If there are more ranks than cores, they take turns: that needs no measurement
    (simulate/here.py).
    """
    fitted = []
    for count in sorted({1, *(min(count, cores_here()) for count in ranks)}):
        jobs: list[Job] = []
        with closed_at_the_end(jobs):
            jobs.append(start_job(count))
            figures: dict[Figure, list[float]] = {}
            for number in range(rounds):
                progress(f"{count} ranks compute, round {number + 1} of {rounds}")
                for kind, dtype, size in FIGURES:
                    (seconds,) = slowest(jobs[0], kind=kind, dtype=dtype, size=size)
                    figures.setdefault((kind, dtype, size), []).append(seconds)
        fitted.append(
            fit(
                count,
                {
                    figure: statistics.median(times) if figure[0] == "step" else min(times)
                    for figure, times in figures.items()
                },
            )
        )
    return fitted


def start_job(ranks: int) -> Job:
    """Start ranks that compute without communication, at most one per core."""
    return start_workers(MODULE, "computation", min(ranks, cores_here()), by="rank")


def fit(ranks: int, seconds: Mapping[Figure, float]) -> ComputationCost:
    """Return the costs that fit the measured seconds of each figure best."""
    passes = [
        (BYTES_A_PASS * size[0], time)
        for (kind, _, size), time in seconds.items()
        if kind == "pass"
    ]
    launch, bandwidth, cache_bytes, cache_factor, misfit = _fit_passes(passes)
    products = {
        dtype: [
            (size, time)
            for (kind, of, size), time in seconds.items()
            if kind == "matmul" and of == dtype
        ]
        for dtype in ("float32", "float64")
    }
    peaks, half, small, worst = _fit_products(products, launch)
    cost = ComputationCost(
        ranks,
        peaks,
        half,
        launch,
        bandwidth,
        cache_bytes,
        cache_factor,
        max(misfit, worst),
        small_bytes=small,
    )
    cost = replace(
        cost,
        matrix=_each(cost, seconds, "stack", stack_kernel),
        loop=_each(cost, seconds, "gaps", gaps_kernel),
    )
    steps = {size: time for (kind, _, size), time in seconds.items() if kind == "step"}
    return _fit_steps(cost, steps) if steps else cost


def _each(
    cost: ComputationCost,
    seconds: Mapping[Figure, float],
    kind: str,
    kernel: Callable[[Sequence[int]], Kernel],
) -> float:
    """Return the extra seconds per matrix of a stack, or per inner loop of a pass, beyond those
    that `cost` predicts."""
    rates = Rates.of(device_of([cost], 1, 1, {}))
    measured = [(size, time) for (of, _, size), time in seconds.items() if of == kind]
    if not measured:
        return 0.0
    columns = np.array([[size[0] / time] for size, time in measured])
    left = np.array([1 - rates.seconds(kernel(size)) / time for size, time in measured])
    return float(bounded_least_squares(columns, left, np.zeros(1), np.full(1, np.inf))[0])


def stack_kernel(size: Sequence[int]) -> Kernel:
    """Return a stack of products as a kernel of the simulator; size: matrices, m, k, n."""
    count, m, k, n = size
    return Kernel(
        "matmul",
        "float32",
        2.0 * count * m * k * n,
        4.0 * count * (m * k + k * n + m * n),
        tuple(size),
    )


def gaps_kernel(size: Sequence[int]) -> Kernel:
    """Return a pass over rows with gaps as a kernel of the simulator; size: rows, elements per
    row."""
    return Kernel("memory", "float32", 0, BYTES_A_PASS * size[0] * size[1], (size[0],))


def _fit_steps(cost: ComputationCost, steps: Mapping[tuple[int, ...], float]) -> ComputationCost:
    """Return the cost with the numbers that fit the steps best: Python's seconds, seconds per byte
    in cache and beyond, the cache's size, the factor of a step's products, and the extra seconds
    per byte of their matrices.

    Thin products are limited by the bandwidth too, so the products' seconds are computed again with
    each new bandwidth.
    """
    measured = np.array(list(steps.values()))
    kernels = [kernels_of(size) for size in steps]
    plain = np.array([1 / (cost.bandwidth * cost.cache_factor), 1 / cost.bandwidth])
    low = np.array([0.0, plain[0] / DEAREST, plain[1], PRODUCTS_BY[0], 0.0])
    high = np.array([np.inf, *DEAREST * plain, PRODUCTS_BY[1], DEAREST * plain[1]])
    best = None
    for limit in CACHES:
        found = cost
        for _ in range(TURNS):
            rows = (
                np.array([_step_row(each, cost, found, limit) for each in kernels])
                / measured[:, None]
            )
            sums = 1 - rows[:, 5]
            numbers = bounded_least_squares(rows[:, :5], sums, low, high)
            python, cached, streamed, by, cold = numbers.tolist()
            found = replace(
                cost,
                python=python,
                bandwidth=1 / streamed,
                cache_bytes=float(limit),
                cache_factor=max(1.0, streamed / cached),
                peaks={dtype: peak / by for dtype, peak in cost.peaks.items()},
                cold=cold,
            )
        error = float(((rows[:, :5] @ numbers - sums) ** 2).sum())
        if best is None or error < best[0]:
            best = error, found
    assert best is not None
    return best[1]


def _step_row(
    kernels: Sequence[tuple[Kernel, int]], cost: ComputationCost, found: ComputationCost, limit: int
) -> list[float]:
    """Return the row of a step for the fit: results of ops; bytes of passes of at most `limit`
    bytes, and of larger ones; seconds of products, and their bytes; seconds that do not depend on a
    kernel's size, plus those by which the bandwidth limits products."""
    memory = [(kernel.nbytes, times) for kernel, times in kernels if kernel.kind == "memory"]
    products = [(kernel, times) for kernel, times in kernels if kernel.kind == "matmul"]
    cached = sum(nbytes * times for nbytes, times in memory if nbytes <= limit)
    alone, now, bound = (
        Rates.of(device_of([replace(each, launch=0.0, matrix=0.0, cold=0.0)], 1, 1, {})).segment(
            products
        )
        for each in (replace(cost, bandwidth=np.inf), replace(found, bandwidth=np.inf), found)
    )
    endless = replace(cost, bandwidth=np.inf, peaks=dict.fromkeys(cost.peaks, np.inf), python=0.0)
    return [
        sum(times for kernel, times in kernels if kernel.kind == "python"),
        cached,
        sum(nbytes * times for nbytes, times in memory) - cached,
        alone,
        sum(kernel.nbytes * times for kernel, times in products),
        Rates.of(device_of([endless], 1, 1, {})).segment(kernels) + bound - now,
    ]


def bounded_least_squares(
    columns: np.ndarray, sums: np.ndarray, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Return the numbers within [low, high] for which columns @ numbers fits `sums` best."""
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    numbers = low.copy()
    free = list(range(len(low)))
    while free:
        held = [place for place in range(len(low)) if place not in free]
        rest = sums - columns[:, held] @ numbers[held]
        solved, *_ = np.linalg.lstsq(columns[:, free] / scale[free], rest, rcond=None)
        numbers[free] = solved / scale[free]
        past = np.maximum(low - numbers, numbers - high)[free] * scale[free]
        if past.max() <= 0:
            break
        worst = free.pop(int(past.argmax()))
        numbers[worst] = min(max(numbers[worst], low[worst]), high[worst])
    return numbers


def kernels_of(size: tuple[int, ...]) -> list[tuple[Kernel, int]]:
    """Return (kernel, number of runs) for the kernels of a step of a small model."""
    trace = run_rank(Plan(accumulate=size[3]), _model(size), rows=size[2], device_kind="cpu")
    return [
        each
        for event in trace.events[trace.steps[-1] :]
        if isinstance(event, Busy)
        for each in trace.segments[int(str(event.work))]
    ]


def _model(size: tuple[int, ...]) -> GPTConfig:
    width, context, *_ = size
    return GPTConfig(
        vocabulary=512, context=context, layers=2, width=width, heads=4, positions="rotary"
    )


def _fit_passes(samples: Sequence[tuple[float, float]]) -> tuple[float, float, float, float, float]:
    """Return launch, bandwidth, cache_bytes, cache_factor and worst misfit; the cache's size is the
    measured size that fits best."""
    nbytes, seconds = np.array(samples).T
    best = None
    for limit in sorted(nbytes)[2:-2]:
        inside = nbytes <= limit
        columns = (
            np.stack([np.ones_like(nbytes), nbytes * inside, nbytes * ~inside], axis=1)
            / seconds[:, None]
        )
        numbers = _least_squares(columns)
        error = np.abs(columns @ numbers - 1)
        if numbers[2] > 0 and (best is None or (error**2).sum() < best[0]):
            best = (float((error**2).sum()), limit, numbers, float(error.max()))
    assert best is not None, "large arrays take time"
    _, limit, (launch, cached, streamed), worst = best
    return (
        float(launch),
        1 / float(streamed),
        float(limit),
        max(1.0, float(streamed / max(cached, 1e-15))),
        worst,
    )


def _fit_products(
    products: Mapping[str, Sequence[tuple[Sequence[int], float]]], launch: float
) -> tuple[dict[str, float], float, float, float]:
    """Return the peak of each dtype, float32's `half`, the bytes up to which half does not count,
    and the worst misfit."""
    peaks = {}
    half = None
    small = 0.0
    worst = 0.0
    for dtype, samples in products.items():
        flops = np.array([2.0 * np.prod(size) for size, _ in samples])
        sides = np.array([sum(1 / side for side in size) for size, _ in samples])
        nbytes = np.array(
            [(m * k + k * n + m * n) * np.dtype(dtype).itemsize for (m, k, n), _ in samples]
        )
        seconds = np.maximum(np.array([time for _, time in samples]) - launch, 1e-9)
        if half is None:
            tried = []
            for limit in (0.0, *sorted(nbytes)[: len(nbytes) // 2]):
                columns = (
                    np.stack([flops, flops * sides * (nbytes > limit)], axis=1) / seconds[:, None]
                )
                numbers = _least_squares(columns)
                inverse, slope = map(float, numbers)
                tried.append(
                    (float(((columns @ numbers - 1) ** 2).sum()), float(limit), inverse, slope)
                )
            _, small, inverse, slope = min(tried)
            half = slope / inverse if inverse > 0 else 0.0
        sides = sides * (nbytes > small)
        inverse = float(_least_squares((flops * (1 + half * sides) / seconds)[:, None])[0])
        # if all samples were disturbed
        inverse = inverse if inverse > 0 else float((seconds / flops).min())
        errors = np.abs(flops * inverse * (1 + half * sides) / seconds - 1)
        peaks[dtype] = 1 / inverse
        worst = max(worst, float(errors.max()))
    assert half is not None
    return peaks, half, small, worst


def _least_squares(columns: np.ndarray) -> np.ndarray:
    """Return the numbers >= 0 for which columns @ numbers fits 1 best."""
    count = columns.shape[1]
    return bounded_least_squares(
        columns, np.ones(len(columns)), np.zeros(count), np.full(count, np.inf)
    )


# ---------------------------------------------------------------- the ranks' side


def measure(kind: str, dtype: str, size: Sequence[int]) -> list[float]:
    """Return the seconds of a figure on this rank: the median of its repetitions in BUDGET seconds,
    the same time on every rank."""
    if kind == "step":
        return [statistics.median(run(_steps, tuple(size), size=1, transport="threads")[0])]
    makers: dict[str, Callable[..., Callable[[], Any]]] = {
        "matmul": _product,
        "stack": _stack,
        "pass": _passes,
        "gaps": _passes,
    }
    work = makers[kind](dtype, *size)
    work()
    now = time.perf_counter()
    seconds: list[float] = []
    end = now + BUDGET
    while now < end or len(seconds) < 3:
        start = now
        for _ in range(INNER):
            work()
        now = time.perf_counter()
        seconds.append((now - start) / INNER / (1 if kind in ("matmul", "stack") else 6))
    return [statistics.median(seconds)]


def _product(dtype: str, m: int, k: int, n: int) -> Callable[[], Any]:
    """Return a function that multiplies the next of several pairs, because each layer has its own
    operands; results are kept for one cycle of the pairs."""
    return _in_turn(
        (m * k + k * n + m * n) * np.dtype(dtype).itemsize,
        lambda: (np.ones((m, k), dtype), np.ones((k, n), dtype)),
    )


def _stack(dtype: str, count: int, m: int, k: int, n: int) -> Callable[[], Any]:
    """Return a function that computes the products of a stack whose matrices are interleaved by
    rows in memory, with the second one transposed."""
    return _in_turn(
        count * (m * k + k * n + m * n) * np.dtype(dtype).itemsize,
        lambda: (
            np.ones((m, count, k), dtype).transpose(1, 0, 2),
            np.ones((n, count, k), dtype).transpose(1, 2, 0),
        ),
    )


def _in_turn(nbytes: int, pair: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Callable[[], Any]:
    count = max(2, min(MOST_PAIRS, MOST_BYTES // nbytes))
    pairs = itertools.cycle([pair() for _ in range(count)])
    results: deque[Any] = deque(maxlen=count)

    def work() -> None:
        a, b = next(pairs)
        results.append(a @ b)

    return work


def _passes(dtype: str, rows: int, elements: int | None = None) -> Callable[[], Any]:
    """Return a function of six passes, each into a new array: 12, 12, 8, 8, 4 and 8 bytes per
    element. With `elements`, each reads a view of rows with gaps."""
    shape = rows if elements is None else (rows, 2 * elements)
    a, b = (np.full(shape, value, dtype)[..., :elements] for value in (0.5, 1.0))

    def work() -> None:
        total = a + b
        total = total - b
        total = a * 0.5
        np.exp(a)
        a.sum()
        a.copy()

    return work


def _steps(world: Group, size: tuple[int, ...]) -> list[float]:
    """Return the seconds of each step of a small model, without the first two."""
    trainer = Trainer(Plan(accumulate=size[3]), _model(size), world)
    tokens = (
        np.arange(size[2] * size[1]).reshape(size[2], size[1]) * 7 % trainer.model.config.vocabulary
    )
    seconds = []
    for _ in range(8):
        start = time.perf_counter()
        trainer.step((tokens, tokens))
        seconds.append(time.perf_counter() - start)
    return seconds[2:]


def main() -> None:
    """Run as one rank, with the memory allocator set up as in a training process."""
    options = worker_arguments().parse_args()
    tune_allocator()
    answer(options.meet, options.rank, measure)


if __name__ == "__main__":
    main()
