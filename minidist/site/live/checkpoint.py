"""Lesson 26: the interval between two checkpoints and the time that is kept, by survive.interval."""

from functools import cache, partial

import numpy as np

from minidist.site.live import Control, Live, Picture, Prediction, Say
from minidist.site.live.plane import Plane
from minidist.survive.interval import best_interval, goodput

MINUTE, HOUR = 60.0, 3600.0
SAVES = (1.0, 5.0, 20.0, 80.0, 320.0)  # seconds
BETWEEN = (0.5 * HOUR, 2 * HOUR, 8 * HOUR, 32 * HOUR)  # seconds between interruptions
RESTARTS = (MINUTE, 10 * MINUTE)
INTERVALS = tuple(MINUTE * minutes for minutes in (1, 2, 5, 10, 20, 40, 80, 150))
PLANE = Plane(56, 16, 540, 200, (30.0, 4 * HOUR), (0.0, 1.0), log_x=True)
BAR = 270  # where the bar of the time begins


@cache
def curve_of(save: float, between: float, restart: float) -> list[tuple[float, float]]:
    """Return (interval, goodput) for many intervals."""
    return [
        (float(tried), goodput(float(tried), save=save, between=between, restart=restart))
        for tried in np.geomspace(*PLANE.x, 46)
    ]


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="checkpoint",
        lesson="26",
        section="5",
        title=say("How often should a job save?", "多久保存一次？"),
        predict=Prediction(
            say(
                "A job moves to four times as many machines, so interruptions come four times as "
                "often. A save takes as long as before. What does the best interval between two "
                "saves become?",
                "作业换到四倍的机器上，中断的频率也变成四倍，保存一次用的时间不变。"
                "最好的保存间隔变成原来的多少？",
            ),
            (
                say("as long as before", "不变"),
                say("half", "一半"),
                say("a quarter", "四分之一"),
            ),
            1,
            say(
                "Half: the best interval is √(2 δ M), and M is a quarter. Each step of the slider "
                "“an interruption every” changes M by a factor of four, and the dashed line moves by a "
                "factor of two.",
                "一半：最好的间隔是 √(2 δ M)，M 变成了四分之一。“平均多久中断一次”每移动一格，"
                "M 相差四倍，虚线移动两倍。",
            ),
        ),
        controls=(
            Control(
                say("a save takes", "保存一次用"), tuple(_time(say, seconds) for seconds in SAVES)
            ),
            Control(
                say("an interruption every", "平均多久中断一次"),
                tuple(_time(say, seconds) for seconds in BETWEEN),
            ),
            Control(say("a restart takes", "重启用"), tuple(_time(say, each) for each in RESTARTS)),
            Control(say("save every", "保存间隔"), tuple(_time(say, each) for each in INTERVALS)),
        ),
        size=(620, 330),
        picture=partial(_picture, say),
        start=(2, 1, 0, 5),
    )


def _time(say: Say, seconds: float) -> str:
    """Return seconds in words: "20 s", "5 min", "2 h"."""
    if seconds < MINUTE or seconds % MINUTE and seconds < HOUR / 6:
        return say(f"{seconds:.0f} s", f"{seconds:.0f} 秒")
    if seconds < 2 * HOUR:
        return say(f"{seconds / MINUTE:.0f} min", f"{seconds / MINUTE:.0f} 分钟")
    return say(f"{seconds / HOUR:.3g} h", f"{seconds / HOUR:.3g} 小时")


def _picture(say: Say, save_at: int, between_at: int, restart_at: int, at: int) -> Picture:
    save = SAVES[save_at]
    between = BETWEEN[between_at]
    restart = RESTARTS[restart_at]
    interval = INTERVALS[at]
    best = best_interval(save, between)
    kept = goodput(interval, save=save, between=between, restart=restart)
    most = goodput(best, save=save, between=between, restart=restart)
    picture = Picture(
        'python -c "from minidist.survive.interval import *; '
        f"print(best_interval({save:g}, {between:g}), "
        f'goodput({interval:g}, save={save:g}, between={between:g}, restart={restart:g}))"'
    )
    _draw_curve(picture, say, curve_of(save, between, restart), interval, kept, best)
    _draw_time(picture, say, kept, kept * save / interval)
    picture.facts = [
        say(
            f"Saving every {_time(say, interval)}: {kept:.1%} of the time goes into work that is "
            "kept (goodput).",
            f"每 {_time(say, interval)} 保存一次：有效训练时间占比 (goodput) 是 {kept:.1%}。",
        ),
        say(
            f"Every √(2 δ M) = {best:,.0f} s (dashed): {most:.1%}.",
            f"每 √(2 δ M) = {best:,.0f} 秒保存一次（虚线）：{most:.1%}。",
        ),
    ]
    return picture


def _draw_curve(
    picture: Picture,
    say: Say,
    curve: list[tuple[float, float]],
    interval: float,
    kept: float,
    best: float,
) -> None:
    """Draw the part of the time that is kept over the interval, the best interval, and the chosen
    one."""
    PLANE.axes(
        picture,
        [(each, _time(say, each)) for each in (30.0, *INTERVALS)],
        [(part, f"{part:.0%}") for part in (0, 0.25, 0.5, 0.75, 1)],
    )
    x = PLANE.across(best)
    picture.line([(x, PLANE.top), (x, PLANE.bottom)], "dashed")
    PLANE.curve(picture, curve, "c0 thick")
    PLANE.mark(picture, interval, kept, "c1", 11)


def _draw_time(picture: Picture, say: Say, kept: float, saving: float) -> None:
    """Draw a bar of all time: work that is kept, saving, and what interruptions cost."""
    parts = (
        ("right", kept, say("work that is kept", "保留下来的工作")),
        ("c1", saving, say("saving", "保存")),
        ("wrong", 1 - kept - saving, say("lost work, restarts", "丢掉的工作和重启")),
    )
    x, legend = PLANE.left, PLANE.left
    for look, part, words in parts:
        width = part * PLANE.width
        picture.box(x, BAR, width, 24, look, f"{part:.0%}" if width > 34 else "")
        picture.box(legend, BAR + 38, 11, 11, look)
        picture.text(legend + 16, BAR + 48, words, "small")
        x += width
        legend += 180
