"""Chapter 19 · An activation budget: of what blocks keep, the part that saves most time and fits
into a given memory.

The idea. To compute a block again costs time, to keep it costs memory, and both can be measured.
With a budget of so many bytes the question which blocks to compute again is a knapsack: each block
goes one of three ways,

    way         bytes that it adds to "all"     seconds that it adds to "none"
    "none"      k (a - x')                      0
    "scores"    k (a - s - x')                  backward with scores computed again - backward
                                                without
    "all"       0                               its forward

and the sum of the seconds is to be least while the bytes fit. a: all that a block keeps; s: its
probabilities; x': what its kept input takes; k: how many microbatches a rank holds of it at once (1
without a pipeline). The bytes of a step in which all blocks are computed again are the floor: a
smaller budget is an error. Without a pipeline the last block's way counts only between its forward
and its backward, because its inside is there afterwards anyway.

The first MEASURED steps run with all blocks computed again, in turn with and without kept scores,
and each block is watched: the bytes that its second forward adds to the account, the seconds of its
forward and of its backward. Then all ranks take the largest of what they saw (one all-reduce),
solve the same knapsack, and continue with its blocks.

The weights do not depend on the choice, but for float32's rounding where scores are chosen: they
come from another formula. Another run may measure other times and choose other blocks. After a
resume the first steps are measured again.

    front = {0: 0}                                bytes -> the least seconds so far, and the ways
                                                  that give them
    for block: front = {bytes + b: seconds + t}   for each entry and way that fits; of equal bytes
                                                  the fastest

Never more than the budget: at any moment a rank holds at most what it held then in the first steps,
and what the ways add. Cost: MEASURED steps at the speed of "all"; an all-reduce of 5 numbers a
block and 2 a stage, under `control`.

notes:   N2 §10.4
Source:  Korthikanti et al. 2022 (selective recomputation); Jain et al. 2020, "Checkmate"
         (recomputation as a choice under a budget).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, array_module, on_host
from minidist.errors import MemoryLimitError
from minidist.nn.hooks import HookHandle
from minidist.parallel.memory.activations import ALL, NONE, SCORES

MEASURED = 4  # steps: two with kept scores, two without


class Way(NamedTuple):
    """One way to treat a block: bytes that are kept, seconds that are spent to make the rest
    again."""

    nbytes: int
    seconds: float


def plain_knapsack(blocks: Sequence[Mapping[str, Way]], limit: int) -> list[str] | None:
    """Return the way of each block with the fewest seconds in all, among those with at most `limit`
    bytes; None if none fits."""
    front: dict[int, tuple[float, list[str]]] = {0: (0.0, [])}  # bytes -> seconds, ways
    for block in blocks:
        found: dict[int, tuple[float, list[str]]] = {}
        for nbytes, (seconds, ways) in front.items():
            for name, way in block.items():
                total = nbytes + way.nbytes
                spent = seconds + way.seconds
                if total <= limit and (total not in found or spent < found[total][0]):
                    found[total] = spent, [*ways, name]
        front = found
    return min(front.values(), key=lambda choice: choice[0])[1] if front else None


# The plain version is exact. Its front grows with the number of different sums of bytes; `knapsack`
# drops an entry that another one beats in both bytes and seconds.


def knapsack(blocks: Sequence[Mapping[str, Way]], limit: int) -> list[str] | None:
    """As plain_knapsack; ties go to the first way of each block, if all of these fit."""
    first = [next(iter(block.items())) for block in blocks]
    if sum(way.nbytes for _, way in first) <= limit and not any(way.seconds for _, way in first):
        return [name for name, _ in first]
    front: list[tuple[int, float, list[str]]] = [(0, 0.0, [])]
    for block in blocks:
        found = sorted(
            (
                (nbytes + way.nbytes, seconds + way.seconds, [*ways, name])
                for nbytes, seconds, ways in front
                for name, way in block.items()
                if nbytes + way.nbytes <= limit
            ),
            key=lambda choice: choice[:2],
        )
        front = []
        fastest = float("inf")
        for choice in found:
            if choice[1] < fastest:
                front.append(choice)
                fastest = choice[1]
    return front[-1][2] if front else None


class _BlockWatch:
    """What one block of this rank was seen to keep and to take, in the steps with kept scores and
    in those without.

    Attributes: kept: bytes that its second forward added, its input not among them; given: that
    input's shape and
                itemsize.
    """

    def __init__(self, block: Any, memory: MemoryAccount) -> None:
        self.block = block
        self.memory = memory
        self.kept = {True: 0, False: 0}
        self.given: tuple[tuple[int, ...], int] = (0, 1), 1
        self._seconds: dict[tuple[str, bool], list[float]] = {}
        self._spent = {"forward": 0.0, "backward": 0.0}
        self._begun = 0.0
        self._before = 0
        self._again = False
        self._gpu: Any = None
        self._handles: list[HookHandle] = [
            block.register_forward_pre_hook(lambda _, args: self._given(args[0].data)),
            block.register_forward_hook(lambda *_: self._end("forward")),
            block.register_backward_pre_hook(lambda _: self._begin(again=True)),
            block.register_backward_hook(lambda _: self._end("backward")),
            block.norm_attention.register_forward_pre_hook(lambda *_: self._inside()),
            block.dropout_mlp.register_backward_pre_hook(lambda _: self._made()),
        ]

    def _given(self, x: Array) -> None:
        self.given = (x.shape, x.dtype.itemsize)
        self._gpu = None if on_host(x) else array_module(x)
        self._begin(again=False)

    def _begin(self, *, again: bool) -> None:
        self._begun = _now(self._gpu)
        self._again = again

    def _end(self, part: str) -> None:
        self._spent[part] += _now(self._gpu) - self._begun
        self._again = False

    def _inside(self) -> None:
        self._before = self.memory.now["activations"]

    def _made(self) -> None:
        if self._again:
            scores = self.block.attention.keeps_scores
            self.kept[scores] = max(
                self.kept[scores], self.memory.now["activations"] - self._before
            )

    def step_done(self) -> None:
        """Take down the seconds of a step."""
        for part, seconds in self._spent.items():
            self._seconds.setdefault((part, self.block.attention.keeps_scores), []).append(seconds)
        self._spent = dict.fromkeys(self._spent, 0.0)

    def numbers(self, keeper: Any) -> list[float]:
        """Bytes with scores and without, seconds of a forward, more seconds of a backward without,
        the kept input's."""
        fastest = {key: min(seconds) for key, seconds in self._seconds.items()}
        more = max(0.0, fastest["backward", False] - fastest["backward", True])
        shape, itemsize = self.given
        whole = int(np.prod(shape)) * itemsize
        own = whole if keeper is None else keeper.device_bytes(shape, itemsize)
        return [
            self.kept[True] + whole,
            self.kept[False] + whole,
            min(fastest["forward", True], fastest["forward", False]),
            more,
            own,
        ]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()


