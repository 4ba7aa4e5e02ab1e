"""`minidist bench overlap-step`: the share of a training step's communication that is hidden by
computation.

    delayed   over links that sleep α + n·β per message (comm/transports/throttled.py), like a
              network
    tcp       this machine as it is, where the cores that compute also move the bytes

ZeRO-3 is measured with its prefetch off and on. Contenders take turns round by round. Each turn
records its steps, and observe/overlap.py computes the share from the records of all ranks. `--why`
explains the step of median length of the round with the median share (observe/why.py).
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from minidist.bench.jobs import Job, answer, closed_at_the_end, start_workers, worker_arguments
from minidist.bench.overlap_plots import spans_of
from minidist.bench.step.ranks import Model, random_batch
from minidist.launch.membership import limit_blas_threads
from minidist.observe.overlap import Overlap, measure, together
from minidist.observe.step_record import record_step
from minidist.observe.timeline import Span, Timeline
from minidist.observe.why import typical_step, why

MODULE = "minidist.bench.overlap_step"
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
LINKS = ("delayed", "tcp")
MODEL = Model(layers=8, width=128, heads=4, context=128, batch=8)


@dataclass(frozen=True)
class Contender:
    """A strategy over a kind of link. `ahead`: the number of units that ZeRO-3 prefetches."""

    strategy: str
    link: str
    ahead: int | None = None

    @property
    def name(self) -> str:
        """The name for the table: "zero3, prefetch off, delayed"."""
        prefetch = {None: "", 0: ", prefetch off"}.get(self.ahead, ", prefetch on")
        return f"{self.strategy}{prefetch}, {self.link}"

    def arguments(self) -> list[str]:
        """Return the options for the worker's command line."""
        return [f"--link={self.link}", f"--ahead={1 if self.ahead is None else self.ahead}"]


@dataclass(frozen=True)
class OverlapStepRow:
    """The result of one contender: seconds per step and rank, and the hidden share, of the round
    with the median share; step_seconds: median over all rounds."""

    name: str
    strategy: str
    link: str
    ahead: int | None
    step_seconds: float
    communication: float
    hidden: float
    waited: float
    share: float
    steps: list[list[dict[str, Any]]] = field(default_factory=list)  # a step's spans, by rank
    why: dict[str, Any] | None = None  # the report of that step, if asked for
    # from what_if.py: change, predicted, measured
    what_if: list[dict[str, Any]] = field(default_factory=list)


def contenders(strategies: list[str], links: list[str]) -> list[Contender]:
    """Return each strategy over each link; ZeRO-3 twice, with prefetch off and on."""
    return [
        Contender(name, link, ahead)
        for link in links
        for name in strategies
        for ahead in ((0, 1) if name == "zero3" else (None,))
    ]


def measure_all(
    chosen: list[Contender],
    model: Model,
    ranks: int,
    rounds: int,
    steps: int,
    bucket_bytes: int,
    alpha: float,
    beta: float,
    progress: Callable[[str], None],
    *,
    explain: bool = False,
) -> list[OverlapStepRow]:
    """Return a row for each contender; they take turns within every round. Args: explain: add the
    report of a step."""
    jobs: list[Job] = []
    answers: list[list[list[dict[str, Any]]]] = [[] for _ in chosen]
    with closed_at_the_end(jobs):
        for contender in chosen:
            progress(f"starting {contender.name}")
            jobs.append(
                start_workers(
                    MODULE,
                    contender.strategy,
                    ranks,
                    [
                        *contender.arguments(),
                        *model.arguments(),
                        f"--bucket={bucket_bytes}",
                        f"--alpha={alpha!r}",
                        f"--beta={beta!r}",
                        *(["--why"] if explain else []),
                    ],
                )
            )
        for number in range(rounds):
            for contender, job, rounds_of in zip(chosen, jobs, answers, strict=True):
                progress(f"round {number + 1} of {rounds}: {contender.name}")
                rounds_of.append(job.ask(steps=steps))
    return [_row(contender, of_it, steps) for contender, of_it in zip(chosen, answers, strict=True)]


