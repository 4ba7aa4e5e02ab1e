"""This process's membership in the job of its launcher: md.init joins the job, the end of the
process leaves it.

A process belongs to one launcher's job, as it belongs to one MPI_COMM_WORLD: the module keeps that
one membership, and all other groups are passed as arguments. How a rank ends, and what the others
see:

    returns                       goodbye to the monitor; nothing is printed
    an uncaught exception         its traceback with the rank's name, once; every other rank's wait
                                  raises PeerLostError, for which the rank prints one line
    ConfigError                   one line in the whole job, exit status 2
    sys.exit(3), os._exit, kill   the monitor reports which rank ended, and how; sys.exit(256),
                                  which a system takes for 0, is status 1
    SIGTERM, work saved           goodbye, and exit status 75 (try again): only a rank that has
                                  called saves_when_told
    a started call that fails     as an uncaught exception, even if no rank ever waited for it
    its launcher is told to stop  nothing; the launcher prints it
    a thread that never ends      the monitor names rank and thread, `limit` s after the end of the
                                  main thread (early_exits.py)
    crashes after its goodbye     the launcher reports which process; under mpirun the monitor names
                                  the rank (crash.py)

Under mpirun a process that fails must not reach MPI_Finalize, which waits for all: it calls
MPI_Abort.
"""

import atexit
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from threadpoolctl import ThreadpoolController

from minidist.comm.cost.link_model import Profile, load_profile
from minidist.comm.group import Group
from minidist.comm.health.failure import (
    AGAIN,
    ENDING,
    LAUNCHER,
    Failure,
    ending,
    say_line,
    within,
    words,
)
from minidist.comm.health.process_state import PATIENCE
from minidist.comm.ledger import Ledger
from minidist.comm.transports.progress.mailbox import loopback
from minidist.device import blas
from minidist.device.cores import of_all_ranks
from minidist.errors import CommError, ConfigError, LaunchError
from minidist.launch import transports
from minidist.launch.arguments import check_count, check_seconds, check_word
from minidist.launch.children import flush_output
from minidist.launch.early_exits import watch_exits_at_once, watch_threads
from minidist.launch.exits import watch_exits
from minidist.launch.flight import begin_flight
from minidist.launch.joining import Joined, find_monitor
from minidist.launch.launchers import Launch, detect, nodes_of
from minidist.launch.mpi_init import abort_mpi, mpi_world, watched
from minidist.launch.which_mpi import cannot_meet, find_launch, refusal, remark

FAREWELL = 0.5  # seconds a failed rank waits for the others to have said their line
_POLL = 0.01  # seconds between looks at MPI of a rank that waits for the others' goodbyes
REPORT_LIMIT = 30.0  # seconds a rank that fails before md.init tries to say so


