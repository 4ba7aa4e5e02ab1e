"""Several hosts on this machine for a test: tests/clusters/up.sh, and how a command is started on
one of them."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "clusters"
RANK = str(Path(__file__).parent / "cluster_rank.py")
ADDRESS = "10.214.0."  # and the number of the host, from 1


@dataclass(frozen=True)
class Cluster:
    """Hosts that are up. `folder`: where up.sh keeps what it knows."""

    hosts: tuple[str, ...]
    folder: Path

    def on(self, host: str, *command: str) -> list[str]:
        """The command, on that host; it ends when the process started here does."""
        return [str(SCRIPTS / "on.sh"), "--state", str(self.folder), host, *command]

    def ask(self, host: str, *command: str) -> str:
        """Return what the command prints there."""
        return subprocess.run(
            self.on(host, *command), capture_output=True, text=True, check=True, timeout=30
        ).stdout

    def address(self, host: str) -> str:
        return f"{ADDRESS}{self.hosts.index(host) + 1}"

    @property
    def ssh(self) -> str:
        """The ssh of hosts with sshd; else what is in its place, for this machine only: no host can
        enter another."""
        return str(self.folder / "ssh" if self.has_sshd else SCRIPTS / "ssh.sh")

    @property
    def has_sshd(self) -> bool:
        return (self.folder / "ssh").exists()

    @property
    def environment(self) -> dict[str, str]:
        """By which `ssh` knows this cluster."""
        return {"MINIDIST_CLUSTER": str(self.folder)}

    def pid(self, host: str) -> int:
        """The first process of a host, as this machine counts."""
        return int((self.folder / f"{host}.pid").read_text())

    def processes(self) -> set[str]:
        """Return what runs on the hosts: host, process number there, and command line."""
        ask = "for p in /proc/[0-9]*; do echo ${p#/proc/} $(tr '\\0' ' ' < $p/cmdline); done"
        return {
            f"{host} {line}"
            for host in self.hosts
            for line in self.ask(host, "sh", "-c", ask).splitlines()
            if " " in line and "/proc/[0-9]*" not in line
        }


@contextlib.contextmanager
def hosts_up(*hosts: str, options: Sequence[str] = ()) -> Iterator[Cluster]:
    """Hosts as up.sh takes them ("a", "b:loopback"), for the block. Skips the test where this
    machine cannot."""
    folder = Path(tempfile.mkdtemp(prefix="minidist-hosts-")) / "state"
    with subprocess.Popen(
        [str(SCRIPTS / "up.sh"), "--state", str(folder), *options, *hosts],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as up:
        assert up.stdin is not None and up.stdout is not None and up.stderr is not None
        try:
            if not up.stdout.readline().startswith("up: "):
                pytest.skip(up.stderr.read().strip() or "up.sh said nothing")
            yield Cluster(tuple(host.partition(":")[0] for host in hosts), folder)
        finally:
            up.stdin.close()
            up.wait(30)
            shutil.rmtree(folder.parent, ignore_errors=True)


def path_with(*folders: str) -> str:
    """PATH with these folders first."""
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])
