"""The sample of minidist train: beginnings of lines of prose."""

from minidist.cli.train import sample
from minidist.data import text


def test_beginnings_are_lines_of_prose() -> None:
    begun = sample.beginnings(
        text.from_string("x = 1\nIt was a bright cold day in April, and the\n" * 40), 3
    )
    assert begun == ["\nIt was a bright cold day in April"[:33]] * 3
    assert sample.beginnings(text.from_string("0123456789" * 50), 3) == ["0123456789" * 3 + "01"]
