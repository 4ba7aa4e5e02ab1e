"""Lesson 11: a pipeline schedule in which two neighbouring calls of a rank change places, and what
the checker says."""

import textwrap
from dataclasses import replace
from functools import cache, partial

from minidist.errors import ScheduleError
from minidist.parallel.pipeline.instructions import (
    Backward,
    Forward,
    RecvActivation,
    RecvGradient,
    Schedule,
    SendActivation,
    SendGradient,
)
from minidist.parallel.pipeline.schedule_checker import Clock, Times, check, clock_of
from minidist.parallel.pipeline.schedules import make_schedule
from minidist.site.live import Control, Live, Picture, Prediction, Say

RANKS = MICROBATCHES = 3
NAMES = {"naive": "naive", "gpipe": "GPipe", "1f1b": "1F1B"}
CALLS = (12, 18, 12)  # of a rank, in each of these schedules
MESSAGES = (0.0, 0.5)  # forwards
SWAPS = tuple((rank, at) for rank in range(RANKS) for at in range(CALLS[rank] - 1))
"""(rank, the place of the first of the two calls), in the order of the slider after "none"."""

LOOKS = {
    Forward: ("c0", "F{}"),
    Backward: ("c1", "B{}"),
    SendActivation: ("c2", "a{}↓"),
    RecvActivation: ("c7", "↓a{}"),
    SendGradient: ("c4", "g{}↑"),
    RecvGradient: ("c6", "↑g{}"),
}
LEFT = 56
TOP = 12
ROW = 34
CALL = 31  # the width of a call
LINES = TOP + RANKS * ROW + 18  # where the legend stands
CHART = LINES + 22  # and the chart in time
UNIT, BAR = 16, 28  # a forward, and a rank's row
LETTERS = 84  # of a line of the checker's words


@cache
def schedule_of(name: str) -> Schedule:
    """Return the schedule before the swap."""
    return make_schedule(name, RANKS, MICROBATCHES)


def swapped(name: str, rank: int, at: int) -> Schedule:
    """Return a schedule in which a rank's calls `at` and `at` + 1 have changed places."""
    schedule = schedule_of(name)
    calls = list(schedule.lists[rank])
    calls[at : at + 2] = reversed(calls[at : at + 2])
    lists = list(schedule.lists)
    lists[rank] = tuple(calls)
    return replace(schedule, lists=tuple(lists), checked=False)


@cache
def verdict(schedule: Schedule, message: float) -> tuple[Clock | None, str, bool]:
    """Return the schedule in time, or what the checker says against it, and whether it is a
    deadlock."""
    try:
        return clock_of(check(schedule), Times(message=message)), "", False
    except ScheduleError as error:
        said = str(error)
    try:
        clock_of(schedule)
    except ScheduleError:  # the clock raises in a deadlock only
        return None, said, True
    return None, said, False


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    comma = say(", ", "，")
    places = (f"rank {rank}{comma}{at + 1} ⇄ {at + 2}" for rank, at in SWAPS)
    return Live(
        name="edit_schedule",
        lesson="11",
        section="2",
        title=say("Swap two calls of a schedule", "交换调度中的两条指令"),
        predict=Prediction(
            say(
                "1F1B on three ranks, three microbatches; messages take no time. Rank 0 sends "
                "activation 2, then receives gradient 0. Swap these two calls. What happens?",
                "三个 rank、三个微批次的 1F1B，消息不花时间。rank 0 先发送激活值 2，再接收梯度 0。把这"
                "两条指令对调，会怎样？",
            ),
            (
                say("deadlock", "死锁"),
                say("it runs, in the same time", "能运行，用时不变"),
                say("it runs, and takes longer", "能运行，用时更长"),
            ),
            1,
            say(
                "15 forwards, as before. Gradient 0 does not need activation 2, and rank 1 receives "
                "activation 2 only after it has sent gradient 0. (If a message takes half a "
                "forward, it is 19 instead of 18.) In GPipe the same swap is a deadlock: there rank "
                "0 waits for gradient 2, which needs activation 2.",
                "仍是 15 次前向。梯度 0 不依赖激活值 2；rank 1 也要先发出梯度 0，才接收激活值 2。"
                "（如果一条消息要花半次前向的时间，就从 18 变成 19。）GPipe 中同样的对调会死锁："
                "rank 0 等的是梯度 2，而梯度 2 依赖激活值 2。",
            ),
        ),
        controls=(
            Control(say("schedule", "调度"), tuple(NAMES.values())),
            Control(
                say("calls swapped", "对调"),
                (say("none", "无"), *places),
            ),
            Control(say("a message takes", "一条消息的时间"), ("0", say("½ forward", "½ 次前向"))),
        ),
        size=(LEFT + max(CALLS) * CALL + 6, CHART + RANKS * BAR + 4),
        picture=partial(_picture, say),
        start=(2, 0, 0),
    )


