"""Write CALIBRATION.md and calibration.csv: the cost model judged on published steps that its
constants were not fitted to.

    python lessons/24_simulate/calibration.py                  # every row that can be afforded
    python lessons/24_simulate/calibration.py --rows 12        # of each source and kind of device
    python lessons/24_simulate/calibration.py --defaults       # without fits: a tenth of the time
    python lessons/24_simulate/calibration.py --collectives    # only the section on NCCL: seconds
    python lessons/24_simulate/calibration.py --bytes          # only that on products of one byte

Each row of minidist/simulate/published/*.csv that can be afforded is predicted twice: by the
default constants, and by constants that were fitted to all other sources of the same kind of
device. A source is who measured: rows of one source share machines, software and habits, so a row
left out of a fit is judged too kindly while its neighbours stay.
"""

import argparse
import csv
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import repeat
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from minidist.files import whole
from minidist.simulate.byte_products import multiplying_bytes
from minidist.simulate.calibrate import CONSTANTS, fit
from minidist.simulate.few_passes import FewPasses, fewest
from minidist.simulate.measured_calls import MIB, Constants, MeasuredCall, chosen, defaults
from minidist.simulate.measured_calls import errors as call_errors
from minidist.simulate.measured_calls import fit as fit_calls
from minidist.simulate.measured_calls import tables as call_tables
from minidist.simulate.rates import CostProfile
from minidist.simulate.runs import Run, published, tables

HERE = Path(__file__).resolve().parent
PAGE = HERE / "CALIBRATION.md"
ROWS = HERE / "calibration.csv"

SOURCES: dict[str, tuple[str, ...]] = {
    "MosaicML": ("llm-foundry",),
    "vTrain": ("vtrain",),
    "BigScience": ("bigscience",),
    "Narayanan et al.": ("narayanan",),
    "NVIDIA": ("dgxc", "nemo", "megatron-bridge"),
    "PyTorch": ("torchtitan",),
    "IBM": ("fms-fsdp",),
}
"""Who measured, and how the names of the tables begin."""
DEVICES: dict[str, tuple[str, ...]] = {
    "A100": ("a100",),
    "H100": ("h100",),
    "B200, GB200": ("b200", "gb200"),
}
"""Kinds of devices, and how the names of their clusters begin."""
MOST_DEVICES = 768
MOST_PASSES = 800  # of a block, all ranks that differ together: a row's price
FITTED_ROWS = 6  # of each source and kind of device, evenly spread over its rows
FITTED_DEVICES = 64  # at most, and
FITTED_PASSES = 250  # at most: a fit predicts each of its rows some hundred times
NAMES = tuple(name for name in CONSTANTS if not name.endswith("alpha"))
T = TypeVar("T")


class Judged(NamedTuple):
    """A row, and what was predicted. fitted: by constants of the other sources; None: there are
    none for its kind of device."""

    table: str
    source: str
    device: str
    run: Run
    default: float
    fitted: float | None


class Fit(NamedTuple):
    """Constants fitted without a source."""

    device: str
    source: str
    profile: CostProfile


def source_of(table: str) -> str:
    """Return who measured a table."""
    return next(name for name, begin in SOURCES.items() if table.startswith(begin))


def device_of(run: Run) -> str:
    """Return the kind of a run's devices."""
    return next(name for name, begin in DEVICES.items() if run.cluster.name.startswith(begin))


def affordable(run: Run, devices: int = MOST_DEVICES, passes: int = MOST_PASSES) -> bool:
    """Return whether a run has no more devices, and simulates no more passes of blocks."""
    few, period = fewest(run)
    simulated = min(run.plan.pieces * run.plan.accumulate, 2 * few + period)
    return run.cluster.size <= devices and run.config.layers * simulated <= passes


def _has_attention_kernel(run: Run) -> bool:
    """Return whether there is an attention kernel here for the heads of the measured model."""
    return run.config.width // run.config.heads <= 128


@cache
def rows_of(source: str, device: str, fp8: bool = False) -> list[tuple[str, Run]]:
    """Return the runs of a source on a kind of device that are predicted, with their tables; `fp8`:
    those whose products multiply bytes, or the others."""
    return [
        (table, run)
        for table in tables()
        if source_of(table) == source
        for run in published(table)
        if device_of(run) == device
        and (run.plan.precision == "fp8") == fp8
        and affordable(run)
        and _has_attention_kernel(run)
    ]


