"""Lesson 09: two-byte numbers: what they can hold, master weights, the loss scale, the gain.

python lessons/09_mixed_precision/lesson.py
mpirun -n 4 python lessons/09_mixed_precision/lesson.py            # sections 5 and 6 on real ranks
python lessons/09_mixed_precision/lesson.py --break no-scale       # see README.md, section 9
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from minidist.autograd import ops
from minidist.autograd.tensor import Parameter, tensor
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.device import account
from minidist.device.account import MemoryAccount
from minidist.grading import load_module
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.optim import SGD, Adam
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.precision.mixed_precision import (
    LossScale,
    MixedPrecision,
    plain_mixed_precision,
)
from minidist.parallel.step.single import Single
from minidist.parallel.zero.memory_formula import MIXED, SINGLE, STATE, state_bytes

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "09")


def tour(group: Group, page: Page) -> None:
    """Run the lesson: sections 5 and 6 on all ranks, the others only on rank 0."""
    page.heading("1  What a number can be")
    if group.rank == 0:
        formats(page)
    page.heading("2  The notes' five steps (N3:65), by hand and by the library")
    if group.rank == 0:
        five_steps(page)
    page.heading("3  Where a model's gradients lie, and what float16 makes of them")
    if group.rank == 0:
        lost_gradients(page)
    page.heading("4  A scale that adjusts itself")
    if group.rank == 0:
        scale_table(page)
    page.heading("5  Bytes a parameter, and bytes that travel")
    held_and_sent(group, page)
    page.heading("6  One rank overflows: all skip")
    overflow_on_one(group, page)
    page.heading("7  Passes added up in two bytes")
    if group.rank == 0:
        passes_added(page)


# ---------------------------------------------------------------------------------------- 1 formats


def formats(page: Page) -> None:
    """Show the limits of every format, and three numbers rounded to it."""
    rows = []
    for name, dtype in lab.FORMATS.items():
        kind = (
            np.dtype(dtype)
            if dtype in ("float32", "float16")
            else np.dtype(getattr(ml_dtypes, dtype))
        )
        info = ml_dtypes.finfo(kind)
        with np.errstate(over="ignore"):
            third, tiny = (float(np.float32(x).astype(kind)) for x in (1 / 3, 1e-6))
        limits = (float(x) for x in (info.max, info.smallest_normal, info.smallest_subnormal))
        rows.append(
            [
                name,
                kind.itemsize,
                info.nmant + 1,
                *(f"{limit:.3g}" for limit in limits),
                f"{third:.5f}",
                f"{tiny:.2e}",
            ]
        )
    page.table(
        "What the formats hold",
        [
            "",
            "bytes",
            "binary digits",
            "largest",
            "smallest normal",
            "smallest",
            "1/3 is",
            "0.000001 is",
        ],
        rows,
        note="N2:332 gives fp8 a wider range than fp16's; e4m3 ends at 448 and e5m2 at 57,344, "
        "fp16 at 65,504",
    )


# ------------------------------------------------------------------------------------- 2 five steps


def five_steps(page: Page) -> None:
    """Compare the loop of section 2 with Single with MixedPrecision, and with float32."""
    batches = [lab.batch_of(step) for step in range(lab.STEPS)]
    rows = []
    full = masters_after("fp32", batches)
    for name, dtype in (("fp16", "float16"), ("bf16", "bfloat16")):
        model = lab.model_in(dtype)
        # unrounded
        masters = [
            Parameter(p.draw(p.seed, dtype="float32"), name=p.name) for p in model.parameters()
        ]
        scale = lab.SCALE if name == "fp16" else 1.0
        plain_mixed_precision(model, masters, Adam(masters, 1e-3), batches, scale)
        ours = masters_after(name, batches)
        equal = sum(np.array_equal(master.data, ours[master.name]) for master in masters)
        far = max(np.abs(ours[key] - full[key]).max() for key in full)
        rows.append(
            [
                name,
                f"{equal} of {len(masters)}",
                "ok" if equal == len(masters) else "off",
                f"{far:.1e}",
                f"{max(np.abs(value).max() for value in full.values()):.1f}",
            ]
        )
    page.table(
        f"Master weights after {lab.STEPS} steps of Adam",
        ["", "tensors with the loop's bits", "", "largest distance to float32", "largest weight"],
        rows,
        note="step 1: masters, m and v are float32 and stay; step 5: what is saved in the end "
        "are the masters",
    )


def masters_after(name: str, batches: list[Any]) -> dict[str, np.ndarray]:
    """Return the library's master weights after these batches, on one process."""
    model = lab.model_in(lab.FORMATS[name])
    scale = LossScale(lab.SCALE) if name == "fp16" else None
    single = Single(
        model, precision=None if name == "fp32" else MixedPrecision(name, loss_scale=scale)
    )
    optimizer = Adam(single.parameters, 1e-3)
    for batch in batches:
        single.step(batch, optimizer)
    return single.state_dict()


