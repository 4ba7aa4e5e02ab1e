"""Lesson 13: a cut sequence: Megatron's way, ring and all-to-all attention; bytes, memory.

mpirun -n 4 python lessons/13_sequence_parallel/lesson.py
python lessons/13_sequence_parallel/lesson.py                     # no launcher: four threads
python lessons/13_sequence_parallel/lesson.py --break no-offset   # see README.md, section 7
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import tensor
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import MemoryLimitError
from minidist.grading import load_module
from minidist.lessons.page import Page
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.parallel.context import ring_attention, token_shard
from minidist.parallel.context.ring_attention import plain_ring_attention, zigzag
from minidist.parallel.context.sequence_parallel import plain_sequence_mlp
from minidist.parallel.context.sparse_ring_attention import plain_window_attention
from minidist.parallel.context.ulysses import plain_ulysses
from minidist.parallel.tensor.tensor_parallel import plain_tensor_mlp

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "13")
STEPS = 2


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  The same as one process")
    same(group, page)
    page.heading("3  Zigzag: which rank has which tokens, and what it multiplies")
    balance(group, page)
    hops(group, page)
    page.heading("4.1  Traffic and memory")
    traffic(group, page)
    memory(group, page)
    page.heading("4.2  Under a window")
    under_a_window(group, page)
    page.heading("8  The notes' drawing (N2:315)")
    half_the_scores(group, page)


# --------------------------------------------------------------------------------------- 1 equality


def whole_attention(length: int) -> Any:
    """Return causal_attention of one head on one process: (length, 4)."""
    return ops.causal_attention(*(lab.numbers(name, length) for name in "qkv")).data[0, 0]


def same(group: Group, page: Page) -> None:
    """Compare the plain loop with causal_attention, and each strategy's weights with those of one
    process."""
    length = 12 * group.size + 1
    rows = []
    for name, own in (
        ("zigzag", zigzag(length, group.rank, group.size)),
        ("consecutive", lab.consecutive(length, group.rank, group.size)),
    ):
        q, k, v = (lab.numbers(part, length)[0, 0, own] for part in "qkv")
        off = np.abs(plain_ring_attention(q, k, v, own, group) - whole_attention(length)[own]).max()
        rows.append([f"plain loop, {name} tokens: attention", f"{largest(group, off):.0e}"])
    rows += [
        [
            "plain swap, consecutive tokens: attention of 8 heads",
            f"{largest(group, swap_off(group, length)):.0e}",
        ],
        [
            "plain MLP, tokens cut, beside lesson 12's: y and dx",
            f"{largest(group, mlp_off(group)):.0e}",
        ],
    ]
    config = lab.config_for(group.size, 12 * group.size + 1)
    target = lab.train(group, config, "one process", STEPS).state_dict()
    scale = max(np.abs(array).max() for array in target.values())
    for name in lab.NAMES:
        state = lab.train(group, config, name, STEPS).state_dict()
        off = max(np.abs(array - target[key]).max() for key, array in state.items()) / scale
        rows.append(
            [f"{lab.TITLES[name]}: weights after {STEPS} steps", f"{largest(group, off):.0e}"]
        )
    page.table(
        f"Off one process by, in float64: {group.size} ranks, {config.context} tokens, rotary "
        "positions",
        ["", "largest difference"],
        rows,
    )


def swap_off(group: Group, length: int) -> float:
    """Return the largest difference between the plain swap's attention and one process's, on this
    rank's tokens."""
    q, k, v = np.random.default_rng(0).normal(size=(3, length, 8, 4))
    whole = (
        ops.causal_attention(*(tensor(x.swapaxes(0, 1)[None]) for x in (q, k, v)))
        .data[0]
        .swapaxes(0, 1)
    )
    own = lab.consecutive(length, group.rank, group.size)
    return float(np.abs(plain_ulysses(q[own], k[own], v[own], group) - whole[own]).max())


