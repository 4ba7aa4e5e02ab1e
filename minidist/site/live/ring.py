"""Lesson 03: a ring all-reduce step by step, as the plain module runs it; a message may get lost."""

from functools import cache, partial
from typing import Any

import numpy as np

from minidist.comm.collectives.ring import plain_all_gather, plain_reduce_scatter
from minidist.launch import run
from minidist.site.live import Control, Live, Picture, Prediction, Say

RANKS = range(2, 9)
LOST = range(4)  # 0: none; else the step of the reduce-scatter whose message to rank 0 gets lost
CELL = (58, 34)
LEFT, TOP = 78, 46


class NotedExchanges:
    """A group that notes the chunks of its rank after every exchange.

    In step `lost` what arrives at rank 0 is empty.
    """

    def __init__(self, group: Any, chunks: list[np.ndarray], lost: int) -> None:
        self.rank = group.rank
        self.size = group.size
        self.held = [_values(chunks)]
        self.sent = list[int]()
        self._group = group
        self._chunks = chunks
        self._lost = lost

    def exchange(self, x: np.ndarray, dst: int, src: int) -> np.ndarray:
        """Exchange chunks with the neighbours; note what is held before."""
        if self.sent:
            self.held.append(_values(self._chunks))
        self.sent.append(next(i for i, chunk in enumerate(self._chunks) if chunk is x))
        arrived = self._group.exchange(x, dst=dst, src=src)
        is_lost = self.rank == 0 and len(self.sent) == self._lost
        return np.zeros_like(arrived) if is_lost else arrived


def _values(chunks: list[np.ndarray]) -> list[int]:
    return [int(chunk[0]) for chunk in chunks]


def _job(group: Any, lost: int) -> tuple[list[list[int]], list[int]]:
    """Return what a rank holds before each step and at the end, and which chunk it sends in each."""
    chunks = [np.array([group.rank + 1.0]) for _ in range(group.size)]
    noted = NotedExchanges(group, chunks, lost)
    for half in (plain_reduce_scatter, plain_all_gather):
        half(noted, chunks)  # type: ignore[arg-type]  # all that the plain version calls
    return [*noted.held, _values(chunks)], noted.sent


@cache
def recorded(size: int, lost: int) -> list[tuple[list[list[int]], list[int]]]:
    """Return, of each rank of a ring, what it held and sent; `lost` is a step, or 0."""
    return run(partial(_job, lost=lost), size=size)


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    steps = 2 * (RANKS[-1] - 1)
    return Live(
        name="ring",
        lesson="03",
        section="3",
        title=say("A ring all-reduce, step by step", "环形全归约，一步一步看"),
        predict=Prediction(
            say(
                "Four ranks. Rank r begins with r + 1 in each of its four chunks. After the three "
                "steps of the reduce-scatter, how many chunks of rank 0 hold the whole sum, 10?",
                "四个 rank。开始时 rank r 的四块数据都是 r + 1。归约散射走完 3 步后，rank 0 有几块是"
                "完整的和 10？",
            ),
            ("1", "3", "4"),
            0,
            say(
                "One: its own. The other chunks of rank 0 hold sums of some ranks; the all-gather "
                "brings the whole ones.",
                "1 块，就是它自己负责的那块。其他块只是部分 rank 的和，完整的和由全聚集带来。",
            ),
        ),
        controls=(
            Control(say("ranks", "rank 数"), tuple(map(str, RANKS))),
            Control(say("step", "步"), tuple(map(str, range(steps + 1)))),
            Control(
                say("a message to rank 0 gets lost", "发给 rank 0 的消息丢失"),
                (say("none", "没有"), *(say(f"in step {n}", f"第 {n} 步") for n in LOST[1:])),
            ),
        ),
        size=(LEFT + 8 * CELL[0] + 12, TOP + 8 * CELL[1] + 12),
        picture=partial(_picture, say),
        start=(2, 0, 0),
    )


def _picture(say: Say, size_at: int, step: int, lost: int) -> Picture:
    size = RANKS[size_at]
    steps = 2 * (size - 1)
    step = min(step, steps)
    lost = min(lost, size - 1)
    ranks = recorded(size, lost)
    total = size * (size + 1) // 2
    picture = Picture(f"minidist lesson 03 -n {size}")
    for chunk in range(size):
        picture.text(LEFT + (chunk + 0.5) * CELL[0], TOP - 10, f"c{chunk}", "middle soft")
    for rank, (held, sent) in enumerate(ranks):
        y = TOP + rank * CELL[1]
        picture.text(LEFT - 10, y + 22, f"rank {rank}", "end")
        for chunk, value in enumerate(held[step]):
            is_wrong = value != total and step == steps
            color = "right" if value == total else "wrong" if is_wrong else "c0"
            x = LEFT + chunk * CELL[0]
            picture.box(x + 2, y + 2, CELL[0] - 4, CELL[1] - 4, color, str(value))
            if step < steps and chunk == sent[step]:
                picture.box(x + 1, y + 1, CELL[0] - 2, CELL[1] - 2, "edge")
    half = say("reduce-scatter", "归约散射") if step < size - 1 else say("all-gather", "全聚集")
    if step < steps:
        picture.facts.append(
            say(
                f"Step {step + 1} of {steps} ({half}): each rank sends its framed chunk to the next "
                "rank.",
                f"第 {step + 1} 步，共 {steps} 步（{half}）：每个 rank 把带框的块发给下一个 rank。",
            )
        )
    else:
        wrong = sum(value != total for held, _ in ranks for value in held[-1])
        picture.facts.append(
            say(
                f"Done: each rank has sent {steps} chunks, {steps}/{size} of its array.",
                f"结束：每个 rank 发了 {steps} 块，即数组的 {steps}/{size}。",
            )
        )
        if wrong:
            picture.facts.append(
                say(
                    f"{wrong} of {size * size} chunks are wrong: what one rank loses, all ranks get.",
                    f"{size * size} 块中有 {wrong} 块是错的：一个 rank 丢的，所有 rank 都缺。",
                )
            )
    return picture
