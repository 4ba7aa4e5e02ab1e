"""Write CALIBRATION.md: the cost model fitted to three published tables, and its error on three
more.

    python lessons/24_simulate/calibration.py          # predicts with the fitted constants of
                                                       a100.json: some minutes
    python lessons/24_simulate/calibration.py --fit    # fits them again first: some minutes more
    python lessons/24_simulate/calibration.py --collectives    # only the section on NCCL: seconds

The tables are minidist/simulate/published/*.csv, each with its source. The fit never sees the
tables of UNSEEN.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minidist.files import whole
from minidist.simulate.calibrate import PUBLISHED, Predictor, Run, fit, read_runs
from minidist.simulate.measured_calls import MIB, Constants, MeasuredCall, chosen, defaults, errors
from minidist.simulate.measured_calls import fit as fit_calls
from minidist.simulate.measured_calls import tables as call_tables
from minidist.simulate.rates import CostProfile

HERE = Path(__file__).resolve().parent
PROFILE = HERE / "a100.json"

FITTED = {
    "narayanan-2021-table-1": "a100-80g",
    "llm-foundry-a100": "a100-80g",
    "llm-foundry-a100-roce": "a100-40g",
}
UNSEEN = {
    "llm-foundry-h100": "h100",
    "dgxc-nemotron-15b-h100": "h100",
    "narayanan-2021-table-2": "a100-80g",
    "dgxc-llama-3.1-8b-h100": "h100",
}
# devices of a run that is predicted: larger ones take minutes each,
MOST = {"dgxc-llama-3.1-8b-h100": 8}
ELSE = 768  # that table's also with few, as they make 32 passes a step
CONSTANTS = (
    "matmul_share",
    "half",
    "attention_share",
    "memory_share",
    "inside.bandwidth",
    "between.bandwidth",
)

HEAD = """# How far the simulator is from published step times

Made by `python lessons/24_simulate/calibration.py`; do not edit. Each table is a file of `minidist/simulate/published/`
with its source in the first lines. "Default" predicts with the constants that `minidist/simulate/device.py` and
`clusters.toml` have from data sheets and NCCL's sources. "Fitted" predicts with the constants that `minidist calibrate`
found on the first three tables, all on A100s: `a100.json`. The others were never fitted. H100s take the fitted shares
of their own peaks, and their wires keep the defaults. An error is predicted / measured - 1.

<!-- measured by: python lessons/24_simulate/calibration.py -->
"""

NCCL = """## NCCL's all-reduce

Tables of `nccl-tests`, and two of `torch.distributed`, that others published
(`minidist/simulate/published/collectives/`), beside `minidist/simulate/library.py`. An error is predicted / measured -
1; means are of absolute errors. "Left out" has constants of NVLink that were fitted to the other tables only; those of
trees (`TREE_LL128`, `SWITCH_HOP`, `SWITCHES_SHARE`) are the same everywhere. In `nccl-tests-309-b-ring` NCCL was told
to take rings, as ZeRO's gathers do.

No constants are right for all tables: an all-reduce of 16 MiB on 8 A100s takes 213, 273 and 274 µs in three of them.
The times of dkh, dudeperf3ct and Sheffield hold how one process starts the kernels of all GPUs one after the other. The
times of vidur hold the wait for the last process.

<!-- measured by: python lessons/24_simulate/calibration.py --collectives -->
"""
NCCL_END = "<!-- end -->\n\n"

GAPS = """## Known gaps

- **Micro-batches that a paper does not state** are taken as 4 sequences (table 1 of Narayanan et al.), so its error
  holds our guess too.
- **Which tables are fitted was not settled before the first look.** Table 2 of Narayanan et al. was to be fitted; after
  its default errors (-37 % and -61 %) were seen it was moved to those never fitted, and llm-foundry's A100 40 GB took
  its place.
- **ZeRO-3 across many nodes.** Table 2 of Narayanan et al. ran DeepSpeed of 2021: from 384 to 1,536 GPUs its step
  became only 1.2 times as fast, and what held it is not stated. Here all eight network cards of a node are busy, and
  gathers run beside the computation, as `parallel/zero` does.
- **Kernels.** The models here have biases and the same fused kernels everywhere. Megatron in 2021 wrote the attention
  scores to memory; MosaicML and NeMo ran FlashAttention. One constant for attention cannot be right for both.