def mlp_off(group: Group) -> float:
    """Return the largest difference between the MLP on own tokens and the MLP on whole tokens."""
    draw = np.random.default_rng(1)
    tokens = 2 * group.size
    x, dy = draw.normal(size=(2, tokens, 8))
    up = draw.normal(size=(8, 16))
    down = draw.normal(size=(16, 8))
    bias = draw.normal(size=8)
    hidden = np.array_split(np.arange(16), group.size)[group.rank]
    own = slice(2 * group.rank, 2 * group.rank + 2)
    y, dx, _, _ = plain_tensor_mlp(x, up[:, hidden], down[hidden], bias, dy, group)
    own_y, own_dx, *_ = plain_sequence_mlp(
        x[own], up[:, hidden], down[hidden], bias, dy[own], group
    )
    return float(max(np.abs(own_y - y[own]).max(), np.abs(own_dx - dx[own]).max()))


def largest(group: Group, value: float) -> float:
    """Return the largest of the ranks' values."""
    with group.ledger.control():
        return float(group.all_reduce(np.array([value]), op="max")[0])


# ----------------------------------------------------------------------------------------- 3 zigzag


def balance(group: Group, page: Page) -> None:
    """Show how many scores a rank computes, with consecutive tokens and with the zigzag."""
    size = group.size
    length = 12 * group.size
    rows = []
    for rank in range(size):
        mine = lab.consecutive(length, rank, size)
        edges = np.flatnonzero(np.diff(zigzag(length, rank, size)) > 1)
        first, last = zigzag(length, rank, size)[[0, -1]]
        tokens = zigzag(length, rank, size)
        halves = (
            f"{first}–{last}"
            if not len(edges)
            else f"{first}–{tokens[edges[0]]}, {tokens[edges[0] + 1]}–{last}"
        )
        rows.append(
            [
                f"rank {rank}",
                f"{mine[0]}–{mine[-1]}",
                int((mine + 1).sum()),
                halves,
                lab.scores_seen(length, rank, size),
            ]
        )
    page.table(
        f"{length} tokens",
        ["", "consecutive", "scores", "zigzag", "scores"],
        rows,
        note="scores that a softmax uses; the ranks of a ring wait for the slowest",
    )


# --------------------------------------------------------------------------------------- 3 the ring


def hops(group: Group, page: Page) -> None:
    """Show what each rank had at each hop, by the recorded messages."""
    length = 12 * group.size
    walked = lab.walk(group, length)
    if group.rank:
        return
    held: dict[tuple[int, int], tuple[int, list[str]]] = {
        (rank, hop): (source, []) for rank, hop, source, _, _ in walked["pairs"]
    }
    for rank, hop, _, queries, keys in walked["pairs"]:
        held[rank, hop][1].append(f"{queries}·{keys}")
    rows = [
        [
            f"rank {rank}",
            *(
                f"kv{held[rank, hop][0]}: {' '.join(held[rank, hop][1])}"
                for hop in range(group.size)
            ),
        ]
        for rank in range(group.size)
    ]
    page.table(
        "The piece that is there, and which blocks of queries · keys are multiplied meanwhile",
        ["", *(f"hop {hop}" for hop in range(group.size))],
        rows,
    )
    page.say(
        f"    {len(walked['messages'])} messages recorded, {group.size} ranks × {group.size - 1} "
        "sends, each of keys and values"
    )


# -------------------------------------------------------------------------------------- 4.1 traffic


def traffic(group: Group, page: Page) -> None:
    """Compare the bytes of a step over all ranks with the formulas."""
    config = lab.config_for(group.size, 12 * group.size)
    rows = []
    for name in lab.NAMES:
        strategy = lab.train(group, config, name, 1, phase=f"lesson 13, {name}")
        sent = lab.sent(group, f"lesson 13, {name}")
        with group.ledger.control():
            sent = int(group.all_reduce(np.array([sent]))[0])
        parameters = sum(array.size for array in strategy.state_dict().values())
        target = 8 * lab.formula(group, config, name, parameters)
        gradients = 8 * 2 * (group.size - 1) * parameters if name != "sequence" else 0
        numbers = [f"{nbytes:,}" for nbytes in (sent - gradients, gradients, sent, target)]
        rows.append([lab.TITLES[name], *numbers, "ok" if sent == target else "off"])
    page.table(
        f"Bytes a step over {group.size} ranks: B = {lab.SEQUENCES}, T = {config.context}, h = "
        f"{config.width}, {config.layers} blocks",
        ["", "activations", "gradients", "sent", "formula", ""],
        rows,
        note="gradients: as data parallel, because the weights of ring and all-to-all are whole "
        "on all ranks",
    )


