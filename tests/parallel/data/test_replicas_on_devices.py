"""DataParallel's replicas on GPUs of their own: a thread touches its GPU alone; the weights are one
process's."""

from typing import Any

import fake_cupy
import fake_gpu
import numpy as np
import pytest
from training import difference, global_batch, tiny, train

import minidist as md
from minidist.device import backend
from minidist.errors import ConfigError, DeviceError, PlanError
from minidist.nn import GPT
from minidist.parallel.data import data_parallel
from minidist.parallel.data.data_parallel import DataParallel
from minidist.parallel.hybrid.hybrid import Plan, Trainer


def of(array: Any) -> int:
    """The number of the GPU where an array was made."""
    return int((array if array.base is None else array.base).device.id)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in has two; an operation on the other one's array is an error here, as it is slow
    or one in CuPy."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(fake_cupy._local, "devices", [0], raising=False)
    plain = fake_gpu.on_host

    def on_host(value: Any, *, index: bool = False) -> Any:
        if isinstance(value, fake_gpu.ndarray) and of(value) != fake_cupy.Device().id:
            raise AssertionError(f"an array of GPU {of(value)} on GPU {fake_cupy.Device().id}")
        return plain(value, index=index)

    monkeypatch.setattr(fake_gpu, "on_host", on_host)


def job(world: Any, devices: str) -> dict[str, Any]:
    """Three steps, an evaluation; on which GPU each replica has its weights and gradients, and the
    optimizer its state."""
    config = tiny(dropout=0.2)
    replicas = len(devices.split(",")) if devices else 3
    trainer = Trainer(
        Plan(strategy="data-parallel", replicas=replicas, devices=devices),
        config,
        world,
        device="cuda",
        lr=1e-2,
        seed=3,
        clip=0.5,
    )
    losses = [trainer.step(global_batch(step, 5, config)) for step in range(3)]
    losses.append(trainer.evaluate([global_batch(7, 3, config)]))
    strategy: Any = trainer.strategy
    places = [
        {*map(of, (*device.weights, *(bucket.data for bucket in device.buckets)))}
        for device in strategy.devices
    ]
    state = {of(array) for slot in trainer.optimizer.slots for array in slot.state.values()}
    weights = trainer.state_dict()
    trainer.close()
    return {"losses": losses, "weights": weights, "places": places, "state": state}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("devices", "places"), [("0,1", [{0}, {1}]), ("1,0,1", [{1}, {0}, {1}]), ("", [{0}] * 3)]
)
def test_each_replica_is_on_its_gpu(devices: str, places: list[set[int]], two_gpus: None) -> None:
    (found,) = md.run(job, devices, size=1)
    assert found["places"] == places and found["state"] == places[0]
    (serial,) = md.run(lambda world: train(world, config=tiny(dropout=0.2), steps=3), size=1)
    assert difference(found["weights"], serial["weights"]) < 1e-10
    assert np.max(np.abs(np.subtract(found["losses"][:3], serial["losses"]))) < 1e-10


def test_planted_bug_a_thread_stays_on_the_first_gpu(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = DataParallel._passes
    monkeypatch.setattr(
        DataParallel, "_passes", lambda self, device, *rest: wandering(passes, self, device, *rest)
    )
    with pytest.raises(AssertionError, match="an array of GPU 1 on GPU 0"):
        md.run(job, "0,1", size=1)


def wandering(passes: Any, strategy: Any, device: Any, *rest: Any) -> Any:
    with backend.on_gpu(0):
        return passes(strategy, device, *rest)


def test_what_cannot_be_is_one_line(two_gpus: None) -> None:
    with pytest.raises(
        DeviceError, match="GPU 2: this machine has 2, numbered from 0; choose another"
    ):
        md.run(job, "0,2", size=1)
    for options, says in (
        ({"devices": "0,1"}, "each rank has one device"),
        (
            {"devices": "0,1", "strategy": "data-parallel", "replicas": 3},
            "a GPU for each, as 0,1,2",
        ),
        ({"devices": "a,b", "strategy": "data-parallel", "replicas": 2}, "as 0,1"),
    ):
        with pytest.raises(PlanError, match=says):
            Plan(**options)
    with pytest.raises(ConfigError, match="2 replicas, 0 recorders and 1 GPUs"):
        data_parallel.DataParallel(GPT(tiny()), 2, gpus=[0])
