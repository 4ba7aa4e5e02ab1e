"""The minidist command: help is quick, a mistake is one line with the nearest spelling, and status
2."""

import argparse
import importlib
import os
import signal
import subprocess
import sys

import pytest

from minidist.cli import COMMANDS, MODULES, doctor, main, parser_for
from minidist.console import (
    Parser,
    counts,
    meant,
    number_of_bytes,
    picture,
    positive,
    positive_number,
    size_text,
    sizes,
    write_json,
)
from minidist.errors import ConfigError


def refusal(capsys, *arguments):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_help_is_quick_and_lists_every_command():
    """By the processor's time of these children alone; the least of three: other processes share
    its caches."""
    took = []
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-m", "minidist", "--help"], stdout=subprocess.PIPE, text=True
        ) as run:
            said = run.stdout.read()
            _, status, used = os.wait4(run.pid, 0)
            run.returncode = os.waitstatus_to_exitcode(status)
        assert run.returncode == 0
        took.append(used.ru_utime + used.ru_stime)
    assert min(took) < 0.5, "a call, when nothing else runs"
    assert all(f"  {name} " in said for name in COMMANDS)


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from minidist.cli import main\ntry: main(['--help'])\nexcept SystemExit: "
        "pass\n"
        "print(sorted({'numpy', 'rich', 'mpi4py', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[]\n")


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert "minidist COMMAND --help" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_there_and_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert f"usage: minidist {command}" in capsys.readouterr().out


def test_an_unknown_command_is_one_line_with_the_nearest(capsys):
    said = refusal(capsys, "trian")
    assert said.startswith("minidist: ")
    assert "did you mean train?" in said


def test_an_unknown_option_is_one_line_with_the_nearest(capsys):
    said = refusal(capsys, "launch", "--master-prot", "1", "x.py")
    assert said.startswith(
        "minidist launch: unrecognized arguments: --master-prot; did you mean --master-port?"
    )


@pytest.mark.parametrize(
    "word", ["--bogus", "--nproc-per-node", "--workers", "--epochs", "--verbose", "--logdir"]
)
def test_an_unknown_option_that_is_like_no_other_gets_no_advice(word, capsys):
    assert f": unrecognized arguments: {word}; see `minidist" in refusal(capsys, "train", word)


def test_an_option_of_another_command_is_not_what_was_meant(capsys):
    assert "did you mean --out?" not in refusal(capsys, "bench", "all-reduce", "--out", "x")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check", ["03", "--language", "zh", "mine.py"]),
        ("check", ["--limit=9", "03", "--json", "a.json", "mine.py"]),
        ("assignment", ["1", "--student", "anna", "mine.py"]),
    ],
)
def test_a_file_may_stand_behind_an_option(command, words):
    assert parser_for(command).parse_args(words).file == "mine.py"


def test_a_word_too_many_is_told_once(capsys):
    assert main(["check", "03", "--language", "zh", "mine.py", "another.py"]) == 2
    assert "unrecognized arguments: another.py;" in capsys.readouterr().err


def test_a_value_of_the_wrong_kind_is_one_line(capsys):
    assert "'two' is not a whole number of at least 1" in refusal(
        capsys, "launch", "-n", "two", "x.py"
    )


def test_an_unknown_choice_is_one_line_with_the_nearest():
    parser = Parser(prog="minidist train")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    with pytest.raises(
        ConfigError,
        match="invalid choice: 'cudda'.*did you mean cuda[?] see `minidist train --help`",
    ):
        parser.parse_args(["--device", "cudda"])