def _now(gpu: Any) -> float:
    """Seconds, when the device has done what it was asked; `gpu`: CuPy, or None."""
    if gpu is not None:
        gpu.cuda.get_current_stream().synchronize()
    return time.perf_counter()


class _PeakWatch:
    """A rank's highest activations: while its last block waits for backward (`waiting`), and at
    other times."""

    def __init__(self, last: Any, memory: MemoryAccount) -> None:
        self.memory = memory
        self.waiting = 0
        self.others = 0
        # peaks of the whole time, from the first forward on
        self._whole: dict[str, int] | None = None
        self._handles = [
            last.register_forward_hook(lambda *_: self._turn(waits=False)),
            last.register_backward_pre_hook(lambda *_: self._turn(waits=True)),
        ]

    def _turn(self, *, waits: bool) -> None:
        """A stretch of time ends, in which the last block waited or not; the account's own peak is
        put together."""
        peak = self.memory.peak
        if self._whole is not None and waits:
            self.waiting = max(self.waiting, peak["activations"])
        # else what was before this budget: later steps have the same forward
        elif self._whole is not None:
            self.others = max(self.others, peak["activations"])
        self._whole = {
            name: max(nbytes, (self._whole or peak)[name]) for name, nbytes in peak.items()
        }
        self.memory.reset_peak()

    def step_done(self) -> None:
        """What comes after the last block's backward began is another time."""
        self._turn(waits=False)

    def remove(self) -> None:
        """Stop watching; the account's peak is that of the whole time again."""
        for handle in self._handles:
            handle.remove()
        self.memory.raise_peak(self._whole or {})


@dataclass(frozen=True)
class Stage:
    """The blocks of one rank of the pipeline: their layers, and how many microbatches it holds of
    each at once."""

    layers: tuple[int, ...]
    held: int = 1


