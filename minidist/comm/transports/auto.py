"""Ranks of several hosts: shared memory inside each, TCP between them. It is what a job takes by itself.

    node 0          node 1
    r0 ---------- r2      ----   TCP connections (tcp.py): also r0 to r3, r1 to r2
    ||            ||
    ||            ||      ||     two rings in shared memory (shm/link.py), and boards for the groups inside a node
    r1 ---------- r3

One engine drives both kinds of links: it sleeps on the doorbells of some and the connections of others, and a peer is
lost when either ends. The bytes of a message are the same, so is the order of additions: an algorithm gives the same
bits over any links. The transport's name says what the job got: "shm", "tcp", or "shm+tcp".

Ranks share memory if they are on one host and their launcher counts them to one node. So `--nnodes 2` on one laptop
gives two nodes with TCP between them.
"""

from minidist.comm.health.monitor_client import MonitorClient
from minidist.comm.health.process_state import system_and
from minidist.comm.transport import Transport
from minidist.comm.transports.progress import full_mesh
from minidist.comm.transports.shm.transport import share
from minidist.comm.transports.tcp import TcpLink, dial, listen, tcp_transport


def connect(link: MonitorClient, token: bytes, limit: float, *, host: str, node: int) -> Transport:
    """This rank's rings to the ranks it shares memory with, and its connections to all others.

    Links inside a host are made first, so no two ranks wait for each other.

    Args:    host: the address to listen at: this host's own, as the other ranks see it; node: this rank's.
    Raises:  HandshakeError, TimeoutError: see full_mesh.connect.
    """
    me, tcp, unix = link.world_rank, listen(host), full_mesh.listen_unix()
    with full_mesh.listening(tcp, unix):
        infos = link.meet({"memory": shared_by(node), "unix": unix.getsockname(), "host": host,
                           "port": tcp.getsockname()[1]})
        memories = [info["memory"] for info in infos]
        near = [rank for rank, memory in enumerate(memories) if memory == memories[me]]
        others = [rank for rank in range(len(infos)) if rank not in near]
        rings = full_mesh.connect(link, near, unix, lambda rank: full_mesh.dial_unix(infos[rank]["unix"], limit), token,
                                  limit)
        try:
            far = full_mesh.connect(link, others, tcp, lambda rank: dial(infos[rank], limit), token, limit)
        except BaseException:
            full_mesh.hang_up(rings)
            raise
    if len(set(memories)) == len(memories) > 1:
        return tcp_transport(me, limit, far)
    return share(me, rings, limit, {rank: TcpLink(sock) for rank, sock in far.items()},
                 name="shm" if len(set(memories)) == 1 else "shm+tcp")


def shared_by(node: int) -> str:
    """Equal on ranks that can share memory: the running system, by a name that no other has, and the node.

    Two containers of one host may have a network each: sockets without a file, by which memory is handed over, do not
    reach from one to the other.
    """
    return f"{system_and('net')} {node}"
