"""Grades exercise 17: a real mesh, the plain version, and a whole gradient are the answer key."""

import sys
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.errors import MinidistError
from minidist.grading import Mistake, Result, expect, judge, variant
from minidist.lessons.checking import LIMIT, on_ranks
from minidist.parallel.hybrid.hybrid_step import plain_hybrid

SHAPES = ({"dp": 2, "pp": 2, "tp": 2}, {"dp": 3, "pp": 1, "tp": 2}, {"dp": 2, "pp": 3, "tp": 2})

CUT_FROM = (plain_hybrid,)
ANSWERS = {
    1: "rank % shape[axis]",
    2: "rank // shape[axis]",
    3: "all(coordinates(other, shape)[name] == mine[name] for name in shape if name != axis)",
    9: 'sum(float((grad ** 2).sum()) for grad in whole) if mesh["tp"].rank == 0 else 0.0',
    10: 'mesh["pp", "tp"].all_reduce(np.array([squares]))',
    11: "sorted(sent, key=sent.get)",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Places, groups; then ranks as threads make a step, and find the norm of their gradients; then
    the layout."""
    for shape in SHAPES:
        yield from _places(exercise, shape, md.run(_real, shape, size=_size(shape), limit=LIMIT))
    for shape in ({"dp": 2, "pp": 1, "tp": 1}, {"dp": 1, "pp": 1, "tp": 2}, *SHAPES):
        yield _step(exercise, shape)
    for shape in (*SHAPES, {"dp": 1, "pp": 2, "tp": 3}, {"dp": 2, "pp": 2, "tp": 1}):
        ranks = md.run(_run, exercise, shape, size=_size(shape), limit=LIMIT)
        yield _norm(shape, ranks)
    for sent, target in (
        ({"dp": 5, "pp": 1, "tp": 9}, ["pp", "dp", "tp"]),
        ({"tp": 30, "dp": 40, "pp": 20}, ["pp", "tp", "dp"]),
    ):
        ours = list(exercise.layout(dict(sent)))
        yield expect(
            f"layout of {sent}",
            target,
            ours,
            "another order",
            "most bytes innermost: section 5 (hole 11)",
            known={
                "the other way round: neighbours have the fastest links": target[::-1],
                "as they stood": list(sent),
            },
        )


def _size(shape: dict[str, int]) -> int:
    return int(np.prod(list(shape.values())))


def _name(shape: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in shape.items())


# ------------------------------------------------------------------------------------------- places


def _real(world: Group, shape: dict[str, int]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return this rank's coordinates in a real mesh, and its groups."""
    mesh = md.Mesh(world, **shape)
    found = (
        {axis: mesh.coordinates[axis] for axis in shape},
        {axis: list(mesh[axis].world_ranks) for axis in shape},
    )
    mesh.close()
    return found


def _places(exercise: ModuleType, shape: dict[str, int], real: list[Any]) -> Iterator[Result]:
    target = [places for places, _ in real]
    ours = [
        {axis: int(place) for axis, place in exercise.coordinates(rank, shape).items()}
        for rank in range(len(real))
    ]
    wrong = next((rank for rank in range(len(real)) if ours[rank] != target[rank]), len(real) - 1)
    sizes = tuple(shape.values())
    first_innermost = [
        dict(zip(shape, map(int, np.unravel_index(rank, sizes, order="F")), strict=True))
        for rank in range(len(real))
    ]
    yield expect(
        f"rank {wrong} of {_name(shape)}",
        target[wrong],
        ours[wrong],
        "other places",
        "remainder, then quotient: section 2 (holes 1, 2)",
        signs={
            "the first axis is innermost there": ours == first_innermost,
            "a place beyond the axis": any(
                not 0 <= places[axis] < shape[axis] for places in ours for axis in shape
            ),
            "the same number is divided for every axis": ours
            == [{axis: rank % size for axis, size in shape.items()} for rank in range(len(real))],
        },
    )
    for axis in shape:
        for rank, (_, groups) in enumerate(real):
            measured = [int(other) for other in exercise.partners(rank, axis, shape)]
            if measured != groups[axis] or rank == len(real) - 1:
                same_place = [
                    other for other in range(len(real)) if target[other][axis] == target[rank][axis]
                ]
                yield expect(
                    f"{axis} group of rank {rank} of {_name(shape)}",
                    groups[axis],
                    measured,
                    "other ranks",
                    "equal in every other coordinate: section 2 (hole 3)",
                    known={
                        "those that agree on the axis; a group differs on it and agrees elsewhere": (
                            same_place
                        )
                    },
                    signs={
                        "all ranks": len(measured) == len(real) > len(groups[axis]),
                        "not itself": rank not in measured,
                    },
                )


SUM_OF_PARTS = 'tp.all_reduce(inner @ down, algorithm="ring")'
SUM_OF_INPUTS = 'tp.all_reduce(dinner @ up.T, algorithm="ring")'
SUM_OF_REPLICAS = 'dp.all_reduce(gradient, algorithm="ring")'

MISTAKES = {
    "rows by the rank of tp too: shards of one layer see different tokens": (
        "dp.size)[dp.rank]",
        "dp.size * tp.size)[dp.rank * tp.size + tp.rank]",
        "4, 5",
    ),
    "rows by the rank of pp too: the stages see different tokens": (
        "dp.size)[dp.rank]",
        "dp.size * pp.size)[dp.rank * pp.size + pp.rank]",
        "4, 5",
    ),
    "more parts than replicas: no rank reads the last": ("dp.size)[", "dp.size + 1)[", "4"),
    "more parts than replicas: no rank reads some": ("dp.size)[", "dp.size * pp.size)[", "4"),
    "all replicas read the same rows": (")[dp.rank]", ")[0]", "5"),
    "dp times too large: every rank reads all rows, or the sum is multiplied": (
        "dp.size)[dp.rank]",
        "1)[0]",
        "4, 5, 8",
    ),
    "partial sums are not added up: only this rank's rows": (
        SUM_OF_PARTS,
        "inner @ down",
        "6",
    ),
    "f forgotten: only this rank's columns": (
        SUM_OF_INPUTS,
        "dinner @ up.T",
        "7",
    ),
    "a mean of partial sums": (
        SUM_OF_PARTS,
        "tp.all_reduce(inner @ down) / tp.size",
        "6",
    ),
    "added up over the replicas: their rows are others": (
        SUM_OF_PARTS,
        "dp.all_reduce(inner @ down)",
        "6",
    ),
    "added up over the stages: their layers are others": (
        SUM_OF_PARTS,
        "pp.all_reduce(inner @ down)",
        "6",
    ),
    "the hidden numbers are added up before the product": (
        SUM_OF_PARTS,
        "tp.all_reduce(inner) @ down",
        "6",
    ),
    "the output has the wrong sign": ("y = tp", "y = -tp", "6"),
    "a mean of the input's gradients": (
        SUM_OF_INPUTS,
        "tp.all_reduce(dinner @ up.T) / tp.size",
        "7",
    ),
    "the input's gradient is added up over the replicas": (
        SUM_OF_INPUTS,
        "dp.all_reduce(dinner @ up.T)",
        "7",
    ),
    "the hidden gradients are added up before the product": (
        SUM_OF_INPUTS,
        "tp.all_reduce(dinner) @ up.T",
        "7",
    ),
    "the input's gradient has the wrong sign": ("dx = tp", "dx = -tp", "7"),
    "a mean: the loss was divided by all tokens before": (
        SUM_OF_REPLICAS,
        "dp.all_reduce(gradient) / dp.size",
        "8",
    ),
    "nothing was added up: the replicas drift apart": (
        SUM_OF_REPLICAS,
        "gradient",
        "8",
    ),
    "the weights did not change: update in place": (
        'lr * dp.all_reduce(gradient, algorithm="ring")',
        "0.0 * gradient",
        "8",
    ),
    "uphill: the gradient is added": ("weights -=", "weights +=", "8"),
    "the learning rate is missing": ("lr * dp", "dp", "8"),
    "added up over tp: its ranks have other columns": (
        SUM_OF_REPLICAS,
        "tp.all_reduce(gradient)",
        "8",
    ),
    "added up over pp: the stages have other weights": (
        SUM_OF_REPLICAS,
        "pp.all_reduce(gradient)",
        "8",
    ),
}
"""{name: (code of the plain version, what a student may write there, the holes)}"""


def _one_step(world: Group, step: Any, shape: dict[str, int]) -> np.ndarray:
    """Return a rank's weights after one step on 12 rows."""
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(12, 4))
    targets = draw.normal(size=(12, 4))
    ups = draw.normal(size=(shape["pp"], 4, 6))
    downs = draw.normal(size=(shape["pp"], 6, 4))
    mesh = md.Mesh(world, **shape)
    own = np.array_split(np.arange(6), shape["tp"])[mesh["tp"].rank]
    stage = mesh["pp"].rank
    up = ups[stage][:, own].copy()
    down = downs[stage][own].copy()
    step(mesh["dp"], mesh["pp"], mesh["tp"], inputs, targets, up, down, 0.1)
    mesh.close()
    return np.concatenate([up.ravel(), down.ravel()])


