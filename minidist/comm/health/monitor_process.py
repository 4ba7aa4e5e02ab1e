"""The monitor as a child process of rank 0, used if another launcher started the ranks
(launch/joining.py).

Its arguments are SIZE LISTENER PATIENCE; the token arrives on stdin, which ends when rank 0 ends.
It notifies rank 0 when every rank has said goodbye, and then watches the processes until all have
ended.
"""

import select
import signal
import socket
import sys
import time

from minidist.comm.health.failure import ENDING, listed, say_line
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.node_agent import release_parent
from minidist.comm.health.process_state import exit_of

STOP = 10.0  # seconds that the ranks have to end when one is lost


def main(size: int, listener: socket.socket, patience: float) -> None:
    """Watch the ranks until all have ended."""

    def rank_0_ends() -> bool:
        return bool(select.select([sys.stdin], [], [], 0.0)[0])

    # Ctrl-C; the signal that Slurm sends to every process of a step
    for number in (signal.SIGINT, signal.SIGTERM):
        # the ranks end, possibly after a save; this process ends after them
        signal.signal(number, signal.SIG_IGN)
    monitor = Monitor(
        size,
        sys.stdin.buffer.readline().strip(),
        listener,
        how=lambda seat: exit_of(seat.pid),
        patience=patience,
    )
    monitor.start()
    while not monitor.wait(0.2) and monitor.loss is None:
        if rank_0_ends():
            monitor.wait(0.5)  # time for its last word to arrive
            if monitor.loss is None and not monitor.has_left(0):
                break
    if monitor.wait(0.0):
        release_parent()
        monitor.release_agents()
        if (slow := monitor.wait_until_ended(ENDING - 0.5)) and monitor.loss is None:
            say_line(
                f"minidist: {late(slow, size, monitor.in_user_code(slow))}; the system kills them"
            )
        monitor.wait_until_silent(0.5)
        if monitor.loss is not None and monitor.loss.traceback:
            say_line(f"minidist: {monitor.loss}; {monitor.loss.traceback}")
    if monitor.loss is not None:
        if not monitor.loss.traceback:  # the lost rank could not report it
            say_line(f"minidist: {monitor.loss}; the job ends")
        deadline = time.monotonic() + STOP
        while time.monotonic() < deadline and not rank_0_ends():
            # a rank that connects late must also get the failure
            if monitor.wait_until_stopped(0.2, late=True):
                break
        monitor.wait_until_stopped(max(0.0, deadline - time.monotonic()))
    monitor.close()


def late(slow: list[int], size: int, busy: list[int]) -> str:
    """Return a text that names the `busy` ranks of those that have not ended: the others wait for
    them in MPI_Finalize."""
    named = busy or slow
    waiting = [rank for rank in slow if rank not in named]
    gone = sorted(set(range(size)).difference(slow))
    more = [f"{listed(gone)} had"] * bool(gone) + [
        f"{listed(waiting)} waited for that in MPI_Finalize"
    ] * bool(waiting)
    return (
        f"{listed(named)} had not ended {ENDING} s after the last goodbye"
        + f" ({'; '.join(more)})" * bool(more)
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), float(sys.argv[3]))
