"""Grades exercise 06: ranks as threads train a small GPT with your functions; the weights must be
those of one process."""

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.console import plural, size_text
from minidist.grading import Mistake, Result, expect, judge, totals, variant
from minidist.launch import run
from minidist.lessons.checking import on_ranks, pair, parity
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
RATE = 0.4  # a rate at which no known mistake makes all weights 0

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
    for workers in (2, 1, 3):
        yield _steps(exercise, workers)
    yield from _bound(exercise)
    for workers, servers in ((3, 1), (4, 2)):
        yield from _traffic(exercise, workers, servers)
    yield expect(
        "10 bytes, 2 workers, 3 servers",
        (40 / 3, 20.0),
        tuple(exercise.link_bytes(10, 2, 3)),
        "other numbers",
        "the two formulas of section 3 (hole 7)",
        known={"rounded down": (13, 20.0)},
        same=np.allclose,
    )


def _keys(exercise: ModuleType, servers: int) -> Result:
    """Check that no server has more than the library's fullest one."""
    sizes = [parameter.size for parameter in new_model(CONFIG).parameters()]
    target = max(sum(sizes[key] for key in share) for share in assign(sizes, servers))
    owner = exercise.divide(sizes, servers)
    loads = [
        sum(size for size, where in zip(sizes, owner, strict=True) if where == server)
        for server in range(servers)
    ]
    nowhere = sorted({where for where in owner if where not in range(servers)})
    return judge(
        f"{len(sizes)} keys on {plural(servers, 'server')}, the fullest server",
        max(loads) <= target and not nowhere,
        f"{target} numbers",
        f"{max(loads)} numbers" if not nowhere else f"keys on server {nowhere[0]}",
        "divided by number, not by size",
        "the next key goes where least is so far: section 3 (hole 1)",
        signs={
            "there is no such server": nowhere,
            "one server has all keys": servers > 1 and max(loads) == sum(sizes),
        },
    )


# -------------------------------------------------------------------------------- synchronous steps


def _job(group: Group, exercise: ModuleType, workers: int) -> np.ndarray:
    """Return a rank's weights after the steps of the student's functions."""
    model = new_model(CONFIG)
    if group.rank == workers:
        exercise.plain_server(model, SGD(list(model.parameters()), RATE), group, workers, STEPS)
    else:
        exercise.plain_worker(
            model, group, workers, [random_batch(CONFIG, step, SEQUENCES) for step in range(STEPS)]
        )
    return weights(model)


def _serial(scale: float = 1.0, rows: slice = slice(None)) -> np.ndarray:
    """Return the weights of one process; each gradient is of only `rows`, times `scale`."""
    model = new_model(CONFIG)
    optimizer = SGD(list(model.parameters()), RATE * scale)
    single = Single(
        model, loss=lambda part, divisor: model.loss(part.inputs[rows], part.targets[rows], divisor)
    )
    for step in range(STEPS):
        single.step(random_batch(CONFIG, step, SEQUENCES), optimizer)
    return weights(model)


