"""Shared by all commands: an argument parser that helps with spelling, parsers of option values, number formats."""

import argparse
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from minidist.errors import ConfigError

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


class Parser(argparse.ArgumentParser):
    """An argument parser that answers a mistake with one line, which names the nearest option or value.

    Raises: ConfigError where argparse would print its usage and exit; `minidist` prints it and exits with status 2.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message)
        unknown = re.match(r"unrecognized arguments: (--?[^ =]+)", message)
        if choice:
            message += meant(choice[1], [name.strip(" '") for name in choice[2].split(",")])
        elif unknown:
            message += meant(unknown[1], set(_options(self)) - {unknown[1]})
        raise ConfigError(f"{message}{'' if message.endswith('?') else ';'} see `{self.prog} --help`")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Option strings of the parser and of all its commands: the top parser reports unknown options of each."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


def meant(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest of `known`, or the empty string."""
    nearest = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def fail(message: str) -> NoReturn:
    """Report a user's mistake: one line on stderr and exit status 2. Raises: ConfigError, always."""
    raise ConfigError(message)


def number_of_bytes(text: str) -> int:
    """'64MiB' -> 67108864. Units: B, KB, MB, GB, TB (powers of 1000); KiB, MiB, GiB, TiB and K, M, G, T (of 1024)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2].upper() not in UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 4096, 64KiB, 1.5MB or 2GiB")
    return round(float(match[1]) * UNITS[match[2].upper()])


def sizes(text: str) -> list[int]:
    """'1KiB:64MiB' -> bytes, doubling from the first to the last; '1KiB,3MB' -> these; '4KiB' -> one."""
    if ":" not in text:
        return [number_of_bytes(part) for part in text.split(",")]
    first, last = map(number_of_bytes, text.split(":", 1))
    if not 0 < first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: a range runs from a size above 0 to one no smaller")
    return [first << doublings for doublings in range((last // first).bit_length())]


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.strip().isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """'2,4' -> [2, 4]."""
    return [positive(part) for part in text.split(",")]


def _number(what: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of an option whose value is `what`: a finite number that `fits`."""
    def parse(text: str) -> float:
        with suppress(ValueError):
            if math.isfinite(value := float(text)) and fits(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")

    return parse


positive_number = _number("a number above 0", lambda value: value > 0)
not_negative = _number("a number of at least 0", lambda value: value >= 0)
fraction = _number("a fraction in [0, 1)", lambda value: 0 <= value < 1)


def folder_to_write(text: str) -> Path:
    """The value of an option: a folder that exists and can be written to. Raises: ArgumentTypeError."""
    folder = Path(text)
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} is not a folder that can be written to")
    return folder


def plural(count: int, noun: str) -> str:
    """(1, "rank") -> "1 rank", (4, "rank") -> "4 ranks"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def exactly(number: float) -> str:
    """12.0 -> "12", 1234.5 -> "1,234.5"."""
    return f"{number:,.1f}".removesuffix(".0")


def size_text(nbytes: float) -> str:
    """`3.0 MiB`, `1.5 KiB`, `12 B`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes:.0f} B"


def write_json(file: str | Path, value: Any) -> None:
    """Write `value` to the file of --json. Raises: ConfigError if the file cannot be written."""
    try:
        Path(file).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror}") from error
