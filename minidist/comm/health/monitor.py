"""The monitor: one connection from every rank, so that all ranks learn of an event at one rank
within milliseconds.

Without it, a rank that has no connection to a dead rank would wait forever. It is a thread of our
launcher; if another launcher started the ranks, it is a child process of rank 0
(monitor_process.py). It moves no data.

    rank -> monitor                                  monitor -> rank
    meet     info                                    met      [info of rank 0, info of rank 1, ...]
    missing  (asks which ranks are not yet there)    missing  [ranks that are not yet there]
    left     (asks which ranks have said goodbye)    left     [ranks that have]
    failed   loss, blames                            noted    whether this was the job's first
                                                              failure
    cut      rank (the link to it loses packets)     (verdict, to both, unless that rank is lost)
    expendable  (the job may continue without me)    died     loss of a rank that was expendable
    saves    (I end on my own at a SIGTERM)          saves    ranks that do: to node agents
    waits    round (0: unasked), state               ask      round: report your waits
    table    own state                               table    all ranks' waits, in words
    mismatch text, ranks of the group                verdict  error, text: raise it
    goodbye  state, together                         over     every rank has said goodbye: to ranks
                                                              that stay together
                                                     lost     loss        (rank, process id, host, how, traceback)

A connection that ends without goodbye, or a reported failure, is a loss; so is a rank whose process
is stopped, and a host that is silent (watchdog.py). The first loss is the job's; it is sent to
every other rank, also to ranks that connect later. The acceptor (acceptor.py) admits ranks to their
seats (seats.py).

Under mpirun a finished rank stays until all have finished (`together`), because MPI_Finalize waits
for all: meanwhile its loss is detected, and it is notified of others. Processes are watched until
they have ended, also after the goodbye.
"""

import contextlib
import dataclasses
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from minidist.comm import wire
from minidist.comm.health.acceptor import SILENCE, Acceptor, listen, set_up, shortage
from minidist.comm.health.crash import crash_told
from minidist.comm.health.deadlock import LONG_PACKETS, Verdict
from minidist.comm.health.failure import MONITOR, Failure
from minidist.comm.health.process_state import PATIENCE, hears_interrupts, state_of, this_system
from minidist.comm.health.seats import AgentSeat, Seat, Seats
from minidist.comm.health.wait_state import State
from minidist.comm.health.watchdog import Watchdog
from minidist.errors import CommError, HandshakeError

FRAME_LIMIT = 5.0  # seconds from a frame's first byte to its last
BLAME_WAIT = 0.5  # seconds to wait for the own report of a rank that another reports as lost
# the same for a rank to which another cannot send: its whole host may be out of reach
CUT_WAIT = 2.0


