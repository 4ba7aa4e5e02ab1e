"""Lesson 26: checkpoints: killed anywhere, a run continues on any ranks, with the same bits.

mpirun -n 4 python lessons/26_survive/lesson.py
python lessons/26_survive/lesson.py                          # no launcher: four threads
python lessons/26_survive/lesson.py --break manifest-first   # see README.md, section 7
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.chunks import bounds
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.errors import CheckpointError, PeerLostError
from minidist.files import scratch
from minidist.grading import load_module
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.parallel.state.checkpoint import plain_load, plain_save
from minidist.parallel.state.manifest import checkpoints, read_manifest, step_folder
from minidist.survive.interval import best_interval, goodput

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "26")
PLANS: tuple[dict[str, Any], ...] = (
    {"dp": 4},
    {"dp": 3, "zero": 2},
    {"dp": 2, "tp": 2, "zero": 1},
    {"dp": 2, "pp": 2},
    {"dp": 2, "zero": 3},
)


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank; only rank 0 runs what starts ranks of its own."""
    with shared_folder(group) as folder:
        plain(group, page, folder)
    if group.rank == 0:
        with scratch() as folder:
            killed(page, folder)
            other_plans(page, folder)
            damaged(page, folder)
        intervals(page)


class shared_folder:  # noqa: N801 - used as a function
    """A folder of rank 0 that every rank of the group may use, for the length of a block."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.scratch = scratch()

    def __enter__(self) -> Path:
        name = str(self.scratch.__enter__()) if self.group.rank == 0 else ""
        room = np.zeros(512, np.uint8)
        room[: len(name.encode())] = np.frombuffer(name.encode(), np.uint8)
        return Path(self.group.broadcast(room, root=0).tobytes().rstrip(b"\0").decode())

    def __exit__(self, *error: object) -> None:
        self.group.barrier()
        if self.group.rank == 0:
            self.scratch.__exit__(None, None, None)


# ---------------------------------------------------------------------------------- 1 the plain one


def plain(group: Group, page: Page, folder: Path) -> None:
    """Write a vector of 13 numbers on all ranks, and read it on half of them."""
    page.heading("1  Each rank writes its own, the manifest comes last")
    size = 13
    edges = bounds(size, group.size)
    plain_save(
        group,
        np.arange(size, dtype=np.float64)[edges[group.rank] : edges[group.rank + 1]],
        size,
        folder,
    )
    group.barrier()
    fewer = group.split(0 if group.rank < (group.size + 1) // 2 else None)
    found = plain_load(fewer, folder) if fewer is not None else np.empty(0)
    every = group.all_gather(found)
    rows = [[f"{name}", os.path.getsize(folder / name)] for name in sorted(os.listdir(folder))]
    page.table(f"The folder that {group.size} ranks wrote", ["file", "bytes"], rows)
    page.say(
        f"{(group.size + 1) // 2} ranks read it: "
        f"{verdict(float(np.abs(every - np.arange(size)).sum()), 0.0)}"
    )


# ----------------------------------------------------------------------------------------- 2 killed


def killed(page: Page, folder: Path) -> None:
    """Train on three processes; one kills itself; three new ones continue."""
    page.heading("2  Killed, and continued")
    plan = {"dp": 3, "zero": 1}
    whole = lab.on_ranks(folder / "whole", plan, 3)
    try:
        lab.on_ranks(folder / "killed", plan, 3, processes=True, killed=10)
    except PeerLostError as error:
        page.say(f"The others: {error}".splitlines()[0])
    there = [path.name for path in checkpoints(folder / "killed")]
    again = lab.on_ranks(folder / "killed", plan, 3, resume=True)
    page.say(
        f"Complete checkpoints: {', '.join(there)}. The new run begins with step {again['first']}."
    )
    rows = [
        [
            step,
            f"{whole['losses'][step]:.15f}",
            f"{loss:.15f}",
            "ok" if loss == whole["losses"][step] else "off",
        ]
        for step, loss in again["losses"].items()
    ]
    page.table(
        "Losses of a run that never stopped, and of the run that continues",
        ["step", "never stopped", "continued", ""],
        rows,
        note=f"weights: {'the same bits' if whole['sha256'] == again['sha256'] else 'off'}",
    )


# ------------------------------------------------------------------------------------ 3 other plans


def other_plans(page: Page, folder: Path) -> None:
    """Load what 3 ranks with ZeRO-1 saved by other plans."""
    page.heading("3  Another number of ranks, another plan")
    source = checkpoints(folder / "whole")[0]
    target = lab.on_ranks(folder / "whole", {"dp": 3, "zero": 1}, 3)["losses"]
    rows = []
    for plan in PLANS:
        size = int(np.prod([ranks for axis, ranks in plan.items() if axis != "zero"]))
        same, losses = md.run(loaded, str(source), plan, size=size)[0]
        gap = max(abs(loss - target[step]) for step, loss in losses.items())
        rows.append(
            [
                ", ".join(f"{axis}={value}" for axis, value in plan.items()),
                size,
                "ok" if same else "off",
                f"{gap:.0e}",
            ]
        )
    page.table(
        f"{source.name} of dp=3, zero=1, loaded by other plans",
        ["plan", "ranks", "weights, m and v: the same bits", "next losses off by"],
        rows,
        note="in another plan sums have another order, so the next losses may differ in their "
        "last digit",
    )


def loaded(group: Group, source: str, plan: dict[str, Any]) -> tuple[bool, dict[int, float]]:
    """Return whether the whole state equals the file's, and the losses of the next steps."""
    trainer = md.Trainer(md.Plan(**plan), lab.CONFIG, group, seed=1, lr=0.01)
    trainer.load(source)
    with shared_folder(group) as folder:
        trainer.save(step_folder(folder, trainer.steps_done))
        same = whole_state(step_folder(folder, trainer.steps_done)) == whole_state(Path(source))
    losses = {
        step: trainer.step(lab.global_batch(step)) for step in range(trainer.steps_done, lab.STEPS)
    }
    trainer.close()
    return same, losses


