"""Chapter 24 · Cells: what one layer takes of a rank, in time and memory, by the very modules that
train.

All layers of a GPT are alike. So one rank is run with one layer and with two, on arrays without
data (simulate/one_rank.py): the difference is a layer, what is left is embedding, output and loss.
A cell depends on how the layer is cut (tp, cp, ep, sequence parallel) and on the sequences of a
microbatch, on nothing else: a hundred thousand plans share some two hundred cells.

    cell = Cells(config, cluster, rates).cell(Cut(tp=8, cp=1, ep=1, sequence=1, rows=1))
    cell.layer_held                                 # bytes that a layer keeps for its backward
    layer, ends = cell.seconds(price)               # with what its calls take where the groups lie
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import fsum
from typing import Any, NamedTuple

from minidist.nn import GPTConfig
from minidist.observe.events import Await, Busy, GroupCall, Memory, Start
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.cluster import Cluster
from minidist.simulate.one_rank import run_rank
from minidist.simulate.rates import Rates
from minidist.simulate.trace import RankTrace

INNER = ("tp", "cp", "ep")
"""Axes whose calls stand inside a layer; those of the others follow from its bytes
(estimate.py)."""
PHASES = ("forward", "backward")
NARROW = GPTConfig(vocabulary=512, context=64, layers=2, width=512, heads=8)


class Cut(NamedTuple):
    """How a layer is cut."""

    tp: int
    cp: int
    ep: int
    sequence: int
    rows: int


class PhaseSeconds(NamedTuple):
    """Of forward or backward: of the rank's own kernels, and in which it stands still for an
    axis."""

    compute: float
    waits: dict[str, float]


Price = Callable[[GroupCall], float]
"""Seconds of a call."""


@dataclass(frozen=True)
class Cell:
    """One microbatch on one rank. Attributes, bytes and numbers of one and of two layers:

    traces      of a first step
    numbers     of weights
    held, kept  bytes of activations at their most, with what works on them; kept: if a layer is
                computed again
    """

    traces: tuple[RankTrace, RankTrace]
    rates: Rates
    numbers: tuple[int, int]
    held: tuple[int, int]
    kept: tuple[int, int]

    @property
    def layer_numbers(self) -> int:
        """Weights of a layer."""
        return self.numbers[1] - self.numbers[0]

    @property
    def ends_numbers(self) -> int:
        """Weights of the embedding and the output."""
        return self.numbers[0] - self.layer_numbers

    @property
    def layer_held(self) -> int:
        """Bytes that a layer keeps for its backward."""
        return self.held[1] - self.held[0]

    @property
    def ends_held(self) -> int:
        """Bytes at the peak beside the layers' own: the loss, and the insides of a layer computed
        again."""
        return self.held[0] - self.layer_held

    @property
    def layer_kept(self) -> int:
        """Bytes that a layer keeps if backward computes it again."""
        return self.kept[1] - self.kept[0]

    @property
    def ends_kept(self) -> int:
        """Bytes at the peak beside these: the loss, or a layer that is computed again, with its
        gradients."""
        return self.kept[0] - self.layer_kept

    @cached_property
    def _busy(self) -> list[list[float]]:
        """Seconds of each segment of both traces: wherever the groups lie, kernels take as long."""
        return [
            [self.rates.segment(segment) for segment in trace.segments] for trace in self.traces
        ]

    def seconds(self, price: Price) -> tuple[dict[str, PhaseSeconds], dict[str, PhaseSeconds]]:
        """Forward and backward of a layer, and of the ends."""
        one, two = (
            walk(trace, busy, price) for trace, busy in zip(self.traces, self._busy, strict=True)
        )
        layer = {phase: _difference(two[phase], one[phase]) for phase in PHASES}
        return layer, {phase: _difference(one[phase], layer[phase]) for phase in PHASES}


class Late(NamedTuple):
    """Bytes of activations of the last stage of zb-h1, which defers its backwards for the weights:
    one number each for a layer, and for the ends.

    held: at their most with one microbatch deferred and one at work; more: each further one that is
    deferred.
    """

    held: tuple[float, float]
    more: tuple[float, float]


@lru_cache(maxsize=4096)
def _run_once(
    plan: Plan, config: GPTConfig, rank: int, rows: int, steps: int, kind: str, optimizer: str
) -> RankTrace:
    """A rank's trace knows no cluster: other clusters and rates ask for the same one."""
    return run_rank(
        plan, config, rank, rows=rows, steps=steps, device_kind=kind, optimizer=optimizer
    )


