"""Lesson 21: gradients in fewer bytes, the residuals, and ranks that exchange weights seldom.

python lessons/21_compress/lesson.py
mpirun -n 4 python lessons/21_compress/lesson.py              # sections 1 to 5 on real ranks
python lessons/21_compress/lesson.py --break no-feedback      # see README.md, section 8
"""

from pathlib import Path
from typing import Any

import numpy as np

from minidist.comm.group import Group
from minidist.grading import load_module
from minidist.lessons.lab import difference, new_model, random_batch, weights
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import arguments, run_lesson
from minidist.nn import GPTConfig
from minidist.optim import SGD
from minidist.parallel.compress.compress import plain_compressed_ddp, scheme_of
from minidist.parallel.compress.local_steps import plain_diloco
from minidist.parallel.data.ddp import plain_ddp
from minidist.parallel.step.scheme import GradientRun

HERE = Path(__file__).resolve()
lab, broken = (load_module(HERE.with_name(name), "21") for name in ("experiments.py", "broken.py"))
# to compare weights
SMALL = GPTConfig(vocabulary=64, context=16, layers=2, width=16, heads=2, dtype="float64")
SCHEMES = (
    "none",
    "fp16",
    "8bit",
    "4bit",
    "sign",
    "powersgd:rank=2",
    "top-k:density=0.01",
    "random-k:density=0.01",
    "threshold:value=0.01",
    "predict",
)
TRAINED = ("none", "4bit", "sign", "top-k 1 %")
H = 4
RATE = 0.1


def tour(group: Group, page: Page) -> None:
    """Run the lesson: sections 1 to 5 on all ranks together, the others only on rank 0."""
    page.heading("1  The loop compared with DDP")
    plain_loop(group, page)
    page.heading("2  Bytes of one gradient")
    wire(group, page)
    page.heading("3  What of a gradient arrives")
    arrives(group, page)
    page.heading("4  Does it train?")
    trains(group, page)
    page.heading("5  Meet seldom")
    seldom(group, page)
    if group.rank == 0:
        page.heading("6  What was not sent is state")
        restart(page)
        page.heading("12.1  Streaming")
        fragments(page)


def weights_after(group: Group, train: Any) -> np.ndarray:
    """Return the weights of a small model that `train(model, optimizer, batches)` has trained for H
    steps."""
    model = new_model(SMALL)
    batches = [random_batch(SMALL, step, 2 * group.size + 1) for step in range(H)]
    train(model, SGD(list(model.parameters()), RATE), batches)
    return weights(model)


def plain_loop(group: Group, page: Page) -> None:
    """Compare section 1's function at three densities with plain DDP."""
    ddp = weights_after(group, lambda *given: plain_ddp(given[0], given[1], group, given[2]))
    rows = []
    for density in (1.0, 0.1, 0.01):
        found = weights_after(
            group,
            lambda *given, part=density: plain_compressed_ddp(
                given[0], given[1], group, given[2], part
            ),
        )
        off = difference(found, ddp)
        rows.append(
            [
                f"{density:g}",
                f"{off:.0e}",
                ("ok" if off < 1e-10 else f"off by {off:.0e}") * (density == 1),
            ]
        )
    page.table(
        f"Weights after {H} steps of SGD on {group.size} ranks, beside DDP's",
        ["density", "difference", ""],
        rows,
        note="with density 1 everything is sent; below it, some of each gradient arrives later",
    )


def wire(group: Group, page: Page) -> None:
    """Compare the bytes of all ranks for one all-reduce of a gradient, by ledger and by formula."""
    size = lab.numbers()
    rows = []
    for name in SCHEMES:
        scheme = scheme_of(name)
        weights = lab.new_weights()[1]
        run = GradientRun.whole(weights, group, "all_reduce")
        scheme.attach([run])
        bucket = np.random.default_rng(group.rank).normal(size=size).astype(np.float32)
        with group.ledger.during(f"lesson {name}"):
            scheme.begin_step()
            scheme.start_all_reduce(0, bucket).wait()
        mine = sum(
            sum(verbs.values()) for verbs in group.ledger.sent_bytes(f"lesson {name}").values()
        )
        with group.ledger.control():
            sent = int(group.all_gather(np.array([mine])).sum())
        formula = scheme.sent_bytes(run)
        formula = 2 * (group.size - 1) * 4 * size if formula is None else formula
        rows.append(
            [
                name,
                sent,
                formula if formula >= 0 else "the numbers decide",
                verdict(sent, formula) if formula >= 0 else "",
                f"{sent / (group.size * size):.3f}",
            ]
        )
    page.table(
        f"One all-reduce of {size} float32 numbers, {group.size} ranks together",
        ["scheme", "bytes sent", "formula of its module", "", "bytes a number and rank"],
        rows,
        note="the numbers decide: 99 % of these random ones reach threshold's 0.01, and it sends at "
        "most half, as pairs of 8 bytes: P/2 times the bytes of none. predict has no gradient "
        "before this one: it sends all, as 4bit, and a byte for each message",
    )