def whole_state(folder: Path) -> dict[str, bytes]:
    """Return every tensor of a checkpoint, joined from its shards: {key: bytes}."""
    from minidist.parallel.state.state_map import runs_of

    tensors: dict[str, np.ndarray] = {}
    for shard in read_manifest(folder)["shards"]:
        data = (folder / shard["file"]).read_bytes()
        for array in shard["arrays"]:
            numbers = np.frombuffer(data, array["dtype"], array["nbytes"] // 8, array["offset"])
            whole = tensors.setdefault(
                array["key"], np.empty(int(np.prod(array["shape"])), array["dtype"])
            )
            at = 0
            for start, stop in runs_of(array["stripes"]).tolist():
                whole[start:stop] = numbers[at : at + stop - start]
                at += stop - start
    return {key: array.tobytes() for key, array in tensors.items()}


# ---------------------------------------------------------------------------------------- 4 damaged


def damaged(page: Page, folder: Path) -> None:
    """Flip bits of every file, one at a time; then stop a save halfway."""
    page.heading("4  A bit flips, a save is torn")
    source = checkpoints(folder / "whole")[-1]
    chance = np.random.default_rng(26)
    rows = []
    for file in sorted(source.iterdir()):
        told = ""
        tries = 10
        found = 0
        for bit in chance.integers(0, 8 * file.stat().st_size, tries).tolist():
            lab.flip(file, bit)
            try:
                md.run(loaded, str(source), {"dp": 2}, size=2)
            except CheckpointError as error:
                found = found + 1
                told = str(error).split(f"{file.name}: ")[-1].split(";")[0]
            lab.flip(file, bit)
        rows.append([file.name, size_text(file.stat().st_size), f"{found} of {tries}", told])
    page.table(
        "Ten random bits of each file flipped, one at a time",
        ["file", "size", "found", "the last one, as it was told"],
        rows,
    )
    torn = step_folder(folder / "whole", 16)
    torn.mkdir()
    (torn / "shard-00000.safetensors").write_bytes(b"half")
    newest = checkpoints(folder / "whole")[-1].name
    page.say(f"{torn.name} has a shard and no manifest: the newest checkpoint is {newest}.")


# --------------------------------------------------------------------------------------- 5 interval


def intervals(page: Page) -> None:
    """Show a run of thirty days with an interruption every two hours, saved at several
    intervals."""
    page.heading("5  How often?")
    save = 20.0
    between = 7200.0
    restart = 60.0
    best = best_interval(save, between)
    rows = []
    moments = lab.interruptions(between, 30 * 86_400, seed=1)
    for interval in (best / 8, best / 2, best, 2 * best, 8 * best):
        spans = lab.replay(interval, moments, save=save, restart=restart, seconds=30 * 86_400)
        formula = goodput(interval, save=save, between=between, restart=restart)
        shares = {
            kind: sum(span.stop - span.start for span in spans if span.kind == kind)
            / spans[-1].stop
            for kind in ("save", "lost", "restart")
        }
        rows.append(
            [
                f"{interval:,.0f} s" + ", the best" * (interval == best),
                *(f"{shares[kind]:.1%}" for kind in shares),
                f"{lab.kept(spans):.1%}",
                f"{formula:.1%}",
                verdict(lab.kept(spans), formula, 0.02),
            ]
        )
    page.table(
        f"A save takes {save:g} s, an interruption comes every {between:,.0f} s, a restart takes "
        f"{restart:g} s",
        ["saved every", "saving", "lost", "restarting", "kept", "by formula", ""],
        rows,
        note="thirty days on a clock that jumps from event to event; at the best interval "
        "saving and losing cost the same",
    )


# ----------------------------------------------------------------------------------------- Break it


def manifest_first() -> None:
    """Write the manifest before the shards, over an older save: a torn save looks complete."""

    def job(group: Group, folder: str) -> None:
        old = np.arange(10.0, 16.0)
        edges = bounds(6, group.size)
        plain_save(group, old[edges[group.rank] : edges[group.rank + 1]], 6, Path(folder))
        digest = "0" * 64  # nobody has computed it yet
        if group.rank == 0:
            (Path(folder) / "manifest.json").write_text(
                json.dumps({"size": 6, "sha256": [digest, digest]})
            )
            np.arange(3.0).tofile(Path(folder) / "0.bin")  # and here the machine stops

    with tempfile.TemporaryDirectory() as folder:
        md.run(job, folder, size=2)
        read = np.concatenate([np.fromfile(Path(folder) / f"{rank}.bin") for rank in range(2)])
        print(
            "The old save had the numbers 10 to 15, the new one has 0 to 5. Without digests a loader "
            f"reads {', '.join(f'{number:g}' for number in read)}. From plain_load:"
        )
        md.run(plain_load, Path(folder), size=1)  # it reads shard 0 first


def moments_lost() -> None:
    """Save only the weights: Adam begins anew, and the run's losses differ."""

    def job(group: Group) -> tuple[list[float], list[float]]:
        runs = []
        for forgets in (False, True):
            trainer = md.Trainer(md.Plan(dp=2), lab.CONFIG, group, seed=1, lr=0.01)
            losses = []
            for step in range(8):
                if forgets and step == 4:
                    for slot in trainer.optimizer.slots:
                        slot.steps = 0
                        for state in slot.state.values():
                            state[...] = 0
                losses.append(trainer.step(lab.global_batch(step)))
            trainer.close()
            runs.append(losses)
        return runs[0], runs[1]

    kept, forgot = md.run(job, size=2)[0]
    print("Expected, if nothing was lost: the same loss in both columns")
    for step in range(3, 8):
        print(
            f"step {step}: whole state {kept[step]:.6f}; only the weights, at step 4 "
            f"{forgot[step]:.6f}{'' if kept[step] == forgot[step] else '   differs'}"
        )


def wrong_model() -> None:
    """Load a checkpoint of another model."""
    from dataclasses import replace

    def job(group: Group, folder: str, width: int, save: bool) -> None:
        trainer = md.Trainer(md.Plan(dp=2), replace(lab.CONFIG, width=width), group)
        if save:
            trainer.save(Path(folder) / "step-000000")
        else:
            trainer.load(Path(folder) / "step-000000")
        trainer.close()

    with tempfile.TemporaryDirectory() as folder:
        md.run(job, folder, 16, True, size=2)
        print("A model of width 32 loads a checkpoint of width 16. Expected: an error, no step")
        md.run(job, folder, 32, False, size=2)


BREAKS = {
    "manifest-first": Break(manifest_first, says="is damaged", error=CheckpointError),
    "moments-lost": Break(moments_lost, says="   differs"),
    "wrong-model": Break(wrong_model, says="build the same model", error=CheckpointError),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
