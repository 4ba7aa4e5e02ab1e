"""Lesson 12: a block's matrices cut between tensor-parallel ranks, as the layers that train cut
them.

python -m minidist.site.live.cuts 4 6 2     # 4 ranks, 6 heads, 2 key heads: measured in real steps
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import groupby
from typing import Any

import numpy as np

from minidist import lessons
from minidist.console import size_text
from minidist.errors import PlanError
from minidist.grading import load_module
from minidist.launch import run
from minidist.nn import GPTConfig
from minidist.nn.shares import head_shares
from minidist.nn.weight_shard import WeightShard
from minidist.optim import SGD
from minidist.parallel.tensor.tensor_layers import shared_numbers
from minidist.parallel.tensor.tensor_parallel import activations_sent
from minidist.site.live import Control, Live, Picture, Prediction, Say

lab = load_module(lessons.FOLDER / "12_tensor_parallel" / "experiments.py", "12")
RANKS = range(1, 9)
HEADS = (4, 6, 8)
SCALE = 1.3  # of a number, on the picture
PLACES = {  # matrix -> (left, top)
    "attention.qkv.weight": (74, 56),
    "attention.out.weight": (314, 56),
    "mlp.up.weight": (74, 166),
    "mlp.down.weight": (482, 56),
}
FOLLOWING = {  # the matrices that are cut by columns -> those after them, cut by rows
    "attention.qkv.weight": "attention.out.weight",
    "mlp.up.weight": "mlp.down.weight",
}
TABLE = (14, 250)


@dataclass(frozen=True)
class CutBlock:
    """A block cut between ranks. Attributes: whole: shape of each matrix; parts: what each rank has
    of its cut dim; weights: the count of each rank's numbers."""

    whole: dict[str, tuple[int, ...]]
    parts: dict[str, list[np.ndarray]]
    weights: list[int]


def config_of(heads: int, key_heads: int, layers: int = 1) -> GPTConfig:
    """Return the lesson's model with these heads."""
    config: GPTConfig = replace(lab.CONFIG, heads=heads, kv_heads=key_heads, layers=layers)
    return config


def key_heads_of(heads: int) -> tuple[int, int, int]:
    """Return the choices of the third control: a key head per head, half as many, one."""
    return heads, heads // 2, 1


@cache
def cut_block(ranks: int, heads: int, key_heads: int) -> CutBlock:
    """Return a block as the ranks cut it. Raises: PlanError if a rank would have no head."""
    return run(partial(_cut_job, config=config_of(heads, key_heads)), size=ranks)[0]


def _cut_job(group: Any, config: GPTConfig) -> CutBlock:
    block = lab.tensor_parallel(lab.GPT(config), group).blocks[0]
    whole: dict[str, tuple[int, ...]] = {}
    parts: dict[str, list[np.ndarray]] = {}
    for name, weight in block.named_parameters():
        name = weight.whole_name(name) if isinstance(weight, WeightShard) else name
        if name not in PLACES:
            continue
        whole[name] = weight.whole
        dim = len(weight.parts[0]) - 1
        own = [np.arange(weight.whole[dim])[part[dim]] for part in weight.parts]
        before = parts.get(name, [np.empty(0, np.int64)] * len(own))
        parts[name] = [np.union1d(*both) for both in zip(before, own, strict=True)]
    held = np.array(sum(weight.size for weight in block.parameters()))
    return CutBlock(whole, parts, [int(count) for count in group.all_gather(held.reshape(1))])


def bytes_of_layer(ranks: int, heads: int, key_heads: int) -> tuple[int, int]:
    """Return what all ranks send for one more block in a step: bytes of activations, and of the
    gradients of shared key heads."""
    one = config_of(heads, key_heads)
    two = replace(one, layers=2)
    tokens = lab.BATCH * one.context
    less, more = (activations_sent(config, ranks=ranks, tokens=tokens) for config in (one, two))
    return lab.ITEM * (more - less), lab.ITEM * shared_numbers(one, ranks)


def measured(ranks: int, heads: int, key_heads: int) -> tuple[list[int], int]:
    """Return the count of each rank's numbers in a block, and the bytes that all ranks send for it
    in a step: differences between steps of a model with two blocks and of one with one block."""
    one, two = (
        run(partial(_step_job, config=config_of(heads, key_heads, layers)), size=ranks)
        for layers in (1, 2)
    )
    held = [after[0] - before[0] for before, after in zip(one, two, strict=True)]
    sent = sum(after[1] - before[1] for before, after in zip(one, two, strict=True))
    return held, sent


