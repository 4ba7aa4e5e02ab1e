"""Chapter 24 · Cells: time and memory of one layer on one rank, recorded from the modules that
train.

All layers of a GPT are equal. So one rank runs with one layer and with two layers, on arrays
without data (simulate/one_rank.py): the difference is a layer; the rest is embedding, output and
loss (the ends). A cell depends only on how the layer is cut (tp, cp, ep, sequence parallel) and on
the sequences of a microbatch: a hundred thousand plans share about two hundred cells.

    cell = Cells(config, cluster, rates).cell(Cut(tp=8, cp=1, ep=1, sequence=1, rows=1))
    cell.layer_held                                 # bytes that a layer keeps for its backward
    layer, ends = cell.seconds(price)               # price(call): seconds of a call on the cluster
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
from minidist.simulate.trace import Kernel, RankTrace, Segment

INNER = ("tp", "cp", "ep")
"""Axes with calls inside a layer; the calls of other axes follow from its bytes (estimate.py)."""
PHASES = ("forward", "backward")
SPLIT = ("backward", "backward for the weights")
"""The two halves of a backward of zb-h1 and zb-v."""
MANY = 1 << 28  # weights of one kernel: with so many its launch does not count
NARROW = GPTConfig(vocabulary=512, context=64, layers=2, width=512, heads=8)


class Cut(NamedTuple):
    """The division of a layer: sizes of axes, whether sequence parallel, sequences per
    microbatch."""

    tp: int
    cp: int
    ep: int
    sequence: int
    rows: int


class PhaseSeconds(NamedTuple):
    """Seconds of forward or backward: of the rank's own kernels, and of its waits by axis."""

    compute: float
    waits: dict[str, float]


Price = Callable[[GroupCall], float]
"""Seconds of a call."""


@dataclass(frozen=True)
class Cell:
    """A microbatch on one rank. Attributes, the first four as pairs for models of one and of two
    layers:

    traces      of the first step
    numbers     number of weights
    held        largest bytes of activations and workspace
    after       bytes of activations and workspace between forward and backward
    inner       bytes at the peak in addition to what a stage without ends keeps; the same if layers
                are recomputed: then a whole layer

    and, if layers are recomputed:

    kept        bytes that a layer keeps; bytes at the peak in addition to these of all layers: the
                loss, or a layer at its backward
    """

    traces: tuple[RankTrace, RankTrace]
    rates: Rates
    numbers: tuple[int, int]
    held: tuple[int, int]
    after: tuple[int, int]
    inner: tuple[int, int]
    kept: tuple[int, int]

    @property
    def layer_numbers(self) -> int:
        """Number of weights of a layer."""
        return self.numbers[1] - self.numbers[0]

    @property
    def ends_numbers(self) -> int:
        """Number of weights of the embedding and the output."""
        return self.numbers[0] - self.layer_numbers

    @property
    def layer_held(self) -> int:
        """Bytes that a layer keeps for its backward."""
        return self.held[1] - self.held[0]

    @property
    def ends_held(self) -> int:
        """Bytes at the peak in addition to layer_held of the layers: the loss."""
        return self.held[0] - self.layer_held

    @property
    def ends_after(self) -> int:
        """Return the bytes that the loss keeps from its forward to its backward."""
        return 2 * self.after[0] - self.after[1]

    @property
    def layer_kept(self) -> int:
        """Bytes that a layer keeps if backward recomputes it."""
        return self.kept[0]

    @property
    def ends_kept(self) -> int:
        """Bytes at the peak in addition to layer_kept of the layers: the loss, or a recomputed
        layer with its gradients."""
        return self.kept[1]

    @cached_property
    def _busy(self) -> list[list[float]]:
        """Seconds of each segment of both traces; they do not depend on the places of the
        groups."""
        return [
            [self.rates.segment(segment) for segment in trace.segments] for trace in self.traces
        ]

    @cached_property
    def launching(self) -> dict[str, float]:
        """Seconds in which the host launches a layer's forward, its backward, and the ends."""
        one, two = (
            {phase: spent_in(trace, [phase], self.rates.issue) for phase in PHASES}
            for trace in self.traces
        )
        layer = {phase: two[phase] - one[phase] for phase in PHASES}
        ends = fsum(one.values()) - fsum(layer.values())
        return {f"launch {phase}": layer[phase] for phase in PHASES} | {"launch ends": ends}

    def seconds(self, price: Price) -> tuple[dict[str, PhaseSeconds], dict[str, PhaseSeconds]]:
        """Return the seconds of forward and backward: of a layer, and of the ends."""
        one, two = (
            walk(trace, busy, price) for trace, busy in zip(self.traces, self._busy, strict=True)
        )
        layer = {phase: _difference(two[phase], one[phase]) for phase in PHASES}
        return layer, {phase: _difference(one[phase], layer[phase]) for phase in PHASES}


