"""The numbers of the live figure `zero_memory`, computed another way."""

from live_figures import figure

import minidist as md
from minidist.simulate.models import model
from minidist.site.live.zero_memory import MODELS


def test_the_memory_of_zero_is_what_the_simulator_holds() -> None:
    """Totals by hand, and what a simulated rank holds between steps."""
    live = figure("zero_memory", "en")

    def totals(name: str, power: int) -> list[str]:
        shapes = live.picture(MODELS.index(name), power, 0).shapes
        return [shape[3] for shape in shapes if shape[-1] == "bold"]

    # 70.552 billion parameters: (2 + 14 / 64) and 16 / 64 bytes each
    assert totals("llama3-70b", 6)[2:] == ["156.5 GB ✗", "17.6 GB ✓"]
    plan = md.Plan(dp=8, zero=2, precision="bf16")
    (trace,) = md.simulate(plan, model("llama3-8b"), "h100:1x8", batch=8).traces
    state = sum(trace.now[category] for category in ("parameters", "gradients", "optimizer"))
    assert totals("llama3-8b", 3)[2] == f"{state / 1e9:.1f} GB ✓"
