"""The run folder of `minidist train`: made before the first step, filled after the last, removed if it stays empty."""

import fcntl
import hashlib
import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import minidist
from minidist.cli.train.rings import BAD_INPUT, drop_rings
from minidist.comm.health.failure import LAUNCHER
from minidist.console import fail, write_json
from minidist.errors import ConfigError, PeerLostError
from minidist.files import DISK_FAILED, lock_holder, scratch, sweep
from minidist.launch.limits import RUN_FOLDER
from minidist.observe.plots import draw_loss
from minidist.observe.timeline import Timeline, write_perfetto
from minidist.observe.why_report import draw_why

MANIFEST = "metrics.json"
PAGE = "report.html"            # of minidist report
SOMETIMES = ("why.png", PAGE)   # what not every run has: it goes when the next run's results come


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make the run folder before the first step: a run that cannot write its results does not start.

    In the block it is this job's alone. What killed runs left of their drafts there goes.
    If the folder is still empty at the end, but for flight recorders that tell nothing, it goes again with the parents
    made for it, also after a SIGTERM.
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
        if error.world_rank == LAUNCHER:                    # it was told to stop, and ends its ranks
            drop_rings(folder, 143)
        raise
    finally:
        clear()
        if lock is not None:
            os.close(lock)
        if would_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def claim(folder: Path) -> int | None:
    """Make the folder and lock it, as long as the descriptor is open; None if this rank's launcher has done so.

    Raises: ConfigError if another job has it; OSError if it cannot be made.
    """
    if os.environ.get(RUN_FOLDER) == str(folder.resolve()):
        return None
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):                   # a run that is ending has just removed it
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                process = lock_holder(lock)
                os.close(lock)
                fail(f"--out {folder}: another run{f' (process {process})' if process else ''} writes there; wait for "
                     "its end, or name another folder")
            except OSError:                                 # a file system without locks
                pass
            if folder.exists() and os.path.samestat(folder.stat(), os.fstat(lock)):
                return lock
            os.close(lock)


def write_folder(folder: Path, metrics: dict[str, Any], timelines: list[Timeline],
                 weights: dict[str, np.ndarray]) -> None:
    """Write model.safetensors, trace.json, loss.png and metrics.json; none takes its place before all are there.

    With --why, why.png too.

    metrics.json goes first and comes back last, with the digests of the others: where it is, all are of one run, also
    if the folder is used again and a run is killed here.
    Raises: ConfigError if a file cannot be written; OSError if the disk is full or fails.
    """
    with writing(folder), scratch(folder) as drafts:
        save_weights(drafts / "model.safetensors", weights, metrics["config"])
        write_perfetto(drafts / "trace.json", timelines)
        draw_loss(drafts / "loss.png", metrics["losses"], validation=metrics["validation_loss"],
                  title=f"{metrics['parameters']:,} parameters, {metrics['size']} ranks over {metrics['transport']}")
        if "why" in metrics:
            draw_why(drafts / "why.png", metrics["why"], f"the critical path of step {metrics['why']['step']}")
        names = sorted(draft.name for draft in drafts.iterdir())
        metrics["files"] = {name: sha256(drafts / name) for name in names}
        write_json(drafts / MANIFEST, metrics)
        (folder / MANIFEST).unlink(missing_ok=True)
        for name in SOMETIMES:          # of a run before
            (folder / name).unlink(missing_ok=True)
        for name in (*names, MANIFEST):
            (drafts / name).replace(folder / name)


def save_weights(file: Path, weights: dict[str, np.ndarray], config: dict[str, Any]) -> None:
    """Write weights and the model's sizes in the format of safetensors. Raises: OSError.

    The file gets the mode that other new files get, which the library's have not.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        file.touch()
        mode = file.stat().st_mode
        save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, file,
                  metadata={"config": json.dumps(config), "minidist": minidist.__version__})
        file.chmod(mode)
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from error


def sha256(file: Path) -> str:
    """The digest of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """An OSError in the block names --out; it becomes a ConfigError unless the disk is full or fails."""
    try:
        yield
    except OSError as error:
        told = f"--out {folder}"
        if error.errno in DISK_FAILED:
            raise OSError(error.errno, error.strerror, told) from error
        fail(f"{told}: {error.strerror or error}")
