"""Lesson 19: activations alive over one step of a small model, by blocks per checkpoint."""

from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

from minidist.autograd.tensor import Tensor
from minidist.device import account
from minidist.lessons.lab import new_model, random_batch
from minidist.nn import GPTConfig, Module
from minidist.parallel.memory.activations import checkpoint
from minidist.site.live import Control, Live, Picture, Prediction, Say

# a small copy of the lesson's model: a block keeps 20 times its input, too
CONFIG = GPTConfig(vocabulary=64, context=16, layers=6, width=16, heads=4)
LAYERS = (6, 12, 24, 48)
EVERYTHING = 0
WHOLE = -1  # one checkpoint for all blocks
SIZES = (EVERYTHING, 1, 2, 3, 6, WHOLE)
KIB = 2**10
LEFT, TOP = 66, 34
CHART = (356, 214)
BARS = LEFT + CHART[0] + 102
BAR = (52, 36)  # the longest bar, and the distance of two


class BlockSegment(Module):
    """Blocks of a GPT, one after the other."""

    def __init__(self, blocks: list[Module]) -> None:
        self.blocks = blocks

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, *rest)
        return x


class ActivationCurve(NamedTuple):
    """A step's activation bytes at every module and every gradient, how many of these forward has,
    the peak, and how often a block ran forward."""

    moments: list[int]
    turn: int
    peak: int
    runs: int


@cache
def step_of(layers: int, size: int) -> ActivationCurve:
    """Run forward and backward of a model with a checkpoint every `size` blocks (SIZES)."""
    config = replace(CONFIG, layers=layers)
    with account.use(account.MemoryAccount()) as memory:
        model = new_model(config)
        moments: list[int] = []
        runs: list[int] = []

        def note(*_: Any) -> None:
            moments.append(memory.now["activations"])

        for module in model.modules():
            module.register_forward_hook(note)
        for parameter in model.parameters():
            parameter.hooks.append(note)
        for block in model.blocks:
            block.register_forward_hook(lambda *_: runs.append(1))
        if size != EVERYTHING:
            _cut(model, layers if size == WHOLE else size, note)
        memory.reset_peak()
        loss = model.loss(*random_batch(config, 0, 1))
        turn = len(moments)
        loss.backward()
        del loss
        note()
        return ActivationCurve(moments, turn, memory.peak["activations"], len(runs))


def _cut(model: Any, size: int, note: Any) -> None:
    """Let each `size` blocks of a model keep only their input."""
    blocks = model.blocks
    model.blocks = [BlockSegment(blocks[at : at + size]) for at in range(0, len(blocks), size)]
    for segment in model.blocks:
        segment.register_forward_hook(note)
    checkpoint(model.blocks)


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="sawtooth",
        lesson="19",
        section="3",
        title=say("Activations alive over one step", "一步之中存活的激活值"),
        predict=Prediction(
            say(
                "48 blocks. A block keeps 20 times the bytes of its input. One checkpoint for 1, 2 "
                "or 6 blocks: which has the lowest peak?",
                "48 个块，一个块保留的字节是其输入的 20 倍。每 1 个、2 个或 6 个块设一个检查点，哪种峰值"
                "最低？",
            ),
            ("1", "2", "6"),
            1,
            say(
                "2: 23 inputs and 2 × 20 are alive at the peak, 63 inputs' bytes. With 1 it is "
                "47 + 20 = 67. With 6 few inputs are kept, 7, but backward makes 6 × 20 at once.",
                "2 个：峰值处有 23 个输入，加上 2 × 20，相当于 63 个输入的字节。1 个是 47 + 20 = 67。"
                "6 个时只留 7 个输入，但反向要一次重算出 6 × 20。",
            ),
        ),
        controls=(
            Control(say("blocks of the model", "模型的块数"), tuple(map(str, LAYERS))),
            Control(
                say("blocks per checkpoint", "每个检查点的块数"),
                tuple(_name(say, size) for size in SIZES),
            ),
        ),
        size=(BARS + BAR[0] + 70, TOP + CHART[1] + 34),
        picture=partial(_picture, say),
        start=(1, 0),
    )


