"""The run folder of `minidist train`: made before the first step, filled after the last, removed if it stays empty."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import minidist
from minidist.console import fail, write_json
from minidist.observe.plots import draw_loss
from minidist.observe.timeline import Timeline, write_perfetto


@contextmanager
def run_folder(folder: Path) -> Iterator[None]:
    """Make the run folder before the first step: a run that cannot write its results does not start.

    If the folder is still empty at the end, it goes again with the parents made for it, also after a SIGTERM.
    Raises:  ConfigError if it cannot be made.
    """
    made = [missing for missing in (folder, *folder.parents) if not missing.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out {folder}: {error.strerror}")

    def clear() -> None:
        with suppress(OSError):
            for empty in made:
                empty.rmdir()

    def end(number: int, frame: FrameType | None) -> None:
        clear()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    main = threading.current_thread() is threading.main_thread()
    would_end = main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if would_end:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        clear()
        if would_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write_folder(folder: Path, metrics: dict[str, Any], timelines: list[Timeline],
                 weights: dict[str, np.ndarray]) -> None:
    """Write metrics.json, trace.json, loss.png, model.safetensors. Raises: ConfigError if a file cannot be written."""
    from safetensors.numpy import save_file

    try:
        write_json(folder / "metrics.json", metrics)
        write_perfetto(folder / "trace.json", timelines)
        draw_loss(folder / "loss.png", metrics["losses"], validation=metrics["validation_loss"],
                  title=f"{metrics['parameters']:,} parameters, {metrics['size']} ranks over {metrics['transport']}")
        save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / "model.safetensors",
                  metadata={"config": json.dumps(metrics["config"]), "minidist": minidist.__version__})
    except OSError as error:
        fail(f"--out {folder}: {error.strerror or error}")
