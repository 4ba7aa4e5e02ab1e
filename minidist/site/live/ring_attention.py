"""Lesson 13: causal ring attention: which rank multiplies which blocks at which hop."""

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.chunks import bounds
from minidist.launch import run
from minidist.parallel.context.ring_attention import plain_ring_attention, zigzag
from minidist.site.live import Control, Live, Picture, Prediction, Say

RANKS = range(2, 9)
HOPS = RANKS[-1]
TOKENS = 12  # of each rank, as in the lesson
GRID = 300  # the square of all scores
LEFT, TOP = 58, 40
BARS = LEFT + GRID + 66
BAR = (110, 24)  # the longest bar, and the distance of two


class NotedRing:
    """A group that notes the positions of the keys that arrive at its rank."""

    def __init__(self, group: Any, positions: np.ndarray) -> None:
        self.rank = group.rank
        self.size = group.size
        self.positions = positions
        self.seen = [positions]
        self._group = group

    def exchange(self, x: np.ndarray, dst: int, src: int) -> np.ndarray:
        """Exchange keys, values or positions with the neighbours."""
        arrived: np.ndarray = self._group.exchange(x, dst=dst, src=src)
        if x.dtype == self.positions.dtype:
            self.seen.append(arrived.copy())
        return arrived


def _job(group: Any, is_zigzag: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the positions of a rank's queries, and those of the keys that it has at each hop."""
    length = TOKENS * group.size
    consecutive = np.arange(*bounds(length, group.size)[group.rank : group.rank + 2])
    own = zigzag(length, group.rank, group.size) if is_zigzag else consecutive
    noted = NotedRing(group, own)
    zeros = np.zeros((len(own), 1))
    plain_ring_attention(zeros, zeros, zeros, own, noted)  # type: ignore[arg-type]
    return own, noted.seen


class AttentionWalk(NamedTuple):
    """A ring's hops. Attributes: scores: (ranks, hops); hop, rank: of each pair of blocks
    (queries, keys): when and by whom it is multiplied; -1 where it lies ahead."""

    scores: np.ndarray
    hop: np.ndarray
    rank: np.ndarray


@cache
def walked(size: int, is_zigzag: bool) -> AttentionWalk:
    """Return what the plain ring multiplies, under its mask."""
    ranks = run(partial(_job, is_zigzag=is_zigzag), size=size)
    side = TOKENS // 2  # two blocks a rank, whichever the layout
    scores = np.zeros((size, size), int)
    hop_of = np.full((2 * size, 2 * size), -1)
    rank_of = hop_of.copy()
    for rank, (own, seen) in enumerate(ranks):
        for hop, keys in enumerate(seen):
            queries_at, keys_at = np.nonzero(own[:, None] >= keys)
            scores[rank, hop] = len(queries_at)
            blocks = own[queries_at] // side, keys[keys_at] // side
            hop_of[blocks] = hop
            rank_of[blocks] = rank
    return AttentionWalk(scores, hop_of, rank_of)


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="ring_attention",
        lesson="13",
        section="3",
        title=say("Causal ring attention, hop by hop", "因果环形注意力，一跳一跳看"),
        predict=Prediction(
            say(
                "Four ranks, and consecutive parts: rank 0 has the first quarter of the tokens, "
                "rank 3 the last. At how many of the four hops does rank 0 have anything to compute?",
                "四个 rank，连续切分：rank 0 拿前四分之一的词元，rank 3 拿最后四分之一。共四跳，"
                "rank 0 有几跳需要计算？",
            ),
            ("1", "2", "4"),
            0,
            say(
                "At one, hop 0, with its own keys. All other keys lie ahead of its queries. It waits "
                "while rank 3 computes at every hop. With a zigzag every rank has a late block, and "
                "something to do at each hop.",
                "1 跳，就是跳 0，用自己的键。其他键都在它的查询之后。rank 3 每一跳都要计算，rank 0 只能"
                "等待。之字形切分时，每个 rank 都有一块靠后的词元，每一跳都有事做。",
            ),
        ),
        controls=(
            Control(say("ranks", "rank 数"), tuple(map(str, RANKS))),
            Control(
                say("tokens are cut", "切分方式"),
                (say("consecutively", "连续"), say("in a zigzag", "之字形")),
            ),
            Control(say("hop", "跳"), tuple(map(str, range(HOPS)))),
        ),
        size=(BARS + BAR[0] + 48, TOP + GRID + 12),
        picture=partial(_picture, say),
        start=(2, 0, 0),
    )