class Cells:
    """Cells of a model on a cluster's device, each made when it is first asked for."""

    def __init__(
        self,
        config: GPTConfig,
        cluster: Cluster,
        rates: Rates,
        precision: str = "bf16",
        optimizer: str = "adamw",
    ) -> None:
        self.config = config
        self.rates = rates
        self._kind = cluster.device.kind
        self._precision = precision
        self._optimizer = optimizer
        self._cells: dict[Cut, Cell] = {}
        self._keeps: dict[Cut, tuple[int, int]] = {}
        self._late: dict[tuple[int, int], Late] = {}
        self._calls: dict[tuple[int, int], tuple[Counter[GroupCall], Counter[GroupCall]]] = {}

    def cell(self, cut: Cut) -> Cell:
        """The cell of a cut."""
        if cut not in self._cells:
            self._cells[cut] = self._run(cut)
        return self._cells[cut]

    def data_calls(self, tp: int, zero: int) -> tuple[Counter[GroupCall], Counter[GroupCall]]:
        """Calls along the data axis in a step of two ranks: of a layer, and of the ends."""
        if (tp, zero) not in self._calls:
            plan = Plan(dp=2, tp=tp, zero=zero, precision=self._precision)
            one, two = (
                Counter(
                    event.call._replace(name="")
                    for event in self._run_plan(plan, layers, 2).events
                    if isinstance(event, Start) and event.call.axis == "dp"
                )
                for layers in (1, 2)
            )
            layer = two - one
            self._calls[tp, zero] = layer, one - layer
        return self._calls[tp, zero]

    def late(self, tp: int, sequence: int) -> Late:
        """Of one sequence a microbatch. What else divides the tokens divides it, too.

        The last rank of three stages defers one microbatch more than that of two; computing again
        changes nothing, because what is deferred keeps all that it computed again.
        """
        if (tp, sequence) not in self._late:
            one, two = (
                [working(self._last_stage(tp, sequence, stages, layers)) for stages in (2, 3)]
                for layers in (1, 2)
            )
            held = two[0] - one[0]
            more = two[1] - two[0] - (one[1] - one[0])
            self._late[tp, sequence] = Late((held, one[0] - held), (more, one[1] - one[0] - more))
        return self._late[tp, sequence]

    def _last_stage(self, tp: int, sequence: int, stages: int, layers: int) -> RankTrace:
        plan = Plan(
            pp=stages,
            tp=tp,
            precision=self._precision,
            sequence_parallel=bool(sequence),
            schedule="zb-h1",
            microbatches=stages,
        )
        return self._run_plan(plan, stages * layers, stages, rank=(stages - 1) * tp)

    def update_seconds(self, *, offload: str = "none") -> float:
        """Of the optimizer, for one weight: an element-wise pass over what it keeps; with `offload`
        on the host.

        A host makes it block by block, and all blocks are alike: there a narrow model has the same
        seconds a weight.
        """
        plan = Plan(precision=self._precision, offload=offload)
        config = self.config if offload == "none" else NARROW
        traces = [self._run_plan(plan, layers, 1, 2, config=config) for layers in (1, 2)]
        spent = [
            fsum(self.rates.segment(trace.segments[work]) for work in _beside_phases(trace))
            for trace in traces
        ]
        return (spent[1] - spent[0]) / (traces[1].parameters - traces[0].parameters)

    def _run(self, cut: Cut) -> Cell:
        one = self._trace(cut, 1)
        two = self._trace(cut, 2)
        kept = self._kept(cut._replace(rows=1))
        return Cell(
            (one, two),
            self.rates,
            (one.parameters, two.parameters),
            (working(one), working(two)),
            (kept[0] * cut.rows, kept[1] * cut.rows),
        )

    def _kept(self, cut: Cut) -> tuple[int, int]:
        """As Cell.kept, of one sequence a microbatch: the same for each ep from 2 on, as a layer's
        input is."""
        shared = cut._replace(ep=min(cut.ep, 2))
        if shared not in self._keeps:
            self._keeps[shared] = (
                working(self._trace(cut, 1, again=True)),
                working(self._trace(cut, 2, again=True)),
            )
        return self._keeps[shared]

    def _trace(self, cut: Cut, layers: int, steps: int = 1, again: bool = False) -> RankTrace:
        plan = Plan(
            tp=cut.tp,
            cp=cut.cp,
            ep=cut.ep,
            precision=self._precision,
            sequence_parallel=bool(cut.sequence),
            checkpoint_blocks="all" if again else "none",
        )
        return self._run_plan(plan, layers, cut.rows * cut.ep, steps)

    def _run_plan(
        self,
        plan: Plan,
        layers: int,
        rows: int,
        steps: int = 1,
        rank: int = 0,
        config: GPTConfig | None = None,
    ) -> RankTrace:
        return _run_once(
            plan,
            replace(config or self.config, layers=layers),
            rank,
            rows,
            steps,
            self._kind,
            self._optimizer,
        )


