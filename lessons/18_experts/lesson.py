"""Lesson 18: mixture of experts: where tokens go, balance, equal weights, traffic and memory.

mpirun -n 4 python lessons/18_experts/lesson.py
python lessons/18_experts/lesson.py                       # no launcher: four threads
python lessons/18_experts/lesson.py --break no-balance    # see README.md, section 7
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.console import size_text
from minidist.grading import load_module
from minidist.lessons.lab import state_difference
from minidist.lessons.page import Page, verdict
from minidist.lessons.running import Break, arguments, run_lesson
from minidist.nn import GPT, DropoutKey, mixture
from minidist.nn.moe import loads, rebalance
from minidist.nn.weight_shard import WeightShard
from minidist.optim import AdamW
from minidist.parallel.experts.expert_parallel import elements_sent, plain_experts
from minidist.parallel.experts.split_experts import SplitExperts
from minidist.parallel.step.single import Single

lab = load_module(Path(__file__).resolve().with_name("experiments.py"), "18")
STEPS = 3
LONG = 40
NODE_STEPS = 20
ITEM = 8


def tour(group: Group, page: Page) -> None:
    """Run the lesson on every rank."""
    page.heading("1  The same as one process")
    equal(group, page)
    page.heading("2  Which token goes where")
    matrix(group, page)
    page.heading("4  Load, balanced and not")
    balance(group, page)
    page.heading("5  What it costs: traffic and memory")
    traffic(group, page)
    memory(group, page)
    if group.size > 1:
        page.heading("5.1  Between nodes: two nodes")
        two_nodes(group, page)


# --------------------------------------------------------------------------------------- 1 equality


def plain_loop(group: Group) -> float:
    """Return the largest difference between the plain loop's rows and one process's."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 16))
    weight = rng.random(40)
    chosen = rng.integers(0, group.size, 40)
    experts = rng.normal(size=(group.size, 16, 16))
    right = np.einsum("nh,nhk->nk", x, experts[chosen]) * weight[:, None]
    mine = np.array_split(np.arange(40), group.size)[group.rank]
    y = plain_experts(
        x[mine], chosen[mine], weight[mine], lambda rows: rows @ experts[group.rank], group
    )
    return float(
        group.all_reduce(np.array([np.abs(y - right[mine]).max(initial=0.0)]), op="max")[0]
    )


def alone(config: Any) -> dict[str, np.ndarray]:
    """Return the weights that one process trains."""
    model = mixture(GPT(lab.CONFIG), config)
    model.initialize(lab.SEED)
    state = {"step": 0}

    def loss(part: Any, divisor: int) -> Any:
        key = DropoutKey.of_sequences(lab.SEED, state["step"], part.first, *part.inputs.shape)
        return model.loss(part.inputs, part.targets, divisor, key=key)

    single = Single(model, loss=loss)
    optimizer = AdamW(single.parameters, 0.005)
    for step in range(STEPS):
        state["step"] = step
        single.step(lab.global_batch(step), optimizer)
        rebalance(model, loads(model))
    return single.state_dict()


def equal(group: Group, page: Page) -> None:
    """Compare with one process: the plain loop's rows, then weights after some steps of each kind
    of routing."""
    rows = [["plain loop", "one forward", f"{plain_loop(group):.0e}"]]
    kinds: dict[str, dict[str, Any]] = {
        "dropless, balance loss": {},
        "capacity 1.0, biases, a shared expert": {"capacity": 1.0, "balance": "bias", "shared": 1},
        "one expert a token, noise": {"top_k": 1, "noise": 0.1},
    }
    for name, changes in kinds.items():
        config = lab.moe_config(**changes)
        run = lab.train(group, config, STEPS)
        rows.append(
            [
                name,
                f"{STEPS} steps",
                f"{state_difference(run.strategy.state_dict(), alone(config)):.0e}",
            ]
        )
    page.table(
        f"Off one process by, in float64: {lab.EXPERTS} experts on {group.size} ranks",
        ["", "after", "largest difference"],
        rows,
    )


# ------------------------------------------------------------------------------------- 2, 3 routing


def matrix(group: Group, page: Page) -> None:
    """Show the rows from each rank to each expert in the first step."""
    run = lab.train(group, lab.moe_config(), 1)
    layer = run.load.layers[0]
    mine = np.bincount(layer.routing.chosen.reshape(-1), minlength=lab.EXPERTS)
    with group.ledger.control():
        counts = group.all_gather(mine).reshape(group.size, -1)
        sent = group.all_gather(run.load.routed[0]).reshape(group.size, -1)
    owners = [
        rank for rank, part in enumerate(layer.experts.own) for _ in range(part.stop - part.start)
    ]
    page.table(
        "Step 0: tokens of each rank that chose each expert",
        ["tokens of", *(f"e{e} (r{owner})" for e, owner in enumerate(owners))],
        [[f"rank {rank}", *row.tolist()] for rank, row in enumerate(counts)],
        note="rows that travel: all but those of a rank's own experts, "
        f"{sent.sum() - np.trace(sent)} of {sent.sum()}",
    )