def arrives(group: Group, page: Page) -> None:
    """Show the share of a gradient's squared length that arrives, in one step and in many."""
    steps = 10
    found = lab.kept(group, steps)
    page.table(
        "Share of the squared length that arrives",
        ["scheme", "of the first gradient", f"of the sum of {steps}", "neither applied nor kept"],
        [
            [
                name,
                f"{100 * each['first']:.1f} %",
                f"{100 * each['sum']:.1f} %",
                "ok" if each["lost"] < 1e-5 else f"off by {each['lost']:.0e}",
            ]
            for name, each in found.items()
        ],
        note="applied + residuals of all ranks = gradients, to float32's rounding",
    )


def trains(group: Group, page: Page) -> None:
    """Show the validation loss of some ways after a few steps."""
    steps = 30
    rows = []
    for name in TRAINED:
        found = lab.train(group, lab.WAYS[name], steps)
        last = found["moments"][-1]
        rows.append(
            [name, f"{found['moments'][0].loss:.3f}", f"{last.loss:.3f}", last.sent // steps]
        )
    page.table(
        f"Held-out loss, {steps} steps of AdamW",
        ["way", "before", "after", "bytes a rank and step"],
        rows,
        note="more ways and steps: figure.py",
    )


def seldom(group: Group, page: Page) -> None:
    """Show that H = 1 with the plain mean equals DDP, and the bytes of a period."""
    ddp = weights_after(group, lambda *given: plain_ddp(given[0], given[1], group, given[2]))
    rows = []
    for every, lr, momentum, name in (
        (1, 1.0, 0.0, "H=1, rate 1, no momentum"),
        (H, 1.0, 0.0, f"H={H}, local SGD"),
        (H, 0.7, 0.9, f"H={H}, DiLoCo"),
    ):
        with group.ledger.during(f"lesson {name}"):
            found = weights_after(
                group,
                lambda *given, options=(every, lr, momentum): plain_diloco(
                    given[0],
                    given[1],
                    group,
                    given[2],
                    options[0],
                    lr=options[1],
                    momentum=options[2],
                ),
            )
        mine = group.ledger.sent_bytes(f"lesson {name}").get(group.axis, {}).get("all_reduce", 0)
        with group.ledger.control():
            sent = int(group.all_gather(np.array([mine])).sum())
        formula = H // every * 2 * (group.size - 1) * found.nbytes
        off = difference(found, ddp)
        rows.append(
            [
                name,
                f"{off:.0e}",
                ("ok" if off < 1e-10 else f"off by {off:.0e}") * (every == 1),
                sent,
                formula,
                verdict(sent, formula),
            ]
        )
    page.table(
        f"{H} steps on {group.size} ranks, SGD inside",
        ["", "weights beside DDP's", "", "bytes, all ranks", "H' × 2(P-1) × 8Ψ", ""],
        rows,
        note="H': how often the ranks met; Ψ parameters of 8 bytes",
    )


def fragments(page: Page) -> None:
    """Show when each fragment of streaming DiLoCo travels, by the module's own rule."""
    every = 12
    parts = 3
    delay = 2
    page.say(
        f"Streaming, H={every}, F={parts}, τ={delay}: S a fragment sets out, M it is mixed in; "
        "one column a step"
    )
    for number, row in enumerate(lab.fragment_rows(every, parts, delay, 30)):
        page.say(f"    fragment {number}   {row}")


def restart(page: Page) -> None:
    """Compare weights after a restart, with residuals and without."""
    rows = []
    for scheme in ("top-k:density=0.01", "4bit"):
        gaps = broken.gaps_after_restart(scheme)
        rows.append(
            [
                scheme,
                f"{gaps['restored']:.0e}",
                "ok" if gaps["restored"] == 0 else "off",
                f"{gaps['lost']:.0e}",
            ]
        )
    page.table(
        "Weights of 4 + 4 steps beside those of 8",
        ["scheme", "residuals restored", "", "residuals lost"],
        rows,
        note="the largest difference; a checkpoint has each rank's residuals",
    )


BREAKS = broken.BREAKS


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS)