def working(trace: RankTrace) -> int:
    """Bytes of activations, and of arrays that work on them, at their most."""
    now = most = 0
    for event in trace.events:
        if isinstance(event, Memory) and event.category in ("activations", "workspace"):
            now += event.nbytes
            most = max(most, now)
        elif isinstance(event, Busy) and event.name == "optimizer":
            break
    return most


def _beside_phases(trace: RankTrace) -> Iterator[Any]:
    """Yield the work of the last step outside forward and backward: the places of its segments."""
    for event in trace.events[trace.steps[1] :]:
        if isinstance(event, Busy) and event.name not in PHASES:
            yield event.work


def walk(trace: RankTrace, seconds: Sequence[float], price: Price) -> dict[str, PhaseSeconds]:
    """Forward and backward of a trace, its calls along INNER as they are awaited; a ring's messages
    meet their like.

    Args:    seconds: of each of its segments.
    """
    clock = 0.0
    phase = PHASES[0]
    ends = dict[int, float]()
    free = dict[str, float]()
    axis_of: dict[int, str] = {}
    compute = dict.fromkeys(PHASES, 0.0)
    waits: dict[str, dict[str, float]] = {name: {} for name in PHASES}
    for event in trace.events[trace.steps[0] :]:
        if isinstance(event, Busy):
            if event.name in PHASES:
                phase = event.name
                spent = seconds[event.work]  # type: ignore[call-overload]
                compute[phase] += spent
                clock += spent
        elif isinstance(event, Start) and event.call.axis in INNER:
            call = event.call
            lane = f"{call.axis} {call.verb}" if call.verb in ("send", "recv") else call.axis
            ends[event.id] = free[lane] = max(clock, free.get(lane, 0.0)) + price(call)
            axis_of[event.id] = call.axis
        elif isinstance(event, Await) and event.id in ends:
            waited = max(0.0, ends[event.id] - clock)
            clock += waited
            axis = axis_of[event.id]
            waits[phase][axis] = waits[phase].get(axis, 0.0) + waited
    return {name: PhaseSeconds(compute[name], waits[name]) for name in PHASES}


def _difference(more: PhaseSeconds, less: PhaseSeconds) -> PhaseSeconds:
    return PhaseSeconds(
        max(0.0, more.compute - less.compute),
        {axis: max(0.0, spent - less.waits.get(axis, 0.0)) for axis, spent in more.waits.items()},
    )
