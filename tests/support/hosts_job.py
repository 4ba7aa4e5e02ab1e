"""The program of test_namespaces.py: rank 0 prints, as JSON, how the job lies on hosts and what
calls take there."""

import json
import os
import socket
import statistics
import time

import numpy as np

import minidist as md
from minidist.comm.group import Group
from minidist.comm.transports.auto import shared_by

NBYTES = 2 << 20
ROUNDS = 3


def seconds(world: Group, algorithm: str) -> float:
    """The median over rounds of the slowest rank's time."""
    taken = []
    for _ in range(ROUNDS):
        x = np.full(NBYTES // 4, float(world.rank), np.float32)
        world.barrier()
        started = time.perf_counter()
        total = world.all_reduce(x, algorithm=algorithm)
        taken.append(float(world.all_reduce(time.perf_counter() - started, op="max")))
        assert (total == 6).all()
    return statistics.median(taken)


def main() -> None:
    world = md.init(limit=20)
    inside = world.split(world.rank // 2)
    across = world.split(world.rank % 2)
    seen: list[str] = []
    world.ledger.subscribe(
        lambda event: seen.append(event.details["algorithm"]) if event.kind == "call" else None
    )
    world.all_reduce(np.ones(NBYTES // 4, np.float32))
    peers = vars(world.transport)["_peers"].values()
    connections = {
        peer.rank: peer.link.fileno() for peer in peers if type(peer.link).__name__ == "TcpLink"
    }
    systems = world.all_gather(
        np.frombuffer(shared_by(0).encode().rjust(200), np.uint8).reshape(1, -1)
    )
    told = {
        "nodes": world.nodes,
        "links": [type(peer.link).__name__ for peer in peers],
        "boards": [group.board is not None for group in (world, inside, across)],
        "auto": seen[0],
        "systems": [systems.tolist().index(row) for row in systems.tolist()],
        "listens": addresses(connections[2]) if world.rank == 0 else [],
        "seconds": {algorithm: seconds(world, algorithm) for algorithm in ("ring", "hierarchical")},
    }
    if world.rank == 0:
        print(json.dumps(told))


def addresses(file: int) -> list[str]:
    """The two ends of a connection."""
    with socket.socket(fileno=os.dup(file)) as sock:
        return [sock.getsockname()[0], sock.getpeername()[0]]


if __name__ == "__main__":
    main()
