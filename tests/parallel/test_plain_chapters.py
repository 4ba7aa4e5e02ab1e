"""The plain version that each chapter's module opens with: the same numbers as one process, in
float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from training import global_batch, tiny

import minidist as md
from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, Tensor, tensor
from minidist.nn import GPT, GPTConfig, Linear
from minidist.optim import Adam
from minidist.parallel.context.ring_attention import plain_ring_attention, zigzag
from minidist.parallel.context.sequence_parallel import plain_sequence_mlp
from minidist.parallel.context.ulysses import plain_ulysses
from minidist.parallel.data.accumulation import plain_accumulation
from minidist.parallel.data.data_parallel import plain_data_parallel
from minidist.parallel.data.ddp import plain_ddp
from minidist.parallel.data.parameter_server import plain_server, plain_worker
from minidist.parallel.experts.expert_parallel import plain_experts
from minidist.parallel.hybrid.hybrid_step import plain_hybrid
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.memory.activations import plain_recompute
from minidist.parallel.memory.offload import plain_offload
from minidist.parallel.pipeline.model_parallel import plain_model_parallel
from minidist.parallel.pipeline.pipeline import plain_gpipe
from minidist.parallel.pipeline.stages import Stages
from minidist.parallel.precision.mixed_precision import (
    LossScale,
    MixedPrecision,
    plain_mixed_precision,
)
from minidist.parallel.step.single import Single, plain_single
from minidist.parallel.tensor.tensor_parallel import plain_tensor_mlp
from minidist.parallel.zero.zero1 import plain_zero1
from minidist.parallel.zero.zero2 import plain_zero2
from minidist.parallel.zero.zero3 import plain_zero3

SIZES = (1, 2, 3, 5)
BOUND = 1e-10
CONFIG = tiny()
BATCHES = [global_batch(step, 7, CONFIG) for step in range(2)]


def new_model(config: GPTConfig = CONFIG) -> GPT:
    """The same weights every time."""
    model = GPT(config)
    model.initialize(seed=3)
    return model


def adam(parameters: Any) -> Adam:
    """The rule of all runs that are compared."""
    return Adam(list(parameters), 1e-2)


def weights(model: GPT) -> np.ndarray:
    """All of a model's weights in one vector."""
    return np.concatenate([np.ravel(p.data) for p in model.parameters()])


@pytest.fixture(scope="module")
def serial() -> np.ndarray:
    """The weights after two steps of one process, by the real step."""
    model = new_model()
    single = Single(model)
    optimizer = adam(model.parameters())
    for batch in BATCHES:
        single.step(batch, optimizer)
    return weights(model)


def off(ours: np.ndarray, right: np.ndarray) -> float:
    """The largest difference, relative to the largest number; NaN if anything is NaN, so compare
    with `<`."""
    return float(np.max(np.abs(ours - right)) / np.max(np.abs(right)))


# ----------------------------------------------------------------------- a rank has the whole model


def trained(world: Any, loop: Callable[..., Any], *rest: Any) -> np.ndarray:
    """Weights after `loop` on the batches."""
    model = new_model()
    loop(model, adam(model.parameters()), world, BATCHES, *rest)
    return weights(model)


def test_single(serial: np.ndarray) -> None:
    model = new_model()
    loss = plain_single(model, adam(model.parameters()), BATCHES)
    assert off(weights(model), serial) < BOUND
    assert 1 < loss < 5


@pytest.mark.parametrize("size", SIZES)
def test_ddp(serial: np.ndarray, size: int) -> None:
    assert all(off(rank, serial) < BOUND for rank in md.run(trained, plain_ddp, size=size))


@pytest.mark.parametrize(("size", "passes"), [(1, 3), (2, 1), (3, 2)])
def test_accumulation(serial: np.ndarray, size: int, passes: int) -> None:
    assert all(
        off(rank, serial) < BOUND for rank in md.run(trained, plain_accumulation, passes, size=size)
    )


@pytest.mark.parametrize("replicas", SIZES)
def test_data_parallel(serial: np.ndarray, replicas: int) -> None:
    models = [new_model(), *(GPT(CONFIG) for _ in range(replicas - 1))]
    for model in models[1:]:
        model.initialize(seed=4)
    plain_data_parallel(models, adam(models[0].parameters()), BATCHES)
    assert off(weights(models[0]), serial) < BOUND


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_parameter_server(serial: np.ndarray, workers: int) -> None:
    def job(world: Any) -> np.ndarray:
        model = new_model()
        if world.rank < workers:
            plain_worker(model, world, workers, BATCHES)
        else:
            plain_server(model, adam(model.parameters()), world, workers, len(BATCHES))
        return weights(model)

    assert all(off(rank, serial) < BOUND for rank in md.run(job, size=workers + 1))


