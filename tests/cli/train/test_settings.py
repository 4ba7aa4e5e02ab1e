"""Options of minidist train survive the way to the ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from minidist.cli.train import arguments
from minidist.cli.train import settings as train_settings
from minidist.cli.train.resume import Resumption
from minidist.console import Parser
from minidist.errors import ConfigError


def parsed(*words: str) -> Any:
    parser = Parser()
    arguments.add_arguments(parser)
    return parser.parse_args([*words])


def test_options_survive_the_way_to_the_ranks() -> None:
    parser = Parser()
    arguments.add_arguments(parser)
    args = parser.parse_args(["-n", "3", "--lr", "1e-4", "--tied", "--data", "a b.txt", "--plan", "dp=3"])
    again = parser.parse_args(train_settings.as_arguments(args))
    assert {**vars(again), "ranks": 3, "given": args.given} == vars(args)
    assert args.given == ["ranks", "lr", "tied", "data", "plan"]


def test_where_experts_lie(tmp_path: Path) -> None:
    """From the options; a resumed run keeps its nodes, and its placement unless one is given anew."""
    (tmp_path / "metrics.json").write_text(json.dumps({"experts": {"placement": [[2, 0, 1]]}}))
    given = train_settings.mixture_of(parsed("--experts", "3", "--top-k", "1", "--expert-nodes", "2,1", "--node-limit",
                                             "1", "--expert-placement", str(tmp_path)))
    assert given is not None
    assert (given.nodes, given.node_limit, given.placement) == ((2, 1), 1, ((2, 0, 1),))
    assert given.node_of(0).tolist() == [0, 1, 0]
    before = Resumption(tmp_path, [], {"config": {"mixture": {"nodes": [1, 2], "placement": [[1, 2, 0]]}}})
    args = parsed("--experts", "3", "--top-k", "1", "--expert-placement", str(tmp_path))
    args.given = ["steps"]
    kept = train_settings.mixture_of(args, before)
    args.given = ["expert_placement"]
    anew = train_settings.mixture_of(args, before)
    assert kept is not None and anew is not None
    assert (kept.nodes, kept.placement, anew.nodes, anew.placement) == ((1, 2), ((1, 2, 0),), (1, 2), ((2, 0, 1),))
    older = train_settings.mixture_of(args, Resumption(tmp_path, [], {"config": {"mixture": {}}}))
    assert older is not None and older.nodes is None


@pytest.mark.parametrize(("found", "says"), [
    (None, "no metrics.json of a run can be read there"), ("{", "no metrics.json of a run can be read there"),
    ('{"experts": {}}', "measured no placement: its experts were not divided over several nodes"),
    ("[]", "measured no placement")])
def test_a_folder_without_a_placement_is_refused(found: str | None, says: str, tmp_path: Path) -> None:
    if found is not None:
        (tmp_path / "metrics.json").write_text(found)
    with pytest.raises(ConfigError, match=says):
        train_settings.mixture_of(parsed("--experts", "2", "--expert-placement", str(tmp_path)))
