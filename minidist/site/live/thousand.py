"""Lesson 24: a large model on 1,024 GPUs: time and memory of a plan, by the planner's estimates."""

from functools import cache, partial
from typing import NamedTuple

import numpy as np

from minidist.plan.candidates import Candidates, candidates
from minidist.plan.estimate import MEMORY_SHARE, TERMS, Estimator
from minidist.plan.ranking import Choice, Ranking, command
from minidist.simulate.cluster import Cluster
from minidist.simulate.models import model
from minidist.site.live import Control, Live, Picture, Prediction, Say
from minidist.site.live.plane import Plane

MODELS = ("llama2-70b", "gpt3-175b")
CLUSTER = "h100:128x8"
BATCH = 1024  # sequences
STAGES = (1, 2, 4, 8, 16)  # pp
TENSOR = (1, 2, 4, 8)
ZERO = (0, 1, 3)
GIB = 1 << 30
CELL = (66, 26)
LEFT, TOP = 74, 40
SECONDS = Plane(118, 176, 470, 26, (0.0, 16.0), (0.0, 1.0))
MEMORY = Plane(118, 246, 470, 26, (0.0, 160.0), (0.0, 1.0))


class ModelCut(NamedTuple):
    """How the reader divides the model."""

    pp: int
    tp: int
    zero: int
    recompute: int


class PlanTable(NamedTuple):
    """The planner's estimates of all plans of a model that the sliders reach.

    Attributes: places: of each plan in the ranking; best: the fastest that fits.
    """

    ranking: Ranking
    places: dict[ModelCut, int]
    best: Choice

    def choice(self, cut: ModelCut) -> Choice:
        """Return a plan with its estimates."""
        return self.ranking.choice(self.places[cut])

    def seconds(self, cut: ModelCut) -> float:
        """Return the seconds of a step."""
        return float(self.ranking.estimates.step_seconds[self.places[cut]])

    def fits(self, cut: ModelCut) -> bool:
        """Return whether a plan fits into a GPU's memory."""
        return bool(self.ranking.estimates.fits[self.places[cut]])


@cache
def table_of(name: str) -> PlanTable:
    """Return the planner's estimates for a model: pp by 1F1B, one sequence a microbatch, sequence
    parallelism with tp, no offload."""
    config, cluster = model(name), Cluster.parse(CLUSTER)
    every = candidates(config, cluster, batch=BATCH, offload=False)
    kept = every.only(_reached(every))
    estimates = Estimator(config, cluster).of(kept)
    ranking = Ranking(config, cluster, BATCH, "time", estimates, np.arange(len(kept)), len(every))
    cuts = [ModelCut(*row) for row in kept.rows("pp", "tp", "zero", "recomputed").tolist()]
    fastest = int(np.where(estimates.fits, estimates.step_seconds, np.inf).argmin())
    places = {cut: place for place, cut in enumerate(cuts)}
    return PlanTable(ranking, places, ranking.choice(fastest))


def _reached(found: Candidates) -> np.ndarray:
    """Return a mask of the plans that the sliders reach."""
    fixed = {"cp": 1, "rows": 1, "schedule": 0, "order": 0, "shard": 0}
    masks = [found.column(name) == value for name, value in fixed.items()]
    masks += [np.isin(found.column("pp"), STAGES), np.isin(found.column("zero"), ZERO)]
    masks.append(found.column("sequence") == (found.column("tp") > 1))
    return np.asarray(np.all(masks, axis=0))


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    return Live(
        name="thousand",
        lesson="24",
        section="5",
        title=say("Your plan for 1,024 H100s", "给 1024 张 H100 定方案"),
        predict=Prediction(
            say(
                "175 billion weights, tp=8 in each node, pp=1, dp=128, on GPUs of 80 GB. Weights and "
                "gradients take 2 bytes each, master weights and Adam's moments 12. From which ZeRO "
                "stage on does this fit?",
                "1750 亿个权重，每个节点内 tp=8，pp=1，dp=128，每张 GPU 80 GB。权重和梯度各占 2 "
                "字节，主权重和 Adam 的两个矩占 12 字节。从 ZeRO 的哪个阶段起放得下？",
            ),
            (
                say("ZeRO-0: nothing is divided among the replicas", "ZeRO-0：副本之间什么都不分"),
                say("ZeRO-1: the optimizer's state is", "ZeRO-1：分优化器状态"),
                say("ZeRO-3: gradients and weights are, too", "ZeRO-3：梯度和权重也分"),
            ),
            2,
            say(
                "ZeRO-3. Under ZeRO-1 weights and gradients alone take 4 bytes × 175 billion / 8 = "
                "87 GB. A pipeline divides them as well: ZeRO-1 fits from pp=2 on, and is faster.",
                "ZeRO-3。用 ZeRO-1 时，光是权重和梯度就要 4 字节 × 1750 亿 / 8 = 87 GB。"
                "流水线也能分开它们：从 pp=2 起 ZeRO-1 就放得下，而且更快。",
            ),
        ),
        controls=(
            Control(say("model", "模型"), MODELS),
            Control("pp", tuple(map(str, STAGES))),
            Control("tp", tuple(map(str, TENSOR))),
            Control("ZeRO", tuple(map(str, ZERO))),
            Control(
                say("activations", "激活值"), (say("kept", "保存"), say("computed again", "重计算"))
            ),
        ),
        size=(620, 300),
        picture=partial(_picture, say),
        start=(1, 0, 3, 1, 0),
    )


