"""DataParallel: equal to one process for any loss and batch, at the cost its docstring states."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import Bug, check_caught
from training import CHOICES, Chooser, difference, global_batch, tiny

from minidist.autograd.tensor import tensor
from minidist.device import account
from minidist.errors import CommError, ConfigError
from minidist.nn import GPT, DropoutKey, Linear, Module
from minidist.observe.timeline import Timeline
from minidist.optim import SGD, Adam, AdamW
from minidist.parallel.data import data_parallel
from minidist.parallel.data.data_parallel import DataParallel
from minidist.parallel.step.single import Single
from minidist.parallel.step.step import Part

BOUND = 1e-10


def train(
    replicas: int,
    *,
    steps: int = 3,
    sequences: int = 5,
    clip: float | None = 0.5,
    rule: Any = AdamW,
    frozen: tuple[str, ...] = (),
    step_options: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[dict[str, np.ndarray], list[float], Any, Any]:
    """Weights, losses, strategy, memory by device after some steps; 0 replicas is one process
    without any of it."""
    config = tiny(**changes)
    seed = 3
    with account.use(account.MemoryAccount()) as memory:
        model = GPT(config)
        model.initialize(seed)
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name not in frozen
        step = 0

        def key(first: int, inputs: np.ndarray) -> DropoutKey:
            return DropoutKey.of_sequences(seed, step, first, *inputs.shape)

        def loss(part: Part, divisor: int) -> Any:
            return model.loss(part.inputs, part.targets, divisor, key=key(part.first, part.inputs))

        def forward(replica: Any, inputs: np.ndarray, first: int) -> Any:
            return replica(inputs, key=key(first, inputs))

        strategy: Any = (
            DataParallel(model, replicas, forward=forward) if replicas else Single(model, loss=loss)
        )
        optimizer = rule([p for p in strategy.parameters if p.requires_grad], 1e-2)
        memory.reset_peak()
        losses = []
        for step in range(steps):
            losses.append(
                strategy.step(
                    global_batch(step, sequences, config),
                    optimizer,
                    clip=clip,
                    **(step_options or {}),
                )
            )
        seen = (
            [device.account.snapshot() for device in strategy.devices]
            if replicas
            else [memory.snapshot()]
        )
        return model.state_dict(), losses, strategy, seen


# --------------------------------------------------------------------------- parallel equals serial


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    "replicas", [1, *(pytest.param(count, marks=pytest.mark.soak) for count in (2, 3, 4)), 5]
)
def test_equals_one_process_after_twenty_steps(replicas: int) -> None:
    serial, losses, *_ = train(0, steps=20)
    weights, ours, *_ = train(replicas, steps=20)
    assert difference(weights, serial) < BOUND
    np.testing.assert_allclose(ours, losses, rtol=1e-12)
    again = train(replicas, steps=20)[0]
    # the same bits on a second run
    assert all(np.array_equal(again[name], weights[name]) for name in weights)


any_job = given(
    replicas=st.integers(1, 6),
    accumulate=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "sequences": st.integers(1, 9),
            "clip": st.sampled_from([None, 0.1]),
            "rule": st.sampled_from([AdamW, SGD]),
            "frozen": st.sampled_from([(), ("tokens.weight", "blocks.0.mlp.up.bias")]),
            "tied": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.2]),
            "layers": st.just(1),
        }
    ),
)


def check_equal(
    replicas: int, *, step_options: dict[str, Any] | None = None, **options: Any
) -> None:
    """Replicas equal one process."""
    serial, losses, *_ = train(0, **options)
    weights, ours, *_ = train(replicas, step_options=step_options, **options)
    assert difference(weights, serial) < BOUND
    np.testing.assert_allclose(ours, losses, rtol=1e-12)


@settings(max_examples=3)
@any_job
def test_any_job(replicas: int, accumulate: int, options: dict[str, Any]) -> None:
    """Uneven parts, devices without a row, accumulation, dropout, tied and frozen weights."""
    check_equal(replicas, steps=2, step_options={"accumulate": accumulate}, **options)


@pytest.mark.soak
@settings(max_examples=300)
@any_job
def test_very_many_jobs(replicas: int, accumulate: int, options: dict[str, Any]) -> None:
    """The same, more often."""
    check_equal(replicas, steps=2, step_options={"accumulate": accumulate}, **options)


def test_float32_stays_close() -> None:
    options: dict[str, Any] = {"rule": SGD, "dtype": "float32"}
    # some hundred roundings of 6e-8
    assert difference(train(3, **options)[0], train(0, **options)[0]) < 1e-5


class Regression(Module):
    """Rows of 3 numbers to 2; its loss is the squared error: neither a GPT nor a cross-entropy."""

    def __init__(self) -> None:
        self.inner = Linear(3, 2, dtype="float64")

    def forward(self, inputs: np.ndarray) -> Any:
        return self.inner(tensor(inputs))


def squares(outputs: Any, targets: np.ndarray, divisor: int) -> Any:
    gap = outputs - targets
    return (gap * gap).sum() * (1.0 / divisor)


@pytest.mark.parametrize("replicas", [2, 5])
def test_any_loss(replicas: int) -> None:
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(4, 3)), rng.normal(size=(4, 2))) for _ in range(5)]
    found = []
    for count in (0, replicas):
        model = Regression()
        model.initialize(1)
        strategy: Any = (
            DataParallel(model, count, loss=squares)
            if count
            else Single(
                model,
                loss=lambda part, divisor, model=model: squares(
                    model(part.inputs), part.targets, divisor
                ),
            )
        )
        optimizer = SGD(strategy.parameters, 0.1, momentum=0.9)
        losses = [strategy.step(batch, optimizer) for batch in batches]
        assert losses[-1] < losses[0]
        found.append((model.state_dict(), losses))
    assert difference(found[1][0], found[0][0]) < BOUND
    np.testing.assert_allclose(found[1][1], found[0][1], rtol=1e-12)


def test_replicas_that_use_different_parameters() -> None:
    """What no replica uses has gradient zero, as on one process."""
    found = []
    for replicas in (0, 3):
        model = Chooser()
        optimizer = AdamW(model.parameters(), 0.1)
        strategy: Any = (
            DataParallel(
                model,
                replicas,
                forward=lambda replica, inputs, first: replica(inputs).reshape(1),
                loss=lambda outputs, targets, divisor: outputs.sum() * (1.0 / divisor),
            )
            if replicas
            else Single(model)
        )
        for batch in CHOICES:
            strategy.step((batch, batch), optimizer)
        found.append([weight.data.copy() for weight in model.weights])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)


def scattered_loss(
    right: Any, self: Any, outputs: Any, targets: Any, divisor: int
) -> tuple[np.ndarray, float]:
    """The loss itself goes back as the gradient of every output."""
    gradients, loss = right(self, outputs, targets, divisor)
    return np.full_like(gradients, loss), loss


def copied_once(right: Any, self: Any, device: Any) -> None:
    """Replicas keep the weights of the first step."""
    copied = vars(self).setdefault("copied", set())
    if device.rank not in copied:
        copied.add(device.rank)
        right(self, device)


BUGS = [
    Bug(
        "averages twice",
        DataParallel,
        "loss_of",
        lambda right, self, outputs, targets, divisor: right(self, outputs, targets, divisor * 3),
    ),
    Bug("scatters the loss", DataParallel, "loss_of", scattered_loss),
    Bug("forgets to copy", DataParallel, "copy_model", copied_once),
    Bug("loses a replica", DataParallel, "sum_gradients", lambda right, self, device: None),
]


@pytest.mark.sampled
@pytest.mark.parametrize("bug", BUGS, ids=str)
def test_planted_bugs_break_parity(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    check_caught(bug, partial(check_equal, 3, rule=SGD, clip=None, sequences=6), monkeypatch)


# ------------------------------------------------------------------------------------ what it costs


@pytest.mark.sampled
@pytest.mark.parametrize(("replicas", "sequences"), [(1, 4), (2, 5), (4, 4), (4, 9), (3, 2)])
def test_bytes_and_messages_are_the_formula(replicas: int, sequences: int) -> None:
    steps = 2
    config = tiny()
    weights, _, strategy, _ = train(replicas, sequences=sequences, steps=steps)
    model = sum(array.nbytes for array in weights.values())
    inputs, _ = global_batch(0, sequences, config)
    rows = [len(part) for part in np.array_split(inputs, replicas)]
    # of inputs, of outputs
    row = inputs.itemsize * config.context, 8 * config.context * config.vocabulary
    for rank, device in enumerate(strategy.devices):
        sent, messages = (
            table().get("dp", {})
            for table in (device.group.ledger.sent_bytes, device.group.ledger.messages)
        )
        others, idle = (
            (sum(rows[1:]), int(sequences < replicas) * (replicas - 1)) if rank == 0 else (0, 0)
        )
        peers = replicas - 1 if rank == 0 else 0
        assert sent == {
            "scatter": steps * others * sum(row),
            "broadcast": steps * peers * model,
            "gather": steps * rows[rank] * row[1] if rank else 0,
            "reduce": steps * model if rank else 0,
        }
        assert messages == {
            "scatter": steps * 2 * peers,
            "broadcast": steps * (peers + idle),
            "gather": steps * bool(rank),
            "reduce": steps * bool(rank),
        }


@pytest.mark.parametrize("replicas", [2, 4])
def test_memory_of_device_0_beside_the_others(replicas: int) -> None:
    config = tiny(dtype="float32", width=32, vocabulary=50)
    weights, _, _, memory = train(
        replicas, sequences=8, rule=Adam, dtype="float32", width=32, vocabulary=50
    )
    model = sum(array.nbytes for array in weights.values())
    outputs = 8 * config.context * config.vocabulary * 4
    for rank, held in enumerate(memory):
        now = [held[category]["now"] for category in ("parameters", "gradients", "optimizer")]
        assert now == [model, model, 0 if rank else 2 * model]
    first, *others = (held["total"]["peak"] for held in memory)
    assert all(first >= other + 2 * model + 2 * outputs - outputs // replicas for other in others)


# -------------------------------------------------------------------------------------------- order


def test_every_device_is_a_thread_of_one_process_and_takes_the_notes_steps_in_order() -> None:
    timelines = [Timeline(rank) for rank in range(3)]
    model = GPT(tiny())
    model.initialize(0)
    strategy = DataParallel(model, 3, recorders=timelines)
    names: list[str] = []
    forward = strategy.forward
    strategy.forward = lambda *args: (
        names.append(data_parallel.threading.current_thread().name),
        forward(*args),
    )[1]
    strategy.step(global_batch(0, 6, tiny()), SGD(strategy.parameters, 0.1))
    assert sorted(names) == sorted(
        [data_parallel.threading.current_thread().name, "replica 1", "replica 2"]
    )
    for timeline in timelines:
        notes = [span.details["notes"] for span in timeline.spans if "notes" in span.details]
        assert notes == [
            "DP 1",
            "DP 2",
            "DP 3",
            "DP 3",
            *["DP 3"] * (timeline.rank == 0),
            "DP 4",
            "DP 5",
        ]
        assert (timeline.spans[-1].name == "optimizer") == (timeline.rank == 0)


def test_replicas_follow_train_and_eval() -> None:
    model = GPT(tiny(dropout=0.5))
    model.initialize(0)
    strategy = DataParallel(model, 2)
    model.eval()
    # else dropout asks for its key
    strategy.step(global_batch(0, 4, tiny()), SGD(strategy.parameters, 0.1))
    model.train()
    with pytest.raises(ConfigError, match="got no key"):
        strategy.step(global_batch(0, 4, tiny()), SGD(strategy.parameters, 0.1))


# ----------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("rank", [0, 2])
def test_a_replica_that_fails_ends_the_step_with_its_own_error(rank: int) -> None:
    model = GPT(tiny())
    model.initialize(0)

    def forward(replica: Any, inputs: Any, first: int) -> Any:
        if first == 2 * rank:
            raise ArithmeticError("on purpose")
        return replica(inputs)

    strategy = DataParallel(model, 4, forward=forward, limit=20.0)
    with pytest.raises(ArithmeticError, match="on purpose") as caught:
        strategy.step(global_batch(0, 8, tiny()), SGD(strategy.parameters, 0.1))
    assert isinstance(caught.value.__cause__, CommError) and f"replica {rank} of 4" in str(
        caught.value.__cause__
    )


def test_mistakes_are_refused() -> None:
    model = GPT(tiny())
    model.initialize(0)
    with pytest.raises(ConfigError, match="at least one replica"):
        DataParallel(model, 0)
    with pytest.raises(ConfigError, match="has no row"):
        DataParallel(model, 2).step(global_batch(0, 0, tiny()), SGD(model.parameters(), 0.1))
    with pytest.raises(ConfigError, match="2 replicas, 1 recorders and 0 GPUs"):
        DataParallel(model, 2, recorders=[Timeline(0)])
    for parameter in model.parameters():
        parameter.requires_grad = False
    with pytest.raises(ConfigError, match="nothing to train"):
        DataParallel(model, 2)
