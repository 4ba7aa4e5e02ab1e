"""Lesson 09, section 5.1: what fp8 costs in time, and what products of bytes would give.

python lessons/09_mixed_precision/fp8.py
"""

import argparse
from typing import Any

import minidist as md
from minidist.console import size_text
from minidist.lessons.page import Page
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.byte_products import multiplying_bytes
from minidist.simulate.models import model
from minidist.simulate.results import Simulation

CLUSTER = "h100:1x8"
MODELS = (
    ("GPT-2", model("gpt2"), 64),
    ("4 blocks of Llama 3", model("llama3-8b", layers=4), 16),
)
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bf16", "bf16", {}),
    ("fp8, widened: training here", "fp8", {}),
    ("fp8, if products multiplied bytes", "fp8", {"traces": multiplying_bytes}),
)


def step_of(config: GPTConfig, batch: int, precision: str, options: dict[str, Any]) -> Simulation:
    """Return a simulated step on eight H100."""
    return md.simulate(Plan(dp=8, precision=precision), config, CLUSTER, batch=batch, **options)


def table(page: Page) -> None:
    """Show the step of each model in each way."""
    rows = []
    for name, config, batch in MODELS:
        for way, precision, options in WAYS:
            found = step_of(config, batch, precision, options)
            activations = found.peak(found.fullest)["activations"]
            rows.append([name, way, f"{found.step_seconds:.4f} s", size_text(activations)])
    page.table(
        f"A step on {CLUSTER}, dp=8, simulated",
        ["model", "products", "a step", "activations"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the table as JSON")
    options = parser.parse_args()
    (page,) = md.run(Page, size=1)
    table(page)
    page.save(options.json)


if __name__ == "__main__":
    main()
