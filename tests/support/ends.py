"""Every phase of a rank's joining and leaving, as a point at which it is killed: `die_at(phase)` in
that rank.

A point is before or after the n-th call of a function; so the kill comes there, however busy the
machine is.
"""

import functools
import os
import signal

from minidist.comm import wire
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.progress.stream import StreamTransport
from minidist.comm.transports.shm import transport as shm

PHASES = {
    "before init": (MonitorClient, "__init__", "before", 1),
    "in the monitor's handshake": (wire, "_proof", "before", 1),
    "before the rendezvous": (MonitorClient, "meet", "before", 1),
    "after the rendezvous": (MonitorClient, "meet", "after", 1),
    "before it dials": (full_mesh, "dial", "before", 1),
    "after it dialled": (full_mesh, "dial", "after", 1),
    "in a peer's handshake": (wire, "_proof", "before", 3),
    "after a peer's handshake": (wire, "greet", "after", 2),
    "before it admits": (wire, "admit", "before", 1),
    "before it gives memory": (shm, "hand_over", "before", 1),
    "before all agree on memory": (shm, "_all_agree", "before", 1),
    "connected": (MonitorClient, "attach", "before", 1),
    "before the first barrier": (MonitorClient, "attach", "after", 1),
    "before goodbye": (MonitorClient, "goodbye", "before", 1),
    "after goodbye": (MonitorClient, "goodbye", "after", 1),
    "closing": (StreamTransport, "close", "before", 1),
}
LEAVING = ("before goodbye", "after goodbye", "closing")


def die_at(phase: str) -> None:
    """From now on this process is killed where `phase` says."""
    owner, name, when, number = PHASES[phase]
    function = getattr(owner, name)
    calls = []

    @functools.wraps(function)
    def until_then(*args, **kwargs):
        calls.append(1)
        if when == "before" and len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        result = function(*args, **kwargs)
        if when == "after" and len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, until_then)
