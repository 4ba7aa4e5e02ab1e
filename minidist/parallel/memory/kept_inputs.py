"""Chapter 19 · Kept inputs: what checkpointing keeps of a block is cut over ranks, rounded, or sent
to another memory.

The idea. A checkpointed model of L blocks keeps L inputs, x bytes each, and needs each one once, at
a known time: just before the block's second forward. Until then it need not lie whole, exact and on
the device. Three ways, in this order:

    "8bit"      a number becomes a code of one byte, with one float32 scale for GROUP numbers of a
                token. It is rounded up or down by chance (stochastic rounding), so that its
                expectation is the number itself
    "shard"     the ranks of tp have the same x: each keeps 1/P of it, and backward gathers it
                (ZeRO-R's Pa)
    "offload"   it goes to the host while the next block computes, and comes back while the block
                behind it does

               forward                           backward
    keep       x1 -> codes -> own part -> host   host -> own part -> all-gather -> x1
    compute         block 2  …                   block 2 again, backward 2        block 1 again

What a rank holds at the end of forward instead of L x, N numbers an input (x = 4 N in float32,
width a multiple of GROUP), and what moves in a step; the ways go together (8bit and shard: the
gather is of codes):

                device                  host     sent over tp, all ranks together     moved down, and up
    8bit        L N (1 + 4/GROUP)
    shard       L x / P                          L (P - 1) x
    offload     those on their way, ≤ 2 x  L x                                         L x each way

Exact: shard and offload give the same bits. Not exact: 8bit. A restored number is off by less than
its group's scale, the group's largest number over 127; errors of different numbers are independent
and cancel on average. The forward does not see them: the loss of a step is exact, its gradients are
those of blocks with inputs that are a little off. Chance is a hash of (block, seed, step, token,
column), as in dropout, so it does not depend on how the job is cut.

notes:   N1 §2.2, N2 §10.4
Source:  Rajbhandari et al. 2020, "ZeRO", §6.1 (Pa, Pa+cpu); Chen et al. 2021, "ActNN" (stochastic
         rounding by groups).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minidist.autograd.ops.arithmetic import row_blocks
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.device.backend import Array, array_module, device_of, empty, random_uniform, widen
from minidist.device.device_copies import copy, host_bytes, mark
from minidist.device.memory_traffic import MemoryTraffic
from minidist.nn import DropoutKey
from minidist.parallel.memory.transfer_lanes import Move, Pace, TransferLane
from minidist.parallel.step.recorder import Recorder, Silent

GROUP = 128  # numbers of a token with one scale
LARGEST = 127  # code


def plain_codes(x: np.ndarray, chance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and the scale of one group of numbers, rounded up with the probability of the
    fraction; code × scale is x on average."""
    scale = np.abs(x).max() / LARGEST
    return np.floor(x / scale + chance).astype(np.int8), scale  # chance: uniform in [0, 1)


# The real one takes all tokens at once, and draws its chances by token and column.


