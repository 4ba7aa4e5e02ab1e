"""Lesson 22: attention kernels: the memory hierarchy, online softmax, tiles, and the roofline.

python lessons/22_attention_kernels/lesson.py
mpirun -n 4 python lessons/22_attention_kernels/lesson.py                # section 5 on real ranks
python lessons/22_attention_kernels/lesson.py --break no-rescale         # see README.md, section 7
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import KernelError
from minidist.grading import load_module
from minidist.kernels import on_cpu
from minidist.kernels.attention import attention, attention_reference
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson

lab = load_module(Path(__file__).resolve().parent / "experiments.py", "22")
TOKENS = 64
LONG = 128
HEADS = 4
NO_COMPILER = (
    "No C++ compiler here, so sections 2 to 5 and 11.1 are left out: they build kernels for the "
    "CPU by g++ (apt install g++; minidist doctor looks for it)."
)


def plain_tiled(q: np.ndarray, k: np.ndarray, v: np.ndarray, tile: int) -> np.ndarray:
    """Return softmax(q kᵀ / √D) v without ever holding a row of scores (README, section 1).

    Shapes: q (T, D), k and v (S, D).
    """
    top = np.full(len(q), -np.inf)
    total = np.zeros(len(q))
    y = np.zeros_like(q)
    for start in range(0, len(k), tile):  # one tile of keys and values at a time
        scores = q @ k[start : start + tile].T / q.shape[1] ** 0.5
        now = np.maximum(top, scores.max(axis=1))  # the largest score so far
        shrink = np.exp(top - now)
        p = np.exp(scores - now[:, None])
        total = total * shrink + p.sum(axis=1)  # what was summed under the old top shrinks
        y = y * shrink[:, None] + p @ v[start : start + tile]
        top = now
    return y / total[:, None]


def tour(group: Group, page: Page) -> None:
    """Run the lesson: section 5 on all ranks, the other sections only on rank 0."""
    compiler = on_cpu.compiler() is not None
    if group.rank == 0:
        online(page)
        if compiler:
            warps(page)
            rungs = [lab.attention_count(version, TOKENS) for version in lab.RUNGS]
            attention_rungs(page, rungs)
            tiles_not_read(page)
            roofline(page, rungs)
        else:
            page.say(NO_COMPILER)
    if all(group.all_gather(np.array([compiler]))):
        heads_over_ranks(group, page)
    if group.rank == 0:
        if compiler:
            ladder(page)
        patterns(page)
        in_a_byte(page)


# ----------------------------------------------------------------------------------------- 1 online


def online(page: Page) -> None:
    """Show what one query carries from tile to tile; compare the result with the softmax of the
    whole row."""
    page.heading("1  Online softmax: one pass, and nothing kept but a maximum and two sums")
    q, k, v = (x[0, 0].astype(np.float64) for x in lab.drawn(LONG))
    scores = q[1:2] @ k.T / 8.0
    top = -np.inf
    total = 0.0
    rows = []
    for start in range(0, LONG, 32):
        part = scores[0, start : start + 32]
        now = max(top, part.max())
        shrink = np.exp(top - now)
        total = total * shrink + np.exp(part - now).sum()
        rows.append(
            [
                f"keys {start} to {start + 31}",
                f"{part.max():.3f}",
                f"{now:.3f}",
                f"{shrink:.3f}",
                f"{total:.3f}",
            ]
        )
        top = now
    page.table(
        "One query, four tiles of 32 keys",
        ["", "largest here", "top", "shrink", "total"],
        rows,
        note=f"the whole row at once: top {scores.max():.3f}, total "
        f"{np.exp(scores - scores.max()).sum():.3f}",
    )
    right = attention_reference(q[None, None], k[None, None], v[None, None])[0][0, 0]
    rows = [
        [
            str(tile),
            f"{abs(plain_tiled(q, k, v, tile) - right).max():.0e}",
            size_text(8 * LONG * tile),
        ]
        for tile in (1, 32, LONG)
    ]
    page.table(
        f"The loop of section 1 on {LONG} queries and keys, float64",
        ["keys a tile", "off by at most", "scores alive"],
        rows,
    )


# -------------------------------------------------------------------------------------- 2 hierarchy


def warps(page: Page) -> None:
    """Show the sectors of one load of a warp, by stride."""
    page.heading("2  The memory hierarchy: what a warp asks for, and what is fetched")
    rows = []
    for stride in (1, 2, 4, 8, 16):
        loads = lab.one_warp(stride)
        rows.append(
            [
                f"a float, every {stride}" if stride > 1 else "a float, neighbours",
                loads.bytes,
                loads.sectors,
                lab.sectors(stride),
                verdict(loads.sectors, lab.sectors(stride)),
                f"{100 * loads.bytes / (lab.SECTOR * loads.sectors):g} %",
            ]
        )
    loads = lab.one_warp(0)
    rows.append(
        [
            "16 bytes, neighbours",
            loads.bytes,
            loads.sectors,
            16,
            verdict(loads.sectors, 16),
            f"{100 * loads.bytes / (lab.SECTOR * loads.sectors):g} %",
        ]
    )
    page.table(
        "One load instruction of a warp of 32 lanes",
        ["each lane", "bytes", "sectors", "formula", "", "used"],
        rows,
        note="a sector is 32 bytes; the formula is hole 5 of the exercise",
    )


# -------------------------------------------------------------------------------------- 3 attention


def attention_rungs(page: Page, counts: list[Any]) -> None:
    """Compare the bytes of each version with its formula."""
    page.heading("3  Naive and tiled: what is moved")
    rows = [
        [
            count.name,
            f"{count.seen.loads.bytes:,}",
            verdict(count.seen.loads.bytes, count.read),
            f"{count.seen.stores.bytes:,}",
            verdict(count.seen.stores.bytes, count.written),
            f"{count.seen.loads.requests:,}",
            f"{count.seen.loads.sectors / count.seen.loads.requests:.1f}",
            size_text(count.seen.loads.shared),
        ]
        for count in counts
    ]
    page.table(
        f"One head, {TOKENS} tokens, {lab.HEAD} columns: counted, and held against the formulas "
        "of section 3",
        ["", "read", "", "written", "", "requests", "sectors each", "shared read"],
        rows,
        note="bytes; read and written: global memory; shared read: bytes of shared memory",
    )


def tiles_not_read(page: Page) -> None:
    """Show causal and block-sparse attention: version 3 skips whole tiles."""
    rows = []
    for name, rules, tiles in (
        ("all", {}, 4),
        ("causal", {"causal": True}, 3),
        ("blocks on the diagonal", {"blocks": np.eye(2, dtype=bool)}, 2),
    ):
        count = lab.attention_count(3, LONG, tiles=tiles, **rules)
        flags = 4 * 128 * ("blocks" in rules)  # each thread reads the mask's byte of each tile
        rows.append(
            [
                name,
                tiles,
                f"{count.seen.loads.bytes - flags:,}",
                verdict(count.seen.loads.bytes - flags, count.read),
            ]
        )
    page.table(
        f"Tiles of 64 × 64 that are visited, {LONG} tokens, version 3",
        ["", "tiles", "read", ""],
        rows,
        note="without the mask's own bytes; a tile that no query sees is neither read nor "
        "multiplied",
    )


# --------------------------------------------------------------------------------------- 4 roofline


def roofline(page: Page, counts: list[Any]) -> None:
    """Show each version's intensity from counted bytes, and what a stated machine allows it."""
    page.heading("4  Reading a roofline")
    machine = lab.H100
    rows = []
    for version, count in enumerate(counts, 1):
        peak = machine.rates[count.rate]
        roof = machine.roof(count.intensity, count.rate)
        rows.append(
            [
                count.name,
                f"{count.intensity:.2f}",
                f"{lab.long_intensity(version):.2f}",
                f"{peak / machine.memory:.0f}",
                f"{roof / 1e12:.1f}",
                f"{roof / peak:.0%}",
            ]
        )
    page.table(
        f"Attention under the roof of an {machine.name} as stated",
        ["", "operations a byte", "long", "ridge", "TFLOP/s at most", "of the peak"],
        rows,
        note=f"long: by the formulas, {lab.FOREVER} tokens. Stated: {machine.memory / 1e12:.2f} "
        f"TB/s, {machine.rates['float32'] / 1e12:.0f} TFLOP/s float32, "
        f"{machine.rates['tensor cores'] / 1e12:.0f} by tensor cores; operations 4 T S D by "
        "formula; no caches",
    )


