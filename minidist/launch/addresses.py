"""A host has several addresses: those that other hosts may reach, and the one at which the monitor answers.

A laptop's name may mean 127.0.1.1, a server has a network card that leads nowhere, and every host with Docker has the
same 172.17.0.1. Which address is right shows only from another host. So rank 0 tells all it has, and each rank tries
one after another: the monitor is where the job's token is known.
"""

import contextlib
import platform
import socket
import time
from collections.abc import Sequence

from minidist.comm.health.acceptor import is_loopback
from minidist.comm.health.monitor_client import MonitorClient
from minidist.errors import HandshakeError, LaunchError, TimeoutError
from minidist.launch.launchers import Launch

MOST = 16           # addresses that are told
TRY = 1.0           # seconds that one of them gets to answer


def own_addresses() -> list[str]:
    """This host's addresses (IPv4) that other hosts may reach, the likely ones first.

    Raises: LaunchError if it has none but loopback.
    """
    found = []
    with contextlib.suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(("192.0.2.1", 9))     # RFC 5737, documentation: no packet is sent, the kernel only picks a route
        found.append(str(sock.getsockname()[0]))
    import psutil  # here: most ranks need it for nothing

    states = psutil.net_if_stats()
    found += [entry.address for card, entries in sorted(psutil.net_if_addrs().items()) for entry in entries
              if entry.family == socket.AF_INET and card in states and states[card].isup]
    addresses = [address for address in dict.fromkeys(found) if not is_loopback(address)]
    if not addresses:
        raise LaunchError(f"{platform.node()} has no network address but loopback, and the job has several hosts; see "
                          "`ip address`")
    return addresses[:MOST]


def connect_to_any(hosts: Sequence[str], port: int, token: bytes, launch: Launch, limit: float) -> MonitorClient:
    """Connect to the monitor, which is at one or more of these addresses; nothing else knows the token.

    Raises: HandshakeError if the monitor refuses us; TimeoutError, with every address, after `limit` seconds.
    """
    rank, size, deadline = launch.world_rank, launch.world_size, time.monotonic() + limit
    if len(hosts) == 1:
        return MonitorClient((hosts[0], port), token, rank, size, limit=limit)
    refused: HandshakeError | None = None
    while refused is None and time.monotonic() < deadline:
        for host in hosts:
            try:
                link = MonitorClient((host, port), token, rank, size, limit=TRY)
                link.limit = limit
                return link
            except HandshakeError as error:
                refused = error
            except TimeoutError:
                continue
    raise refused or TimeoutError(f"rank {rank} could not reach the job's monitor within {limit:g} s, at none of "
                                  f"{', '.join(hosts)}, port {port}; is there a firewall between the hosts?")
