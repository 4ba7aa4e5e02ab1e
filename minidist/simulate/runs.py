"""Chapter 24 · Measured steps from a file: what calibrate fits, and what papers and repositories
published.

    runs = read_runs("runs.csv", "a100-80g")
    runs = published("llm-foundry-h100")            # a table of published/, which names its machine

Source: of each published table, its first lines.
"""

import csv
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from minidist.console import meant
from minidist.errors import ConfigError
from minidist.nn import GPTConfig
from minidist.parallel.hybrid.plan import Plan
from minidist.reading import read_text
from minidist.simulate.cluster import Cluster
from minidist.simulate.models import LLAMA, model

MOST_BYTES = 64 << 20  # of a file of runs
MOST_LAYERS = 10_000  # of a run's model

COLUMNS = {
    "seconds": "of a step, measured",
    "cluster": "a name that simulate knows (that of --cluster)",
    "devices": "nodes x devices, such as 8x8; or devices",
    "batch": "sequences of a step of the whole job",
    "model": "a name that simulate knows; or the next five",
    "layers": "blocks",
    "width": "model width",
    "heads": "attention heads",
    "sequence": "tokens of a sequence",
    "vocab": "embedding rows",
    "kv_heads": "heads of keys and values (heads)",
    "mlp_width": "width inside an MLP (4 x width)",
    "family": "gpt; or llama: rotary positions, RMS norms, gated MLPs (gpt)",
    "tied": "yes: one table for both ends of the model (no)",
    "plan": "such as dp=8,tp=8 (dp over all devices)",
    "zero": "0 to 3 (0)",
    "shard": "ranks that divide one copy of the state (all)",
    "schedule": "of a pipeline (1f1b)",
    "stages_per_rank": "of an interleaved pipeline",
    "stage_layers": "layers of each stage, such as 5,6,6,5 (even)",
    "sequence_parallel": "yes: tokens divided outside tp's regions (no)",
    "microbatch": "sequences of one backward pass; instead of the next two",
    "microbatches": "of a pipeline, each data rank",
    "accumulate": "backward passes of a step (1)",
    "precision": "fp32, bf16, fp16, fp8 (bf16)",
    "checkpoint": "what is computed again: none, scores, all, 0,2 (none)",
    "gradients": "float32: kept and sent so, as Megatron's main gradients (as the weights)",
    "scores": "bytes of an attention score that each kernel passes through memory (0: fused)",
    "logits": "the same of a logit and the loss (0)",
    "memory": "GiB of the fullest device, measured",
}
"""The columns of a file of runs. seconds, devices, batch, and a model or its sizes are needed."""
PUBLISHED = Path(__file__).resolve().with_name("published")
"""Step times of papers and repositories as such files; each says its source."""
MACHINES = PUBLISHED / "clusters.toml"
"""Machines of published tables that differ from those of simulate/clusters.toml."""
_NEEDED_SIZES = {
    "layers": "layers",
    "width": "width",
    "heads": "heads",
    "sequence": "context",
    "vocab": "vocabulary",
}
_SIZES = {**_NEEDED_SIZES, "kv_heads": "kv_heads", "mlp_width": "mlp_width"}
_FAMILIES: dict[str, dict[str, Any]] = {"gpt": {}, "llama": LLAMA}
_PLAN_NUMBERS = ("zero", "shard", "stages_per_rank", "microbatches", "accumulate")


class Run(NamedTuple):
    """A step that was measured."""

    label: str
    plan: Plan
    config: GPTConfig
    batch: int
    cluster: Cluster
    seconds: float
    memory_bytes: float | None = None  # of the fullest device
    float32_gradients: bool = False
    scores: float = 0.0  # as Efficiency.scores, beside that of the constants
    logits: float = 0.0  # as Efficiency.logits


def tables() -> list[str]:
    """Return the names of the published tables."""
    return sorted(path.stem for path in PUBLISHED.glob("*.csv"))


def published(name: str) -> list[Run]:
    """Return the runs of a published table."""
    return read_runs(PUBLISHED / f"{name}.csv", file=MACHINES)


