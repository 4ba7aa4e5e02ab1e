"""Chapter 24 · Simulated ranks as the timelines of chapter 25: the same file opens at
https://ui.perfetto.dev."""

from collections.abc import Iterator, Sequence

from minidist.observe.events import Busy, GroupCall
from minidist.observe.stations import Station
from minidist.observe.timeline import Span, Timeline
from minidist.observe.tracks import BUSY
from minidist.simulate.results import Simulation

ROW_OF = {"collective": "communication", "send": "messages", "move": "moves"}


def timelines(found: Simulation, ranks: Sequence[int]) -> list[Timeline]:
    """Return the last step of these ranks; a second of the clock is a second of the timeline, from
    the step's beginning."""
    made = []
    for rank in ranks:
        timeline = Timeline(rank, limit=1 << 40)
        timeline.spans = sorted(_spans(found, rank), key=lambda span: span.stop)
        made.append(timeline)
    return made


def _spans(found: Simulation, rank: int) -> Iterator[Span]:
    """Yield work, calls, sent messages and moves of a rank that end in the step."""
    track = found.replayed.track(rank)
    times = found.replayed.times(rank)
    stations = found.replayed.stations_of(rank)
    for place, (kind, slot, _) in enumerate(track.ops):
        start = times[place] - found.begin
        stop = times[place + 1] - found.begin
        if kind == BUSY and stop > max(0.0, start):
            work: Busy = track.works[slot]
            yield Span(work.name, "compute", max(0.0, start), stop, {"microbatch": work.micro})
    for each, station in zip(track.slots, stations, strict=True):
        if each.kind in ROW_OF:
            yield from _calls(found, station, ROW_OF[each.kind])


def _calls(found: Simulation, station: Station, row: str) -> Iterator[Span]:
    """Return what a station runs in the step."""
    for job, begin, end in zip(station.jobs, station.begins, station.ends, strict=True):
        if end <= found.begin or begin >= found.end:
            continue
        start = max(0.0, begin - found.begin)
        stop = min(end, found.end) - found.begin
        if isinstance(job, GroupCall):
            name = f"{job.verb} {job.name or job.axis}" + (
                f" to rank {station.group[1]}" if job.verb == "send" else ""
            )
            yield Span(
                name,
                row,
                start,
                stop,
                {"axis": job.axis, "algorithm": job.algorithm, "nbytes": job.nbytes},
            )
        else:
            yield Span(f"move {job.lane}", row, start, stop, {"nbytes": job.nbytes})
