"""Lesson 07: the buckets of DDP in time: how much of the communication backward hides."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache, partial
from typing import Any

from minidist.console import size_text
from minidist.nn import GPTConfig
from minidist.observe.timeline import Span
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.one_rank import run_rank
from minidist.simulate.results import Simulation
from minidist.simulate.simulate import simulate
from minidist.simulate.timelines import timelines
from minidist.simulate.trace import RankTrace
from minidist.site.live import Control, Live, Picture, Prediction, Say

GPUS = 8
SEQUENCES = 64  # of a step
CONFIG = GPTConfig(vocabulary=8192, context=1024, layers=12, width=768, heads=12)
BUCKETS = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 1 << 30)
LINKS = (
    ("NVLink, 450 GB/s", "h100:1x8", 1.0),
    ("InfiniBand, 50 GB/s", "h100:8x1", 1.0),
    ("InfiniBand, 25 GB/s", "h100:8x1", 2.0),
    ("InfiniBand, 12.5 GB/s", "h100:8x1", 4.0),
)
"""The name of a link, the cluster that has it, and how many times longer a byte takes."""

LEFT = 92
TOP = 14
ROW = 44
WIDTH = 514  # of the time axis
LETTER = 7.5  # the width of a letter
COLORS = {"forward": "c0", "backward": "c1", "optimizer": "c2"}


@cache
def step_of(bucket_bytes: int, link: int, overlap: bool) -> Simulation:
    """Return a simulated step of DDP on eight GPUs. Args: link: the place in LINKS."""
    _, spec, longer = LINKS[link]
    return simulate(
        Plan(dp=GPUS, precision="bf16", bucket_bytes=bucket_bytes),
        CONFIG,
        replace(Cluster.parse(spec), overlaps=overlap),
        batch=SEQUENCES,
        slow_links={"*nic*": longer} if longer > 1 else None,
        traces=_traced,
    )


_TRACES: dict[tuple[int, int], RankTrace] = {}


def _traced(plan: Plan, config: GPTConfig, rank: int, **options: Any) -> RankTrace:
    """Return the trace of a rank, which does not depend on the links."""
    key = (plan.bucket_bytes, rank)
    if key not in _TRACES:
        _TRACES[key] = run_rank(plan, config, rank, **options)
    return _TRACES[key]


@cache
def lanes_of(bucket_bytes: int, link: int, overlap: bool) -> tuple[list[Span], list[Span]]:
    """Return what rank 0 computes, and the all-reduces of its buckets, in time."""
    (timeline,) = timelines(step_of(bucket_bytes, link, overlap), [0])
    computes = [span for span in timeline.spans if span.row == "compute"]
    reduces = [span for span in timeline.spans if span.name.startswith("all_reduce")]
    return _joined(computes), sorted(reduces, key=lambda span: span.start)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return spans in which those of one name that follow each other without a gap are one."""
    joined = list[Span]()
    for span in sorted(spans, key=lambda span: span.start):
        last = joined[-1] if joined else None
        if last and last.name == span.name and span.start - last.stop < 1e-9:
            joined[-1] = replace(last, stop=span.stop)
        else:
            joined.append(span)
    return joined


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="buckets",
        lesson="07",
        section="3",
        title=say(
            "Buckets in time: what backward hides, and what it does not",
            "桶的时间线：反向传播掩盖了多少通信",
        ),
        predict=Prediction(
            say(
                "Eight simulated GPUs, linked by InfiniBand of 50 GB/s. With buckets of 16 MiB, 1.4 "
                "ms of the communication are exposed: the GPU waits for them. Now the link is half "
                "as fast. How much is exposed?",
                "八个模拟的 GPU，用 50 GB/s 的 InfiniBand 相连。桶为 16 MiB 时，有 1.4 ms 的通信没有被"
                "掩盖，GPU 要等。链路速度减半，要等多久？",
            ),
            (
                say("about 1.4 ms", "约 1.4 ms"),
                say("about 2.8 ms", "约 2.8 ms"),
                say("much more than 2.8 ms", "远多于 2.8 ms"),
            ),
            2,
            say(
                "6.8 ms. All-reduces take twice as long, about 18 ms instead of 10. But backward is "
                "as short as before, and cannot hide more than its own 12 ms; the rest is exposed.",
                "6.8 ms。全归约的总时间翻倍，从约 10 ms 变成约 18 ms。反向传播却和原来一样长，最多"
                "掩盖它自己的 12 ms，其余的都要等。",
            ),
        ),
        controls=(
            Control(
                say("bucket", "桶的大小"),
                (*map(size_text, BUCKETS[:-1]), say("one for all", "只有一个桶")),
            ),
            Control(say("link", "链路"), tuple(name for name, _, _ in LINKS)),
            Control(say("overlap", "重叠"), (say("yes", "有"), say("no", "无"))),
        ),
        size=(LEFT + WIDTH + 8, TOP + 2 * ROW + 24),
        picture=partial(_picture, say),
        start=(2, 1, 0),
    )