def _step_job(group: Any, config: GPTConfig) -> tuple[int, int]:
    strategy = lab.cut_strategy(group, config)
    strategy.step(lab.batch_of(config, 0), SGD(strategy.parameters, 0.1))
    sent = sum(group.ledger.sent_bytes().get("tp", {}).values())
    return sum(weight.size for weight in strategy.model.parameters()), sent


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="cuts",
        lesson="12",
        section="2",
        title=say("A block's matrices, cut between ranks", "一层的各个矩阵，怎样切给各个 rank"),
        predict=Prediction(
            say(
                "8 heads of 6 numbers share one key head: qkv has 48 columns of queries, 6 of keys "
                "and 6 of values, 60 in all. Four ranks divide the block. How many columns of qkv "
                "does each rank hold?",
                "8 个头，每个头 6 个数，共用一个键头：qkv 有 48 列查询、6 列键、6 列值，一共 60 "
                "列。这一层切给 4 个 rank。每个 rank 存 qkv 的几列？",
            ),
            ("15", "24", "60"),
            1,
            say(
                "24: the 12 columns of its two query heads, and the one key head whole, 6 columns "
                "of keys and 6 of values. A head is never cut, so all four ranks hold the same key "
                "head.",
                "24 列：自己两个查询头的 12 列，再加上整个键头，键、值各 6 列。头从不切开，所以 4 "
                "个 rank 存的是同一个键头。",
            ),
        ),
        controls=(
            Control(say("ranks (tp)", "rank 数 (tp)"), tuple(map(str, RANKS))),
            Control(say("heads", "头数"), tuple(map(str, HEADS))),
            Control(
                say("key heads", "键头数"),
                (
                    say("as many", "与头数相同"),
                    say("half as many", "头数的一半"),
                    say("one", "一个"),
                ),
            ),
        ),
        size=(620, 336),
        picture=partial(_picture, say),
        start=(3, 1, 0),
    )


def _picture(say: Say, ranks_at: int, heads_at: int, keys_at: int) -> Picture:
    ranks = RANKS[ranks_at]
    heads = HEADS[heads_at]
    key_heads = key_heads_of(heads)[keys_at]
    picture = Picture(f"python -m minidist.site.live.cuts {ranks} {heads} {key_heads}")
    _draw_flow(say, picture, cut_block(1, heads, key_heads).whole)
    try:
        cut = cut_block(ranks, heads, key_heads)
    except PlanError as refused:
        _draw_whole(picture, cut_block(1, heads, key_heads).whole)
        message = str(refused).split(": ", 1)[1]  # without the first rank that met it
        picture.facts.append(
            say(
                f"Refused: {message}.",
                f"拒绝：{heads} 个头分给 {ranks} 个 rank，会有 rank 没有头；tp 最多取 {heads}。",
            )
        )
        return picture
    for name in PLACES:
        _draw_matrix(picture, cut, name, config_of(heads, key_heads))
    _draw_table(say, picture, cut, head_shares(heads, key_heads, ranks))
    picture.facts += _facts(say, cut, ranks, heads, key_heads)
    return picture


def _draw_flow(say: Say, picture: Picture, whole: dict[str, tuple[int, ...]]) -> None:
    """Draw the way of x through both regions: column-cut, row-cut, with f and g at the edges."""
    for name, (left, top) in PLACES.items():
        rows, columns = whole[name]
        right = left + SCALE * columns
        picture.text(left, top - 22, f"{name.split('.')[1]}: {rows} × {columns}", "bold")
        if name in FOLLOWING:
            picture.text(14, top + 26, "x → f", "bold")
            picture.text(14, top + 42, say("back: Σ", "反向：Σ"), "soft small")
            after = PLACES[FOLLOWING[name]][0]
            picture.line([(right + 4, top + 30), (after - 4, top + 30)], "dashed")
        else:
            picture.text(right + 8, top + 26, "→ g", "bold")
            picture.text(right + 8, top + 42, say("forward: Σ", "前向：Σ"), "soft small")


def _draw_whole(picture: Picture, whole: dict[str, tuple[int, ...]]) -> None:
    """Draw matrices that no rank has."""
    for name, (left, top) in PLACES.items():
        rows, columns = whole[name]
        picture.box(left, top, SCALE * columns, SCALE * rows, "free")


