"""Start the processes of an elastic job on this host: by a fork of the template, or else by the
command itself."""

import contextlib
import os
import subprocess
from collections.abc import Callable, Sequence

from minidist.comm.health.failure import say_line
from minidist.comm.health.process_state import PATIENCE, ProcessLooks, stop_of
from minidist.errors import LaunchError
from minidist.launch.launchers import clean_environment
from minidist.launch.limits import Limits
from minidist.launch.spawning import copy_lines, start_thread
from minidist.launch.template import Orphan, Template, start_template


class Starter:
    """A starter of processes on this host.

    Args:       address: the job's launcher's. who(number): the name in front of the lines that a
                process writes to stderr. template: a template that this process has forked, or
                None.
    Attributes: name: this host's. ending: no more processes may be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        token: bytes,
        limits: Limits,
        address: tuple[str, int],
        who: Callable[[int], str],
        *,
        template: Template | None = None,
    ) -> None:
        self.command = list(command)
        self.token = token
        self.limits = limits
        self.address = address
        self.name = os.uname().nodename
        self._who = who
        self._template = template
        self.ending = False

    def start_template(self, give_up: Callable[[], bool]) -> None:
        """Start the template, if there is none: a process that has loaded everything and is then
        forked.

        Waits until it is ready, or until give_up() is true. On a system without templates,
        processes are started without one.
        """
        with contextlib.suppress(OSError):
            if self._template is None:
                self._template = start_template(self.command, self._environment(0))
                self.limits.started(self._template.pid)
            looks = ProcessLooks(PATIENCE)
            while not self._template.wait(0.05) and not give_up():
                looks.frozen({self._template.pid})  # one that is stopped for too long is killed
            if not (self._template.ready or give_up()):
                say_line(
                    f"minidist: the job's template (process {self._template.pid}) has ended at "
                    "its start; processes are started without it"
                )

    def start(self, number: int) -> "subprocess.Popen[bytes] | Orphan | None":
        """Start the process of this number; return None if no more are to be started.

        Raises: LaunchError if the command cannot be started.
        """
        process: subprocess.Popen[bytes] | Orphan | None = (
            None if self._template is None else self._template.fork(number, self._variables(number))
        )
        if process is None and self.ending:  # the job ended during the fork
            return None
        if process is None:
            try:
                process = subprocess.Popen(
                    self.command,
                    env=self._environment(number),
                    stdin=None if number == 0 else subprocess.DEVNULL,
                    stderr=None if number == 0 else subprocess.PIPE,
                )
            except OSError as error:
                raise LaunchError(f"cannot start {self.command[0]!r}: {error.strerror}") from error
        self.limits.started(process.pid)
        return process

    def pass_on_lines(self, number: int, process: "subprocess.Popen[bytes] | Orphan") -> None:
        """Copy the process's stderr to our stderr, in a thread."""
        if process.stderr is not None:
            start_thread(copy_lines, process.stderr, lambda: self._who(number))

    def stopped(self, process: "subprocess.Popen[bytes] | Orphan") -> bool:
        """Return whether the process is stopped (SIGSTOP)."""
        return bool(stop_of(process.pid))

    def how_it_ended(self, process: "subprocess.Popen[bytes] | Orphan", code: int) -> str:
        """Return the exit code in words."""
        return self.limits.how_it_ended(code)

    def close(self) -> None:
        """End the template; no process will be started here any more."""
        if self._template is not None:
            self._template.close()

    def _environment(self, number: int) -> dict[str, str]:
        return {**clean_environment(os.environ), **self._variables(number)}

    def _variables(self, number: int) -> dict[str, str]:
        return {
            "MINIDIST_ELASTIC": f"{self.address[0]}:{self.address[1]}",
            "MINIDIST_PROCESS": str(number),
            "MINIDIST_TOKEN": self.token.decode(),
            **self.limits.variables(),
        }