class Membership:
    """The membership of this process as a rank of its job.

    `world` is the group of all ranks, once they have joined.
    """

    def __init__(self, launch: Launch, transport: str = "", patience: float = PATIENCE) -> None:
        self.launch = launch
        self.transport = transport
        self.patience = patience
        self.joined: Joined | None = None
        self.world: Group | None = None
        self.status = 0  # the exit status, as far as it is known
        self.exit: SystemExit | None = None  # the exception with which the process is ending
        self.failed = False
        self.saves = False  # it ends by itself, with AGAIN, when it is told to stop
        self.quiet = False  # another process prints its failure
        # the script that a rank of run(transport="mpi") is importing for its function
        self.importing = ""
        self._process = os.getpid()
        self._left = False

    def join(self, name: str, limit: float) -> Group:
        """Find the monitor, exchange data with all ranks, connect the transport.

        Return the group of all ranks.
        """
        launch = self.launch
        if name == "mpi" and cannot_meet(launch):
            raise refusal(launch)
        with watched(launch, limit, self.patience) as initialised:
            joined = self.find_monitor(limit, initialised)
            # only rank 0's counts: all ranks must make the same choices
            profile = load_profile() if launch.world_rank == 0 else None
            try:
                infos = joined.link.meet(
                    {
                        "transport": name,
                        "host": platform.node(),
                        "node": launch.node_rank if launch.numbers_nodes else None,
                        "local": (launch.local_rank, launch.local_size)
                        if launch.knows_places
                        else None,
                        "monitor": (joined.link.address[0], joined.link.beside_monitor),
                        "profile": profile and profile.as_json(),
                    }
                )
            finally:
                if joined.file is not None:
                    joined.file.remove()  # all ranks have met, or never will
            for helper in joined.helpers:
                helper.met = True
        chosen = sorted({info["transport"] for info in infos})
        if len(chosen) > 1:
            raise LaunchError(
                f"the ranks chose different transports: {', '.join(chosen)}; give all ranks the "
                "same transport"
            )
        if name == "mpi" and not launch.by_mpirun:
            raise LaunchError(
                f"transport 'mpi' needs ranks that mpirun started, and {launch.launcher} started "
                "these; use auto, or start the program with mpirun"
            )
        nodes = nodes_of(infos)
        self.launch = launch.placed(nodes)
        if joined.link.beside_monitor:  # ranks of other hosts know an address of this host
            joined.link.local_host = next(
                (address for address, beside in (info["monitor"] for info in infos) if not beside),
                joined.link.local_host,
            )
        transport = transports.build(
            name, joined.link, joined.token, limit, node=nodes[launch.world_rank]
        )
        joined.link.attach(transport.waits, transport.abort, transport.lose)
        transport.profile = infos[0]["profile"] and Profile.from_json(infos[0]["profile"])
        world = Group(
            transport, Ledger(launch.world_rank), tuple(range(launch.world_size)), nodes=nodes
        )
        begin_flight(world)
        return world

    def is_this_process(self) -> bool:
        """Return whether this process is the rank, not a child that the rank has forked."""
        return os.getpid() == self._process

    @property
    def ending(self) -> bool:
        """Return whether this process fails, or leaves its job."""
        return self._left or self.failed

    def saves_when_told(self) -> None:
        """Declare that from now on this rank saves its work at SIGTERM and ends with status AGAIN.

        Its launcher passes SIGTERM on.
        """
        self.saves = True
        if self.joined is not None:
            self.joined.link.saves_when_told()

    def find_monitor(self, limit: float, initialised: Callable[[], None]) -> Joined:
        """Connect to the job's monitor; from then on it reports our end to the other ranks.

        Calls `initialised` after MPI_Init.
        """
        if self.launch.by_mpirun:
            mpi_world(self.launch)
        initialised()
        self.joined = find_monitor(self.launch, limit, self.patience)
        return self.joined

    def fail(self, error: BaseException) -> bool:
        """Report to the job that this process fails with `error`.

        Return whether it is the first failure.
        """
        self.failed, self.status = True, Failure.by_exception(error, self.launch.world_rank).status
        if self.world is not None:
            self.world.ledger.flight.end(*ending(error))
        if self.joined is None:
            return self.launch.world_rank == 0  # not joined yet: every rank sees the same mistake
        first = self.joined.link.report(error)
        if not first and (loss := self.joined.link.wait_for_loss(FAREWELL)) is not None:
            self.status = loss.status
        return first

    def say(self, error: BaseException, first: bool) -> None:
        """Print why this rank ends: the traceback if it failed first, otherwise one line or
        none."""
        rank = self.launch.world_rank
        size = self.launch.world_size
        if self.quiet or isinstance(error, KeyboardInterrupt):
            return
        if first and isinstance(error, ConfigError):
            text = f"minidist: {error}"
        elif first:
            text = (
                f"minidist: rank {rank} of {size} (process {os.getpid()} on {platform.node()}) "
                "failed:\n" + "".join(traceback.format_exception(error)).rstrip()
            )
        elif self.status == 2:  # bad input is one line, printed by the first rank
            return
        else:
            cause = self.joined.link.loss if self.joined is not None else None
            if cause is not None and cause.world_rank == LAUNCHER:
                return
            said = (
                f"PeerLostError: {within(cause, error)}"
                if cause
                else f"{type(error).__name__}: {words(error)}"
            )
            text = f"minidist: rank {rank} stops: {said.splitlines()[0]}"
        say_line(text)

    def leave(self) -> None:
        """Release everything at the end of the process (not of its children).

        Say goodbye to the monitor, or end a failed job.
        """
        if not self.is_this_process() and self.launch.by_mpirun:
            flush_output()
            os._exit(self.status)  # MPI_Finalize would be called in the rank's name
        if self._left or not self.is_this_process():
            return
        self._left = True
        victim = False
        late = False
        if (
            self.exit is not None
            and self.status
            and not self.failed
            and not (self.saves and self.status == AGAIN)
        ):
            self.fail(self.exit)
        if self.world is not None and not self.failed:
            try:
                self.world.close()
            except BaseException as error:  # of a started call; Python would ignore it here
                self.say(error, self.fail(error))
                late = True
        if self.joined is not None:
            link = self.joined.link
            victim = link.loss is not None
            if not self.failed and not victim:
                link.goodbye(together=self.launch.by_mpirun)
            elif not victim:
                link.wait_until_released(FAREWELL)  # let the others speak before we end them
        if self.world is not None:
            self.world.transport.close()  # after the goodbye: no abort may reach a closed transport
        if self.joined is not None:
            together = self.launch.by_mpirun and not (self.failed or victim)
            if together:
                while not link.wait_for_all(
                    _POLL
                ):  # MPI_Finalize would wait without noticing a loss
                    transports.progress_mpi()
                victim = link.loss is not None
            link.close(crashes=together and not victim)
        if (self.failed or victim) and self.launch.by_mpirun:
            if victim:
                time.sleep(4 * FAREWELL)  # the rank that is the cause prints, then ends all
            abort_mpi(self.status or 1)
        for helper in self.joined.helpers if self.joined is not None else ():
            helper.close()
        if late:
            flush_output()
            os._exit(self.status)
        if self.joined is not None:  # other exit handlers, and MPI_Finalize, run next
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ENDING)


