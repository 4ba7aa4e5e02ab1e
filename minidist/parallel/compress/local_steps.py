"""Chapter 21 · Local steps: each rank trains without messages for H steps, then all meet once
(local SGD, DiLoCo).

The idea. DDP sends every gradient in every step. But a rank can train for a while on only its own
rows: its weights drift away from the others', slowly. So the ranks meet every H steps. A rank's
*outer gradient* is the common weights of the last meeting minus its weights now. The mean of the
outer gradients is one step of an outer optimizer on the common weights, from which all ranks
continue. The inner optimizer (AdamW, say) is each rank's own and never travels.

    rank 0    | step | step | step |  w - w0 --+                       +-- w --> | step | step | …
    rank 1    | step | step | step |  w - w1 --+-- mean -- outer step --+-- w --> | step | step | …
    rank 2    | step | step | step |  w - w2 --+                       +-- w --> | step | step | …

    outer optimizer                        name
    SGD, rate 1: the mean of the weights   local SGD (FedAvg); with H = 1 and SGD inside it is DDP
    Nesterov, rate 0.7, momentum 0.9       DiLoCo

A rank's outer gradient counts by its share of the rows, so parts of a batch may differ in size.

What each rank holds, Ψ parameters of w bytes with Adam inside:

    parameters   2wΨ   its own, and the common ones as the last outer step left them
    gradients    wΨ
    optimizer    2wΨ   its own Adam's; with outer momentum wΨ more
    in flight    wΨ    the outer gradient

Cost, H steps, ring all-reduce, ranks together: 2(P-1) × wΨ bytes, where DDP sends H times that.
Each step three float64 a rank, under `control`: its loss, and two digests of the batch, which all
ranks must have alike. They travel behind the next step, and no rank waits for them before the loss
is read.

The weights of a run (state_dict, evaluation, checks, export) are the common ones: steps after the
last meeting are not in them. A rank's own weights and inner state belong to that rank, and a
checkpoint has them all. If another number of ranks continues from it, rank r takes those of rank
r mod P.

notes:   N2 §11.2, §11.4, N3 §3.2
Source:  Stich 2019, "Local SGD Converges Fast and Communicates Little"; Douillard et al. 2023,
         "DiLoCo: Distributed Low-Communication Training of Language Models" (2311.08105).
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from minidist.comm.calls.async_call import Pending
from minidist.comm.group import Group
from minidist.data.rank_batch import rows_of_all, share_record, sum_of_records, targets_in
from minidist.device import account
from minidist.device.backend import Array, array_module
from minidist.errors import ConfigError
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.compress.outer import (
    OF_OUTER,
    OUTERS,
    AllSums,
    Fragment,
    Outer,
    cut_fragments,
)
from minidist.parallel.step.flat import join, settle_in_vector, trainable, views
from minidist.parallel.step.late_loss import LateLoss
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.replicas import check_equal_replicas
from minidist.parallel.step.scheme import Scheme
from minidist.parallel.step.step import (
    Batch,
    Counted,
    Loss,
    Part,
    loss_of,
    micro_parts,
    part_of,
    zero_unused,
)
from minidist.parallel.step.strategy import Collective, Strategy


def plain_diloco(
    model: GPT,
    inner: Optimizer,
    group: Group,
    batches: Iterable[Batch],
    every: int,
    *,
    lr: float = 0.7,
    momentum: float = 0.9,
) -> None:
    """Train by DiLoCo: `every` steps without a message, then one step of Nesterov's momentum on the
    common weights."""
    common = [p.data.copy() for p in model.parameters()]
    speeds = [np.zeros_like(weights) for weights in common]
    for step, (inputs, targets) in enumerate(batches, start=1):
        part = part_of((inputs, targets), size=group.size, rank=group.rank)
        # of only my rows
        model.loss(part.inputs, part.targets, divisor=part.targets.size).backward()
        inner.step()  # no message
        inner.zero_grad()
        if step % every:
            continue
        share = len(part.inputs) / len(inputs)
        for p, weights, speed in zip(model.parameters(), common, speeds, strict=True):
            # the mean change since the last exchange
            gradient = group.all_reduce(share * (weights - p.data), algorithm="ring")
            speed *= momentum
            speed += gradient
            weights -= lr * (gradient + momentum * speed)  # Nesterov: look ahead
            p.data[...] = weights  # all continue from here


# `LocalSteps` below keeps all weights in one vector, so that a meeting is one all-reduce instead of
# one a parameter. It also takes frozen weights, several passes, clipping (of each rank's own
# gradient), outer gradients that a scheme of this chapter compresses, and checkpoints between two
# meetings. streaming.py sends the vector in parts, behind the steps; async_local_steps.py does
# without meetings. One step:
#   start_step        takes this rank's rows; it has no PassLoop, because ranks meet seldom
#   inner_step        forward, backward and the inner optimizer, of this rank's rows; no message
#   loss_group        its all-gather of the loss starts; GatheredLoss.wait reads it
#   _meet             every H-th step:
#     _send               the outer gradient, common (`fragment.data`) - own (`fragment.own`), times
#                         this rank's share of the rows; one all-reduce per stretch of 4 MiB
#     _merge              calls _take_outer_step, then copies `fragment.data` to `fragment.own`: all
#                         ranks continue from it
#       _take_outer_step  waits for the sums; a step of the outer optimizer on `fragment.data`


class GatheredLoss(LateLoss):
    """The loss of a step, whose shares the ranks of a group send each other.

    Args:    pending: an all-gather of share_record; wait() raises MismatchError if batches differ.
    """

    def __init__(self, pending: Pending, group: Group) -> None:
        super().__init__()
        self.pending = pending
        self.group = group

    def done(self) -> bool:
        return self.pending.done()

    def wait(self) -> float:
        return sum_of_records(self.pending.wait(), self.group)


class LocalSteps(Strategy):
    """Trains a replica that meets the others every few steps.

    Args:    model: equal on all ranks, of one dtype; its weights move into one vector. Frozen
             weights stay.
             group: the ranks that share the batch; each needs a row of it in every step.
             every: H, the steps from meeting to meeting; outer: the outer optimizer.
             scheme: how outer gradients travel (default: as they are, by a ring).
             loss: of a part of the batch (default: `model.loss`); recorder: records what runs when.
             fragments: for StreamingLocalSteps; here 1.
    Attributes: parameters: what the inner optimizer is made of: this rank's weights; steps: made so
    far.
                own, common: this rank's weights and those of all; fragments: their parts; outer:
                the outer optimizer.
    Raises:  ConfigError for a period that cannot work; MismatchError if replicas do not start
             equal.
    """

    scheme: Scheme

    def __init__(
        self,
        model: Module,
        group: Group,
        *,
        every: int,
        outer: Outer = OUTERS["nesterov"],
        scheme: Scheme | None = None,
        loss: Loss | None = None,
        recorder: Recorder | None = None,
        fragments: int = 1,
    ) -> None:
        if every < 1 or every % fragments:
            raise ConfigError(
                f"local steps {every}, fragments {fragments}: each fragment is sent once in "
                f"{every} steps; choose steps that fragments divides, as "
                f"{max(1, every // fragments)} × {fragments}"
            )
        self.model = model
        self.group = group
        self.every = every
        self.steps = 0
        self.loss = loss or loss_of(model)
        self.recorder = recorder or Silent()
        self.precision = Precision()
        check_equal_replicas(model.parameters(), group, when="before the first step")
        self.weights = self.parameters = trainable(model.parameters())
        if len({p.dtype for p in self.weights}) > 1:
            raise ConfigError(
                "local steps: weights of several dtypes do not fit in one vector; give all "
                "weights one dtype"
            )
        self.own = join(self.weights)
        settle_in_vector(self.weights)
        self.common = account.current().hold(self.own.copy(), "parameters")
        self.fragments = cut_fragments(fragments, self.own, self.common, self.weights, group)
        self.outer = outer.make(self.fragments)
        self.scheme = scheme or Scheme("ring")
        self.scheme.attach(
            [stretch.run for fragment in self.fragments for stretch in fragment.stretches]
        )
        # losses do not queue behind outer gradients
        self.loss_group = group.split(0, axis=group.axis)
        self.common_state_of = self  # this object has the common state

    # --------------------------------------------------------------------------------------- a step

    def start_step(
        self,
        batch: Batch,
        optimizer: Optimizer,
        *,
        lr: float | None = None,
        clip: float | None = None,
        accumulate: int = 1,
    ) -> LateLoss:
        """Make one step on the *global* batch, each rank on its rows and of its weights; return the
        loss, still on its way.

        Args:    as Strategy.step; clip: bound of the norm of this rank's own gradient.
        Returns: the mean over all rows, each by the weights of the rank that has it.
        Cost:    each step one small all-gather of the loss (`loss_group`); each `every`-th step
                 also one sum of each stretch (streaming: of the stretches of the fragment whose
                 turn it is).
        """
        part = part_of(batch, size=self.group.size, rank=self.group.rank)
        rows = rows_of_all(batch, self.group.size)
        if 0 in rows:
            raise without_rows(f"rank {self.group.world_ranks[rows.index(0)]}")
        mean = inner_step(self, part, optimizer, lr=lr, clip=clip, accumulate=accumulate)
        row_fraction = part.targets.size / targets_in(batch)
        self.steps += 1
        with self.group.ledger.control():
            record = share_record(mean * row_fraction, batch)
            pending = self.loss_group.start_all_gather(record, algorithm="ring")
        self._meet(row_fraction)
        return GatheredLoss(pending, self.loss_group)

    def _meet(self, row_fraction: float) -> None:
        """After a step: if the ranks meet now, send, take the outer step, and continue from the
        common weights."""
        if self.steps % self.every == 0:
            self._send(self.fragments[0], row_fraction)
            self._merge(self.fragments[0])

    def _send(self, fragment: Fragment, row_fraction: float) -> None:
        """Start to sum the outer gradient of a fragment. Cost: one all-reduce of each stretch, as
        the scheme does it."""
        self.recorder.announce(self.group.axis, f"outer gradient of {fragment.name}")
        # streaming with 8bit or 4bit: the sum of an earlier fragment takes two phases
        # (two_phase.py). Its second phase begins now, before begin_step counts the next step
        for other in self.fragments:
            if other.pending is not None:
                other.pending.advance()
        self.scheme.begin_step()
        in_flight = account.current().hold(
            array_module(fragment.own).empty_like(fragment.own), "communication"
        )
        sums = []
        for where, _, number in fragment.stretches:
            part = in_flight[where]
            array_module(part).subtract(fragment.data[where], fragment.own[where], out=part)
            part *= row_fraction
            sums.append(self.scheme.start_all_reduce(number, part))
        fragment.pending = AllSums(sums)
        fragment.in_flight = in_flight

    def _take_outer_step(self, fragment: Fragment) -> None:
        """Wait for the sum of a fragment's outer gradients, then take the outer step on its common
        weights."""
        if fragment.pending is not None:
            with self.recorder.span("wait for outer gradients"):
                fragment.pending.wait()
            fragment.grad = fragment.in_flight
            fragment.pending = None
            fragment.in_flight = None
            with self.recorder.span("outer step"):
                self.outer.step()  # SGD skips fragments whose grad is None
            fragment.grad = None

    def _merge(self, fragment: Fragment, mix: float = 0.0) -> None:
        """Wait for the fragment's outer step, then set own = mix · own + (1 - mix) · common."""
        self._take_outer_step(fragment)
        if mix:
            fragment.own *= mix
            fragment.own += (1 - mix) * fragment.data
        else:
            fragment.own[...] = fragment.data

    # --------------------------------------------------------------------------- the common weights

    def settle(self) -> None:
        """Wait for outer gradients on their way, and take their outer steps. Every rank calls it.

        It changes no number of the run: nothing reads the common weights of a fragment before it is
        merged. A scheme may send its second phase here, which belongs to the step that has sent the
        first.
        """
        with self.group.ledger.during("step"):
            for fragment in self.fragments:
                self._take_outer_step(fragment)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let the model read the common weights."""
        self.settle()
        self._point(self.common)
        try:
            yield
        finally:
            self._point(self.own)

    def _point(self, vector: Array) -> None:
        for parameter, view in views(self.weights, vector):
            parameter.place(view)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return copies of the common weights, whole, on the host, by dotted path. Every rank calls
        it."""
        with self.evaluating():
            return self.model.state_dict()

    def check_replicas(self, group: Group, *, when: str = "after the last step") -> None:
        """Check, like Strategy, that the common weights are equal on all ranks."""
        with self.evaluating():
            super().check_replicas(group, when=when)

    def traffic(self, passes: int) -> list[Collective]:
        """Return the collectives of `every` steps, whatever the number of passes."""
        return [
            Collective(
                "all_reduce", fragment.data.nbytes, self.group, sent=self._sent_bytes(fragment)
            )
            for fragment in self.fragments
        ]

    def _sent_bytes(self, fragment: Fragment) -> int | None:
        """Return the bytes of all stretches of a fragment, with None and -1 as in
        Scheme.sent_bytes."""
        sent = [self.scheme.sent_bytes(stretch.run) for stretch in fragment.stretches]
        known = [each for each in sent if each is not None]
        return None if len(known) < len(sent) else -1 if min(known) < 0 else sum(known)

    def sends(self, first: int, last: int) -> list[int]:
        """Return how often each fragment was sent in the steps after step `first` up to step
        `last`."""
        return [last // self.every - first // self.every]

    # ----------------------------------------------------------------------- state, for checkpoints

    def begin_at(self, steps: int) -> None:
        """Continue after step `steps`, with the weights and state that a checkpoint has of it."""
        self.steps = steps

    @property
    def rank(self) -> int:
        """The rank that these weights and inner state belong to (Strategy.common_state_of)."""
        return self.group.rank

    def common_state(self) -> Iterator[tuple[str, str, Array]]:
        """Yield (kind, name, array) of the state that all ranks have in common: weights, and outer
        momentum by fragment."""
        self.settle()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, view in views(self.weights, self.common):
            yield "weight", names[id(parameter)], view
        for slot in self.outer.slots:
            for kind, array in slot.state.items():
                yield f"{OF_OUTER}{kind}", slot.name, array


def without_rows(who: str) -> ConfigError:
    """Return the error of a step in which a rank would have nothing to train on."""
    return ConfigError(
        f"local steps: {who} has no row of the batch; each rank trains on its own "
        f"rows, so give every rank at least one"
    )


def inner_step(
    strategy: Any,
    part: Part,
    optimizer: Optimizer,
    *,
    lr: float | None,
    clip: float | None,
    accumulate: int,
) -> float:
    """Make a step of a rank's own optimizer on its own rows; return their mean loss.

    Args:    strategy: its model, weights, loss, precision and recorder. The others: as
             Strategy.step.
    Raises:  ConfigError if there is no row: then there is no step to make.
    """
    frozen = next((p.name for p in strategy.weights if not p.requires_grad), None)
    if frozen is not None:
        raise ConfigError(
            f"local steps: requires_grad of {frozen!r} was switched off, but the "
            f"outer optimizer still moves the weights of all ranks together; freeze "
            f"it before the training is set up"
        )
    if not len(part.inputs):
        raise without_rows("a rank")
    optimizer.zero_grad()
    total = 0.0
    for micro in micro_parts(part, accumulate):
        if len(micro.inputs):
            with strategy.recorder.span("forward", rows=len(micro.inputs)):
                loss = strategy.loss(micro, part.targets.size)
            with strategy.recorder.span("backward"):
                loss.backward()
            total += float(loss.item())
    with strategy.recorder.span("optimizer"):
        zero_unused(strategy.weights)
        strategy.precision.update(optimizer, Counted(strategy.weights), lr=lr, clip=clip)
    return total