# -------------------------------------------------------------------------------------- 3 gradients


def fates(sizes: np.ndarray) -> list[str]:
    """Return the shares of gradients that float16 has as zero, subnormal, normal and infinite; none
    is zero in float32.

    Args:    sizes: their absolute values in float16.
    """
    smallest = float(np.finfo(np.float16).smallest_normal)
    finite = np.isfinite(sizes)
    shares = (sizes == 0, (sizes > 0) & (sizes < smallest), (sizes >= smallest) & finite, ~finite)
    return [f"{share.mean():.1%}" for share in shares]


def lost_gradients(page: Page) -> None:
    """Run backward in float16 on the same sequences, as part of batches of several sizes, with
    several scales."""
    rows = []
    for tokens in (lab.MINE, 2**15, lab.MANY):
        full = lab.gradients_of("float32", 1.0, tokens)
        present = full != 0
        for scale in (1.0, lab.SCALE, 2.0**24):
            found = lab.gradients_of("float16", scale, tokens)[present]
            finite = bool(np.isfinite(found).all())
            error = (
                np.linalg.norm(found / scale - full[present]) / np.linalg.norm(full[present])
                if finite
                else 0.0
            )
            rows.append(
                [
                    f"{tokens:,}",
                    f"2^{int(np.log2(scale))}",
                    *fates(np.abs(found)),
                    f"{error:.1%}" if finite else "skipped",
                ]
            )
    page.table(
        f"Gradients of the weights in float16, of the same {lab.MINE} tokens as a part of larger "
        "batches",
        [
            "tokens of the batch",
            "scale",
            "zero",
            "subnormal",
            "all digits",
            "infinite",
            "off float32's by",
        ],
        rows,
        note="the loss is divided by all ranks' tokens: the more ranks, the smaller each one's "
        "gradients",
    )


# ------------------------------------------------------------------------------------------ 4 scale


def scale_table(page: Page) -> None:
    """Show the loss scale by step."""
    run = lab.scale_run()
    rows = []
    begin = 0
    for step in range(1, len(run["scale"]) + 1):
        if step == len(run["scale"]) or run["scale"][step] != run["scale"][begin]:
            rows.append(
                [
                    f"{begin} to {step - 1}" if step - 1 > begin else f"{begin}",
                    f"2^{int(np.log2(run['scale'][begin]))}",
                    sum(run["skipped"][begin:step]),
                    f"{run['loss'][step - 1]:.3f}",
                ]
            )
            begin = step
    page.table(
        "Begun at 2^28, doubled after 8 good steps (real runs: 2,000)",
        ["steps", "scale", "of them skipped", "loss"],
        rows,
        note="a skipped step changes nothing but the scale: no weight, no moment, no step count",
    )


# ----------------------------------------------------------------------------------------- 5 memory