_membership: Membership | None = None
_running: ContextVar[Group | None] = ContextVar("running", default=None)
"""The world of the rank of md.run that runs here: a thread, or a process that is no launcher's."""


def as_rank(world: Group, fn: Callable[..., Any], *args: Any) -> Any:
    """Return fn(world, *args), as a rank of md.run; inside, init() returns this world."""
    _running.set(world)
    return fn(world, *args)


def init(
    *,
    transport: str | None = None,
    limit: float = 120.0,
    threads: int | None = None,
    patience: float = PATIENCE,
) -> Group:
    """Join the job that mpirun, srun, torchrun, `minidist launch` or an operator (env://) started.

    A process that was started without a launcher becomes a job of one rank.

    Args:
        transport: "auto" (shared memory inside a host, TCP between hosts), "tcp", "shm", "mpi" or
        "nccl". Default: "mpi" under mpirun, else "auto"; also "auto" under Open MPI's mpirun if
        mpi4py has another MPI (which_mpi.py). The group's transport.name says what that gave:
        "shm", "shm+tcp", ….
        limit: seconds that joining, and later each wait, may last.
        threads: BLAS threads of this rank. Default: cores // ranks on this host, if there are
        several ranks.
        patience: seconds that a rank's process may be stopped (SIGSTOP) before it counts as lost,
        if rank 0 starts the monitor: under mpirun, torchrun and srun. `minidist launch` and md.run
        have an option of their own.
    Returns: the Group of all ranks; the same one when called again, and in a function that md.run
             runs.
    Raises:
        LaunchError if the launcher's variables or the ranks' choices contradict each other, if
        mpirun is another MPI's, or if the job's port is taken; ConfigError if rank 0's
        communication profile cannot be read; HandshakeError, TimeoutError (naming the missing
        ranks) if joining fails. Under mpirun a rank that ends before md.init, or does not call it
        within `limit`, ends the whole job, with one line that names it: MPI_Init cannot be
        interrupted.
    """
    global _membership
    limit = check_seconds("init", "limit", limit)
    patience = check_seconds("init", "patience", patience)
    if threads is not None:
        threads = check_count("init", "threads", threads, "thread")
    if transport is not None:
        transport = check_word("init", "transport", transport)
    if (running := _running.get()) is not None:
        if transport not in (None, "auto", running.transport.name):
            raise LaunchError(
                f"init(transport={transport!r}): this is a rank of md.run, which joined over "
                f"{running.transport.name!r}"
            )
        return running
    if transport is not None:
        transport = transports.current_name(
            transport, speaks=_membership is None and detect().world_rank == 0
        )
        if _membership is not None:
            transports.check_name(transport, transports.PROCESSES + transports.THREADS)
    if _membership is None:
        launch = find_launch()
        name = transport or launch.transport
        launch = replace(launch, mpi_by_srun=launch.launcher == "slurm" and name == "mpi")
        if launch.other_mpi and transport is None and launch.world_rank == 0:
            say_line(remark(launch))
        transports.check_name(
            name, transports.PROCESSES + (transports.THREADS if launch.alone else ())
        )
        _membership = Membership(launch, name, patience)
        if launch.alone:
            _membership.world = _world_of_one(_membership, limit)
        else:
            _membership.world = _joined_world(_membership, limit, threads)
    world = _membership.world
    if world is None:
        raise LaunchError(
            "this process could not join its job before and cannot try again; start the job again"
        )
    if transport not in (None, _membership.transport, world.transport.name) and world.size > 1:
        raise LaunchError(
            f"init(transport={transport!r}): this process joined its job over "
            f"{_membership.transport!r}"
        )
    return world


