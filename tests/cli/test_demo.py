"""minidist demo: three jobs, each of which notices when it does not show what it should."""

import subprocess
import sys
from typing import Any

import pytest

from minidist.cli import demo, main


def test_the_tour_ends_well(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo"]) == 0
    printed = capfd.readouterr().out
    assert "720, 720, 720, 720; by the formula 2(P-1)/P x 480: 720" in printed
    assert "PeerLostError: rank 2 (process " in printed and "SIGKILL" in printed
    assert "largest difference of a weight after 30 steps" in printed
    assert printed.rstrip().splitlines()[-1].startswith("minidist doctor")


def test_the_last_message_of_the_ring_holds_all_parts() -> None:
    chunks = [[(rank - 1 - step) % 3 for step in range(4)] for rank in range(3)]
    cells = [list(column.cells) for column in demo.ring_table(chunks).columns]
    assert cells[1] == ["C of 0", "B of 0+2", "A of 0+1+2", "C of 0+1+2"]


@pytest.mark.parametrize("bug", ["wrong bytes", "nobody is lost", "another loss"])
def test_a_part_that_goes_wrong_is_told(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    console = demo.Console(quiet=True)
    if bug == "wrong bytes":
        monkeypatch.setattr(
            demo, "run_ranks", lambda *args, **options: [([1] * 6, [100] * 6, True)] * 4
        )
        assert not demo.show_ring(console)
    elif bug == "nobody is lost":
        monkeypatch.setattr(demo, "run_ranks", lambda *args, **options: None)
        assert not demo.show_lost_rank(console)
    else:
        losses, weights = demo.train_alone()
        wrong: Any = {name: weight + 1e-9 for name, weight in weights.items()}
        monkeypatch.setattr(demo, "run_ranks", lambda *args, **options: [(losses, wrong)])
        assert not demo.show_training(console)


def test_minidist_alone_says_where_to_begin() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minidist"], capture_output=True, text=True, check=True
    )
    assert "where to begin:\n  minidist demo " in done.stdout