def judge_device(device: str, most: int | None, fitting: bool) -> tuple[list[Judged], list[Fit]]:
    """Return the rows of a kind of device, and a fit without each of its sources.

    Args:    most: rows of each source, evenly spread over its tables (None: all). fitting:
             whether to fit.
    """
    measured = [
        (table, source, run)
        for source in SOURCES
        for table, run in evenly(rows_of(source, device), most)
    ]
    predicted = FewPasses()
    defaults = []
    for table, _, run in measured:
        defaults.append(predicted(run, CostProfile(run.cluster.name)))
        print(f"{table}: {run.label} {defaults[-1] / run.seconds - 1:+.1%}", flush=True)
    by_source = {
        source: [run for _, run in rows_of(source, device)]
        for source in SOURCES
        if rows_of(source, device)
    }
    fits = [
        Fit(device, name, fitted_without(name, by_source, predicted))
        for name in by_source
        if fitting and len(by_source) > 1
    ]
    profiles = {each.source: each.profile for each in fits}
    rows = [
        Judged(
            table,
            source,
            device,
            run,
            default,
            predicted(run, profiles[source]) if source in profiles else None,
        )
        for (table, source, run), default in zip(measured, defaults, strict=True)
    ]
    return rows, fits


def fitted_without(
    source: str, by_source: Mapping[str, Sequence[Run]], predicted: FewPasses
) -> CostProfile:
    """Return the constants of all other sources."""
    chosen = [
        run
        for name, runs in by_source.items()
        if name != source
        for run in evenly(
            [run for run in runs if affordable(run, FITTED_DEVICES, FITTED_PASSES)], FITTED_ROWS
        )
    ]
    # a fit moves the wires of its first run
    chosen.sort(key=lambda run: (run.cluster.nodes == 1, run.cluster.name))
    profile = fit(chosen, predicted, chosen[0].cluster.name, NAMES).profile
    print(f"{chosen[0].cluster.name}: fitted to {len(chosen)} rows without {source}", flush=True)
    return profile


def evenly(runs: Sequence[T], count: int | None) -> list[T]:
    """Return `count` of them, evenly spread over all; all where there are fewer, or for None."""
    if count is None or count >= len(runs):
        return list(runs)
    return [runs[place] for place in np.linspace(0, len(runs) - 1, count).round().astype(int)]


def judge(most: int | None, fitting: bool) -> tuple[list[Judged], list[Fit]]:
    """Return all rows and all fits; each kind of device has a process of its own."""
    with ProcessPoolExecutor(min(len(DEVICES), os.cpu_count() or 1)) as pool:
        found = list(pool.map(judge_device, DEVICES, repeat(most), repeat(fitting)))
    rows = [row for of_device, _ in found for row in of_device]
    return rows, [each for _, fits in found for each in fits]


# ---------------------------------------------------------------- the page

HEAD = """# How far the simulator is from published step times

Made by `python lessons/24_simulate/calibration.py{options}`; do not edit. Each table is a file of
`minidist/simulate/published/` with its source, and what was left out of it, in the first lines. "Default" predicts with
the constants of `minidist/simulate/device.py` and `clusters.toml`. They were set by hand with 54 of the tables' rows in
sight: 24 of vTrain, 18 of MosaicML, 12 of four others. "Of the others" predicts with constants that were fitted to the
other sources of the same kind of device, at most {count} rows of each; – where nothing was fitted. An error is
predicted / measured - 1; the mean is of its size, the bias is the mean with its sign. `calibration.csv` has each row.

<!-- measured by: python lessons/24_simulate/calibration.py -->
"""

NCCL = """## NCCL's all-reduce

Tables of `nccl-tests`, and two of `torch.distributed`, that others published
(`minidist/simulate/published/collectives/`), beside `minidist/simulate/library.py`. An error is predicted / measured -
1; means are of absolute errors. "Left out" has constants of NVLink that were fitted to the other tables only; those of
trees (`TREE_LL128`, `SWITCH_HOP`, `SWITCHES_SHARE`) are the same everywhere. In `nccl-tests-309-b-ring` NCCL was told
to take rings, as ZeRO's gathers do.

The times of dudeperf3ct and Sheffield hold how one process starts the kernels of all GPUs one after the other. The
times of vidur hold the wait for the last process.

<!-- measured by: python lessons/24_simulate/calibration.py --collectives -->
"""
END = "<!-- end -->\n"