def _picture(say: Say, name_at: int, swap_at: int, message_at: int) -> Picture:
    name = [*NAMES][name_at]
    swap = SWAPS[swap_at - 1] if swap_at else None
    schedule = swapped(name, *swap) if swap else schedule_of(name)
    message = MESSAGES[message_at]
    timed, said, deadlock = verdict(schedule, message)
    picture = Picture(_command(name, swap, message))
    _draw_lists(picture, schedule, swap, refused=timed is None)
    legend = say(
        "a: activation, g: gradient; a0↓ sends, ↓a0 receives. Click a call to swap it with the "
        "next.",
        "a 是激活值，g 是梯度；a0↓ 是发送，↓a0 是接收。点击一条指令：与下一条对调。",
    )
    picture.text(4, LINES, legend, "small soft")
    if timed:
        _draw_chart(picture, timed)
    else:
        for number, line in enumerate(textwrap.wrap(said, LETTERS)):
            picture.text(4, CHART + 14 + 18 * number, line)
    before, _, _ = verdict(schedule_of(name), message)
    picture.facts.append(_fact(say, before, timed, deadlock))
    return picture


def _draw_lists(
    picture: Picture, schedule: Schedule, swap: tuple[int, int] | None, *, refused: bool
) -> None:
    """Draw each rank's calls as buttons; frame the two that have changed places."""
    for rank, calls in enumerate(schedule.lists):
        y = TOP + rank * ROW
        picture.text(LEFT - 8, y + 18, f"rank {rank}", "end")
        for at, call in enumerate(calls):
            color, told = LOOKS[type(call)]
            moved = swap is not None and swap[0] == rank and at - swap[1] in (0, 1)
            picture.box(
                LEFT + at * CALL,
                y,
                CALL - 2,
                ROW - 8,
                "wrong" if moved and refused else color,
                told.format(call.microbatch),
                sets=_sets(rank, at, swap),
            )
    if swap:
        rank, at = swap
        picture.box(LEFT + at * CALL - 2, TOP + rank * ROW - 2, 2 * CALL + 2, ROW - 4, "edge")


def _sets(rank: int, at: int, swap: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return what a click on a call chooses: its swap with the next, or none if they are swapped."""
    if (rank, at) == swap:
        return 1, 0
    return (1, 1 + SWAPS.index((rank, at))) if (rank, at) in SWAPS else None


def _draw_chart(picture: Picture, timed: Clock) -> None:
    """Draw when each rank computes."""
    for rank in range(RANKS):
        y = CHART + rank * BAR
        picture.text(LEFT - 8, y + 18, f"rank {rank}", "end")
        picture.box(LEFT, y, timed.length * UNIT, BAR - 4, "free")
    for span in timed.spans:
        color, _ = LOOKS[type(span.instruction)]
        picture.box(
            LEFT + span.start * UNIT,
            CHART + span.rank * BAR,
            (span.stop - span.start) * UNIT - 1,
            BAR - 4,
            color,
            str(span.instruction.microbatch),
        )


def _fact(say: Say, before: Clock | None, timed: Clock | None, deadlock: bool) -> str:
    """Return what comes of the schedule."""
    if timed and before:
        return say(
            f"The checker passes it. It lasts {timed.length:g} forwards (without a swap "
            f"{before.length:g}); "
            f"bubble {timed.bubble:.1%}.",
            f"检查器通过。用时 {timed.length:g} 次前向（不对调是 {before.length:g}）；"
            f"气泡占 {timed.bubble:.1%}。",
        )
    if deadlock:
        return say(
            "The checker refuses it: these ranks would wait for each other for ever.",
            "检查器拒绝：上面这些 rank 会互相等待，永远不结束（死锁）。",
        )
    return say(
        "The checker refuses it: a call would run before what it needs is there.",
        "检查器拒绝：有一条指令会在所需的数据就绪之前运行。",
    )


def _command(name: str, swap: tuple[int, int] | None, message: float) -> str:
    """Return a command that checks the schedule and prints its length."""
    made = f"swapped('{name}', {swap[0]}, {swap[1]})" if swap else f"schedule_of('{name}')"
    return (
        'python -c "from minidist.site.live.edit_schedule import *; '
        f'print(clock_of(check({made}), Times(message={message:g})).length)"'
    )
