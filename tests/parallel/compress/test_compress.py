"""Names and options of schemes; the plain version; what a plan refuses, sends and trains."""

import re
from typing import Any

import numpy as np
import pytest
from plans import sent_by_axis
from training import global_batch, tiny, train

import minidist as md
from minidist.cli.train import metrics
from minidist.errors import ConfigError, PlanError
from minidist.nn import GPT
from minidist.optim import SGD
from minidist.parallel.compress.compress import SCHEMES, plain_compressed_ddp, scheme_of
from minidist.parallel.data.ddp import DDP, plain_ddp
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.replicas import weights_digest

MISTAKES = [
    ("zip", "compress 'zip': there is no scheme 'zip'; choose one of none, fp16"),
    (
        "8bit:blok=3",
        "'blok=3' is not option=value; 8bit takes block, book, rounding, feedback, seed",
    ),
    ("8bit:block", "'block' is not option=value"),
    ("8bit:block=some", "compress '8bit:block=some': block='some'; write it like 128"),
    ("8bit:block=3", "block=3; a block has an even number of elements, from 2"),
    ("8bit:rounding=up", "compress 8bit: rounding='up'; choose one of nearest, stochastic"),
    ("fp16:feedback=maybe", "feedback='maybe'; write it yes or no"),
    ("8bit:", "'' is not option=value"),
    ("8bit:block=8,", "'' is not option=value"),
    ("8bit:block=8,block=16", "option block stands there twice"),
    ("none:block=3", "compress 'none:block=3': none takes no options"),
]


@pytest.mark.parametrize(("text", "says"), MISTAKES)
def test_a_mistake_is_told_in_one_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scheme_of(text)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(PlanError, match=re.escape(says)):
        Plan(dp=2, compress=text)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_name_makes_its_scheme(name: str) -> None:
    assert scheme_of(name).name == name
    if name != "1-bit":
        assert Plan(dp=2, zero=1, compress=name).as_dict()["compress"] == name


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"zero": 3, "dp": 2},
            "zero=3 on dp=2, which sends weights in every pass, and they must not lose digits; "
            "use zer",
        ),
        ({"dp": 1}, "which has no ranks that sum gradients; use dp=2, or compress=none"),
        ({"tp": 2}, "zero=0 on tp=2, which has no ranks that sum gradients"),
        (
            {"dp": 2, "strategy": "parameter-server"},
            "strategy=parameter-server, which sums gradients otherwise",
        ),
        (
            {"replicas": 2, "strategy": "data-parallel"},
            "strategy=data-parallel, which sums gradients otherwise",
        ),
    ],
)
def test_a_plan_refuses(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan(compress="8bit", **options)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_what_makes_buckets_anew_and_what_has_no_numbers_refuse() -> None:
    def job(world: Any) -> None:
        with pytest.raises(ConfigError, match="leave one of the two out"):
            DDP(GPT(tiny()), world, static=True, scheme=scheme_of("8bit"))

    md.run(job, size=1)
    with pytest.raises(PlanError, match="use compress=none, and measure what the scheme gains"):
        md.simulate(Plan(dp=2, compress="8bit"), tiny(), "h100:2", batch=4)


# -------------------------------------------------------------------------------- the plain version


def plain(world: Any, density: float | None) -> dict[str, np.ndarray]:
    """Weights after three steps of the plain version, or of plain DDP."""
    model = GPT(tiny())
    model.initialize(3)
    batches = [global_batch(step, 6, tiny()) for step in range(3)]
    optimizer = SGD(model.parameters(), 0.1)
    if density is None:
        plain_ddp(model, optimizer, world, batches)
    else:
        plain_compressed_ddp(model, optimizer, world, batches, density)
    return model.state_dict()


def test_the_plain_version_that_sends_all_is_ddp() -> None:
    whole, some, ddp = (md.run(plain, density, size=3)[0] for density in (1.0, 0.05, None))
    assert all(np.abs(whole[name] - ddp[name]).max() < 1e-12 for name in ddp)
    assert any(np.abs(some[name] - ddp[name]).max() > 1e-6 for name in ddp)


def test_the_plain_version_leaves_equal_replicas() -> None:
    assert len({weights_digest(weights) for weights in md.run(plain, 0.05, size=3)}) == 1


# ------------------------------------------------------------------------------------- under a plan


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 2, "accumulate": 2}], ids=str)
def test_a_plan_compresses(options: dict[str, Any]) -> None:
    """The loss falls as without, at a part of the bytes; all ranks have the same bits, also in a
    second run."""
    less, again, whole = (
        md.run(lambda world, text=text: train(world, compress=text, steps=6, **options), size=3)
        for text in ("8bit", "8bit", "none")
    )
    assert (
        {rank["digest"] for rank in (*less, *again)} == {less[0]["digest"]} != {whole[0]["digest"]}
    )
    assert abs(less[0]["losses"][-1] - whole[0]["losses"][-1]) < 0.05 * whole[0]["losses"][0]
    sent, plainly = (
        sum(sum(verbs.values()) for rank in ranks for verbs in [rank["sent"]["dp"]])
        for ranks in (less, whole)
    )
    # float64; ZeRO's weights travel as they are
    assert plainly > (6 if not options else 1.4) * sent
    assert less[0]["memory"]["residuals"]["now"] > 0 == whole[0]["memory"]["residuals"]["peak"]


def measured(world: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Ledger and formula of two steps."""
    trainer = Trainer(
        Plan(bucket_bytes=2048, **plan), tiny(layers=3, heads=4), world, lr=1e-2, seed=3
    )
    for step in range(2):
        trainer.step(global_batch(step, 8, trainer.config))
    trainer.check_replicas()  # ZeRO's last weights have arrived
    result = {
        "sent": world.ledger.sent_bytes("step"),
        "formula": metrics.gradient_formula(trainer, global_batch(0, 8, trainer.config)),
    }
    trainer.close()
    return result


@pytest.mark.sampled(every=6)
@pytest.mark.parametrize(
    "plan",
    [
        {"dp": 2, "tp": 2},
        {"dp": 2, "pp": 2, "zero": 2},
        {"dp": 2, "cp": 2, "zero": 1},
        {"dp": 3, "zero": 1},
        {"dp": 4, "zero": 2, "shard": 2},
        {"dp": 6, "zero": 1, "shard": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("text", ["8bit:block=16", "fp16"])
def test_bytes_of_a_plan_are_its_formula(plan: dict[str, Any], text: str) -> None:
    ranks = md.run(measured, {"compress": text, **plan}, size=Plan(**plan).size)
    sent = sent_by_axis(ranks)
    formula = ranks[0]["formula"]
    if "axes" in formula:
        assert sent == formula["axes"]
    else:
        assert sum(sent.values()) == formula["sent_bytes"]
    assert formula["messages"] is None and sum(formula["plain"].values()) > 0