BYTES = """## Products of one byte

The rows in fp8 come from software whose products multiply bytes. Training here widens the bytes to bf16 before a
product, so these rows are no part of the tables above. Here they are predicted as `minidist simulate --multiply-bytes`
does, by the default constants. Weights are rounded to bytes in each microbatch, as they are here.

<!-- measured by: python lessons/24_simulate/calibration.py --bytes -->
"""

GAPS = """## Known gaps

- **What a source does not state** is taken as its first lines say: a micro-batch of 4 sequences (table 1 of Narayanan
  et al.), fp16 and no ZeRO (vTrain), the sizes of a model. Its errors hold our guess too.
- **ZeRO-3 across many nodes.** Table 2 of Narayanan et al. ran DeepSpeed of 2021: from 384 to 1,536 GPUs its step
  became only 1.2 times as fast, and what held it is not stated.
- **Kernels.** A row says where the scores of attention passed through memory (vTrain, BigScience, Narayanan et al.), at
  8 bytes a score. All other kernels are taken to be the same everywhere.
- **Heads of more than 128 columns** (Nemotron 340B has 192): no attention kernel here takes them, so these rows are not
  predicted either.
- **Tensor and context parallelism that overlap.** NeMo sends parts of a product, and keys and values, while it computes
  others; here the calls of both axes are waited for.
- **Recomputation of single products** (torchtitan's selective) is taken as every second block.
- **Memory of other programs' losses.** torchtitan reserves 11 to 12 GiB more than is counted here for Llama 3 8B with
  16,384 tokens a rank, and 43 GiB more with 32,768: its loss keeps the logits, about 6 and 11 bytes each. The loss here
  keeps none.
- **Rows that are not predicted**: more than {devices} devices, or more than {passes} passes of blocks, which take
  minutes.
"""


def errors(rows: Iterable[Judged], of_others: bool = False) -> np.ndarray:
    """Return predicted / measured - 1 of rows."""
    seconds = [(row.run.seconds, row.fitted if of_others else row.default) for row in rows]
    return np.array([found / measured - 1 for measured, found in seconds if found is not None])


def told(found: np.ndarray) -> str:
    """Return mean, bias and worst of errors as cells of a table."""
    if not len(found):
        return "– | – | –"
    worst = found[np.argmax(np.abs(found))]
    return f"{np.abs(found).mean():.1%} | {found.mean():+.1%} | {worst:+.1%}"