def balance(group: Group, page: Page) -> None:
    """Show the share of the busiest and of the idlest expert, from a start where all tokens prefer
    the same two.

    The model is the same on any number of ranks; so each of the three runs is made by one rank, at
    the same time as the others.
    """
    rows = []
    alone = group.split(group.rank)
    seen = np.zeros((len(lab.BALANCES), LONG, lab.EXPERTS))
    for place, name in enumerate(lab.BALANCES):
        if place % group.size == group.rank:
            seen[place] = lab.shares(
                lab.train(alone, lab.moe_config(name), LONG, lopsided=True).loads
            )
    for title, shares in zip(lab.BALANCES.values(), lab.summed(group, seen), strict=True):
        late = shares[-10:].mean(axis=0)
        rows.append(
            [
                title,
                *(f"{shares[step].max():.0%}" for step in (0, LONG // 2, LONG - 1)),
                f"{late.max():.0%}",
                f"{late.min():.0%}",
            ]
        )
    page.table(
        f"Share of tokens: the busiest of {lab.EXPERTS} experts (even: {1 / lab.EXPERTS:.1%})",
        [
            "",
            "step 1",
            f"step {LONG // 2 + 1}",
            f"step {LONG}",
            "busiest, last 10",
            "idlest, last 10",
        ],
        rows,
        note="two experts a token: 50 % is as much as one can have; last 10: the mean of the last 10 "
        "steps",
    )


# ------------------------------------------------------------------------------ 4 traffic, 5 memory


def traffic(group: Group, page: Page) -> None:
    """Compare the bytes by verb over all ranks with the formulas."""
    run = lab.train(group, lab.moe_config(capacity=1.0), STEPS)

    def measured(axis: str, verb: str) -> int:
        return int(lab.summed(group, [run.sent.get(axis, {}).get(verb, 0)])[0])

    far = int(lab.summed(group, [run.rows])[0])
    layers = lab.CONFIG.layers
    size = group.size
    dense = elements_sent(run.strategy.model, ranks=size, rows=0)
    rows = []
    for name, formula, seen, expected in (
        (
            "routed tokens",
            "4 R h",
            measured("ep", "all_to_all"),
            4 * far * lab.CONFIG.width * ITEM,
        ),
        ("dense gradients", "2(P-1) n", measured("dp,ep", "all_reduce"), STEPS * dense * ITEM),
        (
            "counts",
            "(P-1) E L",
            measured("control", "all_to_all"),
            STEPS * (size - 1) * lab.EXPERTS * layers * ITEM,
        ),
        (
            "loads",
            "2(P-1) 2 E L",
            measured("control", "all_reduce"),
            STEPS * 2 * (size - 1) * 2 * lab.EXPERTS * layers * ITEM,
        ),
    ):
        rows.append([name, size_text(seen), formula, size_text(expected), verdict(seen, expected)])
    taken = run.loads[:, 0].sum(axis=(0, 2))
    page.table(
        f"{STEPS} steps, {size} ranks together; R = {far} rows to experts elsewhere",
        ["", "measured", "formula", "", ""],
        rows,
        note=f"capacity 1.0: of {taken[0]} choices {taken[0] - taken[1]} were dropped, and did "
        "not travel",
    )


def memory(group: Group, page: Page) -> None:
    """Compare the number of a rank's weights with the whole model's."""
    model = lab.train(group, lab.moe_config(), 1).strategy.model
    own = sum(p.size for p in model.parameters() if isinstance(p, WeightShard))
    whole = sum(int(np.prod(p.whole)) for p in model.parameters() if isinstance(p, WeightShard))
    dense = sum(p.size for p in model.parameters()) - own
    used = whole // lab.EXPERTS * lab.moe_config().top_k
    page.table(
        "Weights",
        ["", "whole model", "a rank (rank 0)", "used on a token"],
        [
            ["experts", f"{whole:,}", f"{own:,}", f"{used:,}"],
            ["the rest", f"{dense:,}", f"{dense:,}", f"{dense:,}"],
        ],
        note="experts are divided, with their gradients and optimizer state; the rest is a "
        "replica's",
    )


def two_nodes(group: Group, page: Page) -> None:
    """Compare bytes between nodes and the loss: each row sent separately, once per node, placed by
    choices, limited to one node.

    Half of the ranks count as another node; the two halves have sequences of two texts.
    """
    experts = lab.experts_on_nodes(group.size, top_k=4)
    config = lab.moe_config("bias", experts=experts, top_k=4, bias_rate=0.01)
    flat = lab.train_on_nodes(group, config, NODE_STEPS, once_a_node=False)
    once = lab.train_on_nodes(group, config, NODE_STEPS)
    runs = {
        "every row for itself": flat,
        "a token once a node": once,
        "and experts placed by its choices": lab.train_on_nodes(
            group, replace(config, placement=once.order), NODE_STEPS
        ),
        "and experts of one node only": lab.train_on_nodes(
            group, replace(config, node_limit=1), NODE_STEPS
        ),
    }
    page.table(
        f"What leaves a node, of 2 nodes with {group.size} ranks; {experts} experts, 4 a token; "
        f"{NODE_STEPS} steps",
        ["", "rows a token", "bytes a step", "formula", "", "loss, last 5"],
        [
            [
                name,
                f"{run.tokens:.2f}",
                size_text(round(run.far)),
                size_text(round(run.formula)),
                verdict(run.far, run.formula),
                f"{np.mean(run.losses[-5:]):.4f}",
            ]
            for name, run in runs.items()
        ],
        note="formula: 4 h a row, (4 h + 2 k) a copy that takes its weights along",
    )


# ----------------------------------------------------------------------------------------- Break it


def no_capacity() -> None:
    """Compare a popular expert with capacity and without: its rank computes at most its places, or
    everything that arrives."""

    def busiest(group: Group, capacity: float | None) -> tuple[int, int]:
        run = lab.train(group, lab.moe_config("none", capacity=capacity), 1, lopsided=True)
        taken = run.loads[0, 0, 1]
        own = run.load.layers[0].experts.own
        return max(int(taken[part].sum()) for part in own), int(
            run.loads[0, 0, 0].sum() - taken.sum()
        )

    for capacity in (1.0, None):
        rows, dropped = md.run(busiest, capacity, size=4)[0]
        total = lab.SEQUENCES * lab.CONFIG.context * 2
        print(
            f"capacity {capacity or 'unlimited'}: the busiest of 4 ranks computes {rows} rows of "
            f"{total} ({rows / total * 4:.1f} times its even share); {dropped} dropped  "
            f"{'#' * (rows // 4)}"
        )


def no_balance() -> None:
    """Train without balance: an expert that starts with all tokens keeps them."""
    for name in ("none", "loss"):
        run = md.run(
            lambda group, name=name: lab.train(group, lab.moe_config(name), LONG, lopsided=True),
            size=1,
        )[0]
        shares = lab.shares(run.loads)
        print(f"{lab.BALANCES[name]}:")
        for step in (0, LONG // 4, LONG // 2, LONG - 1):
            print(
                f"  step {step + 1:2d}: shares "
                f"{' '.join(f'{share:4.0%}' for share in np.sort(shares[step])[::-1])}"
            )
    print(f"expected of balance: {1 / lab.EXPERTS:.1%} each")


def counts_forgotten() -> None:
    """Let the receiver guess how many of the rows are for each expert: equally many."""
    right = SplitExperts._exchange_counts

    def guess(self: SplitExperts, counts: Any) -> np.ndarray:
        came = right(self, counts)
        each = [np.diff(np.linspace(0, rows.sum(), len(rows) + 1).astype(int)) for rows in came]
        return np.stack(each)

    def train(group: Group) -> dict[str, np.ndarray]:
        return dict(lab.train(group, lab.moe_config(), STEPS).strategy.state_dict())

    target = md.run(train, size=4)[0]
    try:
        SplitExperts._exchange_counts = guess  # type: ignore[method-assign]
        wrong = md.run(train, size=4)[0]
    finally:
        SplitExperts._exchange_counts = right  # type: ignore[method-assign]
    print(
        f"all rows arrive and nothing hangs, but many meet another expert: after {STEPS} steps "
        f"the weights are off by {state_difference(wrong, target):.0%} of the largest, expected 0%"
    )


def local_noise() -> None:
    """Draw noise by the token's number on its rank: every number of ranks trains another model."""

    def train(group: Group, local: bool) -> dict[str, np.ndarray]:
        key = (
            (lambda step, part: DropoutKey.of_sequences(lab.SEED, step, 0, *part.inputs.shape))
            if local
            else None
        )
        return dict(
            lab.train(group, lab.moe_config(noise=0.2), STEPS, key=key).strategy.state_dict()
        )

    for local in (False, True):
        one, *others = (md.run(train, local, size=size)[0] for size in (1, 2, 4))
        print(
            f"noise by {'local' if local else 'global'} token: 2 ranks off one by "
            f"{state_difference(others[0], one):.0e}, 4 ranks by {state_difference(others[1], one):.0e}"
        )
    print("expected: about 1e-14, rounding only")


BREAKS = {
    "no-capacity": Break(
        no_capacity,
        says="capacity unlimited: the busiest of 4 ranks computes 256 rows of 256",
    ),
    "no-balance": Break(no_balance, says="step 11: shares  50%  50%   0%"),
    "counts-forgotten": Break(counts_forgotten, says="the weights are off by 3%"),
    "local-noise": Break(local_noise, says="noise by local token: 2 ranks off one by 3e-02"),
}


if __name__ == "__main__":
    run_lesson(arguments(__doc__, BREAKS).parse_args(), tour, BREAKS, alone=4)