def _picture(say: Say, size_at: int, is_zigzag: int, hop: int) -> Picture:
    size = RANKS[size_at]
    hop = min(hop, size - 1)
    found = walked(size, bool(is_zigzag))
    picture = Picture(f"minidist lesson 13 -n {size}")
    _draw_blocks(picture, say, found, hop)
    _draw_bars(picture, say, found.scores, hop)
    now = found.scores[:, hop]
    source = (0 - hop) % size
    last = found.scores.max(axis=0).sum()
    even = found.scores.sum() / size
    picture.facts = [
        say(
            f"Hop {hop}: rank 0 has the keys of rank {source}. The busiest rank computes "
            f"{now.max()} scores, the least busy {now.min()}.",
            f"跳 {hop}：rank 0 手里是 rank {source} 的键。最忙的 rank 计算 {now.max()} 个分数，最闲的"
            f"计算 {now.min()} 个。",
        ),
        say(
            f"Each hop lasts as long as its busiest rank: {last} scores in all {size} hops. Equal "
            f"work would be {even:g}.",
            f"每跳都要等最忙的 rank：{size} 跳合计 {last} 个分数。平均分配则是 {even:g} 个。",
        ),
    ]
    return picture


def _draw_blocks(picture: Picture, say: Say, found: AttentionWalk, hop: int) -> None:
    """Draw the pairs of blocks: those done in the color of their rank, with their hop."""
    blocks = len(found.hop)
    cell = GRID / blocks
    picture.text(LEFT, TOP - 24, say("keys, from first to last →", "键，从前到后 →"), "soft")
    picture.text(4, TOP - 8, say("queries ↓", "查询 ↓"), "soft")
    for row in range(blocks):
        y = TOP + row * cell
        picture.text(LEFT - 8, y + cell / 2 + 5, f"r{found.rank[row, row]}", "end")
        for column in range(row + 1):
            done = found.hop[row, column]
            x = LEFT + column * cell
            color = f"c{found.rank[row, column]}" if done <= hop else "free"
            picture.box(x + 1, y + 1, cell - 2, cell - 2, color, str(done))
            if done == hop:
                picture.box(x + 1, y + 1, cell - 2, cell - 2, "edge")


def _draw_bars(picture: Picture, say: Say, scores: np.ndarray, hop: int) -> None:
    """Draw the scores of each rank up to a hop; those of the hop are framed."""
    told = say("number in a cell: its hop", "格中的数：第几跳计算")
    picture.text(BARS - 52, TOP + RANKS[-1] * BAR[1] + 24, told, "soft")
    widest = scores.sum(axis=1).max()
    picture.text(BARS - 52, TOP - 8, say("scores so far", "已计算的分数"), "soft")
    for rank, row in enumerate(scores):
        y = TOP + rank * BAR[1]
        before = row[:hop].sum() / widest * BAR[0]
        width = row[: hop + 1].sum() / widest * BAR[0]
        picture.text(BARS - 8, y + 15, f"rank {rank}", "end")
        picture.box(BARS, y + 2, width, BAR[1] - 6, f"c{rank}")
        if row[hop]:
            picture.box(BARS + before, y + 2, width - before, BAR[1] - 6, "edge")
        picture.text(BARS + width + 6, y + 15, str(row[: hop + 1].sum()))
