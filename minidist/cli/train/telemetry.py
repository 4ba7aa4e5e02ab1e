"""The records of each step of `minidist train`, besides its progress: energy, metrics.jsonl, step
records, and --metrics-port."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.settings import Settings
from minidist.comm.health.failure import say_line
from minidist.comm.ledger import Ledger
from minidist.comm.records import gather_records
from minidist.device.account import CATEGORIES
from minidist.launch.transports import THREADS
from minidist.observe.energy import Meter, energy_of_run
from minidist.observe.energy_counters import POWERCAP
from minidist.observe.other_load import OtherLoad, advice
from minidist.observe.rank_records import RankRecords
from minidist.observe.step_log import STEP_LOG, StepLog, StepState
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.step import Batch

EARLIER = "step of an earlier plan"
"""Phase of the ledger under which the steps before a change of plan are counted."""

LOOK = 1.0  # seconds of steps, then a line is printed if other programs slow this one down


class Telemetry(ProgressReport):
    """A progress report that also reads the energy counters, and on rank 0 writes each step to a
    file and serves it on a port.

    Every rank has one, made before its first step. Args: report: shows the progress; threads: BLAS
    threads of a rank.
    Raises:  ConfigError on rank 0 if the port is not available.
    """

    def __init__(
        self, report: ProgressReport, trainer: Trainer, settings: Settings, *, threads: int = 1
    ) -> None:
        args = settings.args
        world = trainer.world
        self.report = report
        self.trainer = trainer
        self.args = args
        self.steps_before = trainer.steps_done
        goes_on = trainer.steps_done > 0
        self.log = StepLog(settings.out / STEP_LOG, goes_on=goes_on) if world.rank == 0 else None
        self.threads = threads
        self.others = (
            OtherLoad() if threads > 1 and args.threads is None and world.size == 1 else None
        )
        self.exporter = None
        if args.metrics_port and world.rank == 0:
            # here: runs without a port do not need the library
            from minidist.observe.exporter import Exporter

            self.exporter = Exporter(args.metrics_port)
        self.meter = Meter(
            args.device,
            gpu=_bus_id() if args.device == "cuda" else None,
            watts=args.watts,
            is_thread=world.transport.name in THREADS,
            powercap=POWERCAP,
        )
        if self.meter.problem and world.rank == 0 and not args.quiet:
            say_line(
                f"minidist train: {self.meter.problem}"
                + ("; energy is an estimate" if self.meter.source == "estimate" else "")
            )
        self.records = RankRecords(
            trainer,
            settings.out,
            batch=args.batch,
            context=args.context,
            digest_every=args.digest_every,
        )

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        self.records.step_done(number)
        self._tell(number, loss, tokens_per_second)  # first: a shown step has its line in the log
        self.report.step(number, loss, tokens_per_second, sent_bytes)
        if self.others is not None and self.others.seconds() >= LOOK:
            line = advice(self.threads, self.others.cores())
            if line is not None:
                self.report.line(line)
            self.others = None  # printed once, or never

    def _tell(self, number: int, loss: float, tokens_per_second: float) -> None:
        """Read the counters and record them with the memory.

        On rank 0 also write the step's line and serve it.
        """
        joules = self.meter.read()
        account = self.trainer.account
        world = self.trainer.world
        memory = account.now
        peak = account.peak
        world.ledger.flight.state(
            [memory[name] for name in CATEGORIES],
            [peak[name] for name in (*CATEGORIES, "total")],
            account.limit,
            joules,
            self.meter.source,
        )
        if self.log is None:
            return
        state = StepState(
            number,
            self.args.steps,
            loss,
            self.args.batch * self.args.context / tokens_per_second,
            tokens_per_second,
            sent_in_steps(world.ledger),
            memory,
            joules,
            self.meter.source,
        )
        self.log.write(state.line(time.time()))
        if self.exporter is not None:
            self.exporter.show(state)

    def changed(self, change: dict[str, Any]) -> None:
        """Write a change of plan into the log, between the lines of two steps."""
        if self.log is not None:
            self.log.write(json.dumps({"change": change}, separators=(",", ":")).encode() + b"\n")

    def input(self) -> AbstractContextManager[None]:
        return self.records.input()

    def expect(self, steps: int) -> None:
        self.report.expect(steps)

    def line(self, text: str) -> None:
        self.report.line(text)

    def close(self) -> None:
        """End the measurement of energy: all steps are made."""
        self.report.close()
        self.meter.stop()

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        yield from self.report.validating(batches)

    def end(self) -> None:
        """Release file, port and counters; a second call does nothing."""
        self.meter.stop()
        self.records.close()
        if self.log is not None:
            self.log.close()
        if self.exporter is not None:
            self.exporter.close()
            self.exporter = None

    def energy(self) -> dict[str, Any] | None:
        """Return "energy" of metrics.json on rank 0. Every rank calls it, after the steps.

        Cost:    two gathers, counted under `control`.
        """
        records = gather_records(self.trainer.survivors(), self.meter.record())
        if records is None:
            return None
        steps = self.trainer.steps_done - self.steps_before
        return energy_of_run(
            records, steps=steps, tokens=steps * self.args.batch * self.args.context
        )


def sent_in_steps(ledger: Ledger) -> dict[str, dict[str, int]]:
    """Return the bytes that this rank has sent in steps so far, {axis: {verb: bytes}}, under all
    plans."""
    found = ledger.sent_bytes("step")
    for axis, verbs in ledger.sent_bytes(EARLIER).items():
        for verb, nbytes in verbs.items():
            mine = found.setdefault(axis, {})
            mine[verb] = mine.get(verb, 0) + nbytes
    return found


def _bus_id() -> str:
    """Return the PCI bus id of the GPU that this rank computes on."""
    import cupy

    return str(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id))
