"""Types of option values of `minidist train` beyond plain numbers, and the list of the options that
were given."""

import argparse
from typing import Any

from minidist.cli.train.settings import AUTO
from minidist.console import number_of_bytes, positive, shown
from minidist.errors import ConfigError
from minidist.nn.attention_pattern import NAMES, SPELLINGS, read_pattern


class GivenValue(argparse._StoreAction):
    """An action that stores a value, and notes in `given` that the user gave this option: --resume
    takes the others from the run."""

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
    """The same action for an option without a value."""

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
    """Return the value of --save-every. Raises: ArgumentTypeError."""
    try:
        return AUTO if text == AUTO else positive(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor {AUTO}") from error


def node_counts(text: str) -> str:
    """Return the text unchanged: a number of nodes "2", or the number of experts on each "6,2".
    Raises: ArgumentTypeError."""
    for number in text.split(","):
        positive(number)
    return text


def bucket_size(text: str) -> int | str:
    """Return the value of --bucket-bytes. Raises: ArgumentTypeError."""
    if text == AUTO:
        return AUTO
    size = number_of_bytes(text)
    if not size:
        raise argparse.ArgumentTypeError("a bucket holds at least one byte; write 1MiB, or auto")
    return size


def attention_pattern(text: str) -> str:
    """Return the value of --attention-pattern, with a file's contents in place of its name.

    Raises: ArgumentTypeError.
    """
    try:
        pattern = read_pattern(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if unknown := [
        term for term in pattern.split("+") if term.partition(":")[0] not in (*NAMES, "rows")
    ]:
        raise argparse.ArgumentTypeError(f"{shown(unknown[0])} is not a pattern; write {SPELLINGS}")
    return pattern
