"""Chapter 24 · The fast path: memory and seconds of a hundred thousand plans at once, by the
chapters' formulas.

A step of a rank of the slowest stage, with L layers, m microbatches, p stages (times of cells.py
and layouts.py, as columns of call_columns.py):

    compute    m · (L · layer + ends)         the rank's own kernels; gradients added up over
                                              microbatches
    recompute  m · L · a layer's forward
    tp cp ep   m · (L · the waits of a layer for the axis + the waits of the ends); with
               recomputation a layer's forward waits twice
    update     the optimizer's pass
    bubble     of a microbatch's forward F, backward for the input I and for the weights W, each with
               its waits for tp, cp, ep, and dp:
                 1F1B, GPipe   (p-1) (F + I + W)
                 interleaved   (p-1) (F + I + W) / 2
                 ZB-H1         (p-1) (F + I - min(F, I, W))
                 ZB-V          (p-1)/2 · max(I, F + I - W) + (p-2)/2 · max(0, W - I)
    pp         hops between stages, by schedule
    dp         the part of gradients and weights that is not hidden behind compute:
                 ZeRO-0, 1   all-reduce or reduce-scatter during the last backward; in a pipeline
                             after it
                 ZeRO-1, 2   all-gather of the weights during the next step's first forward
                 ZeRO-2, 3   reductions of each microbatch's backward, which waits for the last; of
                             ZB-H1 and ZB-V all of them, because their weight backward sends when all
                             is computed
                 ZeRO-3      gathers of each forward and backward, which wait for the first
    offload    the transfers to host or disk that are not hidden
    host       what the host needs to launch all kernels of the step, beyond all the others: it
               launches while the device computes and waits

    memory     weights, gradients, optimizer: parallel/zero/memory_formula.py;  activations:
               microbatches that the schedule holds (chapter 11) · L · bytes that a layer keeps
               (chapter 19: all, or its input), and the loss; of ZB-H1 and ZB-V what waits for the
               weight backward; with ZeRO-2 and 3 then the gradients of a whole stage

The replay (md.simulate) does not use these formulas: it confirms the best plans. Tests compare the
two. Drawn plans are within 8 % in seconds and 6 % in memory (tests/plan/test_estimate.py); a model
of a few milliseconds a step, whose kernels are short, within 10 %. Left out: calls of different
axes that share links, which the replay slows down; and what a pipeline with an offload waits for
where it turns, so that these estimates may be 20 % too short.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minidist.nn import GPTConfig
from minidist.parallel.data.buckets import BUCKET_BYTES
from minidist.parallel.hybrid.plan_checks import AXES
from minidist.parallel.zero.memory_formula import Each
from minidist.plan.call_columns import ITEMSIZE, CallColumns
from minidist.plan.candidates import SCHEDULES, Candidates
from minidist.plan.cells import Cells, Cut
from minidist.plan.layouts import Layouts
from minidist.simulate.cluster import Cluster
from minidist.simulate.main_gradients import ADDED, WIDER
from minidist.simulate.rates import Rates
from minidist.simulate.sure import PUBLISHED, Sureness

TERMS = (
    "compute",
    "recompute",
    "update",
    "bubble",
    "tp",
    "cp",
    "ep",
    "pp",
    "dp",
    "offload",
    "host",
)
# share of the device's memory that an estimate may fill: 5 % is left because estimates can be too
# low; the replay is exact
MEMORY_SHARE = 0.95


@dataclass(frozen=True)
class Estimates:
    """Estimates of all candidates, as columns. Attributes: seconds: by TERMS; memory: peak bytes by
    category; sure: what they are known to."""

    candidates: Candidates
    cluster: Cluster
    seconds: Mapping[str, np.ndarray]
    memory: Mapping[str, np.ndarray]
    sure: Sureness = PUBLISHED

    @cached_property
    def step_seconds(self) -> np.ndarray:
        """Seconds of a step."""
        return np.asarray(np.sum([self.seconds[term] for term in TERMS], axis=0))

    @cached_property
    def total(self) -> np.ndarray:
        """Bytes of the fullest rank at its peak."""
        return np.asarray(np.sum(list(self.memory.values()), axis=0))

    @property
    def fits(self) -> np.ndarray:
        """A mask of the plans that fit into the device's memory."""
        return np.asarray(self.total <= MEMORY_SHARE * self.cluster.device.memory_bytes)

    @property
    def size(self) -> np.ndarray:
        """Number of ranks."""
        return np.asarray(self.candidates.rows(*AXES).prod(axis=1))

    @cached_property
    def dollars(self) -> np.ndarray | None:
        """Dollars of a step; None if no price is known."""
        price = self.cluster.device.price_an_hour
        return None if price is None else self.size * self.step_seconds * price / 3600.0

    @cached_property
    def joules(self) -> np.ndarray | None:
        """Joules of a step, counted as in results.py; None if no watts are known."""
        device = self.cluster.device
        if device.watts is None:
            return None
        idle = device.watts if device.idle_watts is None else device.idle_watts
        busy = self.seconds["compute"] + self.seconds["recompute"] + self.seconds["update"]
        host = (self.cluster.host_watts or 0.0) * self.step_seconds
        return np.asarray(
            self.size * (device.watts * busy + idle * (self.step_seconds - busy) + host)
        )


