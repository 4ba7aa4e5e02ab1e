"""minidist bench: bad input is refused in one line."""

import pytest

from minidist.cli import main


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["all-reduce", "--only", "glooo"], "no contender 'glooo'"),
        (["all-reduce", "--sizes", "3B"], "a multiple of 4 bytes"),
        (
            ["all-reduce", "--sizes", "4,0"],
            "--sizes: 0 bytes; a size is one float32 number or more: a multiple of 4",
        ),
        (["all-reduce", "--sizes", "many"], "is not a size"),
        (["all-reduce", "-n", "1"], "one rank sends nothing"),
        (
            ["all-to-all", "-n", "2,8", "--sizes", "16B"],
            "16 B are not one float32 number for each of 8 ranks",
        ),
        (["all-gather", "--only", "MPI_Allreduce"], "no contender 'MPI_Allreduce'"),
        (["all-gather", "--only", "shm:tree"], "no algorithm 'tree'"),
        (["overlap", "--only", "sox"], "no 'sox'; choose from delayed"),
        (["overlap-step", "--strategy", "zero4"], "no 'zero4'; did you mean zero3?"),
        (["overlap-step", "-n", "1"], "choose -n of at least 2"),
        (["overlap", "--bytes", "6"], "whole float32 numbers"),
        (["save", "--folder", "/nowhere"], "--folder /nowhere: there is no such folder"),
        (["calibrate", "--only", "thread"], "did you mean threads?"),
        (["calibrate", "--sizes", "1KiB"], "two --sizes or more"),
        (["step", "--heads", "3"], "heads"),
        (["step", "--zero", "4"], "are not ZeRO stages"),
        (["step", "--zero", "2", "-n", "1"], "one rank divides nothing"),
        (["step", "--plan", "dp=2", "-n", "2,4"], "leave -n out"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line_and_status_2(options, expected, capsys):
    assert main(["bench", *options]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1
    said = captured.err.split("; see `")[0]
    assert said.startswith("minidist bench") and said.count("bench") == 1