def _row(contender: Contender, rounds: list[list[dict[str, Any]]], steps: int) -> OverlapStepRow:
    """Return the row of a contender: the median share over rounds, with the times of that round."""
    jobs = [together([Overlap(**rank["overlap"]) for rank in ranks]) for ranks in rounds]
    middle = sorted(range(len(jobs)), key=lambda index: jobs[index].share)[len(jobs) // 2]
    each = steps * len(rounds[middle])
    overlap = jobs[middle]
    slowest = [
        max(times)
        for ranks in rounds
        for times in zip(*(rank["seconds"] for rank in ranks), strict=True)
    ]
    row = OverlapStepRow(
        contender.name,
        contender.strategy,
        contender.link,
        contender.ahead,
        statistics.median(slowest),
        overlap.communication / each,
        overlap.hidden / each,
        overlap.waited / each,
        overlap.share,
        [rank["spans"] for rank in rounds[middle]],
    )
    return explained(row) if rounds[middle][0]["explains"] else row


def explained(row: OverlapStepRow) -> OverlapStepRow:
    """Return the row with only the step of median length, and its report."""
    timelines = timelines_of(row.steps)
    step = typical_step(timelines)
    return replace(
        row,
        steps=[[asdict(span) for span in spans_of_step(timeline, step)] for timeline in timelines],
        why={"step": step, **why(record_step(timelines, step))},
    )


def timelines_of(steps: list[list[dict[str, Any]]]) -> list[Timeline]:
    """Return timelines from each rank's spans in JSON."""
    timelines = [Timeline(rank) for rank in range(len(steps))]
    for timeline, spans in zip(timelines, steps, strict=True):
        timeline.spans = spans_of(spans)
    return timelines


def spans_of_step(timeline: Timeline, first: int, last: int | None = None) -> list[Span]:
    """Return the spans in the steps from first to last (default: only first), without messages."""
    steps = {span.details["step"]: span for span in timeline.spans if span.name == "step"}
    start = steps[first].start
    stop = steps[first if last is None else last].stop
    return [
        span
        for span in timeline.spans
        if span.row != "messages" and span.stop > start and span.start < stop
    ]


# ---------------------------------------------------------------------------------- the ranks' side


def make_strategy(
    name: str, model: Any, group: Any, *, bucket_bytes: int, ahead: int, recorder: Any
) -> Any:
    """Return the strategy called `name`, for `model` over `group`."""
    from minidist.parallel.data.ddp import DDP
    from minidist.parallel.zero.zero1 import Zero1
    from minidist.parallel.zero.zero2 import Zero2
    from minidist.parallel.zero.zero3 import Zero3

    if name == "zero3":
        return Zero3(model, group, ahead=ahead, recorder=recorder)
    makers: dict[str, Any] = {"ddp": DDP, "zero1": Zero1, "zero2": Zero2}
    return makers[name](model, group, bucket_bytes=bucket_bytes, recorder=recorder)


def recorded_steps(
    group: Any, name: str, model: Model, bucket_bytes: int, ahead: int, *, explain: bool = False
) -> Callable[..., Any]:
    """Return a function that makes `steps` steps and returns their seconds, their overlap, and the
    spans of the last step.

    Args:    explain: follow waits, and return the spans of all steps.
    """
    from minidist.nn import GPT
    from minidist.optim import AdamW

    network = GPT(model.config())
    network.initialize(0)
    timeline = Timeline(group.rank)
    timeline.follow(group.ledger, waits=explain)
    strategy = make_strategy(
        name, network, group, bucket_bytes=bucket_bytes, ahead=ahead, recorder=timeline
    )
    optimizer = AdamW(strategy.parameters, 1e-3)
    batch = random_batch(model.vocab, model.batch * group.size, model.context)

    def take(steps: int) -> dict[str, Any]:
        timeline.spans.clear()
        seconds = []
        # the first step, which gathers the last round's update, does not count
        for step in range(steps + 1):
            start = time.perf_counter()
            with timeline.span("step", step=step):
                strategy.step(batch, optimizer)
            seconds.append(time.perf_counter() - start)
        spans = [asdict(span) for span in spans_of_step(timeline, 1 if explain else steps, steps)]
        return {
            "seconds": seconds[1:],
            "overlap": asdict(measure(timeline, steps=range(1, steps + 1))),
            "spans": spans,
            "explains": explain,
        }

    return take


@contextmanager
def linked(world: Any, link: str, alpha: float, beta: float) -> Iterator[Any]:
    """Yield the world's group over links of the kind `link`."""
    from minidist.comm.transports.throttled import delayed

    if link == "delayed":
        with delayed(world, alpha=alpha, beta=beta) as slow:
            yield slow
    else:
        yield world


def main() -> None:
    """Run as one rank of a contender."""
    import minidist as md

    parser = worker_arguments()
    parser.add_argument("--link", choices=LINKS, required=True)
    for option, kind in (("bucket", int), ("ahead", int), ("alpha", float), ("beta", float)):
        parser.add_argument(f"--{option}", type=kind, required=True)
    parser.add_argument("--why", action="store_true")
    Model.add_options(parser)
    options = parser.parse_args()
    model = Model.of(options)
    limit_blas_threads(1, local_size=1)
    world = md.init(transport="tcp", threads=1)
    with linked(world, options.link, options.alpha, options.beta) as group:
        answer(
            options.meet,
            world.rank,
            recorded_steps(
                group, options.contender, model, options.bucket, options.ahead, explain=options.why
            ),
        )


if __name__ == "__main__":
    main()
