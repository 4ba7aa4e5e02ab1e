"""A run folder and a checkpoint that commit 92c92ffc wrote: what is written today can be read
tomorrow.

Made there by `minidist train -n 4 --plan dp=2,tp=2 --zero 1 --steps 6 --layers 1 --width 8 --heads 2
--context 16 --batch 4 --data text.txt --out run --save-every 3 --dtype float64`; continued.json has
the losses of `minidist train --resume run --steps 12` at that commit.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minidist.cli import main
from minidist.parallel.hybrid.plan import Plan

OLD = Path(__file__).parents[2] / "support" / "run_of_92c92ffc"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the old run."""
    return Path(shutil.copytree(OLD / "run", tmp_path / "run"))


def continued() -> dict[str, Any]:
    return dict(json.loads((OLD / "continued.json").read_text()))


@pytest.mark.parametrize(
    "plan", [[], ["--ranks=3", "--plan=dp=3", "--zero=3"], ["--ranks=2", "--plan=pp=2"]], ids=str
)
def test_it_is_continued_as_there(run: Path, plan: list[str]) -> None:
    words = ["train", "--quiet", f"--resume={run}", "--steps=12", "--transport=threads"]
    assert main([*words, f"--data={OLD / 'text.txt'}", *plan]) == 0
    losses = json.loads((run / "metrics.json").read_text())["losses"]
    np.testing.assert_allclose(losses, continued()["losses"], rtol=1e-11)


@pytest.mark.parametrize(
    "words",
    [
        ["diagnose"],
        ["report"],
        ["checkpoint"],
        ["watch", "--once"],
        ["sample", "--prompt=the", "--tokens=5"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_reads_it(
    run: Path, words: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    command, *options = words
    status = main([command, str(run), *options])
    out, err = capfd.readouterr()
    assert (status, err) == (0, "") and out


def test_every_option_of_its_plan_is_one_today() -> None:
    recorded = json.loads((OLD / "run" / "metrics.json").read_text())["plan"]
    assert Plan(**recorded).as_dict() == recorded
