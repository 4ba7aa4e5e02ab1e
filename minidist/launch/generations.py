"""The side of a process in an elastic job: it gets a rank in one generation after another, and
keeps its memory between them.

    job = Generations.from_environment()        # if is_elastic_process()
    while world := job.next_world(...):         # waits for a generation, joins it
        try: ... work, until it is done: job.done(); break
        except PeerLostError as error: job.leave(error)  # closes the world; the process stays

The launcher's side is elastic_job.py; workers.py has the messages between the two.
"""

import contextlib
import encodings.idna  # noqa: F401 - once: otherwise each fork imports it to look up the launcher's address
import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from threadpoolctl import ThreadpoolController

from minidist.comm import wire
from minidist.comm.group import Group
from minidist.comm.health.acceptor import connect_to_monitor
from minidist.comm.health.failure import words
from minidist.errors import (
    CommError,
    LaunchError,
    LinkLostError,
    MinidistError,
    PeerLostError,
    TimeoutError,
)
from minidist.launch import transports
from minidist.launch.exits import replace_exit
from minidist.launch.joining import address_of, token_from_environment
from minidist.launch.launchers import detect, number_of
from minidist.launch.membership import Membership, adopt, limit_blas_threads

REACH_LIMIT = 60.0  # seconds until the launcher must have answered a started process
AGREE_LIMIT = 60.0  # seconds that rank 0 waits until all ranks know the step to stop after
LEAVE_GRACE = 60.0  # seconds that this process gets to leave a generation that has lost a rank
# after a connection failed: most seconds until the monitor reports which rank was lost
HEARSAY = 0.15
SAY_AGAIN = 0.2  # seconds between two reports of rank 0 on the number of steps
ANSWER_LIMIT = 10.0  # seconds for the launcher's record


def is_elastic_process() -> bool:
    """Return whether the launcher of an elastic job has started this process."""
    return "MINIDIST_ELASTIC" in os.environ