def read_runs(
    path: str | Path,
    cluster: str = "",
    model: Callable[[str], GPTConfig] = model,
    file: Path | None = None,
) -> list[Run]:
    """Return the runs of a CSV file with the columns COLUMNS; lines that begin with # are left out.

    Args:    cluster: "h100", or "FILE:NAME", of the runs that name none; each run says how many
             devices. model: gives the config of a name. file: of more clusters.
    Raises:  ConfigError with the line and what is wrong there.
    """
    if re.search(r":\d+(x\d+)*$", cluster):
        raise ConfigError(
            f"cluster {cluster}: each run says how many devices it had; write only the name, "
            f"{cluster.rpartition(':')[0]}"
        )
    try:
        text = read_text(path, most=MOST_BYTES).splitlines()
    except (OSError, ConfigError) as error:
        raise ConfigError(
            f"runs {path}: {error.strerror if isinstance(error, OSError) else error}"
        ) from error
    lines = [
        (number, line)
        for number, line in enumerate(text, 1)
        if line.strip() and line.lstrip()[0] != "#"
    ]
    try:
        table = csv.DictReader(line for _, line in lines)
        rows = list(table)
    except csv.Error as error:
        raise ConfigError(f"runs {path}: {error}") from error
    unknown = [name for name in table.fieldnames or () if name not in COLUMNS]
    if unknown:
        raise ConfigError(
            f"runs {path}: no column {unknown[0]!r:.60}{meant(unknown[0], COLUMNS)}; columns are "
            f"{', '.join(COLUMNS)}"
        )
    machines = cache(partial(Cluster.parse, file=file))
    runs = []
    for (number, _), row in zip(lines[1:], rows, strict=False):
        said = {"cluster": cluster} | {
            name: text.strip()
            for name, text in row.items()
            if name in COLUMNS and text and text.strip()
        }
        try:
            runs.append(_run(said, machines, model))
        except (ConfigError, ValueError) as error:
            raise ConfigError(f"runs {path}, line {number}: {error}") from error
    return runs


def _run(
    row: Mapping[str, str],
    machines: Callable[[str], Cluster],
    model: Callable[[str], GPTConfig],
) -> Run:
    sizes = () if "model" in row else tuple(_NEEDED_SIZES)
    lacking = [name for name in ("seconds", "devices", "batch", *sizes) if name not in row]
    if lacking:
        raise ConfigError(
            f"it lacks {', '.join(lacking)}{'' if 'layers' in row or not sizes else ', or a model'}"
        )
    machine = machines(f"{row['cluster']}:{row['devices']}")
    plan = Plan.parse(row["plan"]) if "plan" in row else Plan(dp=machine.size)
    batch = _whole(row, "batch")
    options: dict[str, Any] = {name: _whole(row, name) for name in _PLAN_NUMBERS if name in row}
    options |= {name: row[name] for name in ("schedule", "stage_layers") if name in row}
    options |= _passes(row, plan, batch) if "microbatch" in row else {}
    plan = replace(
        plan,
        precision=row.get("precision", "bf16"),
        checkpoint_blocks=row.get("checkpoint", "none"),
        sequence_parallel=plan.tp > 1 and _yes(row, "sequence_parallel"),
        **options,
    )
    seconds = float(row["seconds"])
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"seconds={row['seconds']}: choose a number above 0")
    config = _config(row, model)
    title = row.get("model", f"{config.layers} x {config.width}")
    return Run(
        f"{title} {row.get('plan', f'dp={machine.size}')}",
        plan,
        config,
        batch,
        machine,
        seconds,
        float(row["memory"]) * 2**30 if "memory" in row else None,
        _float32_gradients(row),
        *(_whole(row, name) if name in row else 0.0 for name in ("scores", "logits")),
    )


def _float32_gradients(row: Mapping[str, str]) -> bool:
    said = row.get("gradients")
    if said not in (None, "float32"):
        raise ConfigError(f"gradients={said[:40]}: choose float32, or leave it out")
    return said is not None


def _config(row: Mapping[str, str], model: Callable[[str], GPTConfig]) -> GPTConfig:
    """Return the model of a run: a name's, with the sizes that the row gives, or of these sizes."""
    given: dict[str, Any] = {_SIZES[name]: _whole(row, name) for name in _SIZES if name in row}
    if "tied" in row:
        given["tied"] = _yes(row, "tied")
    if "model" in row:
        return replace(model(row["model"]), **given)
    family = row.get("family", "gpt")
    if family not in _FAMILIES:
        raise ConfigError(f"family={family[:40]}: choose {' or '.join(_FAMILIES)}")
    return GPTConfig(**_FAMILIES[family], **given)


def _passes(row: Mapping[str, str], plan: Plan, batch: int) -> dict[str, int]:
    """Return the backward passes of a step as the plan's option, from the size of a microbatch."""
    least = plan.dp * plan.ep * _whole(row, "microbatch")
    if not least or batch % least:
        raise ConfigError(
            f"a batch of {batch} sequences is no multiple of microbatch={row['microbatch']} on "
            f"{plan.dp * plan.ep} data ranks; write accumulate or microbatches instead"
        )
    return {"microbatches" if plan.pp > 1 else "accumulate": batch // least}


def _yes(row: Mapping[str, str], name: str) -> bool:
    """Return whether a run says yes. Raises: ConfigError for a word that is neither yes nor no."""
    said = row.get(name, "no")
    if said not in ("yes", "no"):
        raise ConfigError(f"{name}={said[:40]}: choose yes or no")
    return said == "yes"


def _whole(row: Mapping[str, str], name: str) -> int:
    """Return a whole number of a run. Raises: ConfigError for another text, and for more than is
    simulated."""
    most = MOST_LAYERS if name == "layers" else 2**31
    text = row[name]
    if not re.fullmatch("[0-9]{1,10}", text) or int(text) > most:
        raise ConfigError(f"{name}={text[:40]}: is no whole number from 0 to {most:,}")
    return int(text)
