"""The options of elastic jobs: what they allow, and what is refused in one line."""

import pytest

from minidist.cli import main
from minidist.cli.train import elastic
from minidist.cli.train import settings as train_settings
from minidist.cli.train.command import add_arguments
from minidist.console import Parser

TINY = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "16", "--batch", "8"]


def settings_of(*options):
    parser = Parser()
    add_arguments(parser)
    return train_settings.check(parser.parse_args([*TINY, *options]))


@pytest.mark.parametrize(("options", "sizes"), [
    (["--elastic=2:4"], (2, 3, 4)), (["--elastic=1:4", "--plan=dp=2,tp=2"], (2, 4)),
    (["--elastic=2:4", "--zero=1", "--shard=2"], (2, 4)), (["--elastic=4:8"], (4,))])
def test_the_plan_says_which_numbers_of_ranks_are_possible(options, sizes, monkeypatch, tmp_path):
    """The inner axes stay, and dp shrinks."""
    started = []
    monkeypatch.setattr(elastic, "spawn_elastic", lambda command, bounds, **_: started.append(bounds) or 0)
    settings = settings_of(*options, f"--out={tmp_path}", "--max-restarts=7", "--spares=1")
    assert elastic.start_elastic(settings, 4) == 0
    assert (started[0].sizes, started[0].restarts, started[0].spares) == (sizes, 7, 1)
    assert [settings.plan(size).size for size in sizes] == list(sizes)


@pytest.mark.parametrize(("options", "said"), [
    (["--spares=1"], "--spares: is for an elastic job; add --elastic LEAST:MOST"),
    (["-n4", "--elastic=4"], "'4' is not LEAST:MOST, two numbers of ranks, as 4:8"),
    (["-n4", "--elastic=5:8"], "-n 4: --elastic 5:8 allows 5 to 8 ranks"),
    (["--elastic=1:1"], "--elastic 1:1: is for ranks that are started here; give -n, without another launcher"),
    (["-n4", "--elastic=2:4", "--verify"], "leave out --verify, --graph and --strategy"),
    (["-n4", "--elastic=2:4", "--transport=mpi"], "--transport mpi cannot")])
def test_what_is_refused(options, said, capsys, tmp_path):
    assert main(["train", *TINY, *options, f"--out={tmp_path / 'run'}"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
