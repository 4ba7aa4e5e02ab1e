"""Grades exercise 17: a real mesh, the library's cut of the batch, and a whole gradient are the answer key."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.grading import Result, expect
from minidist.parallel.step.step import part_of

SHAPES = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 3, "pp": 1, "tp": 2}, {"dp": 2, "pp": 3, "tp": 2})
LIMIT = 60.0

ANSWERS = {
    1: "rank % shape[axis]",
    2: "rank // shape[axis]",
    3: "all(coordinates(other, shape)[name] == mine[name] for name in shape if name != axis)",
    4: 'shape["dp"]',
    5: 'place["dp"]',
    6: 'mesh["dp"].all_reduce(gradient)',
    7: 'sum(float((grad ** 2).sum()) for grad in whole) if mesh["tp"].rank == 0 else 0.0',
    8: 'mesh["pp", "tp"].all_reduce(np.array([squares]))',
    9: "sorted(sent, key=sent.get)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Places, groups, rows; then ranks as threads add up gradients and find their norm; then the layout."""
    for shape in SHAPES:
        yield from _places(exercise, shape, md.run(_real, shape, size=_size(shape), limit=LIMIT))
    for shape in SHAPES:
        for sequences in (8, 5):
            yield _rows(exercise, shape, sequences)
    for shape in SHAPES:
        ranks = md.run(_run, exercise, shape, size=_size(shape), limit=LIMIT)
        yield _gradient(shape, ranks)
        yield _norm(shape, ranks)
    for sent, target in (({"dp": 5, "pp": 1, "tp": 9}, ["pp", "dp", "tp"]), ({"tp": 30, "dp": 40, "pp": 20},
                                                                            ["pp", "tp", "dp"])):
        ours = list(exercise.layout(dict(sent)))
        mistake = ("the other way round: neighbours have the fastest links" if ours == target[::-1] else
                   "as they stood" if ours == list(sent) else "another order")
        yield expect(f"layout of {sent}", target, ours, mistake, "most bytes innermost: section 5 (hole 9)")


def _size(shape: dict[str, int]) -> int:
    return int(np.prod(list(shape.values())))


def _name(shape: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in shape.items())


# ---------------------------------------------------------------------------------------------------------- places