class Late(NamedTuple):
    """A layer on the last stage of zb-h1, which defers its weight backwards.

    held: bytes of activations at the peak, with one microbatch deferred and one in work; more: for
    each further deferred microbatch; both (of a layer, of the ends).
    share: seconds of the weight backward / seconds of the whole backward, without waits.
    """

    held: tuple[float, float]
    more: tuple[float, float]
    share: float


@lru_cache(maxsize=4096)
def _run_once(
    plan: Plan, config: GPTConfig, rank: int, rows: int, steps: int, kind: str, optimizer: str
) -> RankTrace:
    """Return a rank's trace from the cache; it does not depend on cluster or rates."""
    return run_rank(
        plan, config, rank, rows=rows, steps=steps, device_kind=kind, optimizer=optimizer
    )


class Cells:
    """The cells of a model on a cluster's device; each is made at its first use."""

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
        self._rows: dict[Cut, tuple[int, int, int, int]] = {}
        self._late: dict[tuple[int, int], Late] = {}
        self._calls: dict[tuple[int, int], tuple[Counter[GroupCall], Counter[GroupCall]]] = {}

    def cell(self, cut: Cut) -> Cell:
        """Return the cell of a cut."""
        if cut not in self._cells:
            self._cells[cut] = self._run(cut)
        return self._cells[cut]

    def data_calls(self, tp: int, zero: int) -> tuple[Counter[GroupCall], Counter[GroupCall]]:
        """Return the calls along the data axis in a step of two ranks: of a layer, and of the
        ends."""
        if (tp, zero) not in self._calls:
            one, two = (
                Counter(
                    event.call._replace(name="")
                    for event in self._two_ranks(tp, zero, layers).events
                    if isinstance(event, Start) and event.call.axis == "dp"
                )
                for layers in (1, 2)
            )
            self._calls[tp, zero] = _by_layer(one, two)
        return self._calls[tp, zero]

    def data_kernels(self, tp: int, zero: int, *, launched: bool = False) -> tuple[float, float]:
        """Return the seconds of the kernels that a ZeRO stage adds to a pass (it places weights,
        and forgets them), in a layer and in the ends; launched: the host's for all kernels of the
        data axis."""
        if zero < 2 and not launched:
            return 0.0, 0.0
        names = (*PHASES, "step", "wait for gradients")
        seconds = self.rates.issue if launched else self.rates.segment
        without = Plan(tp=tp, precision=self._precision)
        one, two = (
            spent_in(self._two_ranks(tp, zero, layers), names, seconds)
            - spent_in(
                self._run_plan(without, layers, 1) if launched else self._two_ranks(tp, 0, layers),
                names,
                seconds,
            )
            for layers in (1, 2)
        )
        return max(0.0, two - one), max(0.0, 2 * one - two)

    def _two_ranks(self, tp: int, zero: int, layers: int) -> RankTrace:
        plan = Plan(dp=2, tp=tp, zero=zero, precision=self._precision)
        return self._run_plan(plan, layers, 2)

    def pass_seconds(self, nbytes: float) -> float:
        """Return the seconds per weight of a pass that reads and writes `nbytes` of each weight."""
        kernel = Kernel("memory", "float32", 0.0, nbytes * MANY)
        return self.rates.segment(((kernel, 1),)) / MANY

    def late(self, tp: int, sequence: int) -> Late:
        """Return Late for one sequence per microbatch; other divisions of the tokens divide it,
        too.

        The last rank of three stages defers one microbatch more than the last of two. Recomputation
        changes nothing, because a deferred backward keeps all recomputed activations.
        """
        if (tp, sequence) not in self._late:
            traces = [
                [self._last_stage(tp, sequence, stages, layers) for stages in (2, 3)]
                for layers in (1, 2)
            ]
            one, two = ([working(trace) for trace in pair] for pair in traces)
            held = two[0] - one[0]
            more = two[1] - two[0] - (one[1] - one[0])
            weights, whole = (
                spent_in(traces[1][0], names, self.rates.segment)
                - spent_in(traces[0][0], names, self.rates.segment)
                for names in (("backward for the weights",), SPLIT)
            )
            self._late[tp, sequence] = Late(
                (held, one[0] - held), (more, one[1] - one[0] - more), weights / whole
            )
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
        """Return the optimizer's seconds per weight: an element-wise pass over its state; with
        `offload` on the host.

        A host updates block by block, and all blocks are equal: there a narrow model has the same
        seconds per weight.
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
        kept, ends, *inner = (cut.rows * nbytes for nbytes in self._a_row(cut._replace(rows=1)))
        return Cell(
            (one, two),
            self.rates,
            (one.parameters, two.parameters),
            (working(one), working(two)),
            (after_forward(one), after_forward(two)),
            (inner[0], inner[1]),
            (kept, ends),
        )

    def _a_row(self, cut: Cut) -> tuple[int, int, int, int]:
        """Return Cell.kept and inner for one sequence per microbatch. They are equal for each ep >=
        2, as the layer's input is."""
        shared = cut._replace(ep=min(cut.ep, 2))
        if shared not in self._rows:
            one, two = (self._trace(cut, layers, again=True) for layers in (1, 2))
            layer = after_forward(two) - after_forward(one)
            # the middle one of three stages, with one layer and one microbatch
            plain, again = (
                self._trace(cut, 3, again=again, stages=3, rank=cut.cp * cut.tp)
                for again in (False, True)
            )
            self._rows[shared] = (
                layer,
                working(two) - 2 * layer,
                working(plain) - after_forward(plain),
                working(again) - layer,
            )
        return self._rows[shared]

    def _trace(
        self,
        cut: Cut,
        layers: int,
        steps: int = 1,
        again: bool = False,
        stages: int = 1,
        rank: int = 0,
    ) -> RankTrace:
        plan = Plan(
            pp=stages,
            microbatches=1 if stages > 1 else None,
            tp=cut.tp,
            cp=cut.cp,
            ep=cut.ep,
            precision=self._precision,
            sequence_parallel=bool(cut.sequence),
            checkpoint_blocks="all" if again else "none",
        )
        return self._run_plan(plan, layers, cut.rows * cut.ep, steps, rank)

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


