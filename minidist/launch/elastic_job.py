"""An elastic job: when ranks are lost, it continues with the remaining ranks or with replacements.

    generation 1   ranks 0 1 2 3           monitor 1   rank 2 is killed: monitor 1 notifies all,
                                                       they leave
    generation 2   ranks 0 1   3 -> 0 1 2  monitor 2   continue with three; the launcher starts
                                                       another process
    generation 3   ranks 0 1 2 + new       monitor 3   it has started: all stop after the same
                                                       step, and continue with four

Between two losses a job is a generation: a set of processes with ranks and a monitor of their own,
as in any other job. When a generation breaks, its living processes leave it and report so here
(workers.py). Then this launcher forms the next one:

    as many ranks as the job wants      if that many processes wait (spares count)
    it waits                            if others are starting, and less than `wait` seconds have
                                        passed
    fewer ranks                         of a size that the plan allows
    it gives up                         if fewer than the smallest allowed size are left and none
                                        is starting

Another thread starts a replacement, so the remaining ranks continue even when a fork takes long. A
process that does not leave in time is killed, so no process belongs to two generations. The
launcher does not know the state of the training: the ranks hold it (survive/elastic.py).
"""

import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minidist.comm import wire
from minidist.comm.health.failure import Failure, say_line
from minidist.comm.health.process_state import PATIENCE
from minidist.launch.generation import (
    Elastic,
    EventLog,
    Generation,
    placed,
    start_monitor,
    tell_ranks,
)
from minidist.launch.limits import Limits
from minidist.launch.spawning import GRACE, STOP, noting_signals
from minidist.launch.template import Template
from minidist.launch.workers import DONE, MEMBER, STARTING, WAITING, Worker, Workforce

START_LIMIT = 300.0  # seconds that a process may take to start
AGREE_LIMIT = 20.0  # seconds until all ranks must know the step to stop after
ENDING = 60.0  # seconds that the others may take to end when the first is done
USELESS = 3  # failures one after another, no step between them, that end the job


def spawn_elastic(
    command: Sequence[str],
    elastic: Elastic,
    *,
    record: Path | None = None,
    patience: float = PATIENCE,
    limits: Limits | None = None,
    forks: bool = False,
    template: Template | None = None,
) -> int:
    """Run copies of `command` as ranks of an elastic job, and wait for them.

    Args:    record: a file that gets a line of JSON for each event of a generation. patience,
             limits: as in spawn(), except that all processes share the cores. forks: the command
             calls template.fork_on_demand() when it has loaded everything. template: a template
             that this process has forked (template.fork_template).
    Returns: 0; if the job could not continue, the status that spawn() would return.
    Raises:  LaunchError if the command cannot be started.
    """
    return ElasticJob(
        command,
        elastic,
        record,
        patience,
        limits or Limits(),
        forks=forks,
        template=template,
    ).run()