def _steps(exercise: ModuleType, workers: int) -> Result:
    """Worker 0's weights, compared with one process's."""
    task = f"{plural(workers, 'worker')}, {STEPS} steps"
    ranks = on_ranks(
        _job,
        exercise,
        workers,
        size=workers + 1,
        task=task,
        target="every rank returns",
        mistake="the ranks wait for each other",
        advice="each key is pushed once by every worker to the server, and comes once from there to "
        "every worker: section 1 (holes 2 to 5)",
    )
    batch = random_batch(CONFIG, 0, SEQUENCES)
    first, last = (len(part_of(batch, size=workers, rank=rank).inputs) for rank in (0, workers - 1))
    every = "every worker's gradients count: section 2 (hole 4)"
    summed = (
        "each worker divides its loss by the targets of all workers already: section 2 (holes 2, 4)"
    )

    def other(old: str, new: str) -> Any:
        return lambda: _other_way(workers, old, new)

    return parity(
        task,
        _serial(),
        ranks[:1],
        "wrong weights",
        "gradients go to the server, weights come back, both unchanged; the server adds up, and then "
        "makes its step: sections 1 and 2 (holes 2 to 5)",
        known={
            "divided by the number of workers": Mistake(lambda: _serial(1 / workers), summed),
            "multiplied by the number of workers": Mistake(lambda: _serial(workers), summed),
            "the opposite sign": Mistake(
                other("p.grad = sum(", "p.grad = -sum("),
                "the optimizer subtracts: section 1 (holes 2, 4)",
            ),
            "one worker's gradients alone": Mistake(
                lambda: _serial(rows=slice(0, first)),
                every,
            ),
            "the last worker's gradients alone": Mistake(
                lambda: _serial(rows=slice(SEQUENCES - last, SEQUENCES)), every
            ),
            "nothing was pulled": Mistake(
                lambda: weights(new_model(CONFIG)),
                "what the server sends must be in the weight's own array: section 1 (hole 3)",
            ),
            "what came was added to the weights": Mistake(
                other(
                    "group.recv(src=workers, out=p.data)", "p.data[...] += group.recv(src=workers)"
                ),
                "it takes their place: section 1 (hole 3)",
            ),
            "the weights were pushed": Mistake(
                other("group.send(p.grad, dst=workers)", "group.send(p.data, dst=workers)"),
                "the server has the weights, it needs gradients: section 1 (hole 2)",
            ),
            "the gradients came back": Mistake(
                other("group.send(p.data, dst=worker)", "group.send(p.grad, dst=worker)"),
                "a worker needs what the optimizer has made: section 1 (hole 5)",
            ),
        },
        wanted="the weights of one process",
    )


def _other_way(workers: int, old: str, new: str) -> np.ndarray:
    """Return worker 0's weights if one of the plain functions has `new` in place of `old`."""
    changed = ModuleType("another_way")
    for function in (plain_worker, plain_server):
        has = old in inspect.getsource(function)
        setattr(changed, function.__name__, variant(function, old, new) if has else function)
    return run(_job, changed, workers, size=workers + 1)[0]


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
        ((0, [6, 3, 5], {0}, 2), True, lost),
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


def _traffic(exercise: ModuleType, workers: int, servers: int) -> Iterator[Result]:
    """Check the formulas by the ledger of one step."""

    def step(world: Group) -> int:
        server = ParameterServer(new_model(CONFIG), world, servers=servers)
        before = totals(world.ledger)[1]
        server.step(random_batch(CONFIG, 0, SEQUENCES), SGD(server.parameters, RATE))
        return totals(world.ledger)[1] - before

    nbytes = sum(p.data.nbytes for p in new_model(CONFIG).parameters())
    answer = exercise.link_bytes(nbytes, workers, servers)
    task = f"{workers} workers, {plural(servers, 'server')}, in and out of"
    yield pair(
        f"{task} a server and of a rank of a ring",
        answer,
        "(bytes of a server, bytes of a rank of a ring) (hole 7)",
    )
    server, ring = answer
    all_servers = sum(run(step, size=workers + servers))
    share = 4 * nbytes / workers
    yield expect(
        f"{task} a server",
        all_servers / servers,
        server,
        "wrong bytes",
        "every worker pushes all gradients and pulls all weights; the servers share that: section 3 "
        "(hole 7)",
        known={
            "one direction alone": workers * nbytes / servers,
            "of all servers together": 2 * workers * nbytes,
            "of one worker alone": 2 * nbytes / servers,
            "one worker is left out": 2 * (workers - 1) * nbytes / servers,
            "these are the bytes of a rank of a ring": (workers - 1) * share,
        },
        same=np.isclose,
        show=size_text,
    )
    yield expect(
        f"{task} a rank of a ring of the workers",
        (workers - 1) * share,
        ring,
        "wrong bytes",
        "a ring has no server; each rank sends 2(N-1) chunks of one N-th, and receives as many: "
        "section 3 (hole 7)",
        known={
            "one direction alone": (workers - 1) * share / 2,
            "of all ranks together": (workers - 1) * share * workers,
            "one chunk too many": workers * share,
            "the servers are not in the ring": 4
            * (workers + servers - 1)
            / (workers + servers)
            * nbytes,
        },
        same=np.isclose,
        show=size_text,
    )


if __name__ == "__main__":
    from minidist.cli import main

    raise SystemExit(main(["check", "06", *sys.argv[1:]]))
