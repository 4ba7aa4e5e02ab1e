"""A rank that runs alone does what it does among the others: the same traffic to the byte, the same
memory."""

import math
import os
import random
import socket
import subprocess
import threading
from dataclasses import replace
from typing import Any

import fake_gpu
import numpy as np
import pytest
from simulated import Measured, alone, one_order, really, sent_of

from minidist.comm.collectives.select import ALGORITHMS
from minidist.errors import ConfigError, MinidistError, PlanError
from minidist.nn import GPTConfig, RopeScaling
from minidist.nn.attention_pattern import pattern_blocks
from minidist.nn.config import MixtureConfig
from minidist.observe.events import Await, Busy, GroupCall, Memory, Start, Transfer
from minidist.parallel.hybrid.plan import Plan
from minidist.simulate.one_rank import run_rank
from minidist.simulate.trace import RankTrace

SMALL: dict[str, Any] = {"vocabulary": 48, "context": 16, "layers": 2, "width": 16, "heads": 4}
SCHEDULES = ("naive", "1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
CALM = 0.001
"""The issue's bound of memory: 0.1 %."""


def close(found: Measured, trace: RankTrace) -> None:
    """Hold a rank's trace against its real run."""
    assert sent_of(trace.ledger) == found.sent
    assert trace.host_peak == found.host
    assert trace.lanes == found.moved
    for category, nbytes in found.peak.items():
        assert trace.peak[category] == pytest.approx(nbytes, rel=CALM), category


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (
            Plan(dp=2, zero=1, offload="optimizer", precision="bf16"),
            {
                "kv_heads": 2,
                "positions": "rotary",
                "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32),
            },
        ),
        (Plan(dp=2, zero=3, offload="all", precision="bf16", accumulate=2), {}),
        (
            Plan(pp=2, tp=2, sequence_parallel=True, checkpoint_blocks="all"),
            {"norm": "rms", "activation": "silu"},
        ),
        (Plan(dp=2, tp=2, zero=3, shard=1, offload="all", sequence_parallel=True), {"tied": True}),
        (Plan(pp=2, tp=2, offload="optimizer", precision="bf16"), {}),
        (Plan(tp=2, checkpoint_blocks="all", keep_activations="8bit,shard,offload"), {}),
        (Plan(dp=2, cp=2, zero=3, accumulate=2, precision="fp16"), {"tied": True, "context": 13}),
        (Plan(ep=2, pp=2, schedule="zb-h1"), {"mixture": MixtureConfig(experts=4)}),
        (Plan(cp=3, ep=2), {"mixture": MixtureConfig(experts=4)}),  # 5, 6 and 5 tokens of 16
        (
            Plan(cp=3, checkpoint_blocks="all"),
            {"context": 400, "attention_pattern": "local:128+global:1", "kv_heads": 2},
        ),
        (
            Plan(cp=2, tp=2, attention="all-to-all"),
            {"context": 200, "attention_pattern": "strided:128"},
        ),
    ],
    ids=lambda value: (
        " ".join(f"{axis}{size}" for axis, size in value.axes.items() if size > 1)
        if isinstance(value, Plan)
        else ""
    ),
)
def test_a_rank_alone_sends_and_holds_what_it_does_among_others(
    plan: Plan, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one_order(monkeypatch)
    config = GPTConfig(**(SMALL | options))
    for rank, found in enumerate(really(plan, config, 8)):
        close(found, alone(plan, config, 8, rank))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan(), {}),
        (Plan(checkpoint_blocks="all", accumulate=2), {}),
        pytest.param(
            Plan(precision="bf16"),
            {"context": 100, "heads": 1, "attention_pattern": "local:64"},
            marks=pytest.mark.soak,
        ),  # the attention kernel, thread by thread on the CPU
    ],
    ids=["whole", "again", "pattern"],
)
def test_a_gpu_holds_what_its_stand_in_holds(plan: Plan, options: dict[str, Any]) -> None:
    """Where kernels run, other arrays are kept for backward than on the host."""
    config = GPTConfig(**(SMALL | {"layers": 1} | options))
    with pytest.MonkeyPatch.context() as gpu:
        one_order(gpu)
        fake_gpu.install(gpu)
        found = really(plan, config, 2, device="cuda")
    trace = alone(plan, config, 2, 0, device_kind="gpu")
    assert trace.peak == found[0].peak


