"""Jobs that measure on request: contenders take turns in one run, because the machine is noisy.

A job is a set of processes, the ranks of one contender. Each rank connects back over a Unix socket
and sleeps in the kernel until it gets a question; only one job measures at a time. Every round asks
all contenders in turn, and the median over rounds is reported, so a disturbance hits all contenders
equally.
"""

import argparse
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from minidist.errors import LaunchError, PeerLostError
from minidist.files import scratch
from minidist.launch.own_python import module_command

# seconds until every rank of a job must have connected: only to import PyTorch takes a few
START_LIMIT = 60.0
ANSWER_LIMIT = 300.0  # largest seconds of one measurement
LAST_WORDS = 10.0  # seconds for a rank that closed its connection to print the reason and exit


class Job:
    """The ranks of one contender, which wait for questions.

    Args:
        name: for the table.
        size: number of ranks.
        command: the words that start all ranks (by a launcher), or one rank.
        once_per_rank: start `size` copies of `command`, each with its --rank and --size.
    Raises:
        LaunchError, with the output of the processes, if a rank does not connect in time.
    """

    def __init__(
        self, name: str, size: int, command: list[str], *, once_per_rank: bool = False
    ) -> None:
        self.name = name
        self.size = size
        self._folder = ExitStack()
        path = self._folder.enter_context(scratch(prefix="minidist-bench-"))
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path / "meet"))
        self._listener.listen(size)
        self._log = open(path / "log", "w+")  # noqa: SIM115 - as long as the job
        copies = (
            [[f"--rank={rank}", f"--size={size}"] for rank in range(size)]
            if once_per_rank
            else [[]]
        )
        self._processes = [
            subprocess.Popen(
                [*command, "--meet", str(path), *copy],
                stdout=self._log,
                stderr=self._log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for copy in copies
        ]
        self._ranks: dict[int, Any] = {}
        self._accept_ranks()

    def _accept_ranks(self) -> None:
        self._listener.settimeout(0.2)  # then check that the processes still live
        deadline = time.monotonic() + START_LIMIT
        while len(self._ranks) < self.size:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:  # of the accept
                if time.monotonic() < deadline and not any(
                    process.poll() for process in self._processes
                ):
                    continue
                started = len(self._ranks)
                output = self.output()
                self.close()
                raise LaunchError(
                    f"bench: {self.name} started {started} of {self.size} ranks: {output}"
                ) from None
            with connection:  # the stream keeps it open
                connection.settimeout(ANSWER_LIMIT)
                stream = connection.makefile("rw")
            self._ranks[json.loads(stream.readline())["rank"]] = stream

    def output(self) -> str:
        """Return the last 2,000 characters that the job's processes printed."""
        self._log.flush()
        self._log.seek(0)
        return self._log.read()[-2000:].strip() or "(it printed nothing)"

    def ask(self, **question: Any) -> list[Any]:
        """Send every rank the same question.

        Returns: their answers in rank order.
        Raises:  PeerLostError, with the output of the processes, if a rank ends without an answer.
        """
        for rank in range(self.size):
            self._ranks[rank].write(json.dumps(question) + "\n")
            self._ranks[rank].flush()
        answers = []
        for rank in range(self.size):
            line = self._ranks[rank].readline()
            if not line:
                self._wait(LAST_WORDS)
                raise PeerLostError(
                    f"bench: rank {rank} of {self.name} ended: {self.output()}", rank
                )
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        """End the job's processes and remove its folder."""
        for stream in self._ranks.values():
            stream.close()
        self._wait(5.0)
        self._listener.close()
        self._log.close()
        self._folder.close()

    def _wait(self, limit: float) -> None:
        """Wait for each process at most `limit` seconds, then kill it."""
        for process in self._processes:
            try:
                process.wait(timeout=limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def closed_at_the_end(jobs: list[Job]) -> Iterator[None]:
    """Close the jobs of the list at the end of the block, also jobs that the block adds."""
    try:
        yield
    finally:
        for job in jobs:
            job.close()


def start_workers(
    module: str, contender: str, ranks: int, options: Sequence[str] = (), *, by: str = "launch"
) -> Job:
    """Start the ranks of one contender: the module as a program, with the contender's name.

    Args:    by: "launch" (minidist launch), "mpirun", or "rank": each rank separately, with its
             --rank and --size.
    Raises:  LaunchError as Job.
    """
    words = module_command(module, contender, *options)
    if by == "launch":
        words = module_command(
            "minidist", "launch", "-n", str(ranks), "-m", module, contender, *options
        )
    elif by == "mpirun":
        words = ["mpirun", "-n", str(ranks), *words]
    return Job(contender, ranks, words, once_per_rank=by == "rank")


def slowest(job: Job, **question: Any) -> list[float]:
    """Ask all ranks. Returns: the seconds of each repetition on its slowest rank."""
    return [max(row) for row in zip(*job.ask(**question), strict=True)]


def answer(folder: str, rank: int, measure: Callable[..., Any]) -> None:
    """Connect a rank to its job, then answer every question with `measure(**question)` until the
    job closes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(Path(folder) / "meet"))
        with connection.makefile("rw") as stream:
            stream.write(json.dumps({"rank": rank}) + "\n")
            stream.flush()
            for line in stream:
                stream.write(json.dumps(measure(**json.loads(line))) + "\n")
                stream.flush()


def worker_arguments() -> argparse.ArgumentParser:
    """Return a parser of the arguments that every rank's program takes."""
    parser = argparse.ArgumentParser(
        description="one rank of a contender; minidist bench starts it"
    )
    parser.add_argument("contender")
    parser.add_argument("--meet", required=True, help="the folder of the job")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    return parser


def join_gloo(folder: str, rank: int, size: int) -> Any:
    """Join PyTorch's process group over gloo, with one thread. Returns: torch.distributed."""
    import torch

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    return torch.distributed