def _stepped(step: Any, shape: dict[str, int]) -> list[np.ndarray]:
    """Return each rank's weights after one step of the library's code."""
    return md.run(_one_step, step, shape, size=_size(shape), limit=LIMIT)


def _step(exercise: ModuleType, shape: dict[str, int]) -> Result:
    """Compare one step with the plain version's, and with what known mistakes give."""
    task = f"weights after a step on {_name(shape)}"
    target = _stepped(plain_hybrid, shape)
    found = on_ranks(
        _one_step,
        exercise.plain_hybrid,
        shape,
        size=_size(shape),
        task=task,
        target="every rank returns",
        advice="every rank of a group calls the same: section 1 (holes 4 to 8)",
    )
    off = np.max([np.abs(mine - right).max() for mine, right in zip(found, target, strict=True)])

    def gives(old: str, new: str) -> bool:
        try:
            wrong = _stepped(variant(plain_hybrid, old, new), shape)
        except (MinidistError, IndexError, ValueError):
            return False  # this mistake cannot run on this mesh
        return all(np.allclose(mine, part) for mine, part in zip(found, wrong, strict=True))

    return judge(
        task,
        off < 1e-12,
        "the plain version's, to 1e-12",
        f"off by {off:.1e}",
        "other weights",
        "section 1 (holes 4 to 8)",
        signs={
            name: Mistake(partial(gives, old, new), f"section 1 (holes {numbers})")
            for name, (old, new, numbers) in MISTAKES.items()
        },
    )


