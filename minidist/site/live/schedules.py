"""Lesson 11: pipeline schedules in time: the bubble, and the activations that each rank holds."""

from functools import cache, partial

from minidist.parallel.pipeline.instructions import (
    Backward,
    BackwardInput,
    BackwardWeights,
    Forward,
    Schedule,
)
from minidist.parallel.pipeline.schedule_checker import (
    Clock,
    Times,
    clock_of,
    peak_held,
)
from minidist.parallel.pipeline.schedules import make_schedule, stages_a_rank
from minidist.site.live import Control, Live, Picture, Prediction, Say

SCHEDULES: tuple[tuple[str, str, int | None], ...] = (
    ("GPipe", "gpipe", None),
    ("1F1B", "1f1b", None),
    ("interleaved, v = 2", "interleaved", 2),
    ("interleaved, v = 4", "interleaved", 4),
    ("ZB-H1", "zb-h1", None),
    ("ZB-V", "zb-v", None),
    ("DualPipe-V", "dualpipe-v", None),
)
RANKS = (2, 3, 4)
MICROBATCHES = (2, 4, 8)
MESSAGES = (0.0, 0.5)  # forwards of a rank
COLORS = {
    Forward: ("c0", "c7"),
    Backward: ("c1", "c5"),
    BackwardInput: ("c1", "c5"),
    BackwardWeights: ("c2", "c4"),
}
"""The color of each compute: on the first half of a rank's stages, and on the second."""

LEFT = 54
TOP = 30
ROW = 30
WIDTH = 500  # of the time axis
NARROW = 9  # a box below this width has no room for its number


@cache
def schedule_of(which: int, ranks: int, microbatches: int) -> Schedule:
    """Return one of SCHEDULES."""
    _, name, chunks = SCHEDULES[which]
    return make_schedule(name, ranks, microbatches, chunks=chunks)


@cache
def clock(which: int, ranks: int, microbatches: int, message: float) -> Clock:
    """Return a schedule in time; the unit is the forward of a microbatch through a rank's stages,
    and a backward takes two."""
    _, name, chunks = SCHEDULES[which]
    share = 1 / stages_a_rank(name, chunks)
    times = Times(share, 2 * share, share, share, message)
    return clock_of(schedule_of(which, ranks, microbatches), times)


@cache
def _longest(ranks: int, microbatches: int, message: float) -> float:
    """Return the length of the longest schedule: all are drawn at one scale."""
    lengths = [clock(which, ranks, microbatches, message).length for which in range(len(SCHEDULES))]
    return max(lengths)


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="schedules",
        lesson="11",
        section="4",
        title=say("Pipeline schedules: bubble and memory", "流水线调度：气泡与内存"),
        predict=Prediction(
            say(
                "4 ranks, 8 microbatches. Interleaved 1F1B with v = 4 stages a rank lasts 26.25 "
                "forwards, 1F1B 33. Now each message takes half a forward. Which is shorter?",
                "4 个 rank，8 个微批次。每个 rank 有 v = 4 个阶段的交错 1F1B 用时 26.25 次前向，1F1B "
                "是 33。现在每条消息要花半次前向的时间，哪一种更短？",
            ),
            (
                say("interleaved", "交错 1F1B"),
                "1F1B",
                say("they are equal", "一样长"),
            ),
            1,
            say(
                "1F1B: 41 forwards; interleaved 45. With 16 stages a microbatch crosses 15 "
                "boundaries forward and 15 back, with 4 stages 3 and 3, and ranks wait for "
                "messages.",
                "1F1B 更短：41 次前向，交错 1F1B 是 45。16 个阶段时，一个微批次去程、回程各过 15 处"
                "阶段边界；4 个阶段时各过 3 处。每过一处，都可能要等消息。",
            ),
        ),
        controls=(
            Control(say("schedule", "调度"), tuple(_title(say, one) for one in SCHEDULES)),
            Control(say("ranks p", "rank 数 p"), tuple(map(str, RANKS))),
            Control(say("microbatches m", "微批次数 m"), tuple(map(str, MICROBATCHES))),
            Control(say("a message takes", "一条消息的时间"), ("0", say("½ forward", "½ 次前向"))),
        ),
        size=(LEFT + WIDTH + 62, TOP + RANKS[-1] * ROW + 34),
        picture=partial(_picture, say),
        start=(0, len(RANKS) - 1, len(MICROBATCHES) - 1, 0),
    )


