"""Lesson 25: the records of a faulty job, one after another, and which of five rules names whom."""

from functools import cache, partial
from typing import Any

import numpy as np

from minidist import lessons
from minidist.grading import load_module
from minidist.observe.diagnose.plain import (
    plain_behind,
    plain_first_bad,
    plain_growth,
    plain_slow_link,
    plain_waited_for,
)
from minidist.site.live import Control, Live, Picture, Prediction, Say
from minidist.site.live.plane import Plane

JOBS = (
    "busy receiver",
    "slow rank",
    "leak",
    "two slow ranks",
    "slow link",
    "hang",
    "not finite",
    "healthy",
)
"""Kinds of the lesson's jobs. A reader sees only their numbers, until the rules answer."""

SEEDS = (0, 3)
STEPS, SIZE = 30, 4
MIB = 1 << 20
LEFT = 78
WIDTH = 520
LANE = 56


@cache
def lab() -> Any:
    """Return the lesson's module that makes the jobs."""
    return load_module(lessons.find("25").part("experiments.py"), "25")


@cache
def job_of(number: int, turn: int) -> Any:
    """Return the records of a job of four ranks. Args: number, turn: as a reader sees them, from
    1."""
    return lab().sick_job(JOBS[number - 1], size=SIZE, steps=STEPS, seed=SEEDS[turn - 1])


@cache
def answers(number: int, turn: int) -> tuple[Any, ...]:
    """Return what each rule names: ranks behind, slow rank, slow link, ranks that leak, first NaN;
    None if it names nobody."""
    job = job_of(number, turn)
    growths = [plain_growth(memory) for memory in job.memory.T]
    return (
        plain_behind(job.calls) or None,
        plain_waited_for(job.arrivals),
        plain_slow_link(job.links),
        [rank for rank, growth in enumerate(growths) if growth > MIB] or None,
        plain_first_bad(job.bad),
    )


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="sick_job",
        lesson="25",
        section="5",
        title=say("What is wrong with this job?", "这个作业出了什么问题？"),
        predict=Prediction(
            say(
                "Job 1 is slow. The picture shows the messages of its four links in 30 steps. On one "
                "link most messages are late; its fastest ones are as fast as elsewhere. What is at "
                "fault?",
                "作业 1 很慢。图上是四条链路在 30 步里的消息。有一条链路，多数消息都晚，"
                "但最快的消息和别处一样快。问题在哪里？",
            ),
            (
                say("this link", "这条链路"),
                say("not the link: its receiver is often busy", "不是链路：接收方经常在忙"),
                say("one cannot know", "看不出来"),
            ),
            1,
            say(
                "Not the link. A slow link makes every message late; a busy receiver makes some late "
                "and none early. The rule takes the time below which a quarter of the messages lie, "
                "and names no link. Find the fault of the other seven jobs, then let the rules "
                "answer.",
                "不是链路。链路慢，每条消息都晚；接收方忙，只有一部分晚，没有一条变早。规则看的是"
                "四分之一的消息比它快的那个时间，所以不点任何链路的名。请找出另外七个作业的问题，"
                "再看规则怎么回答。",
            ),
        ),
        controls=(
            Control(say("job", "作业"), tuple(str(n) for n in range(1, len(JOBS) + 1))),
            Control(
                say("record", "记录"),
                (
                    say("last calls", "最后一次调用"),
                    say("arrivals", "到达时刻"),
                    say("links", "链路"),
                    say("memory", "内存"),
                    say("bad numbers", "坏数"),
                ),
            ),
            Control(say("the rules", "规则"), (say("hidden", "隐藏"), say("answer", "回答"))),
            Control(say("run", "第几次"), tuple(str(n) for n in range(1, len(SEEDS) + 1))),
        ),
        size=(620, 290),
        picture=partial(_picture, say),
        start=(0, 2, 0, 0),
    )


def _picture(say: Say, job_at: int, record: int, answered: int, turn_at: int) -> Picture:
    chosen = (job_at + 1, turn_at + 1)
    named = answers(*chosen) if answered else (None,) * 5
    picture = Picture(
        'python -c "from minidist.site.live.sick_job import *; job = '
        f'job_of{chosen}; print(job.kind, job.culprit, answers{chosen})"'
    )
    draw = (_draw_calls, _draw_arrivals, _draw_links, _draw_memory, _draw_bad)[record]
    picture.facts = [draw(picture, say, job_of(*chosen), named[record])]
    if answered:
        picture.facts += [_told(say, named), _fault(say, JOBS[job_at])]
    return picture


def _draw_calls(picture: Picture, say: Say, job: Any, named: Any) -> str:
    """Draw the number of each rank's last call."""
    for rank, last in job.calls.items():
        _label(picture, rank, f"rank {rank}")
        look = "wrong" if named and rank in named else "c0"
        picture.box(LEFT, _top(rank) + 8, WIDTH * last / (STEPS + 1), 34, look, str(last))
    return say(
        "The number of each rank's last call, when nothing had moved for a while, or at the end.",
        "每个 rank 最后一次调用的编号：作业停住不动时，或者结束时。",
    )


