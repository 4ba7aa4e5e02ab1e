"""Exercise 18: filled rightly it passes, and each wrong filling fails under its name; loads are as
the story tells."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filling import assert_named, graded, right

import minidist as md
from minidist import lessons
from minidist.console import size_text
from minidist.grading import load_module
from minidist.nn import GPT, mixture
from minidist.nn.moe import mixtures
from minidist.parallel.experts.expert_parallel import elements_sent

RIGHT = right("18")
WRONG = {
    "those are the least likely": {1: "np.argsort(chances, axis=1)[:, :k]"},
    "the likeliest comes last": {1: "np.argsort(chances, axis=1)[:, -k:]"},
    "not k a token": {1: "np.argmax(chances, axis=1)"},
    "a token counts once, but has k choices": {2: "capacity * tokens / experts"},
    "not capacity times the share": {2: "2 * capacity * k * tokens / experts"},
    "rounded down": {2: "capacity * k * tokens // experts"},
    "the capacity does not count": {2: "k * tokens / experts"},
    "divided by k": {2: "capacity * tokens / (k * experts)"},
    "taken and dropped are exchanged": {3: "taken[expert] >= room"},
    "the places of all experts": {3: "sum(taken) < room"},
    "the numbers of the experts": {4: "np.sort(chosen)"},
    "the new position of each row": {4: "np.argsort(np.argsort(chosen, kind='stable'))"},
    "at their expert's number": {6: "y[chosen] = np.concatenate(back)"},
    "the weights are multiplied twice": {
        6: "y[order] = weight[order, None] * np.concatenate(back)"
    },
    "nothing is put into y": {6: "pass"},
    "the old biases are lost": {8: "rate * np.sign(load.mean() - load) - bias"},
    "not divided by the experts": {2: "capacity * k * tokens"},
    "probabilities": {1: "np.sort(-chances, axis=1)[:, :k]"},
    "the likeliest is not the first": {1: "np.sort(np.argsort(-chances, axis=1)[:, :k], axis=1)"},
    "nothing is taken": {3: "False"},
    "one too few": {3: "taken[expert] < room - 1"},
    "other choices are taken": {3: "taken[choice] < room"},
    "the rows that are sent are not sorted": {5: "np.split(x, ends[:-1])"},
    "sorted from the last expert": {4: "np.argsort(-chosen, kind='stable')"},
    "the results are sorted once more": {6: "y[...] = np.concatenate(back)[order]"},
    "the chances twice": {7: "experts * float((chances.mean(axis=0) ** 2).sum())"},
    "the wrong sign": {7: "-experts * float(f @ chances.mean(axis=0))"},
    "the rate is missing": {8: "np.sign(load.mean() - load)"},
    "an expert with the mean load moves": {8: "rate * np.where(load < load.mean(), 1, -1)"},
    "compared with another number": {8: "rate * np.sign(np.median(load) - load)"},
    "nothing is dropped": {3: "True"},
    "one too many": {3: "taken[expert] <= room"},
    "rows for the wrong ranks": {5: "np.array_split(x[order], group.size)"},
    "the rows are in the order of their tokens": {4: "np.arange(len(chosen))"},
    "the results are in the order of the experts": {6: "y[...] = np.concatenate(back)"},
    "the factor E is missing": {7: "float(f @ chances.mean(axis=0))"},
    "a sum over tokens instead of the mean": {7: "experts * float(f @ chances.sum(axis=0))"},
    "the busy are liked more": {8: "rate * np.sign(load - load.mean())"},
    "moved by the distance": {8: "rate * (load.mean() - load)"},
}


def test_the_right_filling_passes(tmp_path: Path) -> None:
    result = graded("18", RIGHT, tmp_path)
    assert result.passed, result.results[-1].line()


def test_adding_into_y_is_right_too(tmp_path: Path) -> None:
    """Hole 6: y begins as zeros, whatever memory it gets."""
    adding = {**RIGHT, 6: "y[order] += np.concatenate(back)"}
    free = np.full((1024, 64), np.nan)
    del free  # memory that is used again is not zero
    assert graded("18", adding, tmp_path).passed


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_filling_fails_under_its_name(mistake: str, tmp_path: Path) -> None:
    assert_named("18", mistake, WRONG[mistake], tmp_path)


def test_the_unfilled_exercise_names_its_first_hole(tmp_path: Path) -> None:
    result = graded("18", {}, tmp_path)
    assert (
        "fill hole 1" in result.results[-1].line()
        and "exercise_18.py line" in result.results[-1].line()
    )


def test_where_tokens_cost_what_reducing_experts_would() -> None:
    """Section 5: B·T = 4 E h P / k, from both formulas; the experts' numbers are those of the
    model."""
    lab = load_module(lessons.find("18").part("experiments.py"), "18")
    experts = lab.EXPERTS
    h = lab.CONFIG.width
    ranks = 4
    k = lab.moe_config().top_k
    model = mixture(GPT(lab.CONFIG), lab.moe_config())
    numbers = sum(weight.size for layer in mixtures(model) for weight in layer.experts.parameters())
    tokens = 4 * experts * h * ranks // k
    assert tokens == 1024 and numbers == 8 * h * h * experts
    rows = (ranks - 1) * k * tokens // ranks
    assert elements_sent(model, ranks=ranks, rows=rows) - elements_sent(
        model, ranks=ranks, rows=0
    ) == (2 * (ranks - 1) * numbers)
    assert lab.SEQUENCES * lab.CONFIG.context == 128


@pytest.mark.soak
def test_a_balance_loss_undoes_a_lopsided_start() -> None:
    """Section 4 says so: without it two experts keep nearly everything for longer."""
    lab = load_module(lessons.find("18").part("experiments.py"), "18")
    late = {}
    for name in ("none", "loss"):
        run = md.run(
            lambda group, name=name: lab.train(group, lab.moe_config(name), 40, lopsided=True),
            size=1,
        )[0]
        shares = lab.shares(run.loads)
        assert np.sort(shares[0])[-2:].sum() == 1.0
        late[name] = np.sort(shares[-10:].mean(axis=0))
    assert (
        late["none"][-2:].sum() > 1.5 * late["loss"][-2:].sum()
        and late["none"][0] < 0.5 * late["loss"][0]
    )


@pytest.mark.soak  # tests/parallel/experts/test_node_experts.py counts copies that travel
def test_what_leaves_a_node() -> None:
    """The story's table is the lesson's: one run of it here, the others below."""
    check_rows({"a token once a node": {}})


@pytest.mark.soak
def test_what_leaves_a_node_otherwise() -> None:
    """Placed by choices or limited; and a limit alone saves nothing if each row travels for
    itself."""
    once = check_rows(
        {"a token once a node": {}, "and experts of one node only": {"node_limit": 1}}
    )
    check_rows({"and experts placed by its choices": {"placement": once.order}})
    flat = check_rows({"every row for itself": {}}, once_a_node=False)
    limited = check_rows({"": {"node_limit": 1}}, once_a_node=False)
    assert abs(limited.tokens / flat.tokens - 1) < 0.15


def check_rows(rows: dict[str, dict[str, Any]], **options: Any) -> Any:
    """Train as the lesson does and compare with the table; "" is no row of it. Returns the first
    run."""
    lesson = lessons.find("18")
    lab = load_module(lesson.part("experiments.py"), "18")
    text = lesson.part("README.md").read_text(encoding="utf-8")
    steps = load_module(lesson.part("lesson.py"), "18").NODE_STEPS
    runs = []
    for name, changes in rows.items():
        config = lab.moe_config("bias", top_k=4, bias_rate=0.01, **changes)
        run = md.run(
            lambda group, config=config: lab.train_on_nodes(group, config, steps, **options), size=4
        )[0]
        assert run.far == run.formula
        row = (
            f"| {name} | {run.tokens:.2f} | {size_text(round(run.far))} | "
            f"{np.mean(run.losses[-5:]):.4f} |"
        )
        assert not name or row in text, row
        runs.append(run)
    return runs[0]


@pytest.mark.parametrize("ranks", range(2, 10))
def test_each_half_of_the_ranks_holds_the_experts_of_a_token(ranks: int) -> None:
    lab = load_module(lessons.find("18").part("experiments.py"), "18")
    experts = lab.experts_on_nodes(ranks, top_k=4)
    config = lab.moe_config("bias", experts=experts, top_k=4, node_limit=1)
    run = md.run(lambda group: lab.train_on_nodes(group, config, 1), size=ranks)[0]
    assert run.far == run.formula
    assert (experts == lab.EXPERTS) == (ranks in (2, 4, 8))
