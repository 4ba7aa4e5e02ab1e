"""Module: names, state, modes, weights drawn late and by slice."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidist.autograd.tensor import Parameter, Tensor, tensor
from minidist.device import account
from minidist.device.backend import random_normal
from minidist.errors import ConfigError, DataError, ShapeError
from minidist.nn import GPT, Dropout, GPTConfig, Init, LayerNorm, Linear, Module, Weight


class Pair(Module):
    """A module with every kind of part: a parameter, modules, a list, a dict, and things that are
    neither."""

    def __init__(self) -> None:
        self.scale = Weight((3,), Init("ones"))
        self.layers = [Linear(3, 3), Linear(3, 3, bias=False)]
        self.by_stage = {5: LayerNorm(3), 7: Linear(3, 3)}
        self.sizes = [3, 3]
        self.nothing: Linear | None = None
        self.tail = self.layers[0]  # the same module again

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)) * self.scale


class Tied(Module):
    """Two modules that share one weight."""

    def __init__(self) -> None:
        self.first = Linear(4, 4, bias=False)
        self.second = Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


NAMES = [
    "scale",
    "layers.0.weight",
    "layers.0.bias",
    "layers.1.weight",
    "by_stage.5.weight",
    "by_stage.5.bias",
    "by_stage.7.weight",
    "by_stage.7.bias",
]


def test_names_in_order_of_assignment_each_parameter_once() -> None:
    assert [name for name, _ in Pair().named_parameters()] == NAMES
    assert [name for name, _ in Pair().named_parameters("model")] == [
        f"model.{name}" for name in NAMES
    ]
    assert [path for path, _ in Pair().named_modules()] == [
        "",
        "layers.0",
        "layers.1",
        "by_stage.5",
        "by_stage.7",
    ]
    assert [name for name, _ in Pair().children()] == [
        "layers.0",
        "layers.1",
        "by_stage.5",
        "by_stage.7",
        "tail",
    ]
    tied = Tied()
    assert [name for name, _ in tied.named_parameters()] == ["first.weight"] and len(
        list(tied.parameters())
    ) == 1


def test_tied_weights_have_one_state_and_one_gradient() -> None:
    tied = Tied()
    tied.initialize(0)
    assert list(tied.state_dict()) == ["first.weight"]
    x = np.random.default_rng(0).standard_normal((5, 4)).astype("float32")
    tied(tensor(x)).sum().backward()
    w = tied.first.weight.data
    ones = np.ones((5, 4), "float32")
    gradient = tied.second.weight.grad
    assert gradient is not None
    np.testing.assert_allclose(gradient, x.T @ (ones @ w.T) + (x @ w).T @ ones, rtol=1e-4)
    tied.zero_grad()
    assert tied.first.weight.grad is None


def test_parameters_have_shapes_before_values() -> None:
    with account.use(account.MemoryAccount()) as memory:
        layer = Linear(1000, 1000)
        assert (
            layer.weight.shape == (1000, 1000)
            and layer.weight.size == 10**6
            and layer.weight.dtype == np.float32
        )
        assert memory.now["total"] < 100
        with pytest.raises(
            ConfigError, match=r"shape \(1000, 1000\) has no values yet; call model.initialize"
        ):
            layer(tensor(np.ones((2, 1000), "float32")))
        with pytest.raises(ConfigError, match="no name yet"):
            layer.weight.draw(0)
        layer.initialize(0)
        assert memory.now["parameters"] == 4 * (10**6 + 1000)
    assert [p.name for p in layer.parameters()] == ["weight", "bias"]


def test_initial_values_depend_on_name_and_seed_alone() -> None:
    config = GPTConfig(vocabulary=7, context=5, layers=2, width=8, heads=2, dtype="float64")
    whole = GPT(config)
    again = GPT(config)
    other = GPT(config)
    whole.initialize(3)
    again.initialize(3)
    other.initialize(4)
    for name, array in whole.state_dict().items():
        assert np.array_equal(array, again.state_dict()[name])
        law = dict(whole.named_parameters())[name].init.law  # type: ignore[attr-defined]
        assert np.array_equal(array, other.state_dict()[name]) == (law != "normal")
    block = GPT(config).blocks[1]  # a pipeline's stage draws as within the whole
    block.initialize(3, prefix="blocks.1")
    assert np.array_equal(block.mlp.up.weight.data, whole.blocks[1].mlp.up.weight.data)
    assert block.mlp.up.weight.name == "blocks.1.mlp.up.weight" and block.mlp.path == "blocks.1.mlp"


def test_gpt_begins_as_gpt_2() -> None:
    model = GPT(GPTConfig(vocabulary=50, context=16, layers=8, width=64, heads=4))
    model.initialize(0)
    for name, array in model.state_dict().items():
        if "norm" in name:
            assert np.all(array == (1.0 if name.endswith("weight") else 0.0))
        elif name.endswith("bias"):
            assert not array.any()
        else:
            expected = (
                0.02 / np.sqrt(2 * 8) if name.endswith(("out.weight", "down.weight")) else 0.02
            )
            assert abs(array.mean()) < 4 * expected / np.sqrt(array.size)
            assert array.std() == pytest.approx(expected, rel=4 / np.sqrt(array.size))
    linear = Linear(100, 100)
    linear.initialize(0)
    assert linear.weight.data.std() == pytest.approx(0.1, rel=0.05)


indices = st.one_of(st.slices(6), st.lists(st.integers(0, 5), max_size=4))


@given(
    law=st.sampled_from(["normal", "ones", "zeros"]),
    part=st.lists(indices, max_size=2),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
)
def test_a_slice_draws_what_the_whole_has_there(law: Any, dtype: str, part: list[Any]) -> None:
    weight = Weight((6, 6, 3), Init(law, 0.5), dtype=dtype, name="some.weight")
    whole = weight.draw(9)
    assert whole.shape == (6, 6, 3) and whole.dtype == weight.dtype
    expected = whole
    for dim, index in enumerate(part):
        expected = expected[
            (slice(None),) * dim + (index if isinstance(index, slice) else np.array(index, int),)
        ]
    assert np.array_equal(weight.draw(9, part), expected)


@given(start=st.integers(0, 24), length=st.integers(0, 24))
def test_a_flat_shard_draws_its_slice(start: int, length: int) -> None:
    weight = Weight((4, 6), Init("normal", 0.02), name="w")
    part = range(start, min(start + length, 24))
    assert np.array_equal(weight.draw(1, part), weight.draw(1).reshape(-1)[part.start : part.stop])


def test_the_stream_is_the_backends() -> None:
    weight = Weight((2, 3), Init("normal", 0.5), dtype="float64", name="a.b")
    assert np.array_equal(
        weight.draw(7), 0.5 * random_normal("a.b", 7, range(6), "float64").reshape(2, 3)
    )


@pytest.mark.parametrize(
    "part", [range(20, 25), range(-1, 3), (slice(None), [6]), (slice(None),) * 3]
)
def test_a_part_outside_the_tensor(part: Any) -> None:
    with pytest.raises(ShapeError):
        Weight((4, 6), Init("normal"), name="w").draw(0, part)


# -------------------------------------------------------------------------------------------- state


def test_a_transposed_array_is_loaded_in_order() -> None:
    """Optimizers need contiguous weights, and PyTorch's are loaded as `weight.T`."""
    model = Linear(3, 2, bias=False)
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    model.load_state_dict({"weight": array.T})
    assert model.weight.data.flags.c_contiguous
    assert np.array_equal(model.weight.data, array.T)


