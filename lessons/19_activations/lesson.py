"""Lesson 19: keep less of the forward, and compute it again when backward asks.

    python lessons/19_activations/lesson.py
    mpirun -n 4 python lessons/19_activations/lesson.py           # section 5 on real ranks
    python lessons/19_activations/lesson.py --break fresh-dropout # see README.md, section 6
"""

import itertools
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from minidist import account, ops
from minidist.nn import GPT, DropoutKey, GPTConfig
from minidist.observe.page import Page, size_text, verdict
from minidist.parallel.activations import checkpoint, checkpoint_blocks
from minidist.parallel.hybrid import Plan, Trainer
from minidist.recompute import recompute
from minidist.teaching import arguments, run_lesson
from minidist.tensor import Parameter, no_grad, tensor

CONFIG = GPTConfig(vocabulary=64, context=64, layers=6, width=64, heads=4)
BATCH = 4
FLOAT32 = 4
WAYS = ("none", "scores", "all")


def plain_loop(blocks, x, dy):
    """Forward and backward through blocks that keep their inputs alone (README, section 1)."""
    kept = []
    with no_grad():                                              # forward: nothing stays on the tape
        for block in blocks:
            kept.append(x)                                       # but each block's input
            x = block(x)
    for block in reversed(blocks):
        again = tensor(kept.pop().data, requires_grad=True)      # cut off from what came before
        block(again).backward(dy)                                # forward once more, with a tape, and back
        dy = again.grad                                          # the gradient for the block before
    return dy


def tour(group: Any, page: Page) -> None:
    """The lesson: sections 1 to 4 on rank 0 alone, section 5 together."""
    if group.rank == 0:
        page.heading("1  The same gradients, to the bit")
        same_gradients(page)
        page.heading("2  What is kept at the end of forward")
        kept_at_the_end(page)
        page.heading("3  The peak of a step, and which blocks are worth it")
        peaks(page)
        page.heading("4  What it costs")
        seconds(page)
    page.heading("5  Under ZeRO-3: nothing more is gathered")
    traffic(group, page)


def batch_of(config: GPTConfig, batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (batch, config.context + 1))
    return ids[:, :-1].copy(), ids[:, 1:].copy()


def model_of(config: GPTConfig, which: str) -> GPT:
    """A model with its blocks as `which` says."""
    model = GPT(config)
    model.initialize(seed=0)
    checkpoint_blocks(model, which)
    return model


def gradients(config: GPTConfig, which: str) -> dict[str, np.ndarray]:
    """Every weight's gradient of one batch."""
    model = model_of(config, which)
    key = DropoutKey.of_sequences(0, 0, 0, BATCH, config.context)
    model.loss(*batch_of(config), key=key).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same_gradients(page: Page) -> None:
    """Three ways and the plain loop, with dropout on."""
    config = replace(CONFIG, dropout=0.1)
    plain = gradients(config, "none")
    rows = []
    for which in WAYS[1:]:
        found = gradients(config, which)
        rows.append([which, sum(np.array_equal(found[name], plain[name]) for name in plain), len(plain),
                     f"{max(float(np.max(np.abs(found[name] - plain[name]))) for name in plain):.1e}"])
    weights = [Parameter(np.random.default_rng(i).normal(size=(16, 16)), name=f"w{i}") for i in range(4)]
    blocks = [partial(lambda w, x: ops.gelu(ops.linear(x, w)), weight) for weight in weights]
    x = np.random.default_rng(9).normal(size=(8, 16))
    plain_loop(blocks, tensor(x), np.ones((8, 16)))
    loop = [weight.grad.copy() for weight in weights]
    h = tensor(x)
    for block in blocks:
        h = block(h)
    for weight in weights:
        weight.zero_grad()
    h.backward(np.ones((8, 16)))
    equal = sum(np.array_equal(a, weight.grad) for a, weight in zip(loop, weights, strict=True))
    rows.append(["the loop of section 1", equal, 4, "0.0e+00" if equal == 4 else "not equal"])
    page.table("Gradients beside those of a plain backward, dropout 0.1", ["kept", "equal to the bit", "of",
                                                                           "largest difference"], rows,
               note="what is computed again has the same bits; scores are made by another formula from the saved sums")


