"""Lesson 20: offload: device, host and disk: what lies where, what moves, and how moves are hidden.

python lessons/20_offload/lesson.py
mpirun -n 4 python lessons/20_offload/lesson.py                # each rank offloads its own shards
python lessons/20_offload/lesson.py --break one-buffer         # see README.md, section 8
"""

from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.autograd.tensor import Parameter
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.console import size_text
from minidist.device import account
from minidist.errors import DiskError, MemoryLimitError
from minidist.grading import load_module
from minidist.lessons.lab import new_model, weights
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPT
from minidist.optim import AdamW
from minidist.parallel.hybrid.hybrid import Plan
from minidist.parallel.memory.offload import OnHost, plain_offload
from minidist.parallel.memory.offload_costs import moved_to_disk, moved_to_host
from minidist.parallel.memory.offload_disk import OnDisk
from minidist.parallel.memory.transfer_lanes import Pace
from minidist.parallel.step.flat import Flat
from minidist.parallel.step.single import Single
from minidist.parallel.zero.memory_formula import Each
from minidist.parallel.zero.zero2 import Zero2
from minidist.parallel.zero.zero3 import Zero3

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "20")
BILLION = 10**9


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank; sections 1 to 5 are about one device, and only rank 0's are
    shown."""
    alone = group.split(group.rank)
    for title, section in (
        ("1  The same weights, wherever the state lies", same_weights),
        ("2  Where each byte lies: device, host, disk", where),
        ("3  What moves in a step, and the formula", what_moves),
        ("4  Reading ahead, writing behind: a slow disk", hidden),
        ("4.1  The same step on other machines (N2:454 to 457, N4:19 to 40)", machines),
        ("5  A model four times over the limit", over_the_limit),
    ):
        page.heading(title)
        if group.rank == 0:
            section(alone, page)
    group.barrier()
    page.heading("6  Each rank offloads its own shards; other axes (N2:529)")
    all_ranks(group, page)
    if group.rank == 0:
        other_axes(page)
    group.barrier()
    page.heading("9  Seven billion parameters, and the notes' 900 GB/s (N2:378)")
    seven_billion(page)
    alone.close()


def same_weights(alone: Group, page: Page) -> None:
    """Compare weights and losses with three stores, and the weights of the plain loop."""
    runs = {name: lab.train(alone, plan) for name, plan in lab.PLANS.items()}
    first = runs["one device"]
    rows = [
        [
            name,
            f"{run['losses'][-1]:.6f}",
            run["digest"][:12],
            "ok" if run["digest"] == first["digest"] else "off",
        ]
        for name, run in runs.items()
    ]
    page.table(
        "After three steps, float32, AdamW, clipped",
        ["", "loss", "weights (SHA-256)", "same bits"],
        rows,
        note="the same arithmetic in the same order: what lies elsewhere between two uses "
        "changes nothing",
    )
    equal, count = plain_beside_single()
    page.say(
        f"The loop of section 1 compared with one device, unclipped: {equal} of {count} tensors "
        "have the same bits."
    )


def plain_beside_single() -> tuple[int, int]:
    """Return how many weights have the same bits after the plain loop and after one device's steps,
    and how many there are."""
    models = [GPT(lab.CONFIG) for _ in range(2)]
    for model in models:
        model.initialize(1)
    batches = [lab.batch_of(step, lab.CONFIG) for step in range(3)]
    host = [Parameter(p.data.copy(), name=p.name) for p in models[0].parameters()]
    plain_offload(models[0], AdamW(host, 1e-3), batches, host)
    single = Single(models[1])
    optimizer = AdamW(list(models[1].parameters()), 1e-3)
    for batch in batches:
        single.step(batch, optimizer)
    pairs = list(zip(*(model.parameters() for model in models), strict=True))
    return sum(np.array_equal(a.data, b.data) for a, b in pairs), len(pairs)


def where(alone: Group, page: Page) -> None:
    """Show the bytes per parameter on each level between steps, and the device's peaks."""
    rows = []
    for name, plan in lab.PLANS.items():
        run = lab.train(alone, plan)
        count = run["parameters"]
        pages = 4096 * 4 * (lab.CONFIG.layers + 4)
        device = run["device"]
        host = run["host"]
        lasting = sum(device[kind]["now"] for kind in ("parameters", "gradients", "optimizer"))
        on_host = sum(host[kind]["now"] for kind in ("parameters", "gradients", "optimizer"))
        formulas = {
            "one device": (16, 0, 0),
            "optimizer on the host": (4, 16, 0),
            "all on disk": (0, 0, 16),
        }[name]
        right = (
            abs(lasting - formulas[0] * count) <= 100
            and on_host == formulas[1] * count
            and 0 <= run["disk"] - formulas[2] * count <= pages
        )
        rows.append(
            [
                name,
                f"{lasting / count:.2f}",
                f"{on_host / count:.2f}",
                f"{run['disk'] / count:.2f}",
                " + ".join(map(str, formulas)),
                "ok" if right else "off",
                size_text(device["parameters"]["peak"]),
                size_text(device["gradients"]["peak"]),
            ]
        )
    page.table(
        f"Bytes a parameter between steps; {run['parameters']:,} parameters in float32",
        ["", "device", "host", "disk", "formula", "", "peak: weights", "peak: gradients"],
        rows,
        note="disk: whole pages. Peaks: two units of weights, three of gradients, or three "
        "buckets of 64 KiB",
    )


