"""`minidist train --from FILE`: the model's sizes, its data and its first weights are those of a
published model."""

import argparse
import os
from dataclasses import replace
from typing import Any

from minidist.cli.train.resume import Resumption
from minidist.console import fail
from minidist.data import text
from minidist.data.id_text import load_tokens
from minidist.nn import GPTConfig
from minidist.nn.published_weights import Published
from minidist.parallel.hybrid.hybrid import Trainer

OF_THE_MODEL = ("layers", "width", "heads", "vocab", "positions", "tied", "dtype")
"""Options whose values a published model has."""
EXCLUDED = {
    "experts": "a published model has no experts",
    "attention_pattern": "a published model's queries see all keys",
    "local_steps": "each rank would need weights of its own",
    "asynchronous": "its servers have no common step",
    "elastic": "a job that starts again would begin from the file",
    "verify": "the run of one process begins with drawn weights",
}
"""{an option that --from excludes: why}."""


def load_data(args: argparse.Namespace) -> text.Text:
    """Return the data of a run: symbols, or with --from ids. Raises: ConfigError."""
    if origin(args) is None:
        if args.tokenizer is not None:
            fail("--tokenizer: is for --from FILE; add it, or leave this out")
        return text.load(args.data)
    if args.tokenizer is not None:
        args.tokenizer = os.path.abspath(args.tokenizer)  # a resumed run may start elsewhere
    return load_tokens(args.data, args.tokenizer)


def published_config(args: argparse.Namespace, resume: Resumption | None) -> GPTConfig:
    """Return the config of the file, with this run's dropout; the options in `args` that describe
    the model become the file's.

    Raises: ConfigError, DataError for a file that cannot be used, and for options that disagree.
    """
    for name, reason in EXCLUDED.items():
        if getattr(args, name):
            option = f"--{name.replace('_', '-')}"
            fail(f"{option}: {reason}; leave out --from, or {option}")
    if resume is not None:
        return GPTConfig.of(resume.about["config"])
    given = set(getattr(args, "given", ()))
    path = os.path.abspath(origin(args) or "")
    config = Published(path, heads=args.heads if "heads" in given else None).config
    setattr(args, "from", path)
    values: dict[str, Any] = {
        name: getattr(config, name) for name in OF_THE_MODEL if name != "vocab"
    }
    values["vocab"] = config.vocabulary
    for name, value in values.items():
        if name in given and getattr(args, name) != value:
            fail(
                f"--{name} {getattr(args, name)}: {path} has {value}; leave the option out, its "
                "model is the file's"
            )
        setattr(args, name, value)
    if args.context > config.context and "context" in given:
        fail(
            f"--context {args.context}: {path} has positions for {config.context} tokens; give at "
            "most so many"
        )
    args.context = min(args.context, config.context)
    return replace(config, dropout=args.dropout)


def begin(args: argparse.Namespace, trainer: Trainer) -> None:
    """Give a new run the file's weights. Every rank calls it. Raises: as Trainer.set_weights."""
    path = origin(args)
    if path is not None:
        trainer.set_weights(Published(path, heads=trainer.config.heads).read)


def origin(args: argparse.Namespace) -> str | None:
    """Return the file of --from, or None."""
    found: str | None = getattr(args, "from")
    return found