# ------------------------------------------------------------------------------------------ 5 ranks


def heads_over_ranks(group: Group, page: Page) -> None:
    """Attend on each rank with its own heads: the same numbers, the same bytes in all, no
    message."""
    page.heading("5  Heads over ranks")
    q, k, v = lab.drawn(32, HEADS)
    mine = slice(group.rank * HEADS // group.size, (group.rank + 1) * HEADS // group.size)
    parts = np.zeros_like(q)
    with on_cpu.watch(count=True) as seen:
        if q[:, mine].size:  # more ranks than heads: some have none
            parts[:, mine], _ = attention(q[:, mine], k[:, mine], v[:, mine], version=2)
    read = group.all_reduce(np.array([seen[0].loads.bytes if seen else 0]))[0]
    together = group.all_reduce(parts)
    right = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))[0]
    formula = HEADS * lab.attention_bytes(2, 32)[0]
    page.table(
        f"{HEADS} heads of 32 tokens on {group.size} ranks, version 2",
        ["", "read by all", "one device", "", "off by at most"],
        [
            [
                f"heads a rank: {-(-HEADS // group.size)} at most",
                read,
                formula,
                verdict(read, formula),
                f"{abs(together - right).max():.0e}",
            ]
        ],
        note="heads are independent: that is why tensor parallelism (lesson 12) cuts attention "
        "there",
    )