def held(config: GPTConfig, which: str, batch: int = BATCH) -> int:
    """Activation bytes alive at the end of forward."""
    with account.use(account.MemoryAccount()) as memory:
        loss = model_of(config, which).loss(*batch_of(config, batch))
        alive = memory.now["activations"]
        del loss
    return alive


def inside(config: GPTConfig, batch: int = BATCH) -> dict[str, int]:
    """Bytes that one block keeps, by way: what a block more adds."""
    more = replace(config, layers=config.layers + 1)
    return {which: held(more, which, batch) - held(config, which, batch) for which in WAYS}


def input_bytes(config: GPTConfig, batch: int = BATCH) -> int:
    """Bytes of a block's input: batch × context × width numbers."""
    return FLOAT32 * batch * config.context * config.width


def score_bytes(config: GPTConfig, batch: int = BATCH) -> int:
    """Bytes of a block's probabilities in a context of up to 64: batch × heads × context² numbers."""
    return FLOAT32 * batch * config.heads * config.context ** 2


def kept_at_the_end(page: Page) -> None:
    """One block, by way, for several shapes."""
    rows = []
    for config in (CONFIG, replace(CONFIG, width=128), replace(CONFIG, context=32)):
        each = inside(replace(config, layers=2))
        rows.append([f"context {config.context}, width {config.width}", size_text(each["none"]),
                     size_text(each["none"] - each["scores"]), size_text(score_bytes(config)),
                     verdict(each["none"] - each["scores"], score_bytes(config)), size_text(each["all"]),
                     size_text(input_bytes(config)), verdict(each["all"], input_bytes(config))])
    page.table(f"What one block keeps, {BATCH} sequences", ["tokens", "none", "scores less", "4 B heads T²", "",
                                                            "all", "4 B T width", ""], rows,
               note="the formulas of parallel/activations.py")


def peak(config: GPTConfig, which: str) -> int:
    """The most activation bytes at any time of forward and backward."""
    with account.use(account.MemoryAccount()) as memory:
        model_of(config, which).loss(*batch_of(config)).backward()
        return memory.peak["activations"]


def peaks(page: Page) -> None:
    """The peak for k of L blocks, beside the formula's difference."""
    each = inside(CONFIG)
    x, a = each["all"], each["none"]
    most, rows = peak(CONFIG, "none"), []
    for k in range(CONFIG.layers + 1):
        which = ",".join(map(str, range(k))) or "none"
        measured = peak(CONFIG, which)
        saved = k * (a - x) if k < CONFIG.layers else (k - 1) * (a - x)
        rows.append([f"{k} of {CONFIG.layers}", size_text(measured), f"{100 * measured / most:.0f} %",
                     size_text(most - measured), size_text(saved), verdict(most - measured, saved, 0.05)])
    page.table("Blocks that keep their inputs alone", ["blocks", "peak", "", "less", "k (a - x)", ""], rows,
               note="the last block gains nothing: backward begins there and makes all of it again at once")


def seconds(page: Page) -> None:
    """Median time of forward and backward, the three ways in turn."""
    models = {which: model_of(CONFIG, which) for which in WAYS}
    batch = batch_of(CONFIG)
    spent: dict[str, list[float]] = {which: [] for which in WAYS}
    for _ in range(5):
        for which, model in models.items():
            begin = time.perf_counter()
            model.loss(*batch).backward()
            spent[which].append(time.perf_counter() - begin)
            model.zero_grad()
    plain = statistics.median(spent["none"])
    page.table("Forward and backward, median of 5", ["kept", "ms", "of none"],
               [[which, f"{1e3 * statistics.median(times):.1f}", f"{statistics.median(times) / plain:.2f}"]
                for which, times in spent.items()],
               note="with B = 2F, \"all\" should take 4/3; embedding, norm and output are not computed again")