class Generations:
    """The membership of this process in an elastic job.

    Args:       address, token: the launcher's. number: this process's number in the job. libraries:
                the result of warm_up().
    Attributes: number      number of the present generation, from 1; 0: none yet
                begun       whether an earlier generation had a state
                stop_at     the step after which all ranks leave this generation, or None
                steps       number of steps made, set by the user of this object
                saves       whether this process saves its work and ends at SIGTERM
    """

    def __init__(
        self,
        address: tuple[str, int],
        token: bytes,
        number: int,
        libraries: ThreadpoolController | None = None,
    ) -> None:
        self._libraries = libraries
        self.process = number
        self.number = 0
        self.begun = False
        self._host = address[0]
        self.stop_at: int | None = None
        self.steps = 0
        self.saves = False
        self._said = time.monotonic()  # when this process, as rank 0, last reported its steps
        self._sock = connect_to_monitor(
            address, token, {"process": number}, f"process {number}", REACH_LIMIT, begun=True
        )
        self._membership: Membership | None = None
        self._why = ""
        self._tidy = True
        self._heard: dict[str, dict[str, Any]] = {}  # the launcher's messages by kind, not yet read
        self._regroup = self._ended = False
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        threading.Thread(target=self._listen, name="minidist elastic", daemon=True).start()

    @classmethod
    def from_environment(cls, libraries: ThreadpoolController | None = None) -> "Generations":
        """Return the Generations of this process, from the variables that the launcher has set.

        Raises: LaunchError if this is no process of an elastic job.
        """
        address = address_of("MINIDIST_ELASTIC", os.environ.get("MINIDIST_ELASTIC", ""))
        number = number_of(
            "MINIDIST_PROCESS", os.environ.get("MINIDIST_PROCESS", ""), "start the job again"
        )
        token = token_from_environment()
        if token is None:
            raise LaunchError("MINIDIST_ELASTIC is set without MINIDIST_TOKEN; start the job again")
        return cls(address, token, number, libraries)

    # --- from one generation to the next
    # -----------------------------------------------------------------------------

    def next_world(self, transport: str | None, limit: float, threads: int | None) -> Group | None:
        """Wait for the next generation and join it; return its world, or None if the job is over.

        Args:   transport, limit, threads: as in md.init.
        Raises: PeerLostError, TimeoutError and others if a rank is lost meanwhile; then call leave,
                and call this again.
        """
        self._tell("waiting", why=self._why, tidy=self._tidy, steps=self.steps, saves=self.saves)
        told = self._wait("generation", None)
        if told is None:
            return None
        rank = str(told["world_rank"])
        size = str(told["world_size"])
        os.environ.update(
            {
                # values that the launcher sent
                "MINIDIST_LAUNCH": "1",
                "MINIDIST_MONITOR": f"{self._host}:{told['port']}",
                "MINIDIST_TOKEN": told["token"],
                "RANK": rank,
                "WORLD_SIZE": size,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": size,
                "GROUP_RANK": "0",
                "NODE_RANK": "0",
                "MASTER_ADDR": self._host,
                "MASTER_PORT": str(told["port"]),
            }
        )
        launch = detect()
        if self._membership is None:
            self._membership = adopt(Membership(launch, transport or launch.transport))
        member = self._membership
        member.launch = launch
        limit_blas_threads(threads, launch.local_size, self._libraries)
        world = member.world = member.join(transport or launch.transport, limit)
        assert member.joined is not None
        member.joined.link.grace = LEAVE_GRACE
        world.transport.waits.hearsay = HEARSAY  # the next generation has other links
        return world

    def breaks(self, error: BaseException) -> bool:
        """Return whether the cause of `error` is a lost rank or connection: then this process
        leaves the generation and does not fail."""
        if isinstance(error, PeerLostError | TimeoutError):
            return True
        joined = None if self._membership is None else self._membership.joined
        return (
            isinstance(error, MinidistError | OSError)
            and joined is not None
            and (joined.link.loss is not None or joined.link.wait_for_loss(HEARSAY) is not None)
        )

    def leave(
        self, error: BaseException | None = None, release: Callable[[], None] = lambda: None
    ) -> None:
        """Close the world; the process and its data stay.

        Without an error, all ranks leave after the same step.

        Args:   release: ends what other threads still do with the world; no call there waits for a
                lost rank any more.
        """
        member = self._membership
        self._tidy = error is None
        self._why = "" if error is None else words(error).splitlines()[0]
        assert member is not None
        link = None if member.joined is None else member.joined.link
        # (a LinkLostError has waited already)
        if error is not None and link is not None and not isinstance(error, LinkLostError):
            link.wait_for_loss(HEARSAY)  # a connection may break before the monitor says why
        if member.world is not None:
            if isinstance(error, CommError):
                # otherwise a started call might wait for lost ranks
                member.world.transport.abort(error)
            release()
            with contextlib.suppress(MinidistError, OSError):
                member.world.close()
        if link is not None and self._tidy:
            link.goodbye()
        elif link is not None:
            link.close()
        if member.world is not None:
            member.world.transport.close()
        member.world = member.joined = None

    @property
    def asked(self) -> bool:
        """Return whether the launcher has asked this rank (rank 0) for a step to stop after, and it
        has not answered yet."""
        return self._regroup

    # --- inside a generation
    # -----------------------------------------------------------------------------------------

    def tell(self, kind: str, **content: Any) -> None:
        """Send the launcher a message of kind "formed", "stepped", "trained" or "give_up"."""
        self._tell(kind, **content)

    def done(self) -> None:
        """Report that this process has finished all its work: the others may end, too."""
        self._tell("done")

    def records(self) -> list[dict[str, Any]]:
        """Return the launcher's records of all generations; empty if it does not answer."""
        self._tell("record")
        told = self._wait("record", ANSWER_LIMIT)
        return [] if told is None else list(told["value"])

    def stops(self, step: int, boundary: int) -> bool:
        """Return whether this rank leaves now, after `step` steps.

        Every rank calls this between two steps.

        If the launcher has asked for it, rank 0 names the step `boundary`. No rank may be able to
        end this step before rank 0 has begun it: for example, the step that is about to begin. Rank
        0 begins it when all others know of it.

        Raises: TimeoutError on rank 0 if a rank does not confirm. The ranks that know the step stop
                there, so rank 0 may not continue: it leaves, and the generation breaks.
        """
        assert self._membership is not None
        if self._membership.launch.world_rank == 0 and time.monotonic() > self._said + SAY_AGAIN:
            self._said = time.monotonic()
            self._tell("at", step=step)
        if self._regroup and self.stop_at is None and self._membership.launch.world_rank == 0:
            self._regroup = False
            self._tell("boundary", step=boundary)
            deadline = time.monotonic() + AGREE_LIMIT
            if self._wait("go", AGREE_LIMIT) is not None:
                self.stop_at = boundary
            elif time.monotonic() > deadline:
                raise TimeoutError(
                    f"not all ranks confirmed within {AGREE_LIMIT:g} s that they stop after step "
                    f"{boundary}"
                )
        return self.stop_at is not None and step >= self.stop_at

    # --- the connection
    # ----------------------------------------------------------------------------------------------

    def _tell(self, kind: str, **content: Any) -> None:
        with self._sending, contextlib.suppress(CommError, OSError, ValueError):
            wire.send_frame(self._sock, {"kind": kind, **content})

    def _wait(self, kind: str, limit: float | None) -> dict[str, Any] | None:
        """Return the launcher's message of this kind.

        None after `limit` seconds, if the launcher is gone, or if a rank is lost.
        """
        deadline = None if limit is None else time.monotonic() + limit
        joined = None if self._membership is None else self._membership.joined
        with self._changed:
            while kind not in self._heard and not self._ended:
                if (deadline is not None and time.monotonic() > deadline) or (
                    joined and joined.link.loss
                ):
                    return None
                self._changed.wait(None if limit is None else 0.05)
            return self._heard.pop(kind, None)

    def _listen(self) -> None:
        with self._sock, contextlib.suppress(CommError, OSError, ValueError):
            while True:
                frame = wire.recv_frame(self._sock, None)
                with self._changed:
                    if frame.get("number", self.number) < self.number:
                        continue  # a message of an earlier generation
                    match frame["kind"]:
                        case "regroup":
                            self._regroup = True
                        case "stop":
                            self.stop_at = int(frame["step"])
                        case kind:
                            if kind == "generation":
                                self.number = frame["number"]
                                self.begun = frame["begun"]
                                self.stop_at = None
                                self._regroup = False
                                self._heard.clear()
                            self._heard[kind] = frame
                    self._changed.notify_all()
                if frame["kind"] == "stop":
                    self._tell("agreed")
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def warm_up(transport: str | None) -> ThreadpoolController:
    """Load everything that joining needs, before the first generation and before any fork.

    Also exclude the loaded objects from later garbage collections. Forks inherit all of this:
    finding the libraries takes 9 ms, replacing sys.exit 15 ms.

    Returns: the libraries with threads of their own, for Generations.
    """
    transports.load(transport or "auto")
    replace_exit()
    libraries = ThreadpoolController()
    gc.collect()
    gc.freeze()
    return libraries