# -------------------------------------------------------------------------------- gradient and norm


def _gradients(mesh: Any) -> dict[str, np.ndarray]:
    """This rank's local gradients: a shard (tp and pp), and one that tp ranks hold alike; other
    rows, other numbers."""
    place = mesh.coordinates

    def draw(*key: int, n: int) -> np.ndarray:
        return np.random.default_rng(key).normal(size=n)

    return {
        "shard": draw(0, place["pp"], place["tp"], place["dp"], n=5),
        "whole": draw(1, place["pp"], place["dp"], n=3),
    }


def _run(world: Group, exercise: ModuleType, shape: dict[str, int]) -> dict[str, Any]:
    """Return the student's norm and those that the right code and mistakes give, on this rank."""
    mesh = md.Mesh(world, **shape)
    for axes in ("dp", "pp", "tp", ("pp", "tp"), ("dp", "tp"), ("dp", "pp"), ("dp", "pp", "tp")):
        mesh[axes]  # made by all, in one order: then a rank may use any
    local = _gradients(mesh)
    right = {name: mesh["dp"].all_reduce(grad) for name, grad in local.items()}
    first = mesh["tp"].rank == 0

    def add(group: Group | None, counted: bool) -> float:
        squares = np.array(
            [float((right["shard"] ** 2).sum()) + counted * float((right["whole"] ** 2).sum())]
        )
        total = squares if group is None else group.all_reduce(squares)
        return float(np.sqrt(total[0]))

    norms = {
        name: add(group, counted)
        for name, (group, counted) in {
            "right": (mesh["pp", "tp"], first),
            "several": (mesh["pp", "tp"], True),
            "none": (mesh["pp", "tp"], False),
            "all": (mesh["dp", "pp", "tp"], first),
            "tp": (mesh["tp"], first),
            "pp": (mesh["pp"], first),
            "dp, tp": (mesh["dp", "tp"], first),
            "own": (None, first),
        }.items()
    }
    whole = np.split(right["whole"].copy(), [2])  # two parameters, of which none may be left out
    norm = float(exercise.norm([right["shard"].copy()], whole, mesh))
    mesh.close()
    return {"norm": norm, "norms": norms}


def _norm(shape: dict[str, int], ranks: list[dict[str, Any]]) -> Result:
    target = ranks[0]["norms"]["right"]
    right = all(np.isclose(rank["norm"], rank["norms"]["right"]) for rank in ranks)
    known = {
        "what tp ranks hold alike counts several times": "several",
        "what tp ranks hold alike is missing": "none",
        "replicas have the same gradient: each number counts dp times": "all",
        "only this rank's part": "own",
        "the other stages are missing": "tp",
        "the parts of the other ranks of tp are missing": "pp",
        "the other stages are missing, and replicas count again": "dp, tp",
    }
    return judge(
        f"norm on {_name(shape)}",
        right,
        f"{target:.6f} on every rank",
        ", ".join(dict.fromkeys(f"{rank['norm']:.6f}" for rank in ranks)),
        "another number",
        "each number once: section 6 (holes 9, 10)",
        signs={
            mistake: all(np.isclose(rank["norm"], rank["norms"][name]) for rank in ranks)
            for mistake, name in known.items()
        },
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "17", *sys.argv[1:]]))