def _name(say: Say, size: int) -> str:
    special = {EVERYTHING: say("no checkpoint", "不设"), WHOLE: say("all", "全部")}
    return special.get(size, str(size))


def _picture(say: Say, layers_at: int, size_at: int) -> Picture:
    layers = LAYERS[layers_at]
    step = step_of(layers, SIZES[size_at])
    picture = Picture(
        "python -c 'from minidist.site.live.sawtooth import step_of; "
        f"print(step_of({layers}, {SIZES[size_at]}).peak)'"
    )
    longest = max(len(step_of(layers, size).moments) for size in SIZES)
    _draw_curve(picture, say, step, longest)
    _draw_peaks(picture, say, layers, size_at)
    again = step.runs - layers
    everything = step_of(layers, EVERYTHING).peak
    picture.facts = [
        say(
            f"Peak: {step.peak / KIB:.1f} KiB, {100 * step.peak / everything:.0f} % of everything "
            "kept.",
            f"峰值 {step.peak / KIB:.1f} KiB，是全部保留的 {100 * step.peak / everything:.0f}%。",
        ),
        say(
            f"Extra work: {again} of {layers} blocks run forward a second time.",
            f"额外的计算：{layers} 个块中有 {again} 个要再做一次前向。",
        ),
    ]
    return picture


def turning_points(heights: list[int]) -> list[tuple[int, int]]:
    """Return (place, height) of the ends of a curve and of where it turns up or down."""
    found = [(0, heights[0])]
    direction = 0
    for at in range(1, len(heights)):
        change = heights[at] - heights[at - 1]
        if change * direction < 0:
            found.append((at - 1, heights[at - 1]))
        direction = change or direction
    return [*found, (len(heights) - 1, heights[-1])]


def _draw_curve(picture: Picture, say: Say, step: ActivationCurve, longest: int) -> None:
    """Draw the bytes alive from the first module to the last gradient."""
    width, height = CHART
    bottom = TOP + height
    right = LEFT + width

    def place(at: float, nbytes: float) -> tuple[float, float]:
        return LEFT + width * at / longest, bottom - height * nbytes / step.peak

    turn, _ = place(step.turn, 0)
    picture.text(4, TOP - 18, say("KiB of activations", "激活值 (KiB)"), "soft")
    for part in (0.0, 0.5, 1.0):
        y = bottom - height * part
        picture.line([(LEFT, y), (right, y)], "dashed" if part else "")
        picture.text(LEFT - 8, y + 5, f"{part * step.peak / KIB:.1f}", "end")
    picture.line([(turn, TOP), (turn, bottom)], "dashed")
    picture.line([place(*point) for point in turning_points(step.moments)], "thick c0")
    picture.text((LEFT + turn) / 2, bottom + 18, say("forward", "前向"), "middle soft")
    end, _ = place(len(step.moments), 0)
    picture.text((turn + end) / 2, bottom + 18, say("backward", "反向"), "middle soft")


def _draw_peaks(picture: Picture, say: Say, layers: int, chosen: int) -> None:
    """Draw the peak of every choice, the present one framed; a click chooses."""
    peaks = [step_of(layers, size).peak for size in SIZES]
    picture.text(BARS - 84, TOP - 18, say("peak, KiB", "峰值 (KiB)"), "soft")
    for at, (size, peak) in enumerate(zip(SIZES, peaks, strict=True)):
        y = TOP + at * BAR[1]
        width = BAR[0] * peak / max(peaks)
        color = "right" if peak == min(peaks) else "c0"
        picture.text(BARS - 8, y + 19, _name(say, size), "end")
        picture.box(BARS, y + 3, width, BAR[1] - 12, color, sets=(1, at))
        if at == chosen:
            picture.box(BARS - 1, y + 2, width + 2, BAR[1] - 10, "edge")
        picture.text(BARS + width + 8, y + 19, f"{peak / KIB:.1f}")