def _title(say: Say, schedule: tuple[str, str, int | None]) -> str:
    title, name, chunks = schedule
    return say(title, f"交错 1F1B, v = {chunks}") if name == "interleaved" else title


def _picture(say: Say, which: int, ranks_at: int, count_at: int, message_at: int) -> Picture:
    ranks = RANKS[ranks_at]
    microbatches = MICROBATCHES[count_at]
    message = MESSAGES[message_at]
    schedule = schedule_of(which, ranks, microbatches)
    timed = clock(which, ranks, microbatches, message)
    held = [count / schedule.chunks for count in peak_held(schedule)]
    picture = Picture(_command(which, ranks, microbatches, message))
    picture.text(LEFT, TOP - 12, say("time →", "时间 →"), "soft")
    picture.text(LEFT + WIDTH + 58, TOP - 12, say("holds", "保存"), "end soft")
    for rank in range(ranks):
        y = TOP + rank * ROW
        picture.text(LEFT - 8, y + 18, f"rank {rank}", "end")
        picture.box(LEFT, y + 2, WIDTH, ROW - 4, "free")
        picture.text(LEFT + WIDTH + 58, y + 18, f"{held[rank]:g}", "end")
    scale = WIDTH / _longest(ranks, microbatches, message)
    for span in timed.spans:
        done = span.instruction
        later = done.stage // ranks >= (schedule.chunks + 1) // 2
        left = round(span.start * scale)
        width = round(span.stop * scale) - left
        picture.box(
            LEFT + left,
            TOP + span.rank * ROW + 2,
            width - 1,
            ROW - 4,
            COLORS[type(done)][later],
            str(done.microbatch) if width >= NARROW else "",
        )
    _draw_legend(picture, say, TOP + RANKS[-1] * ROW + 8)
    picture.facts += _facts(say, timed, held)
    return picture


def _draw_legend(picture: Picture, say: Say, y: float) -> None:
    """Draw what the colors mean."""
    words = (
        (Forward, say("forward", "前向"), 95),
        (Backward, say("backward, or its half I", "反向，或前半 I"), 180),
        (BackwardWeights, say("its half W", "后半 W"), 100),
    )
    x = LEFT
    for kind, told, width in words:
        for color in COLORS[kind]:
            picture.box(x, y, 12, 12, color)
            x += 14
        picture.text(x + 2, y + 11, told, "small soft")
        x += width - 28
    told = say("right: a rank's later stages", "右：后一半阶段")
    picture.text(LEFT + WIDTH + 58, y + 11, told, "small soft end")


def _facts(say: Say, timed: Clock, held: list[float]) -> list[str]:
    told = ", ".join(f"{count:g}" for count in held)
    return [
        say(
            f"It lasts {timed.length:g} forwards; the bubble is {timed.bubble:.1%} of the ranks' "
            "time.",
            f"用时 {timed.length:g} 次前向；气泡占 {timed.bubble:.1%}。",
        ),
        say(
            f"Microbatches held at the peak, by rank: {told} (counted by a rank's layers: one of "
            "v stages is 1/v).",
            f"各 rank 最多保存的微批次数：{told}（按 rank 的全部层计：v 个阶段中的一个算 1/v）。",
        ),
    ]


def _command(which: int, ranks: int, microbatches: int, message: float) -> str:
    """Return a command that prints length, bubble, and what is held."""
    _, name, chunks = SCHEDULES[which]
    parts = stages_a_rank(name, chunks)
    made = f"'{name}', {ranks}, {microbatches}" + (f", chunks={chunks}" if chunks else "")
    share = 1 / parts
    times = f"{share:g}, {2 * share:g}, {share:g}, {share:g}, {message:g}"
    return (
        'python -c "from minidist.parallel.pipeline.schedules import make_schedule; from '
        "minidist.parallel.pipeline.schedule_checker import *; "
        f"s = make_schedule({made}); c = clock_of(s, Times({times})); "
        'print(c.length, c.bubble, [n / s.chunks for n in peak_held(s)])"'
    )
