"""What the options of `minidist train` take beyond plain numbers, and how an option is noted as
given."""

import argparse
from typing import Any

from minidist.cli.train.settings import AUTO
from minidist.console import number_of_bytes, positive, shown
from minidist.errors import ConfigError
from minidist.nn.attention_pattern import NAMES, SPELLINGS, read_pattern


class GivenValue(argparse._StoreAction):
    """Stores a value, and notes in `given` that the user gave this option: --resume takes the
    others from the run."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        namespace.given = [*getattr(namespace, "given", []), self.dest]


class GivenFlag(argparse._StoreTrueAction):
    """The same of an option without a value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        namespace.given = [*getattr(namespace, "given", []), self.dest]


def save_steps(text: str) -> int | str:
    """The value of --save-every. Raises: ArgumentTypeError."""
    try:
        return AUTO if text == AUTO else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor {AUTO}") from error


def node_counts(text: str) -> str:
    """How many nodes, or how many experts on each: "2" or "6,2", as it is."""
    for number in text.split(","):
        positive(number)
    return text


def bucket_size(text: str) -> int | str:
    """The value of --bucket-bytes. Raises: ArgumentTypeError."""
    if text == AUTO:
        return AUTO
    size = number_of_bytes(text)
    if not size:
        raise argparse.ArgumentTypeError("a bucket holds at least one byte; write 1MiB, or auto")
    return size


def attention_pattern(text: str) -> str:
    """The value of --attention-pattern, with a file's contents in place of its name. Raises:
    ArgumentTypeError."""
    try:
        pattern = read_pattern(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if unknown := [
        term for term in pattern.split("+") if term.partition(":")[0] not in (*NAMES, "rows")
    ]:
        raise argparse.ArgumentTypeError(f"{shown(unknown[0])} is no pattern; write {SPELLINGS}")
    return pattern
