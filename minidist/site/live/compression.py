"""Lesson 21: seconds until a loss, by scheme and link, as the bench of compression measured them."""

import json
from functools import cache, partial
from typing import Any, NamedTuple

from minidist import lessons
from minidist.bench.compress.links import bandwidth_text
from minidist.bench.compress.time_to_loss import steps_to
from minidist.bench.compress.ways import way_of
from minidist.console import size_text
from minidist.site.live import Control, Live, Picture, Prediction, Say
from minidist.site.live.plane import Plane

RECORD = lessons.FOLDER.parent / "benchmarks" / "results" / "compress-intel.json"
PLAIN = "none"
SHOWN = {
    PLAIN: PLAIN,
    "fp16": "fp16",
    "8bit": "8bit",
    "1-bit:warmup=200": "1-bit",
    "top-k": "top-k 1 %",
    "powersgd:rank=16": "powersgd 16",
    "local-steps:rate=2": "DiLoCo, H=25",
    "local-steps:every=3,outer=sgd,compress=4bit,rate=2": "H=3, 4bit",
    "local-steps:every=4,outer=sgd,compress=4bit,rate=2": "H=4, 4bit",
}
"""Ways of the record, by what the picture calls them. The adaptive ratio is left out: over each link
it is another training."""

LOSSES = (2.8, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0, 1.95, 1.9, 1.85)
ROW, TOP = 28, 8
PLANE = Plane(104, TOP, 440, ROW * len(SHOWN), (1.0, 20_000.0), (0.0, 1.0), log_x=True)


class Reached(NamedTuple):
    """When a way reaches a loss: the step and the second, None if it never does; nbytes: that a
    rank sends in a step."""

    steps: int | None
    seconds: float | None
    nbytes: float


@cache
def record() -> dict[str, Any]:
    """Return what `minidist bench compress` recorded."""
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


@cache
def reached(loss: float, link: int) -> dict[str, Reached]:
    """Return when each way reaches a loss over a link, by its number in the record."""
    rows = {row["way"]: row for row in record()["rows"]}
    plain_step = rows[PLAIN]["cells"][link]["step_seconds"]
    found = {}
    for text, name in SHOWN.items():
        row = rows[text]
        steps = steps_to(row["curve"], loss)
        step = row["cells"][link]["step_seconds"]
        way = way_of(text, record()["steps"])
        seconds = None if steps is None else way.seconds(steps, step, plain_step)
        found[name] = Reached(steps, seconds, row["nbytes"])
    return found


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="compression",
        lesson="21",
        section="5",
        title=say("Seconds until a loss, over four links", "四种链路上，多少秒降到某个损失"),
        predict=Prediction(
            say(
                "Four ranks train 3.2 million parameters. 8bit sends a quarter of plain DDP's bytes "
                "and needs as many steps. A step of plain DDP takes 278 ms over 1 Gbit/s and 148 ms "
                "over 10 Gbit/s. Over which links does 8bit reach a loss later than plain DDP?",
                "四个 rank 训练 320 万个参数。8bit 只发送普通 DDP 四分之一的字节，需要的步数相同。"
                "普通 DDP 的一步，在 1 Gbit/s 上用 278 ms，在 10 Gbit/s 上用 148 ms。在哪些链路上，"
                "8bit 比普通 DDP 更晚降到同样的损失？",
            ),
            (
                say("over none", "都不会"),
                say("only over 10 Gbit/s", "只在 10 Gbit/s 上"),
                say("over 1 Gbit/s and over 10 Gbit/s", "在 1 Gbit/s 和 10 Gbit/s 上"),
            ),
            1,
            say(
                "Only over 10 Gbit/s. There a step is nearly all computation: encoding takes longer "
                "than the bytes that it saves. Over 1 Gbit/s the step becomes 210 ms, over 10 Mbit/s "
                "a quarter.",
                "只在 10 Gbit/s 上。那里的一步几乎全是计算，编码用的时间比省下的发送时间还长。"
                "1 Gbit/s 上，一步缩短到 210 ms；10 Mbit/s 上，缩短到大约四分之一。",
            ),
        ),
        controls=(
            Control(
                say("link", "链路"),
                tuple(bandwidth_text(bandwidth) for bandwidth in record()["bandwidths"]),
            ),
            Control(say("until a loss of", "降到损失"), tuple(f"{loss:g}" for loss in LOSSES)),
        ),
        size=(620, round(PLANE.bottom) + 26),
        picture=partial(_picture, say),
        start=(1, 9),
    )


def _picture(say: Say, link: int, loss_at: int) -> Picture:
    loss = LOSSES[loss_at]
    found = reached(loss, link)
    picture = Picture(
        'python -c "from minidist.site.live.compression import *; '
        f'print(*reached({loss:g}, {link}).items(), sep=chr(10))"'
    )
    there = {name: each.seconds for name, each in found.items() if each.seconds is not None}
    soonest = min(there, key=lambda name: there[name])
    PLANE.axes(
        picture,
        [(each, say(f"{each:,} s", f"{each:,} 秒")) for each in (1, 10, 100, 1000, 10_000)],
        [],
    )
    for at, (name, each) in enumerate(found.items()):
        y = TOP + at * ROW
        picture.text(PLANE.left - 8, y + 19, name, "end")
        if each.seconds is None:
            picture.text(PLANE.left + 8, y + 19, say("never", "达不到"), "soft")
            continue
        end = PLANE.across(each.seconds)
        look = "right" if name == soonest else "c5" if name == PLAIN else "c0"
        picture.box(PLANE.left, y + 4, end - PLANE.left, ROW - 8, look)
        picture.text(
            end + 6, y + 19, say(f"{each.seconds:,.0f} s", f"{each.seconds:,.0f} 秒"), "small"
        )
    best, plain = found[soonest], found[PLAIN]
    picture.facts = [
        say(
            f"Soonest: {soonest}, {there[PLAIN] / there[soonest]:.1f} times as soon as plain DDP.",
            f"最快：{soonest}，是普通 DDP 的 {there[PLAIN] / there[soonest]:.1f} 倍。",
        ),
        say(
            f"It needs {best.steps} steps, plain DDP {plain.steps}. A rank sends "
            f"{size_text(best.nbytes)} a step, in plain DDP {size_text(plain.nbytes)}.",
            f"它要 {best.steps} 步，普通 DDP 要 {plain.steps} 步。每个 rank 每步发送 "
            f"{size_text(best.nbytes)}，普通 DDP 是 {size_text(plain.nbytes)}。",
        ),
        say(
            "Recorded once, on an Intel Xeon: held-out losses every 20 steps, and the median time of "
            "a step over each link. H: steps between two exchanges of weights.",
            "只记录了一次，机器是 Intel Xeon：每 20 步的留出集损失，以及每种链路上一步用时的中位数。"
            "H 是每隔多少步交换一次权重。",
        ),
    ]
    return picture