def _picture(say: Say, bucket_at: int, link: int, overlap_at: int) -> Picture:
    overlap = not overlap_at
    bucket_bytes = BUCKETS[bucket_at]
    step = step_of(bucket_bytes, link, overlap)
    computes, reduces = lanes_of(bucket_bytes, link, overlap)
    scale = WIDTH / max(
        step_of(size, link, either).step_seconds for size in BUCKETS for either in (True, False)
    )
    picture = Picture(
        'python -c "from minidist.site.live.buckets import step_of; '
        f"f = step_of({bucket_bytes}, {link}, {overlap}); "
        "print(f.step_seconds, f.axes['dp'])\""
    )
    picture.text(LEFT - 8, TOP + 22, say("compute", "计算"), "end")
    picture.box(LEFT, TOP, step.step_seconds * scale, ROW - 8, "wrong")
    for span in computes:
        told = _word(say, span.name)
        _draw(picture, span, scale, TOP, COLORS[span.name], told)
    picture.text(LEFT - 8, TOP + ROW + 22, say("all-reduces", "全归约"), "end")
    for number, span in enumerate(reduces):
        _draw(picture, span, scale, TOP + ROW, "c4", str(number))
    _draw_legend(picture, say, step.step_seconds, scale)
    picture.facts += _facts(say, step, reduces)
    return picture


def _word(say: Say, name: str) -> str:
    """Return what stands in the box of a compute."""
    words = {
        "forward": say("forward", "前向"),
        "backward": say("backward", "反向"),
        "optimizer": say("update", "更新"),
    }
    return words[name]


def _draw(picture: Picture, span: Span, scale: float, y: float, color: str, told: str) -> None:
    """Draw a span, with its text if there is room."""
    width = (span.stop - span.start) * scale
    gap = 0.8 if color == "c4" and width > 2 else 0.0
    room = sum(LETTER if letter.isascii() else 2 * LETTER for letter in told)
    text = told if width >= room else ""
    picture.box(LEFT + span.start * scale, y, width - gap, ROW - 8, color, text)


def _draw_legend(picture: Picture, say: Say, seconds: float, scale: float) -> None:
    """Draw where the step ends, and what red means."""
    y = TOP + 2 * ROW + 12
    picture.box(LEFT, y - 11, 12, 12, "wrong")
    picture.text(LEFT + 18, y, say("the GPU waits", "GPU 在等"), "small soft")
    picture.text(LEFT + seconds * scale, y, f"{1e3 * seconds:.1f} ms", "end soft")


def _facts(say: Say, step: Simulation, reduces: list[Span]) -> list[str]:
    use = step.axes["dp"]
    told = f"{1e3 * use.seconds:.1f} ms"
    exposed = f"{1e3 * use.exposed:.1f} ms"
    whole = f"{1e3 * step.step_seconds:.1f} ms"
    count = len(reduces)
    return [
        say(
            f"Exposed: {exposed} of {told} of communication. The step takes {whole}.",
            f"没有被掩盖的：{told} 的通信中有 {exposed}。一步用时 {whole}。",
        ),
        say(f"Buckets: {count}.", f"桶数：{count}。"),
    ]
