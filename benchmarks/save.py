"""`minidist bench save`: checkpoints compared with torch.distributed.checkpoint's: same bytes, same
disk, both with checksums and fsync.

    blocking       training waits for the disk
    background     training waits for a copy of the state; then matrix products run during the save,
                   like a training's next step

Also measured: how long training waits for the copy, in units of a copy of the same state by NumPy;
and `--every` steps with one save compared with as many steps without a save. Contenders take turns
round by round; in a round the slowest rank counts. At the end our contender makes `--saves` saves
with a step after each; the resident memory of a rank is measured after a tenth of them and after
all.

PyTorch's writer gets its fast options: plans and the memory of the copy are kept from save to save.
Its checksums are those of the zip files that torch.save writes, a CRC-32 per tensor; ours are a
CRC-32 per 256 KiB.
"""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from minidist.bench.jobs import (
    Job,
    answer,
    closed_at_the_end,
    join_gloo,
    start_workers,
    worker_arguments,
)
from minidist.bench.step.ranks import Model, random_batch
from minidist.files import scratch
from minidist.launch.membership import limit_blas_threads

MODULE = "minidist.bench.save"
OURS = "minidist"
PEER = "torch.distributed.checkpoint"
WAYS = ("blocking", "background")
PRODUCT = 256  # rows of the matrices that are multiplied during a save

Answers = dict[tuple[str, str], list[list[dict[str, float]]]]


def contenders_here() -> list[str]:
    """Return our contender, and PyTorch's if it is installed."""
    return [OURS] + [PEER] * (importlib.util.find_spec("torch") is not None)