def _picture(say: Say, model_at: int, pp: int, tp: int, zero: int, recompute: int) -> Picture:
    name = MODELS[model_at]
    found = table_of(name)
    cut = ModelCut(STAGES[pp], TENSOR[tp], ZERO[zero], recompute)
    choice = found.choice(cut)
    picture = Picture(command(choice, ["--model", name], found.ranking))
    _draw_table(picture, say, found, cut)
    limit = MEMORY_SHARE * found.ranking.cluster.device.memory_bytes / GIB
    seconds = {term: choice.seconds[term] for term in TERMS if term not in ("cp", "ep", "offload")}
    memory = {kind: held / GIB for kind, held in choice.memory.items()}
    _draw_parts(picture, SECONDS, say("a step, s", "一步，秒"), _named(say, seconds))
    _draw_parts(picture, MEMORY, say("memory, GiB", "显存，GiB"), _named(say, memory))
    edge = MEMORY.across(limit)
    picture.line([(edge, MEMORY.top - 6), (edge, MEMORY.bottom + 6)], "thick dashed")
    picture.text(edge, MEMORY.top - 10, f"{limit:.0f} GiB", "middle soft small")
    picture.facts = [
        say(
            f"{choice.text}: {choice.step_seconds:.2f} s a step, MFU "
            f"{found.ranking.mfu(choice):.1%}, as the planner estimates.",
            f"{choice.text}：按规划器的估计，一步 {choice.step_seconds:.2f} 秒，MFU "
            f"{found.ranking.mfu(choice):.1%}。",
        ),
        _fact_of_memory(say, choice.total / GIB, limit, found.fits(cut)),
        say(
            f"The best of these {len(found.places)} plans: {found.best.text}, "
            f"{found.best.step_seconds:.2f} s.",
            f"这 {len(found.places)} 个方案中最好的：{found.best.text}，"
            f"{found.best.step_seconds:.2f} 秒。",
        ),
        say(
            "The command replays the plan: of seven plans tried, none differed by 2 % in time.",
            "下面的命令重放这个方案：试过七个，用时相差都不到 2 %。",
        ),
    ]
    return picture


def _fact_of_memory(say: Say, total: float, limit: float, fits: bool) -> str:
    """Return what the fullest GPU holds, and whether it may."""
    return say(
        f"The fullest GPU holds {total:,.1f} GiB: "
        + ("it fits" if fits else "it does not fit")
        + f"; an estimate may fill {limit:.0f}.",
        f"最满的 GPU 占用 {total:,.1f} GiB，{'放得下' if fits else '放不下'}；"
        f"估计值最多可以占 {limit:.0f}。",
    )


def _draw_table(picture: Picture, say: Say, found: PlanTable, cut: ModelCut) -> None:
    """Draw the seconds of a step for each pp and tp, red where a plan does not fit."""
    for column, pp in enumerate(STAGES):
        picture.text(LEFT + (column + 0.5) * CELL[0], TOP - 8, f"pp={pp}", "middle soft")
    for row, tp in enumerate(TENSOR):
        y = TOP + row * CELL[1]
        picture.text(LEFT - 10, y + 18, f"tp={tp}", "end soft")
        for column, pp in enumerate(STAGES):
            other = cut._replace(pp=pp, tp=tp)
            x = LEFT + column * CELL[0]
            look = "right" if found.fits(other) else "wrong"
            seconds = f"{found.seconds(other):.2f} s"
            picture.box(x + 2, y + 2, CELL[0] - 4, CELL[1] - 4, look, seconds)
            if other == cut:
                picture.box(x + 1, y + 1, CELL[0] - 2, CELL[1] - 2, "edge")
    x = LEFT + len(STAGES) * CELL[0] + 14
    for row, (look, words) in enumerate(
        (
            ("right", say("a step; it fits", "一步的用时；放得下")),
            ("wrong", say("it does not", "放不下")),
        )
    ):
        picture.box(x, TOP + row * CELL[1] + 7, 11, 11, look)
        picture.text(x + 18, TOP + row * CELL[1] + 17, words, "small")


def _named(say: Say, parts: dict[str, float]) -> list[tuple[str, str, float]]:
    """Return the parts of a bar: colour, words of a language, and length."""
    words = {
        "compute": say("compute", "计算"),
        "recompute": say("recompute", "重计算"),
        "update": say("update", "更新"),
        "bubble": say("bubble", "气泡"),
        "host": say("host", "主机"),
        "parameters": say("weights", "权重"),
        "gradients": say("gradients", "梯度"),
        "optimizer": say("optimizer", "优化器"),
        "communication": say("communication", "通信"),
        "activations": say("activations", "激活值"),
    }
    return [
        (f"c{at % 8}", words.get(name, name), part) for at, (name, part) in enumerate(parts.items())
    ]


def _draw_parts(
    picture: Picture, plane: Plane, words: str, parts: list[tuple[str, str, float]]
) -> None:
    """Draw a bar of parts, cut off at the end of its axis, and which colour is which part."""
    high = plane.x[1]
    picture.text(plane.left - 8, plane.top + 18, words, "end")
    before, legend = 0.0, plane.left
    for look, name, part in parts:
        x, end = plane.across(before), plane.across(before + part)
        before += part
        if end - x >= 0.5:
            picture.box(x, plane.top, end - x, plane.height, look)
        if part < high / 200:  # too short to be seen
            continue
        picture.box(legend, plane.bottom + 9, 10, 10, look)
        picture.text(legend + 14, plane.bottom + 18, name, "small")
        legend += 26 + sum(12 if letter > "\u2fff" else 7 for letter in name)
    if before > high:
        picture.text(plane.left + plane.width + 4, plane.top + 18, "…")
