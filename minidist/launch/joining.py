"""From a launcher's variables to a link to the job's monitor; health/rendezvous.py has the table."""

from dataclasses import dataclass

from minidist.comm import wire
from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.node_agent import NodeAgentProcess
from minidist.comm.health.rendezvous import (
    MonitorAddress,
    MonitorProcess,
    TokenFile,
    connect_by_file,
    outward_address,
    place_from_environment,
    share_by_mpi,
    token_from_environment,
)
from minidist.errors import LaunchError
from minidist.launch.launchers import Launch


@dataclass
class Joined:
    """What a rank holds of its job; `monitor` and `file` are rank 0's, where it started the monitor.

    `agent` is held by the first rank of each other host, unless a launcher of ours is there.
    """

    link: MonitorClient
    token: bytes
    monitor: MonitorProcess | None = None
    file: TokenFile | None = None
    agent: NodeAgentProcess | None = None


def find_monitor(launch: Launch, limit: float) -> Joined:
    """Connect to the monitor of the job that `launch` describes, starting it where that falls to us.

    Raises: LaunchError, HandshakeError or TimeoutError, as md.init says.
    """
    place = place_from_environment()
    if place is not None:
        return _connect(launch, place, limit)
    joined = _by_mpi(launch, limit) if launch.by_mpirun else _by_address(launch, limit)
    if launch.local_rank == 0 and launch.world_rank != 0 and not launch.one_host:
        joined.agent = NodeAgentProcess(joined.link.address, joined.token)
    return joined


def _connect(launch: Launch, place: MonitorAddress, limit: float) -> Joined:
    link = MonitorClient(place.address, place.token, launch.world_rank, launch.world_size, limit=limit)
    return Joined(link, place.token)


def _by_mpi(launch: Launch, limit: float) -> Joined:
    """Rank 0 starts the monitor and tells the others by MPI, also if it could not."""
    if launch.world_rank != 0:
        return _connect(launch, share_by_mpi(None, limit), limit)
    try:
        host = "127.0.0.1" if launch.one_host else outward_address()
        monitor = MonitorProcess(launch.world_size, token_from_environment() or wire.new_token(), host=host)
    except (LaunchError, OSError) as error:
        share_by_mpi(None, limit, problem=str(error))
        raise
    joined = _connect(launch, share_by_mpi(monitor.place, limit), limit)
    joined.monitor = monitor
    return joined


def _by_address(launch: Launch, limit: float) -> Joined:
    """torchrun and srun: rank 0 hosts the monitor one port above MASTER_PORT."""
    host = "127.0.0.1" if launch.one_host else launch.master_addr
    address = host, launch.master_port + 1
    token = token_from_environment()
    file = TokenFile(f"{launch.launcher} {launch.job} {host} {address[1]}") if token is None else None
    if launch.world_rank == 0:
        monitor = MonitorProcess(launch.world_size, token or wire.new_token(), host=host, port=address[1])
        if file is not None:
            file.write(monitor.place.token)
        joined = _connect(launch, monitor.place, limit)
        joined.monitor, joined.file = monitor, file
        return joined
    if file is None:
        return _connect(launch, MonitorAddress(*address, token or b""), limit)
    link, token = connect_by_file(file, address, launch.world_rank, launch.world_size, limit)
    link.limit = limit
    return Joined(link, token)
