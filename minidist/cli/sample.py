"""`minidist sample RUN --prompt "…"`: write text from a run: its finished model, or its newest
checkpoint, of any plan; or from the weights of a published model.

minidist sample runs/one --prompt "The " --tokens 200 --temperature 0.6
minidist sample runs/one/step-000300                    # from that checkpoint
minidist sample --weights model.safetensors --ids 464,2068,7586
minidist sample --weights model.safetensors --tokenizer tokenizer.json --prompt "The "
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from minidist.console import (
    fail,
    not_negative,
    positive,
    seed_number,
    whole_number,
    write_json,
)
from minidist.data.id_text import shown_ids
from minidist.data.text import Text
from minidist.data.tokenizer import Tokenizer
from minidist.errors import CheckpointError, ConfigError
from minidist.files import check_writable, open_regular
from minidist.launch.membership import limit_blas_threads
from minidist.nn import GPT
from minidist.nn.published_weights import load_published
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
    vocabulary: str  # the symbols; "" where the run learned ids


class Writer(NamedTuple):
    """A model, its vocabulary, the file it was read from, and its step."""

    model: GPT
    text: Text
    source: Path
    step: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist sample` to the parser."""
    parser.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        help="a run folder of minidist train, or one of its checkpoints",
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what the text begins with (default: a new line)"
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="in place of RUN: a safetensors file (or the index of several, or their folder) with "
        "the names of GPT-2 or Llama, and config.json beside it",
    )
    parser.add_argument(
        "--heads",
        type=positive,
        metavar="N",
        help="with --weights: attention heads, if no config.json is there",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        help="with --weights, or a run that learned ids: tokenizer.json, to write text in place "
        "of ids (needs the extra `tokenizer`)",
    )
    parser.add_argument(
        "--ids",
        type=token_ids,
        metavar="I,J,…",
        help="with --weights, or a run that learned ids: the ids that the text begins with, in "
        "place of --prompt",
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
    if args.weights is not None:
        return _sample_published(args)
    if args.heads is not None:
        fail("--heads: is for --weights FILE; add it, or leave this out")
    if args.run is None:
        fail("name a run folder of minidist train, or --weights FILE")
    try:
        writer = open_run(Path(args.run))
    except CheckpointError as error:
        fail(str(error))
    if not writer.text.symbols:
        return _continue_ids(args, writer.model, str(writer.source))
    for option in ("tokenizer", "ids"):
        if getattr(args, option) is not None:
            fail(f"--{option}: this run learned symbols, not ids; leave the option out")
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


def _sample_published(args: argparse.Namespace) -> int:
    """Print the continuation by a published model. Returns: 0. Raises: ConfigError, DataError."""
    if args.run is not None:
        fail(f"{args.run}: a run folder and --weights exclude each other; leave one out")
    _check_beginning(args)
    return _continue_ids(args, load_published(args.weights, heads=args.heads), args.weights)


def _check_beginning(args: argparse.Namespace) -> None:
    """Raise ConfigError unless the options say how the ids begin."""
    if (args.ids is None) == (args.prompt is None):
        fail("give the beginning, by --ids I,J,… or by --prompt TEXT with --tokenizer")
    if args.prompt is not None and args.tokenizer is None:
        fail(
            "--prompt: a model of ids needs --tokenizer tokenizer.json for text; or give --ids I,J,…"
        )


def _continue_ids(args: argparse.Namespace, model: GPT, source: str) -> int:
    """Print the continuation by a model of ids: as text with a tokenizer, else as ids.

    Returns: 0. Raises: ConfigError, DataError.
    """
    _check_beginning(args)
    tokenizer = None if args.tokenizer is None else Tokenizer(args.tokenizer)
    if tokenizer is not None and tokenizer.size > model.config.vocabulary:
        fail(
            f"--tokenizer {args.tokenizer}: has {tokenizer.size:,} ids, the model "
            f"{model.config.vocabulary:,}; name the tokenizer of this model"
        )
    if args.ids is not None:
        first = args.ids
    else:
        assert tokenizer is not None
        first = tokenizer.encode(args.prompt).tolist()
    if not first or max(first) >= model.config.vocabulary:
        fail(
            f"{'--prompt' if args.ids is None else '--ids'}: needs one id or more, each below "
            f"{model.config.vocabulary:,}, the vocabulary of {source}"
        )
    ids = model.generate(first, args.tokens, temperature=args.temperature, seed=args.seed).tolist()
    text = None if tokenizer is None else tokenizer.decode(ids)
    sys.stdout.write((shown_ids(ids) if text is None else visible(text, keep="\n\t")) + "\n")
    if args.json:
        write_json(
            args.json,
            {
                "source": source,
                "prompt": args.prompt,
                "text": text,
                "ids": ids,
                "tokens": args.tokens,
                "temperature": args.temperature,
                "seed": args.seed,
            },
        )
    return 0


def token_ids(text: str) -> list[int]:
    """Return the ids in a text as "464,2068". Raises: ArgumentTypeError."""
    try:
        return [whole_number(0, 2**40)(word) for word in text.split(",")]
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"ids are whole numbers with commas: {error}") from None


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
    if len(symbols) > config.vocabulary:
        fail(
            f"{source}: {len(symbols)} symbols do not fit a model of {config.vocabulary}; name "
            "another checkpoint"
        )
    model = GPT(config)
    model.load_state_dict(weights)
    nothing = np.empty(0, np.int32)
    return Writer(model, Text(str(source), symbols, nothing, nothing), source, step)
