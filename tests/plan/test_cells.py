"""Test what cells of the planner share, held against runs of their own."""

import pytest

from minidist.nn import GPTConfig
from minidist.nn.config import MixtureConfig
from minidist.plan.cells import Cells, Cut
from minidist.simulate.cluster import Cluster
from minidist.simulate.rates import Rates

CONFIG = GPTConfig(
    vocabulary=1024,
    context=2048,
    layers=2,
    width=512,
    heads=8,
    positions="rotary",
    mixture=MixtureConfig(experts=8, top_k=2),
)
CLUSTER = Cluster.parse("h100:2x8")


def cells() -> Cells:
    return Cells(CONFIG, CLUSTER, Rates.of(CLUSTER.device))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "cut", [Cut(1, 1, 2, 0, 1), Cut(2, 1, 2, 1, 1), Cut(2, 2, 2, 0, 1)], ids=str
)
def test_what_a_layer_keeps_to_be_computed_again_is_shared_by_all_expert_axes(cut: Cut) -> None:
    """One run for ep=2 and 8 gives what each gives by itself: the layer's input."""
    shared = cells()
    alone = cells()
    wide = cut._replace(ep=8)
    shared.cell(cut)
    found = shared.cell(wide).layer_kept
    assert found == alone.cell(wide).layer_kept > 0


def test_a_host_updates_a_weight_of_any_model_in_the_same_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a narrow model stands for all of them: the blocks of 46.7 billion weights take minutes to
    run."""
    config = GPTConfig(
        vocabulary=1000, context=64, layers=2, width=768, heads=12, norm="rms", activation="silu"
    )
    narrow = Cells(config, CLUSTER, Rates.of(CLUSTER.device)).update_seconds(offload="optimizer")
    monkeypatch.setattr("minidist.plan.cells.NARROW", config)
    own = Cells(config, CLUSTER, Rates.of(CLUSTER.device)).update_seconds(offload="optimizer")
    assert narrow == pytest.approx(own, rel=1e-3) and narrow != own
