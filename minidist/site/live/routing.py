"""Lesson 18: the routing of tokens to experts: what travels, what is dropped, who is busiest.

python -m minidist.site.live.routing 4 2 1.0 bias     # ranks, experts a token: a real step, measured
"""

import sys
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from minidist import lessons
from minidist.console import size_text
from minidist.grading import load_module
from minidist.launch import run
from minidist.nn import GPT
from minidist.nn.moe import Routing, mixtures
from minidist.nn.shares import even_slices
from minidist.optim import AdamW
from minidist.parallel.experts.expert_parallel import elements_sent
from minidist.site.live import Control, Live, Picture, Prediction, Say

lab = load_module(lessons.FOLDER / "18_experts" / "experiments.py", "18")
STEPS = 40  # of a training, as in the lesson's table
ITEM = 8
RANKS = (2, 4, 8)
TOP_K = (1, 2)
CAPACITIES = (1.0, 1.25, 1.5, 2.0, None)
STATES = ("start", "none", "loss", "bias")  # before training; STEPS later, with that balance
CELL = (17, 26)
LEFT = 70
TOP = 46
BARS = LEFT + lab.CONFIG.context * CELL[0] + 24
BAR = 1.4  # of a choice, on the picture


@dataclass(frozen=True)
class BatchCost:
    """What a batch costs on some ranks. Attributes: chosen, taken: of each expert; rows: that each
    rank's experts compute; away: rows whose expert is on another rank; nbytes: that all ranks send
    for these in a step."""

    chosen: list[int]
    taken: list[int]
    rows: list[int]
    away: int
    nbytes: int


@cache
def routed(state: str, top_k: int) -> dict[float | None, Routing]:
    """Return the routing of a batch with each of CAPACITIES; the model was trained without one."""
    return run(partial(_route_job, state=state, top_k=top_k), size=1)[0]


def _route_job(group: Any, state: str, top_k: int) -> dict[float | None, Routing]:
    model = _trained(group, state, top_k).strategy.model
    [layer] = mixtures(model)
    found = {}
    for capacity in CAPACITIES:
        layer.config = replace(layer.config, capacity=capacity)
        model.loss(*lab.global_batch(STEPS))
        assert layer.routing is not None
        found[capacity] = layer.routing
    return found


def _trained(group: Any, state: str, top_k: int) -> Any:
    """Return the lesson's mixture in a state: at the start all tokens prefer two experts."""
    balance = "none" if state == "start" else state
    mixture = lab.divided(group, lab.moe_config(balance, top_k=top_k))
    lab.tip(mixture.strategy.model)
    optimizer = AdamW(mixture.strategy.parameters, 0.005)
    for step in range(0 if state == "start" else STEPS):
        mixture.strategy.step(lab.global_batch(step), optimizer)
        mixture.load.settle()
    return mixture


def cost(routing: Routing, ranks: int) -> BatchCost:
    """Return what a batch costs whose sequences and experts are divided between ranks."""
    kept = routing.kept
    chosen = np.bincount(routing.chosen.ravel(), minlength=lab.EXPERTS)
    taken = np.bincount(routing.chosen[kept], minlength=lab.EXPERTS)
    rows = [int(taken[own].sum()) for own in even_slices(lab.EXPERTS, ranks)]
    home = _owners(len(kept), ranks)[:, None, None]
    away = int(((_owners(lab.EXPERTS, ranks)[routing.chosen] != home) & kept).sum())
    sent = elements_sent(GPT(lab.CONFIG), ranks=1, rows=away)  # on one rank: only that of the rows
    return BatchCost(chosen.tolist(), taken.tolist(), rows, away, ITEM * sent)


def _owners(count: int, ranks: int) -> np.ndarray:
    """Return the rank of each of `count` things."""
    shares = even_slices(count, ranks)
    return np.repeat(np.arange(ranks), [share.stop - share.start for share in shares])


def measured(ranks: int, top_k: int, capacity: float | None, state: str) -> BatchCost:
    """Return what a step costs on real ranks, as they and their ledgers count it."""
    job = partial(_step_job, top_k=top_k, capacity=capacity, state=state)
    found = run(job, size=ranks)
    load = found[0][0]
    given = np.sum([routed for _, routed, _ in found], axis=0)
    own = sum(int(routed[rank]) for rank, (_, routed, _) in enumerate(found))
    nbytes = sum(sent for _, _, sent in found)
    chosen, taken = load.tolist()
    return BatchCost(chosen, taken, given.tolist(), int(given.sum()) - own, nbytes)


