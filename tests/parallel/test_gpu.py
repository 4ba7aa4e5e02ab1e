"""DDP on a GPU: the same weights as on the CPU, gradients travelling over host transports."""

from typing import Any

import pytest
from training import difference, tiny, train

import minidist as md

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    """These tests need CuPy and a GPU."""
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if not cupy.is_available():
        pytest.skip("needs a GPU")


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("changes", [{}, {"dropout": 0.2, "tied": True}, {"positions": "rotary", "norm": "rms"}],
                         ids=str)
def test_equals_one_process_on_the_cpu(size: int, changes: dict[str, Any]) -> None:
    config = tiny(**changes)
    serial = md.run(lambda world: train(world, config=config), size=1)[0]
    ranks = md.run(lambda world: train(world, config=config, device="cuda"), size=size)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10
    assert len({rank["digest"] for rank in ranks}) == 1


@pytest.mark.parametrize("plan", [{"offload": "optimizer"}, {"offload": "optimizer", "zero": 2},
                                  {"offload": "all", "zero": 3}], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_offloaded_equals_one_process_on_the_cpu(plan: dict[str, Any], size: int) -> None:
    """Through pinned memory, on streams of the copying threads' own."""
    if size > 1 and "zero" not in plan:
        return
    serial = md.run(lambda world: train(world), size=1)[0]
    ranks = md.run(lambda world: train(world, device="cuda", **plan), size=size)
    assert difference(ranks[0]["weights"], serial["weights"]) < 1e-10


def test_float32_stays_close_and_repeats() -> None:
    config = tiny(dtype="float32")
    serial = md.run(lambda world: train(world, config=config), size=1)[0]
    first, second = (md.run(lambda world: train(world, config=config, device="cuda"), size=2)[0] for _ in range(2))
    assert first["digest"] == second["digest"]
    assert difference(first["weights"], serial["weights"]) < 1e-2
    assert first["memory"]["gradients"]["now"] == sum(array.nbytes for array in first["weights"].values())
