"""Run what lesson 18 and its figure share: a small mixture, tokens (some are common), and
training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from minidist.comm.group import Group
from minidist.device.backend import random_bits
from minidist.nn import GPT, DropoutKey, GPTConfig, MixtureConfig, mixture
from minidist.nn.moe import mixtures
from minidist.optim import AdamW
from minidist.parallel.experts.expert_load import ExpertLoad
from minidist.parallel.experts.expert_parallel import ExpertParallel
from minidist.parallel.hybrid.hybrid_step import Hybrid
from minidist.parallel.hybrid.mesh import Mesh
from minidist.parallel.hybrid.parallelize import compose
from minidist.parallel.hybrid.plan import Plan

EXPERTS = 8
SEQUENCES = 8
SEED = 0
CONFIG = GPTConfig(vocabulary=32, context=16, layers=1, width=16, heads=2, dtype="float64")
BALANCES = {"none": "no balancing", "loss": "balance loss", "bias": "biases"}


def moe_config(balance: str = "loss", **changes: Any) -> MixtureConfig:
    """Return a mixture of eight experts, two per token; its biases move fast enough for a short
    run."""
    return MixtureConfig(
        **{
            "experts": EXPERTS,
            "top_k": 2,
            "balance": balance,
            "bias_rate": 0.02,
            "balance_weight": 0.05,
            **changes,
        }
    )


def global_batch(step: int, sequences: int = SEQUENCES) -> tuple[np.ndarray, np.ndarray]:
    """Return (inputs, targets), by step only: small ids are common, and the next id mostly follows
    from the last."""
    count = sequences * (CONFIG.context + 1)
    chance = (
        random_bits(f"lesson 18, step {step}", 0, range(2 * count)).astype(np.float64) / 2.0**64
    )
    fresh = (CONFIG.vocabulary * chance[:count] ** 3).astype(np.int64).reshape(sequences, -1)
    follows = chance[count:].reshape(sequences, -1) < 0.7
    ids = fresh.copy()
    for place in range(1, ids.shape[1]):
        ids[:, place] = np.where(
            follows[:, place], (ids[:, place - 1] * 5 + 3) % CONFIG.vocabulary, fresh[:, place]
        )
    return np.array(ids[:, :-1]), np.array(ids[:, 1:])


@dataclass
class Run:
    """A trained mixture and what was seen on the way: loads (steps, layers, 2, experts), losses
    without balance."""

    strategy: Hybrid
    load: ExpertLoad
    loads: np.ndarray
    losses: list[float]
    sent: dict[str, dict[str, int]]
    rows: int


class Divided(NamedTuple):
    """A mixture whose experts are divided: its strategy, the experts' loads, and their ranks."""

    strategy: Hybrid
    load: ExpertLoad
    ranks: Group


def divided(
    group: Group, config: MixtureConfig, *, once_a_node: bool = True, **options: Any
) -> Divided:
    """Return a mixture as a Trainer with the plan ep=P divides it."""
    model = mixture(GPT(CONFIG), config)
    mesh = Mesh(group, ep=group.size)
    axis = ExpertParallel(model, mesh["ep"], sharers=mesh.experts, once_a_node=once_a_node)
    strategy = compose(model, mesh, Plan(ep=group.size), [axis], seed=SEED, **options)
    return Divided(strategy, ExpertLoad(model, mesh.copies), mesh["ep"])


def train(
    group: Group,
    config: MixtureConfig,
    steps: int,
    *,
    lr: float = 0.005,
    key: Any = None,
    lopsided: bool = False,
) -> Run:
    """Train on the ranks of `group`.

    Args:    key: key(step, part) may say what noise depends on.
             lopsided: whether all tokens begin by liking the same two experts.
    """
    state = {"step": 0}

    def of_part(part: Any) -> DropoutKey:
        if key is not None:
            return key(state["step"], part)
        return DropoutKey.of_sequences(SEED, state["step"], part.first, *part.inputs.shape)

    trained = divided(group, config, key=of_part)
    strategy = trained.strategy
    load = trained.load
    if lopsided:
        tip(strategy.model)
    optimizer = AdamW(strategy.parameters, lr)
    loads = []
    losses = []
    rows = 0
    before = sent_by_verb(group)
    for step in range(steps):
        state["step"] = step
        losses.append(strategy.step(global_batch(step), optimizer))
        load.settle()
        loads.append(load.step.copy())
        rows += int(load.routed.sum() - load.routed[:, trained.ranks.rank].sum())
    after = sent_by_verb(group)
    sent = {
        axis: {verb: count - before.get(axis, {}).get(verb, 0) for verb, count in verbs.items()}
        for axis, verbs in after.items()
    }
    return Run(strategy, load, np.stack(loads), losses, sent, rows)