def traffic(group: Any, page: Page) -> None:
    """Bytes that ZeRO-3 sends in two steps, with and without."""
    config = replace(CONFIG, layers=2, width=32)
    batch = batch_of(config, batch=group.size)
    rows = []
    for which in ("none", "all"):
        trainer = Trainer(Plan(dp=group.size, zero=3, checkpoint_blocks=which), config, group)
        trainer.account.reset_peak()
        before = group.ledger.sent_bytes("step").get("dp", {})
        losses = [trainer.step(batch) for _ in range(2)]
        after = group.ledger.sent_bytes("step").get("dp", {})
        sent = {verb: after[verb] - before.get(verb, 0) for verb in after}
        rows.append([which, sent.get("all_gather", 0), sent.get("reduce_scatter", 0), f"{losses[-1]:.6f}",
                     size_text(trainer.account.peak["activations"])])
        trainer.close()
    rows[1].insert(3, verdict(sum(rows[1][1:3]), sum(rows[0][1:3])))
    rows[0].insert(3, "")
    page.table(f"Two steps of ZeRO-3 on {group.size} ranks, rank 0", ["kept", "all_gather", "reduce_scatter", "",
                                                                      "loss", "peak of activations"], rows,
               note="the weights of a unit are there for its backward, and its forward runs then")


def record(group: Any) -> dict[str, Any]:
    """One step's curve by way, the quickest of several; and the peaks for k blocks."""
    curves = {which: min((one_step(which) for _ in range(7)), key=lambda curve: curve["moments"][-1][0])
              for which in WAYS}
    each = inside(CONFIG)
    return {"curves": curves, "input": each["all"], "inside": each["none"],
            "peaks": [peak(CONFIG, ",".join(map(str, range(k))) or "none") for k in range(CONFIG.layers + 1)]}


def one_step(which: str) -> dict[str, Any]:
    """{"moments": (seconds, activation bytes) at every module and gradient of a step, "turn": when forward ended}."""
    with account.use(account.MemoryAccount()) as memory:
        model, batch = model_of(CONFIG, which), batch_of(CONFIG)
        moments: list[tuple[float, int]] = []
        begin = time.perf_counter()

        def note(*_: Any) -> None:
            moments.append((time.perf_counter() - begin, memory.now["activations"]))

        for module in model.modules():
            module.register_forward_hook(note)
        for parameter in model.parameters():
            parameter.hooks.append(note)
        note()
        loss = model.loss(*batch)
        turn = time.perf_counter() - begin
        loss.backward()
        del loss
        note()
    return {"moments": moments, "turn": turn}


# ------------------------------------------------------------------------------------------------------- Break it

def fresh_dropout() -> None:
    """Random numbers from a generator that goes on, not from a key: the second forward drops other places."""
    generator = np.random.default_rng(0)

    def drop(x: Any) -> Any:
        return x * (2.0 * (generator.random(x.shape) < 0.5))

    x = tensor(np.ones(8), requires_grad=True)
    y = recompute(drop, x)
    y.sum().backward()
    print(f"forward kept  {(y.data != 0).astype(int)}\nbackward kept {(x.grad != 0).astype(int)}: "
          f"no error, and a gradient of another function")


def changed_input() -> None:
    """What was given to the function is overwritten before backward."""
    weight = Parameter(np.ones((3, 3)), name="weight")
    x = tensor(np.ones((2, 3)))
    y = recompute(lambda h: ops.linear(h, weight), x)
    x.data[...] = 100.0
    y.sum().backward()
    print(f"the weight's gradient should be 2 everywhere, it is {weight.grad[0, 0]:g}: the input was not a copy")


def other_weights() -> None:
    """A function that remembers that it ran already."""
    first, second = Parameter(np.ones(3), name="first"), Parameter(np.ones(3), name="second")
    calls = itertools.count()

    def fickle(x: Any) -> Any:
        return x * (first if next(calls) == 0 else second)

    recompute(fickle, tensor(np.ones(3))).sum().backward()


def one_stretch() -> None:
    """The whole stack as one stretch: it comes back all at once."""
    for name, modules in (("each block", lambda model: model.blocks), ("the whole model", lambda model: [model])):
        with account.use(account.MemoryAccount()) as memory:
            model = model_of(CONFIG, "none")
            checkpoint(modules(model))
            loss = model.loss(*batch_of(CONFIG))
            alive = memory.now["activations"]
            loss.backward()
        print(f"{name:16} at the end of forward {size_text(alive):>9}, at the peak "
              f"{size_text(memory.peak['activations']):>9}")


BREAKS = {"fresh-dropout": fresh_dropout, "changed-input": changed_input, "other-weights": other_weights,
          "one-stretch": one_stretch}


def main() -> None:
    """Parse the command line, then run here, or on every rank that was launched."""
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=2)


if __name__ == "__main__":
    main()