def quantise(x: Array, *, name: str, seed: int, tokens: Array) -> tuple[Array, Array]:
    """Codes, int8 (…, n), and scales, float32 (…, ⌈n/GROUP⌉), of x (…, n); stochastic rounding.

    Args:    tokens: (…) integers, the global number of each token; with `name` and `seed` the key
             of its chances.
    A group with inf or NaN is restored as NaN.
    """
    xp = array_module(x)
    n = x.shape[-1]
    rows = x.reshape(-1, n)
    places = xp.asarray(tokens, dtype="int64").reshape(-1)
    codes = xp.empty(rows.shape, np.int8)
    scales = xp.empty((len(rows), -(-n // GROUP)), np.float32)
    for block in row_blocks(rows):
        values = widen(rows[block])
        chances = random_uniform(name, seed, places[block, None] * n + xp.arange(n), values.dtype)
        for group, start in enumerate(range(0, n, GROUP)):
            columns = slice(start, start + GROUP)
            part = values[:, columns]
            scale = xp.abs(part).max(axis=1) / values.dtype.type(LARGEST)
            scales[block, group] = scale
            fine = (xp.isfinite(scale) & (scale > 0))[:, None]
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = xp.where(fine, part / scale[:, None], 0) + chances[:, columns]
            codes[block, columns] = xp.where(fine, xp.floor(ratio).clip(-LARGEST, LARGEST), 0)
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], scales.shape[1])


def restore(codes: Array, scales: Array, kind: np.dtype) -> Array:
    """code × scale, of dtype `kind`: (…, n)."""
    xp = array_module(codes)
    n = codes.shape[-1]
    wide = np.float64 if kind == np.float64 else np.float32
    with np.errstate(invalid="ignore"):
        whole = codes * xp.repeat(scales, GROUP, axis=-1)[..., :n].astype(wide)
    return whole.astype(kind, copy=False)


def bytes_of(numbers: int, width: int, itemsize: int, ways: Sequence[str]) -> int:
    """Bytes that stand for so many numbers of tokens of `width`, before they are cut."""
    return (
        numbers // width * (width + 4 * -(-width // GROUP))
        if "8bit" in ways
        else numbers * itemsize
    )


class InputKeeper:
    """Keeps the inputs of checkpointed blocks in the ways of a plan: a Module's `keeper`.

    Args:    ways: some of WAYS; tp: the ranks with the same inputs, for "shard"; own: of all tokens
             of a key those of the inputs here (None: all); host: the account of the host's memory;
             pace: how slow a bus to imagine.
    Attributes: inputs, held: bytes of the inputs that were kept, and of what stood for them on this
    rank.
             traffic: bytes moved between device and host.
    """

    def __init__(
        self,
        ways: Sequence[str],
        *,
        tp: Group | None = None,
        own: Any = None,
        host: MemoryAccount | None = None,
        recorder: Recorder | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.ways = tuple(ways)
        self.tp = tp
        self.own = own
        self.host = host or MemoryAccount(whose="host memory")
        self.inputs = self.held = 0
        self.traffic = MemoryTraffic()
        lane = partial(TransferLane, traffic=self.traffic, recorder=recorder or Silent(), pace=pace)
        self.down = lane("device", "host")
        self.up = lane("host", "device")
        self._going: Move | None = None
        self._free: dict[int, list[Array]] = {}  # host buffers that no input is in, by size

    def __call__(self, where: str, args: tuple[Any, ...], x: Array) -> "KeptInput":
        """Put x away, the input of the block at path `where`; the key is among its other arguments
        `args`."""
        arrays = (x,)
        if "8bit" in self.ways:
            arrays = self._codes(
                where, next((arg for arg in args if isinstance(arg, DropoutKey)), None), x
            )
        shapes = [array.shape for array in arrays]
        if "shard" in self.ways:
            arrays = tuple(map(self._own_part, arrays))
        nbytes = sum(array.nbytes for array in arrays)
        self.inputs = self.inputs + x.nbytes
        self.held = self.held + nbytes
        if "offload" in self.ways:
            return KeptInput(
                self, x, shapes, [self._go_down(where, array) for array in arrays], where
            )
        return KeptInput(
            self,
            x,
            shapes,
            [account.current().hold(array, "activations") for array in arrays],
            where,
        )

    def _codes(self, where: str, key: DropoutKey | None, x: Array) -> tuple[Array, ...]:
        if key is None:
            key = DropoutKey.of_sequences(0, 0, 0, *x.shape[:2])
        elif self.own is not None:
            key = DropoutKey(key.seed, key.step, key.tokens[:, self.own(key.tokens.shape[1])])
        return quantise(x, name=f"{where}/kept/{key.step}", seed=key.seed, tokens=key.tokens)

    def _own_part(self, array: Array) -> Array:
        """A copy of this rank's part of the flattened array: as a view it would keep the whole
        alive."""
        assert self.tp is not None
        edges = bounds(array.size, self.tp.size)
        return array.reshape(-1)[edges[self.tp.rank] : edges[self.tp.rank + 1]].copy()

    def device_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes on the device that stand for an input between forward and backward; with "shard"
        the smallest part's."""
        whole = bytes_of(int(np.prod(shape)), shape[-1], itemsize, self.ways)
        return (
            0
            if "offload" in self.ways
            else whole // (self.tp.size if self.tp and "shard" in self.ways else 1)
        )

    def gather(self, part: Array, shape: tuple[int, ...]) -> Array:
        """The whole array on every rank. Cost: an all-gather."""
        assert self.tp is not None
        return self.tp.all_gather(part, algorithm="ring").reshape(shape)

    # ----------------------------------------------------------------------------------------- host

    def _go_down(self, where: str, array: Array) -> Array:
        """The array's place on the host, into which it begins to go: at most one waits for the
        bus."""
        if self._going is not None:
            self._going.wait()
        room = self._room(array.nbytes, device_of(array)).view(array.dtype).reshape(array.shape)
        self._going = self.down.start(
            f"input of {where} down", array.nbytes, partial(copy, array, room, mark(array))
        )
        return room

    def come_up(self, where: str, there: Array, device: str) -> tuple[Array, Move]:
        """The array's place on the device, into which it begins to come."""
        if self._going is not None:
            self._going.wait()
        here = account.current().hold(empty(there.shape, there.dtype, device), "activations")
        return here, self.up.start(
            f"input of {where} up", there.nbytes, partial(copy, there, here, mark(here))
        )

    def _room(self, nbytes: int, device: str) -> Array:
        free = self._free.setdefault(nbytes, [])
        return free.pop() if free else self.host.hold(host_bytes(nbytes, device), "activations")

    def give_back(self, there: Array) -> None:
        """A buffer on the host is free for the next input."""
        self._free[there.nbytes].append(there.reshape(-1).view(np.uint8))

    def close(self) -> None:
        """End the threads."""
        self.down.close()
        self.up.close()

    def record(self) -> dict[str, Any]:
        """For metrics.json: bytes of inputs and of what stood for them in all steps, moves, and the
        host's memory."""
        return {
            "input_bytes": self.inputs,
            "kept_bytes": self.held,
            "moved_bytes": dict(self.traffic.step),
            "host_bytes": self.host.peak["activations"],
        }


class KeptInput:
    """One input that a keeper has: parts of its codes or numbers, on the device or the host."""

    def __init__(
        self,
        keeper: InputKeeper,
        x: Array,
        shapes: list[tuple[int, ...]],
        arrays: list[Array],
        where: str,
    ) -> None:
        self.keeper = keeper
        self.shapes = shapes
        self.arrays = arrays
        self.where = where
        self.kind = x.dtype
        self.device = device_of(x)
        self.coming: list[tuple[Array, Move]] | None = None

    def prefetch(self) -> None:
        """Begin to bring it back to the device."""
        if "offload" in self.keeper.ways and self.coming is None and self.arrays:
            self.coming = [
                self.keeper.come_up(self.where, there, self.device) for there in self.arrays
            ]

    def take(self) -> Array:
        """The input, whole on the device. Cost: with "shard" an all-gather of each array."""
        arrays = self.arrays
        if "offload" in self.keeper.ways:
            self.prefetch()
            coming = self.coming or []
            self.coming = None
            for there, (_, move) in zip(arrays, coming, strict=True):
                move.wait()
                self.keeper.give_back(there)
            arrays = [here for here, _ in coming]
        self.arrays = []
        if "shard" in self.keeper.ways:
            arrays = [
                self.keeper.gather(part, shape)
                for part, shape in zip(arrays, self.shapes, strict=True)
            ]
        whole = (
            restore(arrays[0], arrays[1], self.kind) if "8bit" in self.keeper.ways else arrays[0]
        )
        return account.current().hold(whole, "activations")