@pytest.mark.parametrize(
    "size", [1, 3, *(pytest.param(size, marks=pytest.mark.soak) for size in (2, 5))]
)
def test_zero(serial: np.ndarray, size: int) -> None:
    def job(world: Any) -> list[np.ndarray]:
        models = [new_model() for _ in range(3)]
        plain_zero1(models[0], adam, world, BATCHES)
        plain_zero2(models[1], adam, world, BATCHES)
        units = [module for _, module in models[2].children() if list(module.parameters())]
        plain_zero3(models[2], units, adam, world, BATCHES)
        return [weights(model) for model in models]

    for stages in md.run(job, size=size):
        assert [off(stage, serial) < BOUND for stage in stages] == [True] * 3


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "dtype", "scale"), [("fp16", "float16", 2.0**10), ("bf16", "bfloat16", 1.0)]
)
def test_mixed_precision(name: str, dtype: str, scale: float) -> None:
    """Beside the real one, to the bit: the same numbers are rounded in the same places."""
    plain, real = (GPT(tiny(dtype=dtype)) for _ in range(2))
    for model in (plain, real):
        model.initialize(seed=3)
    loss_scale = LossScale(scale) if name == "fp16" else None
    single = Single(real, precision=MixedPrecision(name, loss_scale=loss_scale))
    drawn = single.state_dict()  # masters begin as the draw before it was rounded
    masters = [Parameter(drawn[p.name].copy(), name=p.name) for p in plain.parameters()]
    batches = [global_batch(step, 4, tiny()) for step in range(3)]
    plain_mixed_precision(plain, masters, adam(masters), batches, scale)
    optimizer = adam(single.parameters)
    for batch in batches:
        single.step(batch, optimizer)
    state = single.state_dict()
    assert all(np.array_equal(master.data, state[master.name]) for master in masters)


def test_mixed_precision_skips_an_overflow() -> None:
    model = GPT(tiny(dtype="float16"))
    model.initialize(seed=3)
    masters = [Parameter(p.data.astype("float32"), name=p.name) for p in model.parameters()]
    before = [master.data.copy() for master in masters]
    with np.errstate(over="ignore", invalid="ignore"):
        plain_mixed_precision(model, masters, adam(masters), [global_batch(0, 4, tiny())], 2.0**30)
    assert all(np.array_equal(a, master.data) for a, master in zip(before, masters, strict=True))


def test_offload(serial: np.ndarray) -> None:
    model = new_model()
    host = [Parameter(p.data.copy(), name=p.name) for p in model.parameters()]
    plain_offload(model, adam(host), BATCHES, host)
    assert off(weights(model), serial) < BOUND


# ------------------------------------------------------------------- a rank has a part of the model


@pytest.mark.sampled
@pytest.mark.parametrize("size", SIZES)
def test_layers_over_ranks(size: int) -> None:
    """Model parallel with the batch whole, GPipe with three microbatches: the gradients of the
    blocks."""
    config = tiny(layers=5)
    (inputs, targets) = BATCHES[0]
    alone = new_model(config)
    alone.loss(inputs, targets, targets.size).backward()
    right = {name: p.grad for name, p in alone.named_parameters() if name.startswith("blocks.")}

    def job(world: Any) -> list[dict[str, np.ndarray]]:
        found = []
        for microbatches in (None, 3):
            layers = [len(part) for part in np.array_split(np.arange(config.layers), size)]
            mine = Stages(GPT(config), layers, [world.rank])
            mine.model.initialize(seed=3)

            def stage(x: Any, targets: Any, divisor: int, mine: Stages = mine) -> Tensor:
                return mine.forward(world.rank, x, targets=targets, divisor=divisor)

            if microbatches is None:
                plain_model_parallel(stage, world, inputs, targets, targets.size)
            else:
                micros = zip(np.array_split(inputs, 3), np.array_split(targets, 3), strict=True)
                plain_gpipe(stage, world, micros, targets.size)
            found.append(
                {name: p.grad for name, p in mine.model.named_parameters() if name in right}
            )
        return found

    for way in zip(*md.run(job, size=size), strict=True):
        together = {name: gradient for rank in way for name, gradient in rank.items()}
        assert together.keys() == right.keys()
        assert all(off(together[name], right[name]) < BOUND for name in right)


