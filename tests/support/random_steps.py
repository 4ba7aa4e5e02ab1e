"""Random recorded steps: ranks that work, ask for collectives of several groups, and wait."""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from minidist.observe.timeline import Span, Timeline

LINE = "train.py:40"
WORK = ("forward", "backward", "optimizer")
GROUPS = {2: [(0, 1)], 3: [(0, 1, 2), (0, 2)], 4: [(0, 1, 2, 3), (0, 1), (2, 3), (1, 3)]}


@dataclass
class _Rank:
    """One rank while its step is made; times are whole milliseconds."""

    timeline: Timeline
    begin: int
    now: int
    wait: tuple[int, int] = (0, 0)  # its last wait
    ended: dict[str, int] = field(default_factory=dict)  # group -> end of its part of the last call
    asked: dict[str, int] = field(default_factory=dict)  # group -> when it asked for the last call
    open: list[tuple[str, int, int]] = field(
        default_factory=list
    )  # (group, number, end) not waited for

    def add(self, name: str, row: str, start: int, stop: int, **details: Any) -> None:
        self.timeline.add(Span(name, row, start / 1e3, stop / 1e3, {"step": 0, **details}))

    def work(self, name: str, duration: int) -> None:
        self.add(name, "compute", self.now, self.now + duration)
        self.now += duration

    def wait_for(self, group: str, number: int, end: int, late: int) -> None:
        stop = max(self.now, end + late)
        self.add(
            "wait", "waits", self.now, stop, axis="dp", group=group, sequence=number, where=LINE
        )
        self.wait = self.now, stop
        self.now = stop


@st.composite
def random_steps(draw: Any, calls: int = 8) -> list[Timeline]:
    """Draw a step of 2 to 4 ranks.

    A call does not end on all ranks at one moment; a rank's part of it may end before another rank
    has come. Ranks continue late after a wait, another thread of a rank asks for calls in its
    waits, and some calls begin before the step.
    """
    size = draw(st.sampled_from(sorted(GROUPS)))
    ranks = [
        _Rank(Timeline(number), begin, begin - draw(st.integers(0, 6)))
        for number, begin in enumerate(
            draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
        )
    ]
    numbers = dict[str, int]()
    free = dict[str, int]()
    for _ in range(draw(st.integers(1, calls))):
        members = draw(st.sampled_from(GROUPS[size]))
        group = "-".join(map(str, members))
        number = numbers[group] = numbers.get(group, -1) + 1
        blocking = draw(st.booleans())
        asked = [_comes(draw, ranks[member], group, blocking) for member in members]
        begin = max(*asked, free.get(group, 0))
        end = free[group] = begin + draw(st.integers(0, 12))
        waits_for_all = draw(st.booleans())
        for member, came in zip(members, asked, strict=True):
            rank = ranks[member]
            least = max(begin if waits_for_all else came, rank.ended.get(group, came))
            last = member == members[-1]  # one rank's part ends with the call
            stop = rank.ended[group] = end if last else draw(st.integers(least, end))
            rank.add(
                f"call {number}",
                "communication",
                min(stop, max(came, begin)),
                stop,
                axis="dp",
                verb="all_reduce",
                algorithm="ring",
                where=LINE,
                nbytes=1000 * number,
                messages=2,
                group=group,
                sequence=number,
                queued=(min(stop, max(came, begin)) - came) / 1e3,
                blocking=blocking,
            )
            if blocking:
                rank.wait = came, stop
                rank.now = stop
            else:
                rank.open.append((group, number, stop))
    for rank in ranks:
        while rank.open and draw(st.booleans()):
            rank.wait_for(*rank.open.pop(), draw(st.integers(0, 3)))
        rank.work("optimizer", draw(st.integers(0, 5)))
        rank.add("step", "compute", rank.begin, max(rank.now, rank.begin + 1))
    return [rank.timeline for rank in ranks]


def _comes(draw: Any, rank: _Rank, group: str, blocking: bool) -> int:
    """Let a rank work and wait up to its next call. Returns when it asks for it."""
    for _ in range(draw(st.integers(0, 2))):
        if rank.open and draw(st.booleans()):
            late = draw(st.sampled_from([0, 0, 2]))
            rank.wait_for(*rank.open.pop(draw(st.integers(0, len(rank.open) - 1))), late)
        else:
            rank.work(draw(st.sampled_from(WORK)), draw(st.integers(0, 9)))
    came = rank.now
    if not blocking and draw(st.booleans()):  # another thread asks, in the last wait
        came = max(rank.asked.get(group, rank.wait[0]), draw(st.integers(*rank.wait)))
    rank.asked[group] = came
    return came