def what_moves(alone: Group, page: Page) -> None:
    """Show what moves in every direction, in float32 and in half precision."""
    rows = []
    for precision, each in (("fp32", Each.of(4)), ("bf16", Each.of(2, masters=True))):
        for name, plan in list(lab.PLANS.items())[1:]:
            run = lab.train(alone, {**plan, "precision": precision})
            count = run["parameters"]
            formula = (
                moved_to_host(count, each)
                if "host" in name
                else moved_to_disk(count, 0, count, each, masters=precision != "fp32")
            )
            rows += [
                [
                    f"{name}, {precision}",
                    way,
                    run["moved"].get(way, 0),
                    f"{nbytes / count:g} x {count:,}",
                    nbytes,
                    verdict(run["moved"].get(way, 0), nbytes),
                ]
                for way, nbytes in sorted(formula.items())
            ]
    page.table(
        "Bytes a step",
        ["", "way", "measured", "formula", "", ""],
        rows,
        note="ZeRO-Offload's 2 + 2 bytes a parameter in half precision: `optimizer on the host, "
        "bf16`",
    )


def over_the_limit(alone: Group, page: Page) -> None:
    """Train with a limit of a quarter of 16 bytes per parameter."""
    count = sum(p.size for p in GPT(lab.CONFIG).parameters())
    limit = 16 * count // 4
    rows = []
    free = lab.train(alone, {})
    for name, plan in lab.PLANS.items():
        try:
            run = lab.train(alone, {**plan, "device_memory": limit})
            rows.append(
                [
                    name,
                    size_text(run["device"]["total"]["peak"]),
                    "trains",
                    "ok" if run["digest"] == free["digest"] else "off",
                ]
            )
        except MemoryLimitError as error:
            rows.append(
                [
                    name,
                    "",
                    str(error).split(" more for ")[1].split(" do not fit")[0] + " do not fit",
                    "",
                ]
            )
    page.table(
        f"Limit {size_text(limit)}; the state takes {size_text(16 * count)}",
        ["", "device's peak", "", "same bits as without a limit"],
        rows,
    )


class NoPrefetch(OnDisk):
    """OnDisk that reads a unit when it is needed, and no sooner."""

    def read_ahead(self, flat: Flat) -> None:
        """Read nothing ahead."""


def hidden(alone: Group, page: Page) -> None:
    """Compare a step with reading ahead, without it, and with one buffer."""
    rows = []
    for name, store, buffers in (
        ("four buffers", OnDisk, 4),
        ("four, nothing read ahead", NoPrefetch, 4),
        ("one buffer", OnDisk, 1),
    ):
        run = lab.over_a_slow_disk(alone, store, buffers=buffers)
        rows.append(
            [
                name,
                f"{1e3 * run['passes']:.0f} ms",
                f"{1e3 * run['seconds']:.0f} ms",
                f"{run['reads']} + {run['writes']}",
                f"{100 * run['share']:.0f} %",
                run["digest"][:8],
            ]
        )
    page.table(
        f"Eight units that compute {1e3 * lab.COMPUTE:.0f} ms each way; a disk of "
        f"{1e3 * lab.ACCESS:.0f} ms an access",
        ["", "forward, backward", "the step", "reads + writes", "hidden", "weights"],
        rows,
        note=f"computing takes {1e3 * 16 * lab.COMPUTE:.0f} ms; counted are reads and writes "
        "that begin in forward and backward; behind the update, the rest of the step, "
        "little hides",
    )