def _draw_matrix(picture: Picture, cut: CutBlock, name: str, config: GPTConfig) -> None:
    """Draw who holds which columns or rows of a matrix; what several ranks hold has a frame."""
    left, top = PLACES[name]
    rows, columns = (SCALE * count for count in cut.whole[name])
    by_columns = name in FOLLOWING
    bounds = _bounds(config) if "qkv" in name else {}
    for bound, text in bounds.items():
        picture.text(left + SCALE * bound, top - 6, text, "soft small")
    for first, stop, holders in stripes(cut.parts[name], [*bounds]):
        begin = SCALE * first
        length = SCALE * (stop - first)
        for place, rank in enumerate(holders):
            if by_columns:
                each = rows / len(holders)
                picture.box(left + begin, top + place * each, length, each, f"c{rank}")
            else:
                picture.box(left, top + begin, columns, length, f"c{rank}")
        if len(holders) > 1:
            picture.box(left + begin, top, length, rows, "edge")


def _bounds(config: GPTConfig) -> dict[int, str]:
    """Return {first column: title} of the three parts of qkv."""
    keys = config.heads * config.head_width
    values = keys + config.key_heads * config.head_width
    return {0: "Q", keys: "K", values: "V"}


def stripes(
    parts: list[np.ndarray], bounds: list[int]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (first, stop, ranks that hold it) of the longest runs of columns or rows that the same
    ranks hold; a run ends at each of `bounds`."""
    length = 1 + max(int(own.max()) for own in parts)
    holders = [tuple(rank for rank, own in enumerate(parts) if at in own) for at in range(length)]
    part_of = [sum(at >= bound for bound in bounds) for at in range(length)]
    for (_, ranks), run_of in groupby(range(length), lambda at: (part_of[at], holders[at])):
        places = [*run_of]
        yield places[0], places[-1] + 1, ranks


def _draw_table(
    say: Say, picture: Picture, cut: CutBlock, shares: list[tuple[range, range]]
) -> None:
    """Write a line for each rank: its heads, its key heads, its numbers of the block."""
    for rank, (queries, keys) in enumerate(shares):
        x = TABLE[0] + 222 * (rank // 4)
        y = TABLE[1] + 21 * (rank % 4)
        picture.box(x, y, 24, 16, f"c{rank}", f"r{rank}")
        told = say(
            f"heads {_span(queries)}, keys {_span(keys)}: {cut.weights[rank]:,} weights",
            f"头 {_span(queries)}，键头 {_span(keys)}：{cut.weights[rank]:,} 个权重",
        )
        picture.text(x + 30, y + 13, told, "small")


def _span(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _facts(say: Say, cut: CutBlock, ranks: int, heads: int, key_heads: int) -> list[str]:
    """Return what the ranks hold and what they add up."""
    [whole] = cut_block(1, heads, key_heads).weights
    most = max(cut.weights)
    activations, keys = bytes_of_layer(ranks, heads, key_heads)
    rows = lab.BATCH * lab.CONFIG.context
    facts = [
        say(
            f"Weights of the block: {whole:,}. A rank holds at most {most:,}, "
            f"{most / whole:.0%}; norms and the biases of out and down are whole on each rank.",
            f"这一层有 {whole:,} 个权重。一个 rank 最多存 {most:,} 个，{most / whole:.0%}；归一化层、"
            f"out 和 down 的偏置在每个 rank 上都是完整的。",
        ),
        say(
            f"Σ: four all-reduces of {rows} × {lab.CONFIG.width} numbers a step, two forward (g) "
            f"and two backward (f): {size_text(activations)} over all ranks.",
            f"Σ：一步四次全归约，每次 {rows} × {lab.CONFIG.width} 个数，前向两次 (g)，反向两次 "
            f"(f)：所有 rank 合计 {size_text(activations)}。",
        ),
    ]
    if keys:
        facts.append(
            say(
                f"Framed, in the colours of all its holders: a key head that several ranks hold "
                f"whole. They add up its gradient once a step: {size_text(keys)}.",
                f"加框，并有几种颜色：几个 rank 都存着完整的同一个键头，每步把它的梯度相加一次：{size_text(keys)}。",
            )
        )
    return facts


if __name__ == "__main__":
    try:
        numbers, nbytes = measured(*map(int, sys.argv[1:]))
    except PlanError as refused:
        sys.exit(str(refused))
    print("weights of a block on each rank:", *numbers)
    print(f"sent for a block in a step, all ranks: {nbytes:,} bytes = {size_text(nbytes)}")