@dataclass
class OnNodes:
    """Results of experts on several nodes; all but the losses are per step and of
    all ranks together.

    Attributes: far: bytes of experts' rows and gradients that went between nodes; formula: the same by
                formula.
                tokens: rows of a token, or copies, that left their node, per token and layer.
                order: the placement that the choices suggest (MixtureConfig.placement), None on one
                node.
    """

    losses: list[float]
    far: float
    formula: float
    tokens: float
    order: tuple[tuple[int, ...], ...] | None


def two_texts(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of two texts with different ids: the first half of the sequences, and so of
    the ranks, has the even ids."""
    inputs, targets = global_batch(step)
    second = np.arange(SEQUENCES)[:, None] >= SEQUENCES // 2
    return tuple(np.asarray(ids // 2 * 2 + second) for ids in (inputs, targets))  # type: ignore[return-value]


def experts_on_nodes(ranks: int, top_k: int) -> int:
    """Return the number of experts, EXPERTS or a multiple, such that each half of the ranks holds
    at least `top_k`."""
    experts = EXPERTS
    while True:
        own = [len(part) for part in np.array_split(np.arange(experts), ranks)]
        if sum(own[(ranks + 1) // 2 :]) >= top_k:
            return experts
        experts += EXPERTS


def train_on_nodes(
    group: Group, config: MixtureConfig, steps: int, *, once_a_node: bool = True
) -> OnNodes:
    """Train on two texts; the second half of the ranks counts as another node."""
    nodes = group.nodes
    group.nodes = tuple(2 * rank // group.size for rank in range(group.size))
    trained = divided(group, config, once_a_node=once_a_node)
    strategy = trained.strategy
    load = trained.load
    here = trained.ranks.nodes
    group.nodes = nodes
    optimizer = AdamW(strategy.parameters, 0.005)
    losses = []
    away = 0
    before = _far(group, here)
    for step in range(steps):
        losses.append(strategy.step(two_texts(step), optimizer))
        load.settle()
        others = [rank for rank in range(group.size) if here[rank] != here[group.rank]]
        away += int(load.copies.sum() if once_a_node else load.routed[:, others].sum())
    far, away = summed(group, [_far(group, here) - before, away]).tolist()
    each = 4 * CONFIG.width + (2 * config.top_k if once_a_node else 0)
    found = load.placed(group.split(group.rank))
    return OnNodes(
        losses,
        far / steps,
        away * each * 8 / steps,
        away / (steps * SEQUENCES * CONFIG.context),
        found and tuple(tuple(layer) for layer in found[0].tolist()),
    )


def _far(group: Group, nodes: Sequence[int]) -> int:
    """Return the bytes that this rank has sent to ranks of other nodes for experts."""
    return sum(
        axes.get("ep", 0)
        for rank, axes in group.ledger.sent_to().items()
        if nodes[group.world_ranks.index(rank)] != nodes[group.rank]
    )


def tip(model: GPT) -> None:
    """Give all tokens something in common, and let every gate's first two experts like it."""
    common = np.where(np.arange(CONFIG.width) % 2, 1.0, -1.0)
    model.tokens.weight.data[...] += 0.1 * common
    for layer in mixtures(model):
        layer.scores.weight.data[:, :2] += 0.2 * common[:, None]


def sent_by_verb(group: Group) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank has sent so far, by axis and verb."""
    counted: dict[str, dict[str, int]] = {}
    for row in group.ledger.rows():
        verbs = counted.setdefault(row["axis"], {})
        verbs[row["verb"]] = verbs.get(row["verb"], 0) + row["nbytes"]
    return counted


def shares(loads: np.ndarray) -> np.ndarray:
    """Return each expert's share of the first layer's choices, by step: (steps, experts)."""
    chosen = loads[:, 0, 0].astype(float)
    return np.asarray(chosen / chosen.sum(axis=1, keepdims=True))


def summed(group: Group, values: Any) -> np.ndarray:
    """Return the sum over the ranks, not counted as training."""
    with group.ledger.control():
        return np.asarray(group.all_reduce(np.array(values)))