def held_and_sent(group: Group, page: Page) -> None:
    """Compare what rank 0 holds and what all ranks send in a step with the formulas: each ZeRO
    stage, float32 and bf16."""
    rows = []
    for precision, each in (("fp32", SINGLE), ("bf16", MIXED)):
        for zero in range(4):
            with account.use(MemoryAccount()):
                held, sent, count = one_step(
                    group, Plan(dp=group.size, zero=zero, precision=precision)
                )
            formula = state_bytes(count, each, zero=zero, ranks=group.size)["total"]
            rows.append(
                [
                    precision,
                    zero,
                    f"{held / count:.2f}",
                    f"{formula / count:.2f}",
                    verdict(held, formula, 0.01),
                    size_text(sent),
                ]
            )
    page.table(
        f"{group.size} ranks, Adam",
        ["", "ZeRO", "bytes a parameter", "formula", "", "all ranks sent"],
        rows,
        note="two bytes halve what travels, and the state is 16 either way: 4+4+8 or 2+2+12",
    )


def one_step(group: Group, plan: Plan) -> tuple[int, int, int]:
    """Return the bytes of state that this rank holds, the bytes that all ranks send in a step, and
    the number of parameters."""
    trainer = Trainer(plan, lab.CONFIG, group, optimizer="adam")
    before = sum(group.ledger.sent_bytes("step").get("dp", {}).values())
    trainer.step(lab.batch_of(0))
    trainer.state_dict()  # what was on its way has arrived
    mine = sum(group.ledger.sent_bytes("step").get("dp", {}).values()) - before
    with group.ledger.control():
        sent = int(group.all_reduce(np.array([mine]))[0])
    held = sum(trainer.account.now[category] for category in STATE)
    trainer.close()
    return held, sent, sum(p.size for p in trainer.model.parameters())


# --------------------------------------------------------------------------------------- 6 overflow


def overflow_on_one(group: Group, page: Page) -> None:
    """Let the last rank's gradients overflow in step 1 of ZeRO-2: no other rank ever has them."""
    trainer = Trainer(Plan(dp=group.size, zero=2, precision="fp16"), lab.CONFIG, group)
    backward = trainer.precision.backward
    rows = []
    for step in range(3):
        if step == 1 and group.rank == group.size - 1:
            trainer.precision.backward = (  # type: ignore[method-assign]
                lambda loss, *dy, **how: backward(loss * 2.0**40, *dy, **how)
            )
        before = trainer.weights_sha256()
        loss = trainer.step(lab.batch_of(step))
        after = trainer.weights_sha256()
        trainer.precision.backward = backward  # type: ignore[method-assign]
        scale = trainer.precision.loss_scale.value  # type: ignore[attr-defined]
        rows.append(
            [
                step,
                f"{loss:.4f}",
                "changed" if before != after else "the same bits",
                f"{scale:,.0f}",
                trainer.updates_done,
            ]
        )
    trainer.close()
    page.table(
        "fp16 under ZeRO-2; the last rank's loss is 2^40 times too large in step 1",
        ["step", "loss", "masters", "scale after", "updates so far"],
        rows,
        note="the ranks share one number in any case, for clipping: the sum of squares; an "
        "overflow on any rank makes it infinite on all",
    )


# ----------------------------------------------------------------------------------- 7 accumulation


def passes_added(page: Page) -> None:
    """Compare the error of rounding every addition with half a unit of the last digit times the
    root of the passes."""
    rows = []
    for passes in (1, 4, 16):
        row: list[Any] = [passes]
        for dtype, unit in (("bfloat16", 2.0**-9), ("float16", 2.0**-12)):
            off = lab.accumulated(dtype, passes)
            bound = unit * np.sqrt(passes)
            row += [f"{off:.2%}", f"{bound:.2%}", "ok" if off <= bound else "off"]
        rows.append(row)
    page.table(
        f"Gradients of {lab.BATCH} sequences in several passes: how far their sum is off the "
        "exact one",
        ["passes", "bf16", "at most 2^-9 √passes", "", "fp16", "at most 2^-12 √passes", ""],
        rows,
        note="each addition is made in float32 and rounded: by less than 2^-9 on average in bf16, "
        "2^-12 in fp16; some go up and some down, so errors grow as the root of their number",
    )