# -------------------------------------------------------------------------------------- 11.1 ladder


def ladder(page: Page) -> None:
    """Show the matrix product: loads per multiply, from global and from shared memory."""
    page.heading("11.1  The matrix product")
    machine = lab.H100
    rows = []
    for version in lab.LADDER:
        count = lab.matmul_count(version)
        products = count.operations // 2
        size = 2 if version == 5 else 4
        shared = count.seen.loads.shared / count.operations
        by_shared = min(1.0, machine.shared / shared / machine.rates[count.rate]) if shared else 1.0
        rows.append(
            [
                f"v{version} {count.name}",
                f"{count.seen.loads.bytes / size / products:.4f}",
                verdict(count.seen.loads.bytes, count.read),
                count.seen.loads.requests,
                f"{count.seen.loads.shared / products:.3f}",
                f"{count.intensity:.2f}",
                f"{100 * by_shared:.3g} %" if shared else "-",
            ]
        )
    page.table(
        "(128 × 32) times (32 × 128), counted",
        ["", "loads a multiply", "", "requests", "shared bytes", "intensity", "shared allows"],
        rows,
        note="shared bytes: a multiply; shared allows: of the stated peak rate; MATMUL.md "
        "climbs this ladder",
    )


# ------------------------------------------------------------------------------------ 11.2 patterns


def patterns(page: Page) -> None:
    """Show tiles by the pattern's definition; then bytes and processor time of one head, forward
    and backward, as measured."""
    page.heading("11.2  Sparse attention: the notes' 6 times and 10 times (N3:52)")
    rows = [
        [
            f"{tokens:,}",
            f"{lab.tiles(tokens):,}",
            f"{lab.tiles(tokens, lab.PATTERN):,}",
            f"{lab.tiles(tokens) / lab.tiles(tokens, lab.PATTERN):.1f}",
        ]
        for tokens in (512, 1024, 4096, 32768)
    ]
    page.table(
        f"Tiles of 64 × 64 that are computed, causal and under {lab.PATTERN}",
        ["tokens", "causal", "pattern", "times fewer"],
        rows,
        note="operations are 4 · 64² · D a tile forward, 10 · 64² · D backward, so in the same "
        "proportion",
    )
    kept, dense, sparse = lab.WAYS
    measured = {
        (way, tokens): lab.forward_and_backward(way, tokens)
        for way, tokens in (
            *((way, lab.SHORT) for way in lab.WAYS),
            (dense, lab.LONGER),
            (sparse, lab.LONGER),
            (sparse, lab.TEN),
        )
    }
    page.table(
        "One head of 64 columns, float32, NumPy, forward and backward: measured",
        ["", "tokens", "peak bytes", "processor time"],
        [
            [way, f"{tokens:,}", size_text(nbytes), f"{1000 * seconds:.0f} ms"]
            for (way, tokens), (seconds, nbytes) in measured.items()
        ],
    )
    page.say(
        f"    {lab.TEN:,} tokens under the pattern take "
        f"{measured[sparse, lab.TEN][1] / measured[kept, lab.SHORT][1]:.2f} times the bytes of "
        f"{lab.SHORT:,} with every score kept. At {lab.LONGER:,} tokens the time of dense tiled "
        f"attention is {measured[dense, lab.LONGER][0] / measured[sparse, lab.LONGER][0]:.1f} "
        "times that of the pattern, and its bytes are "
        f"{measured[dense, lab.LONGER][1] / measured[sparse, lab.LONGER][1]:.1f} times as many."
    )