def _step_job(group: Any, top_k: int, capacity: float | None, state: str) -> Any:
    mixture = _trained(group, state, top_k)
    [layer] = mixtures(mixture.strategy.model)
    layer.config = replace(layer.config, capacity=capacity)
    before = group.ledger.sent_bytes()["ep"]["all_to_all"] if state != "start" else 0
    optimizer = AdamW(mixture.strategy.parameters, 0.005)
    mixture.strategy.step(lab.global_batch(STEPS), optimizer)
    mixture.load.settle()
    sent = group.ledger.sent_bytes()["ep"]["all_to_all"] - before
    return mixture.load.step[0], mixture.load.routed[0], sent


def figure(say: Say) -> Live:
    """Return the figure in a language."""
    states = (
        say("before training: all prefer e0, e1", "训练前：都偏好 e0、e1"),
        say(f"after {STEPS} steps, no balancing", f"{STEPS} 步后，不做均衡"),
        say(f"after {STEPS} steps, balance loss", f"{STEPS} 步后，负载均衡损失"),
        say(f"after {STEPS} steps, biases", f"{STEPS} 步后，偏置"),
    )
    return Live(
        name="routing",
        lesson="18",
        section="4",
        title=say("Tokens, experts and ranks", "词元、专家和 rank"),
        predict=Prediction(
            say(
                "Each token takes two of eight experts, and all tokens prefer the same two. With "
                "capacity 1.0 an expert takes at most the even share of a sequence's choices. How "
                "many of the choices are dropped?",
                "每个词元选 8 个专家中的 2 个，所有词元都偏好同样的两个。专家容量为 1.0 时，一个"
                "专家最多接收一条序列的选择中均匀的一份。会丢弃多少选择？",
            ),
            (say("none", "不丢弃"), "25%", "50%", "75%"),
            3,
            say(
                "Three quarters: 16 tokens make 32 choices, the even share is 4, and only two "
                "experts get any, so they take 8 of 32.",
                "四分之三：16 个词元有 32 次选择，均匀的一份是 4 次；只有两个专家有人选，一共接收 "
                "32 次中的 8 次。",
            ),
        ),
        controls=(
            Control(say("balance", "负载均衡"), states),
            Control(
                say("capacity", "专家容量"),
                tuple(say("no limit", "没有上限") if c is None else str(c) for c in CAPACITIES),
            ),
            Control(say("experts a token (k)", "每个词元的专家数 (k)"), tuple(map(str, TOP_K))),
            Control(say("ranks (ep)", "rank 数 (ep)"), tuple(map(str, RANKS))),
        ),
        size=(620, TOP + lab.EXPERTS * CELL[1] + 36),
        picture=partial(_picture, say),
        start=(0, 4, 1, 1),
    )


def _picture(say: Say, state_at: int, capacity_at: int, k_at: int, ranks_at: int) -> Picture:
    ranks = RANKS[ranks_at]
    capacity = CAPACITIES[capacity_at]
    routing = routed(STATES[state_at], TOP_K[k_at])[capacity]
    counted = cost(routing, ranks)
    words = f"{ranks} {TOP_K[k_at]} {capacity or 'none'} {STATES[state_at]}"
    picture = Picture(f"python -m minidist.site.live.routing {words}")
    _draw_sequence(say, picture, routing, ranks)
    _draw_loads(say, picture, counted)
    y = TOP + lab.EXPERTS * CELL[1] + 12
    legend = (
        ("c0", "", say("stays on rank 0", "留在 rank 0")),
        ("c1", "", say("travels", "去别的 rank")),
        ("wrong", "×", say("dropped", "丢弃")),
    )
    for place, (color, text, told) in enumerate(legend):
        picture.box(LEFT + 130 * place, y, 16, 14, color, text)
        picture.text(LEFT + 22 + 130 * place, y + 12, told)
    picture.facts += _facts(say, routing, counted, capacity)
    return picture