class Estimator:
    """The fast path for one model on one cluster. Args: as in plan_for."""

    def __init__(
        self,
        config: GPTConfig,
        cluster: Cluster,
        *,
        rates: Rates | None = None,
        precision: str = "bf16",
        optimizer: str = "adamw",
        float32_gradients: bool = False,
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.precision = precision
        rates = rates or Rates.of(cluster.device)
        self.sure = rates.sure
        self.cells = Cells(config, cluster, rates, precision, optimizer)
        self.layouts = Layouts(cluster)
        self.each = Each.of(ITEMSIZE[precision], masters=precision != "fp32")
        self.wider = 1
        self.main_seconds = 0.0  # of a weight and pass: its gradient is added to the main one
        if float32_gradients and precision != "fp32":
            self.wider = WIDER
            self.main_seconds = self.cells.pass_seconds(ADDED)
        self.each = self.each._replace(gradients=self.wider * self.each.gradients)
        self.update_seconds = self.cells.update_seconds()
        # a sum of gradients and the shard: read both, write one
        self.add_seconds = self.cells.pass_seconds(3.0 * ITEMSIZE[precision])

    @cached_property
    def host_update_seconds(self) -> float:
        """Seconds per weight of the optimizer on the host."""
        return self.cells.update_seconds(offload="optimizer")

    def of(self, found: Candidates) -> Estimates:
        """Return memory and seconds of all candidates."""
        if not len(found):
            none = np.zeros(0)
            return Estimates(found, self.cluster, dict.fromkeys(TERMS, none), {"parameters": none})
        work = Columns(found, self)
        memory = work.memory()
        return Estimates(found, self.cluster, work.seconds(), memory, self.sure)

    def may_fit(self, found: Candidates) -> np.ndarray:
        """Return a mask of the candidates whose weights, gradients and optimizer fit; used before
        cells are made."""
        numbers = self.config.numbers / (found.column("pp") * found.column("tp"))
        experts = self.config.expert_numbers / (found.column("pp") * found.column("tp"))
        numbers = numbers - experts + experts / found.column("ep")
        held = sum(_state(numbers, self.each, found).values())
        room = self.cluster.tiers["host"].nbytes if "host" in self.cluster.tiers else None
        away = (found.column("offload") == 1) * numbers * self.each.optimizer / _parts(found)
        fits = held <= self.cluster.device.memory_bytes
        return np.asarray(fits if room is None else fits & (away * self.cluster.per_node <= room))


def _parts(found: Candidates) -> np.ndarray:
    """Return the number of ranks that share a copy of the state."""
    shard = found.column("shard")
    return np.where(shard > 0, shard, found.rows("dp", "ep", "cp").prod(axis=1))


def _state(numbers: np.ndarray, each: Each, found: Candidates) -> dict[str, np.ndarray]:
    """Return the lasting bytes by category: memory_formula.state_bytes for columns."""
    parts = _parts(found)
    zero = found.column("zero")
    divided = {"parameters": zero >= 3, "gradients": zero >= 2, "optimizer": zero >= 1}
    held = {
        name: numbers * getattr(each, name) / np.where(where, parts, 1)
        for name, where in divided.items()
    }
    away = found.column("offload")
    held["optimizer"] = np.where(away > 0, 0.0, held["optimizer"])
    held["gradients"] = np.where((away == 2) | (away == 1) & (zero != 1), 0.0, held["gradients"])
    held["parameters"] = np.where(away == 2, 0.0, held["parameters"])
    return held


class Columns:
    """The columns of a set of candidates, with the values that they need of cells and layouts."""

    def __init__(self, found: Candidates, model: Estimator) -> None:
        self.found = found
        self.model = model
        self.pp = found.column("pp")
        self.pieces = found.column("pieces")
        self.zero = found.column("zero")
        self.copies = found.rows("dp", "ep", "cp").prod(axis=1)
        schedule = found.column("schedule")
        self.v_shaped = (schedule == SCHEDULES.index("zb-v")) & (self.pp > 1)
        # number of stages of a rank
        self.chunks = np.where((schedule == SCHEDULES.index("interleaved")) | self.v_shaped, 2, 1)
        # share of the ends (embedding, output) on a rank that has one of them
        self.end = np.where((self.pp == 1) | self.v_shaped, 1.0, 0.5)
        # share of the ends in the embedding, whose calls are the first and the last
        self.table = 1.0 if model.config.tied else 0.5
        self.layers = np.ceil(model.config.layers / (self.pp * self.chunks)) * self.chunks
        self.again = found.column("recomputed") == 1
        self.deferred = (schedule == SCHEDULES.index("zb-h1")) & (self.pp > 1)
        # a backward is two: for the input, and later for the weights
        self.split = self.deferred | self.v_shaped
        self.calls = CallColumns(found, model.cells, model.layouts, model.config)
        self.per_layer, self.per_ends = self._cells()

    # --------------------------------------------------------------------------------------- memory

    def _cells(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return weights and activations of a layer and of the ends, by each candidate's cell."""
        cuts, where = np.unique(
            self.found.rows("tp", "cp", "ep", "sequence", "rows"), axis=0, return_inverse=True
        )
        cells = [self.model.cells.cell(Cut(*map(int, cut))) for cut in cuts]
        where = where.reshape(-1)
        layer = {
            "numbers": [cell.layer_numbers for cell in cells],
            "held": [cell.layer_held for cell in cells],
            "kept": [cell.layer_kept for cell in cells],
            "inner": [cell.inner[0] for cell in cells],
            "again": [cell.inner[1] for cell in cells],
        }
        ends = {
            "numbers": [cell.ends_numbers for cell in cells],
            "held": [cell.ends_held for cell in cells],
            "after": [cell.ends_after for cell in cells],
            "kept": [cell.ends_kept for cell in cells],
        }
        return (
            {name: np.array(values, float)[where] for name, values in layer.items()},
            {name: np.array(values, float)[where] for name, values in ends.items()},
        )

    def _held_microbatches(self, *, last: bool) -> np.ndarray:
        """Return the largest number of microbatches that the first or the last stage holds, by the
        table of schedules.py."""
        pp = self.pp
        pieces = self.pieces
        each = {
            "1f1b": np.ones_like(pp) if last else np.minimum(pieces, pp),
            "gpipe": pieces,
            "zb-h1": np.minimum(pieces, pp),
            "zb-v": np.minimum(pieces, pp),
            "interleaved": np.minimum(pp + 1 if last else 3 * pp - 1, 2 * pieces) / 2,
        }
        return np.where(
            pp == 1, 1, np.choose(self.found.column("schedule"), [each[name] for name in SCHEDULES])
        )

    def memory(self) -> dict[str, np.ndarray]:
        """Return bytes by category of the first or the last stage: the one that holds more."""
        first, last = (
            self._stage(self._held_microbatches(last=ends), ends=ends) for ends in (False, True)
        )
        more = sum(first.values()) > sum(last.values())
        return {name: np.where(more, first[name], last[name]) for name in first}

    def _stage(self, held: np.ndarray, *, ends: bool) -> dict[str, np.ndarray]:
        """Return the bytes of one rank; embedding and output each have half of the ends' weights.

        Of zb-v, whose first rank has both: `ends`: of the first rank, else of the last one.
        """
        itemsize = ITEMSIZE[self.found.precision]
        share = np.where(self.pp == 1, 1.0, 1.0 if self.model.config.tied else self.end)
        share = np.where(self.v_shaped & (not ends), 0.0, share)
        found = _state(
            self.layers * self.per_layer["numbers"] + share * self.per_ends["numbers"],
            self.model.each,
            self.found,
        )
        unit = self.per_layer["numbers"] * itemsize
        largest = np.maximum(unit, share * self.per_ends["numbers"] * itemsize / 2)
        whole = np.where(self.zero == 3, unit + largest, 0.0)
        found["parameters"] = found["parameters"] + whole
        # At the peak, at the end of a forward pass, only the output's gradients exist. A recomputed
        # layer is whole later, together with the gradients of two units: one is being filled, one
        # is being sent.
        on_disk = self.found.column("offload") == 2
        first = share * self.per_ends["numbers"] * itemsize
        two = unit + largest
        filling = np.where(self.again, two, np.where(on_disk, first, largest))
        buffers = self.model.wider * np.select(
            [self.zero == 3, self.zero == 2], [filling, largest], 0.0
        )
        kept = np.where(self.again, self.per_layer["kept"], self.per_layer["held"])
        inner = np.where(self.again, self.per_layer["again"], self.per_layer["inner"])
        # gpipe keeps the losses of all microbatches
        waiting = np.where(
            (self.pp > 1) & (self.found.column("schedule") == SCHEDULES.index("gpipe")),
            (held - 1) * self.per_ends["after"],
            0.0,
        )
        output = waiting + np.where(self.again, self.per_ends["kept"], self.per_ends["held"])
        working = np.where((self.pp == 1) | ends, output, inner)
        activations = held * self.layers * kept + working
        # the later peak with the gradients of two units
        activations = np.where(
            on_disk & ~self.again, np.maximum(activations, two - first), activations
        )
        if self.split.any():
            late, deferred = self._late(held, ends=ends)
            activations = np.where(self.v_shaped | self.deferred & ends, deferred, activations)
            # ZeRO-2 and 3: the gradients of the whole stage lie there when its weight backward ends
            stage = (self.layers * unit + share * self.per_ends["numbers"] * itemsize) / self.chunks
            stage = self.model.wider * stage
            later = np.where(self.zero >= 2, stage - late - whole, 0.0)
            buffers = np.where(self.split, np.maximum(later, 0.0), buffers)
        found["gradients"] = found["gradients"] + buffers
        # a gradient that arrives, and one that leaves
        messages = 0 if ends else 2
        found["communication"] = np.where(self.pp > 1, messages * self.calls.hop_bytes(), 0.0)
        # one microbatch on one copy: gradients are made while activations are freed
        found["activations"] = np.where(
            (self.pieces == 1) & (self.copies == 1),
            np.maximum(0.0, activations - found["gradients"]),
            activations,
        )
        return found

    def _late(self, held: np.ndarray, *, ends: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return the activations of a stage whose weight backward waits, and of the whole rank at
        its peak.

        zb-h1, last rank: all its microbatches except one wait. zb-v: one stage waits, and 2p - 1
        stages hold a forward; on the last rank at the end of the step 2p - 1 stages wait.
        """
        late = np.zeros(len(self.found))
        peak = np.zeros(len(self.found))
        cuts = self.found.rows("tp", "sequence")
        sequences = self.found.column("rows") / self.found.column("cp")
        for tp, sequence in np.unique(cuts[self.split], axis=0).tolist():
            cell = self.model.cells.late(tp, sequence)
            here = self.split & (cuts == (tp, sequence)).all(axis=1)
            layers = self.layers / self.chunks
            one, more = (layer * self.layers + end for layer, end in (cell.held, cell.more))
            each = sequences * cell.more[0] * layers
            others = (2 * self.pp - 1) * layers * self.per_layer["held"]
            first = others + each + sequences * cell.more[1]
            last = np.maximum(others + each, (2 * self.pp - 1) * each)
            value = np.where(
                self.v_shaped, first if ends else last, sequences * (one + (held - 2) * more)
            )
            late[here] = each[here]
            peak[here] = value[here]
        return late, peak

    # ----------------------------------------------------------------------------------------- time

    def seconds(self) -> dict[str, np.ndarray]:
        """Return the seconds by TERMS."""
        inner = self.calls.inner()
        dp = self.calls.data(self.model.wider)
        hop = self.calls.hop()
        layers = self.layers
        pieces = self.pieces
        forward = inner["forward"] + sum(inner[f"forward {axis}"] for axis in ("tp", "cp", "ep"))
        again = np.where(self.again, forward, 0.0)
        backward = (
            inner["backward"]
            + sum(inner[f"backward {axis}"] for axis in ("tp", "cp", "ep"))
            + again
        )
        weights = self._weights_share() * inner["backward"]
        behind = self._behind(dp, forward, backward, weights)
        halves = (
            layers * forward + behind[0],
            layers * (backward - weights) + behind[1],
            layers * weights + behind[2],
        )
        own, own_ends = self._own_kernels()
        found = {
            "compute": pieces
            * (
                layers * (inner["forward"] + inner["backward"] + own)
                + inner["ends"]
                + self.end * own_ends
            ),
            "recompute": pieces * layers * np.where(self.again, inner["forward"], 0.0),
            "bubble": self._bubble(*halves),
        }
        for axis in ("tp", "cp", "ep"):
            again_axis = np.where(self.again, inner[f"forward {axis}"], 0.0)
            found[axis] = pieces * (
                layers * (inner[f"forward {axis}"] + inner[f"backward {axis}"] + again_axis)
                + inner[f"ends {axis}"]
            )
        found["pp"] = hop * self._hops()
        found["dp"] = pieces * (sum(behind) + self._tables(dp)) + self._once(
            dp, layers * backward, layers * forward
        )
        numbers = layers * self.per_layer["numbers"] + self.per_ends["numbers"] * self.end
        share = numbers / np.where(self.zero >= 1, _parts(self.found), 1)
        away = self.found.column("offload")
        found["update"] = np.where(away == 1, 0.0, share * self.model.update_seconds)
        # each microbatch but the first adds its gradients to those before: whole ones, or with
        # ZeRO-2 and 3 sums
        added = np.where((self.zero >= 2) & (self.copies > 1), share, numbers)
        found["compute"] = found["compute"] + np.where(
            away == 0,
            (pieces - 1) * added * self.model.add_seconds
            + pieces * numbers * self.model.main_seconds,
            0.0,
        )
        found["offload"] = self._offload(share, found["compute"] / 3)
        found["host"] = np.maximum(0.0, self._launching(inner) - sum(found.values()))
        return found

    def _launching(self, inner: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the seconds in which the host of a rank launches the kernels of a step."""
        layer = inner["launch forward"] * (1 + self.again) + inner["launch backward"]
        own, own_ends = self._own_kernels(launched=True)
        ends = self.end * (inner["launch ends"] + own_ends)
        return np.asarray(self.pieces * (self.layers * (layer + own) + ends))

    def _own_kernels(self, *, launched: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of the data axis's own kernels in a pass, of a layer and of the ends:
        on the device, or at the host that launches them."""
        cuts, where = np.unique(self.found.rows("tp", "zero"), axis=0, return_inverse=True)
        cells = self.model.cells
        made = np.array(
            [cells.data_kernels(tp, zero, launched=launched) for tp, zero in cuts.tolist()]
        )
        divided = np.where(self.copies > 1, 1.0, 0.0)
        layer, ends = made[where.reshape(-1)].T
        return divided * layer, divided * ends

    def _weights_share(self) -> np.ndarray:
        """Return the share of the weight backward in the seconds of a backward; 0 where it is not
        split."""
        found = np.zeros(len(self.found))
        cuts = self.found.rows("tp", "sequence")
        for tp, sequence in np.unique(cuts[self.split], axis=0).tolist():
            here = self.split & (cuts == (tp, sequence)).all(axis=1)
            found[here] = self.model.cells.late(tp, sequence).share
        return found

    def _behind(
        self,
        dp: Mapping[str, np.ndarray],
        forward: np.ndarray,
        backward: np.ndarray,
        weights: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the exposed seconds of the data axis per microbatch in forward, backward, and
        weight backward: ZeRO-2 reduces, ZeRO-3 gathers twice and reduces.

        Each stage of a rank waits for its first gather and its last reduction, and a layer for
        what takes longer than its computing. A weight backward sends when all is computed, and
        waits for all of it.

        Args:    forward, backward: seconds of a layer; weights: of its weight backward, 0 where
                 backward is not split.
        """
        others = self.layers - self.chunks  # layers with one before them in their stage
        gather = np.where(self.zero == 3, dp["gather"], 0.0)
        reduce = np.where(self.zero >= 2, dp["reduce"], 0.0)
        ahead = self.chunks * gather + others * np.maximum(0.0, gather - forward)
        input_only = self.chunks * gather + others * np.maximum(0.0, gather - backward + weights)
        # ZeRO-2 starts a bucket when the one before it has arrived. The MLP's first matrix, a third
        # of a layer, travels behind the backward of the next one, a twelfth. Without tp a norm, of
        # no time, comes behind the attention's first matrix, a quarter.
        own = np.where(self.again, backward - forward, backward)
        waits = np.where(self.found.column("tp") == 1, reduce / 4, reduce / 3 - own / 12)
        second = self.chunks * reduce / 4 + others * np.maximum.reduce(
            [np.zeros(len(self.found)), waits, reduce - backward]
        )
        third = self.chunks * (gather + reduce) + others * np.maximum(
            0.0, gather + reduce - backward
        )
        whole = np.where(self.zero == 2, second, third)
        none = np.zeros(len(self.found))
        divided = self.copies > 1
        return (
            np.where(divided, ahead, none),
            np.where(divided, np.where(self.split, input_only, whole), none),
            np.where(divided & self.split, self.layers * reduce, none),
        )

    def _tables(self, dp: Mapping[str, np.ndarray]) -> np.ndarray:
        """Return the exposed seconds of the data axis per microbatch for embedding and output, of
        which a rank of a pipeline has one: ZeRO-3's gather of the first that a pass needs, and the
        reduction of the embedding, which is the last."""
        gathered = np.where(self.zero == 3, self.end * dp["ends gather"], 0.0)
        if self.model.config.tied:  # the root: gathered once per step
            gathered = np.where(self.zero == 3, 2 * dp["ends gather"] / self.pieces, 0.0)
        reduced = np.where(self.split, self.end, self.table) * dp["ends reduce"]
        return np.where(self.copies > 1, gathered + np.where(self.zero >= 2, reduced, 0.0), 0.0)

    def _bubble(self, forward: np.ndarray, inputs: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Return the seconds of the bubble: the fill and drain of the other stages, added to the
        microbatches of the slowest stage, which also has the output.

        Args:    seconds of a microbatch on a rank, without the ends: forward, backward, and the
                 weight backward where backward is split.
        """
        once = self.pp - 1
        shortest = np.minimum(weights, np.minimum(forward, inputs))
        each = {
            "1f1b": once * (forward + inputs),
            "gpipe": once * (forward + inputs),
            "interleaved": once * (forward + inputs) / 2,
            # the weight backwards fill what they can of it
            "zb-h1": once * (forward + inputs - shortest),
            "zb-v": once / 2 * np.maximum(inputs, forward + inputs - weights)
            + np.maximum(0, self.pp - 2) / 2 * np.maximum(0.0, weights - inputs),
        }
        return np.where(
            self.pp == 1,
            0.0,
            np.choose(self.found.column("schedule"), [each[name] for name in SCHEDULES]),
        )

    def _hops(self) -> np.ndarray:
        """Return the number of hops between stages that a step waits for, by schedule."""
        pp = self.pp
        each = {
            "1f1b": 2 * (pp - 1) * (1 + (self.pieces - 1) / pp),
            "gpipe": 2 * (pp - 1),
            "interleaved": 4 * pp - 2,
            "zb-h1": 4 * (pp - 1),
            "zb-v": 5 * pp - 7,
        }
        return np.where(
            pp == 1, 0, np.choose(self.found.column("schedule"), [each[name] for name in SCHEDULES])
        )

    def _once(
        self, dp: Mapping[str, np.ndarray], backward: np.ndarray, forward: np.ndarray
    ) -> np.ndarray:
        """Return the exposed seconds of the data axis's calls once per step: ZeRO-0 and 1 reduce,
        ZeRO-1 and 2 gather, and copies of the state are summed. The last call is never hidden,
        because nothing is left to compute; of ZeRO-0 and 1 that is a bucket, and of a small model
        all."""
        layers = self.layers
        bucket = np.where(self.zero <= 1, np.minimum(1.0, BUCKET_BYTES / self._sent_bytes()), 0.0)
        piped = self.pp > 1
        half = self.end
        reduced = layers * dp["reduce"] + half * dp["ends reduce"]
        hidden = np.where(piped, 0.0, backward)
        once = np.where(
            self.zero <= 1,
            np.maximum.reduce([self.table * dp["ends reduce"], bucket * reduced, reduced - hidden]),
            0.0,
        )
        gathers = layers * dp["gather"] + half * dp["ends gather"]
        late = np.where(
            (self.zero == 1) | (self.zero == 2),
            np.maximum.reduce(
                [self.table * dp["ends gather"], bucket * gathers, gathers - forward]
            ),
            0.0,
        )
        # the sums of a unit begin when the next unit's reduction does
        copies = np.maximum(
            np.minimum(2, layers) * dp["copies"] + dp["ends copies"] / 2,
            layers * dp["copies"] + half * dp["ends copies"] - hidden,
        )
        return np.where(self.copies > 1, once + late + copies, 0.0)

    def _sent_bytes(self) -> np.ndarray:
        """Return the bytes of all gradients of a rank."""
        numbers = self.layers * self.per_layer["numbers"] + self.end * self.per_ends["numbers"]
        return np.asarray(numbers * ITEMSIZE[self.found.precision])

    def _offload(self, numbers: np.ndarray, forward: np.ndarray) -> np.ndarray:
        """Return the exposed seconds of moving `numbers` of a rank to and from host or disk;
        `forward`: seconds of the passes that hide moves.

        The optimizer on the host: gradients move to the host behind backward, weights move back
        behind the host's passes over its state. All on disk: reads and writes share few buffers, so
        only forward passes hide some; then the update reads run by run, and writes the last.
        """
        away = self.found.column("offload")
        itemsize = ITEMSIZE[self.found.precision]
        found = np.zeros(len(numbers))
        if (away == 1).any():
            a_byte = self.model.cluster.move_seconds("host", 1 << 30) / (1 << 30)
            passes = np.where(self.zero == 1, 1, self.pieces)  # ZeRO-1 sends gradients down once
            late = np.maximum(0.0, numbers * a_byte * itemsize * passes - 2 * forward)
            found = np.where(away == 1, numbers * self.model.host_update_seconds + late, found)
        if (away == 2).any():
            a_byte = self.model.cluster.move_seconds("disk", 1 << 30) / (1 << 30)
            late = np.maximum(0.0, numbers * a_byte * itemsize * (4 * self.pieces - 1) - forward)
            found = np.where(away == 2, numbers * a_byte * self._update_bytes() + late, found)
        return found

    def _update_bytes(self) -> np.ndarray:
        """Return the bytes per number that an update on disk waits for: gradients, masters and
        states, and the last run's writes."""
        itemsize = ITEMSIZE[self.found.precision]
        state = self.model.each.optimizer
        read = itemsize * (2 if self.found.precision == "fp32" else 1) + state
        return np.asarray(read + (itemsize + state) / (self.layers + 1))
