"""A node agent on each host that the monitor is not on: only a system itself knows how its
processes end.

    monitor -> node agent                               node agent -> monitor
    look     pids: what of these? patience; awaited:    seen     frozen: pids; ended: [pid, how], …
             ranks of it that others wait for
    how      rank, pid: how did that end?               how      rank, text; "" if it does not know
    lost     loss: the job is over, and why             ended    loss: a rank here ended, and not
                                                                 well
    died     loss: of a rank without which it goes on   absent   loss: a rank here will not come
    saves    ranks that end by themselves at a SIGTERM
    over     every rank has said goodbye                goodbye

The monitor's looks are the job's heartbeat between hosts (watchdog.py): one every LOOK seconds,
each answered. Ranks take no part in it, so a rank may compute for long in one call that holds the
interpreter. A frozen rank is found within 3 s, as on one host; a host that is silent for SILENCE
seconds is lost with all its ranks. A rank learns by the kernel's keep-alives that the monitor's
host is out of reach (acceptor.py).

Our own launcher is the node agent of its node, and knows its ranks' exit codes. Under mpirun,
torchrun and srun it is a child of the node's first rank (launch/joining.py), which waits for it
until it hears "over". From then on the agent looks by itself, because the monitor may end with its
own host's ranks.
"""

import contextlib
import dataclasses
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from minidist.comm import wire
from minidist.comm.health.acceptor import connect_to_monitor, end_connection
from minidist.comm.health.failure import ENDING, Failure, say_line
from minidist.comm.health.process_state import LOOK, ProcessLooks, exit_of, has_ended, kill_stopped
from minidist.errors import CommError, HandshakeError

CONNECT_LIMIT = 60.0  # seconds until the monitor must listen
CALL_BACK_LIMIT = 5.0  # the same where it has listened before, to the agent's parent
ANSWER_LIMIT = 1.0  # seconds the monitor gets to say whether the job goes on after a death
_TRY = 2.0  # seconds of one attempt


class NodeAgent:
    """This host's end. `serve` runs in a thread or process of its own.

    Args:       ranks: those that it looks after; none: every rank of this system.
                how(rank): what the caller knows of that rank's end; None if nothing.
                limit: seconds until the monitor must listen.
    Attributes: loss    why the job is over, once the monitor has said so
                spared  how expendable ranks ended, by world rank; the job goes on without them
                savers  ranks that save their work and end by themselves when their process is sent
                        SIGTERM
    """

    def __init__(
        self,
        ranks: Sequence[int] = (),
        how: Callable[[int], str | None] | None = None,
        limit: float = CONNECT_LIMIT,
    ) -> None:
        self.loss: Failure | None = None
        self.spared: dict[int, Failure] = {}
        self.savers: set[int] = set()
        self._ranks = list(ranks)
        self._how = how or (lambda rank: None)
        self._limit = limit
        # those it was last asked about
        self._looks = ProcessLooks()
        self._pids = set[int]()
        self._awaited: set[int] = set()  # as the monitor said last
        self._sock: socket.socket | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._closed = self._over = False

    def serve(self, address: tuple[str, int], token: bytes) -> None:
        """Answer the monitor until it hangs up, or close() is called."""
        sock = self._connect(address, token)
        if sock is None:
            return  # its ranks cannot reach it either, and report that
        with sock:
            with self._changed:
                self._sock = sock
                self._changed.notify_all()
            if self._closed:  # while it connected
                self._send("goodbye")
            with contextlib.suppress(CommError, OSError, ValueError):
                while not self._closed:
                    self._take(wire.recv_frame(sock, None))
        if self._over:
            self._look_on()
        self._looks.close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def lose(self, loss: Failure) -> None:
        """A rank here did not end well. Returns when the monitor has answered, or after
        ANSWER_LIMIT s."""
        self._report("ended", loss)
        with self._changed:
            self._changed.wait_for(
                lambda: self.loss is not None or loss.world_rank in self.spared or self._closed,
                ANSWER_LIMIT,
            )

    def miss(self, loss: Failure) -> None:
        """A rank here will not come to the monitor; nothing comes of it if it has been there."""
        self._report("absent", loss)

    def awaited(self) -> set[int]:
        """The ranks here that have not come to the monitor and that others wait for, as far as is
        known."""
        return self._awaited

    def _report(self, kind: str, loss: Failure) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._sock is not None or self._closed, _TRY)
        self._send(kind, loss=dataclasses.asdict(loss))

    def close(self) -> None:
        """No rank is here any more."""
        with self._changed:
            self._closed = True
            sock = self._sock
        if sock is not None:
            self._send("goodbye")
            end_connection(sock)

    def _connect(self, address: tuple[str, int], token: bytes) -> socket.socket | None:
        deadline = time.monotonic() + self._limit
        while not self._closed and time.monotonic() < deadline:
            try:
                return connect_to_monitor(
                    address,
                    token,
                    {"node_agent": self._ranks},
                    f"the node agent of {platform.node()}",
                    _TRY,
                )
            except HandshakeError:
                return None
            except (CommError, OSError):
                continue
        return None

    def _send(self, kind: str, **content: Any) -> None:
        with self._sending, contextlib.suppress(CommError, OSError, ValueError):
            if self._sock is not None:
                wire.send_frame(self._sock, {"kind": kind, **content}, 1.0)

    def _take(self, frame: dict[str, Any]) -> None:
        match frame["kind"]:
            case "look":
                self._pids = set(frame["pids"])
                self._looks.patience = frame["patience"]
                self._awaited = set(frame["awaited"])
                self._send(
                    "seen",
                    frozen=sorted(self._looks.frozen(self._pids)),
                    ended=[[pid, how] for pid, how in self._looks.ended(self._pids).items()],
                )
            case "how":
                self._send(
                    "how",
                    rank=frame["rank"],
                    text=self._how(frame["rank"]) or exit_of(frame["pid"]) or "",
                )
            case "saves":
                self.savers = set(frame["ranks"])
            case "lost" | "died" as kind:
                loss = Failure(**frame["loss"])
                with self._changed:
                    if kind == "lost":
                        self.loss = loss
                    else:
                        self.spared[loss.world_rank] = loss
                    self._changed.notify_all()
            case "over":
                self._over = True
                release_parent()

    def _look_on(self) -> None:
        """The job is over and the monitor has gone: end what is frozen here."""
        deadline = time.monotonic() + ENDING
        while (
            pids := {pid for pid in self._pids if not has_ended(pid)}
        ) and time.monotonic() < deadline:
            for pid in self._looks.frozen(pids):
                say_line(
                    f"minidist: process {pid} on {platform.node()} is frozen (stopped) after its "
                    "goodbye; killed"
                )
                kill_stopped(pid)
            time.sleep(LOOK)


def release_parent() -> None:
    """The rank that waits for this process, its child, need not wait any longer
    (launch/joining.py)."""
    os.write(1, b"over")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    # to all of the job: the ranks end, we end after them
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    NodeAgent(limit=CALL_BACK_LIMIT).serve(
        (sys.argv[1], int(sys.argv[2])), sys.stdin.buffer.readline().strip()
    )
