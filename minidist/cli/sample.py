"""`minidist sample RUN --prompt "…"`: write text from a run: its finished model, or its newest
checkpoint, of any plan.

minidist sample runs/one --prompt "The " --tokens 200 --temperature 0.6
minidist sample runs/one/step-000300                    # from that checkpoint
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from minidist.console import fail, not_negative, positive, seed_number, write_json
from minidist.data.text import Text
from minidist.errors import CheckpointError, ConfigError
from minidist.files import check_writable, open_regular
from minidist.launch.membership import limit_blas_threads
from minidist.nn import GPT
from minidist.parallel.state.manifest import (
    MANIFEST,
    checkpoints,
    read_manifest,
    require_told,
    step_of,
)
from minidist.reading import read_json, visible
from minidist.survive.whole import config_of, read_whole

TEMPERATURE = 0.6
METRICS = "metrics.json"


class _FinishedRun(msgspec.Struct):
    """The fields of a finished run's metrics.json that sampling needs."""

    losses: list[Any]
    config: dict[str, Any]
    vocabulary: Annotated[str, msgspec.Meta(min_length=1)]


class Writer(NamedTuple):
    """A model, its vocabulary, the file it was read from, and its step."""

    model: GPT
    text: Text
    source: Path
    step: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist sample` to the parser."""
    parser.add_argument(
        "run", metavar="RUN", help="a run folder of minidist train, or one of its checkpoints"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what the text begins with (default: a new line)"
    )
    parser.add_argument(
        "--tokens", type=positive, default=200, metavar="N", help="symbols to add (default: 200)"
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=TEMPERATURE,
        metavar="T",
        help="1: the model's probabilities; lower: likelier symbols more often; 0: always the "
        "likeliest (default: %(default)s)",
    )
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="S", help="of the draws (default: 0)"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write the text, its source and the options as JSON"
    )


def run(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation.

    Returns: 0. Raises: ConfigError if the run cannot be sampled.
    """
    check_writable("--json", args.json)
    # products of one row: more threads gain nothing, and wait for each other on busy cores
    limit_blas_threads(1, 1)
    if args.prompt == "":
        fail("--prompt: needs at least one symbol; leave it out to begin with a new line")
    try:
        writer = open_run(Path(args.run))
    except CheckpointError as error:
        fail(str(error))
    symbols = writer.text.symbols
    prompt = args.prompt or ("\n" if "\n" in symbols else symbols[0])
    ids = writer.model.generate(
        writer.text.encode(prompt), args.tokens, temperature=args.temperature, seed=args.seed
    )
    written = writer.text.decode(ids)
    sys.stdout.write(visible(written.lstrip("\n"), keep="\n\t") + "\n")
    if args.json:
        write_json(
            args.json,
            {
                "source": str(writer.source),
                "step": writer.step,
                "prompt": prompt,
                "text": written,
                "tokens": args.tokens,
                "temperature": args.temperature,
                "seed": args.seed,
            },
        )
    return 0


def open_run(place: Path) -> Writer:
    """Return the newest state in a run folder, or the checkpoint `place`.

    Raises:  CheckpointError if it is damaged; ConfigError if there is none that minidist train has
             written.
    """
    if (place / MANIFEST).is_file() or step_of(place) is not None:
        return _from_checkpoint(place)
    try:
        newest = checkpoints(place)[-1:]
    except OSError as error:
        fail(f"{place}: {error.strerror}")
    finished, problem = _finished(place)
    if finished is not None and (
        not newest or len(finished["losses"]) >= (step_of(newest[0]) or 0)
    ):
        return _from_results(place, finished)
    if not newest and problem:
        fail(f"{place / METRICS}: {problem}; name a folder that minidist train has written")
    if not newest:
        fail(
            f"{place}: no run that can write text is here: neither metrics.json nor a checkpoint; "
            "name a folder that minidist train has written"
        )
    return _from_checkpoint(newest[0])


def _finished(run: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the metrics of a finished run, or None and the reason if they cannot be read ("" if
    there are none)."""
    try:
        return read_json(run / METRICS, _FinishedRun, member=True), ""
    except FileNotFoundError:
        return None, ""
    except (OSError, ConfigError) as error:
        return None, str(error.strerror if isinstance(error, OSError) else error)


def _from_results(run: Path, metrics: dict[str, Any]) -> Writer:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = run / "model.safetensors"
    try:
        os.close(open_regular(file, member=True))
        weights = load_file(file)
    except OSError as error:
        fail(f"{file}: {error.strerror or error}")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        fail(
            f"{file}: is damaged, or not of minidist train ({error}); train again, or sample "
            "from a checkpoint"
        )
    return _writer(metrics, weights, file, len(metrics["losses"]))


def _from_checkpoint(folder: Path) -> Writer:
    about = read_manifest(folder)["about"]
    if not isinstance(about.get("vocabulary"), str):
        fail(f"{folder}: has no vocabulary: another program than minidist train has saved it")
    require_told(folder, about, "steps_done")
    return _writer(about, read_whole(folder), folder, about["steps_done"])


def _writer(
    about: dict[str, Any], weights: dict[str, np.ndarray], source: Path, step: int
) -> Writer:
    config = config_of(source, about, (array.size for array in weights.values()))
    symbols = about["vocabulary"]
    if not 0 < len(symbols) <= config.vocabulary:
        fail(
            f"{source}: {len(symbols)} symbols do not fit a model of {config.vocabulary}; name "
            "another checkpoint"
        )
    model = GPT(config)
    model.load_state_dict(weights)
    nothing = np.empty(0, np.int32)
    return Writer(model, Text(str(source), symbols, nothing, nothing), source, step)
