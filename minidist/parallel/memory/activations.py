"""Chapter 19 · Activations: keep less of the forward, and compute it again when backward asks.

The idea. What grows with batch and context is not the weights but what every op keeps for its
backward. Most of it can be made again from little. Keep a block's input alone, forget the rest, and
run the block's forward once more just before its backward:

    forward   block 1 | block 2 | block 3  |
    backward                               | 3, backward 3       | 2, backward 2    | 1, backward 1
    held      x1        x1 x2     x1 x2 x3   x1 x2 x3 + inside 3   x1 x2 + inside 2   x1 + inside 1

Three ways, from which `--checkpoint-blocks` and `checkpoint_blocks` choose:

    "none"      keep everything
    "scores"    of attention, T × T numbers a head and sequence are computed again (selective
                recomputation). Sequences of more than KEEP_UP_TO tokens never keep them
    "all"       a block keeps its input; or numbers, "0,2,3": these blocks do

What a rank holds at the most, L blocks, x bytes of a block's input (4·B·T·width in float32), a of
all that a block keeps, s of its probabilities, e of embedding and output together. On the host s is
4·B·heads·T² up to QUERY_BLOCK tokens (64); for T = 128, 192 and 256 it is 4·B·heads·T·(T + 64)/2,
because a block of 64 queries keeps only those of the keys up to its last query:

    "none"      L a + e
    "scores"    L (a - s) + e
    "all"       (L - 1) x + a + e       one block's inside at a time: the sawtooth of lesson 19
    k blocks    (L - k) a + k x + e     and a - x more if the last one is among them: backward
                                        begins with it, when all the others' are still there, so to
                                        leave it out gains nothing

Cost: no message. "all" runs the forward of its blocks twice: a step of F + B with B = 2F becomes
4/3 as long, less where embedding and output count; "scores" adds one product of seven in attention.
The same weights to the bit: what is computed again has the same bits, and dropout is drawn by
(layer, seed, step, token), so it drops the same.

Under ZeRO-3 nothing more is gathered: the unit's weights are there for its backward, and its
forward runs then.

The inputs that are left, (L - 1) x, can be made less in turn: kept_inputs.py. Which blocks to
choose for a memory of a given size: activation_budget.py.

notes:   N1 §2.2, N2 §10.4
Source:  Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"; Korthikanti et al. 2022,
         "Reducing Activation Recomputation in Large Transformer Models".
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from minidist.autograd.tensor import Tensor, no_grad, tensor
from minidist.device import account
from minidist.device.backend import Array
from minidist.errors import PlanError
from minidist.nn import GPT, DropoutKey, GPTConfig, Module


def plain_recompute(blocks: Sequence[Callable[[Tensor], Tensor]], x: Tensor, dy: Array) -> Array:
    """Run forward and backward through blocks that keep only their inputs; return the gradient of
    x."""
    kept = []
    with no_grad():  # forward: nothing stays on the tape
        for block in blocks:
            kept.append(x)  # but each block's input
            x = block(x)
    for block in reversed(blocks):
        again = tensor(kept.pop().data, requires_grad=True)  # a tape of its own
        block(again).backward(dy)  # forward once more, with a tape, and back
        dy = again.grad  # the gradient for the block before
    return dy


# The real one is a setting of each block (`checkpoint`): autograd/recompute.py puts one node on the
# tape in place of the block's own, so that the rest of backward needs no loop like this. It adds a
# choice of blocks, the scores of attention alone, and dropout that drops the same numbers in both
# forwards.

NONE = "none"
SCORES = "scores"
ALL = "all"
WAYS = ("8bit", "shard", "offload")
WHOLE = "whole"


def checkpoint(modules: Sequence[Module], keeper: Any = None) -> None:
    """From now on backward computes the inside of these modules again; only their arguments and
    results stay.

    Each returns one Tensor; their forwards must depend on their arguments and weights alone.
    Args:    keeper: an InputKeeper (kept_inputs.py), which keeps their first arguments; None: they
             stay as they are.
    """
    for module in modules:
        module.recomputed = True
        module.keeper = keeper


def forget_scores(model: GPT) -> None:
    """From now on backward computes attention's probabilities again."""
    for block in model.blocks:
        block.attention.keeps_scores = False


def checkpoint_blocks(model: GPT, which: str, keeper: Any = None) -> None:
    """Do with a model's blocks what `which` says: "none", "scores", "all", or numbers as "0,2,3".

    Args:    keeper: as checkpoint's. Raises: as chosen.
    """
    if which == SCORES:
        forget_scores(model)
    elif which != NONE:
        checkpoint([model.blocks[number] for number in chosen(which, len(model.blocks))], keeper)


def chosen(which: str, blocks: int | None = None) -> list[int]:
    """The blocks that `which` wants computed again, of so many; None: of a model that is not known
    yet.

    Raises: PlanError for what is no such word.
    """
    if which in (NONE, SCORES):
        return []
    if which == ALL:
        return list(range(blocks or 0))
    numbers = which.split(",") if isinstance(which, str) else [""]
    if not all(
        n.isascii() and n.isdigit() and len(n) < 10 and (blocks is None or int(n) < blocks)
        for n in numbers
    ):
        last = 1 if blocks is None else blocks - 1
        span = f" from 0 to {last}" if blocks else ""
        some = f"numbers of blocks{span} joined by commas, like 0,{last}" if last else "0"
        raise PlanError(
            f"checkpoint_blocks {repr(which)[:62]}: choose {NONE}, {SCORES}, {ALL}, or {some}"
        )
    return sorted({int(number) for number in numbers})


def ways_of(kept: str) -> tuple[str, ...]:
    """The words of WAYS in `kept`, "whole" or some joined by commas, in the order in which they are
    taken.

    Raises:  PlanError for another word.
    """
    words = [] if kept == WHOLE else kept.split(",")
    if not set(words) <= set(WAYS) or len(set(words)) < len(words):
        raise PlanError(
            f"keep_activations {kept[:60]!r}: choose {WHOLE}, or one or several of "
            f"{', '.join(WAYS)}, joined by commas, like 8bit,offload"
        )
    return tuple(way for way in WAYS if way in words)


def pass_bytes(config: GPTConfig, sequences: int, which: str = NONE, *, device: str = "cpu") -> int:
    """Peak bytes of the activations of one pass over so many sequences, before there is a model.

    Models of one and two blocks, as wide as the real one, make the pass, and the formulas above say
    the rest. It is never too much: where numbers choose blocks, a last one that is computed again
    comes on top.

    Args:    config: its dtype is that of the activations; which: as checkpoint_blocks.
    Cost:    forward and backward of three blocks, and of six where numbers choose some.
    """

    def peak(layers: int, which: str) -> int:
        return _peak(replace(config, layers=layers), sequences, which, device)

    # as all blocks, or those that are not chosen
    same = which if which in (NONE, SCORES, ALL) else NONE
    one = peak(1, same)
    block = peak(2, same) - peak(1, same)
    saved = (
        0
        if same == which
        else len(chosen(which, config.layers)) * (block - (peak(2, ALL) - peak(1, ALL)))
    )
    return one + (config.layers - 1) * block - saved


def _peak(config: GPTConfig, sequences: int, which: str, device: str) -> int:
    with account.use(account.MemoryAccount()) as memory:
        model = GPT(config)
        model.initialize(0, device=device)
        checkpoint_blocks(model, which)
        ids = np.zeros((sequences, config.context), np.int64)
        model.loss(ids, ids, key=DropoutKey.of_sequences(0, 0, 0, *ids.shape)).backward()
        return memory.peak["activations"]
