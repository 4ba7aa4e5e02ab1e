"""Grades exercise 06: ranks as threads train a small GPT with your functions; one process is the
answer key."""

import sys
from collections.abc import Iterator
from types import ModuleType

import numpy as np

from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import Mistake, Result, expect, judge, totals
from minidist.launch import run
from minidist.lessons.checking import on_ranks, parity
from minidist.lessons.lab import new_model, random_batch, weights
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.data.parameter_server import ParameterServer, plain_server, plain_worker
from minidist.parallel.data.server_keys import assign
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import part_of

CONFIG = GPTConfig(vocabulary=11, context=4, layers=1, width=8, heads=2, dtype="float64")
SEQUENCES = 5
STEPS = 3
RATE = 0.5

CUT_FROM = (plain_worker, plain_server)
ANSWERS = {
    1: "loads.index(min(loads))",
    6: "done[worker] - min(done[other] for other in running) <= staleness",
    7: "2 * workers * model_bytes / servers, 4 * (workers - 1) / workers * model_bytes",
}
"""The right code of the holes beyond the plain version."""


def grade(exercise: ModuleType) -> Iterator[Result]:
    """Keys, synchronous steps, the bound, traffic."""
    for servers in (1, 2, 3):
        yield _keys(exercise, servers)
    for workers in (1, 2, 3):
        yield _steps(exercise, workers)
    yield from _bound(exercise)
    for workers, servers in ((3, 1), (4, 2)):
        yield _traffic(exercise, workers, servers)


def _keys(exercise: ModuleType, servers: int) -> Result:
    """No server has more than the library's fullest."""
    sizes = [parameter.size for parameter in new_model(CONFIG).parameters()]
    target = max(sum(sizes[key] for key in share) for share in assign(sizes, servers))
    owner = exercise.divide(sizes, servers)
    loads = [
        sum(size for size, where in zip(sizes, owner, strict=True) if where == server)
        for server in range(servers)
    ]
    return judge(
        f"{len(sizes)} keys on {servers} servers, the fullest",
        max(loads) <= target,
        f"{target} numbers",
        f"{max(loads)} numbers",
        "divided by number, not by size",
        "the next key goes where least is so far: section 3 (hole 1)",
        signs={"one server has all keys": servers > 1 and max(loads) == sum(sizes)},
    )


# -------------------------------------------------------------------------------- synchronous steps


def _job(group: Group, exercise: ModuleType, workers: int) -> np.ndarray:
    """A rank's weights after the steps of the student's functions."""
    model = new_model(CONFIG)
    if group.rank == workers:
        exercise.plain_server(model, SGD(list(model.parameters()), RATE), group, workers, STEPS)
    else:
        exercise.plain_worker(
            model, group, workers, [random_batch(CONFIG, step, SEQUENCES) for step in range(STEPS)]
        )
    return weights(model)


def _serial(scale: float = 1.0, rows: slice = slice(None)) -> np.ndarray:
    """One process; `scale` on every gradient, of those `rows` alone."""
    model = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), RATE * scale)
    single = Single(
        model, loss=lambda part, divisor: model.loss(part.inputs[rows], part.targets[rows], divisor)
    )
    for step in range(STEPS):
        single.step(random_batch(CONFIG, step, SEQUENCES), optimizer)
    return weights(model)


def _steps(exercise: ModuleType, workers: int) -> Result:
    """Worker 0's weights beside one process's."""
    task = f"{workers} workers, {STEPS} steps"
    ranks = on_ranks(
        _job,
        exercise,
        workers,
        size=workers + 1,
        task=task,
        target="every rank returns",
        mistake="the ranks wait for each other",
        advice="each key is pushed once to its server, and pulled once from there: section 1 "
        "(holes 2 to 5)",
    )
    batch = random_batch(CONFIG, 0, SEQUENCES)
    first, last = (len(part_of(batch, size=workers, rank=rank).inputs) for rank in (0, workers - 1))
    return parity(
        task,
        _serial(),
        ranks[:1],
        "wrong weights",
        "push, sum, step, pull: sections 1 and 2 (holes 2 to 5)",
        known={
            "averaged": Mistake(
                lambda: _serial(1 / workers),
                "the losses are divided by all targets already, so gradients are summed: "
                "section 2 (hole 4)",
            ),
            "one worker's gradients alone": Mistake(
                lambda: _serial(rows=slice(0, first)), "every worker pushes: section 2 (hole 4)"
            ),
            "the last worker's gradients alone": Mistake(
                lambda: _serial(rows=slice(SEQUENCES - last, SEQUENCES)),
                "every worker pushes: section 2 (hole 4)",
            ),
            "nothing was pulled": Mistake(
                lambda: weights(new_model(CONFIG)),
                "parameter.data[...] = what the server sends: section 1 (hole 3)",
            ),
        },
        wanted="the weights of one process",
    )


# -------------------------------------------------------------------------------- bound and traffic


def _bound(exercise: ModuleType) -> Iterator[Result]:
    """Cases of three workers, with the mistake that each of them finds."""
    lost = "a lost worker holds the others up"
    cases = [
        ((0, [3, 3, 3], {0, 1, 2}, 0), True, "waits although no worker is behind"),
        ((0, [5, 3, 4], {0, 1, 2}, 2), True, "the bound is one too strict"),
        (
            (0, [6, 3, 4], {0, 1, 2}, 2),
            False,
            "the bound is one too lax, or compares with the wrong worker",
        ),
        ((1, [9, 3, 4], {0, 1, 2}, 2), True, "the slow one waits, too"),
        ((0, [6, 3, 5], {0, 2}, 2), True, lost),
    ]
    for arguments, target, mistake in cases:
        worker, done, running, staleness = arguments
        task = f"worker {worker}, steps {done}, running {sorted(running)}, staleness {staleness}"
        yield expect(
            task,
            target,
            bool(exercise.may_go_on(*arguments)),
            mistake,
            "its steps minus those of the slowest that still runs, at most staleness: section 5 "
            "(hole 6)",
        )


def _traffic(exercise: ModuleType, workers: int, servers: int) -> Result:
    """The formulas beside the ledger of one step."""

    def step(world: Group) -> int:
        server = ParameterServer(new_model(CONFIG), world, servers=servers)
        before = totals(world.ledger)[1]
        server.step(random_batch(CONFIG, 0, SEQUENCES), SGD(server.parameters, RATE))
        return totals(world.ledger)[1] - before

    nbytes = sum(p.data.nbytes for p in new_model(CONFIG).parameters())
    target = sum(run(step, size=workers + servers)) / servers, 4 * (workers - 1) / workers * nbytes
    mine = exercise.link_bytes(nbytes, workers, servers)
    return expect(
        f"in and out of a link, {workers} workers, {servers} servers",
        target,
        mine,
        "wrong bytes",
        "every worker pushes and pulls everything; a ring's rank sends 2(N-1)/N Ψ and receives "
        "as much: section 3 (hole 7)",
        known={
            "one direction alone": (workers * nbytes / servers, target[1]),
            "of all servers together": (2 * workers * nbytes, target[1]),
            "of one worker alone": (2 * nbytes / servers, target[1]),
            "the ring's one direction alone": (target[0], target[1] / 2),
        },
        same=np.allclose,
        show=lambda pair: " and ".join(map(size_text, pair)),
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "06", *sys.argv[1:]]))
