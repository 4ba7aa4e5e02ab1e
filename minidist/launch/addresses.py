"""Find the addresses of this host that other hosts may reach, and the address at which the monitor
answers.

A laptop's name may resolve to 127.0.1.1, a server may have a network card without a route, and
every host with Docker has the same 172.17.0.1. Only another host can find out which address works.
So rank 0 sends all its addresses, and each rank tries one after another. The right one is where the
monitor proves that it knows the job's token.
"""

import contextlib
import platform
import socket
import time
from collections.abc import Sequence

from minidist.comm.health.acceptor import is_loopback
from minidist.comm.health.monitor_client import MonitorClient
from minidist.errors import HandshakeError, LaunchError, PeerLostError, TimeoutError
from minidist.launch.launchers import Launch

MOST = 16  # addresses that are sent
TRY = 1.0  # seconds that each address gets to answer


def own_addresses() -> list[str]:
    """Return this host's addresses that other hosts may reach: likely ones first, IPv6 after IPv4.

    Raises: LaunchError if it has only loopback.
    """
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        # RFC 5737, documentation: no packet is sent, the kernel only picks a route
        sock.connect(("192.0.2.1", 9))
        found.append(str(sock.getsockname()[0]))
    import psutil  # here: most ranks do not need it

    states = psutil.net_if_stats()
    up = [
        entry
        for card, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if card in states and states[card].isup
    ]
    found += [entry.address for entry in up if entry.family == socket.AF_INET]
    found += [entry.address for entry in up if entry.family == socket.AF_INET6]
    addresses = [
        address
        for address in dict.fromkeys(found)
        if not (is_loopback(address) or address.lower().startswith("fe80:"))
    ]
    if not addresses:
        raise LaunchError(
            f"{platform.node()} has no network address but loopback, and the job has several "
            "hosts; see `ip address`"
        )
    return addresses[:MOST]


def connect_to_any(
    hosts: Sequence[str],
    port: int,
    token: bytes,
    launch: Launch,
    limit: float,
    *,
    begun: bool = False,
) -> MonitorClient:
    """Connect to the monitor, which listens at one or more of these addresses and proves that it
    knows the token.

    Args:   begun: the monitor is known to listen; if every address refuses the connection, the
            monitor is gone.
    Raises: HandshakeError if the monitor refuses this rank; PeerLostError if it is gone;
            TimeoutError, with every address, after `limit` seconds.
    """
    rank = launch.world_rank
    size = launch.world_size
    deadline = time.monotonic() + limit
    if len(hosts) == 1:
        return MonitorClient((hosts[0], port), token, rank, size, limit=limit, begun=begun)
    refused: HandshakeError | None = None
    while refused is None and time.monotonic() < deadline:
        gone: list[PeerLostError] = []
        for host in hosts:
            try:
                link = MonitorClient((host, port), token, rank, size, limit=TRY, begun=begun)
                link.limit = limit
                return link
            except HandshakeError as error:
                refused = error
            except PeerLostError as error:
                gone.append(error)
            except TimeoutError:
                continue
        if len(gone) == len(hosts):
            raise gone[0]
    raise refused or TimeoutError(
        f"rank {rank} could not reach the job's monitor within {limit:g} s, at none of "
        f"{', '.join(hosts)}, port {port}; is there a firewall between the hosts?"
    )
