"""Chapter 24 · Cells: what one layer takes of a rank, in time and memory, by the very modules that train.

All layers of a GPT are alike. So one rank is run with one layer and with two, on arrays without data
(simulate/one_rank.py): the difference is a layer, what is left is embedding, output and loss. A cell depends on how the
layer is cut (tp, cp, ep, sequence parallel), on the sequences of a microbatch and on what is computed again, on nothing
else: a hundred thousand plans share some two hundred cells.

    cell = Cells(config, cluster).cell(Cut(tp=8, cp=1, ep=1, sequence=1, rows=1, recomputed=0))
    cell.layer.held                                 # bytes that a layer keeps for its backward
    seconds(cell.layer, price)["forward"]           # with what its calls take where the groups lie
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from minidist.nn import GPTConfig
from minidist.observe.events import Await, Busy, GroupCall, Memory, Start
from minidist.parallel.hybrid.plan import Plan
from minidist.plan.candidates import RECOMPUTED
from minidist.simulate.cluster import Cluster
from minidist.simulate.one_rank import run_rank
from minidist.simulate.rates import Rates
from minidist.simulate.trace import RankTrace

INNER = ("tp", "cp", "ep")
"""Axes whose calls stand inside a layer; those of the others follow from its bytes (estimate.py)."""
PHASES = ("forward", "backward")


class Cut(NamedTuple):
    """How a layer is cut."""

    tp: int
    cp: int
    ep: int
    sequence: int
    rows: int
    recomputed: int


class PhaseSeconds(NamedTuple):
    """Of forward or backward: of the rank's own kernels, and in which it stands still for an axis."""

    compute: float
    waits: dict[str, float]


Price = Callable[[GroupCall], float]
"""Seconds of a call."""


@dataclass(frozen=True)
class Cell:
    """One microbatch on one rank. Attributes, bytes and numbers of one and of two layers:

    traces      of the first step;  update: seconds of the optimizer for all of the rank's weights
    numbers     of weights;         held: bytes of activations at their most, with what works on them
    """

    traces: tuple[RankTrace, RankTrace]
    rates: Rates
    numbers: tuple[int, int]
    held: tuple[int, int]
    expert_numbers: int

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
        """Bytes at the peak beside the layers' own: the loss, and the insides of a layer computed again."""
        return self.held[0] - self.layer_held

    def seconds(self, price: Price) -> tuple[dict[str, PhaseSeconds], dict[str, PhaseSeconds]]:
        """Forward and backward of a layer, and of the ends."""
        one, two = (walk(trace, self.rates, price) for trace in self.traces)
        layer = {phase: _difference(two[phase], one[phase]) for phase in PHASES}
        return layer, {phase: _difference(one[phase], layer[phase]) for phase in PHASES}


class Cells:
    """Cells of a model on a cluster's device, each made when it is first asked for."""

    def __init__(self, config: GPTConfig, cluster: Cluster, rates: Rates, precision: str, optimizer: str) -> None:
        self.config, self.rates = config, rates
        self._kind, self._precision, self._optimizer = cluster.device.kind, precision, optimizer
        self._cells: dict[Cut, Cell] = {}

    def cell(self, cut: Cut) -> Cell:
        """The cell of a cut."""
        if cut not in self._cells:
            self._cells[cut] = self._run(cut)
        return self._cells[cut]

    def update_seconds(self) -> float:
        """Of the optimizer, for one weight: an element-wise pass over what it keeps."""
        traces = [self._trace(Cut(1, 1, 1, 0, 1, 0), layers, steps=2) for layers in (1, 2)]
        spent = [sum(self.rates.segment(trace.segments[event.work]) for event in trace.events[trace.steps[1]:]  # type: ignore[call-overload]
                     if isinstance(event, Busy) and event.name not in PHASES) for trace in traces]
        return (spent[1] - spent[0]) / (traces[1].parameters - traces[0].parameters)

    def _run(self, cut: Cut) -> Cell:
        one, two = self._trace(cut, 1), self._trace(cut, 2)
        experts = self.config.expert_numbers // self.config.layers // (cut.ep * cut.tp)
        return Cell((one, two), self.rates, (one.parameters, two.parameters), (working(one), working(two)), experts)

    def _trace(self, cut: Cut, layers: int, steps: int = 1) -> RankTrace:
        plan = Plan(tp=cut.tp, cp=cut.cp, ep=cut.ep, precision=self._precision, sequence_parallel=bool(cut.sequence),
                    checkpoint_blocks=RECOMPUTED[cut.recomputed])
        return run_rank(plan, replace(self.config, layers=layers), rows=cut.rows * cut.ep, steps=steps,
                        device_kind=self._kind, optimizer=self._optimizer)


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


def walk(trace: RankTrace, rates: Rates, price: Price) -> dict[str, PhaseSeconds]:
    """Forward and backward of a trace, its calls along INNER as they are awaited; messages of a ring meet their like."""
    clock, phase, ends, free = 0.0, PHASES[0], dict[int, float](), dict[str, float]()
    axis_of: dict[int, str] = {}
    compute = dict.fromkeys(PHASES, 0.0)
    waits: dict[str, dict[str, float]] = {name: {} for name in PHASES}
    for event in trace.events[trace.steps[0]:]:
        if isinstance(event, Busy):
            if event.name in PHASES:
                phase = event.name
                spent = rates.segment(trace.segments[event.work])           # type: ignore[call-overload]
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
    return PhaseSeconds(max(0.0, more.compute - less.compute),
                        {axis: max(0.0, spent - less.waits.get(axis, 0.0)) for axis, spent in more.waits.items()})