def _draw_arrivals(picture: Picture, say: Say, job: Any, named: Any) -> str:
    """Draw how long after the first rank each arrives at the call of a step."""
    after = 1e3 * (job.arrivals - job.arrivals.min(axis=1, keepdims=True))
    for rank in range(SIZE):
        _label(picture, rank, f"rank {rank}")
        _draw_lane(picture, rank, after[:, rank], 140.0, "wrong" if named == rank else "c0")
    return say(
        "How long after the first rank each arrives at the call of a step; a lane is 140 ms high.",
        "每一步，各 rank 比第一个到达的晚多久；一行的高度是 140 ms。",
    )


def _draw_links(picture: Picture, say: Say, job: Any, named: Any) -> str:
    """Draw the seconds of each message of a link."""
    for lane, (link, seconds) in enumerate(job.links.items()):
        _label(picture, lane, f"{link[0]} → {link[1]}")
        milliseconds = 1e3 * np.array(seconds)
        _draw_lane(picture, lane, milliseconds, 36.0, "wrong" if named == link else "c0")
    return say(
        "How long each message took once both ends were ready; a lane is 36 ms high.",
        "两端都准备好之后，每条消息用了多久；一行的高度是 36 ms。",
    )


def _draw_memory(picture: Picture, say: Say, job: Any, named: Any) -> str:
    """Draw the growth of each rank's memory since the first step."""
    for rank, memory in enumerate(job.memory.T):
        _label(picture, rank, f"rank {rank}")
        look = "wrong" if named and rank in named else "c0"
        _draw_lane(picture, rank, np.maximum(0, memory - memory[0]) / MIB, 70.0, look)
    return say(
        "By how much the memory of each rank has grown since the first step; a lane is 70 MiB high.",
        "每个 rank 的内存比第一步多了多少；一行的高度是 70 MiB。",
    )


def _draw_bad(picture: Picture, say: Say, job: Any, named: Any) -> str:
    """Draw the step of each rank's first report of a number that is not finite."""
    for rank in range(SIZE):
        _label(picture, rank, f"rank {rank}")
        picture.line([(LEFT, _top(rank) + 25), (LEFT + WIDTH, _top(rank) + 25)])
    for step, _, rank, layer in job.bad:
        x = min(LEFT + WIDTH * step / STEPS, LEFT + WIDTH - 118)
        look = "wrong" if named == (rank, layer) else "c0"
        picture.box(x, _top(rank) + 8, 118, 34, look, f"{step}: {layer}")
    if not job.bad:
        return say(
            "No rank has reported a number that is not finite.", "没有 rank 报告不是有限值的数。"
        )
    return say(
        "The first number that is not finite of each rank: in which step, in which layer.",
        "每个 rank 的第一个不是有限值的数：在哪一步，在哪一层。",
    )


def _draw_lane(picture: Picture, lane: int, values: np.ndarray, high: float, look: str) -> None:
    """Draw a value of each step as a bar, in a lane of its own."""
    plane = Plane(LEFT, _top(lane) + 4, WIDTH, LANE - 10, (0, len(values)), (0, high))
    width = WIDTH / len(values)
    for step, value in enumerate(values):
        height = max(1, round(plane.bottom - plane.up(float(value))))
        picture.box(
            round(LEFT + step * width), round(plane.bottom) - height, round(width) - 3, height, look
        )


def _top(lane: int) -> int:
    return 8 + lane * (LANE + 12)


def _label(picture: Picture, lane: int, text: str) -> None:
    picture.text(LEFT - 10, _top(lane) + 30, text, "end")


def _told(say: Say, found: tuple[Any, ...]) -> str:
    """Return what each rule says."""
    behind, slow, link, leak, bad = found
    nobody = say("nobody", "没有点名")

    def ranks(some: list[int] | None) -> str:
        return f"rank {', '.join(map(str, some))}" if some else nobody

    arrow = f"{link[0]} → {link[1]}" if link else nobody
    first = f"rank {bad[0]}, {bad[1]}" if bad else nobody
    late = nobody if slow is None else f"rank {slow}"
    return say(
        f"The rules answer. Behind: {ranks(behind)}; slow rank: {late}; slow link: {arrow}; leak: "
        f"{ranks(leak)}; first NaN: {first}.",
        f"各规则的回答。落后：{ranks(behind)}；慢 rank：{late}；慢链路：{arrow}；泄漏：{ranks(leak)}；"
        f"第一个 NaN：{first}。",
    )


def _fault(say: Say, kind: str) -> str:
    """Return what was planted in a job."""
    planted = {
        "hang": say(
            "some ranks have stopped before the last call", "几个 rank 停在最后一次调用之前"
        ),
        "slow rank": say("one rank computes 1.5 times as long", "一个 rank 的计算时间是 1.5 倍"),
        "slow link": say("one link takes three times as long", "一条链路的用时是三倍"),
        "leak": say("one rank's memory grows by 2 MiB a step", "一个 rank 的内存每步增长 2 MiB"),
        "not finite": say("one rank has made the first NaN", "一个 rank 产生了第一个 NaN"),
        "healthy": say(
            "nothing; other programs use the cores at times", "没有；别的程序有时占用核"
        ),
        "two slow ranks": say(
            "two slow ranks; neither is the only one that delays the others",
            "有两个慢 rank，哪一个都不是唯一耽误别人的",
        ),
        "busy receiver": say(
            "the receiver of one link is busy in three steps of five",
            "一条链路的接收方，五步里有三步在忙",
        ),
    }
    return say(f"Planted: {planted[kind]}.", f"实际的问题：{planted[kind]}。")
