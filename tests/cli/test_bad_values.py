"""Every option of every command with values that nobody means: one line and status 2, or a value;
never a traceback."""

import argparse
import importlib
import os
import pathlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from damaged import bind, limited

from minidist import cli
from minidist.cli import main
from minidist.console import Parser, readable
from minidist.errors import ConfigError

JUNK = (
    "",
    " ",
    "0",
    "-1",
    "9" * 30,
    "9" * 5000,
    "nan",
    "-inf",
    "1e400",
    "²",
    "'x",
    '"',
    "a b",
    "\n",
    "\x1b[31m",
    "--",
    os.fsdecode(b"\xff\xfe"),
    "/dev/null",
    ".",
    "a[1-9999999999999]",
    "a[1-",
    "-Fx@b:1",
    "dp=1000000",
    "x" * 5000,
    "1:2:3",
    ":",
    ",",
    "=",
    "1,,2",
    "99999999999TiB",
    "{}",
    "%s",
    "[red]x",
)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser, and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@pytest.mark.parametrize(
    "command", [name for name in cli.COMMANDS if name not in ("demo", "completion")]
)
def test_no_value_of_an_option_ends_its_parser(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # --figure and others make a folder where they can
    top = Parser(prog=f"minidist {command}")
    importlib.import_module(cli.MODULES.get(command, f"minidist.cli.{command}")).add_arguments(top)
    tried = 0
    began = time.process_time()
    for parser in parsers(top):
        for action in parser._actions:
            if action.nargs == 0 or not action.option_strings:
                continue
            option = action.option_strings[-1]
            words = [
                f"{option}={value}" if option.startswith("--") else option + value for value in JUNK
            ]
            for word in words:
                tried += 1
                try:
                    parser.parse_known_args([word])
                except ConfigError as error:
                    assert "\n" not in readable(str(error)) and len(readable(str(error))) < 1500, (
                        word[:80]
                    )
    assert tried >= len(JUNK) and time.process_time() - began < 60


UNREADABLE = "the folder may not be read"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files that hold nothing that is asked for, and one that may not be read, also
    by root."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "nul.csv").write_bytes(b"seconds,devices\n\0,\xff\n")
    (tmp_path / "book.txt").write_text("a text of a few words. " * 99)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    bind(tmp_path / "sock")
    closed = tmp_path / "closed"
    closed.mkdir()
    for name in ("stat", "open", "scandir", "listdir"):

        def refuse(
            path: object, *args: object, asked: object = getattr(os, name), **more: object
        ) -> object:
            if (
                isinstance(path, str | Path)
                and Path(path) != closed
                and closed in Path(path).absolute().parents
            ):
                raise PermissionError(13, "Permission denied", str(path))
            return asked(path, *args, **more)  # type: ignore[operator]

        accessor = getattr(pathlib, "_NormalAccessor", None)
        if getattr(accessor, name, None) is getattr(os, name):
            monkeypatch.setattr(accessor, name, staticmethod(refuse))  # Python 3.10's pathlib
        monkeypatch.setattr(os, name, refuse)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("launch --token-file binary true", "--token-file binary is not one line of UTF-8 text"),
        ("launch --token-file /dev/zero true", "--token-file /dev/zero: is a device"),
        ("launch --token-file pipe true", "--token-file pipe: is a pipe"),
        ("launch --token-file folder true", "--token-file folder: is a folder"),
        ("launch --flight= true", "argument --flight: '' is not a value"),
        ("launch --json=-- true", "argument --json: '--' is not a value"),
        ("storm --kinds=", "argument --kinds/--faults: '' is not a value"),
        ("storm --kinds=,", "--kinds: '' is none of"),
        ("calibrate --cluster a100-80g --from binary", "runs binary: it is not a text in UTF-8"),
        ("calibrate --cluster a100-80g --from nul.csv", "runs nul.csv: it is not a text in UTF-8"),
        ("calibrate --cluster a100-80g --from /dev/zero", "runs /dev/zero: is a device"),
        ("calibrate --cluster a100-80g --from pipe", "runs pipe: is a pipe"),
        (
            "calibrate --cluster a100-80g --from loop",
            "runs loop: Too many levels of symbolic links",
        ),
        ("simulate --cluster pipe:x:1x8 --batch 8 --model gpt2", "cluster file pipe"),
        (
            "simulate --cluster h100:1x8 --batch 8 --model gpt2 --profile /dev/zero",
            "cost profile /dev/zero",
        ),
        ("train --quiet --data pipe", "cannot read pipe: is a pipe"),
        ("train --quiet --data /dev/zero", "cannot read /dev/zero: is a device"),
        ("train --quiet --data loop", "no file or folder 'loop'"),
        ("diagnose closed/run", "Permission denied"),
        ("watch --once closed/run", "Permission denied"),
        ("report closed/run", "Permission denied"),
        ("sample closed/run", "Permission denied"),
        ("checkpoint closed/run", "Permission denied"),
        ("diagnose nothing\nhere", r"nothing\nhere: there is no such folder"),
        ("report ", "argument RUN: '' is not a value"),
        ("diagnose ", "argument RUN: '' is not a value"),
        ("watch  --once", "argument RUN: '' is not a value"),
        ("sample ", "argument RUN: '' is not a value"),
        ("check ", "argument lesson: '' is not a value"),
        ("check 03 ", "argument file: '' is not a value"),
        ("lesson ", "argument lesson: '' is not a value"),
        ("lesson 03 --copy=", "argument --copy: '' is not a value"),
        ("lesson 03 --break=", "argument --break: '' is not a value"),
        ("train --data=", "argument --data: '' is not a value"),
        ("train --resume ", "argument --resume: '' is not a value"),
        ("lesson --json=", "argument --json: '' is not a value"),
        (
            "lesson --json=pipe",
            "--json pipe: is a pipe that no process reads; start its reader first",
        ),
        ("lesson --json=sock", "--json sock: is a socket; name a file"),
        ("check 03 pipe", "cannot read pipe: is a pipe"),
        ("check 03 /dev/zero", "cannot read /dev/zero: is a device"),
        ("watch folder --every=١٢", "is not a number above 0"),
        ("watch folder --every=1_0", "is not a number above 0"),
        ("simulate --tokens=١٢", "is not a number above 0"),
        ("train --device-memory=١MiB", "is not a size"),
        ("train --interruptions-per-day=1e-320", "is not a number above 0"),
        (
            "train --memory-limit=0 -n 2 --data book.txt --context 32",
            "--memory-limit: no rank can live with 0 B",
        ),
        (
            "train --elastic ²:³ -n 2 --data book.txt --context 32",
            "--elastic: '²:³' is not LEAST:MOST",
        ),
        ("bench step --zero ²", "'²' are not ZeRO stages"),
        ("plan --confirm=-1", "'-1' is not a whole number of at least 0"),
        (
            "simulate --figure step.zip --cluster h100:1x1 --batch 1",
            "'step.zip' is not the name of a picture; it must end in .png",
        ),
        ("simulate --cluster h100:١x٢ --batch 8 --model gpt2", "'١x٢' is no shape"),
    ],
)
def test_what_cannot_be_read_or_meant_is_one_line(
    words: str, says: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with limited(20.0):
        assert main(words.split(" ")) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith(f"minidist {words.split()[0]}: ")
        and error.count("\n") == 1
        and says in error
    ), error


def test_a_pipe_that_somebody_reads_is_written_to(here: Path) -> None:
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with limited(20.0):
            assert main(["lesson", "--json", "pipe"]) == 0
        assert b"Ring all-reduce" in os.read(reader, 1 << 16)
    finally:
        os.close(reader)