def machines(alone: Group, page: Page) -> None:
    """Show a simulated step on machines with other ways to memory, without and with offload."""
    rows = []
    for name, seconds in lab.on_machines().items():
        cluster = lab.machine(name)
        rows.append(
            [
                name,
                f"{cluster.tiers['host'].bandwidth / BILLION:.0f}",
                f"{cluster.device.host_bandwidth / BILLION:.0f}",
                f"{cluster.tiers[cluster.below].bandwidth / BILLION:.0f}",
                *(f"{each:.3f} s" for each in seconds),
            ]
        )
    page.table(
        "Two blocks of llama2-7b on eight devices, simulated; GB/s of a device, and a step",
        ["", "to the host", "host's memory", "below", "no offload", "optimizer", "all"],
        rows,
        note="bf16, 64 sequences of 2,048 tokens, blocks computed again; no offload and "
        "optimizer: ZeRO-2; all: ZeRO-3",
    )


def all_ranks(group: Group, page: Page) -> None:
    """Train by ZeRO-3 on all ranks, with each shard on its own rank's disk."""
    run = lab.train(group, lab.PLANS["all on disk"])
    records = gather_records(
        group,
        {
            "disk": run["disk"],
            "host": run["host"]["total"]["peak"],
            "device": run["device"]["total"]["peak"],
            "digest": run["digest"],
            "moved": run["moved"].get("disk to host", 0),
        },
    )
    if not records:
        return
    page.table(
        f"--zero 3 --offload all on {group.size} rank{'s' * (group.size > 1)}",
        ["", "on disk", "host's peak", "device's peak", "read in a step", "weights"],
        [
            [
                f"rank {rank}",
                size_text(r["disk"]),
                size_text(r["host"]),
                size_text(r["device"]),
                size_text(r["moved"]),
                r["digest"][:8],
            ]
            for rank, r in enumerate(records)
        ],
        note="a rank reads and writes only its own shards, so P disks are P times as fast as one",
    )


def other_axes(page: Page) -> None:
    """Show plans of four ranks, run as threads: what the fullest rank holds and moves, with three
    stores."""
    rows = []
    for name, axes in lab.AXES.items():
        size = Plan(zero=3, **axes).size
        first = ""
        for offload in ("none", "optimizer", "all"):
            plan = {**axes, "zero": 3, "offload": offload, "checkpoint_blocks": "all"}
            ranks = md.run(
                lambda world, plan=plan: lab.train(world, plan, steps=2, config=lab.SHORT),
                size=size,
                limit=120.0,
            )
            first = first or ranks[0]["digest"]
            peak = max(rank["device"]["total"]["peak"] for rank in ranks)
            host = max(rank["host"]["total"]["peak"] for rank in ranks)
            moved = [rank["moved"] for rank in ranks]
            right = all(rank["digest"] == first for rank in ranks) and moved == [
                rank["formula"] for rank in ranks
            ]
            rows.append(
                [
                    name,
                    offload,
                    size_text(peak),
                    size_text(host) if host else "",
                    size_text(max(rank["disk"] for rank in ranks)) if offload == "all" else "",
                    size_text(max(sum(ways.values()) for ways in moved))
                    if offload != "none"
                    else "",
                    "ok" if right else "off",
                ]
            )
    page.table(
        "After two steps with ZeRO-3, blocks computed again; the fullest rank",
        [
            "axes",
            "--offload",
            "device's peak",
            "host's peak",
            "on disk",
            "moved in a step",
            "bits, bytes",
        ],
        rows,
        note="ok: the bits of the plan without offload, and on each rank as many bytes moved as "
        "the formula says",
    )


def seven_billion(page: Page) -> None:
    """Show the seconds per step over the links that offloading uses, and over the link that the
    notes name."""
    each = Each.of(2, masters=True)
    host = moved_to_host(7 * BILLION, each)["device to host"]
    disk = moved_to_disk(7 * BILLION, 0, 7 * BILLION, each, masters=True)
    rows = [
        [
            "gradients down",
            size_text(host),
            f"{host / (900 * BILLION):.2f} s",
            f"{host / (450 * BILLION):.2f} s",
            f"{host / (64 * BILLION):.2f} s",
            "",
        ]
    ]
    rows += [
        [f"all: {way}", size_text(disk[way]), "", "", "", f"{disk[way] / (3 * BILLION):.0f} s"]
        for way in ("disk to host", "host to disk")
    ]
    page.table(
        "7 billion parameters in mixed precision, one device, seconds a step at",
        ["", "bytes", "900 GB/s (N2:378)", "450 GB/s", "64 GB/s", "3 GB/s"],
        rows,
        note="900: NVLink 4.0 between GPUs, both ways together; 450: one way; 64: PCIe 5.0 x16 "
        "one way, which is what lies between a GPU and most hosts; 3: one NVMe drive",
    )