def test_an_interrupt_is_130(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("minidist.cli.doctor.run", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "minidist doctor: interrupted\n"


def test_other_errors_are_left_to_python(monkeypatch):
    def fail(args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("minidist.cli.doctor.run", fail)
    with pytest.raises(ZeroDivisionError):
        main(["doctor"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64KiB", 65536),
        ("64kib", 65536),
        ("1.5MB", 1_500_000),
        ("2 GiB", 2 << 30),
        ("3K", 3072),
    ],
)
def test_sizes_in_bytes(text, value):
    assert number_of_bytes(text) == value


def test_ranges_of_sizes():
    assert sizes("1KiB:8KiB") == [1024, 2048, 4096, 8192]
    assert sizes("1KiB:5KiB") == [1024, 2048, 4096]
    assert sizes("1KiB,3MB") == [1024, 3_000_000]
    assert sizes("7") == [7]
    assert counts("2,4") == [2, 4]
    assert positive_number("0.5") == 0.5


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (number_of_bytes, "1 furlong"),
        (number_of_bytes, ""),
        (number_of_bytes, "-4"),
        (sizes, "8KiB:1KiB"),
        (sizes, "0:4"),
        (positive, "0"),
        (positive, "-1"),
        (positive, "1.5"),
        (counts, "2,x"),
        (positive_number, "nan"),
        (positive_number, "-1"),
        (positive_number, "inf"),
        (positive_number, "soon"),
    ],
)
def test_values_that_mean_nothing(parse, text):
    parser = Parser(prog="minidist bench")
    parser.add_argument("--value", type=parse)
    with pytest.raises(ConfigError, match="argument --value: "):
        parser.parse_args([f"--value={text}"])


@pytest.mark.parametrize(
    "nbytes,text",
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (840 * 1024, "840 KiB"),
        (3 * 2**20, "3 MiB"),
        (5 * 2**30 // 4, "1.25 GiB"),
    ],
)
def test_sizes_as_text(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_meant():
    assert meant("gpip", ["gpipe", "1f1b"]) == "; did you mean gpipe?"
    assert meant("zzz", ["gpipe", "1f1b"]) == ""


def test_json_that_cannot_be_written_is_a_users_mistake(tmp_path):
    with pytest.raises(ConfigError, match="No such file or directory"):
        write_json(tmp_path / "nowhere" / "x.json", {})


def options(parser, command):
    """(words, option or place) of every value that a command parses."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from options(inner, [*command, name])
        elif action.type not in (None, picture):
            yield [*command, f"{action.option_strings[-1]}=VALUE"]


@pytest.mark.parametrize("command", ["train", "bench", "launch", "lesson", "storm", "sample"])
def test_every_number_has_a_bound(command, capsys):
    parser = Parser()
    importlib.import_module(MODULES.get(command, f"minidist.cli.{command}")).add_arguments(parser)
    found = list(options(parser, []))
    assert len(found) > 2 or command == "lesson"
    for words in found:
        for value in ("1" + "0" * 30, "9" * 5000):
            with pytest.raises(ConfigError) as caught:
                parser.parse_args([word.replace("VALUE", value) for word in words])
            assert (
                words[-1].partition("=")[0] in str(caught.value) and len(str(caught.value)) < 400
            ), words


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        "train --layers 1000000000",
        "train --width 1000000000",
        "train --batch 1000000000",
        "train --vocab 1000000000",
        "train --experts 1000000000",
        "train --experts 4 --shared-experts 1000000000",
        "train -n 1000 --vocab 100000",
        "train --offload all --width 1000000",
        "train --strategy data-parallel --replicas 1000 --width 10000",
        "bench all-reduce --sizes 999999TiB",
        "bench overlap --bytes 999999TiB",
        "bench overlap-step --layers 1000000000",
        "bench calibrate --sizes 4,999999TiB",
        "bench step --batch 1000000000",
        "bench step --plan dp=1000000",
        "bench step --zero 3 --width 1000000",
        "bench step --model gpt2-124m --layers 1000000000",
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_made(words, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr("minidist.console.memory_bytes", lambda: 24 << 30)
    assert "of memory, but this machine has 24 GiB" in refusal(capsys, *words.split())


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        "--width 999999999 --heads 2",
        "--accumulate 17",
        "--plan pp=1 --microbatches 99",
        f"--plan dp={'9' * 5000}",
        f"--checkpoint-blocks {'9' * 5000}",
        f"--stage-layers {'9' * 5000}",
        f"--data {'x' * 300}",
        f"--out {'x' * 300}",
    ],
)
def test_numbers_and_names_that_are_too_large_are_one_line(words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert len(refusal(capsys, "train", *words.split())) < 700
    assert os.listdir(tmp_path) == []


@pytest.mark.sampled
@pytest.mark.parametrize(
    "words",
    [
        "doctor",
        "bench all-reduce",
        "bench step",
        "bench kernels --count",
        "launch true",
        "lesson",
        "lesson 03 -n 2",
        "check 03",
        "train",
    ],
)
@pytest.mark.parametrize("file", ["/proc/x", "x" * 300])
def test_an_unwritable_json_is_refused_before_the_work(words, file, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    command, *rest = words.split()
    at = 1 if rest and rest[0] in ("all-reduce", "step", "kernels") else 0
    assert " --json " in refusal(capsys, command, *rest[:at], f"--json={file}", *rest[at:])


@pytest.mark.parametrize(
    ("error", "told", "status"),
    [
        (
            OSError(28, "No space left on device", "run/x.json"),
            "run/x.json: No space left on device",
            1,
        ),
        (MemoryError("Unable to allocate 5 PiB"), "not enough memory: Unable to allocate 5 PiB", 1),
        (OSError(36, "File name too long", "x" * 300), f"{'x' * 80}: File name too long", 2),
    ],
)
def test_what_the_machine_refuses_is_one_line(error, told, status, capsys, monkeypatch):
    def refuse(args):
        raise error

    monkeypatch.setattr("minidist.cli.doctor.run", refuse)
    assert main(["doctor"]) == status
    assert capsys.readouterr().err == f"minidist doctor: {told}\n"


def test_an_interrupt_while_modules_load_waits_for_them(capsys, monkeypatch):
    def load(name):
        signal.raise_signal(signal.SIGINT)
        loaded.append(name)
        return doctor

    # a job in the background ignores it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    loaded = []
    monkeypatch.setattr("minidist.cli.importlib.import_module", load)
    try:
        assert main(["doctor"]) == 130
        assert loaded == ["minidist.cli.doctor"]
        assert capsys.readouterr().err == "minidist doctor: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("where", "status", "told"),
    [
        (">&-", 0, ""),
        ("| true", 0, ""),
        ("> /dev/full", 1, "minidist: stdout: No space left on device\n"),
    ],
)
def test_a_command_whose_output_goes_nowhere(where, status, told):
    """tests/test_streams.py has the rest."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f'"$0" -m minidist --help {where}', sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (status, told)