def _real(world: Group, shape: dict[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """A real mesh's coordinates and groups of this rank."""
    mesh = md.Mesh(world, **shape)
    found = {axis: mesh.coordinates[axis] for axis in shape}, {axis: list(mesh[axis].world_ranks) for axis in shape}
    mesh.close()
    return found


def _places(exercise: ModuleType, shape: dict[str, int], real: list[Any]) -> Iterator[Result]:
    target = [places for places, _ in real]
    ours = [{axis: int(place) for axis, place in exercise.coordinates(rank, shape).items()}
            for rank in range(len(real))]
    wrong = next((rank for rank in range(len(real)) if ours[rank] != target[rank]), len(real) - 1)
    sizes = tuple(shape.values())
    first_innermost = [dict(zip(shape, map(int, np.unravel_index(rank, sizes, order="F")), strict=True))
                       for rank in range(len(real))]
    mistake = ("the first axis is innermost there" if ours == first_innermost else
               "a place beyond the axis" if any(
                   not 0 <= places[axis] < shape[axis] for places in ours for axis in shape) else
               "the same number is divided for every axis" if ours == [
                   {axis: rank % size for axis, size in shape.items()} for rank in range(len(real))] else
               "other places")
    yield expect(f"rank {wrong} of {_name(shape)}", target[wrong], ours[wrong], mistake,
                 "remainder, then quotient: section 2 (holes 1, 2)")
    for axis in shape:
        for rank, (_, groups) in enumerate(real):
            measured = [int(other) for other in exercise.partners(rank, axis, shape)]
            if measured != groups[axis] or rank == len(real) - 1:
                same_place = [other for other in range(len(real)) if target[other][axis] == target[rank][axis]]
                wrong_name = ("those that agree on the axis; a group differs on it and agrees elsewhere"
                              if measured == same_place else
                              "all ranks" if len(measured) == len(real) > len(groups[axis]) else
                              "not itself" if rank not in measured else "other ranks")
                yield expect(f"{axis} group of rank {rank} of {_name(shape)}", groups[axis], measured, wrong_name,
                             "equal in every other coordinate: section 2 (hole 3)")
                if measured != groups[axis]:
                    return


def _rows(exercise: ModuleType, shape: dict[str, int], sequences: int) -> Result:
    """Every rank's rows beside the library's."""
    ids = np.arange(sequences)[:, None]
    size = _size(shape)

    def cut(parts: int, part: Any) -> list[list[int]]:
        return [part_of((ids, ids), size=parts, rank=part(rank)).inputs[:, 0].tolist() for rank in range(size)]

    target = cut(shape["dp"], lambda rank: rank // (size // shape["dp"]))
    ours = [np.asarray(exercise.rows(rank, shape, sequences)).tolist() for rank in range(size)]
    wrong = next((rank for rank in range(size) if ours[rank] != target[rank]), size - 1)
    mistake = ("by world rank: shards of one layer would see different tokens" if ours == cut(size, lambda rank: rank)
               else "stages are no replicas: they work on the same rows one after the other" if ours == cut(
                   shape["dp"] * shape["pp"], lambda rank: rank // shape["tp"]) else
               "every rank reads all" if all(len(rows) == sequences for rows in ours) else "other rows")
    return expect(f"rows of rank {wrong}, {sequences} sequences, {_name(shape)}", target[wrong], ours[wrong], mistake,
                  "by the data axis alone: section 1, step 0 (holes 4, 5)")


# ------------------------------------------------------------------------------------------------- gradient and norm

def _gradients(mesh: Any) -> dict[str, np.ndarray]:
    """This rank's local gradients: a shard (tp and pp), and one that tp ranks hold alike; other rows, other numbers."""
    place = mesh.coordinates

    def draw(*key: int, n: int) -> np.ndarray:
        return np.random.default_rng(key).normal(size=n)

    return {"shard": draw(0, place["pp"], place["tp"], place["dp"], n=5),
            "whole": draw(1, place["pp"], place["dp"], n=3)}


def _run(world: Group, exercise: ModuleType, shape: dict[str, int]) -> dict[str, Any]:
    """The student's sum and norm, and what they should be, on this rank."""
    mesh = md.Mesh(world, **shape)
    for axes in ("dp", "pp", "tp", ("pp", "tp"), ("dp", "tp"), ("dp", "pp"), ("dp", "pp", "tp")):
        mesh[axes]                      # made by all, in one order: then a rank may use any
    local = _gradients(mesh)
    ours = {name: np.array(exercise.add_gradients(grad.copy(), mesh)) for name, grad in local.items()}
    right = {name: mesh["dp"].all_reduce(grad) for name, grad in local.items()}
    sums = {"mean": {name: right[name] / mesh["dp"].size for name in right},
            "world": {name: world.all_reduce(grad) for name, grad in local.items()}, "local": local}
    first = mesh["tp"].rank == 0

    def add(group: Group | None, counted: bool) -> float:
        squares = np.array([float((right["shard"] ** 2).sum()) + counted * float((right["whole"] ** 2).sum())])
        total = squares if group is None else group.all_reduce(squares)
        return float(np.sqrt(total[0]))

    norms = {name: add(group, counted) for name, (group, counted) in {
        "right": (mesh["pp", "tp"], first), "several": (mesh["pp", "tp"], True), "none": (mesh["pp", "tp"], False),
        "all": (mesh["dp", "pp", "tp"], first), "tp": (mesh["tp"], first), "own": (None, first)}.items()}
    norm = float(exercise.norm([right["shard"].copy()], [right["whole"].copy()], mesh))
    mesh.close()
    return {"ours": ours, "right": right, "sums": sums, "norm": norm, "norms": norms}


def _gradient(shape: dict[str, int], ranks: list[dict[str, Any]]) -> Result:
    right = all(rank["ours"][name].shape == target.shape and np.allclose(rank["ours"][name], target)
                for rank in ranks for name, target in rank["right"].items())
    known = {"mean": "a mean: the loss was divided by all tokens before", "local": "nothing was added up",
             "world": "over all ranks: stages and shards hold other weights"}
    mistake = next((text for name, text in known.items() if all(
        rank["ours"]["shard"].shape == sums.shape and np.allclose(rank["ours"]["shard"], sums)
        for rank in ranks for sums in [rank["sums"][name]["shard"]])), "another result")
    return Result(f"gradients on {_name(shape)}", right, "the sum over the replicas",
                  "equal" if right else "another", mistake, "same weights, other rows: section 1, step 2.2 (hole 6)")


def _norm(shape: dict[str, int], ranks: list[dict[str, Any]]) -> Result:
    target = ranks[0]["norms"]["right"]
    right = all(np.isclose(rank["norm"], rank["norms"]["right"]) for rank in ranks)
    known = {"several": "what tp ranks hold alike counts several times", "none": "what tp ranks hold alike is missing",
             "all": "replicas have the same gradient: each number counts dp times", "own": "this rank's part alone",
             "tp": "the other stages are missing"}
    mistake = next((text for name, text in known.items() if all(
        np.isclose(rank["norm"], rank["norms"][name]) for rank in ranks)), "another number")
    return Result(f"norm on {_name(shape)}", right, f"{target:.6f} on every rank",
                  ", ".join(dict.fromkeys(f"{rank['norm']:.6f}" for rank in ranks)), mistake,
                  "each number once: section 6 (holes 7, 8)")


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "17", *sys.argv[1:]]))
