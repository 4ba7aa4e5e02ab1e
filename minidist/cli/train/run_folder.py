"""The run folder of `minidist train`: made before the first step, filled after the last, removed if
it is still empty."""

import fcntl
import hashlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import minidist
from minidist.cli.train.attempts import by_itself
from minidist.cli.train.rings import BAD_INPUT, drop_rings
from minidist.comm.health.failure import LAUNCHER
from minidist.console import fail, write_json
from minidist.device.backend import dtype_name
from minidist.errors import ConfigError, PeerLostError
from minidist.files import DISK_FAILED, lock_holder, scratch, sweep
from minidist.launch.limits import RUN_FOLDER
from minidist.observe.plots import draw_loss
from minidist.observe.timeline import Timeline, write_perfetto
from minidist.observe.why_report import draw_why
from minidist.parallel.state.shard_file import DTYPES, header_bytes

MANIFEST = "metrics.json"
WEIGHTS = "model.safetensors"
PAGE = "report.html"  # written by minidist report
# made from the results: removed when the next run writes its results
OF_THE_RESULTS = ("trace.json", "loss.png", "why.png", PAGE)


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make the run folder before the first step, so that a run that cannot write does not start.

    In the block only this job uses it. Drafts left there by killed runs are removed. If the folder
    is empty at the end, except for flight recorders of no use, it is removed with the parents made
    for it, even after a SIGTERM.
    Raises:  ConfigError if it cannot be made, or another job has it.
    """
    made = [missing for missing in (folder, *folder.parents) if not os.path.exists(missing)]
    with writing(folder):
        lock = claim(folder)
        sweep(folder)

    def clear() -> None:
        with suppress(OSError):
            for empty in made:
                empty.rmdir()

    def end(number: int, frame: FrameType | None) -> None:
        drop_rings(folder, 128 + number)
        clear()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    main = threading.current_thread() is threading.main_thread()
    would_end = main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if would_end:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    except (ConfigError, KeyboardInterrupt) as error:
        drop_rings(folder, BAD_INPUT if isinstance(error, ConfigError) else 130)
        raise
    except PeerLostError as error:
        if error.world_rank == LAUNCHER:  # the launcher got a signal, and ends its ranks
            drop_rings(folder, 143)
        raise
    finally:
        clear()
        if lock is not None:
            os.close(lock)
        if would_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def claim(folder: Path) -> int | None:
    """Make the folder and lock it, as long as the descriptor is open.

    Return None if this rank's launcher has done so.

    Raises: ConfigError if another job has it; OSError if it cannot be made.
    """
    if os.environ.get(RUN_FOLDER) == os.path.realpath(folder):
        return None
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # a run that is ending has just removed it
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                process = lock_holder(lock)
                os.close(lock)
                fail(
                    f"--out {folder}: another run{f' (process {process})' if process else ''} "
                    "writes there; wait for its end, or name another folder"
                )
            except OSError:  # a file system without locks
                pass
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(lock)):
                return lock
            os.close(lock)


def write_results(folder: Path, metrics: dict[str, Any], weights: dict[str, np.ndarray]) -> None:
    """Write model.safetensors and metrics.json, the results of a run, as drafts, then move both
    into place.

    The old metrics.json is removed first, and the new one is put in place last, with the digest of
    the weights. So if it exists, the files that it names are of one run, even if the folder is used
    again and a run is killed here.
    Raises: ConfigError if a file cannot be written; OSError if the disk is full or fails.
    """
    with writing(folder), scratch(folder) as drafts:
        save_weights(drafts / WEIGHTS, weights, metrics["config"])
        metrics["files"] = {WEIGHTS: sha256(drafts / WEIGHTS)}
        write_json(drafts / MANIFEST, metrics)
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in OF_THE_RESULTS:  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        for name in (WEIGHTS, MANIFEST):
            (drafts / name).replace(folder / name)


def write_views(folder: Path, metrics: dict[str, Any], timelines: list[Timeline] | None) -> None:
    """Write the files made from the results: trace.json, loss.png and with --why why.png.

    Then write metrics.json again. If one fails, a line says so, and the others are written.
    """
    views: dict[str, Callable[[Path], None]] = {}
    if timelines is not None:
        views["trace.json"] = partial(write_perfetto, timelines=timelines)
    views["loss.png"] = partial(_draw_loss, metrics=metrics)
    if "why" in metrics:
        views["why.png"] = partial(_draw_why, metrics=metrics)
    for name, write in views.items():
        with by_itself(name), writing(folder), scratch(folder) as drafts:
            write(drafts / name)
            digest = sha256(drafts / name)
            (drafts / name).replace(folder / name)
            metrics["files"][name] = digest
    with by_itself(MANIFEST), writing(folder), scratch(folder) as drafts:
        write_json(drafts / MANIFEST, metrics)
        (drafts / MANIFEST).replace(folder / MANIFEST)


def _draw_loss(place: Path, metrics: dict[str, Any]) -> None:
    draw_loss(
        place,
        metrics["losses"],
        validation=metrics["validation_loss"],
        title=f"{metrics['parameters']:,} parameters, {metrics['size']} ranks over "
        f"{metrics['transport']}",
    )


def _draw_why(place: Path, metrics: dict[str, Any]) -> None:
    draw_why(place, metrics["why"], f"the critical path of step {metrics['why']['step']}")


def save_weights(file: Path, weights: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Write weights and the model's sizes in the format of safetensors. Raises: OSError.

    The library is not used, because it writes its metadata in a different order each time: equal
    weights must give equal files.
    """
    about = {"config": json.dumps(config), "minidist": minidist.__version__}
    tensors: dict[str, Any] = {"__metadata__": about}
    end = 0
    for name, array in weights.items():
        tensors[name] = {
            "dtype": DTYPES[dtype_name(array.dtype)],
            "shape": [*array.shape],
            "data_offsets": [end, end + array.nbytes],
        }
        end += array.nbytes
    with file.open("wb") as stream:
        stream.write(header_bytes(tensors))
        for array in weights.values():
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def sha256(file: Path) -> str:
    """Return the digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make an OSError of the block name --out.

    Unless the disk is full or fails, it becomes a ConfigError.
    """
    try:
        yield
    except OSError as error:
        told = f"--out {folder}"
        if error.errno in DISK_FAILED:
            raise OSError(error.errno, error.strerror, told) from error
        fail(f"{told}: {error.strerror or error}")
