"""Test what a lesson's `--break` ends in: its result, or one line that says that there is none."""

import pytest

from minidist.errors import KernelError, ShapeError
from minidist.lessons.running import Break, run_break


def fails() -> None:
    raise ShapeError("takes 14 arguments, not 13")


def prints() -> None:
    print("token 20 changed")


def test_a_result_that_is_an_error_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    run_break("few", Break(fails, says="14 arguments", error=ShapeError))
    run_break("moved", Break(prints, says="token 20"))
    assert capsys.readouterr().out == "ShapeError: takes 14 arguments, not 13\ntoken 20 changed\n"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (Break(fails, says="a result"), "has not shown its result: it ended in the error above"),
        (Break(fails, says="14 arguments", error=KernelError), "was to end in KernelError"),
        (Break(fails, says="15 arguments", error=ShapeError), "was to end in ShapeError"),
        (Break(prints, says="14 arguments", error=ShapeError), "was to end in ShapeError"),
    ],
    ids=["an error", "another error", "another text", "no error"],
)
def test_another_end_is_no_result(chosen: Break, said: str) -> None:
    with pytest.raises(SystemExit, match=f"^lesson: --break moved {said}"):
        run_break("moved", chosen)