def mlp_alone(
    x: np.ndarray, up: np.ndarray, down: np.ndarray, bias: np.ndarray, dy: np.ndarray
) -> list[np.ndarray]:
    """y, dx, dup, ddown, dbias of one process, by the tape."""
    leaves = [tensor(array, requires_grad=True) for array in (x, up, down, bias)]
    y = ops.relu(leaves[0] @ leaves[1]) @ leaves[2] + leaves[3]
    y.backward(dy)
    return [y.data, *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("size", SIZES)
def test_an_mlp_over_ranks(size: int) -> None:
    """Tensor parallel on whole tokens, sequence parallel on two a rank; no size from 2 on divides
    the 11 columns."""
    draw = np.random.default_rng(size)
    x, dy, up, down, bias = (
        draw.normal(size=shape) for shape in ((2 * size, 4), (2 * size, 4), (4, 11), (11, 4), 4)
    )
    y, dx, dup, ddown, dbias = mlp_alone(x, up, down, bias, dy)

    def job(world: Any) -> list[float]:
        own = np.array_split(np.arange(11), size)[world.rank]
        tokens = slice(2 * world.rank, 2 * world.rank + 2)
        whole = plain_tensor_mlp(x, up[:, own], down[own], bias, dy, world)
        cut = plain_sequence_mlp(x[tokens], up[:, own], down[own], bias, dy[tokens], world)
        right = (
            (y, dx, dup[:, own], ddown[own]),
            (y[tokens], dx[tokens], dup[:, own], ddown[own], dbias),
        )
        return [
            off(a, b)
            for found, wanted in zip((whole, cut), right, strict=True)
            for a, b in zip(found, wanted, strict=True)
        ]

    assert all(max(rank) < BOUND for rank in md.run(job, size=size))


@pytest.mark.sampled
@pytest.mark.parametrize("length", [5, 11])
@pytest.mark.parametrize("size", SIZES)
def test_attention_over_ranks(size: int, length: int) -> None:
    """Ring attention of each head by zigzag tokens, Ulysses by consecutive ones, 5 heads."""
    draw = np.random.default_rng(length)
    q, k, v = (draw.normal(size=(length, 5, 3)) for _ in range(3))
    right = (
        ops.causal_attention(*(tensor(x.swapaxes(0, 1)[None]) for x in (q, k, v)))
        .data[0]
        .swapaxes(0, 1)
    )

    def job(world: Any) -> list[float]:
        run = np.array_split(np.arange(length), size)[world.rank]
        gaps = [np.abs(plain_ulysses(q[run], k[run], v[run], world) - right[run]).max(initial=0.0)]
        own = zigzag(length, world.rank, size)
        for head in range(5):
            y = plain_ring_attention(q[own, head], k[own, head], v[own, head], own, world)
            gaps.append(np.abs(y - right[own, head]).max(initial=0.0))
        return gaps

    assert all(max(rank) < BOUND for rank in md.run(job, size=size))


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1), (1, 3, 1), (1, 1, 2), (2, 2, 2)])
def test_hybrid(shape: tuple[int, int, int]) -> None:
    draw = np.random.default_rng(0)
    inputs = draw.normal(size=(7, 4))
    targets = draw.normal(size=(7, 4))
    ups = draw.normal(size=(shape[1], 4, 6))
    downs = draw.normal(size=(shape[1], 6, 4))
    leaves = [
        [tensor(array, requires_grad=True) for array in stage]
        for stage in zip(ups, downs, strict=True)
    ]
    x = tensor(inputs)
    for up, down in leaves:
        x = ops.relu(x @ up) @ down
    x.backward(2 * (x.data - targets) / targets.size)

    def job(world: Any) -> float:
        mesh = Mesh(world, dp=shape[0], pp=shape[1], tp=shape[2])
        stage = mesh["pp"].rank
        own = np.array_split(np.arange(6), shape[2])[mesh["tp"].rank]
        up = ups[stage][:, own].copy()
        down = downs[stage][own].copy()
        plain_hybrid(mesh["dp"], mesh["pp"], mesh["tp"], inputs, targets, up, down, 0.1)
        whole = [leaf.data - 0.1 * leaf.grad for leaf in leaves[stage]]
        return max(off(up, whole[0][:, own]), off(down, whole[1][own]))

    assert max(md.run(job, size=int(np.prod(shape)))) < BOUND


@pytest.mark.parametrize("size", SIZES)
def test_experts(size: int) -> None:
    draw = np.random.default_rng(size)
    x = draw.normal(size=(13, 4))
    weight = draw.random(13)
    chosen = draw.integers(0, size, 13)
    experts = draw.normal(size=(size, 4, 4))
    right = np.einsum("nh,nhk->nk", x, experts[chosen]) * weight[:, None]

    def job(world: Any) -> float:
        mine = np.array_split(np.arange(13), size)[world.rank]
        y = plain_experts(
            x[mine], chosen[mine], weight[mine], lambda rows: rows @ experts[world.rank], world
        )
        return off(y, right[mine])

    assert max(md.run(job, size=size)) < BOUND


def test_recompute() -> None:
    linears = [Linear(4, 4, dtype="float64") for _ in range(3)]
    for seed, linear in enumerate(linears):
        linear.assign_names()
        linear.initialize(seed)
    draw = np.random.default_rng(0)
    x = draw.normal(size=(5, 4))
    dy = draw.normal(size=(5, 4))
    dx = plain_recompute(
        [lambda x, linear=linear: ops.gelu(linear(x)) for linear in linears], tensor(x), dy
    )
    found = [p.grad for linear in linears for p in linear.parameters()]
    leaf = tensor(x, requires_grad=True)
    y = leaf
    for linear in linears:
        linear.zero_grad()
        y = ops.gelu(linear(y))
    y.backward(dy)
    right = [leaf.grad, *(p.grad for linear in linears for p in linear.parameters())]
    assert all(np.array_equal(a, b) for a, b in zip([dx, *found], right, strict=True))
