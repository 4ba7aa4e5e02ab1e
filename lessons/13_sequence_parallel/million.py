"""Lesson 13, section 4.3: the longest sequence that a limit of memory holds, and a million tokens.

python lessons/13_sequence_parallel/million.py                                    # minutes
python lessons/13_sequence_parallel/million.py --limit 8MiB --million 8192        # seconds
"""

import argparse
import time
from typing import Any

import minidist as md
from minidist.comm.group import Group
from minidist.console import number_of_bytes, size_text
from minidist.errors import MemoryLimitError
from minidist.lessons.lab import hashed_batch
from minidist.lessons.page import Page, verdict
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.zero.memory_formula import SINGLE, state_bytes

RANKS = 4
STRIDE = 128 * RANKS  # a zigzag of whole tiles of 64 tokens
SHORT = (4 * STRIDE, 8 * STRIDE)
TRANSPORT = "shm"
SECONDS = 3600  # most of a run, on a busy machine
LIMIT = 32 << 20
MILLION = 1 << 20
WINDOW = "local:128"
RECOMPUTE = {"cp": RANKS, "checkpoint_blocks": "all"}
OFFLOAD = {**RECOMPUTE, "keep_activations": "offload"}
WAYS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "cp=4": {"cp": RANKS},
    "cp=4, recompute": RECOMPUTE,
    "cp=4, recompute, offload": OFFLOAD,
}


def config_for(tokens: int) -> GPTConfig:
    """Return a small model of eight blocks with this context, in float32."""
    return GPTConfig(
        vocabulary=32,
        context=tokens,
        layers=8,
        width=16,
        heads=2,
        positions="rotary",
        attention_pattern=WINDOW,
    )


def one_step(
    world: Group, tokens: int, options: dict[str, Any], limit: int | None
) -> dict[str, float]:
    """Train for one step on one sequence; return this rank's peaks, the parameters, the loss and
    the seconds."""
    config = config_for(tokens)
    trainer = Trainer(Plan(**options, device_memory=limit), config, world)
    began = time.perf_counter()
    loss = float(trainer.step(hashed_batch("lesson 13, a million", config, 1)))
    found = {
        "peak": trainer.account.peak["total"],
        "host": trainer.store.host.peak["total"],
        "parameters": sum(parameter.size for parameter in trainer.model.parameters()),
        "loss": loss,
        "seconds": time.perf_counter() - began,
    }
    trainer.close()
    return found


def fullest(tokens: int, way: str, limit: int | None = None) -> dict[str, float]:
    """Run one step on processes and return what the rank with the highest peak holds.

    Raises: MemoryLimitError if it passes the limit.
    """
    options = WAYS[way]
    size = options.get("cp", 1)
    ranks = md.run(one_step, tokens, options, limit, size=size, transport=TRANSPORT, limit=SECONDS)
    return max(ranks, key=lambda rank: rank["peak"])


def line(way: str) -> tuple[float, float]:
    """Return (bytes of a rank without tokens, bytes per token of the sequence), from two short
    runs."""
    low, high = (fullest(tokens, way)["peak"] for tokens in SHORT)
    slope = (high - low) / (SHORT[1] - SHORT[0])
    return low - slope * SHORT[0], slope


def longest(page: Page, lines: dict[str, tuple[float, float]], limit: int) -> None:
    """Show the longest sequence of each way, by the line and by a run under the limit."""
    rows = []
    for way, (base, slope) in lines.items():
        tokens = int((limit - base) / slope) // STRIDE * STRIDE
        formula = base + slope * tokens
        peak = fullest(tokens, way, limit)["peak"]
        try:
            fullest(tokens + STRIDE, way, limit)
            more = "off: fits"
        except MemoryLimitError:
            more = "refused"
        rows.append(
            [
                way,
                f"{slope:,.1f}",
                tokens,
                f"{peak:,}",
                f"{formula:,.0f}",
                verdict(peak, formula),
                more,
            ]
        )
    page.table(
        f"The longest sequence under {size_text(limit)} a rank",
        ["", "bytes per token", "tokens", "peak", "formula", "", f"{STRIDE} tokens more"],
        rows,
        note="bytes per token of the sequence, of the fullest rank",
    )


def million(page: Page, lines: dict[str, tuple[float, float]], tokens: int) -> None:
    """Show what `tokens` tokens need by each line, and train on them in the last way."""
    rows = [
        [way, size_text(round(base + slope * tokens)), "", ""]
        for way, (base, slope) in lines.items()
    ]
    last = [*WAYS][-1]
    ran = fullest(tokens, last)
    rows[-1][2:] = [size_text(round(ran["peak"])), size_text(round(ran["host"]))]
    page.table(f"{tokens:,} tokens, bytes of a rank", ["", "formula", "peak", "on the host"], rows)
    state = state_bytes(int(ran["parameters"]), SINGLE)["total"]
    page.say(
        f"    Of these, weights, gradients and the optimizer take {state:,.0f}: 16 × "
        f"{ran['parameters']:,}. Loss {ran['loss']:.4f}, {ran['seconds']:.0f} s."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the tables as JSON")
    parser.add_argument(
        "--limit", metavar="SIZE", type=number_of_bytes, default=LIMIT, help="memory of a rank"
    )
    parser.add_argument(
        "--million", metavar="TOKENS", type=int, default=MILLION, help="of the long run"
    )
    options = parser.parse_args()

    (page,) = md.run(Page, size=1)
    lines = {way: line(way) for way in WAYS}
    longest(page, lines, options.limit)
    million(page, lines, options.million)
    page.save(options.json)


if __name__ == "__main__":
    main()
