"""Chapter 26 · Peer copies: a rank's part of the state is also in the memory of another rank.

    after step 41                 rank 0     rank 1     rank 2     rank 3
    its own, of steps 40 and 41   shard 0    shard 1    shard 2    shard 3
    of its ward (partners)        shard 3    shard 0    shard 1    shard 2

If rank 2 is lost, shard 2 is still on rank 3, and the job continues without a disk. A rank sends
only what no other rank has: under DDP nothing, because each rank has everything; under ZeRO the
chunks; under tensor parallelism without data parallelism the shards. The partner of rank r is rank
r + 1; its ward is rank r - 1.

Why two steps. When a rank is lost, some ranks may have finished step k and others not. But no rank
finishes step k before all ranks have begun it, and a rank begins step k only after its copies of
step k - 1 have arrived. So of the newest two steps the older one is complete, unless a rank and its
partner are lost at once.

Cost of a step: the state of a rank copied once; the part that no other rank has sent once to the
partner and received once from the ward. Memory: twice a rank's state, and twice what is received.

Source:  Zheng, Chen 2023, "Gemini: fast failure recovery in distributed training with in-memory
         checkpoints".
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.comm.records import share_records
from minidist.comm.wire import pack, unpack
from minidist.device.backend import dtype_name, to_host
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.state.state_exchange import Snapshot, restore
from minidist.parallel.state.state_map import (
    Place,
    runs_of,
    small_state,
    state_arrays,
    state_places,
    stripes_of,
)

ALIGNED = 64  # bytes; an array in a block begins at a multiple of this

Version = tuple[int, int]
"""A step, and the generation of the job in which the ranks had it."""


class Layout:
    """The layout of a rank's arrays in one block of bytes: arrays that no other rank has come
    first.

    Args:       alone: for each place, whether no other rank has it.
    Attributes: pieces: the names of all places' numbers; lone: the names of those that no other
                rank has. lone_bytes: the size of their part of the block.
    """

    def __init__(self, places: Sequence[Place], alone: Sequence[bool]) -> None:
        self.places = list(places)
        self.order = sorted(range(len(places)), key=lambda index: not alone[index])
        self.pieces = {piece_of(place) for place in places if place.size}
        self.lone = {piece_of(place) for place, lone in zip(places, alone, strict=True) if lone}
        self.starts = [0] * len(places)
        self.nbytes = 0
        self.lone_bytes = 0
        for index in self.order:
            self.starts[index] = self.nbytes
            self.nbytes += (
                -(-places[index].size * places[index].dtype.itemsize // ALIGNED) * ALIGNED
            )
            self.lone_bytes = self.nbytes if alone[index] else self.lone_bytes

    def arrays(
        self, block: np.ndarray, *, lone: bool = False
    ) -> tuple[list[Place], list[np.ndarray]]:
        """Return the places, and the array of each in the block.

        `lone`: only those that no other rank has.
        """
        chosen = [
            index
            for index in range(len(self.places))
            if not lone or self.starts[index] < self.lone_bytes
        ]
        places = [self.places[index] for index in chosen]
        return places, [
            block[start : start + place.size * place.dtype.itemsize].view(place.dtype)
            for start, place in zip((self.starts[index] for index in chosen), places, strict=True)
        ]


def piece_of(place: Place) -> str:
    """Return a name for the numbers of a place: the same text for the same numbers of the same
    tensor."""
    return f"{place.key} {stripes_of(place.runs)}"


class PeerCopies:
    """The snapshots that a process holds: the last two versions of its own rank and of its ward,
    whose partner it is.

    Args:       every: number of steps from one version to the next.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = every
        # snapshots by rank of that generation, this process's own first
        self._held: dict[Version, dict[int, Snapshot]] = {}
        # for each generation, by rank: its pieces, and those that only it has
        self._layouts: dict[int, list[tuple[set[str], set[str]]]] = {}
        self._generation = 0
        self._kept = 0

    # --- after a loss
    # ------------------------------------------------------------------------------------------------

    def restore(self, trainer: Trainer, known: int = 0) -> tuple[bool, list[int]]:
        """Fill the trainer's state with the newest version that the ranks of its world hold
        together. Every rank calls it.

        Args:    known: a number of this rank's, which all ranks receive.
        Returns: whether there is such a version (without one, nothing changes); and every rank's
                 `known`.
        """
        held = [[*version, list(snapshots)] for version, snapshots in self._held.items()]
        records = share_records(trainer.world, [held, known])
        told = [record[0] for record in records]
        known_by = [int(record[1]) for record in records]
        best = max(self._whole(told), default=(-1, 0))
        step, generation = max(tuple(found) for found in share_records(trainer.world, list(best)))
        if step < 0:
            return False, known_by
        mine = self._held.get((step, generation), {})
        restore([*mine.values()], trainer.strategy, trainer.optimizer, trainer.world)
        trainer.steps_done = trainer.steps_before = step
        return True, known_by

    def _whole(self, told: Iterable[Any]) -> Iterable[Version]:
        """Yield the versions that all ranks together hold completely, as far as this rank knows
        their layouts."""
        holders = dict[Version, set[int]]()
        own = dict[Version, set[int]]()
        for record in told:
            for step, generation, ranks in record:
                holders.setdefault((step, generation), set()).update(ranks)
                own.setdefault((step, generation), set()).add(ranks[0])
        for version, ranks in holders.items():
            layouts = self._layouts.get(version[1])
            if layouts is not None:
                wanted = set[str]().union(*(pieces for pieces, _ in layouts))
                found = set[str]().union(
                    *(layouts[rank][0] for rank in own[version]),
                    *(layouts[rank][1] for rank in ranks),
                )
                if wanted == found:
                    yield version

    # --- from step to step
    # -------------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, generation: int) -> None:
        """Keep the state of a new generation.

        Older versions are deleted after its first step, when all ranks have kept it.
        """
        world = trainer.world
        places = state_places(trainer.strategy, trainer.optimizer)
        told = [
            [
                Place(kind, name, tuple(shape), runs_of(stripes), np.dtype(dtype))
                for kind, name, shape, stripes, dtype in record
            ]
            for record in share_records(
                world,
                [
                    [
                        place.kind,
                        place.name,
                        list(place.shape),
                        stripes_of(place.runs),
                        dtype_name(place.dtype),
                    ]
                    for place in places
                ],
            )
        ]
        owners: dict[str, int] = {}
        for record in told:
            for piece in {piece_of(place) for place in record}:
                owners[piece] = owners.get(piece, 0) + 1
        layouts = [
            Layout(record, [owners[piece_of(place)] == 1 and place.size > 0 for place in record])
            for record in told
        ]
        self._partner = (world.rank + 1) % world.size
        self._ward = (world.rank - 1) % world.size
        self._sends = world.size > 1 and any(layout.lone_bytes for layout in layouts)
        self._layout = layouts[world.rank]
        self._ward_layout = layouts[self._ward]
        self._layouts[generation] = [(layout.pieces, layout.lone) for layout in layouts]
        self._blocks = [np.empty(self._layout.nbytes, np.uint8) for _ in range(2)]
        self._ward_blocks = [
            np.empty(self._ward_layout.lone_bytes * self._sends, np.uint8) for _ in range(2)
        ]
        self._generation = generation
        self._kept = 0
        self._keep(trainer)

    def keep(self, trainer: Trainer) -> None:
        """Keep the state after a step, if the step's number is a multiple of `every`.

        Every rank calls it.
        """
        if len(self._layouts) > 1:
            self._held = {
                version: held
                for version, held in self._held.items()
                if version[1] == self._generation
            }
            self._layouts = {self._generation: self._layouts[self._generation]}
        if trainer.steps_done % self.every == 0:
            self._keep(trainer)

    def boundary(self, step: int) -> int:
        """Return the step after which all may leave, when `step` steps are done."""
        return step + 1

    def leave(self, trainer: Trainer) -> None:
        """Wait for all ranks, which stop after the same step: none leaves while another still
        receives its copies."""
        trainer.world.barrier()

    def _keep(self, trainer: Trainer) -> None:
        step = trainer.steps_done
        turn = self._kept % 2
        mine = sorted(version for version in self._held if version[1] == self._generation)
        for version in mine[:-1]:  # the older version's block is overwritten now
            del self._held[version]
        places, arrays = self._layout.arrays(self._blocks[turn])
        for target, source in zip(
            arrays, state_arrays(trainer.strategy, trainer.optimizer, changes=False), strict=True
        ):
            target[...] = to_host(source)
        small = small_state(trainer.strategy, trainer.optimizer)
        held = self._held[step, self._generation] = {
            trainer.world.rank: Snapshot(places, arrays, small)
        }
        self._kept += 1
        if self._sends:
            held |= self._swap(trainer.world, turn, small)

    def _swap(self, world: Group, turn: int, small: dict[str, Any]) -> dict[int, Snapshot]:
        """Send to the partner what no other rank has, and receive the ward's."""
        packed = np.frombuffer(pack(small), np.uint8)
        block = self._blocks[turn][: self._layout.lone_bytes]
        room = self._ward_blocks[turn]
        with world.ledger.during("peer copies"):
            theirs = world.exchange(packed, self._partner, self._ward)
            world.exchange(block, self._partner, self._ward, out=room)
        places, arrays = self._ward_layout.arrays(room, lone=True)
        return {self._ward: Snapshot(places, arrays, unpack(theirs.tobytes()))}
