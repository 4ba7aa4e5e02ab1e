"""Load of the experts: tokens that chose each expert, and tokens that it took."""

from typing import Any

import numpy as np
from rich.table import Table

from minidist.parallel.hybrid.hybrid import Trainer

BARS = "▁▂▃▄▅▆▇█"


def expert_record(trainer: Trainer) -> dict[str, Any]:
    """For metrics.json: by layer, the tokens of the run that chose each expert and those that it took.

    All ranks call it. Empty for a model without experts.
    """
    if trainer.config.mixture is None:
        return {}
    loads = trainer.loads.whole(trainer.mesh["pp"])
    return {"experts": {"chosen": loads[:, 0].tolist(), "taken": loads[:, 1].tolist()}}


def expert_table(metrics: dict[str, Any]) -> Table:
    """A row a layer: fewest and most tokens of an expert beside the even share, and a bar for each expert."""
    chosen, taken = (np.array(metrics["experts"][kind]) for kind in ("chosen", "taken"))
    steps = len(metrics["losses"])
    shown = Table(header_style="bold")
    for column in ("layer", "even share", "fewest", "most", "most / even", "dropped"):
        shown.add_column(column, justify="right")
    shown.add_column("experts, the fullest bar twice the even share")
    for layer, (tokens, kept) in enumerate(zip(chosen / steps, taken / steps, strict=True)):
        even = tokens.mean()
        heights = np.clip(tokens / (2 * even) * len(BARS), 0, len(BARS) - 1).astype(int)
        shown.add_row(str(layer), f"{even:,.1f}", f"{tokens.min():,.1f}", f"{tokens.max():,.1f}",
                      f"{tokens.max() / even:.2f}", f"{1 - kept.sum() / tokens.sum():.1%}",
                      "".join(BARS[height] for height in heights))
    return shown
