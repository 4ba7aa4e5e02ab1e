"""A node agent on each host without the monitor: only a system itself knows how its processes end.

    monitor -> node agent                               node agent -> monitor
    look     pids to check; patience; awaited:          seen     frozen: pids; ended: [pid, how], …
             ranks of it for which others wait
    how      rank, pid: how did it end?                 how      rank, text; "" if it does not know
    lost     loss: the job is over, and why             ended    loss: a rank here ended, and not
                                                                 well
    died     loss of a rank; the job continues          absent   loss: a rank here will not connect
    saves    ranks that end on their own at a SIGTERM
    over     every rank has said goodbye                goodbye

The monitor's looks are the job's heartbeat between hosts (watchdog.py): one every LOOK seconds,
each answered. Ranks take no part in it, so a rank may compute for long in one call that holds the
interpreter. A frozen rank is found within 3 s, as on one host; a host that is silent for SILENCE
seconds is lost with all its ranks. If the monitor's host is out of reach, a rank detects it by the
kernel's keep-alives (acceptor.py).

Our own launcher is the node agent of its node, and knows its ranks' exit codes. Under mpirun,
torchrun and srun the agent is a child of the node's first rank (launch/joining.py), which waits for
it until it receives "over". From then on the agent checks the processes on its own, because the
monitor may end with its own host's ranks.
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
CALL_BACK_LIMIT = 5.0  # the same, if it has already listened to the agent's parent
ANSWER_LIMIT = 1.0  # seconds for the monitor's answer whether the job continues after a death
_TRY = 2.0  # seconds of one attempt


class NodeAgent:
    """The node agent of this host. `serve` runs in a thread or process of its own.

    Args:       ranks: the ranks it watches; none: every rank of this system.
                how(rank): the caller's knowledge of that rank's end, or None.
                limit: seconds until the monitor must listen.
    Attributes: loss    why the job is over, once the monitor has said so
                spared  how expendable ranks ended, by world rank; the job continues without them
                savers  ranks that save their work and end on their own when their process gets
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
        # the processes of the monitor's last look
        self._looks = ProcessLooks()
        self._pids = set[int]()
        self._awaited: set[int] = set()  # from the monitor's last look
        self._sock: socket.socket | None = None
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._closed = self._over = False

    def serve(self, address: tuple[str, int], token: bytes) -> None:
        """Answer the monitor until it closes the connection, or close() is called."""
        sock = self._connect(address, token)
        if sock is None:
            return  # its ranks cannot reach the monitor either, and report that
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
        """Report that a rank here did not end well. Return when the monitor has answered, or after
        ANSWER_LIMIT s."""
        self._report("ended", loss)
        with self._changed:
            self._changed.wait_for(
                lambda: self.loss is not None or loss.world_rank in self.spared or self._closed,
                ANSWER_LIMIT,
            )

    def miss(self, loss: Failure) -> None:
        """Report that a rank here will not connect to the monitor; no effect if it has
        connected."""
        self._report("absent", loss)

    def awaited(self) -> set[int]:
        """Return the ranks here that are not known to have connected to the monitor and for which
        others wait."""
        return self._awaited

    def _report(self, kind: str, loss: Failure) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._sock is not None or self._closed, _TRY)
        self._send(kind, loss=dataclasses.asdict(loss))

    def close(self) -> None:
        """Say goodbye: no rank is here any more."""
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
        """Kill the frozen processes here, after the job is over and the monitor is gone."""
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
    """Release the rank that waits for this process, its child (launch/joining.py)."""
    os.write(1, b"over")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


if __name__ == "__main__":
    # signals to the whole job: the ranks end, this process ends after them
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    NodeAgent(limit=CALL_BACK_LIMIT).serve(
        (sys.argv[1], int(sys.argv[2])), sys.stdin.buffer.readline().strip()
    )
