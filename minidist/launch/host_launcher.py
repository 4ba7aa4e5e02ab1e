"""The launcher of one host's ranks, which `minidist launch --hosts` starts there by ssh (hosts.py).

It reads its order from stdin, so that neither the job's secret nor a quoted command is on a command
line:

    this process -> hosts.py, lines on stdout           hosts.py -> this process, lines on stdin
    hello    host, version of minidist                  the order, as JSON: what to start, node,
                                                        token, folder, …
    port     node 0's: where the monitor listens        numbers of signals that hosts.py was sent
    problem  why nothing can be started here            end of file: hosts.py or its ssh is gone;
                                                        the ranks are ended

Each of its lines begins with MARK; all other lines are printed by the ranks.
"""

import json
import os
import platform
import signal
import sys
from pathlib import Path
from typing import IO, Any

from minidist.errors import CommError, LaunchError
from minidist.launch.limits import Limits, MemoryLimit
from minidist.launch.spawning import Nodes, SpawnedJob, start_thread

MARK = "minidist host: "
NO_ORDER = (
    LaunchError,
    CommError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    AttributeError,
    RecursionError,
)


def version() -> str:
    """Return the version of this minidist; all hosts of a job must have the same."""
    return str(sys.modules["minidist"].__version__)


def take_order() -> tuple[IO[str], str]:
    """Report this host, then read the job order from stdin; the ranks get an empty stdin.

    Returns: the rest of stdin; the order, "" if there is none.
    """
    orders = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    tell(hello=platform.node(), version=version())
    return orders, orders.readline()


def tell_problem(error: Exception) -> None:
    """Send the reason why the order cannot be followed."""
    if isinstance(error, OSError):
        tell(problem=f"{error.strerror}: {error.filename}")
    elif isinstance(error, LaunchError | CommError):
        tell(problem=str(error))
    else:
        tell(problem=f"the order cannot be understood ({type(error).__name__}: {error})")


def main() -> int:
    """Read the order, start the ranks, wait for them. Returns: as spawn()."""
    orders, line = take_order()
    if not line:
        return 1  # another host is not there
    try:
        job = _job_of(json.loads(line))
    except NO_ORDER as error:
        tell_problem(error)
        return 2
    tell(port=job.place.port)
    start_thread(_listen, orders, job.told)
    return job.run()


def _job_of(order: dict[str, Any]) -> SpawnedJob:
    """Return the job that an order describes.

    Raises: OSError if the folder does not exist; LaunchError if the port is taken.
    """
    os.chdir(order["folder"])
    os.environ.update(order["environ"])
    memory = order["memory"] and MemoryLimit(*order["memory"])
    limits = Limits(order["cores"], memory, flight=order["flight"] and Path(order["flight"]))
    nodes = Nodes(
        len(order["sizes"]), order["node"], order["address"], order["port"], tuple(order["sizes"])
    )
    return SpawnedJob(
        order["command"],
        order["sizes"][order["node"]],
        nodes,
        order["token"].encode(),
        order["patience"],
        limits,
    )


def _listen(orders: IO[str], told: list[int]) -> None:
    """Append the signals that arrive to `told`; end of file counts as SIGHUP, as of a terminal."""
    for line in orders:
        told.append(signal.Signals(int(line)))
    told.append(signal.SIGHUP)


def tell(**content: object) -> None:
    """Send a line to hosts.py on stdout, between the lines of the ranks."""
    os.write(1, f"{MARK}{json.dumps(content)}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