def spent_in(trace: RankTrace, names: Sequence[str], seconds: Callable[[Segment], float]) -> float:
    """Return the seconds of the segments with these names."""
    return fsum(
        seconds(trace.segments[event.work])  # type: ignore[call-overload]
        for event in trace.events
        if isinstance(event, Busy) and event.name in names
    )


def working(trace: RankTrace) -> int:
    """Return the largest bytes of activations and workspace, before the optimizer."""
    now = most = 0
    for event in trace.events:
        if isinstance(event, Memory) and event.category in ("activations", "workspace"):
            now += event.nbytes
        elif isinstance(event, Busy) and event.name == "optimizer":
            break
        else:  # all that a segment's peak consists of has been told
            most = max(most, now)
    return most


def after_forward(trace: RankTrace) -> int:
    """Return the bytes of activations and workspace when the first forward has ended."""
    now = found = 0
    for event in trace.events:
        if isinstance(event, Memory) and event.category in ("activations", "workspace"):
            now += event.nbytes
        elif isinstance(event, Busy) and event.name == "forward":
            found = now
        elif isinstance(event, Busy) and event.name == "backward":
            break
    return found


def _beside_phases(trace: RankTrace) -> Iterator[Any]:
    """Yield the segments of the last step that are outside forward and backward."""
    for event in trace.events[trace.steps[1] :]:
        if isinstance(event, Busy) and event.name not in PHASES:
            yield event.work


def walk(trace: RankTrace, seconds: Sequence[float], price: Price) -> dict[str, PhaseSeconds]:
    """Return the seconds of forward and backward of a trace, with its waits for calls along INNER.

    All ranks of a ring do the same, so a message is assumed to find its peer ready.

    Args:    seconds: of each segment of the trace.
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


def _by_layer(
    one: Counter[GroupCall], two: Counter[GroupCall]
) -> tuple[Counter[GroupCall], Counter[GroupCall]]:
    """Return the calls of a layer and of the ends, from those of models of one and of two layers.

    A call that is larger in the second, and not one more, is of a bucket with room for several
    layers: the layer's part of it counts as a call.
    """
    layer = two - one
    ends = one - layer
    grown = {call._replace(nbytes=0): call for call in layer}
    before = {call._replace(nbytes=0): call for call in one - two}
    if grown.keys() == before.keys() and layer.total() == (one - two).total() == len(grown):
        for kind, call in before.items():
            part = grown[kind].nbytes - call.nbytes
            layer[grown[kind]._replace(nbytes=part)] += layer.pop(grown[kind])
            ends[call._replace(nbytes=max(0, call.nbytes - part))] += ends.pop(call)
    return layer, ends


def _difference(more: PhaseSeconds, less: PhaseSeconds) -> PhaseSeconds:
    return PhaseSeconds(
        max(0.0, more.compute - less.compute),
        {axis: max(0.0, spent - less.waits.get(axis, 0.0)) for axis, spent in more.waits.items()},
    )
