"""Chapter 16 · ZeRO-3 (FSDP): parameters too are divided; weights are fetched before use and freed
after.

The idea. A rank keeps its chunk of every weight and nothing else. The model is cut into units (a
block, an embedding); a unit's weights are gathered before it runs, and freed when it has run;
gathered again before its backward; and when its gradients are final, these are reduce-scattered and
both freed. Meanwhile the next one's weights are on their way:

    compute                | forward 1 | 2        | 3 |          | backward 3 | 2                  | 1        |
    communicate   gather 1 | gather 2  | gather 3 |   | gather 3 | gather 2   | gather 1, reduce 3 | reduce 2 | reduce 1
    units held    1        | 1, 2      | 2, 3     | 3 | 3        | 3, 2       | 2, 1               | 1        |

What each rank holds, Ψ parameters in float32 with Adam (K = 8) on P ranks:

                 DDP     ZeRO-2        ZeRO-3, each rank
    parameters   4Ψ      4Ψ            4Ψ/P, and the unit at work and those gathered early: together
                                       at most (1 + ahead) × the largest unit
    gradients    4Ψ      4Ψ/P          4Ψ/P, and for a while two units: one fills, one is in flight
    optimizer    8Ψ      8Ψ/P          8Ψ/P
    together     16Ψ     4Ψ + 12Ψ/P    16Ψ/P: the only stage that stores nothing twice

What belongs to no unit is the root: a tied embedding, used at both ends. It is gathered when a step
begins and held until the update. With `free_after_forward=False` all units are whole between
forward and backward. Where P does not divide a unit, gathering works on copies: two
units of communication memory.

Cost, a step and rank, with A backward passes, R of the Ψ parameters in the root:

    bytes        (P-1)/P × 4 × (3A(Ψ-R) + (1+A)R)   gather twice, reduce; A = 1: half more than DDP
                 (P-1)/P × 4 × (2A(Ψ-R) + (1+A)R)   where units stay to backward
                                                    (`free_after_forward=False`)
    messages     P-1 for each of these collectives, on a ring
    control      one float64, the loss, and with a Trainer two digests of its batch; another, the
                 squares of the gradient's norm, with `clip` (or a loss scale)

With `shard` < P ranks a copy, P is that number here, and sums of shards travel between copies
(zero/shards.py). All ranks must run the same units in the same order; so a rank without a row runs
them too, on no row.

notes:   N0 ZeRO3, N4 §7
Source:  Rajbhandari et al. 2020; Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully
         Sharded Data Parallel".
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import GradientError
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.step.flat import Flat, Piece, trainable, untrained
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.step import Batch, Counted, Loss, Part, part_of
from minidist.parallel.step.strategy import Collective
from minidist.parallel.zero.fsdp_units import GatherOrder, Unit, make_units
from minidist.parallel.zero.gradient_shards import GradientShards
from minidist.parallel.zero.shards import ShardStore, ZeroAxis


class PlainUnit:
    """One unit of the plain version: this rank's chunk of its weights, and of their
    gradients."""

    def __init__(self, unit: Module, group: Group) -> None:
        self.flat = Flat(list(unit.parameters()), group)
        self.group = group
        self.shard = self.flat.join()[self.flat.chunk].copy()
        self.mine = np.zeros(self.flat.chunk_size, self.flat.dtype)
        unit.register_forward_pre_hook(self.gather)  # forward 1
        unit.register_forward_hook(self.free)  # forward 3
        unit.register_backward_pre_hook(self.gather)  # backward 1
        unit.register_backward_hook(self.reduce)  # backward 3, 4; in between 2: compute
        self.free()

    def gather(self, *_: Any) -> None:
        """All-gather the weights of the unit."""
        for p, view in self.flat.views(self.group.all_gather(self.shard, algorithm="ring")):
            p.data = view

    def free(self, *_: Any) -> None:
        """Free the weights: only the shard is kept."""
        for p in self.flat.parameters:
            p.data = np.broadcast_to(np.nan, p.shape)

    def reduce(self, *_: Any) -> None:
        """Reduce-scatter the gradients; free them and the weights."""
        gradient = np.empty(self.flat.size, self.flat.dtype)
        for p, view in self.flat.views(gradient):
            view[...] = p.grad
            p.zero_grad()
        self.group.reduce_scatter(gradient, out=self.mine, algorithm="ring")
        self.free()


def plain_zero3(
    model: GPT,
    modules: Iterable[Module],
    new_optimizer: Callable[[list[Piece]], Optimizer],
    group: Group,
    batches: Iterable[Batch],
) -> None:
    """Train by ZeRO-3, unit by unit, each gathered when its turn comes; batches are global, the
    numbers are those of N4:398."""
    units = [PlainUnit(module, group) for module in modules]
    optimizer = new_optimizer(
        [piece for unit in units for piece in unit.flat.pieces(unit.shard, unit.mine)]
    )
    for inputs, targets in batches:
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # the hooks run in here
        model.loss(part.inputs, part.targets, divisor=targets.size).backward()
        optimizer.step()  # of this rank's chunk of every unit
    for unit in units:  # whole once more, to be looked at
        unit.gather()


# `Zero3` below adds prefetch: the next unit's weights travel while this one computes, and so do
# gradients; a GatherOrder (fsdp_units.py) knows which unit is next. It also takes parameters outside
# any unit (the root), weights drawn chunk by chunk, several passes, low precision. One step, with
# one copy of the state; PassLoop.start_step, DataAxis.run and DataAxis.conclude (step/strategy.py)
# call the parts, the hooks of a module (nn/hooks.py) call _before_… and _after_…; the numbers are
# those of PlainUnit:
#   begin_step      marks the shards empty; no message
#   forward         all-gathers the root (empty unless the model is tied), unless it is there:
#                   begin_pass
#   forward 1       start this unit's all-gather unless prefetch did (the group's worker thread,
#                   CallWorker in comm/calls/async_call.py, carries it out: by default all_gather in
#                   comm/collectives/ring.py, by Call.exchange_blocks in comm/calls/call.py); start
#                   the next units'; wait for this one: _before_forward, Unit.start_gather,
#                   Unit.wait_for_weights (fsdp_units.py)
#   forward 3       free it: _after_forward
#   backward 1      as forward 1, in reverse order: _before_backward; autograd reads p.data again
#                   (tape.py)
#   backward 2      a unit's first gradient takes a buffer: GradientShards._lend
#                   (gradient_shards.py), called by Parameter.gradient_room
#   backward 3, 4   free the weights: _after_backward; start the reduce-scatter:
#                   GradientShards.start, HybridSharding (shards.py), the scheme (step/scheme.py);
#                   then wait for the previous one and free its buffer: GradientShards.take_sum
#   _reduce_rest    the root, and what backward did not reach; wait for the last sum
#   conclude        as ZeRO-2's: all-gathers the loss, then calls update
#   update          free the root; with `clip` all-gather the squares of the norm; change this
#                   rank's chunks; no all-gather of weights
#
# The stages of a pipeline, each of which goes backward by itself, are for chapter 17
# (staged_zero3.py).


class Zero3(ZeroAxis):
    """A model of which each rank of a group keeps a chunk. Used as Zero1, which has an example.

    Args:    model: weights drawn, equal on all ranks; or not yet drawn, with `seed`: then each rank
             draws its chunks.
             units: its modules (default: children) without a common parameter, used only through
             calls; the rest is the root.
             ahead: the unit at work and those gathered early take at most (1 + ahead) × the
             largest; 0: none early.
             free_after_forward: False: keep a unit until its backward (more memory, less traffic).
             seed, device: of weights that are not yet drawn; group, loss, algorithm, shard,
             precision, store, recorder: as Zero1's.
    Attributes: as Zero1's; state_dict() returns the whole weights.
    Raises:  ConfigError for units that overlap or `ahead` below 0; MismatchError if ranks do not
             start equal.
    """

    computes_without_rows = True
    reduces_each_pass = True

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        units: Sequence[Module] | None = None,
        loss: Loss | None = None,
        ahead: int = 1,
        free_after_forward: bool = True,
        algorithm: str = "ring",
        seed: int | None = None,
        device: str = "cpu",
        shard: int | None = None,
        precision: Precision | None = None,
        store: ShardStore | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(
            model,
            group,
            loss=loss,
            algorithm=algorithm,
            shard=shard,
            precision=precision,
            store=store,
            recorder=recorder,
        )
        self.ahead = ahead
        self.free_after_forward = free_after_forward
        self.weights = trainable(model.parameters())
        if seed is None:
            check_equal_replicas(model.parameters(), group, when="before the first step")
        self.units, self.root = make_units(self, units, ahead, seed=seed, device=device)
        self.gather_order = GatherOrder(self.root, self.units)
        self.stored = [flat for unit in (*self.units, self.root) for flat in unit.flats]
        self.flats = [flat for unit in (*self.units, self.root) for flat in unit.learning]
        # the plain scheme: it knows each run's group
        self.scheme.attach([self.sharing.gradient_run(flat) for flat in self.flats])
        self.gradients = GradientShards(self, "unit part")
        self.parameters = self.pieces()
        self.counted = Counted(self.parameters, self.sharing.shard_group)
        self._unreduced: list[Unit] = []  # their gradients have not set out in this backward
        self._largest = max((unit.nbytes for unit in self.units), default=0)
        for unit in self.units:
            self._watch(unit)

    def _watch(self, unit: Unit) -> None:
        module: Any = unit.module
        # forward 1
        module.register_forward_pre_hook(lambda module, args: self._before_forward(unit))
        # forward 3
        module.register_forward_hook(lambda module, args, result: self._after_forward(unit, result))
        # backward 1
        module.register_backward_pre_hook(lambda module: self._before_backward(unit))
        # backward 3, 4
        module.register_backward_hook(lambda module: self._after_backward(unit))

    def begin_step(self) -> None:
        """Mark the shards empty: the next sums replace them."""
        self._summed = False
        self.gradients.forget()

    def begin_pass(self) -> None:
        """Gather the root; it stays until the update."""
        self.root.start_gather()
        self.root.wait_for_weights()
        self.gather_order.begin_pass()

    def forward(self, part: Part, *, divisor: int) -> Tensor | None:
        """Return this rank's share of the mean loss, as DataAxis.forward."""
        self.begin_pass()
        return super().forward(part, divisor=divisor)

    def _before_forward(self, unit: Unit) -> None:
        """Gather a unit's weights before its forward, and start to gather the next units'."""
        unit.start_gather()
        self.gather_order.enter(unit)
        self._prefetch(unit)
        unit.wait_for_weights()

    def _after_forward(self, unit: Unit, result: object) -> None:
        """Count the call if it has a backward to come, and free the unit after its forward."""
        if isinstance(result, Tensor) and result.requires_grad:
            unit.calls += 1
        if self.free_after_forward or not unit.calls:
            unit.free()

    def _prefetch(self, unit: Unit) -> int:
        """Start to gather the units after `unit`, up to (1 + ahead) × the largest.

        Returns: the bytes that are left; -1 if a unit did not fit. Only StagedZero3 uses them.
        """
        room = (1 + self.ahead) * self._largest - unit.nbytes
        for other in self.gather_order.coming:
            room -= other.nbytes
            if room < 0 or not self.ahead:
                # beyond the limit of `ahead`: only read it from disk (chapter 20)
                other.read_ahead()
                return -1
            other.start_gather()
        return room

    def backward(
        self,
        share: Tensor | None,
        dy: Array | None = None,
        *,
        segment: int = 0,
        last: bool = True,
        defer: bool = False,
    ) -> list[WeightGradient]:
        """Add the sums of the gradients over the ranks of this copy to the shards; the `last` adds
        the other copies'.

        Args:    as DataAxis.backward.
        Cost:    an all-gather and a reduce-scatter a unit, begun during backward; returns when all
                 have ended.
        Raises:  GradientError if the first loss is NaN, as it is where a freed weight was used.
        """
        if share is not None and self.gather_order.before_first_backward:
            self._refuse_nan(share)
        self.gradients.begin(last=last)
        self.gather_order.begin_backward(segment)
        self._unreduced = [] if defer else list(self.gather_order.units_of(segment))
        deferred = []
        if share is not None:
            with self.recorder.span("backward", notes="ZeRO-3 backward 2"):
                deferred = self.precision.backward(share, dy, defer_weights=defer)
        if not defer:
            self._reduce_rest()
        self.gather_order.end_backward()
        # False: no backward of this step was the last, so the copies are not summed
        self._summed = last
        return deferred

    def _refuse_nan(self, loss: Tensor) -> None:
        if np.isnan(loss.item()):
            raise GradientError(
                f"ZeRO-3 rank {self.group.rank} of {self.group.size}: the first loss is NaN; was a "
                f"unit's weight used outside its call (a tied one)? leave its module out of units="
            )

    def _before_backward(self, unit: Unit) -> None:
        """Gather a unit's weights before its backward, and start to gather those of the units
        before it in forward."""
        unit.start_gather()
        self.gather_order.enter_backward(unit)
        if self.free_after_forward:
            self._prefetch(unit)
        unit.wait_for_weights()

    def _after_backward(self, unit: Unit) -> None:
        """Free a unit after its backward; after the last of its calls, start to reduce its
        gradients."""
        unit.calls -= 1
        if self.free_after_forward or not unit.calls:
            unit.free()
        if unit not in self.gather_order.coming:
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        """Begin to reduce a unit's gradients, unless this backward has begun that or leaves it for
        later."""
        if unit in self._unreduced:
            self._unreduced.remove(unit)
            for flat in unit.learning:
                self.gradients.start(self.flats.index(flat))

    def _reduce_rest(self) -> None:
        """Reduce what a backward has left, the last unit first, and wait for all sums."""
        with self.recorder.span("wait for gradients", notes="ZeRO-3 backward 3"):
            for unit in reversed(list(self._unreduced)):
                self._reduce(unit)
            self.gradients.finish()

    # ------------------------------------------------ chapter 17: deferred gradients, several copies

    def backward_weights(self, deferred: list[WeightGradient], *, segment: int = 0) -> None:
        """Compute what a backward has deferred, and reduce all that the segment's units have
        then."""
        self.precision.backward_weights(deferred)
        self._unreduced = list(self.gather_order.units_of(segment))
        self._reduce_rest()

    def finish_step(self) -> None:
        """Sum the shards over the copies, unless a last backward did."""
        if not self._summed:
            self.gradients.sum_copies()
        if self.sharing.copies > 1:
            self.sum_stored()

    # ------------------------------------------------------------------------ evaluation and update

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate inside; the root is freed at its end."""
        yield
        self.root.free()

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Compare nothing: no rank holds weights whole."""

    def update(
        self,
        optimizer: Optimizer,
        *,
        lr: float | None,
        clip: float | None,
        counted: Counted | None = None,
    ) -> None:
        """Free the root; then update this rank's pieces. Args: as DataAxis.update."""
        self.root.free()
        super().update(optimizer, lr=lr, clip=clip, counted=counted)

    # -------------------------------------------------------------- for checkpoints and cost tables

    def frozen(self, *, changes: bool) -> Iterator[tuple[Parameter, range, Array]]:
        """As Strategy's: of units this rank's pieces, the others whole."""
        divided = {parameter for flat in self.stored for parameter in flat.parameters}
        yield from (each for each in super().frozen(changes=changes) if each[0] not in divided)
        for flat in self.stored:
            if untrained(flat.parameters[0]):
                chunk = self.store.master(flat)
                yield from (
                    (parameter, part, chunk[place]) for parameter, place, part in flat.chunk_spans()
                )
                if changes:
                    self.store.keep(flat, chunk, "frozen weights")

    def traffic(self, passes: int) -> list[Collective]:
        """Return the gathers and the reduce-scatter of each unit in each pass; the root is gathered
        once."""
        gathers = (2 if self.free_after_forward else 1) * passes
        calls = [("all_gather", flat, gathers) for unit in self.units for flat in unit.flats]
        calls += [("all_gather", flat, 1) for flat in self.root.flats]
        calls += [("reduce_scatter", flat, passes) for flat in self.flats]
        return self._collectives_of(calls)

    def _collectives_of(self, calls: Iterable[tuple[str, Flat, int]]) -> list[Collective]:
        """Return the collectives of (verb, run, times), and the sums over the copies."""
        return [
            Collective(verb, flat.nbytes, flat.group)
            for verb, flat, times in calls
            for _ in range(times)
        ] + self.collectives_of_copies()