def _world_of_one(membership: Membership, limit: float) -> Group:
    """Return the world of a process that no launcher has started."""
    world = Group(loopback(0, limit), Ledger(0), (0,))
    begin_flight(world)
    atexit.register(membership.leave)
    _let_interrupts_in()
    return world


def _joined_world(membership: Membership, limit: float, threads: int | None) -> Group:
    """Join the job that a launcher has started; from before on, an end of this process ends the
    job. Return the world."""
    launch = membership.launch
    limit_blas_threads(threads, launch.local_size)
    watch_exits(membership)
    watch_threads(membership, limit)
    if launch.by_mpirun:
        watch_exits_at_once(membership)
    _let_interrupts_in()
    world = membership.join(membership.transport, limit)
    if not launch.knows_places:
        limit_blas_threads(threads, membership.launch.local_size)
    return world


def adopt(membership: Membership) -> Membership:
    """Make this the process's membership.

    Its launch, its monitor and its world may change (generations.py).
    """
    global _membership
    watch_exits(membership)
    _membership = membership
    return membership


def current() -> Membership | None:
    """Return the membership of this process, or None before init."""
    return _membership


def speaks_first(error: BaseException, *, everywhere: bool = False) -> bool:
    """Report `error` as the end of this rank; return whether this rank should print it.

    The monitor decides: the first rank to report prints. A rank that fails before md.init joins the
    job to report, because the others would wait for it (in MPI_Init for ever). If an error happens
    `everywhere`, rank 0 prints it.
    """
    global _membership
    try:
        if _membership is None:
            launch = find_launch()
            if launch.alone or everywhere:
                return launch.world_rank == 0 and not _said_by_launcher(error, launch)
            _membership = Membership(launch)
            watch_exits(_membership)
            with watched(launch, REPORT_LIMIT) as initialised:
                _membership.find_monitor(REPORT_LIMIT, initialised)
    except (LaunchError, CommError):
        return _membership is None or _membership.launch.world_rank == 0
    return (
        _membership.fail(error)
        and not _membership.quiet
        and not _said_by_launcher(error, _membership.launch)
    )


def _said_by_launcher(error: BaseException, launch: Launch) -> bool:
    """Return whether our launcher prints this error: Ctrl-C reaches it too, and it prints one line
    for the job."""
    return isinstance(error, KeyboardInterrupt) and launch.launcher == "minidist"


def _let_interrupts_in() -> None:
    """Unblock SIGINT, which our launcher blocks at the start: Ctrl-C during imports would print up
    to 70 lines."""
    if signal.SIGINT in signal.sigpending():
        raise SystemExit(130)  # the launcher has printed the line
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def limit_blas_threads(
    threads: int | None, local_size: int, libraries: ThreadpoolController | None = None
) -> int:
    """Give this rank its share of the cores; return the number of threads it may use.

    Args: libraries: the libraries with threads of this process, which take milliseconds to find;
          None: find them.
    """
    count = threads or max(1, of_all_ranks() // local_size)
    (libraries or ThreadpoolController()).limit(limits=count, user_api="blas")
    blas.use(count)
    return count
