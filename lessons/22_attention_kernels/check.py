"""Grades exercise 22: builds the student's kernels by g++, runs them checked, and counts what they
moved."""

import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidist.errors import KernelError
from minidist.files import scratch
from minidist.grading import Mistake, Result, expect, judge, load_module, named
from minidist.kernels import on_cpu
from minidist.kernels.attention import attention_reference
from minidist.kernels.loader import Source, launch

lab = load_module(Path(__file__).resolve().parent / "experiments.py", "22")
QUERIES = 40
KEYS = 33
WIDTH = 8
M = 24
N = 32
K = 48
TILE = 16
ROWS = 96
KERNELS = {"attention": "ATTENTION", "product": "PRODUCT", "row_sums": "ROW_SUMS"}

ANSWERS = {
    1: '"__expf(top - now)"',
    2: '"total * shrink + p"',
    3: '"sum[i] * shrink + p * v[key * 8 + i]"',
    4: '"BD"',
    5: "max(1, min(32, 4 * stride))",
    6: '"step", "threadIdx.x"',
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Check the online update, the barriers, then the loads."""
    if on_cpu.compiler() is None:
        yield Result(
            "C++ compiler",
            False,
            "g++",
            "none",
            "the kernels cannot be built",
            "apt install g++; minidist doctor looks for it",
        )
        return
    yield from _attention(exercise)
    yield from _barriers(exercise)
    yield from _sectors(exercise)
    yield from _row_sums(exercise)


def _written(code: str, _: re.Match[str]) -> str:
    """Return the code unchanged. In a string, re.sub would look for escapes."""
    return code


def _run(
    exercise: ModuleType,
    name: str,
    replaced: dict[str, Any],
    grid: Any,
    block: Any,
    args: Sequence[Any],
) -> Any:
    """Build a kernel with its holes filled and run it; return what was seen.

    Raises: KernelError, with the lines of the file.
    """
    text = getattr(exercise, KERNELS[name])
    file = Path(str(exercise.__file__))
    before, _, _ = file.read_text(encoding="utf-8").partition(text)
    for word, code in replaced.items():
        text = re.sub(word, partial(_written, code), text)
    text = f'#line {before.count(chr(10)) + 1} "{file.name}"\n{text}'
    with scratch(prefix="minidist-lesson-") as folder:
        source = folder / file.name  # so that errors name the student's own file
        source.write_text(text, encoding="utf-8")
        with on_cpu.watch(seed=3, count=True) as seen:
            launch(Source(source, [name]), name, grid=grid, block=block, args=args)
    return seen[0]


def _broken(task: str, target: str, error: KernelError, holes: str) -> Result:
    """Return a failed result for a kernel that does not compile, or that broke a rule as it ran."""
    text = str(error)
    if "(g++)" in text:
        return Result(
            task,
            False,
            "C that compiles",
            "an error of g++",
            "g++ cannot read it",
            f"{holes}; {text}",
        )
    return Result(task, False, target, text, "it broke a rule as it ran", holes)


# ----------------------------------------------------------------------------------- online softmax


def _one_pass(q: np.ndarray, k: np.ndarray, v: np.ndarray, mistake: str) -> np.ndarray:
    """Run the loop with one of the usual mistakes in it; float32 overflows as in the kernel."""
    top = np.full((len(q), 1), -np.inf, q.dtype)
    total = np.zeros((len(q), 1), q.dtype)
    y = np.zeros_like(q)
    for key in range(len(k)):
        score = (q @ k[key])[:, None]
        now = np.maximum(top, score)
        shrink = np.exp(now - top if mistake == "inverse" else top - now)
        p = np.exp(score - now)
        shrink = np.ones_like(shrink) if mistake == "none" else shrink
        shrink = p if mistake == "score" else shrink
        shrink = np.exp(top - score) if mistake == "old and score" else shrink
        value = v.reshape(-1)[np.arange(WIDTH) * WIDTH + key] if mistake == "place" else v[key]
        value = v[0] if mistake == "first" else value
        weighted = value if mistake == "weight" else p * value
        total = total * (1 if mistake in ("total", "swapped") else shrink)
        total = total + (p * shrink if mistake in ("new total", "swapped") else p)
        y = y * (1 if mistake == "sum" else shrink)
        weighted = weighted / total if mistake == "term divided" else weighted
        y = y + (weighted * shrink if mistake == "new sum" else weighted)
        y = p * v[key] if mistake == "forgets" else y
        y = y / total if mistake == "divided" else y
        top = now
    return y / total


MISTAKES = {
    "inverse": (
        "what was summed grows instead of shrinking",
        "the maximum can only grow, so the factor is at most 1: section 1, step 3 (hole 1)",
    ),
    "none": (
        "nothing is scaled down when the maximum grows",
        "the earlier sums belong to the old maximum: section 1, step 3 (hole 1)",
    ),
    "score": (
        "the factor is taken from this key's score, not from the old maximum",
        "the earlier sums belong to the old maximum: section 1, step 3 (hole 1)",
    ),
    "old and score": (
        "the factor is taken from this key's score, not from the new maximum",
        "the maximum stays if this score is smaller: section 1, step 3 (hole 1)",
    ),
    "swapped": (
        "the new term is scaled instead of the old sum",
        "p already belongs to the new maximum, total to the old: section 1, step 5 (hole 2)",
    ),
    "total": (
        "the total is not scaled down",
        "correct the earlier sum first, then add the new term: section 1, step 5 (hole 2)",
    ),
    "new total": (
        "the new term is scaled down too",
        "p already belongs to the new maximum: section 1, step 5 (hole 2)",
    ),
    "sum": (
        "the sum of values is not scaled down",
        "correct the earlier sum first, then add the new value: section 1, step 6 (hole 3)",
    ),
    "new sum": (
        "the new value is scaled down too",
        "p already belongs to the new maximum: section 1, step 6 (hole 3)",
    ),
    "place": (
        "v is read at another place",
        "number i of this key's value is v[key * 8 + i]: the value's row comes first (hole 3)",
    ),
    "first": (
        "the value of the first key each time",
        "number i of this key's value is v[key * 8 + i]: `key` tells which row (hole 3)",
    ),
    "divided": (
        "divided inside the loop",
        "the kernel divides once at the end: section 1, below step 6 (hole 3)",
    ),
    "term divided": (
        "each term divided inside the loop",
        "the kernel divides once at the end: section 1, below step 6 (hole 3)",
    ),
    "weight": (
        "values are added without their weight p",
        "each value is multiplied by its number of step 4: section 1, step 6 (hole 3)",
    ),
    "forgets": (
        "the sum of values forgets the keys before",
        "the corrected earlier sum comes first: section 1, step 6 (hole 3)",
    ),
}


def _attention(exercise: ModuleType) -> Iterator[Result]:
    rng = np.random.default_rng(5)
    q, k, v = (rng.normal(size=(n, WIDTH)).astype(np.float32) for n in (QUERIES, KEYS, KEYS))
    y = np.full_like(q, np.nan)
    task = "attention in one pass"
    target = "off by less than 1e-5"
    filled = {
        r"\bSHRINK\b": f"({exercise.shrink()})",
        r"\bTOTAL\b": f"({exercise.total()})",
        r"\bSUM\b": f"({exercise.weighted_sum()})",
    }
    try:
        _run(exercise, "attention", filled, -(-QUERIES // 32), 32, (q, k, v, y, QUERIES, KEYS))
    except KernelError as error:
        yield _broken(task, target, error, "holes 1 to 3")
        return
    wide_q, wide_k, wide_v = (x.astype(np.float64) for x in (q, k, v))
    by_8 = wide_q * WIDTH**0.5  # the reference divides scores by √8
    right, _ = attention_reference(*(x[None, None] for x in (by_8, wide_k, wide_v)))
    off = float(abs(y - right[0, 0]).max())
    codes = {2: exercise.total(), 3: exercise.weighted_sum()}
    by_shrink = next((n for n, code in codes.items() if re.search(r"/\s*shrink", code)), None)
    with np.errstate(invalid="ignore", over="ignore"):
        yield judge(
            task,
            off < 1e-5,
            target,
            f"off by {off:.0e}",
            "another update",
            "section 1 (holes 1 to 3)",
            signs={
                "the old sum is divided by the factor": Mistake(
                    bool(np.isnan(y).all()) and by_shrink is not None,
                    "correct means multiply, and the first factor is 0: section 1, step 3 "
                    f"(hole {by_shrink})",
                ),
                **{
                    name: Mistake(partial(_same, y, q, k, v, mistake), advice)
                    for mistake, (name, advice) in MISTAKES.items()
                },
            },
        )


def _same(y: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, mistake: str) -> bool:
    """Return whether the loop with this mistake gives y."""
    wrong = _one_pass(q, k, v, mistake)
    return np.allclose(y, wrong, rtol=1e-3, atol=1e-4, equal_nan=True)


# ----------------------------------------------------------------------------------------- barriers


def _barriers(exercise: ModuleType) -> Iterator[Result]:
    given = exercise.barriers()
    if not isinstance(given, str):
        yield Result(
            "barriers",
            False,
            "one string",
            repr(given),
            "not one string of letters",
            'one string with all letters, e.g. "CE" (hole 4)',
        )
        return
    letters = given.upper().replace(" ", "").replace(",", "")
    task = f"barriers at {', '.join(letters) or 'no place'}"
    if set(letters) - set("ABCDE"):
        yield Result(
            task, False, "letters A to E", letters, "there is no such place", 'e.g. "CE" (hole 4)'
        )
        return
    filled = {rf"/\* {letter} \*/": "__syncthreads();" for letter in letters}
    rng = np.random.default_rng(6)
    a = rng.normal(size=(M, K)).astype(np.float32)
    b = rng.normal(size=(K, N)).astype(np.float32)
    c = np.full((M, N), np.nan, np.float32)
    grid = (N // TILE, -(-M // TILE))
    mistake, advice = named(
        "a tile is overwritten while others still read it",
        "a barrier between reading a tile and filling it again",
        signs={
            "some threads never come to C": Mistake(
                "C" in letters,
                "rows beyond m skip the block of the if, and a barrier is for all threads",
            ),
            "numbers are read before others have written them": Mistake(
                "B" not in letters, "a barrier between filling a tile and reading it"
            ),
        },
    )
    try:
        seen = _run(exercise, "product", filled, grid, (TILE, TILE), (a, b, c, M, N, K))
    except KernelError as error:
        yield Result(
            task, False, "every read in order", str(error), mistake, f"{advice}: section 3 (hole 4)"
        )
        return
    off = float(abs(c - a.astype(np.float64) @ b).max())
    yield Result(
        f"{task}: the product",
        off < 1e-4,
        "off by less than 1e-4",
        f"off by {off:.0e}",
        mistake,
        advice,
    )
    yield expect(
        "barriers passed by all blocks",
        2 * (K // TILE) * grid[0] * grid[1],
        seen.barriers,
        "one barrier too many",
        "two a tile are enough: before reading, and before overwriting (hole 4)",
    )


# -------------------------------------------------------------------------------------------- loads


def _sectors(exercise: ModuleType) -> Iterator[Result]:
    """Check the sectors against what the CPU build counts."""
    for stride in (1, 2, 3, 8, 16):
        target = lab.one_warp(stride).sectors
        measured = exercise.sectors(stride)
        yield expect(
            f"sectors, stride {stride}",
            target,
            measured,
            "another number",
            "32 lanes of 4 bytes, sectors of 32 bytes, at most one a lane: section 2 (hole 5)",
            known={
                "that is bytes": 128 * stride,
                "as if lanes read neighbours": 4,
                "more sectors than lanes": 4 * stride,
                "a sector for each lane, but neighbours share": 32,
            },
        )
    yield expect(
        "sectors, stride 0",
        1,
        exercise.sectors(0),
        "all lanes read one number",
        "one sector (hole 5)",
    )


def _row_sums(exercise: ModuleType) -> Iterator[Result]:
    filled = exercise.row_and_column()
    task = "sums of rows"
    if not isinstance(filled, tuple) or len(filled) != 2:
        yield Result(
            task,
            False,
            "two strings",
            repr(filled),
            "not a row and a column",
            '"...", "..." (hole 6)',
        )
        return
    x = np.random.default_rng(7).normal(size=(ROWS, 32)).astype(np.float32)
    y = np.full(ROWS, np.nan, np.float32)
    try:
        seen = _run(
            exercise,
            "row_sums",
            {
                rf"\b{word}\b": f"({code})"
                for word, code in zip(("ROW", "COLUMN"), filled, strict=True)
            },
            ROWS // 32,
            32,
            (x, y),
        )
    except KernelError as error:
        yield _broken(
            task,
            "all 1024 numbers of 32 rows",
            error,
            "each number is brought by one thread (hole 6)",
        )
        return
    off = float(abs(y - x.sum(axis=1, dtype=np.float64)).max())
    yield Result(
        task,
        off < 1e-4,
        "off by less than 1e-4",
        f"off by {off:.0e}",
        "other numbers came",
        "hole 6",
    )
    each = seen.loads.sectors / seen.loads.requests
    yield expect(
        "sectors a load",
        "4",
        f"{each:g}",
        "the lanes are no neighbours",
        "lanes beside each other read numbers beside each other: section 2 (hole 6)",
        signs={"the lanes read down a column: an own sector each": each == 32},
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "22", *sys.argv[1:]]))
