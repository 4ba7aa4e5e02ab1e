"""`minidist train --adapt`: between two steps the ranks ask the planner (plan/adapt.py) whether the
rest of the run ends sooner under another plan, and change to it if that pays.

    all ranks   after each WINDOW steps: gather the records of these steps and of their messages on
                rank 0
    rank 0      if they differ from those that it asked about last: ask the planner, tell its answer
    all ranks   if it pays: Trainer.change_plan, and the counts of traffic and memory begin anew

The records are those of steps/N.jsonl (observe/rank_steps.py), kept in memory too, and the messages of
the timeline.
"""

import argparse
import time
from collections import deque
from typing import Any
from zlib import crc32

import numpy as np

from minidist.cli.train.axis_traffic import stage_layers
from minidist.cli.train.settings import Settings
from minidist.cli.train.telemetry import EARLIER, Telemetry
from minidist.comm.health.failure import say_line
from minidist.comm.records import gather_records, hand_out_record, unhurried
from minidist.console import fail, memory_bytes, plural, size_text
from minidist.errors import ConfigError, PlanError, ShardError
from minidist.observe.link_times import FEW
from minidist.observe.rank_steps import RankSteps
from minidist.parallel.hybrid.hybrid import Plan, Trainer
from minidist.parallel.hybrid.layer_timing import measured_costs
from minidist.plan.adapt import Adviser, PlanChange, in_words, look_at
from minidist.plan.candidates import RECOMPUTED, SCHEDULES
from minidist.simulate.here import rough_device

WINDOW = 8  # steps whose records are judged together
SETTLE = 2  # steps after the begin, and after a change, that are not judged
MOST_MESSAGES = 100  # that a rank received: the newest
MOST_ASKING = 0.05  # part of the run's time; with more in questions, they are dear

PLANNERS = (PlanError, ShardError, ConfigError)
"""Errors of a model or a batch for which the planner has no plan."""

UNKNOWN: dict[str, tuple[tuple[Any, ...], str]] = {
    "elastic": ((None,), "its ranks and so its plan change when some are lost"),
    "strategy": (("ddp",), "the planner knows only ranks that are all equal"),
    "local_steps": ((None,), "each rank then has weights and state of its own"),
    "compress": (("none",), "the planner does not know compressed gradients"),
    "offload": (("none",), "what moves to the host or the disk is not measured"),
    "keep_activations": (("whole",), "the planner keeps inputs of blocks whole"),
    "activation_memory": ((None,), "it measures blocks under one plan"),
    "keep_gathered": ((False,), "the planner does not know it"),
    "stages_per_rank": ((None, 2), "the planner knows 2 stages of a rank"),
    "checkpoint_blocks": (RECOMPUTED, "the planner recomputes all blocks or none"),
    "schedule": (SCHEDULES, f"the planner knows {', '.join(SCHEDULES)}"),
    "stage_layers": (("even", "measured"), "another plan has other stages"),
    "node_limit": ((None,), "the planner does not know it"),
    "expert_placement": ((None,), "the planner does not know it"),
    "device": (("cpu",), "a GPU's kernels are not measured while it trains"),
    "precision": (("fp32",), "the planner's seconds of a processor are those of fp32"),
    "dtype": (("float32",), "the planner counts 4 bytes a number"),
}
"""{option: (values that --adapt works with, why it does not work with others)}."""


def check_adapt(args: argparse.Namespace, plan: Plan) -> None:
    """Raise ConfigError if --adapt does not work with another option, or with one rank."""
    if not args.adapt:
        return
    for name, (known, why) in UNKNOWN.items():
        value = getattr(args, name, None)
        if value not in known:
            fail(
                f"--adapt with --{name.replace('_', '-')}"
                f"{'' if value is True else f' {value}'}: {why}; leave out one of the two"
            )
    if plan.size == 1:
        fail("--adapt: one rank has no other plan; start several, or leave it out")