class ElasticJob:
    """The launcher's side of an elastic job."""

    def __init__(
        self,
        command: Sequence[str],
        elastic: Elastic,
        record: Path | None,
        patience: float,
        limits: Limits,
        *,
        forks: bool,
        template: Template | None = None,
    ) -> None:
        self.elastic = elastic
        self.patience = patience
        self.log = EventLog(record)
        self.limits = limits
        self.forks = forks
        self.workforce = Workforce(command, wire.new_token(), limits, template)
        self.generation: Generation | None = None
        self.lost: list[dict[str, Any]] = []  # since the last generation was formed
        self.restarts = elastic.restarts
        self.useless = 0
        self.begun = False  # some generation has had a state
        self.status: int | None = None  # exit status of the job, when it is known
        # exit status of processes that were done; whether SIGTERM was passed on
        self.result = 0
        self.passed_on = False
        self.told: list[int] = []
        # times: start of the job; when the first process was done
        self.start = time.monotonic()
        self.finishing = 0.0

    def run(self) -> int:
        """Start the processes, serve them, clean up; return the exit status."""
        with noting_signals(self.told):
            try:
                self.limits.begin()
                self.workforce.prepare(
                    forks=self.forks, told=lambda: bool(self.told) or self.log.clock() > START_LIMIT
                )
                for _ in range(0 if self.told else self.elastic.sizes[-1] + self.elastic.spares):
                    self.workforce.start()
                while self.status is None:
                    self._serve(self.workforce.next_event(0.02))
                return self.status
            finally:
                self._end()

    def _serve(self, event: tuple[Worker, dict[str, Any]] | None) -> None:
        if event is not None:
            self._take(*event)
        for worker, code in self.workforce.reap():
            self._ended(worker, code)
        for worker in self.workforce.of(STARTING):
            worker.kill_frozen(self.patience)
        generation = self.generation
        if self.told and not self._pass_on():
            self._stop(Failure.by_signal(self.told[0]))
        elif self.status is not None:
            return
        elif self.workforce.of(DONE) or self.finishing:
            self._finish()
        elif generation is None or generation.broken is not None:
            self._form_next()
        elif generation.monitor.loss is not None:
            self._break(generation, generation.monitor.loss)
        else:
            self._tend(generation)

    # --- what processes say
    # ------------------------------------------------------------------------------------------

    def _take(self, worker: Worker, frame: dict[str, Any]) -> None:
        generation = self.generation
        match frame["kind"]:
            case "waiting":
                worker.saves = bool(frame["saves"])
                if generation is not None and worker in generation.members:
                    generation.reached = max(generation.reached, int(frame["steps"]))
                self._left(worker, str(frame["why"]), tidy=bool(frame["tidy"]))
            case "record":
                worker.send("record", value=self.log.records)
            case "done":
                worker.state = DONE
                if generation is not None and "done" not in generation.record:
                    self.log.note("done", generation)
            case "give_up":
                self._give_up(str(frame["why"]))
            case kind if (
                generation is not None
                and worker in generation.members
                and generation.broken is None
            ):
                self._hear(generation, worker, kind, frame)

    def _hear(
        self, generation: Generation, worker: Worker, kind: str, frame: dict[str, Any]
    ) -> None:
        match kind:
            case "formed":
                self.begun = True
                self.log.note("formed", generation, step=int(frame["step"]))
            case "stepped":
                self.useless = 0
                self.log.note("stepped", generation, step=int(frame["step"]))
            case "trained":
                self.log.note("trained", generation, step=int(frame["step"]))
            case "at":
                generation.reached = max(generation.reached, int(frame["step"]))
                self.log.write(
                    {
                        "event": "at",
                        "seconds": self.log.clock(),
                        "time": time.time(),
                        "generation": generation.number,
                        "step": int(frame["step"]),
                    }
                )
            case "boundary":
                generation.stop_after(int(frame["step"]))
            case "agreed":
                generation.agree(worker)

    def _left(self, worker: Worker, why: str, *, tidy: bool) -> None:
        """Note that a process waits for the next generation: it has just started, or has left
        one."""
        generation = self.generation
        was = worker.state
        worker.state = WAITING
        if (
            was != MEMBER
            or generation is None
            or worker not in generation.members
            or generation.broken is not None
        ):
            return
        if tidy:
            generation.broken = time.monotonic()
            self.log.note("left", generation, step=generation.boundary)
        elif generation.monitor.loss is None:  # its rank is alive: a connection broke
            generation.monitor.lose(
                Failure(worker.rank, worker.process.pid, worker.starter.name, why)
            )

    # --- a generation ends
    # -------------------------------------------------------------------------------------------

    def _break(self, generation: Generation, loss: Failure) -> None:
        """Note that the generation has lost a rank, so the other ranks leave."""
        generation.broken = time.monotonic()
        self.log.note("broken", generation, rank=loss.world_rank, how=loss.how.splitlines()[0])
        if loss.status == 2:  # bad input; its rank has printed the message
            self.status = 2
        elif loss.traceback:
            self.useless += 1
            if self.useless >= USELESS:
                self._give_up(
                    f"{self.useless} failures without a step between them, the last: {loss}"
                )

    def _ended(self, worker: Worker, code: int) -> None:
        """Note the end of a process, and start another in its place if the limits allow it."""
        generation = self.generation
        if worker.state == DONE:
            self.finishing = self.finishing or time.monotonic()
            self.result = self.result or code
            return
        how = worker.how_it_ended(code)
        if generation is not None and worker in generation.members:
            if generation.broken is None:
                generation.monitor.lose(
                    Failure(worker.rank, worker.process.pid, worker.starter.name, how)
                )
            self.lost.append({"process": worker.number, "rank": worker.rank, "how": how})
        say_line(f"minidist: {worker} (process {worker.process.pid}) {how}")
        wanted = self.elastic.sizes[-1] + self.elastic.spares
        if (
            self.restarts
            and not self.told
            and self.workforce.count() < wanted
            and not self.workforce.of(DONE)
        ):
            self.restarts -= 1
            self.workforce.start_beside()  # the others do not wait for it

    def _form_next(self) -> None:
        """Form the next generation, if all living processes have left the last one and enough are
        ready."""
        generation = self.generation
        now = time.monotonic()
        since = self.start if generation is None or generation.broken is None else generation.broken
        staying = [worker for worker in self.workforce.of(MEMBER)]
        if staying and generation is not None:
            generation.kill_late(staying, now - since, self.patience)
        if staying:
            return
        coming = self.workforce.coming  # read first: one that connects meanwhile counts as starting
        ready = self.workforce.of(WAITING)
        starting = [
            worker for worker in self.workforce.of(STARTING) if now - worker.since < START_LIMIT
        ]
        size = self.elastic.size_of(len(ready))
        wanted = self.elastic.sizes[-1]
        patience = (
            0.0 if self.told else self.elastic.wait if generation is not None else START_LIMIT
        )
        first = [worker for worker in starting if generation is None and worker.number < wanted]
        if not first and (
            size == wanted or (size and not ((starting or coming) and now - since < patience))
        ):
            self._form(size, ready)
        elif not (starting or coming):
            self._give_up(
                f"{len(ready)} processes are left, and the job needs {self.elastic.sizes[0]}; "
                "give more --max-restarts"
            )

    def _give_up(self, why: str) -> None:
        say_line(f"minidist: {why}; the job ends")
        self.status = 1

    # --- a generation begins
    # -----------------------------------------------------------------------------------------

    def _form(self, size: int, ready: list[Worker]) -> None:
        """Begin a generation: assign ranks and send each process its rank."""
        last = self.generation
        members = placed(size, ready, self.generation)
        token = wire.new_token()
        monitor = start_monitor(members, token, self.patience)
        number = 1 if last is None else last.number + 1
        record = {
            "generation": number,
            "size": size,
            "processes": [worker.number for worker in members],
            "pids": [worker.process.pid for worker in members],
            "joined": [worker.number for worker in members if not worker.tells],
            "lost": self.lost,
        }
        self.log.records.append(record)
        for rank, worker in enumerate(members):
            worker.state = MEMBER
            worker.rank = rank
            worker.tells = True
        tell_ranks(
            members,
            number=number,
            token=token.decode(),
            port=monitor.address[1],
            begun=self.begun,
        )
        if last is not None:
            self.log.note("reached", last, step=last.reached)
        self.generation = Generation(number, members, monitor, record)
        self.lost = []
        self.log.note("forming", self.generation)
        if last is not None:
            threading.Thread(target=last.monitor.close, daemon=True).start()
            say_line(f"minidist: generation {number} continues with {size} ranks")

    def _tend(self, generation: Generation) -> None:
        """Check the running generation: kill processes that miss its monitor.

        If more can take part, ask rank 0 for a step to stop after.
        """
        now = time.monotonic()
        record = generation.record
        if "formed" not in record:
            generation.kill_absent(now - generation.begun, self.patience)
        elif generation.asked is not None:
            if now - generation.asked > AGREE_LIMIT:
                generation.asked = None  # rank 0 makes a long step, or the last one
        elif "stepped" in record and not self.told:
            living = self._living(generation)
            if self.elastic.size_of(len(living) + len(self.workforce.of(WAITING))) > len(living):
                generation.asked = now
                for worker in living[:1]:
                    worker.send("regroup", number=generation.number)

    def _living(self, generation: Generation) -> list[Worker]:
        """Return the ranks that work, in rank order."""
        members = self.workforce.of(MEMBER)
        return [worker for worker in generation.members if worker in members]

    # --- the end
    # -----------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """End the job after one rank is done: when all others have ended, or after ENDING
        seconds."""
        self.finishing = self.finishing or time.monotonic()
        if not self.workforce.of(MEMBER, DONE) or time.monotonic() - self.finishing > ENDING:
            self.status = self.result

    def _pass_on(self) -> bool:
        """After one SIGTERM: pass it on to ranks that save their work and end.

        Return whether there are any.
        """
        savers = [worker for worker in self.workforce.of(WAITING, MEMBER, DONE) if worker.saves]
        if self.told != [signal.SIGTERM] or not (savers or self.passed_on):
            return False
        self.passed_on = True
        for worker in savers:
            worker.tell()
        return True

    def _stop(self, loss: Failure) -> None:
        """Stop the job because the launcher got a signal: the monitor notifies ranks in their
        waits, and they unwind."""
        if self.generation is not None:
            self.generation.monitor.lose(loss)
        say_line(f"minidist: {loss}; its {len(self.workforce.workers)} processes ended")
        self.status = loss.status

    def _end(self) -> None:
        self.workforce.end(STOP if self.told else GRACE, hurry=lambda: len(self.told) > 1)
        if self.generation is not None:
            self.generation.monitor.close()
        self.limits.end()
        if self.log.records:  # without records there was no job, and its folder stays empty
            self.log.write(
                {
                    "event": "end",
                    "seconds": self.log.clock(),
                    "time": time.time(),
                    "status": self.status,
                }
            )
