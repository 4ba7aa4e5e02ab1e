"""Local steps: equal to their published formulas, at the cost that the docstring states, and across
a restart."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_steps import new_model, reference, vector_of
from planted import Bug, check_caught
from training import difference, global_batch, tiny, train, train_tiny

import minidist as md
from minidist.cli.train.seldom_traffic import formula
from minidist.errors import CheckpointError, ConfigError, MismatchError, PlanError
from minidist.optim import AdamW
from minidist.parallel.compress import outer as outer_module
from minidist.parallel.compress.compress import scheme_of
from minidist.parallel.compress.local_steps import LocalSteps, plain_diloco
from minidist.parallel.compress.outer import OUTERS, Outer
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.step.scheme import GradientRun

BOUND = 1e-10
LOCAL_SGD = {"outer": "sgd", "outer_lr": 1.0, "optimizer": "sgd", "clip": None}


def run(size: int, **options: Any) -> list[dict[str, Any]]:
    """`train` on `size` threads."""
    return md.run(lambda world: train(world, **options), size=size)


def flat(weights: dict[str, np.ndarray]) -> np.ndarray:
    """The weights by name as one vector, in the model's order."""
    return np.concatenate([np.ravel(weights[name]) for name, _ in new_model().named_parameters()])


# -------------------------------------------------------------------------------------- the numbers


@pytest.mark.sampled
@pytest.mark.parametrize("size", [3, 1, 2, 5])
def test_a_meeting_after_each_step_is_ddp(size: int) -> None:
    """Outer rate 1, no momentum, SGD inside; also where parts of the batch differ in size."""
    local, ddp = (
        run(size, steps=4, sequences=7, **options)[0]
        for options in ({"local_steps": 1, **LOCAL_SGD}, {"optimizer": "sgd", "clip": None})
    )
    assert difference(local["weights"], ddp["weights"]) < BOUND
    np.testing.assert_allclose(local["losses"], ddp["losses"], rtol=1e-12)


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("size", [3, 1, 2, 5])
def test_diloco_equals_its_formula(size: int) -> None:
    ranks = run(size, steps=6, local_steps=3)
    one = reference(size, steps=6, every=3)
    np.testing.assert_allclose(flat(ranks[0]["weights"]), one["common"], rtol=0, atol=BOUND)
    np.testing.assert_allclose(ranks[0]["losses"], one["losses"], rtol=1e-12)
    assert len({rank["digest"] for rank in ranks}) == 1  # the same bits on all ranks
    assert len({tuple(rank["losses"]) for rank in ranks}) == 1
    # and on a second run
    assert run(size, steps=6, local_steps=3)[0]["digest"] == ranks[0]["digest"]


def test_local_sgd_is_the_mean_of_the_weights() -> None:
    ranks = run(3, steps=4, sequences=6, local_steps=4, **LOCAL_SGD)
    one = reference(3, steps=4, every=5, sequences=6, inner="sgd", clip=None)  # they never meet
    np.testing.assert_allclose(
        flat(ranks[0]["weights"]), np.mean(one["own"], axis=0), rtol=0, atol=1e-13
    )


@pytest.mark.sampled
@pytest.mark.parametrize(
    "options", [{"outer": "sgd", "outer_momentum": 0.8, "outer_lr": 0.5}, {"outer_lr": 0.3}]
)
def test_other_outer_optimizers(options: dict[str, Any]) -> None:
    formula = {
        "lr": options["outer_lr"],
        "momentum": options.get("outer_momentum", 0.9),
        "nesterov": options.get("outer") != "sgd",
    }
    ranks = run(2, steps=6, local_steps=2, **options)
    one = reference(2, steps=6, every=2, **formula)
    np.testing.assert_allclose(flat(ranks[0]["weights"]), one["common"], rtol=0, atol=BOUND)


def unmerged(right: Any, self: Any, fragment: Any, mix: float = 0.0) -> None:
    """The common weights are not updated."""
    before = fragment.data.copy()
    right(self, fragment, mix)
    fragment.data[...] = before


