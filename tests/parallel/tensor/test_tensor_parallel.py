"""Tensor parallelism: equal to one process, at the cost its docstring states, whatever the
sizes."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from split import (
    BOUND,
    SIZES,
    any_job,
    blocks_again,
    check_equal,
    check_parity,
    run,
    same_bits,
    tensor,
)
from training import difference, global_batch, tiny

import minidist as md
from minidist.autograd import ops
from minidist.autograd.ops import collectives
from minidist.autograd.tensor import tensor as leaf
from minidist.device import account
from minidist.errors import ConfigError, MismatchError, PlanError, ShapeError
from minidist.nn import GPT, GPTConfig
from minidist.nn.shares import even_slices
from minidist.nn.weight_shard import WeightShard, assemble, cut
from minidist.optim import SGD
from minidist.parallel.hybrid import hybrid_step
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import parallelize
from minidist.parallel.hybrid.plan import Plan
from minidist.parallel.tensor import tensor_layers
from minidist.parallel.tensor.tensor_parallel import TensorParallel, elements_sent, tensor_parallel


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    """One process, STEPS steps of three sequences."""
    return run(tensor, 1, {})[0]


# --------------------------------------------------------------------------- parallel equals serial
# tests/parallel/test_parity.py has whole trainings on fixed sizes, over every transport


def test_a_group_of_one_rank(serial: dict[str, Any]) -> None:
    """Nothing to cut, nothing sent, the same weights."""
    alone = run(tensor, 1, {}, axis=TensorParallel)[0]
    assert difference(alone["weights"], serial["weights"]) < BOUND
    assert not any(nbytes for verbs in alone["sent"].values() for nbytes in verbs.values())


@settings(max_examples=3)
@any_job(vocabulary=st.integers(5, 14))
def test_any_job(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    check_job(size, changes, options, steps=2)


@pytest.mark.soak
@settings(max_examples=200)
@any_job(vocabulary=st.integers(5, 14))
def test_very_many_jobs(size: int, changes: dict[str, Any], options: dict[str, Any]) -> None:
    """The same, more often."""
    check_job(size, changes, options, steps=3)


def check_job(size: int, changes: dict[str, Any], options: dict[str, Any], *, steps: int) -> None:
    """Ranks equal one process and each other, and send what the formula says."""
    ranks, alone = (run(tensor, count, changes, steps=steps, **options) for count in (size, 1))
    check_equal(ranks, alone[0])
    check_traffic(
        ranks, steps=steps, sequences=options["sequences"], checkpoint=options["checkpoint"]
    )


def check_traffic(
    ranks: list[dict[str, Any]], *, steps: int, sequences: int = 3, checkpoint: str = "none"
) -> None:
    """To the byte, whatever the number of passes: along the axis, and under control at most the
    clipping norm."""
    config = GPTConfig(**ranks[0]["config"])
    formula = elements_sent(
        config,
        ranks=len(ranks),
        tokens=sequences * config.context,
        recomputed=blocks_again(ranks[0], checkpoint),
    )
    sent = [
        {
            verb: nbytes
            for axis, verbs in rank["sent"].items()
            if axis != "control"
            for verb, nbytes in verbs.items()
        }
        for rank in ranks
    ]
    assert {verb for rank in sent for verb in rank} == {"all_reduce"}
    assert sum(rank["all_reduce"] for rank in sent) == 8 * steps * formula
    assert sum(sum(rank["sent"].get("control", {}).values()) for rank in ranks) in (
        0,
        8 * steps * len(ranks) * (len(ranks) - 1),
    )


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(("size", "checkpoint"), [(2, "none"), (4, "all")])
def test_traffic_is_the_formula(size: int, checkpoint: str) -> None:
    """Written out: 4 all-reduces a block of batch × sequence × width, 2 more where it is computed
    again, and so on."""
    ranks = run(tensor, size, {}, steps=2, checkpoint=checkpoint)
    config = GPTConfig(**ranks[0]["config"])
    tokens = 3 * 6
    each = 4 if checkpoint == "none" else 6
    numbers = tokens * config.width * (each * config.layers + 1 + 1) + 3 * tokens
    axis = "tp"
    assert (
        sum(rank["sent"][axis]["all_reduce"] for rank in ranks) == 8 * 2 * 2 * (size - 1) * numbers
    )
    check_traffic(ranks, steps=2, checkpoint=checkpoint)


@pytest.mark.sampled
@pytest.mark.parametrize("size", [2, 4, 5])
def test_weights_and_optimizer_state_are_divided(size: int) -> None:
    for rank, held in enumerate(run(tensor, size, {}, steps=1)):
        config = GPTConfig(**held["config"])
        h = config.width
        layers = config.layers

        def part(count: int, rank: int = rank) -> int:
            return len(np.array_split(np.arange(count), size)[rank])

        columns = part(config.heads) * config.head_width
        hidden = part(config.hidden)
        block = (h + 1) * 3 * columns + columns * h + h + (h + 1) * hidden + hidden * h + h + 4 * h
        count = layers * block + 2 * part(config.vocabulary) * h + config.context * h + 2 * h
        now = [
            held["memory"][category]["now"] for category in ("parameters", "gradients", "optimizer")
        ]
        assert now[:2] == [8 * count, 8 * count] and now[2] == 2 * 8 * count


def held_by_a_block(size: int, layers: int) -> int:
    """Activation bytes of rank 0 at the end of forward."""
    config = tiny(heads=8, width=32, context=16, layers=layers, vocabulary=16)

    def job(world: Any) -> int:
        with account.use(account.MemoryAccount()) as memory:
            model = GPT(config)
            if size > 1:
                tensor_parallel(model, world)
            model.initialize(0)
            loss = model.loss(*global_batch(0, 2, config))
            assert loss.requires_grad
            return memory.now["activations"]

    return md.run(job, size=size)[0]


def test_activations_inside_the_regions_are_divided() -> None:
    """What a block keeps is a + b/P: a outside (what two norms keep and give, 4 h + 2 a token), b
    inside."""
    each = {size: held_by_a_block(size, 3) - held_by_a_block(size, 2) for size in (1, 2, 4, 8)}
    tokens = 2 * 16
    h = 32
    outside = 8 * tokens * (4 * h + 2)
    inside = each[1] - outside
    assert each == {size: outside + inside // size for size in each}
    scores = 2 * 8 * 16 * 16
    # qkv, attention's result and sums; gelu
    assert inside == 8 * (tokens * (3 * h + h + 8 + 2 * 4 * h) + scores)


# -------------------------------------------------------------------- the parity test sees the bugs


def contiguous_columns(
    right: Any, heads: int, keys: int, width: int, shares: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """qkv cut as one matrix: a rank gets queries of all heads and no values."""
    columns = 3 * heads * width
    return [(np.arange(columns)[part], np.arange(0)) for part in even_slices(columns, len(shares))]


BUGS = [
    # Megatron's f: what enters the regions is all-reduced in backward
    Bug("no f", tensor_layers.TensorRegion, "enter", lambda right, self, x: x),
    # Megatron's g: its backward is the identity, here it is a sum
    Bug(
        "reduces twice",
        tensor_layers.TensorRegion,
        "leave",
        lambda right, self, x: collectives.copy_to(
            collectives.reduce_from(x, group=self.group), group=self.group
        ),
    ),
    Bug(
        "bias before the sum",
        tensor_layers.RowLinear,
        "forward",
        lambda right, self, x: self.region.leave(ops.linear(x, self.weight, self.bias)),
    ),
    Bug(
        "shared heads not added",
        hybrid_step,
        "add_up",
        lambda right, parts: None,
        {"changes": {"kv_heads": 1}},
    ),
    Bug(
        "norm counts twice",
        TensorParallel,
        "counts",
        lambda right, self, parameter: True,
        {"clip": 0.1},
    ),
    Bug("contiguous columns", tensor_layers, "head_columns", contiguous_columns),
    # ids of other ranks' slices wrap round, as negative indices do
    Bug(
        "target counted everywhere",
        tensor_layers.SplitEmbedding,
        "forward",
        lambda right, self, ids: self.region.leave(
            ops.embedding(self.weight, (ids - self.rows.start) % self.weight.shape[0])
        ),
    ),
]


def with_biases(model: GPT) -> None:
    """Biases begin at 1, so that a bias that is added once per rank shows at once."""
    for name, parameter in model.named_parameters():
        if "bias" in name.split("."):
            parameter.init = type(parameter.init)("ones")


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    """With SGD: Adam forgives a wrong scale. Clipped only where clipping is the bug."""
    job: dict[str, Any] = {"changes": {}, "optimizer": SGD, "clip": None, "seed": 4}
    check_caught(bug, partial(check_parity, tensor, 4, spoil=with_biases, **job), monkeypatch)


# -------------------------------------------------------------------------------------------- parts


def test_a_shard_draws_its_part_alone() -> None:
    """And any piece of it, by flat position or index: the bits of the whole."""

    def job(world: Any) -> None:
        whole = GPT(tiny(**SIZES))
        model = tensor_parallel(GPT(tiny(**SIZES)), world)
        whole.initialize(5)
        model.assign_names()
        shard = model.blocks[0].attention.qkv.weight
        assert isinstance(shard, WeightShard)
        own = whole.blocks[0].attention.qkv.weight.data[:, shard.parts[world.rank][1]]
        np.testing.assert_array_equal(shard.draw(5), own)
        np.testing.assert_array_equal(shard.draw(5, range(3, 20)), own.reshape(-1)[3:20])
        np.testing.assert_array_equal(shard.draw(5, (slice(2, 4), [0, 5])), own[2:4, [0, 5]])

    md.run(job, size=3)


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1, "tied": True}], ids=str)
def test_weights_in_the_serial_layout_are_cut_again(changes: dict[str, Any]) -> None:
    """What one process saved, loaded by three ranks, comes out again; a part is refused."""
    whole = GPT(tiny(**{**SIZES, **changes}))
    whole.initialize(9)

    def job(world: Any) -> None:
        model = tensor_parallel(GPT(whole.config), world)
        model.initialize(0)
        model.load_state_dict(cut(model, whole.state_dict()))
        for name, array in assemble(model, model.state_dict(), world).items():
            np.testing.assert_array_equal(array, whole.state_dict()[name], err_msg=name)
        with pytest.raises(
            ShapeError, match=r"tokens.weight is \(\d, 16\), the whole weight \(13, 16\); load what"
        ):
            cut(model, model.state_dict())

    md.run(job, size=3)


def test_generating_text() -> None:
    """Every rank draws the text that one process draws."""

    def job(world: Any) -> list[int]:
        model = GPT(tiny(**SIZES))
        if world.size > 1:
            tensor_parallel(model, world)
        model.initialize(5)
        return model.generate([1, 2], 9, temperature=0.9).tolist()

    expected = md.run(job, size=1)[0]
    assert md.run(job, size=3) == [expected] * 3


@pytest.mark.sampled
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision(precision: str) -> None:
    """Replicas stay equal, and near one process: sums are rounded where they are cut."""
    changes = {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[precision]}
    alone, ranks = (run(tensor, count, changes, precision=precision) for count in (1, 3))
    assert all(same_bits(rank, ranks[0]) for rank in ranks)
    np.testing.assert_allclose(ranks[0]["losses"], alone[0]["losses"], rtol=2e-2)


# ------------------------------------------------------------------------------- the loss of slices


@pytest.mark.parametrize("size", [1, 3, 4])
def test_cross_entropy_of_slices(size: int) -> None:
    """Value and gradient beside the whole's, with logits so far apart that exp overflows."""
    logits = np.random.default_rng(0).normal(size=(2, 5, 11)) * 400.0
    targets = np.random.default_rng(1).integers(0, 11, (2, 5))
    whole = leaf(logits, requires_grad=True)
    expected = ops.cross_entropy(whole, targets, divisor=7)
    expected.backward()

    def job(world: Any) -> None:
        own = even_slices(11, size)[world.rank]
        x = leaf(logits[..., own].copy(), requires_grad=True)
        loss = collectives.split_cross_entropy(
            x, targets, first=own.start, vocabulary=11, group=world, divisor=7
        )
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        loss.backward()
        np.testing.assert_allclose(x.grad, whole.grad[..., own], atol=1e-15)
        with pytest.raises(
            ShapeError, match=r"targets 0\.\.11 are outside the vocabulary, which has 0\.\.10"
        ):
            collectives.split_cross_entropy(
                x, targets % 2 * 11, first=own.start, vocabulary=11, group=world
            )
        huge = leaf(np.full((1, 1, own.stop - own.start), 1e9, np.float32))
        alike = collectives.split_cross_entropy(
            huge, targets[:1, :1], first=own.start, vocabulary=11, group=world
        )
        assert alike.item() == pytest.approx(np.log(11), rel=1e-6)

    md.run(job, size=size)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"heads": 2},
            "tp=3 ranks: 2 heads leave a rank without any; choose tp from 1 to 2, or at least 3 "
            "heads",
        ),
        (
            {"vocabulary": 2},
            "2 token ids leave a rank without any; choose tp from 1 to 2, or at least 3 token ids",
        ),
    ],
)
def test_what_cannot_be_cut_says_what_would_fit(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        run(tensor, 3, changes)


def test_a_model_is_cut_before_it_is_drawn() -> None:
    model = GPT(tiny())
    model.initialize(0)
    with pytest.raises(ConfigError, match="drawn already; cut it first"):
        md.run(lambda world: tensor_parallel(model, world), size=1)


def test_replicas_must_start_equal() -> None:
    def job(world: Any) -> None:
        plan = Plan(tp=world.size)
        parallelize(GPT(tiny(**SIZES)), Mesh(world, **plan.axes), plan, seed=world.rank)

    with pytest.raises(MismatchError, match=r"weights of ranks \[1\] differ"):
        md.run(job, size=2)