- **Grouped queries.** Nemotron has 8 heads of keys and values; a file of runs cannot say so yet, and here it has 48.
- **Tensor parallelism that overlaps.** NeMo sends the parts of a product while the next part is computed; here a tensor
  parallel call is waited for.
- **An H100 reaches a smaller share of its peak than an A100**: a 7b step of llm-foundry is 2.3 times as fast on H100s,
  here 2.9 times, because both take the same shares.
- **Tied tables.** A file of runs cannot say that the model's two tables are one; here they are two, which costs memory
  and traffic, and no matrix product.
- **Attention that is not one kernel.** The row on 640 GPUs has heads 160 wide, and the kernels here take 128: its
  attention is priced as single products and passes over the scores, while its authors ran a fused kernel. Fitting makes
  it slower, as such products have a short side and the fitted `half` is 727.
- **Pipelines, and runs on more than 768 devices**, are not on this page: a row takes minutes to predict.
"""


class Row(NamedTuple):
    """A measured step and what the two sets of constants predict."""

    run: Run
    default: float
    fitted: float

    @property
    def errors(self) -> tuple[float, float]:
        """Return the errors of the default constants and of the fitted ones."""
        return self.default / self.run.seconds - 1, self.fitted / self.run.seconds - 1


def table(name: str, cluster: str) -> list[Run]:
    """Return the runs of a table that are predicted."""
    return [
        run
        for run in read_runs(PUBLISHED / f"{name}.csv", cluster)
        if run.cluster.size <= MOST.get(name, ELSE)
    ]


def predict(name: str, cluster: str, profile: CostProfile) -> list[tuple[float, float]]:
    """Return the predicted seconds of each row of a table, by the default constants and by the
    fitted ones."""
    predicted = Predictor()
    found = []
    for run in table(name, cluster):
        found.append((predicted(run, CostProfile(cluster)), predicted(run, profile)))
        print(f"{name}: {run.label} {run.seconds:.4g} {found[-1]}", flush=True)
    return found


def predict_all(profile: CostProfile) -> dict[str, list[Row]]:
    """Return the rows of all tables; each table has its own process, at most two per core at a
    time."""
    names, clusters = zip(*(FITTED | UNSEEN).items(), strict=True)
    with ProcessPoolExecutor(2 * (os.cpu_count() or 1)) as pool:
        found = list(pool.map(predict, names, clusters, [profile] * len(names)))
    return {
        name: [
            Row(run, *seconds) for run, seconds in zip(table(name, cluster), predicted, strict=True)
        ]
        for name, cluster, predicted in zip(names, clusters, found, strict=True)
    }


def section(name: str, rows: list[Row]) -> str:
    """Return the text of one table of the page."""
    comments = (PUBLISHED / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    source = " ".join(line[1:].strip() for line in comments if line.startswith("#"))
    lines = [
        f"### {name}",
        "",
        source,
        "",
        "| model, plan | devices | measured s | default s | error | fitted s | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        before, after = row.errors
        lines.append(
            f"| {row.run.label} | {row.run.cluster.size} | {row.run.seconds:.4g} | "
            f"{row.default:.4g} | {before:+.1%} | {row.fitted:.4g} | {after:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def summary(tables: dict[str, list[Row]]) -> str:
    """Return the mean and worst error of each table, as text."""
    lines = [
        "| table | rows | default: mean | worst | fitted: mean | worst |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, rows in tables.items():
        errors = np.abs([row.errors for row in rows])
        mean = errors.mean(axis=0)
        worst = errors.max(axis=0)
        lines.append(
            f"| {name}{'' if name in FITTED else ' (never fitted)'} | {len(rows)} | "
            f"{mean[0]:.1%} | {worst[0]:.1%} | {mean[1]:.1%} | {worst[1]:.1%} |"
        )
    return "\n".join(lines) + "\n"


def constants(profile: CostProfile) -> str:
    """Return the constants before and after, as text."""
    start = CostProfile("a100-80g").rates
    said = [
        f"`{name}` {getattr(start, name):.3g} → {getattr(profile.rates, name):.3g}"
        for name in CONSTANTS
        if "." not in name
    ]
    said += [
        f"`{wire}` {value / 1e9:.3g} GB/s"
        for wire, numbers in profile.wires.items()
        for value in numbers.values()
    ]
    return (
        f"Fitted on {profile.fit['runs']} runs: {', '.join(said)}. A run left out of the fit is "
        f"{profile.fit['left_out_mean']:.1%} off in the mean.\n"
    )


SHOWN = (1, 2, 4, 8, 16, 32, 64, 256, 1024)  # MiB


def collectives() -> str:
    """Return the section on NCCL: the mean errors of every table, and the errors by size."""
    tables = call_tables()
    means = [
        "| table | rows | 1 to 64 MiB | worst | from 128 MiB | left out: 1 to 64 MiB | worst | "
        "from 128 MiB |",
        "| --- |" + " ---: |" * 7,
    ]
    by_size = [
        "| table, devices | " + " | ".join(f"{size} MiB" for size in SHOWN) + " |",
        "| --- |" + " ---: |" * len(SHOWN),
    ]
    all_means = []
    for table, rows in tables.items():
        others = fit_calls({name: known for name, known in tables.items() if name != table})
        both = np.array([mean_errors(rows, constants) for constants in (defaults(), others)])
        all_means.append(both)
        means.append(f"| {table} | {len(rows)} | {_cells(both)} |")
        for cluster in dict.fromkeys(row.cluster for row in rows):
            of_size = {row.nbytes // MIB: row for row in rows if row.cluster == cluster}
            cells = [error_and_way(of_size[size]) if size in of_size else "–" for size in SHOWN]
            by_size.append(f"| {table}, {cluster.split(':')[1]} | {' | '.join(cells)} |")
    means.append(f"| mean of the tables | | {_cells(np.nanmean(all_means, axis=0))} |")
    told = "The errors by size, and what NCCL is taken to choose:"
    return "\n".join([NCCL, *means, "", told, "", *by_size, "", NCCL_END])


def mean_errors(rows: list[MeasuredCall], constants: Constants) -> list[float]:
    """Return the mean and the worst absolute error from 1 to 64 MiB, and the mean above."""
    short = np.abs(errors([row for row in rows if MIB <= row.nbytes <= 64 * MIB], constants))
    long = np.abs(errors([row for row in rows if row.nbytes > 64 * MIB], constants))
    return [short.mean(), short.max(), long.mean() if long.size else np.nan]


def _cells(numbers: np.ndarray) -> str:
    return " | ".join("–" if np.isnan(number) else f"{number:.1%}" for number in numbers.flat)


def error_and_way(row: MeasuredCall) -> str:
    """Return the error of a row, and the way and protocol that NCCL is taken to choose."""
    taken = chosen(row.cluster, row.nbytes, row.way)
    way = taken.name if "switch" in taken.name else f"{taken.name} {taken.protocol.name}"
    return f"{errors([row])[0]:+.0%}, {way}"


def main() -> None:
    """Fit if asked, predict, write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the constants again, and write a100.json"
    )
    parser.add_argument(
        "--collectives", action="store_true", help="write only the section on NCCL's calls again"
    )
    args = parser.parse_args()
    if args.collectives:
        page = HERE / "CALIBRATION.md"
        before, _, rest = page.read_text(encoding="utf-8").partition(NCCL.splitlines()[0])
        with whole(page) as draft:
            draft.write_text(before + collectives() + rest.partition(NCCL_END)[2], encoding="utf-8")
        return
    if args.fit:
        runs = [run for name, cluster in FITTED.items() for run in table(name, cluster)]
        fit(
            runs, Predictor(), "a100-80g", CONSTANTS, lambda text: print(text, flush=True)
        ).profile.save(PROFILE)
    profile = CostProfile.load(PROFILE)
    write(predict_all(profile), profile)


def write(tables: dict[str, list[Row]], profile: CostProfile) -> None:
    """Write the page."""
    parts = [HEAD, summary(tables), constants(profile), "## The tables\n"]
    parts += [section(name, rows) for name, rows in tables.items()] + ["<!-- end -->\n"]
    parts.append(collectives())
    with whole(HERE / "CALIBRATION.md") as draft:
        draft.write_text("\n".join([*parts, GAPS]), encoding="utf-8")


if __name__ == "__main__":
    main()