# ----------------------------------------------------------------------------------------- Break it


def no_scale() -> None:
    """Train in float16 without a loss scale, in bf16 and in float32: a rank's share of 2 million
    tokens."""
    full = lab.gradients_of("float32", 1.0, lab.MANY)
    present = full != 0
    for name, dtype, scale in (
        ("float16, no scale", "float16", 1.0),
        ("float16, scale 65,536", "float16", lab.SCALE),
        ("bfloat16, no scale", "bfloat16", 1.0),
    ):
        found = lab.gradients_of(dtype, scale, lab.MANY)[present]
        error = np.linalg.norm(found / scale - full[present]) / np.linalg.norm(full[present])
        print(
            f"{name}: {np.mean(found == 0):.1%} of the gradients are zero, expected none; all "
            f"together are off float32's by {error:.1%}"
        )


def no_masters() -> None:
    """Update bf16 weights directly: a change below half the gap to the next number is lost."""
    lr = 1e-3
    weight = np.ones(1, "float32").astype(ml_dtypes.bfloat16)
    master = weight.astype("float32")
    for step in range(1, 101):
        weight = (weight.astype("float32") - np.float32(lr)).astype(ml_dtypes.bfloat16)
        master -= np.float32(lr)
        if step in (1, 10, 100):
            print(
                f"after {step:3d} updates of {lr}: bf16 alone {float(weight[0])}, master "
                f"{master[0]:.3f}, its rounding {float(master.astype(ml_dtypes.bfloat16)[0])}"
            )
    print(
        f"the next number below 1 in bf16 is {1 - 2.0**-8}: an update must pass half of that, "
        f"{2.0**-9}"
    )


def bf16_sum() -> None:
    """Add up ones in bf16, one after another and as the library does."""
    for count in (100, 256, 1000, 4096):
        total = np.zeros((), ml_dtypes.bfloat16)
        for _ in range(count):
            total = (total + np.ones((), ml_dtypes.bfloat16)).astype(ml_dtypes.bfloat16)
        right = float(ops.sum(tensor(np.ones(count, ml_dtypes.bfloat16))).item())
        print(f"{count:5d} ones: {float(total):.0f} in bf16, {right:.0f} in float32 rounded once")


def clip_before_unscale() -> None:
    """Clip gradients while they are still `scale` times too large, then unscale them."""
    weight = np.full(4, 0.5, "float32")  # gradients of length 1, in a scale of 65,536
    scaled = weight.astype("float16") * np.float16(2.0**15)
    scale = 2.0**15
    clip = 1.0
    norm = float(np.linalg.norm(scaled.astype("float64")))
    right = min(1.0, clip / (norm / scale)) / scale
    wrong = min(1.0, clip / norm) / scale
    for name, factor in (("unscale, then clip", right), ("clip, then unscale", wrong)):
        moved = Parameter(np.zeros(4, "float32"), name="w")
        moved.grad = scaled.astype("float32")
        SGD([moved], 0.1).step(scale=factor)
        print(
            f"{name}: a step of length {np.linalg.norm(moved.data):.1e} at a rate of 0.1, "
            f"gradient of length {norm / scale:.1f}, bound {clip}"
        )


BREAKS = {
    "no-scale": Break(no_scale, says="float16, no scale: 95"),
    "no-masters": Break(
        no_masters,
        says="after 100 updates of 0.001: bf16 alone 1.0, master 0.900",
    ),
    "bf16-sum": Break(bf16_sum, says="4096 ones: 256 in bf16, 4096 in float32"),
    "clip-before-unscale": Break(
        clip_before_unscale,
        says="clip, then unscale: a step of length 3.1e-06",
    ),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
