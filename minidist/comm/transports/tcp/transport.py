"""Ranks as processes that talk over TCP and nothing else, on one host or several: nothing to install.

One connection between every two ranks, made at the start (full_mesh.py), each proved to belong to the job. link.py
moves the bytes; plain_tcp.py does the same in one short file, without an engine.
"""

import socket
from collections.abc import Mapping
from typing import Any

from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.progress.poll_loop import PolledTransport
from minidist.comm.transports.tcp.link import BUFFER_BYTES, TcpLink

SPINS = 20                  # looks at the connections before sleeping


def connect(link: MonitorClient, token: bytes, limit: float, *, host: str, node: int = 0) -> "TcpTransport":
    """This rank's connections to all others.

    Args:    host: the address to listen at: this host's own, as the other ranks see it.
    Raises:  HandshakeError, TimeoutError: see full_mesh.join.
    """
    def dial(info: dict[str, Any]) -> socket.socket:
        return full_mesh.dial_tcp(info["host"], info["port"], BUFFER_BYTES, limit)

    listener = full_mesh.listen_tcp(host, BUFFER_BYTES)
    info = {"host": host, "port": listener.getsockname()[1]}
    return TcpTransport(link.world_rank, limit, full_mesh.join(link, info, listener, dial, token, limit))


class TcpTransport(PolledTransport):
    """One rank's connections to all others, by world rank."""

    def __init__(self, world_rank: int, limit: float, connections: Mapping[int, socket.socket]) -> None:
        super().__init__("tcp", world_rank, limit, {rank: TcpLink(sock) for rank, sock in connections.items()}, SPINS)