def measure_all(
    model: Model,
    ranks: int,
    rounds: int,
    every: int,
    saves: int,
    folder: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Return rows of each contender and way; seconds of steps without and with a save, one pair per
    round; memory over many saves.

    Args:    every: steps per save; saves: number for the measurement of memory, half of them in the
             background; folder: on the disk to measure (None: the folder of temporary files).
    """
    jobs: dict[str, Job] = {}
    started: list[Job] = []
    answers: Answers = {}
    steps: list[tuple[float, float]] = []
    with scratch(folder, prefix="minidist-bench-") as place, closed_at_the_end(started):
        for name in contenders_here():
            progress(f"starting {name}")
            jobs[name] = start_workers(
                MODULE,
                name,
                ranks,
                [*model.arguments(), f"--folder={place / name}"],
                by="launch" if name == OURS else "rank",
            )
            started.append(jobs[name])
        arrays = jobs[OURS].ask(what="arrays")
        for name in jobs.keys() - {OURS}:
            jobs[name].ask(what="arrays", arrays=arrays)
        for number in range(-1, rounds):  # the first round touches memory, and does not count
            for way in WAYS:
                for name, job in jobs.items():
                    progress(f"round {number + 1} of {rounds}: {name}, {way}")
                    told = job.ask(what=way)
                    if number >= 0:
                        answers.setdefault((name, way), []).append(told)
            if number >= 0:
                progress(
                    f"round {number + 1} of {rounds}: {every} steps without a save, and with one"
                )
                first, second = (
                    jobs[OURS].ask(what="steps", steps=every, save=save) for save in _order(number)
                )
                plain, saving = (first, second) if number % 2 == 0 else (second, first)
                steps.append(
                    (
                        max(rank["seconds"] for rank in plain),
                        max(rank["seconds"] for rank in saving),
                    )
                )
        progress(f"memory over {saves} saves")
        memory = jobs[OURS].ask(what="memory", saves=saves)
    nbytes = sum(map(sum, arrays))
    return {
        "nbytes": nbytes,
        "rows": _rows(answers, nbytes),
        "steps": steps,
        "memory": max(memory, key=lambda rank: rank["last_bytes"] - rank["first_bytes"])
        | {"saves": saves},
        "throughput": statistics.median(plain / saving for plain, saving in steps),
    }


def _order(number: int) -> tuple[bool, bool]:
    """Return the order of steps without and with a save; it alternates between rounds."""
    return (False, True) if number % 2 == 0 else (True, False)


def _rows(answers: Answers, nbytes: int) -> list[dict[str, Any]]:
    """Return medians over rounds of the slowest rank of each round."""
    rows = []
    for (name, way), rounds in answers.items():
        seconds, stands, copies = (
            [max(rank[key] for rank in ranks) for ranks in rounds]
            for key in ("seconds", "stands", "copy")
        )
        rows.append(
            {
                "name": name,
                "way": way,
                "seconds": statistics.median(seconds),
                "mib_per_second": nbytes / 2**20 / statistics.median(seconds),
                "stands": statistics.median(stands),
                "copy": statistics.median(copies),
                "stands_in_copies": statistics.median(
                    stand / copy for stand, copy in zip(stands, copies, strict=True)
                ),
            }
        )
    return rows


# ---------------------------------------------------------------------------------- the ranks' side


def timed_save(start: Callable[[], Any], done: Callable[[Any], bool]) -> dict[str, float]:
    """Return the seconds of a save in the background, and the seconds for which start() blocked the
    caller; matrix products run during the save."""
    left = np.ones((PRODUCT, PRODUCT), np.float32)
    right = left.copy()
    out = left.copy()
    begun = time.perf_counter()
    save = start()
    stands = time.perf_counter() - begun
    while not done(save):
        np.matmul(left, right, out=out)
    return {"seconds": time.perf_counter() - begun, "stands": stands}


def timed_copy(arrays: list[np.ndarray], targets: list[np.ndarray]) -> float:
    """Return the seconds of one copy of the state, by NumPy."""
    begun = time.perf_counter()
    for array, target in zip(arrays, targets, strict=True):
        np.copyto(target, array)
    return time.perf_counter() - begun


def our_answers(world: Any, model: Model, folder: str) -> Callable[..., Any]:
    """Return a function that saves or makes steps as asked, with ZeRO-1 on all ranks."""
    from minidist.parallel.hybrid.hybrid import Plan, Trainer

    trainer = Trainer(Plan(dp=world.size, zero=1), model.config(), world)
    batch = random_batch(model.vocab, model.batch * world.size, model.context)
    trainer.step(batch)
    place = Path(folder)
    room = dict[str, list[np.ndarray]]()

    def take(what: str, steps: int = 0, save: bool = False, saves: int = 0) -> Any:
        if what == "memory":
            return memory_over(saves, trainer, place, batch)
        if what == "arrays":
            from minidist.parallel.state.manifest import read_manifest

            trainer.save(place)
            shard = read_manifest(place)["shards"][world.rank]
            state = [
                array
                for slot in trainer.optimizer.slots
                for array in (slot.weights.data, *slot.state.values())
            ]
            room["from"] = state
            room["to"] = [np.zeros_like(array) for array in state]
            return [array["nbytes"] for array in shard["arrays"]]
        world.barrier()
        begun = time.perf_counter()
        if what == "steps":
            if save:
                trainer.start_save(place)
            for _ in range(steps):
                trainer.step(batch)
            return {"seconds": time.perf_counter() - begun}
        if what == "blocking":
            trainer.save(place)
            seconds = time.perf_counter() - begun
            return {
                "seconds": seconds,
                "stands": seconds,
                "copy": timed_copy(room["from"], room["to"]),
            }
        copy = timed_copy(room["from"], room["to"])
        return {
            "copy": copy,
            **timed_save(lambda: trainer.start_save(place), lambda save: bool(save.done())),
        }

    return take


def memory_over(saves: int, trainer: Any, place: Path, batch: Any) -> dict[str, float]:
    """Return the resident bytes of this process after a tenth of the saves and after all, and their
    maximum."""
    resident = []
    for number in range(saves):
        if number % 2:
            trainer.save(place)
        else:
            trainer.start_save(place).wait()
        trainer.step(batch)
        resident.append(psutil.Process().memory_info().rss)
    return {
        "first_bytes": resident[saves // 10],
        "last_bytes": resident[-1],
        "most_bytes": max(resident),
    }


def peers_answers(distributed: Any, rank: int, folder: str) -> Callable[..., Any]:
    """Return the same function by PyTorch: tensors of the same bytes on each rank, with different
    names on each rank."""
    import torch
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    checkpoint: Any = importlib.import_module("torch.distributed.checkpoint")
    state: dict[str, Any] = {}
    group = distributed.group.WORLD
    background = distributed.new_group(backend="gloo")
    writer = checkpoint.FileSystemWriter(folder)
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=False,
            use_non_blocking_copy=False,
        )
    )
    planner = checkpoint.DefaultSavePlanner(enable_plan_caching=True)

    def take(what: str, arrays: list[list[int]] | None = None) -> Any:
        if arrays is not None:
            for index, nbytes in enumerate(arrays[rank]):
                state[f"rank {rank}, {index}"] = torch.randn(nbytes // 4)
            return {}
        targets = [np.zeros_like(tensor.numpy()) for tensor in state.values()]
        copy = timed_copy([tensor.numpy() for tensor in state.values()], targets)
        copy = timed_copy([tensor.numpy() for tensor in state.values()], targets)
        distributed.barrier()
        begun = time.perf_counter()
        if what == "blocking":
            checkpoint.save(state, storage_writer=writer, planner=planner, process_group=group)
            seconds = time.perf_counter() - begun
            return {"seconds": seconds, "stands": seconds, "copy": copy}
        return {
            "copy": copy,
            **timed_save(
                lambda: checkpoint.async_save(
                    state,
                    storage_writer=writer,
                    planner=planner,
                    process_group=background,
                    async_stager=stager,
                ),
                lambda future: bool(future.done()),
            ),
        }

    return take


def main() -> None:
    """Run as one rank of a contender."""
    import minidist as md

    parser = worker_arguments()
    parser.add_argument("--folder", required=True)
    Model.add_options(parser)
    options = parser.parse_args()
    limit_blas_threads(1, local_size=1)
    if options.contender == OURS:
        world = md.init(threads=1)
        answer(options.meet, world.rank, our_answers(world, Model.of(options), options.folder))
    else:
        distributed = join_gloo(options.meet, options.rank, options.size)
        answer(options.meet, options.rank, peers_answers(distributed, options.rank, options.folder))


if __name__ == "__main__":
    main()