def summary(rows: Sequence[Judged]) -> str:
    """Return a line for each source left out, and one for each kind of device."""
    lines = [
        "| device | source left out | rows | default: mean | bias | worst | of the others: mean | "
        "bias | worst |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for device in DEVICES:
        of_device = [row for row in rows if row.device == device]
        sources = [each for each in SOURCES if any(row.source == each for row in of_device)]
        parts = [(each, [row for row in of_device if row.source == each]) for each in sources]
        for name, part in [*parts, ("**all**", of_device)]:
            lines.append(
                f"| {device} | {name} | {len(part)} | {told(errors(part))} | "
                f"{told(errors(part, of_others=True))} |"
            )
    return "\n".join(lines) + "\n"


def constants(fits: Sequence[Fit]) -> str:
    """Return the constants of each fit, beside the defaults."""
    lines = [
        "| constants | " + " | ".join(f"`{name}`" for name in NAMES) + " |",
        "| --- |" + " ---: |" * len(NAMES),
    ]
    for each in fits:
        values = [
            f"{getattr(each.profile.rates, name):.3g}" if "." not in name else "" for name in NAMES
        ]
        wires = [
            f"{value / 1e9:.3g} GB/s"
            for numbers in each.profile.wires.values()
            for value in numbers.values()
        ]
        values[-len(wires) :] = wires
        lines.append(f"| {each.device} without {each.source} | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def by_table(rows: Sequence[Judged]) -> str:
    """Return a line for each table, with the row that is farthest off."""
    lines = [
        "| table | rows, of | default: mean | bias | worst | which | of the others: mean | bias | "
        "worst |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for table in tables():
        part = [row for row in rows if row.table == table]
        of = f"{len(part)}, {len(published(table))}"
        if not part:
            lines.append(f"| {table} | {of} |" + " – |" * 7)
            continue
        worst = max(part, key=lambda row: abs(row.default / row.run.seconds - 1)).run
        lines.append(
            f"| {table} | {of} | {told(errors(part))} | {worst.label}, {worst.cluster.size} | "
            f"{told(errors(part, of_others=True))} |"
        )
    return "\n".join(lines) + "\n"


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
    return "\n".join([NCCL, *means, "", told, "", *by_size, "", END])


def mean_errors(rows: list[MeasuredCall], constants: Constants) -> list[float]:
    """Return the mean and the worst absolute error from 1 to 64 MiB, and the mean above."""
    short = np.abs(call_errors([row for row in rows if MIB <= row.nbytes <= 64 * MIB], constants))
    long = np.abs(call_errors([row for row in rows if row.nbytes > 64 * MIB], constants))
    return [short.mean(), short.max(), long.mean() if long.size else np.nan]


def _cells(numbers: np.ndarray) -> str:
    return " | ".join("–" if np.isnan(number) else f"{number:.1%}" for number in numbers.flat)


def error_and_way(row: MeasuredCall) -> str:
    """Return the error of a row, and the way and protocol that NCCL is taken to choose."""
    taken = chosen(row.cluster, row.nbytes, row.way)
    way = taken.name if "switch" in taken.name else f"{taken.name} {taken.protocol.name}"
    return f"{call_errors([row])[0]:+.0%}, {way}"


def bytes_multiplied() -> str:
    """Return the section on rows in fp8: a line for each kind of device and source."""
    predicted = FewPasses(multiplying_bytes)
    lines = [
        "| device | source | rows | mean | bias | worst | which |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for device in DEVICES:
        for source in SOURCES:
            runs = [run for _, run in rows_of(source, device, fp8=True)]
            if not runs:
                continue
            found = np.array(
                [predicted(run, CostProfile(run.cluster.name)) / run.seconds - 1 for run in runs]
            )
            print(f"{device}, {source}: {len(runs)} rows in fp8", flush=True)
            worst = runs[int(np.argmax(np.abs(found)))]
            lines.append(
                f"| {device} | {source} | {len(runs)} | {told(found)} | {worst.label}, "
                f"{worst.cluster.size} |"
            )
    return "\n".join([BYTES, *lines, "", END])


def write(rows: Sequence[Judged], fits: Sequence[Fit], options: str = "") -> None:
    """Write the page and the file of rows. Args: options: with which they were made."""
    parts = [
        HEAD.format(count=FITTED_ROWS, options=options),
        summary(rows),
        "## Each table\n",
        by_table(rows),
        *(["## The constants of each fit\n", constants(fits)] if fits else []),
        END,
        collectives(),
        bytes_multiplied(),
        GAPS.format(devices=MOST_DEVICES, passes=MOST_PASSES),
    ]
    with whole(PAGE) as draft:
        draft.write_text("\n".join(parts), encoding="utf-8")
    with whole(ROWS) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("table", "run", "cluster", "measured", "default", "of_others"))
        for row in rows:
            table.writerow(
                (
                    row.table,
                    row.run.label,
                    row.run.cluster.spec,
                    f"{row.run.seconds:.5g}",
                    f"{row.default:.5g}",
                    "" if row.fitted is None else f"{row.fitted:.5g}",
                )
            )


def write_section(text: str) -> None:
    """Write a section of the page again; a new one stands before the last."""
    page = PAGE.read_text(encoding="utf-8")
    title = text.partition("\n")[0]
    before, found, rest = page.partition(f"{title}\n")
    if found:
        after = rest[rest.index("\n## ") + 1 :]
    else:
        before, gaps, rest = page.rpartition("## ")
        after = gaps + rest
    with whole(PAGE) as draft:
        draft.write_text(f"{before}{text}\n{after}", encoding="utf-8")


def main() -> None:
    """Judge the rows that are asked for and write the page, or a section of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, metavar="N", help="of each source and kind of device")
    parser.add_argument("--defaults", action="store_true", help="do not fit")
    parser.add_argument(
        "--collectives", action="store_true", help="write only the section on NCCL's calls again"
    )
    parser.add_argument(
        "--bytes", action="store_true", help="write only the section on products of one byte again"
    )
    args = parser.parse_args()
    if args.collectives:
        write_section(collectives())
    if args.bytes:
        write_section(bytes_multiplied())
    if not (args.collectives or args.bytes):
        options = (f" --rows {args.rows}" if args.rows else "") + " --defaults" * args.defaults
        write(*judge(args.rows, not args.defaults), options)


if __name__ == "__main__":
    main()
