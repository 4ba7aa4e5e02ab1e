"""Options of minidist train survive the way to the ranks, which all have the same."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import minidist as md
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
    args = parser.parse_args(
        ["-n", "3", "--lr", "1e-4", "--tied", "--data", "a b.txt", "--plan", "dp=3"]
    )
    again = parser.parse_args(train_settings.as_arguments(args))
    assert {**vars(again), "ranks": 3, "given": args.given} == vars(args)
    assert args.given == ["ranks", "lr", "tied", "data", "plan"]


def test_where_experts_lie(tmp_path: Path) -> None:
    """From the options; a resumed run keeps its nodes, and its placement unless one is given
    anew."""
    (tmp_path / "metrics.json").write_text(json.dumps({"experts": {"placement": [[2, 0, 1]]}}))
    given = train_settings.mixture_of(
        parsed(
            "--experts",
            "3",
            "--top-k",
            "1",
            "--expert-nodes",
            "2,1",
            "--node-limit",
            "1",
            "--expert-placement",
            str(tmp_path),
        )
    )
    assert given is not None
    assert (given.nodes, given.node_limit, given.placement) == ((2, 1), 1, ((2, 0, 1),))
    assert given.node_of(0).tolist() == [0, 1, 0]
    before = Resumption(
        tmp_path, [], {"config": {"mixture": {"nodes": [1, 2], "placement": [[1, 2, 0]]}}}
    )
    args = parsed("--experts", "3", "--top-k", "1", "--expert-placement", str(tmp_path))
    args.given = ["steps"]
    kept = train_settings.mixture_of(args, before)
    args.given = ["expert_placement"]
    anew = train_settings.mixture_of(args, before)
    assert kept is not None and anew is not None
    assert (kept.nodes, kept.placement, anew.nodes, anew.placement) == (
        (1, 2),
        ((1, 2, 0),),
        (1, 2),
        ((2, 0, 1),),
    )
    older = train_settings.mixture_of(args, Resumption(tmp_path, [], {"config": {"mixture": {}}}))
    assert older is not None and older.nodes is None


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (None, "no metrics.json of a run can be read there"),
        ("{", "no metrics.json of a run can be read there"),
        (
            '{"experts": {}}',
            "measured no placement: its experts were not divided over several nodes",
        ),
        ("[]", "measured no placement"),
    ],
)
def test_a_folder_without_a_placement_is_refused(
    found: str | None, says: str, tmp_path: Path
) -> None:
    if found is not None:
        (tmp_path / "metrics.json").write_text(found)
    with pytest.raises(ConfigError, match=says):
        train_settings.mixture_of(parsed("--experts", "2", "--expert-placement", str(tmp_path)))


def disagreement(world: Any, of_rank: Any) -> str:
    """Return what a rank says that has such words; "" if the ranks have the same run."""
    words = ["--context", "16", "--out", f"run-{world.rank}", *of_rank(world.rank)]
    settings = train_settings.check(parsed(*words), begins=False)
    try:
        settings.require_alike(world)
    except ConfigError as error:
        return str(error)
    return ""


TEXTS = [letters * 300 for letters in ("abcd", "dcba")]  # as many symbols, and the same ones


@pytest.mark.parametrize(
    ("of_rank", "words"),
    [
        (
            lambda rank: ["--data", f"{rank // 2}.txt"],
            "rank 2: the text is '1,200 symbols with digest ",
        ),
        (
            lambda rank: ["--data", "0.txt", "--batch", str(8 + (rank == 1))],
            "rank 1: --batch is 9, rank 0 has 8; give ",
        ),
        (
            lambda rank: ["--data", "0.txt", "--seed", str(int(rank == 0))],
            "rank 0: --seed is 1, rank 1 has 0; give every",
        ),
        (
            lambda rank: ["--data", "0.txt", *["--verify"] * (rank == 1)],
            "rank 1: --verify is True, rank 0 has False; ",
        ),
    ],
)
def test_a_rank_with_another_run_is_named(
    of_rank: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every rank, in one line; such ranks trained without a word."""
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    found = md.run(disagreement, of_rank, size=3)
    assert len({*found}) == 1 and "\n" not in found[0]
    assert found[0].startswith(f"the ranks disagree (MismatchError): {words}")


def test_a_rank_has_paths_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts may keep the same text at different places."""
    monkeypatch.chdir(tmp_path)
    for rank in range(2):
        (tmp_path / f"{rank}.txt").write_text(TEXTS[0])

    def words(rank: int) -> list[str]:
        return ["--data", f"{rank}.txt", "--threads", str(1 + rank), "--json", f"{rank}.json"]

    assert md.run(disagreement, words, size=2) == ["", ""]


RANK = """
import os, sys
from minidist.cli import main
sys.exit(main(["train", "--data", os.environ["RANK"] + ".txt", "--steps", "2", "--context", "16", "--width", "16",
               "--layers", "1", "--out", "run"]))
"""


def test_one_line_and_status_2_for_another_text(tmp_path: Path) -> None:
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-m", "minidist", "launch", "-n", "2", sys.executable, "rank.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2
    assert done.stderr.count("the ranks disagree (MismatchError): rank 1: the text is ") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "metrics.json").exists()