# ----------------------------------------------------------------------------------------- Break it


def _alone(work: Any) -> Any:
    return md.run(work, size=1, limit=120.0)[0]


def no_prefetch() -> None:
    """Let each unit wait for its own read."""
    for name, store in (("read ahead", OnDisk), ("read when needed", NoPrefetch)):
        run = _alone(lambda world, store=store: lab.over_a_slow_disk(world, store))
        print(
            f"{name:17s} forward and backward {1e3 * run['passes']:.0f} ms, "
            f"{100 * run['share']:.0f} % hidden"
        )
    print("expected: read ahead more is hidden, all but four of 16 reads; else only writes")


def one_buffer() -> None:
    """Run with few buffers: reads and writes take turns in them."""
    for buffers in (4, 2, 1):
        run = _alone(lambda world, n=buffers: lab.over_a_slow_disk(world, buffers=n))
        print(
            f"{buffers} buffer{'s' * (buffers > 1)}: a step takes {1e3 * run['seconds']:.0f} ms, "
            f"{100 * run['share']:.0f} % of the moves hidden, weights {run['digest'][:8]}"
        )
    print("expected: the same weights each time, and a longer step with fewer buffers")


class Hasty(OnHost):
    """OnHost that does not wait for gradients."""

    def wait_for_gradients(self) -> None:
        """Do not wait."""


def update_before_arrival() -> None:
    """Update before the gradients arrive over a bus of 100 ms: it uses the sums of the step before,
    at first zeros."""

    def work(world: Group, store: type[OnHost]) -> np.ndarray:
        model = new_model(lab.CONFIG, 1)
        strategy = Zero2(model, world, store=store(pace_down=Pace(latency=0.1)))
        optimizer = AdamW(strategy.parameters, 1e-3)
        for step in range(2):
            strategy.step(lab.batch_of(step), optimizer)
        strategy.store.close()
        return weights(model)

    right, hasty = (
        _alone(lambda world, store=store: work(world, store)) for store in (OnHost, Hasty)
    )
    print(
        f"after two steps the largest difference is {np.abs(right - hasty).max():.1e}, expected 0, "
        "and no error: Adam took the last step's gradients, and zeros in the first"
    )


def forget_to_free() -> None:
    """Keep units on the device, under a limit that holds two of them."""

    def work(world: Group) -> None:
        with account.use(account.MemoryAccount(limit=700_000)):
            strategy = Zero3(GPT(lab.CONFIG), world, store=OnDisk(), seed=1)
            for unit in strategy.units:
                unit.free = lambda: None  # type: ignore[method-assign]
            try:
                strategy.step(lab.batch_of(0), AdamW(strategy.parameters, 1e-3))
            finally:
                strategy.store.close()

    print(
        "expected: a step that holds two units at a time and fits under 700,000 bytes", flush=True
    )
    _alone(work)


def tiny_limit() -> None:
    """Set a limit of less than two units: refused before training."""
    print("expected: an error before the first step, which names the need", flush=True)
    _alone(lambda world: lab.train(world, {**lab.PLANS["all on disk"], "device_memory": 300_000}))


def missing_folder() -> None:
    """Offload to a folder that cannot be written: refused before training."""
    print("expected: an error before the first step, which names the folder", flush=True)
    _alone(lambda world: lab.train(world, lab.PLANS["all on disk"], offload_dir="/absent/folder"))


BREAKS = {
    "no-prefetch": Break(no_prefetch, says="read when needed  forward and backward"),
    "one-buffer": Break(one_buffer, says="1 buffer: a step takes"),
    "update-before-arrival": Break(
        update_before_arrival,
        says="Adam took the last step's gradients",
    ),
    "forget-to-free": Break(
        forget_to_free,
        says="do not fit under the limit of 700,000",
        error=MemoryLimitError,
    ),
    "tiny-limit": Break(tiny_limit, says="the limit is 300,000", error=MemoryLimitError),
    "missing-folder": Break(missing_folder, says="/absent/folder is not there", error=DiskError),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=1)
