"""Lesson 16: what a rank holds between steps, by ZeRO stage, model, precision and ranks."""

from functools import partial

from minidist.parallel.zero.memory_formula import MIXED, SINGLE, STATE, Each, saving, state_bytes
from minidist.simulate.models import model
from minidist.site.live import Control, Live, Picture, Prediction, Say

MODELS = (
    "gpt2-xl",
    "llama3-8b",
    "megatron-18b",
    "megatron-39b",
    "llama3-70b",
    "gpt3-175b",
    "llama3-405b",
)
RANKS = tuple(2**power for power in range(11))
STAGES = range(4)
GB = 10**9
DEVICE = 80 * GB
COLORS = dict(zip(STATE, ("c0", "c1", "c2"), strict=True))
LEFT, TOP = 82, 62
ROW = 44
WIDTH = 420  # of the longest bar


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="zero_memory",
        lesson="16",
        section="6",
        title=say("Which stage fits a device of 80 GB?", "哪个阶段放得进 80 GB 的设备？"),
        predict=Prediction(
            say(
                "A model of 70 billion parameters, mixed precision: 2 bytes for a weight, 2 for its "
                "gradient, 12 for the optimizer state. With ZeRO-2, how many ranks does it take "
                "until a rank holds less than 80 GB?",
                "700 亿参数的模型，混合精度：每个参数的权重 2 字节，梯度 2 字节，优化器状态 12 字节。"
                "用 ZeRO-2，要多少个 rank，每个 rank 保存的才少于 80 GB？",
            ),
            ("16", "64", say("no number is enough", "再多也不够")),
            2,
            say(
                "No number is enough: under ZeRO-2 every rank holds all weights, 141 GB of them. "
                "Only ZeRO-3 divides them: 71 GB with 16 ranks, for everything.",
                "再多也不够：ZeRO-2 下每个 rank 都保存全部权重，这就有 141 GB。只有 ZeRO-3 切分权重："
                "16 个 rank 时，每个 rank 总共 71 GB。",
            ),
        ),
        controls=(
            Control(
                say("model", "模型"),
                tuple(f"{name}, {_billions(say, name)}" for name in MODELS),
            ),
            Control(say("ranks", "rank 数"), tuple(map(str, RANKS))),
            Control(
                say("precision", "精度"),
                (say("mixed: 2 + 2 + 12 bytes", "混合：2 + 2 + 12 字节"), "float32: 4 + 4 + 8"),
            ),
        ),
        size=(LEFT + WIDTH + 118, TOP + len(STAGES) * ROW + 10),
        picture=partial(_picture, say),
        start=(1, 3, 0),
    )


def _billions(say: Say, name: str) -> str:
    numbers = model(name).numbers
    return say(f"{numbers / 1e9:.1f} billion", f"{numbers / 1e8:.0f} 亿")


def _picture(say: Say, model_at: int, ranks_at: int, precision: int) -> Picture:
    parameters = model(MODELS[model_at]).numbers
    ranks = RANKS[ranks_at]
    each = (MIXED, SINGLE)[precision]
    held = [state_bytes(parameters, each, zero=zero, ranks=ranks) for zero in STAGES]
    name = ("MIXED", "SINGLE")[precision]
    picture = Picture(
        "python -c 'from minidist.parallel.zero.memory_formula import *; "
        f"[print(state_bytes({parameters}, {name}, zero=zero, ranks={ranks})) "
        "for zero in range(4)]'"
    )
    scale = WIDTH / max(held[0]["total"], 1.1 * DEVICE)
    _draw_key(picture, say)
    for zero, bytes_of in enumerate(held):
        _draw_bar(picture, say, zero, bytes_of, scale)
    limit = LEFT + DEVICE * scale
    picture.line([(limit, TOP - 6), (limit, TOP + len(STAGES) * ROW)], "dashed thick")
    picture.text(limit, TOP - 12, "80 GB", "middle bold")
    picture.facts = [_enough(say, held), _less(say, each, ranks), _not_counted(say)]
    return picture


def _draw_key(picture: Picture, say: Say) -> None:
    """Write which color is what."""
    names = (say("weights", "权重"), say("gradients", "梯度"), say("optimizer state", "优化器状态"))
    for place, (category, name) in enumerate(zip(STATE, names, strict=True)):
        x = LEFT + 130 * place
        picture.box(x, 4, 14, 14, COLORS[category])
        picture.text(x + 20, 16, name)


def _draw_bar(picture: Picture, say: Say, zero: int, held: dict[str, float], scale: float) -> None:
    """Draw what a rank holds under one stage."""
    y = TOP + zero * ROW
    x = float(LEFT)
    picture.text(
        LEFT - 10, y + 22, say("no ZeRO", "不用 ZeRO") if zero == 0 else f"ZeRO-{zero}", "end"
    )
    for category in STATE:
        width = held[category] * scale
        text = f"{held[category] / GB:.0f}" if width >= 34 else ""
        picture.box(x, y + 4, width, ROW - 16, COLORS[category], text)
        x += width
    mark = "✓" if held["total"] <= DEVICE else "✗"
    picture.text(LEFT + WIDTH + 10, y + 22, f"{held['total'] / GB:,.1f} GB {mark}", "bold")


def _enough(say: Say, held: list[dict[str, float]]) -> str:
    """Tell from which stage on a device of 80 GB is enough."""
    enough = [zero for zero in STAGES if held[zero]["total"] <= DEVICE]
    if not enough:
        return say("No stage is enough: add ranks.", "哪个阶段都不够：要增加 rank。")
    if enough[0] == 0:
        return say("80 GB are enough without ZeRO.", "不用 ZeRO，80 GB 也够。")
    return say(
        f"80 GB are enough from stage {enough[0]} on.", f"从阶段 {enough[0]} 起，80 GB 够用。"
    )


def _less(say: Say, each: Each, ranks: int) -> str:
    """Tell which part of all a rank holds."""
    times = [f"{saving(each, zero=zero, ranks=ranks):.1f}" for zero in STAGES[1:]]
    parts = [f"1/{number.removesuffix('.0')}" for number in times]
    return say(
        f"Stages 1, 2 and 3 hold {parts[0]}, {parts[1]} and {parts[2]} of what a rank holds without "
        "ZeRO.",
        f"阶段 1、2、3 下，每个 rank 保存的分别是不用 ZeRO 时的 {'、'.join(parts)}。",
    )


def _not_counted(say: Say) -> str:
    return say(
        "Between steps. In a step activations come on top, and gradients and units in flight.",
        "这是两步之间的量。一步之中还要加上激活值，以及正在使用和传输的梯度和单元。",
    )
