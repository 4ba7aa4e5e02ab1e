"""Make two hosts on one machine: namespaces joined by a link of given bandwidth and latency. For
root, on Linux.

    with joined_hosts("200mbit") as hosts:
        subprocess.Popen([*hosts[1].enter, "minidist", "launch", "--nnodes", "2", "--node-rank", "1", ...])

    namespace 0                        namespace 1
    10.213.0.1  [ tc: 200 Mbit/s ] ==== [ tc: 200 Mbit/s ]  10.213.0.2

Each has its own network, where only the other answers, its own host name, and for each command its
own table of processes. They share memory and files. All of this is removed when the block ends. A
latency takes a kernel with netem (`delays()`). More hosts, and awkward ones: tests/clusters/up.sh.
"""

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from minidist.errors import LaunchError

BURST = "256kb"  # that may pass at the speed of memory, once the link has been idle


@dataclass(frozen=True)
class Host:
    """One of the two hosts: its namespace's name, its address, and the prefix of a command
    that runs there."""

    name: str
    address: str
    device: str  # its end of the link

    @property
    def enter(self) -> list[str]:
        """Return the prefix of a command that runs there. Its processes end when it ends."""
        return [
            "ip",
            "netns",
            "exec",
            self.name,
            "unshare",
            "--uts",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "sh",
            "-c",
            f'echo {self.name} > /proc/sys/kernel/hostname; exec "$0" "$@"',
        ]

    def cut(self) -> None:
        """Unplug the link at this end."""
        _do("ip", "-n", self.name, "link", "set", self.device, "down")

    def mend(self) -> None:
        """Plug it in again."""
        _do("ip", "-n", self.name, "link", "set", self.device, "up")


def missing() -> str | None:
    """Return why this machine cannot run two hosts, in a few words; None if it can try."""
    if getattr(os, "geteuid", lambda: 1)() != 0:
        return "network namespaces are made by root"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} of iproute2 and util-linux not installed" if absent else None


def delays() -> bool:
    """Return whether this kernel has netem, by which tc delays packets; it is tried in a network
    namespace of its own."""
    return (
        missing() is None
        and subprocess.run(
            [
                "unshare",
                "--net",
                "tc",
                "qdisc",
                "add",
                "dev",
                "lo",
                "root",
                "netem",
                "delay",
                "1ms",
            ],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


@contextlib.contextmanager
def joined_hosts(rate: str, delay: str = "") -> Iterator[tuple[Host, Host]]:
    """Yield two hosts joined by a link that carries `rate` in each direction, written as tc does:
    "1gbit".

    Args:   delay: of each packet, in each direction, written as tc does: "2ms"; left out: none.
    Raises: LaunchError, one line, if this machine does not allow it.
    """
    why = missing()
    if why is not None:
        raise LaunchError(f"no two hosts on this machine: {why}")
    mark = uuid.uuid4().hex[:8]
    hosts = (
        Host(f"minidist-{mark}-0", "10.213.0.1", f"md{mark}0"),
        Host(f"minidist-{mark}-1", "10.213.0.2", f"md{mark}1"),
    )
    try:
        for host in hosts:
            _do("ip", "netns", "add", host.name)
        _do(
            "ip",
            "link",
            "add",
            hosts[0].device,
            "netns",
            hosts[0].name,
            "type",
            "veth",
            "peer",
            "name",
            hosts[1].device,
            "netns",
            hosts[1].name,
        )
        for host in hosts:
            _do("ip", "-n", host.name, "address", "add", f"{host.address}/30", "dev", host.device)
            shape = ["tc", "-n", host.name, "qdisc", "add", "dev", host.device]
            if delay:
                _do(*shape, "root", "handle", "1:", "netem", "delay", delay, "limit", "100000")
            _do(
                *shape,
                *(["parent", "1:"] if delay else ["root"]),
                "tbf",
                "rate",
                rate,
                "burst",
                BURST,
                "latency",
                "100ms",
            )
            for device in ("lo", host.device):
                _do("ip", "-n", host.name, "link", "set", device, "up")
        yield hosts
    finally:
        for host in hosts:  # the link goes with them
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LaunchError(
            f"no two hosts on this machine: `{' '.join(command)}` says {done.stderr.strip()!r}"
        )
