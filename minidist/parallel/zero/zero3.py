"""Chapter 16 · ZeRO-3 (FSDP): parameters too are divided; weights are fetched before use and freed after.

The idea. A rank keeps its chunk of every weight and nothing else. The model is cut into units (a block, an embedding);
before a unit runs, its weights are gathered from all ranks, and freed when it has run; before its backward they are
gathered again, and when its gradients are final these are reduce-scattered and both freed. While a unit computes, the
next one's weights are already on their way:

    compute         forward: unit 1 | unit 2   | unit 3   | backward: unit 3 | unit 2            | unit 1
    communication   gather 1        | gather 2 | gather 3 | gather 3         | gather 2          | gather 1, reduce 3 …
    units held      1               | 1, 2     | 2, 3     | 3, 2             | 2, 1              | 1

Who holds what, Ψ parameters in float32 with Adam (K = 8) on P ranks:

                 DDP     ZeRO-2        ZeRO-3, each rank
    parameters   4Ψ      4Ψ            4Ψ/P, and the units in flight: the one at work, and as much as `ahead` of the
                                       largest, fetched before their turn
    gradients    4Ψ      4Ψ/P          4Ψ/P, and for a while two units: one fills, one is in flight
    optimizer    8Ψ      8Ψ/P          8Ψ/P
    together     16Ψ     4Ψ + 12Ψ/P    16Ψ/P: the only stage that stores nothing twice (N0:296), and has no lower limit
                                       but the units and activations, which N4:424's "minimum" leaves out

What belongs to no unit is the root: a tied embedding, used at both ends. It is gathered when a step begins and held to
its last backward. Where P does not divide a unit, gathering works on copies: two units of communication memory.

Cost, a step and rank, with A backward passes, R of the Ψ parameters in the root:

    bytes        (P-1)/P × 4 × (3A(Ψ-R) + (1+A)R)   gather, gather, reduce; the notes' "50 % more" than DDP for A = 1
                 (P-1)/P × 4 × (2A(Ψ-R) + (1+A)R)   where units stay to backward (`free_after_forward=False`)
    messages     P-1 for each of these collectives
    With `shard` < P ranks a copy, P is that number here, and sums of shards travel between copies
    (zero/hybrid_sharding.py). control      two float64: the loss, the squares of the gradient's norm

No all-gather ends the step (N0:375 has one, which would make it 4Ψ): the next forward gathers anyway.

All ranks must run the same units in the same order. So a rank without a row runs them too, on none.

The notes' steps (N4:398), as they happen here:

    ZeRO-3 forward 1    all-gather a unit's weights       ZeRO-3 backward 1   all-gather them again
    ZeRO-3 forward 2    compute                           ZeRO-3 backward 2   compute
    ZeRO-3 forward 3    free them                         ZeRO-3 backward 3   reduce-scatter the gradients
                                                          ZeRO-3 backward 4   free them

notes:   N0 ZeRO3, N4 §7
Source:  Rajbhandari et al. 2020; Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel".
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from minidist.autograd.backward import WeightGradient
from minidist.autograd.tensor import Parameter, Tensor
from minidist.comm.group import Group
from minidist.device.backend import Array
from minidist.errors import GradientError
from minidist.nn import GPT, Module
from minidist.optim import Optimizer
from minidist.parallel.data.replica_groups import Others, check_equal_owners
from minidist.parallel.step.flat import Flat, Piece, squares_of_shards, sum_in_order, trainable
from minidist.parallel.step.precision import Precision
from minidist.parallel.step.recorder import Recorder, Silent
from minidist.parallel.step.step import Batch, Loss, Part, loss_of, micro_parts, part_of
from minidist.parallel.zero.fsdp_units import Unit, make_units
from minidist.parallel.zero.gradient_shards import Scattered
from minidist.parallel.zero.hybrid_sharding import Sharing
from minidist.parallel.zero.shard_store import Home


def plain_zero3(model: GPT, units: Iterable[Module], new_optimizer: Callable[[list[Piece]], Optimizer], group: Group,
                batches: Iterable[Batch]) -> None:
    """ZeRO-3, unit by unit and without prefetch; the batches are global, the numbers those of N4:398."""
    pieces, gathers = [], []
    for unit in units:
        flat = Flat(list(unit.parameters()), group)
        shard, mine = flat.join()[flat.own].copy(), np.zeros(flat.owned, flat.dtype)
        pieces += flat.pieces(shard, mine)

        def gather(*_: Any, flat: Flat = flat, shard: Array = shard) -> None:     # forward 1, backward 1: all-gather
            whole = group.all_gather(shard, algorithm="ring")
            for p, view in flat.views(whole):
                p.data = view

        def free(*_: Any, flat: Flat = flat) -> None:                             # forward 3: only the shard is left
            for p in flat.parameters:
                p.data = np.broadcast_to(np.nan, p.shape)

        def reduce(*_: Any, flat: Flat = flat, mine: Array = mine, free: Callable[[], None] = free) -> None:
            gradient = np.empty(flat.size, flat.dtype)
            for p, view in flat.views(gradient):
                view[...] = p.grad
                p.zero_grad()
            group.reduce_scatter(gradient, out=mine, algorithm="ring")            # backward 3: reduce-scatter
            free()                                                                # backward 4: free

        unit.register_forward_pre_hook(gather)                                    # forward 2 and backward 2, computing,
        unit.register_forward_hook(free)                                          # come between these
        unit.register_backward_pre_hook(gather)
        unit.register_backward_hook(reduce)
        gathers.append(gather)
        free()
    optimizer = new_optimizer(pieces)
    for batch in batches:
        part = part_of(batch, size=group.size, rank=group.rank)
        model.loss(part.inputs, part.targets, divisor=batch[1].size).backward()
        optimizer.step()                                                          # and no all-gather at the end
    for gather in gathers:                                                        # whole once more, to be looked at
        gather()


# `Zero3` below adds prefetch: the next unit's weights come while this one computes, and gradients leave while backward
# goes on. It also takes parameters outside any unit (the root), weights that are drawn chunk by chunk and so never lie
# whole on any rank, several passes, and gradients of low precision.


class Zero3:
    """A model of which each rank of a group keeps a chunk.

    Args:    model: weights drawn, equal on all ranks; or not yet drawn, with `seed`: then each rank draws its chunks.
             group: the ranks that share the batch.
             units: modules of the model, without a parameter in common and used through their calls alone (default: its
             children); the rest is the root.
             loss: of a part of the batch (default: `model.loss`).
             ahead: how much may be gathered before its turn, in units as large as the largest; 0: nothing.
             free_after_forward: or keep a unit until its backward, for memory instead of traffic.
             algorithm: of reduce-scatter and all-gather; pinned, so that the same run gives the same bits.
             shard: how many neighbours share one copy of the state (default: all; zero/hybrid_sharding.py).
             others: the parameters that another group shares, with whom (data/replica_groups.py); whole: those that
             stay whole, which nobody learns; apart: those that travel in vectors of their own, within their units.
             chains: units that are called in a row, and go backward by `backward_chain`: a pipeline's stages.
             precision: of weights and update (default: one dtype for all); home: where chunks lie (default: here).
             recorder: is told what runs when.
    Attributes: parameters: what the optimizer is made of: this rank's pieces.
             squares: finds the sum of the squares of the whole gradient; another, where a model is cut (chapter 17).
             always: a rank without a row computes too: it must gather when the others do.
             rows: the ranks that divide a batch's rows; fewer than group, where ranks divide tokens too (chapter 17).
    Raises:  ConfigError for units that overlap or `ahead` below 0; MismatchError if ranks do not start equal.
    """

    def __init__(self, model: Module, group: Group, *, units: Sequence[Module] | None = None, loss: Loss | None = None,
                 ahead: int = 1, free_after_forward: bool = True, algorithm: str = "ring", seed: int | None = None,
                 device: str = "cpu", shard: int | None = None, others: Others | None = None,
                 whole: Sequence[Parameter] = (), apart: Sequence[Parameter] = (),
                 chains: Sequence[Sequence[Module]] = (), precision: Precision | None = None,
                 home: Home | None = None, recorder: Recorder | None = None) -> None:
        self.model, self.group, self.rows, self.algorithm = model, group, group, algorithm
        self.ahead, self.free_after_forward, self.always = ahead, free_after_forward, True
        self.loss, self.precision = loss or loss_of(model), precision or Precision()
        self.recorder = recorder or Silent()
        trainable(model.parameters())
        self.sharing = Sharing(group, shard, algorithm=algorithm, recorder=self.recorder)
        if seed is None:
            check_equal_owners(model.parameters(), group, others or {}, when="before the first step")
        self.home = home or Home()
        self.home.begin(f"rank {group.rank}")
        self.units, self.root = make_units(model, units, ahead, self.sharing.shard, home=self.home,
                                           algorithm=algorithm, recorder=self.recorder, seed=seed, device=device,
                                           others=others or {}, whole=whole, apart={id(weight) for weight in apart})
        of_module = {id(unit.module): unit for unit in self.units}
        self.chains = [[of_module[id(module)] for module in chain if id(module) in of_module] for chain in chains]
        self.sequence: list[Unit] = []      # units as the first forward met them
        self._met: list[Unit] = []          # those that this forward has met
        self._left: list[Unit] = []         # those that this backward has still to meet
        learning = [flat for unit in (*self.units, self.root) for flat in unit.learning]
        self.gradients = Scattered(learning, self.sharing, home=self.home, algorithm=algorithm,
                                   recorder=self.recorder, what="unit part")
        self.parameters = [piece for flat in learning for piece in self.home.pieces(flat, self.precision)]
        self.squares: Callable[[], float] = lambda: squares_of_shards(self.sharing.shard, self.home.squares)
        self._reduced: set[int] = set()
        self._put_off = False               # this backward leaves the gradients of weights for later
        self._largest = max((unit.nbytes for unit in self.units), default=0)
        for unit in self.units:
            self._watch(unit)

    # ------------------------------------------------------------------------------------------------- partition

    def part_of(self, batch: Batch) -> Part:
        """This rank's rows of a global batch; views, and perhaps none."""
        return part_of(batch, size=self.rows.size, rank=self.rows.rank)

    def _watch(self, unit: Unit) -> None:
        module = unit.module
        assert module is not None
        module.register_forward_pre_hook(lambda module, args: self._enter(unit))
        module.register_forward_hook(lambda module, args, result: self._leave(unit, result))
        module.register_backward_pre_hook(lambda module: self._enter_backward(unit))
        module.register_backward_hook(lambda module: self._leave_backward(unit))

    # --------------------------------------------------------------------------------------------------- forward

    def forward(self, part: Part, *, divisor: int, spare: Batch) -> Tensor:
        """This rank's share of the global mean loss. `divisor`: the targets of the whole batch.

        Without a row of its own the rank goes on with none of `spare`'s: it must gather when the others do.
        """
        self.root.fetch()
        self.root.complete()
        self._met = []
        nothing = Part(spare[0][:0], spare[1][:0], 0)
        return self.loss(part if len(part.inputs) else nothing, divisor)

    def _enter(self, unit: Unit) -> None:
        """Before a unit's forward: its weights come, and the next unit's set out."""
        unit.fetch()
        if not self.chains:
            self._met.append(unit)
        self._fetch_ahead(unit, self._chain(unit, 1) if self.chains else self.sequence[len(self._met):])
        unit.complete()

    def _leave(self, unit: Unit, result: object) -> None:
        """After a unit's forward. It counts its calls that have a backward to come."""
        if isinstance(result, Tensor) and result.requires_grad:
            unit.calls += 1
        if self.free_after_forward or not unit.calls:
            unit.free()

    def _chain(self, unit: Unit, direction: int) -> list[Unit]:
        """The units behind one in its chain, or with direction -1 those before it, the nearest first."""
        chain = next(chain for chain in self.chains if unit in chain)[::direction]
        return chain[chain.index(unit) + 1:]

    def _fetch_ahead(self, unit: Unit, following: Sequence[Unit]) -> None:
        """Begin to gather those whose turn comes after `unit`'s: with it, no more than 1 + ahead of the largest.

        The first that must wait is read ahead, where it does not lie on the device.
        """
        room = (1 + self.ahead) * self._largest - unit.nbytes
        for other in following:
            room -= other.nbytes
            if room < 0 or not self.ahead:
                other.prefetch()
                break
            other.fetch()

    # -------------------------------------------------------------------------------------------------- backward

    def backward(self, share: Tensor, *, last: bool = True) -> None:
        """Add the sums of the gradients over the ranks of this copy to the shards; the `last` adds the other copies'.

        Cost:    an all-gather and a reduce-scatter a unit, begun during backward; returns when all have ended.
        Raises:  GradientError if the first loss is NaN, as it is where a freed weight was used.
        """
        if not self.sequence and np.isnan(share.item()):
            raise GradientError(f"ZeRO-3 rank {self.group.rank} of {self.group.size}: the first loss is NaN; was a "
                                f"unit's weight used outside its call (a tied one)? leave its module out of units=")
        if len(self._met) >= len(self.sequence):
            self.sequence = list(self._met)
        self._left = [unit for unit in reversed(self._met) if unit.calls]
        self._reduced = set()
        self.gradients.begin(last=last)
        with self.recorder.span("backward", notes="ZeRO-3 backward 2"):
            self.precision.backward(share)
            for unit in (*reversed(self.units), self.root):
                self._reduce(unit)
        with self.recorder.span("wait for gradients", notes="ZeRO-3 backward 3"):
            self.gradients.finish()
        for unit in self.units:
            unit.calls = 0
            unit.free()

    def _enter_backward(self, unit: Unit) -> None:
        """Before a unit's backward: its weights come again, and those of the unit before it in forward set out."""
        unit.fetch()
        self._left = self._chain(unit, -1) if self.chains else self._left[self._left.index(unit) + 1:]
        if self.free_after_forward:
            self._fetch_ahead(unit, self._left)
        unit.complete()

    def _leave_backward(self, unit: Unit) -> None:
        """After a unit's backward: it is free, and after the last of its calls its gradients set out."""
        unit.calls -= 1
        if self.free_after_forward or not unit.calls:
            unit.free()
        if not self._put_off and (self.chains or not unit.calls):
            self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        for flat in unit.learning:
            index = self.gradients.flats.index(flat)
            if index not in self._reduced:
                self._reduced.add(index)
                self.gradients.start(index)

    def backward_chain(self, chain: int, y: Tensor, dy: Array | None, *, whole: bool) -> list[WeightGradient]:
        """Backward of one of several calls of a chain, in any order; its sums over this copy are added to the shards.

        Args:    dy: the gradient of y, unless that is a loss.
                 whole: or put off the gradients of weights, which are returned: when they are computed, reduce_chain.
        """
        self._put_off = not whole
        self.gradients.begin(last=False)
        put_off = self.precision.backward(y, dy, defer_weights=not whole)
        if whole:
            self.reduce_chain(chain)
        return put_off

    def reduce_chain(self, chain: int) -> None:
        """Reduce what backwards of a chain have left, put off or not."""
        for unit in reversed(self.chains[chain]):
            self._reduce(unit)
        self.gradients.finish()
        self._reduced = set()

    def finish_chains(self) -> None:
        """The step's last backward is over: the root, which was held for all, is reduced, and copies are summed."""
        self._reduce(self.root)
        self.gradients.finish()
        self.gradients.sum_copies()
        self._reduced = set()

    # ---------------------------------------------------------------------------------------------------- weights

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all weights (masters, in mixed precision), whole, on the host, by dotted path. Every rank calls it.

        Cost:    one all-gather a unit, counted under `control`; a unit at a time.
        """
        flats = [flat for unit in (*self.units, self.root) for flat in unit.flats]
        return self.home.state(self.model, flats, algorithm=self.algorithm)

    # ------------------------------------------------------------------------------------------------------ step

    def step(self, batch: Batch, optimizer: Optimizer, *, lr: float | None = None, clip: float | None = None,
             accumulate: int = 1) -> float:
        """One step on the *global* batch, the same on every rank; returns its mean loss, the same on every rank.

        Args:    optimizer: made of `self.parameters`; lr: this step's learning rate (None: the optimizer's own).
                 clip: bound of the whole gradient's norm; accumulate: in how many passes the rank takes its rows.
        """
        self.gradients.forget()
        total = 0.0
        for number, part in enumerate(micro_parts(self.part_of(batch), accumulate), start=1):
            with self.recorder.span("forward", rows=len(part.inputs)):
                share = self.forward(part, divisor=batch[1].size, spare=batch)
            self.backward(share, last=number == accumulate)
            total += float(share.item())
        self.update(optimizer, lr=lr, clip=clip)
        with self.recorder.span("loss", "communication"):
            return sum_in_order(self.group, total)

    def update(self, optimizer: Optimizer, *, lr: float | None, clip: float | None) -> None:
        """The optimizer's step on this rank's pieces; args as `step`."""
        self.root.free()
        with self.recorder.span("optimizer"):
            self.precision.update(optimizer, self.squares, lr=lr, clip=clip)