class Adapting:
    """The changes of plan of one run. Every rank has one, and makes the same calls.

    Args:       made: seconds in which the trainer was made.
    Attributes: changes: a record of each change, for metrics.json; complete on rank 0.
    """

    def __init__(
        self, trainer: Trainer, settings: Settings, report: Telemetry, *, made: float
    ) -> None:
        self.trainer = trainer
        self.settings = settings
        self.report = report
        self.changes: list[dict[str, Any]] = []
        self.questions = 0
        self._newest: deque[dict[str, Any]] = deque(maxlen=WINDOW)
        report.records.recorder.keep(self._newest)
        self._made = made
        self._since = trainer.steps_done
        self._asking = 0.0
        self._begun = time.perf_counter()
        self._first: float | None = None  # seconds of the first step under the plan
        self._change_seconds = 0.0
        world = trainer.world
        self._adviser: Adviser | None = None
        if world.rank == 0:
            args = settings.args
            room = args.device_memory or memory_bytes() // world.size
            self._adviser = Adviser(
                settings.config,
                args.batch,
                rough_device(room),
                world.nodes,
                optimizer=args.optimizer,
                stage_layers=args.stage_layers,
            )
            try:
                self._adviser.prepare(trainer.plan)
            except PLANNERS as error:
                self._give_up(error)
        # the other ranks wait here
        block, *ends = measured_costs(settings.config, world)
        if self._adviser is not None:
            self._adviser.ends = (ends[0] / block, ends[1] / block)

    def due(self, step: int) -> bool:
        """Return whether the ranks look at their records after step `step`, from 1."""
        done = step - self._since - SETTLE
        return done > 0 and done % WINDOW == 0 and step < self.settings.args.steps

    def step_done(self, step: int, seconds: float) -> None:
        """Note the seconds of step `step`: of the first one under a plan."""
        if step == self._since + 1:
            self._first = seconds

    def look(self) -> None:
        """Look at the newest steps, and change the plan if it pays. Every rank calls it."""
        world = self.trainer.world
        rank = self.report.records.recorder.about
        with world.ledger.control():
            for _ in range(FEW):  # short messages: steps may have only long ones
                world.all_reduce(np.zeros(world.size, np.float32), algorithm="ring")
        messages = messages_of(self.trainer.recorder, self._newest[0]["step"])
        told = gather_records(world, [rank, [*self._newest, messages]])
        record: dict[str, Any] | None = None
        with unhurried(world):
            if told is not None:
                record = self._ask(
                    {about["rank"]: RankSteps.of(about, steps) for about, steps in told}
                )
            record = hand_out_record(world, record)
        if record is not None:
            self._change(record)
        self.report.records.begin_anew()

    def _ask(self, ranks: dict[int, RankSteps]) -> dict[str, Any] | None:
        """Return the change that pays as a record; None if none does."""
        adviser = self._adviser
        if adviser is None:
            return None
        look = look_at(ranks)
        if self.changes and "measured" not in self.changes[-1]:
            self._measured(look.seconds)
        elif not self.changes and self._first is not None:
            adviser.first = self._made + max(0.0, self._first - look.seconds)
        start = time.perf_counter()
        dear = self._asking > MOST_ASKING * (start - self._begun)
        if not adviser.is_news(look, dear=dear):
            return None
        left = self.settings.args.steps - self.trainer.steps_done
        layers = stage_layers(self.trainer) or ()
        try:
            advice = adviser.advise(self.trainer.plan, look, left=left, layers=layers)
        except PLANNERS as error:
            self._give_up(error)
            return None
        self._asking += time.perf_counter() - start
        self.questions += 1
        if advice is None or not advice.pays:
            return None
        return {
            "step": self.trainer.steps_done,
            "from": self.trainer.plan.as_dict(),
            "to": advice.plan.as_dict(),
            "line": in_a_line(self.trainer.steps_done, self.trainer.plan, advice),
            "now": advice.now,
            "then": advice.then,
            "left": advice.left,
            "gain": advice.gain,
            "price": advice.price,
            "nbytes": advice.nbytes,
        }

    def _give_up(self, error: Exception) -> None:
        """Say why the planner cannot answer; the plan stays."""
        self._adviser = None
        say_line(f"minidist train: --adapt: {error}; the plan stays as it is")

    def _measured(self, seconds: float) -> None:
        """Add to the record of the last change what it cost, and what a step takes now."""
        change = self.changes[-1]
        assert self._first is not None
        assert self._adviser is not None
        cost = self._change_seconds + max(0.0, self._first - seconds)
        change["measured"] = {"price": cost, "step_seconds": seconds}
        self._adviser.changed(cost, change["price"] - self._adviser.first)

    def _change(self, change: dict[str, Any]) -> None:
        """Change the plan, tell it, and count traffic and memory anew."""
        trainer = self.trainer
        start = time.perf_counter()
        trainer.change_plan(Plan(**change["to"]))
        self._change_seconds = time.perf_counter() - start
        self._since = trainer.steps_before = trainer.steps_done
        trainer.world.ledger.set_aside("step", EARLIER)
        trainer.account.reset_peak()
        self._newest.clear()
        self.changes.append(change)
        self.report.line(change["line"])
        self.report.changed(change)

    def record(self) -> dict[str, Any]:
        """Return "adapt" of metrics.json."""
        return {"questions": self.questions, "changes": self.changes}


def messages_of(timeline: Any, since: int) -> dict[str, Any]:
    """Return the newest messages of a timeline in the form of a record of a step
    (comm/flight/message_times.py), which has only one message of a link.

    Args:    since: the first step, from 0.
    """
    found: dict[str, Any] = {"step": since, "out": [], "in": []}
    for span in reversed(timeline.spans):
        about = span.details
        if len(found["in"]) == MOST_MESSAGES or (about.get("step") or 0) < since:
            break
        if "message" not in about:
            continue
        group, _, number = about["message"].partition(".")
        name = [int(group, 16) & 0xFFFF, crc32(number.encode()), about["nbytes"]]
        start = round(span.start * 1e6)
        if span.row == "messages":
            found["out"].append([about["dst"], *name, start])
        else:
            found["in"].append([about["src"], *name, start, round(span.stop * 1e6)])
    return found


def in_a_line(step: int, before: Plan, advice: PlanChange) -> str:
    """Return a change of plan in a line, with its gain and its price."""
    return (
        f"after step {step}: plan {in_words(before)} becomes {in_words(advice.plan)}: gain "
        f"{advice.gain:.3g} s over {plural(advice.left, 'step')} ({advice.now:.3g} s a step "
        f"measured, {advice.then:.3g} s expected), price {advice.price:.3g} s "
        f"({size_text(advice.nbytes)} to move to a rank)"
    )