# ------------------------------------------------------------------- 11.5 FlashAttention-3's fp8


def in_a_byte(page: Page) -> None:
    """Show the error of attention whose q, k and v are rounded to a byte in three ways."""
    page.heading("11.5  FlashAttention-3: q, k and v in a byte")
    page.table(
        f"One head of {lab.HEAD} columns, {lab.SHORT:,} tokens, one number of a thousand ten times "
        "as large",
        ["e4m3", "root mean square error"],
        [[name, f"{error:.4f}"] for name, error in lab.byte_errors(lab.SHORT).items()],
    )


# ----------------------------------------------------------------------------------------- Break it


def no_barrier() -> None:
    """Remove the barrier between filling a tile and reading it."""
    with lab.tiled(None) as source:
        lab.run_tiled(source, *lab.drawn(TOKENS))
    print("With both barriers the launch ends without an error. Without the first barrier:")
    with lab.tiled("no-barrier") as source:
        lab.run_tiled(source, *lab.drawn(TOKENS))


def no_rescale() -> None:
    """Do not scale y down where a tile raises the maximum."""
    q, k, v = lab.drawn(TOKENS)
    right = attention_reference(*(x.astype(np.float64) for x in (q, k, v)))[0][0, 0]
    with lab.tiled("no-rescale") as source:
        y = lab.run_tiled(source, q, k, v)[0, 0]
        one_tile = lab.run_tiled(source, *(np.ascontiguousarray(x[:, :, :32]) for x in (q, k, v)))
    short = attention_reference(*(x[:, :, :32].astype(np.float64) for x in (q, k, v)))[0]
    scores = q[0, 0] @ k[0, 0].T
    raised = scores[:, 32:].max(axis=1) > scores[:, :32].max(axis=1)
    wrong = abs(y - right).max(axis=1) > 1e-4
    print(
        f"32 tokens, one tile: off by {abs(one_tile - short).max():.0e}; right is at most 1e-06\n"
        f"{TOKENS} tokens, two tiles: off by {abs(y - right).max():.2f}; right is at most 1e-06\n"
        f"wrong are {wrong.sum()} queries, the {raised.sum()} of which the second tile raised the "
        f"maximum{'' if (wrong == raised).all() else ' are others'}"
    )


def mask_off_by_one() -> None:
    """Mask with key <= query + 1: a token sees its successor."""
    q, k, v = lab.drawn(32)
    for mistake in (None, "mask-off-by-one"):
        with lab.tiled(mistake) as source:
            before = lab.run_tiled(source, q, k, v, causal=True)
            other = v.copy()
            other[0, 0, 20] += 1.0  # token 20 becomes another
            moved = np.flatnonzero(
                abs(lab.run_tiled(source, q, k, other, causal=True) - before)[0, 0].max(axis=1)
            )
        print(
            f"{mistake or 'right mask':16} token 20 changed: the results of tokens {moved[0]} to "
            f"{moved[-1]} changed"
        )
    print(
        "expected: tokens 20 to 31. Token 19 has to predict token 20, and now sees it: a model "
        "trained like this learns only to copy"
    )


BREAKS = {
    "no-barrier": Break(
        no_barrier,
        says="read of shared memory that nobody wrote",
        error=KernelError,
    ),
    "no-rescale": Break(no_rescale, says="wrong are 40 queries, the 40 of which"),
    "mask-off-by-one": Break(mask_off_by_one, says="the results of tokens 19 to 31 changed"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=2)