class Monitor(Seats):
    """The monitor of the ranks of one job.

    Args:
        size: ranks of the job.                 token: the job's secret.
        listener: where ranks connect (acceptor.listen); default: at a free port of this host, given
        by `address`.
        how: the launcher's knowledge of a rank's end on this system (`how(seat) -> "was killed by
        SIGKILL"`), or None.
        patience: seconds that a rank's process may be stopped (SIGSTOP) before it is lost.
    Attributes:
        together: whether finished ranks stay until all have finished.
    """

    def __init__(
        self,
        size: int,
        token: bytes,
        listener: socket.socket | None = None,
        *,
        how: Callable[[Seat], str | None] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(size)
        self._how = how or (lambda seat: None)
        self.listener = listener or listen("127.0.0.1", 0)
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self._acceptor = Acceptor(
            self.listener,
            token,
            self._admit,
            size,
            self._run,
            "minidist monitor",
            fail=self._cannot_accept,
        )
        self._brought: dict[int, Any] = {}  # to the current meeting, by world rank
        self._deaths: queue.SimpleQueue[tuple[Seat, Exception] | None] = queue.SimpleQueue()
        # threads that had not ended when the last one started
        self._threads: set[threading.Thread] = set()
        self._closed = self.together = False
        self._watchdog = Watchdog(
            size,
            self.present,
            self.staying,
            self.lose,
            patience,
            miss=self.miss,
            awaited=self.awaited,
        )

    def start(self) -> None:
        """Begin to accept ranks. Before this call no thread runs, so the caller may fork; the
        kernel queues connections."""
        self.listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.listener, selectors.EVENT_READ)
        self._run(self._hear_all)
        self._run(self._record_deaths)

    def close(self) -> None:
        """Close every connection and end every thread."""
        with self._changed:
            self._closed = True
            self._acceptor.close()
            threads = list(self._threads)
        self._deaths.put(None)
        for thread in threads:
            thread.join(2.0)
        for seat in self._seats.values():
            seat.sock.close()
        self._watchdog.close()
        self.listener.close()

    def lose(self, loss: Failure) -> bool:
        """Record a loss and notify every remaining rank; return whether it was new."""
        with self._changed:
            seat = self._seats.get(loss.world_rank)
            expendable = seat is not None and seat.expendable
            if self.loss is not None or loss.world_rank in self.spared:
                return False
            if expendable:
                self.spared[loss.world_rank] = loss
            else:
                self.loss = loss
            others = [seat for rank, seat in self.present().items() if rank != loss.world_rank]
            self._changed.notify_all()
        for seat in [*others, *self._watchdog.agents()]:
            seat.send("died" if expendable else "lost", loss=dataclasses.asdict(loss))
        return True

    def miss(self, loss: Failure) -> None:
        """Record that a rank will not connect, as its launcher knows: it is lost once another rank
        waits for it."""
        with self._changed:
            if loss.world_rank in self._seats:
                return
            self._never[loss.world_rank] = loss
        self._look_for_missing()

    def _look_for_missing(self) -> None:
        with self._changed:
            awaited = self.awaited()
            found = next((loss for rank, loss in self._never.items() if rank in awaited), None)
        if found is not None:
            self.lose(found)

    def table(self) -> str:
        """Return what every rank waits for, one line each; ranks without a wait have a moment to
        report what they do."""
        return self._watchdog.table()

    def running(self) -> list[int]:
        """Return the ranks whose process has not ended, on this system and where a node agent
        watches, also after goodbye."""
        agents = self._watchdog.agents()
        return [
            rank
            for rank, seat in sorted(self.staying().items())
            if (
                state_of(seat.pid) not in ("Z", "X", "")
                if seat.system == this_system()
                else any(agent.covers(seat) for agent in agents)
            )
        ]

    def in_user_code(self, ranks: list[int]) -> list[int]:
        """Return those of `ranks` on this system whose Python has not ended, so that they cannot be
        in MPI_Finalize."""
        return [
            rank
            for rank, seat in sorted(self.staying().items())
            if rank in ranks and seat.system == this_system() and hears_interrupts(seat.pid)
        ]

    def wait_until_ended(self, limit: float) -> list[int]:
        """Wait until no rank is running, or one is lost; return those that run after `limit` s."""
        deadline = time.monotonic() + limit
        while ranks := self.running():
            if time.monotonic() > deadline or self.loss is not None:
                return ranks
            time.sleep(0.01)
        return []

    def release_agents(self) -> None:
        """Notify the node agents that every rank has said goodbye, so that their parents need not
        wait for the processes' ends."""
        self._watchdog.release_agents()

    def _tell_savers(self) -> None:
        if savers := self.savers:
            for agent in self._watchdog.agents():
                agent.send("saves", ranks=sorted(savers))

    def _run(self, target: Callable[..., None], *args: Any) -> None:
        """Run `target` in a thread that close() joins."""
        thread = threading.Thread(target=target, args=args, name="minidist monitor", daemon=True)
        with self._changed:
            thread.start()
            self._threads = {thread, *(other for other in self._threads if other.is_alive())}

    def _hear_all(self) -> None:
        """Read from every rank, in one thread: so events at two ranks are seen in the order in
        which they happened."""
        with self._selector:
            while not self._closed:
                for key, _ in self._selector.select(self._watchdog.due()):
                    if key.data is None:
                        self._acceptor.accept()
                    else:
                        self._hear(key.data)
                self._watchdog.tick()

    def _admit(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Give a rank that fits the job its seat, or a node agent its own, after the handshake."""
        set_up(sock)
        peer = wire.address_of(sock)
        match hello:
            case {
                "world_rank": int(rank),
                "world_size": int(size),
                "pid": int(pid),
                "host": str(host),
                "system": str(system),
            }:
                seat = Seat(rank, pid, host, sock, system=system)
            case {
                "node_agent": [*ranks],
                "pid": int(pid),
                "host": str(host),
                "system": str(system),
            } if all(isinstance(rank, int) for rank in ranks):
                agent = AgentSeat(-1, pid, host, sock, system=system, ranks=tuple(ranks))
                wire.send_frame(sock, {"kind": "welcome"}, 1.0)
                self._watchdog.add(agent)
                self._tell_savers()
                self._hear_from(agent)
                return
            case _:
                raise HandshakeError(
                    f"{peer} was refused: it belongs to this job but is no rank: {sorted(hello)}"
                )
        reason = None
        with seat.sending, self._changed:  # a loss sent meanwhile arrives after the welcome
            if size != self.size:
                reason = f"this job has {self.size} ranks, it says {size}"
            elif not 0 <= rank < self.size:
                reason = f"there is no rank {rank} of {self.size}"
            elif rank in self._seats:
                reason = (
                    f"rank {rank} is already there, as process {self._seats[rank].pid} "
                    f"on {self._seats[rank].host}"
                )
            else:
                self._seats[rank] = seat
            # if the rank is gone already, reading from it shows that
            with contextlib.suppress(CommError, OSError):
                wire.send_frame(
                    sock,
                    {"kind": "refused", "reason": reason} if reason else {"kind": "welcome"},
                    1.0,
                )
        if reason is not None:
            raise HandshakeError(f"{peer} was refused: {reason}")
        self._look_for_missing()
        self._hear_from(seat)

    def _cannot_accept(self, error: OSError) -> None:
        """End the job: ranks call, and this process has no resources to accept them."""
        self.lose(
            Failure.here(
                MONITOR, f"cannot take the connection of another rank: {shortage(error, self.size)}"
            )
        )

    def _hear_from(self, seat: Seat) -> None:
        """Read from this seat from now on; send it the loss if there was one before."""
        if self.loss is not None:
            seat.send("lost", loss=dataclasses.asdict(self.loss))
        with self._changed:
            if not self._closed:
                self._selector.register(seat.sock, selectors.EVENT_READ, seat)

    def _hear(self, seat: Seat) -> None:
        try:
            if seat.left and (crash := crash_told(seat)) is not None:
                self.lose(crash)
            frame = wire.recv_frame(seat.sock, FRAME_LIMIT)
            if isinstance(seat, AgentSeat):
                self._watchdog.heard_agent(seat, frame)
            else:
                self._take(seat, frame)
        except (CommError, OSError, KeyError, TypeError, ValueError) as error:
            self._selector.unregister(seat.sock)
            if isinstance(seat, AgentSeat):
                self._watchdog.lose_agent(seat, error)  # it has left
            if seat.left:
                self.hang_up(seat)
            else:
                self._deaths.put((seat, error))

    def _record_deaths(self) -> None:
        """Find out how ranks ended whose connections have ended (body of a thread, since it may
        take a moment)."""
        while (death := self._deaths.get()) is not None:
            seat, error = death
            if self.loss is None:
                how = (
                    self._how(seat) if seat.system == this_system() else None
                ) or self._watchdog.how_it_ended(seat)
                words = isinstance(error, CommError | OSError)
                link = (
                    not how
                    and words
                    and seat.system == this_system()
                    and state_of(seat.pid) not in ("Z", "X", "")
                )
                how = how or (
                    f"has lost its link to the monitor, its process runs ({error})"
                    if link
                    else f"ended without a word ({error})"
                    if words
                    else f"sent what no rank sends ({error!r})"
                )
                self.lose(Failure(seat.world_rank, seat.pid, seat.host, how, link=link))
            with seat.sending:
                seat.sock.close()
            with self._changed:
                seat.left = True
                self._changed.notify_all()

    def _take(self, seat: Seat, frame: dict[str, Any]) -> None:
        arbiter = self._watchdog.arbiter
        match frame["kind"]:
            case "meet":
                self._brought[seat.world_rank] = frame["info"]
                if len(self._brought) == self.size:
                    brought = self._brought
                    self._brought = {}
                    for rank in range(self.size):
                        self._seats[rank].send(
                            "met", value=[brought[rank] for rank in range(self.size)]
                        )
            case "missing":
                seat.send(
                    "missing",
                    value=[rank for rank in range(self.size) if rank not in self._brought],
                )
            case "left":
                seat.send("left", value=sorted(arbiter.ended))
            case "failed":
                loss = Failure(**frame["loss"])
                if loss.world_rank != seat.world_rank:
                    raise CommError(f"it reports the end of rank {loss.world_rank}")
                if frame["blames"] is None:
                    seat.send("noted", value=self.lose(loss))
                else:
                    self._run(self._fail_late, seat, loss)
            case "cut":
                self._run(self._judge_link, seat, int(frame["rank"]))
            case "expendable":
                seat.expendable = True
            case "saves":
                seat.saves = True
                self._tell_savers()
            case "waits":
                arbiter.heard(seat.world_rank, State.unpacked(frame["state"]), int(frame["round"]))
            case "mismatch":
                arbiter.decide(
                    Verdict(
                        "MismatchError", str(frame["text"]), [int(rank) for rank in frame["ranks"]]
                    )
                )
            case "table":
                self._run(self._watchdog.send_table, seat, State.unpacked(frame["state"]))
            case "goodbye":
                arbiter.left(seat.world_rank, State.unpacked(frame["state"]))
                self._part(seat, together=bool(frame["together"]))
            case kind:
                raise CommError(f"unknown frame {kind!r}")

    def _part(self, seat: Seat, *, together: bool) -> None:
        """Record the goodbye of a rank.

        Ranks that stay together leave when all have said goodbye: each is sent "over". After a loss
        none is sent.
        """
        over: list[Seat] = []
        with self._changed:
            self.together = together
            seat.done = True
            seat.left = not together
            if (
                self.loss is None
                and len(self._seats) == self.size
                and all(one.done for one in self._seats.values())
            ):
                over = [one for one in self._seats.values() if not one.left]
                for one in over:
                    one.left = True
            self._changed.notify_all()
        for one in over:
            one.send("over", value=True)

    def _judge_link(self, seat: Seat, rank: int) -> None:
        """Make both ranks of a link that loses packets raise that, unless one of them is lost."""
        with self._changed:
            gone = self._changed.wait_for(
                lambda: self.loss is not None or not {rank, seat.world_rank} <= {*self.present()},
                CUT_WAIT,
            )
        ends = (
            []
            if gone
            else [
                one for one in self.present().values() if one.world_rank in (rank, seat.world_rank)
            ]
        )
        for end in ends:
            end.send(
                "verdict",
                error="LinkLostError",
                text=(
                    f"nothing that rank {seat.world_rank} sent to rank {rank} was acknowledged "
                    f"for {SILENCE:g} s, and both live: the link between rank {seat.world_rank} "
                    f"and rank {rank} is lost; look at the network between them; {LONG_PACKETS}"
                ),
            )

    def _fail_late(self, seat: Seat, loss: Failure) -> None:
        """Record the failure of a rank that lost a peer. That peer's own failure is the cause, so
        wait BLAME_WAIT s for it."""
        with self._changed:
            self._changed.wait_for(lambda: self.loss is not None, BLAME_WAIT)
        seat.send("noted", value=self.lose(loss))