def drawn_case(seed: int) -> tuple[Plan, GPTConfig, int]:
    """A random plan of all axes, the model and the rows."""
    draw = random.Random(seed)
    while True:
        sizes = {
            axis: draw.choice((1, 1, 1, 2) if axis == "ep" else (1, 1, 2, 2, 3))
            for axis in ("dp", "pp", "ep", "cp", "tp")
        }
        options: dict[str, Any] = {
            "zero": draw.randrange(4),
            "shard": draw.choice((None, None, 2)),
            "accumulate": draw.choice((1, 2)),
            "precision": draw.choice(("fp32", "bf16", "fp16")),
            "offload": draw.choice(("none", "optimizer", "all")),
            "checkpoint_blocks": draw.choice(("none", "all", "scores")),
            "bucket_bytes": draw.choice((2 << 20, 4096)),
            "schedule": draw.choice(SCHEDULES) if sizes["pp"] > 1 else "1f1b",
            "microbatches": draw.choice((None, 2)) if sizes["pp"] > 1 else None,
            "attention": draw.choice(("ring", "all-to-all")) if sizes["cp"] > 1 else "ring",
            "sequence_parallel": sizes["tp"] > 1 and draw.random() < 0.5,
        }
        options["keep_gathered"] = options["zero"] == 3 and draw.random() < 0.3
        model = {
            "width": 32,
            "layers": draw.choice((3, 4)),
            "kv_heads": draw.choice((None, 2)),
            "positions": draw.choice(("learned", "rotary")),
            "norm": draw.choice(("layer", "rms")),
            "activation": draw.choice(("gelu", "silu")),
            "tied": draw.random() < 0.5,
            "mixture": MixtureConfig(experts=4) if sizes["ep"] > 1 else None,
        }
        try:
            plan = Plan(**sizes, **options)
            config = GPTConfig(**(SMALL | model))
            plan.require_model(config)
            if plan.attention == "all-to-all" and config.heads % (plan.tp * plan.cp):
                continue
        except MinidistError:
            continue
        if 1 < plan.size <= 8:
            return plan, config, 4 * plan.dp * plan.ep * plan.accumulate if sizes["ep"] > 1 else 9


@pytest.mark.sampled
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "algorithm", sorted(set(ALGORITHMS["all_reduce"]) - {"native", "shared", "hierarchical"})
)
def test_every_algorithm_is_counted_as_it_sends(
    algorithm: str, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of arrays on a GPU, whose calls are a library's in the events."""
    one_order(monkeypatch)
    try:
        plan = Plan(dp=3, zero=zero, algorithm=algorithm)
    except PlanError:  # not for the verbs of ZeRO
        plan = Plan(dp=3, algorithm=algorithm)
    config = GPTConfig(**SMALL)
    for rank, found in enumerate(really(plan, config, 9)):
        trace = alone(plan, config, 9, rank)
        close(found, trace)
        on_gpu = run_rank(plan, config, rank, rows=9, device_kind="gpu")
        assert sent_of(on_gpu.ledger) == sent_of(trace.ledger)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(30))
