"""Lesson 20: what device, host and disk do in a step with everything on disk, by the simulator."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import numpy as np

from minidist.nn import GPTConfig
from minidist.observe import overlap
from minidist.observe.events import Await, Event, Transfer
from minidist.observe.timeline import Span, Timeline
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.one_rank import run_rank
from minidist.simulate.results import Simulation
from minidist.simulate.simulate import simulate
from minidist.simulate.timelines import timelines
from minidist.simulate.trace import RankTrace
from minidist.site.live import Control, Live, Picture, Prediction, Say

CONFIG = GPTConfig(vocabulary=8192, context=1024, layers=6, width=512, heads=8)
PLAN = Plan(dp=1, zero=3, offload="all", precision="bf16")
READ = "disk to host"
BANDWIDTHS = (1, 2, 4, 8, 16, 32)  # GB/s of the disk
SEQUENCES = (32, 128, 512)
PHASES = {"forward": "c0", "backward": "c3", "optimizer": "c4"}
MOVES = {READ: "c1", "host to disk": "c5", "host to device": "c2", "device to host": "c6"}
LEFT, TOP = 104, 30
WIDTH, LANE = 490, 34


def read_when_needed(trace: RankTrace) -> RankTrace:
    """Return the trace with each read of the disk begun just before the rank waits for it.

    A read waits first for writes of the same file: these waits are next to it, and move with it.
    """
    events: list[Event] = []
    places = []
    put_off: dict[int, list[Event]] = {}
    last_read: int | None = None  # if no other event came since, but waits for writes
    for event in trace.events:
        places.append(len(events))
        if isinstance(event, Transfer) and event.lane == READ:
            put_off[event.id] = [event]
            last_read = event.id
        elif isinstance(event, Await) and event.id in put_off:
            events += [*put_off.pop(event.id), event]
            last_read = None
        elif isinstance(event, Await) and last_read is not None:
            put_off[last_read].append(event)
        else:
            events.append(event)
            last_read = None
    return replace(trace, events=events, steps=[places[step] for step in trace.steps])


remembered = cache(run_rank)  # a trace has no seconds: one for all disks


@cache
def simulated(bandwidth: int, sequences: int, ahead: bool = True) -> Simulation:
    """Return a step on an H100 whose disk has so many GB/s; `ahead`: units are read ahead."""
    cluster = Cluster.parse("h100:1x1")
    disk = cluster.tiers["disk"]._replace(bandwidth=bandwidth * 1e9)
    cluster = replace(cluster, tiers={**cluster.tiers, "disk": disk})
    found = simulate(PLAN, CONFIG, cluster, batch=sequences, traces=remembered)
    if ahead:
        return found
    traces = [read_when_needed(trace) for trace in found.traces]
    return replace(found, traces=traces, replayed=found.replay_traces(traces, found.role_of))


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="offload_lanes",
        lesson="20",
        section="4",
        title=say("Device, host and disk during a step", "一步之中的设备、主机和磁盘"),
        predict=Prediction(
            say(
                "Everything lies on disk. A step gets four times as many tokens. Which part of it "
                "takes as long as before, however fast the disk is?",
                "全部放在磁盘上。一步的词元增加到四倍。无论磁盘快慢，哪一部分用时不变？",
            ),
            (say("forward", "前向"), say("backward", "反向"), say("the update", "更新")),
            2,
            say(
                "The update: its bytes and its computation depend on the number of parameters, not "
                "of tokens. Forward and backward compute longer, and hide more of their reads.",
                "更新：它的字节数和计算量取决于参数个数，与词元数无关。前向和反向的计算变长，读取就能"
                "掩盖得更多。",
            ),
        ),
        controls=(
            Control(say("disk, GB/s", "磁盘 (GB/s)"), tuple(map(str, BANDWIDTHS))),
            Control(say("sequences a step", "每步序列数"), tuple(map(str, SEQUENCES))),
            Control(
                say("a unit is read", "读取单元"),
                (say("ahead", "预读"), say("when needed", "用时才读")),
            ),
        ),
        size=(LEFT + WIDTH + 16, TOP + 6 * LANE + 28),
        picture=partial(_picture, say),
        start=(2, 0, 0),
    )


def _picture(say: Say, bandwidth_at: int, sequences_at: int, late: int) -> Picture:
    place = (BANDWIDTHS[bandwidth_at], SEQUENCES[sequences_at], not late)
    found = simulated(*place)
    (line,) = timelines(found, [0])
    picture = Picture(
        "python -c 'from minidist.site.live.offload_lanes import simulated; "
        f"print(simulated{place}.step_seconds)'"
    )
    scale = WIDTH / max(span.stop for span in line.spans)
    _draw_lanes(picture, say, line, scale)
    begins = phase_begins(line)
    parts = (say("forward", "前向"), say("backward", "反向"), say("update", "更新"))
    for begin, part in zip(begins, parts, strict=True):
        x = LEFT + begin * scale
        picture.line([(x, TOP - 6), (x, TOP + 6 * LANE)], "dashed")
        picture.text(x + 3, TOP - 10, part, "small soft")
    _draw_axis(picture, say, scale)
    seconds = np.diff([*begins, found.step_seconds])
    spent = [f"{1e3 * phase:.1f}" for phase in seconds]
    hidden = overlap.measure(line, of=overlap.moves).share
    picture.facts = [
        say(
            f"The step: {1e3 * found.step_seconds:.1f} ms: forward {spent[0]}, backward {spent[1]}, "
            f"update {spent[2]}.",
            f"一步 {1e3 * found.step_seconds:.1f} ms：前向 {spent[0]}，反向 {spent[1]}，更新 {spent[2]}。",
        ),
        say(
            f"{100 * hidden:.0f} % of the time of all moves is hidden behind computation.",
            f"搬运的时间有 {100 * hidden:.0f}% 被计算掩盖。",
        ),
    ]
    return picture


def phase_begins(line: Timeline) -> tuple[float, float, float]:
    """Return when forward, backward and update begin: the update with its first read, which comes
    when all gradients are on disk."""
    backward = [span for span in line.spans if span.name == "backward"]
    end = max(span.stop for span in backward)
    reads = [span.start for span in line.spans if span.name == f"move {READ}"]
    return 0.0, min(span.start for span in backward), min(start for start in reads if start >= end)


def _lanes(say: Say, line: Timeline) -> Iterator[tuple[str, list[tuple[Span, str]]]]:
    """Yield a lane's name, and its spans with their colors."""
    disk = say("disk", "磁盘")
    host = say("host", "主机")
    device = say("device", "设备")
    work = [(span, PHASES[span.name]) for span in line.spans if span.name in PHASES]
    yield device, [(span, color) for span, color in work if span.name != "optimizer"]
    yield host, [(span, color) for span, color in work if span.name == "optimizer"]
    names = (f"{disk} → {host}", f"{host} → {disk}", f"{host} → {device}", f"{device} → {host}")
    for name, (lane, color) in zip(names, MOVES.items(), strict=True):
        yield name, [(span, color) for span in line.spans if span.name == f"move {lane}"]


def _draw_lanes(picture: Picture, say: Say, line: Timeline, scale: float) -> None:
    """Draw when each lane works."""
    for row, (name, spans) in enumerate(_lanes(say, line)):
        y = TOP + row * LANE
        picture.text(LEFT - 8, y + 20, name, "end")
        picture.box(LEFT, y + 4, WIDTH, LANE - 10, "free")
        for span, color in spans:
            width = max((span.stop - span.start) * scale - 0.6, 0.8)
            picture.box(LEFT + span.start * scale, y + 4, width, LANE - 10, color)


def _draw_axis(picture: Picture, say: Say, scale: float) -> None:
    """Write milliseconds below the lanes."""
    y = TOP + 6 * LANE + 16
    for part in range(5):
        x = LEFT + WIDTH * part / 4
        text = f"{1e3 * WIDTH * part / 4 / scale:.0f}" + (" ms" if part == 4 else "")
        picture.text(x, y, text, "end small" if part == 4 else "middle small")
