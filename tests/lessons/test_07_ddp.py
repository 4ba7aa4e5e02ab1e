"""Exercise 07: filled rightly it passes, and each wrong filling fails under its name."""

from pathlib import Path

import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons import find

RIGHT = right("07")
WRONG = {
    "divided by local tokens": {1: "part.targets.size"},
    "not divided": {1: "1"},
    "divided by sequences": {1: "len(targets)"},
    "the first parameter is in no bucket": {3: "range(len(sizes) - 1, 0, -1)"},
    "buckets in forward order": {3: "range(len(sizes))"},
    "reduced before the gradient is final": {
        4: "if len(self.pending) == number:\n    self.start(number)"
    },
    "the replicas drifted apart": {2: "pass"},
    "averaged twice: what the loss was divided by": {
        2: "p.grad[...] = group.all_reduce(p.grad) / group.size"
    },
    "the handles are not forgotten": {5: RIGHT[5].replace("self.pending = []", "pass")},
    "started when backward was over": {
        4: "self.missing[number] -= 1",
        5: """
        for number in range(len(self.buckets)):
            self.start(number)
        for handle in self.pending:
            handle.wait()
        self.pending = []
        self.missing = [len(bucket) for bucket in self.buckets]
       """,
    },
    "backward stands still": {4: RIGHT[4] + "\n    self.pending[-1].wait()"},
    "started too late": {
        4: """
        self.missing[number] -= 1
        if not any(self.missing):
            for bucket in range(len(self.buckets)):
                self.start(bucket)
       """
    },
    "a bucket was not started once": {4: "self.missing[number] -= 1"},
    "averaged twice": {5: RIGHT[5] + "\nfor flat in self.flat:\n    flat /= self.group.size"},
    "not waited for": {5: "self.missing = [len(bucket) for bucket in self.buckets]"},
    "not ready for the next backward": {
        5: "for handle in self.pending:\n    handle.wait()\nself.pending = []"
    },
    "old gradients are summed again": {
        6: """
        for batch in batches:
            local_loss(model, batch).backward()
            synchronizer.finish()
            optimizer.step()
       """
    },
    "nothing was learned": {
        6: """
        for batch in batches:
            local_loss(model, batch).backward()
            synchronizer.finish()
            optimizer.zero_grad()
            optimizer.step()
       """
    },
    "synchronised once an epoch": {
        6: """
        for batch in batches:
            local_loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronizer.finish()
       """
    },
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("07", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


@pytest.mark.soak  # other lessons' wrong fillings are graded in the default run
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("07", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("07", {}, tmp_path)
    assert not result.passed
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_07.py line" in result.results[-1].line()
    )


def test_how_nearly_linear_it_is() -> None:
    """N0:430, on chapter 24's clock; the story has these numbers."""
    lab = load_module(find("07").part("experiments.py"), "07")
    told = find("07").part("README.md").read_text()
    for gpus, batch in ((8, {"batch": 512}), (64, {"batch": 512}), (64, {"each": 8})):
        assert f" {lab.times_of_one_gpu(gpus, batch):.1f} times" in told


def test_one_bucket_is_counted_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    """On a busy machine a clock would say the contrary of the counted bytes."""
    load_module(find("07").part("broken.py"), "07").one_bucket()
    told = capsys.readouterr().out
    assert (
        "one bucket for everything: 100% of" in told
        and "buckets of 512 KiB: 9% of" in told
        and " ms" not in told
    )


@pytest.mark.soak  # tests/parallel/data/test_ddp.py counts the bytes of a parameter
def test_a_rank_of_ddp_holds_the_state_of_one_process() -> None:
    """N1:29 and N1:32, corrected: the story's table is what the account says; ranks without a
    sequence hold it too."""
    lab = load_module(find("07").part("experiments.py"), "07")
    story = find("07").part("README.md").read_text("utf-8")
    alone = lab.peaks(None)
    ranks = md.run(lab.peaks, size=4)
    for name, categories in lab.HELD.items():
        sizes = [
            size_text(sum(held[category] for category in categories)) for held in (alone, ranks[0])
        ]
        assert f"| {name} | {' | '.join(sizes)} |" in story
    few = md.run(lambda group: lab.peaks(group, sequences=2), size=4)
    assert all(
        held[category] == alone[category] for held in (*ranks, *few) for category in lab.STATE
    )
    assert [held["activations"] == 0 for held in few] == [False, False, True, True]