def test_state_dict_round_trip() -> None:
    ours = Pair()
    theirs = Pair()
    undrawn = Pair()
    ours.initialize(1)
    theirs.initialize(2)
    saved = ours.state_dict()
    target = theirs.layers[0].weight.data
    theirs.load_state_dict(saved)
    undrawn.load_state_dict(saved)
    assert theirs.layers[0].weight.data is target  # in place: strategies hold views of it
    for model in (theirs, undrawn):
        assert all(np.array_equal(array, saved[name]) for name, array in model.state_dict().items())
    saved["scale"][...] = 9  # copies: neither model sees it
    assert not (ours.scale.data == 9).any() and not (undrawn.scale.data == 9).any()


def test_state_dict_is_checked_before_anything_changes() -> None:
    model = Pair()
    model.initialize(0)
    good = model.state_dict()
    bad = {**good, "scale": good["scale"] + 1, "layers.1.weight": np.zeros((3, 4), "float32")}
    with pytest.raises(
        DataError,
        match=r"saved layers.1.weight is float32 \(3, 4\), the model needs float32 \(3, 3\)",
    ):
        model.load_state_dict(bad)
    with pytest.raises(DataError, match="missing scale, unknown none"):
        model.load_state_dict({name: array for name, array in good.items() if name != "scale"})
    with pytest.raises(DataError, match="missing none, unknown head.weight"):
        model.load_state_dict({**good, "head.weight": np.zeros(3)})
    with pytest.raises(DataError, match="saved scale is float64"):
        model.load_state_dict({**good, "scale": good["scale"].astype("float64")})
    with pytest.raises(DataError, match=r"saved scale is >f4 \(3,\), the model needs float32"):
        model.load_state_dict({**good, "scale": good["scale"].astype(">f4")})
    assert all(np.array_equal(array, good[name]) for name, array in model.state_dict().items())


def test_plain_parameters_keep_their_values() -> None:
    class Plain(Module):
        def __init__(self) -> None:
            self.w = Parameter(np.arange(3.0))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.w

    model = Plain()
    model.initialize(0)
    assert model.w.name == "w" and np.array_equal(model.w.data, np.arange(3.0))


# -------------------------------------------------------------------------------------------- modes


def test_train_and_eval_reach_every_module() -> None:
    model = GPT(GPTConfig(vocabulary=7, context=5, layers=2, width=8, heads=2, dropout=0.5))
    assert all(module.training for module in model.modules())
    assert model.eval() is model and not any(module.training for module in model.modules())
    model.train()
    assert all(module.training for module in model.modules())
    assert sum(isinstance(module, Dropout) for module in model.modules()) == 5
