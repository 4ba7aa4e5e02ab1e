"""Steps on a made-up clock: the spans that a timeline of DDP or ZeRO-3 would record, without a run,
in milliseconds."""

from collections.abc import Mapping, Sequence

from minidist.observe.timeline import Span, Timeline

LINE = "train.py:40"  # where buckets are asked for
FORWARD = 20.0
OPTIMIZER = 3.0
SCALAR = 0.5


def ddp_step(
    ready: Sequence[Sequence[float]],
    transfer: Sequence[float],
    backward: Sequence[float],
    *,
    wakes: Mapping[int, float] | None = None,
) -> list[Timeline]:
    """One step of ranks that reduce buckets behind backward; all times in ms, spans in seconds.

    Args:    ready: of each rank, when each bucket is asked for, from the step's begin. transfer: of
             each bucket alone.
             backward: when each rank's ends. wakes: rank -> by how much it goes on later after its
             last bucket.
    """
    ranks = range(len(ready))
    ends = []
    now = 0.0
    begins = []
    for number, alone in enumerate(transfer):
        begins.append(max(now, *(times[number] for times in ready)))
        now = begins[-1] + alone
        ends.append(now)
    waited = [max([backward[rank], *ends[-1:]]) + (wakes or {}).get(rank, 0.0) for rank in ranks]
    scalar = max(waited) + SCALAR
    return [
        _timeline(rank, ready[rank], begins, ends, backward[rank], waited[rank], scalar)
        for rank in ranks
    ]


def _timeline(
    rank: int,
    ready: Sequence[float],
    begins: Sequence[float],
    ends: Sequence[float],
    backward: float,
    waited: float,
    scalar: float,
) -> Timeline:
    timeline = Timeline(rank)

    def add(name: str, row: str, start: float, stop: float, **details: object) -> None:
        timeline.add(Span(name, row, start / 1e3, stop / 1e3, {"step": 0, **details}))

    add("forward", "compute", 0.0, FORWARD)
    add("backward", "compute", FORWARD, backward)
    now = backward
    for number, (asked, begin, end) in enumerate(zip(ready, begins, ends, strict=True)):
        add(
            f"bucket {number}",
            "communication",
            begin,
            end,
            axis="dp",
            verb="all_reduce",
            algorithm="ring",
            where=LINE,
            nbytes=1000,
            messages=2,
            group="a",
            sequence=number,
            queued=(begin - asked) / 1e3,
            blocking=False,
        )
        goes_on = waited if number == len(ready) - 1 else max(now, end)
        add(
            "wait",
            "waits",
            now,
            goes_on,
            axis="dp",
            group="a",
            sequence=number,
            where="train.py:50",
        )
        now = goes_on
    add("wait for gradients", "compute", backward, waited)
    add(
        "all_gather",
        "communication",
        waited,
        scalar,
        axis="control",
        verb="all_gather",
        algorithm="ring",
        where="train.py:60",
        nbytes=8,
        messages=1,
        group="a",
        sequence=len(ready),
        queued=0.0,
        blocking=True,
    )
    add("optimizer", "compute", scalar, scalar + OPTIMIZER)
    add("step", "compute", 0.0, scalar + OPTIMIZER)
    return timeline


def gathered_forward(
    work: Sequence[float], transfer: float, *, ahead: int, ranks: int = 2
) -> list[Timeline]:
    """A forward that gathers each unit's weights before its turn, `ahead` units ahead, as ZeRO-3
    does.

    Args:    work: of each unit, transfer: of any of them, in ms.
    """
    units = len(work)
    asked: dict[int, float] = {}
    spans = list[Span]()
    now = 0.0
    free = 0.0
    for unit in range(units):
        for other in range(unit, min(units, unit + ahead + 1)):
            if other not in asked:
                asked[other] = now
                begin = max(now, free)
                free = begin + transfer
                spans.append(
                    Span(
                        f"all_gather {other}",
                        "communication",
                        begin / 1e3,
                        free / 1e3,
                        {
                            "step": 0,
                            "axis": "dp",
                            "verb": "all_gather",
                            "algorithm": "ring",
                            "where": LINE,
                            "nbytes": 1000,
                            "messages": 1,
                            "group": "a",
                            "sequence": other,
                            "queued": (begin - now) / 1e3,
                            "blocking": False,
                        },
                    )
                )
        here = next(
            span
            for span in spans
            if span.name == f"all_gather {unit}" and span.row == "communication"
        )
        stop = max(now, here.stop * 1e3)
        spans.append(
            Span(
                "wait",
                "waits",
                now / 1e3,
                stop / 1e3,
                {"step": 0, "axis": "dp", "group": "a", "sequence": unit, "where": LINE},
            )
        )
        now = stop + work[unit]
    spans += [
        Span("forward", "compute", 0.0, now / 1e3, {"step": 0}),
        Span("step", "compute", 0.0, now / 1e3, {"step": 0}),
    ]
    timelines = [Timeline(rank) for rank in range(ranks)]
    for timeline in timelines:
        timeline.spans = list(spans)
    return timelines