BUGS = [
    Bug(
        "no share",
        LocalSteps,
        "_send",
        lambda right, self, fragment, share: right(self, fragment, 1.0),
    ),
    Bug(
        "the sign",
        LocalSteps,
        "_send",
        lambda right, self, fragment, share: right(self, fragment, -share),
    ),
    Bug("the common weights are not updated", LocalSteps, "_merge", unmerged),
]


def check_formula() -> None:
    """Two ranks that meet every three steps have the weights of the published formula."""
    found = flat(run(2, steps=6, local_steps=3)[0]["weights"])
    one = reference(2, steps=6, every=3)
    np.testing.assert_allclose(found, one["common"], rtol=0, atol=BOUND)


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_are_seen(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, check_formula, monkeypatch)


def test_the_plain_version_has_the_same_numbers() -> None:
    batches = [global_batch(step, 5, tiny()) for step in range(6)]

    def rank(world: Any) -> np.ndarray:
        model = new_model()
        plain_diloco(model, AdamW(model.parameters(), 1e-2), world, batches, 3)
        return vector_of(model)

    found = md.run(rank, size=3)
    np.testing.assert_allclose(
        found[0], reference(3, steps=6, every=3, clip=None)["common"], rtol=0, atol=BOUND
    )
    assert all(np.array_equal(found[0], other) for other in found)


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("transport", ["threads-unbuffered", "tcp", "shm"])
def test_same_bits_on_every_transport(transport: str) -> None:
    options = {"steps": 4, "local_steps": 2, "outer_compress": "bf16"}
    there = md.run(train_tiny, {}, options, size=3, transport=transport)
    assert {rank["digest"] for rank in there} == {run(3, **options)[0]["digest"]}


def test_passes_and_dropout_do_not_see_the_split() -> None:
    """With one rank each row has the same dropout as with three: it is keyed by its number in the
    global batch."""
    config = tiny(dropout=0.3)
    options = {"steps": 2, "local_steps": 1, "config": config, **LOCAL_SGD}
    assert difference(run(3, **options)[0]["weights"], run(1, **options)[0]["weights"]) < BOUND
    assert (
        difference(run(2, accumulate=2, **options)[0]["weights"], run(2, **options)[0]["weights"])
        < BOUND
    )


# ------------------------------------------------------------------------------ messages and memory