# --------------------------------------------------------------------------------------- 4.1 memory


def memory(group: Group, page: Page) -> None:
    """Show the peaks of forward and backward, and a limit that one process exceeds."""
    short = lab.config_for(group.size, 32)
    long = lab.config_for(group.size, 32 * group.size)
    one = lab.peaks(group, short, "one process")
    rows = [
        [f"one process, {short.context} tokens", *shown(one)],
        [f"one process, {long.context} tokens", *shown(lab.peaks(group, long, "one process"))],
    ]
    rows += [
        [f"{lab.TITLES[name]}, {long.context} tokens", *shown(lab.peaks(group, long, name))]
        for name in lab.NAMES
    ]
    page.table(
        f"Peak bytes of rank 0, one sequence, {group.size} ranks",
        ["", "activations", "communication", "total"],
        rows,
        note="no strategy keeps probabilities (lesson 19); weights and gradients count in the "
        "total",
    )
    limit = one["total"] + 5 * 8 * 2 * short.context * short.width  # and five pieces on their way
    fits = lab.peaks(group, long, "ring", limit=limit)["total"]
    page.say(
        f"    Under a limit of {size_text(limit)} ring attention takes {long.context} tokens "
        f"({size_text(fits)});"
    )
    try:
        lab.peaks(group, long, "one process", limit=limit)
    except MemoryLimitError as error:
        page.say(f"    one process does not: {error}")


def shown(peak: dict[str, int]) -> list[str]:
    return [size_text(peak[name]) for name in ("activations", "communication", "total")]


# --------------------------------------------------------------------------------------- 4.2 window


def under_a_window(group: Group, page: Page) -> None:
    """Compare the plain loop with all scores; then the bytes of a step with the formulas, for a
    dense ring and for pieces under two patterns."""
    length = 12 * group.size + 1
    window = 7
    own = zigzag(length, group.rank, group.size)
    q, k, v = (lab.numbers(part, length)[0, 0] for part in "qkv")
    away = np.arange(length)[:, None] - np.arange(length)
    p = np.exp(np.where((away >= 0) & (away < window), q @ k.T / 2, -np.inf))
    y = plain_window_attention(q[own], k[own], v[own], own, length, window, group)
    off = np.abs(y - (p / p.sum(axis=1, keepdims=True) @ v)[own]).max()
    page.say(
        f"    The plain loop, a window of {window} of {length} tokens: off all scores under the "
        f"same mask by {largest(group, off):.0e}."
    )
    rows = []
    for context in (128 * group.size, 256 * group.size):
        config = replace(lab.config_for(group.size, context), width=16, heads=2)
        for pattern in (None, "local:128", "local:64+global:1"):
            rows.append(
                [
                    f"{context:,}",
                    pattern or "dense ring",
                    *sent_beside(group, replace(config, attention_pattern=pattern)),
                ]
            )
    page.table(
        f"Bytes a step over {group.size} ranks, without the weights' gradients: B = "
        f"{lab.SEQUENCES}, h = 16, 2 blocks",
        ["tokens", "", "sent", "formula", ""],
        rows,
    )


def sent_beside(group: Group, config: Any) -> list[str]:
    """Return the bytes of keys, values and their gradients that all ranks send in a step, and the
    formula's value."""
    name = "ring" if config.attention_pattern is None else "pieces"
    phase = f"lesson 13, {config}"
    lab.train(group, config, name, 1, phase=phase)
    verb = "exchange" if name == "ring" else "send"
    with group.ledger.control():
        sent = int(group.all_reduce(np.array([lab.sent(group, phase, verb)]))[0])
    target = 8 * lab.formula(group, config, name, 0)
    return [f"{sent:,}", f"{target:,}", "ok" if sent == target else "off"]


# ----------------------------------------------------------------------------- 8 the notes' drawing


