"""Options of minidist train survive the way to the ranks."""

from minidist.cli.train import arguments
from minidist.cli.train import settings as train_settings
from minidist.console import Parser


def test_options_survive_the_way_to_the_ranks() -> None:
    parser = Parser()
    arguments.add_arguments(parser)
    args = parser.parse_args(["-n", "3", "--lr", "1e-4", "--tied", "--data", "a b.txt", "--plan", "dp=3"])
    again = parser.parse_args(train_settings.as_arguments(args))
    assert {**vars(again), "ranks": 3, "given": args.given} == vars(args)
    assert args.given == ["ranks", "lr", "tied", "data", "plan"]
