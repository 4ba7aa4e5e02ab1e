"""What `minidist train` tells of each step besides its progress: energy, metrics.jsonl, and --metrics-port."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from minidist.cli.train.progress import ProgressReport
from minidist.cli.train.settings import Settings
from minidist.comm.health.failure import say_line
from minidist.launch.transports import THREADS
from minidist.observe.energy import Meter, energy_of_run
from minidist.observe.energy_counters import POWERCAP
from minidist.observe.records import gather_records
from minidist.observe.step_log import STEP_LOG, StepLog, StepState
from minidist.parallel.hybrid.hybrid import Trainer
from minidist.parallel.step.step import Batch


class Telemetry(ProgressReport):
    """A progress report that also reads the energy counters, and on rank 0 tells each step to file and port.

    Every rank has one, made before its first step. Args: report: shows the progress.
    Raises:  ConfigError on rank 0 if the port cannot be had.
    """

    def __init__(self, report: ProgressReport, trainer: Trainer, settings: Settings) -> None:
        args, world = settings.args, trainer.world
        self.report, self.trainer, self.args, self.steps_before = report, trainer, args, trainer.steps_done
        goes_on = trainer.steps_done > 0
        self.log = StepLog(settings.out / STEP_LOG, goes_on=goes_on) if world.rank == 0 else None
        self.exporter = None
        if args.metrics_port and world.rank == 0:
            from minidist.observe.exporter import Exporter  # here: runs without a port do without the library

            self.exporter = Exporter(args.metrics_port)
        self.meter = Meter(args.device, gpu=_bus_id() if args.device == "cuda" else None, watts=args.watts,
                           is_thread=world.transport.name in THREADS, powercap=POWERCAP)
        if self.meter.problem and world.rank == 0 and not args.quiet:
            say_line(f"minidist train: {self.meter.problem}"
                     + ("; energy is an estimate" if self.meter.source == "estimate" else ""))

    def step(self, number: int, loss: float, tokens_per_second: float, sent_bytes: int) -> None:
        self._tell(number, loss, tokens_per_second)         # first: a step that is shown has its line
        self.report.step(number, loss, tokens_per_second, sent_bytes)

    def _tell(self, number: int, loss: float, tokens_per_second: float) -> None:
        """Read the counters on every rank; on rank 0 write the step's line, and serve it."""
        joules = self.meter.read()
        if self.log is None:
            return
        state = StepState(number, self.args.steps, loss, self.args.batch * self.args.context / tokens_per_second,
                          tokens_per_second, self.trainer.world.ledger.sent_bytes("step"), self.trainer.account.now,
                          joules, self.meter.source)
        self.log.write(state.line(time.time()))
        if self.exporter is not None:
            self.exporter.show(state)

    def line(self, text: str) -> None:
        self.report.line(text)

    def close(self) -> None:
        """The steps are made: energy is counted up to here."""
        self.report.close()
        self.meter.stop()

    def validating(self, batches: Sequence[Batch]) -> Iterator[Batch]:
        yield from self.report.validating(batches)

    def end(self) -> None:
        """Let file, port and counters go; a second time does nothing."""
        self.meter.stop()
        if self.log is not None:
            self.log.close()
        if self.exporter is not None:
            self.exporter.close()
            self.exporter = None

    def energy(self) -> dict[str, Any] | None:
        """On rank 0: "energy" of metrics.json. Every rank calls it, after the steps.

        Cost:    two gathers, counted under `control`.
        """
        records = gather_records(self.trainer.survivors(), self.meter.record())
        if records is None:
            return None
        steps = self.trainer.steps_done - self.steps_before
        return energy_of_run(records, steps=steps, tokens=steps * self.args.batch * self.args.context)


def _bus_id() -> str:
    """Of the GPU that this rank computes on."""
    import cupy

    return str(cupy.cuda.runtime.deviceGetPCIBusId(cupy.cuda.Device().id))