def _draw_sequence(say: Say, picture: Picture, routing: Routing, ranks: int) -> None:
    """Draw which experts the tokens of the first sequence, on rank 0, chose."""
    owners = _owners(lab.EXPERTS, ranks)
    title = say("sequence 0, on rank 0: 16 tokens", "序列 0，在 rank 0 上：16 个词元")
    picture.text(LEFT, TOP - 12, title, "soft small")
    for expert, rank in enumerate(owners):
        y = TOP + expert * CELL[1]
        picture.text(LEFT - 10, y + 18, f"e{expert} · r{rank}", "end")
        if expert and rank != owners[expert - 1]:
            picture.line([(LEFT - 60, y), (600, y)])
    for token, experts in enumerate(routing.chosen[0]):
        for choice, expert in enumerate(experts):
            kept = routing.kept[0, token, choice]
            color = "wrong" if not kept else "c1" if owners[expert] else "c0"
            x = LEFT + token * CELL[0]
            y = TOP + int(expert) * CELL[1]
            picture.box(x + 1, y + 3, CELL[0] - 2, CELL[1] - 6, color, "" if kept else "×")


def _draw_loads(say: Say, picture: Picture, counted: BatchCost) -> None:
    """Draw the choices of the whole batch for each expert: taken, dropped."""
    title = say("all sequences: taken + dropped", "全部序列：接收 + 丢弃")
    picture.text(BARS, TOP - 12, title, "soft small")
    for expert, (chosen, taken) in enumerate(zip(counted.chosen, counted.taken, strict=True)):
        y = TOP + expert * CELL[1]
        dropped = chosen - taken
        if taken:
            picture.box(BARS, y + 5, BAR * taken, CELL[1] - 10, "c4")
        if dropped:
            picture.box(BARS + BAR * taken, y + 5, BAR * dropped, CELL[1] - 10, "wrong")
        told = f"{taken} + {dropped}" if dropped else str(taken)
        picture.text(BARS + BAR * chosen + 6, y + 18, told, "small")


def _facts(say: Say, routing: Routing, counted: BatchCost, capacity: float | None) -> list[str]:
    """Return the busiest expert and rank, what is dropped, and what travels."""
    choices = sum(counted.chosen)
    busiest = int(np.argmax(counted.chosen))
    share = counted.chosen[busiest] / choices
    mean = sum(counted.rows) / len(counted.rows)
    return [
        say(
            f"Busiest expert: e{busiest}, {share:.0%} of {choices} choices (even: "
            f"{1 / lab.EXPERTS:.1%}). Busiest rank: {max(counted.rows)} rows; the mean is {mean:.0f}.",
            f"最忙的专家：e{busiest}，占 {choices} 次选择的 {share:.0%}（均匀是 "
            f"{1 / lab.EXPERTS:.1%}）。最忙的 rank 算 {max(counted.rows)} 行，平均是 {mean:.0f} 行。",
        ),
        _dropped(say, routing, capacity),
        say(
            f"{counted.away} rows travel to another rank. A step's four all-to-alls, two forward "
            f"and two backward: {size_text(counted.nbytes)} over all ranks.",
            f"{counted.away} 行去别的 rank。一步四次全交换，前向两次，反向两次：所有 rank 合计 "
            f"{size_text(counted.nbytes)}。",
        ),
    ]


def _dropped(say: Say, routing: Routing, capacity: float | None) -> str:
    """Return how many choices are dropped, by which limit."""
    if capacity is None:
        return say("No limit: nothing is dropped.", "没有上限：不丢弃词元。")
    _, tokens, top_k = routing.chosen.shape
    limit = lab.moe_config(capacity=capacity, top_k=top_k).places(tokens)
    dropped = int((~routing.kept).sum())
    without = int((~routing.kept.any(axis=2)).sum())
    choices = routing.kept.size
    return say(
        f"An expert takes at most {limit} of a sequence's {top_k * tokens} choices. Dropped: "
        f"{dropped} of {choices}, {dropped / choices:.0%}; {without} of {choices // top_k} tokens "
        "have no expert left.",
        f"一条序列有 {top_k * tokens} 次选择，一个专家最多接收 {limit} 次。丢弃：{choices} 次中的 "
        f"{dropped} 次，{dropped / choices:.0%}；{choices // top_k} 个词元中有 {without} 个没有任何"
        "专家处理。",
    )


if __name__ == "__main__":
    of_ranks, of_k, limit, begun = sys.argv[1:]
    step = measured(int(of_ranks), int(of_k), None if limit == "none" else float(limit), begun)
    print("choices of each expert:", *step.chosen, "  taken:", *step.taken)
    print("rows of each rank:", *step.rows)
    print(f"{step.away} rows travel: {size_text(step.nbytes)} by all-to-all, all ranks")