def test_random_plans_are_exact(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one_order(monkeypatch)
    plan, config, rows = drawn_case(seed)
    for rank, found in enumerate(really(plan, config, rows)):
        close(found, alone(plan, config, rows, rank))


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (Plan(strategy="data-parallel", replicas=2), "strategy=ddp with dp="),
        (Plan(dp=3, strategy="parameter-server", asynchronous=True), "which worker arrives first"),
        (Plan(dp=3, strategy="parameter-server", server_device="cpu"), "server_device=same"),
        (Plan(dp=2, local_steps=25), "simulate the step of ddp without"),
        (Plan(pp=2, stage_layers="measured"), "use even"),
        (Plan(cp=3, attention="all-to-all"), "or ring"),
        (Plan(dp=2, activation_memory=1 << 20), "name them: checkpoint_blocks"),
        (Plan(dp=2, algorithm="shared"), "algorithm=ring"),
        (Plan(dp=2, zero=3, algorithm="hierarchical"), "algorithm=ring"),
    ],
)
def test_what_a_rank_alone_cannot_know_is_said(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        run_rank(plan, GPTConfig(**SMALL), rows=8)


def test_a_limit_of_nodes_is_refused() -> None:
    config = GPTConfig(**SMALL, mixture=MixtureConfig(experts=4, nodes=2, node_limit=1))
    with pytest.raises(PlanError, match="node_limit=1.*leave the limit out"):
        run_rank(Plan(ep=2), config, rows=8)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose gpu or cpu"):
        run_rank(Plan(), GPTConfig(**SMALL), rows=8, device_kind="abacus")


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_a_trace_is_complete(kind: str) -> None:
    """Every call is waited for or is a send; memory's changes add up to what is left; products are
    counted exactly."""
    config = GPTConfig(**SMALL)
    trace = run_rank(Plan(dp=2, tp=2, zero=2), config, 1, rows=8, device_kind=kind)
    started = {event.id: event.call for event in trace.events if isinstance(event, Start)}
    waited = {event.id for event in trace.events if isinstance(event, Await)}
    assert waited <= set(started)
    assert {call.verb for number, call in started.items() if number not in waited} <= {"all_gather"}
    assert {call.algorithm for call in started.values() if call.nbytes > 1000} == (
        {"native"} if kind == "gpu" else {"ring"}
    )
    assert {call.axis for call in started.values()} >= {"dp", "tp"}
    assert all(isinstance(call, GroupCall) for call in started.values())
    assert not any(isinstance(event, Transfer) for event in trace.events)
    total = highest = 0
    for event in trace.events:
        if isinstance(event, Memory):
            total += event.nbytes
            highest = max(highest, total)
    assert (total, highest) == (trace.now["total"], trace.peak["total"])
    assert len(trace.steps) == 2
    names = {event.name for event in trace.events[trace.steps[1] :] if isinstance(event, Busy)}
    assert {"forward", "backward", "optimizer"} <= names


def test_products_have_the_flops_of_the_model() -> None:
    """6 FLOPs a token and number of each matrix, on one process; attention's scores, stacks of
    products, beside."""
    trace = run_rank(Plan(), GPTConfig(**(SMALL | {"layers": 3})), rows=4, steps=1)
    tokens = 4 * 16
    width = 16
    numbers = 3 * (4 * width * width + 2 * width * 64) + width * 48
    linears = [
        (kernel, times)
        for kernel, times in trace.kernels()
        if kernel.kind == "matmul" and kernel.size[0] == 1 and 1 not in kernel.size[1:]
    ]
    assert sum(kernel.flops * times for kernel, times in linears) == 6 * tokens * numbers
    assert all(kernel.flops == 2 * math.prod(kernel.size) for kernel, _ in linears)


@pytest.mark.parametrize("pattern", ["local:64", "local:128+global:1", "strided:192", "local:448"])
def test_attention_costs_what_its_pattern_shows(pattern: str) -> None:
    """Two products forward and seven backward, of a head and pair of tokens in a block that is
    shown; half of the own."""
    context = 400
    side = 64
    blocks = pattern_blocks(pattern, context)
    pairs = 0.0
    for i, j in zip(*np.nonzero(blocks), strict=True):
        sides = [min(side, context - side * block) for block in (int(i), int(j))]
        pairs += sides[0] * sides[1] / (2 if i == j else 1)
    config = GPTConfig(**(SMALL | {"context": context}), attention_pattern=pattern)
    trace = run_rank(Plan(precision="bf16"), config, rows=3, steps=1)
    spent = sum(
        kernel.flops * times for kernel, times in trace.kernels() if kernel.kind == "attention"
    )
    assert spent == 2 * 9 * config.head_width * pairs * config.layers * config.heads * 3
    if pattern == "local:448":  # all that is causal
        plain = run_rank(
            Plan(precision="bf16"), replace(config, attention_pattern=None), rows=3, steps=1
        )
        assert spent == sum(
            kernel.flops * times for kernel, times in plain.kernels() if kernel.kind == "attention"
        )


def test_a_short_first_step_leaves_the_second_as_it_is() -> None:
    config = GPTConfig(**SMALL)
    plan = Plan(dp=2, pp=2, zero=2, microbatches=4)
    whole, short = (run_rank(plan, config, 1, rows=16, first_rows=first) for first in (None, 2))
    assert len(short.events) < len(whole.events)
    assert short.last_step == whole.last_step
    assert 2 * sum(row["nbytes"] for row in whole.last_step if row["verb"] == "send") == sum(
        row["nbytes"] for row in whole.ledger if row["phase"] == "step" and row["verb"] == "send"
    )
    assert short.flops(short.steps[-1]) == whole.flops(whole.steps[-1])
    assert short.peak == whole.peak


def test_experts_load_is_given() -> None:
    """Three quarters of the choices for the first two of four experts: their rank gets so many
    rows, and computes more."""
    config = GPTConfig(**SMALL, mixture=MixtureConfig(experts=4, balance="none"))
    plan = Plan(ep=2)
    sent = []
    flops = []
    for rank in range(2):
        trace = run_rank(plan, config, rank, rows=8, steps=1, load=(3, 3, 1, 1))
        calls = [event.call for event in trace.events if isinstance(event, Start)]
        leaving = next(
            call.blocks for call in calls if call.verb == "all_to_all" and call.nbytes > 1000
        )
        sent.append(leaving[0] / sum(leaving))
        flops.append(trace.flops())
    assert sent == pytest.approx([0.75, 0.75], abs=0.02)
    assert flops[0] > 1.5 * flops[1]


def test_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must also run where Python has no threads, processes or sockets."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a thread, process or socket")

    for module, name in (
        (threading.Thread, "start"),
        (socket, "socket"),
        (subprocess, "Popen"),
        (os, "fork"),
    ):
        monkeypatch.setattr(module, name, refuse)
    for plan in (
        Plan(dp=2, zero=1, offload="optimizer"),
        Plan(pp=2, tp=2),
        Plan(dp=2, zero=3, offload="all"),
    ):
        assert run_rank(plan, GPTConfig(**SMALL), rows=8).events


def test_offload_moves_on_lanes() -> None:
    trace = run_rank(Plan(dp=2, zero=1, offload="optimizer"), GPTConfig(**SMALL), rows=8)
    moves = [event for event in trace.events[trace.steps[0] :] if isinstance(event, Transfer)]
    assert {move.lane for move in moves} == {"device to host", "host to device"}
    by_lane = {
        lane: sum(move.nbytes for move in moves if move.lane == lane) for lane in trace.lanes
    }
    assert by_lane == trace.lanes
    assert any(kernel.kind == "host" for kernel, _ in trace.kernels())