class ActivationBudget:
    """Measures the first steps of a job, then chooses blocks. Every rank makes one, with equal
    arguments but the first.

    Args:    blocks: this rank's, by layer, which are checkpointed from now on; keeper: of their
             inputs, or None.
             stages: of all ranks of the pipeline, of which this one is number `rank`; world: all
             ranks.
    Attributes: chosen: "none", "scores" or "all" for each layer of the whole model; None while it
    measures.
    """

    def __init__(
        self,
        blocks: Mapping[int, Any],
        keeper: Any,
        limit: int,
        *,
        stages: Sequence[Stage],
        rank: int,
        world: Group,
        memory: MemoryAccount,
    ) -> None:
        self.blocks = blocks
        self.keeper = keeper
        self.limit = limit
        self.world = world
        self.stages = stages
        self.rank = rank
        self.steps = 0
        self.layers = sum(len(stage.layers) for stage in stages)
        self.chosen: list[str] | None = None
        for block in blocks.values():
            block.recomputed = True
            block.keeper = keeper
        self._watches = {layer: _BlockWatch(block, memory) for layer, block in blocks.items()}
        self._peaks = _PeakWatch(blocks[max(blocks)], memory) if blocks else None

    def step_done(self) -> None:
        """After each step; the last measured one ends in the choice. Raises: MemoryLimitError if
        nothing fits."""
        if self.chosen is not None:
            return
        self.steps += 1
        for watch in self._watches.values():
            watch.step_done()
        if self._peaks is not None:
            self._peaks.step_done()
        for block in self.blocks.values():
            block.attention.keeps_scores = self.steps % 2 == 0
        if self.steps == MEASURED:
            seen, peaks = self._agreed()
            self._take(self._choose(seen, peaks))

    def recomputed_steps(self, steps: int) -> list[int]:
        """For each layer, in how many of the job's first steps it was computed again."""
        measured = min(steps, MEASURED)
        return [
            measured + (steps - measured) * (way == ALL)
            for way in self.chosen or [ALL] * self.layers
        ]

    def _agreed(self) -> tuple[np.ndarray, np.ndarray]:
        """The largest that any rank saw: of each layer its watch's numbers, of each stage its two
        peaks."""
        seen = np.zeros((self.layers, 5))
        peaks = np.zeros((len(self.stages), 2))
        for layer, watch in self._watches.items():
            seen[layer] = watch.numbers(self.keeper)
        if self._peaks is not None:
            peaks[self.rank] = self._peaks.waiting, self._peaks.others
        with self.world.ledger.control():
            both = self.world.all_reduce(
                np.concatenate([seen.reshape(-1), peaks.reshape(-1)]), op="max"
            )
        return both[: seen.size].reshape(seen.shape), both[seen.size :].reshape(peaks.shape)

    def _choose(self, seen: np.ndarray, peaks: np.ndarray) -> list[str]:
        chosen = [NONE] * self.layers
        for rank, stage in enumerate(self.stages):
            waiting, others = map(int, peaks[rank])
            if max(waiting, others) > self.limit:
                who = f"stage {rank} needs" if len(self.stages) > 1 else "a rank needs"
                raise MemoryLimitError(
                    f"activation memory: with every block computed again {who} "
                    f"{max(waiting, others):,} bytes, and the limit is {self.limit:,}; raise it, "
                    "or use fewer sequences per pass (accumulate)"
                )
            ways = [_ways(seen[layer], stage.held) for layer in stage.layers]
            if len(self.stages) == 1:
                found = _with_last(ways, self.limit - waiting, self.limit - others)
            else:
                found = knapsack(ways, self.limit - max(waiting, others)) or []
            for layer, way in zip(stage.layers, found, strict=True):
                chosen[layer] = way
        return chosen

    def _take(self, chosen: list[str]) -> None:
        """From now on the blocks go the chosen ways."""
        self.chosen = chosen
        for layer, block in self.blocks.items():
            self._watches[layer].remove()
            block.recomputed = chosen[layer] == ALL
            block.attention.keeps_scores = chosen[layer] != SCORES
        if self._peaks is not None:
            self._peaks.remove()
        self._watches = {}
        self._peaks = None


def _ways(seen: np.ndarray, held: int) -> dict[str, Way]:
    """The three ways of a block, of which a rank holds so many at once; from its watch's
    numbers."""
    kept, without, forward, more, own = seen.tolist()
    return {
        NONE: Way(held * max(0, int(kept - own)), 0.0),
        SCORES: Way(held * max(0, int(without - own)), more),
        ALL: Way(0, forward),
    }


def _with_last(blocks: Sequence[Mapping[str, Way]], waiting: int, others: int) -> list[str]:
    """As knapsack, where the last block's bytes count against `waiting` alone, and those of all
    others against both."""
    best: tuple[float, list[str]] = float("inf"), []
    for name, way in blocks[-1].items():
        rest = knapsack(blocks[:-1], min(waiting - way.nbytes, others))
        if rest is not None:
            seconds = way.seconds + sum(
                block[each].seconds for block, each in zip(blocks, rest, strict=False)
            )
            best = min(best, (seconds, [*rest, name]), key=lambda choice: choice[0])
    return best[1]
