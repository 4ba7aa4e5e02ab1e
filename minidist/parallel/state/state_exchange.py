"""Chapter 26 · State from memory to memory: the state of all ranks is redistributed for another
plan.

    trainer.change_plan(Plan(dp=2, tp=2))           between two steps, with the same ranks
    restore(snapshots, strategy, optimizer, group)  an elastic job, with the ranks that are left

Each rank reports which numbers it has (state/state_map.py) and which it wants. Then numbers are
sent from the rank that has them to the rank that wants them, in P - 1 rounds: in round k a rank
sends to the k-th rank after it, and receives from the k-th rank before it.

Cost: each rank receives the bytes that it wants and does not have itself, in at most one message
      from each other rank, in the phase "state"; the descriptions go under `control`. A second copy
      of the state is on the host meanwhile.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.comm.records import share_records
from minidist.device.backend import device_of, to_device, to_host
from minidist.errors import CheckpointError
from minidist.optim import Optimizer
from minidist.parallel.state.state_map import (
    Place,
    merged_state,
    overlap,
    runs_of,
    set_small_state,
    small_state,
    state_arrays,
    state_places,
    stripes_of,
)
from minidist.parallel.step.strategy import Strategy


class Snapshot(NamedTuple):
    """The state of a rank between two steps: copies on the host that no later update changes."""

    places: list[Place]
    arrays: list[np.ndarray]
    small: dict[str, Any]  # as state_map.small_state


class Copies(NamedTuple):
    """The copies from one rank to another, of one array: rows as `overlap` gives them."""

    source: int  # of the sender's offers
    target: int  # of the receiver's wishes
    rows: np.ndarray


def take_snapshot(strategy: Strategy, optimizer: Optimizer) -> Snapshot:
    """Return this rank's state, copied to the host."""
    arrays = [
        np.array(to_host(array)) for array in state_arrays(strategy, optimizer, changes=False)
    ]
    return Snapshot(state_places(strategy, optimizer), arrays, small_state(strategy, optimizer))


def restore(
    snapshots: Sequence[Snapshot], strategy: Strategy, optimizer: Optimizer, group: Group
) -> None:
    """Fill the state from the snapshots that the ranks of `group` hold together; a rank may hold
    none, one or several.

    Every rank calls it; the snapshots are of one step, and of any plan of the same model.
    Raises:  CheckpointError on every rank if a number is in no snapshot.
    """
    small = merged_state(
        [
            small
            for shared in share_records(group, [snapshot.small for snapshot in snapshots])
            for small in shared
        ]
    )
    places = state_places(strategy, optimizer, small)
    offers = [
        (place, array)
        for snapshot in snapshots
        for place, array in zip(snapshot.places, snapshot.arrays, strict=True)
    ]
    with group.ledger.during("state"):
        numbers = exchange(group, offers, places)
    for array, values in zip(
        state_arrays(strategy, optimizer, changes=True, saved=small), numbers, strict=True
    ):
        array[...] = to_device(values, device_of(array))
    set_small_state(strategy, optimizer, small, group.rank)
    strategy.state_replaced()


def exchange(
    group: Group, offers: Sequence[tuple[Place, np.ndarray]], wishes: Sequence[Place]
) -> list[np.ndarray]:
    """Return the numbers of each wish, from the ranks that offer them. Every rank calls it.

    Args:    offers: places with flat arrays on the host.
    Raises:  CheckpointError on every rank if a number is offered by none.
    """
    told = share_records(
        group,
        {
            "offers": [[place.key, stripes_of(place.runs)] for place, _ in offers],
            "wishes": [[place.key, stripes_of(place.runs)] for place in wishes],
        },
    )
    # key -> stripes -> (rank, its offer's number)
    holders: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for rank, record in enumerate(told):
        for number, (key, stripes) in enumerate(record["offers"]):
            holders.setdefault(key, {}).setdefault(str(stripes), []).append((rank, number))
    runs = {str(stripes): runs_of(stripes) for record in told for _, stripes in record["offers"]}
    results = [np.empty(place.size, place.dtype) for place in wishes]
    found = np.zeros(len(wishes), np.int64)
    for distance in range(group.size):
        to = (group.rank + distance) % group.size
        source = (group.rank - distance) % group.size
        sent = _between(group.rank, to, told[to]["wishes"], holders, runs)
        received = _between(source, group.rank, told[group.rank]["wishes"], holders, runs)
        data = _packed(sent, [array for _, array in offers])
        if distance:
            nbytes = sum(
                int(copies.rows[:, 2].sum()) * wishes[copies.target].dtype.itemsize
                for copies in received
            )
            data = _swap(group, data, to, source, nbytes)
        _unpack(received, data, results)
        for copies in received:
            found[copies.target] += copies.rows[:, 2].sum()
    missing = [
        f"{place.size - count:,} of {place.size:,} numbers of {place.key}"
        for place, count in zip(wishes, found.tolist(), strict=True)
        if count < place.size
    ]
    for rank, lacking in enumerate(share_records(group, missing[:1])):
        if lacking:
            raise CheckpointError(
                f"rank {rank} needs {lacking[0]}, and no rank has them; continue from a checkpoint"
            )
    return results


def _between(
    source: int,
    target: int,
    wishes: Sequence[Any],
    holders: dict[str, dict[str, list[tuple[int, int]]]],
    runs: dict[str, np.ndarray],
) -> list[Copies]:
    """Return the copies from `source` to `target`: the same list on both. A rank copies from itself
    the numbers that it has."""
    chosen = []
    for number, (key, stripes) in enumerate(wishes):
        for offered, candidates in holders.get(key, {}).items():
            ranks = [rank for rank, _ in candidates]
            if source == (target if target in ranks else ranks[target % len(ranks)]):
                rows = overlap(runs[offered], runs_of(stripes))
                if len(rows):
                    chosen.append(Copies(candidates[ranks.index(source)][1], number, rows))
    return chosen


def _packed(sent: Sequence[Copies], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return the numbers of all copies, one after another, as bytes."""
    parts = [
        arrays[copies.source][start : start + count].view(np.uint8)
        for copies in sent
        for start, _, count in copies.rows.tolist()
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.uint8)


def _unpack(received: Sequence[Copies], data: np.ndarray, results: Sequence[np.ndarray]) -> None:
    at = 0
    for copies in received:
        result = results[copies.target].view(np.uint8)
        itemsize = results[copies.target].itemsize
        for _, start, count in copies.rows.tolist():
            result[start * itemsize : (start + count) * itemsize] = data[at : at + count * itemsize]
            at += count * itemsize


def _swap(group: Group, data: np.ndarray, to: int, source: int, nbytes: int) -> np.ndarray:
    """Send bytes to one rank while others arrive from another."""
    room = np.empty(nbytes, np.uint8)
    pending = group.start_send(data, to) if len(data) else None
    if nbytes:
        group.recv(source, out=room)
    if pending is not None:
        pending.wait()
    return room
