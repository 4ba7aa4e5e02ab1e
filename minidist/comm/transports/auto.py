"""The default transport of a job: shared memory between ranks of one host, TCP between hosts.

    node 0          node 1
    r0 ---------- r2      ----   TCP connections (tcp.py): also r0 to r3, r1 to r2
    ||            ||
    ||            ||      ||     two rings in shared memory (shm/), and boards for groups in a node
    r1 ---------- r3

One engine drives both kinds of links: it sleeps on the doorbells of the rings and on the
connections, and a peer is lost when either ends. The bytes of a message and the order of additions
are the same, so an algorithm gives the same bits over any links. The transport's name says which
links the job uses: "shm", "tcp", or "shm+tcp".

Ranks share memory if they are on one host and their launcher puts them on one node. So `--nnodes 2`
on one laptop gives two nodes with TCP between them.
"""

import socket
from functools import partial

from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.process_state import system_and
from minidist.comm.transport import Transport
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.progress.poll_loop import PolledTransport
from minidist.comm.transports.shm.transport import share
from minidist.comm.transports.tcp import SPINS, TcpLink, dial, listen
from minidist.errors import CommError


def connect(
    link: MonitorClient, token: bytes, limit: float, *, host: str, node: int, kind: str = "auto"
) -> Transport:
    """Connect this rank: by rings to the ranks that share memory with it, by TCP to all others.

    Links inside a host are made first, so no two ranks wait for each other.

    Args:    host: the address to listen at: this host's own, as seen by the other ranks; node: this
             rank's node; kind: "tcp" shares no memory, "shm" connects ranks of one host only,
             whatever their nodes.
    Raises:  PeerLostError, HandshakeError, TimeoutError: see full_mesh.connect; CommError if shm
             finds several hosts.
    """
    me = link.world_rank
    tcp = listen(host)
    unix = full_mesh.listen_unix()
    memory = f"rank {me}" if kind == "tcp" else shared_by(0 if kind == "shm" else node)
    with full_mesh.listening(tcp, unix):
        infos = link.meet(
            {
                "memory": memory,
                "unix": unix.getsockname(),
                "host": host,
                "port": tcp.getsockname()[1],
            }
        )
        memories = [info["memory"] for info in infos]
        near = [rank for rank, memory in enumerate(memories) if memory == memories[me]]
        others = [rank for rank in range(len(infos)) if rank not in near]
        if kind == "shm" and others:
            raise CommError(
                f"shm joins ranks of one host, but ranks {me} and {others[0]} are on two; take auto"
            )
        rings = full_mesh.connect(
            me,
            near,
            unix,
            lambda rank: full_mesh.dial(socket.socket(socket.AF_UNIX), infos[rank]["unix"], limit),
            token,
            limit,
        )
        try:
            far = full_mesh.connect(
                me, others, tcp, lambda rank: dial(infos[rank], limit), token, limit
            )
        except BaseException:
            full_mesh.hang_up(rings)
            raise
    links = {rank: TcpLink(sock) for rank, sock in far.items()}
    if kind == "tcp" or len(set(memories)) == len(memories) > 1:
        return PolledTransport("tcp", me, limit, links, SPINS)
    return share(me, rings, limit, links, name="shm" if len(set(memories)) == 1 else "shm+tcp")


connect_tcp = partial(connect, kind="tcp")
connect_shm = partial(connect, kind="shm")


def shared_by(node: int) -> str:
    """Return a text that is equal on ranks that can share memory: a unique name of the running
    system, and the node.

    Two containers of one host may have separate networks: the sockets without a file that hand over
    memory do not connect them.
    """
    return f"{system_and('net')} {node}"