def half_the_scores(group: Group, page: Page) -> None:
    """Compute only the scores that the notes draw, L/P × L/P per rank; show the weight softmax gave
    the missing ones."""
    length = 48
    rows = []
    q, k = (lab.numbers(part, length)[0, 0] for part in "qk")
    p = np.exp(np.where(np.tri(length, dtype=bool), q @ k.T / 2, -np.inf))
    p /= p.sum(axis=1, keepdims=True)
    for ranks in (2, 4):
        part = np.concatenate(
            [np.full(len(lab.consecutive(length, rank, ranks)), rank) for rank in range(ranks)]
        )
        drawn = part[:, None] == part
        rows.append(
            [
                f"{ranks} ranks, each L/{ranks} × L/{ranks}",
                int(drawn.sum()),
                length**2,
                f"{1 - drawn.mean():.0%}",
                f"{1 - p[drawn].sum() / length:.0%}",
            ]
        )
    page.table(
        f"L = {length} tokens",
        ["", "scores as drawn", "L × L", "lost", "attention lost, causal"],
        rows,
        note="attention lost: the probability that the missing scores had, a mean over the queries",
    )


# ----------------------------------------------------------------------------------------- Break it


def off_by(what: str, change: Any) -> None:
    """Print the difference of weights from one process's after some steps, with `change` made to
    the ring on each rank."""
    config = lab.config_for(2, 24)

    def job(group: Group) -> float:
        target = lab.train(group, config, "one process", STEPS).state_dict()
        strategy = lab.strategy_for(group, config, "ring", change)
        optimizer = lab.AdamW(strategy.parameters, 1e-2)
        for step in range(STEPS):
            strategy.step(lab.global_batch(config, step), optimizer, clip=0.5)
        scale = max(np.abs(array).max() for array in target.values())
        return float(
            max(np.abs(array - target[key]).max() for key, array in strategy.state_dict().items())
            / scale
        )

    print(
        f"{what}: off one process by {max(md.run(job, size=2)):.0e} of the largest weight after "
        f"{STEPS} steps"
    )


def no_offset() -> None:
    """Use on every rank the positions of the first tokens."""

    def forget(model: Any, group: Group) -> None:
        for block in model.blocks:
            block.attention.own = lambda length: slice(
                0, len(zigzag(length, group.rank, group.size))
            )

    off_by("with the positions of the own tokens", lambda model, group: None)
    off_by("without: each rank counts from 0    ", forget)


class OwnPieceAlone(ring_attention.RingSelfAttention):
    """Attention as N2:315 says literally: own queries see only own keys, and no rank sends."""

    def attend(self, q: Any, k: Any, v: Any, positions: Any) -> Any:
        own = token_shard.pick(positions, self.own, 0)
        return ops.causal_attention(ops.rotary(q, own), ops.rotary(k, own), v)


def own_scores() -> None:
    """Compute on each rank only its own L/2 × L/2 scores."""

    def alone(model: Any, group: Group) -> None:
        for block in model.blocks:
            block.attention = OwnPieceAlone(block.attention, group)
        model.assign_names()

    off_by("L/2 × L scores a rank  ", lambda model, group: None)
    off_by("L/2 × L/2 scores a rank", alone)


def no_shrink() -> None:
    """Run online softmax without scaling its sums when a larger maximum arrives."""

    def job(group: Group, scales: bool) -> float:
        length = 24
        own = zigzag(length, group.rank, group.size)
        q, k, v = (lab.numbers(part, length)[0, 0, own] for part in "qkv")
        top = np.full((len(own), 1), -np.inf)
        total = 0.0
        y = 0.0
        for source, piece in ring_attention.around(group, np.stack([k, v])[:, None, None], length):
            keys, values = piece[:, 0, 0]
            scores = q @ keys.T / 2
            scores[own[:, None] < zigzag(length, source, group.size)] = -np.inf
            now = np.maximum(top, scores.max(axis=1, keepdims=True))
            p = np.exp(scores - now)
            shrink = np.exp(top - now) if scales else 1.0
            total = total * shrink + p.sum(axis=1, keepdims=True)
            y = y * shrink + p @ values
            top = now
        return float(np.abs(y / total - whole_attention(length)[own]).max())

    for what, scales in (("scaled", True), ("left as they were", False)):
        print(
            f"sums {what} when the maximum rose: attention off by "
            f"{max(md.run(job, scales, size=2)):.0e}"
        )


BREAKS = {
    "no-offset": Break(no_offset, says="each rank counts from 0    : off one process by 4e-02"),
    "own-scores": Break(own_scores, says="L/2 × L/2 scores a rank: off one process by 4e-02"),
    "no-shrink": Break(no_shrink, says="attention off by 6e-02"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS)