@pytest.mark.sampled
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_bytes_are_the_formula(size: int) -> None:
    """Two meetings in seven steps: an all-reduce of all weights each; and each step's losses and
    digests of the batch, under control."""
    ranks = run(size, steps=7, sequences=9, local_steps=3)
    nbytes = 8 * sum(p.size for p in new_model().parameters())
    assert (
        sum(rank["sent"].get("dp", {}).get("all_reduce", 0) for rank in ranks)
        == 2 * 2 * (size - 1) * nbytes
    )
    assert all(rank["sent"].get("dp", {}).keys() <= {"all_reduce"} for rank in ranks)
    assert (
        sum(rank["sent"].get("control", {}).get("all_gather", 0) for rank in ranks)
        == 7 * size * (size - 1) * 3 * 8
    )


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5, 8])
@pytest.mark.parametrize("name", ["fp16", "4bit:block=64"])
def test_bytes_of_compressed_outer_gradients(size: int, name: str) -> None:
    """Two meetings, two phases each; 4bit: half a byte a number, and 4 bytes a block of 64, of each
    rank's chunk."""
    ranks = run(size, steps=5, sequences=8, local_steps=2, outer_compress=name)
    chunks = [len(chunk) for chunk in np.array_split(vector_of(new_model()), size)]
    once = sum(2 * m if name == "fp16" else 4 * -(-m // 64) + -(-m // 2) for m in chunks)
    assert sum(sum(rank["sent"]["dp"].values()) for rank in ranks) == 2 * 2 * (size - 1) * once
    assert {rank["memory"]["communication"]["now"] for rank in ranks} == {0}
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": 2},
        {"local_steps": 2, "outer_compress": "4bit"},
        {"local_steps": 4, "fragments": 2, "delay": 1, "mix": 0.5},
    ],
)
def test_a_meeting_in_stretches(
    size: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stretches have 1,000 bytes instead of 4 MiB: the same sums, except what a code loses; the
    bytes of each stretch's formula."""
    whole = run(size, steps=6, sequences=8, **options)
    monkeypatch.setattr(outer_module, "STRETCH_BYTES", 1000)
    ranks = run(size, steps=6, sequences=8, **options)
    assert len({rank["digest"] for rank in ranks}) == 1
    assert {rank["memory"]["communication"]["now"] for rank in ranks} == {0}
    sent = sum(sum(rank["sent"]["dp"].values()) for rank in ranks)
    if "outer_compress" not in options:
        assert difference(ranks[0]["weights"], whole[0]["weights"]) < BOUND
        assert sent == sum(sum(rank["sent"]["dp"].values()) for rank in whole)
    else:
        vector = vector_of(new_model())
        chunks = [
            len(chunk)
            for stretch in np.array_split(vector, -(-vector.nbytes // 1000))
            for chunk in np.array_split(stretch, size)
        ]
        assert sent == 3 * 2 * (size - 1) * sum(4 * -(-m // 128) + -(-m // 2) for m in chunks)
        exact = run(size, steps=6, sequences=8, local_steps=2)[0]["weights"]
        lost, before = (difference(found[0]["weights"], exact) for found in (ranks, whole))
        assert 0 < lost < 2 * before


def test_messages_of_stretches_are_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer_module, "STRETCH_BYTES", 1000)

    def rank(world: Any) -> tuple[int, int]:
        trainer = Trainer(Plan(dp=3, local_steps=2, outer_compress="4bit"), tiny(), world, seed=3)
        for step in range(4):
            trainer.step(global_batch(step, 3, tiny()))
        expected = formula(trainer)["messages"]
        trainer.close()
        return expected, sum(row["messages"] for row in world.ledger.rows() if row["axis"] == "dp")

    found = md.run(rank, size=3)
    assert sum(sent for _, sent in found) == found[0][0] > 2 * 2 * 3 * 2


def test_stretches_of_one_parameter_draw_other_numbers() -> None:
    def rank(world: Any) -> list[str]:
        parameter = next(iter(new_model().parameters()))
        scheme = scheme_of("4bit:rounding=stochastic")
        scheme.attach(
            [
                GradientRun(((parameter, part),), world, "all_reduce")
                for part in (range(5), range(5, 9))
            ]
        )
        return [scheme.draw("worker", index, 0).stream for index in range(2)]

    first, second = md.run(rank, size=1)[0]
    assert first != second


@pytest.mark.soak
def test_four_bits_of_the_way_are_nearly_the_way() -> None:
    """The outer step is that of the whole outer gradient to a part of its largest entry: 1/14, in
    two phases, times the rate 0.7 × 1.9 of the first step."""
    start = vector_of(new_model())
    exact, coarse = (
        flat(run(3, steps=2, local_steps=2, **options)[0]["weights"]) - start
        for options in ({}, {"outer_compress": "4bit:book=linear,rounding=nearest"})
    )
    assert 0 < np.max(np.abs(coarse - exact)) <= 2.1 / 14 * np.max(np.abs(exact))
    digests = {
        run(3, steps=4, local_steps=2, outer_compress="4bit")[rank]["digest"] for rank in range(3)
    }
    assert len(digests) == 1  # the same random numbers in a second run


def test_no_rank_waits_for_another_between_meetings() -> None:
    """Rank 1 makes its first step when rank 0 has made two."""
    ahead = threading.Event()

    def rank(world: Any) -> list[float]:
        trainer = Trainer(Plan(dp=2, local_steps=3), tiny(), world, seed=3)
        assert world.rank == 0 or ahead.wait(20)
        late = [trainer.start_step(global_batch(step, 4, tiny())) for step in range(2)]
        assert world.rank == 1 or not late[0].done()
        ahead.set()
        late.append(trainer.start_step(global_batch(2, 4, tiny())))
        return [loss.wait() for loss in late]

    first, second = md.run(rank, size=2)
    assert first == second


def test_memory_is_the_formula() -> None:
    """float32, Adam: 8Ψ of parameters, 4Ψ of gradients, 8Ψ + 4Ψ of moments, 4Ψ in flight while the
    ranks meet."""
    memory = run(2, steps=2, local_steps=2, config=tiny(dtype="float32"))[0]["memory"]
    count = sum(p.size for p in new_model().parameters())
    now = {
        name: memory[name]["now"]
        for name in ("parameters", "gradients", "optimizer", "communication")
    }
    assert now == {
        "parameters": 8 * count,
        "gradients": 4 * count,
        "optimizer": 12 * count,
        "communication": 0,
    }
    assert memory["communication"]["peak"] >= 4 * count


# ---------------------------------------------------------------------- which weights are the run's


def test_the_weights_of_a_run_are_the_common_ones() -> None:
    """Between two meetings evaluation, digest and copies are of the last meeting; then a rank goes
    on with its own."""

    def rank(world: Any) -> None:
        trainer = Trainer(Plan(dp=2, local_steps=2), tiny(), world, seed=3, lr=1e-2)
        held_out = [global_batch(77, 4, tiny())]
        losses = []
        digests = []
        for step in range(4):
            trainer.step(global_batch(step, 4, tiny()))
            own = vector_of(trainer.model)
            digests.append(trainer.weights_sha256())
            losses.append(trainer.evaluate(held_out))
            trainer.check_replicas()
            assert np.array_equal(vector_of(trainer.model), own)
            assert np.array_equal(flat(trainer.state_dict()), own) == (step % 2 == 1)
        start = new_model().loss(*held_out[0], divisor=held_out[0][1].size)
        assert digests[1] == digests[2] != digests[3]
        assert losses[0] == pytest.approx(float(start.item()), rel=1e-12)
        assert losses[1] == losses[2] != losses[3]

    md.run(rank, size=2)


def test_common_weights_that_differ_are_seen() -> None:
    def rank(world: Any) -> None:
        strategy = LocalSteps(new_model(), world, every=1)
        strategy.common[3] += world.rank
        strategy.check_replicas(world)

    with pytest.raises(MismatchError, match=r"weights of ranks \[1\] differ from rank 0's"):
        md.run(rank, size=2)


# ---------------------------------------------------------------------------------------- a restart

RESTARTS = [
    {"local_steps": 3},
    {"local_steps": 4, "fragments": 2, "delay": 2, "mix": 0.25},
    {"local_steps": 3, "outer": "sgd"},
    {"local_steps": 2, "outer_compress": "bf16:feedback=yes"},
    {"local_steps": 4, "fragments": 4, "delay": 3, "outer_compress": "4bit:rounding=stochastic"},
    {"local_steps": 2, "outer_compress": "4bit:rounding=nearest,feedback=yes", "stretch": 1000},
    {"local_steps": 2, "outer_compress": "4bit:rounding=stochastic", "stretch": 1000},
]


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize(
    ("options", "asynchronous_save"),
    [
        *((options, number % 2 == 1) for number, options in enumerate(RESTARTS)),
        *(
            pytest.param(options, number % 2 == 0, marks=pytest.mark.soak)
            for number, options in enumerate(RESTARTS)
        ),
    ],
)
def test_goes_on_with_the_same_bits(
    options: dict[str, Any],
    asynchronous_save: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saved between two meetings, with a fragment on its way; stretch: bytes that travel by
    themselves."""
    options = dict(options)
    monkeypatch.setattr(
        outer_module, "STRETCH_BYTES", options.pop("stretch", outer_module.STRETCH_BYTES)
    )

    def rank(
        world: Any, *, until: int, save: int = 0, load: bool = False
    ) -> tuple[list[float], str, str]:
        trainer = Trainer(Plan(dp=3, **options), tiny(), world, seed=3, lr=1e-2)
        if load:
            trainer.load(tmp_path / "saved")
        losses = []
        for step in range(trainer.steps_done, until):
            losses.append(trainer.step(global_batch(step, 5, tiny())))
            if step + 1 == save:
                (trainer.start_save if asynchronous_save else trainer.save)(tmp_path / "saved")
        own = vector_of(trainer.model).tobytes().hex()
        digest = trainer.weights_sha256()
        trainer.close()
        return losses, digest, own

    whole = md.run(lambda world: rank(world, until=9), size=3)
    saved = md.run(lambda world: rank(world, until=9, save=5), size=3)
    again = md.run(lambda world: rank(world, until=9, load=True), size=3)
    assert saved == whole  # to save changes nothing
    for one, other in zip(whole, again, strict=True):
        assert (other[0], *other[1:]) == (one[0][5:], *one[1:])


def test_another_plan_cannot_go_on(tmp_path: Path) -> None:
    def save(world: Any) -> None:
        Trainer(Plan(dp=3, local_steps=2), tiny(), world).save(tmp_path / "saved")

    def load(world: Any) -> None:
        Trainer(Plan(dp=3), tiny(), world).load(tmp_path / "saved")

    md.run(save, size=3)
    with pytest.raises(
        CheckpointError,
        match="was saved with local steps by 3 ranks, each .* continue with local steps$",
    ) as caught:
        md.run(load, size=3)
    assert "\n" not in str(caught.value)


# steps of DDP before the first step alone
SEED = 3
BEFORE = 3


def after_ddp(world: Any, folder: Path, steps: int, inner: str = "adamw", **options: Any) -> Any:
    """A trainer that has gone on from DDP's checkpoint for so many steps."""
    trainer = Trainer(
        Plan(dp=world.size, **options),
        tiny(),
        world,
        seed=SEED,
        lr=1e-2,
        optimizer=inner,
        clip=None,
    )
    trainer.load(folder)
    for step in range(BEFORE, BEFORE + steps):
        trainer.step(global_batch(step, 5, tiny()))
    return trainer


@pytest.fixture(params=["adamw", "sgd"])
def ddp(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """An optimizer, and the checkpoint of two ranks of DDP with ZeRO-2 that it has trained."""

    def rank(world: Any) -> None:
        trainer = Trainer(
            Plan(dp=2, zero=2),
            tiny(),
            world,
            seed=SEED,
            lr=1e-2,
            optimizer=request.param,
            clip=None,
        )
        for step in range(BEFORE):
            trainer.step(global_batch(step, 5, tiny()))
        trainer.save(tmp_path / "saved")

    md.run(rank, size=2)
    return request.param, tmp_path / "saved"


def test_local_steps_begin_with_what_ddp_has(ddp: tuple[str, Path]) -> None:
    """Each of three ranks with the weights and the inner state of all; the outer momentum of a
    trainer is forgotten."""
    inner, folder = ddp

    def rank(world: Any) -> None:
        plain = after_ddp(world, folder, 0, inner)
        trainer = Trainer(
            Plan(dp=3, local_steps=2), tiny(), world, seed=9, lr=1e-2, optimizer=inner, clip=None
        )
        for step in range(2):
            trainer.step(global_batch(step, 5, tiny()))
        momentum = [array for slot in trainer.strategy.outer.slots for array in slot.state.values()]  # type: ignore
        assert len(momentum) == 1 and momentum[0].any()
        trainer.load(folder)
        strategy: Any = trainer.strategy
        assert not momentum[0].any()
        assert np.array_equal(strategy.own, vector_of(plain.model)) and np.array_equal(
            strategy.own, strategy.common
        )
        assert trainer.weights_sha256() == plain.weights_sha256()
        for ours, its in zip(trainer.optimizer.slots, plain.optimizer.slots, strict=True):
            assert ours.steps == its.steps == BEFORE and len(ours.state) == (
                2 if inner == "adamw" else 0
            )
            assert all(
                np.array_equal(ours.state[kind].ravel(), its.state[kind].ravel())
                for kind in its.state
            )
        assert strategy.steps == trainer.steps_done == BEFORE

    md.run(rank, size=3)


def test_a_meeting_after_each_step_goes_on_as_ddp(ddp: tuple[str, Path]) -> None:
    inner, folder = ddp
    if inner == "sgd":  # with a state, the ranks' own differ
        local, plain = (
            md.run(
                lambda world, options=options: flat(
                    after_ddp(world, folder, 3, inner, **options).state_dict()
                ),
                size=3,
            )[0]
            for options in ({"local_steps": 1, "outer": "sgd"}, {})
        )
        np.testing.assert_allclose(local, plain, rtol=0, atol=BOUND)
    else:
        ranks = md.run(
            lambda world: after_ddp(
                world, folder, 5, local_steps=2, fragments=2, delay=1, mix=0.5
            ).weights_sha256(),
            size=3,
        )
        assert len(set(ranks)) == 1


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_another_number_of_ranks_goes_on(size: int, tmp_path: Path) -> None:
    """Rank r with the state of rank r mod 3, between two meetings; and what all have in common."""

    def state(trainer: Any) -> list[Any]:
        strategy = trainer.strategy
        return [
            strategy.own.copy(),
            strategy.common.copy(),
            strategy.steps,
            *(array.copy() for slot in trainer.optimizer.slots for array in slot.state.values()),
            *(array.copy() for slot in strategy.outer.slots for array in slot.state.values()),
        ]

    def rank(world: Any, saves: bool) -> list[Any]:
        trainer = Trainer(Plan(dp=world.size, local_steps=2), tiny(), world, seed=3, lr=1e-2)
        if not saves:
            trainer.load(tmp_path / "saved")
            loaded = state(trainer)
        for step in range(trainer.steps_done, 3 if saves else 6):
            trainer.step(global_batch(step, 5, tiny()))
        trainer.check_replicas()
        if saves:
            trainer.save(tmp_path / "saved")
            loaded = state(trainer)
        trainer.close()
        return loaded

    saved = md.run(rank, True, size=3)
    loaded = md.run(rank, False, size=size)
    for number, found in enumerate(loaded):
        for ours, theirs in zip(found, saved[number % 3], strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_plan_is_not_changed_in_memory() -> None:
    def rank(world: Any) -> None:
        trainer = Trainer(Plan(dp=2, local_steps=2), tiny(), world)
        with pytest.raises(
            PlanError,
            match="change_plan: with local steps each rank has weights and state of its own",
        ):
            trainer.change_plan(Plan(dp=2))
        trainer.step(global_batch(0, 4, tiny()))  # it goes on

    md.run(rank, size=2)


# ----------------------------------------------------------------------------------------- refusals


def test_a_rank_without_a_row() -> None:
    with pytest.raises(ConfigError, match="give every rank at least one"):
        run(3, steps=1, sequences=2, local_steps=2)


def test_replicas_that_do_not_start_equal() -> None:
    def rank(world: Any) -> None:
        model = new_model()
        next(model.parameters()).data[0] += world.rank
        LocalSteps(model, world, every=2)

    with pytest.raises(MismatchError, match="before the first step"):
        md.run(rank, size=2)


def test_outer_optimizers() -> None:
    assert OUTERS["nesterov"] == Outer(0.7, 0.9, nesterov=True)
    assert (
        OUTERS["sgd"].make([type("T", (), {"data": np.zeros(2), "grad": None, "name": "t"})]).lr
        == 1.0
    )
    with pytest.raises(ConfigError, match="choose steps that fragments divides, as 1 × 3"):
        md.run(lambda world: LocalSteps(new_model(), world, every=2, fragments=3), size=1)
