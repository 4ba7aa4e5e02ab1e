"""What the cluster tests start on several hosts: `python cluster_rank.py MODE [ARGUMENT]`.

    meet            rank 0 prints, as JSON, which host each rank is on, and the transport
    conformance     every verb by every algorithm, and the demands on a transport; rank 0 prints how
                    many, as JSON
    kill RANK       that rank is killed; each other one prints when it heard of it, and what
    wait RANK       all say that they have met, and wait for that rank, which sleeps
    long            a short message, and one of 1 MiB

$CLUSTER_TRANSPORT is the transport, if it is set; $CLUSTER_LIMIT the limit of a call, in seconds.
"""

import json
import os
import platform
import signal
import sys
import time

import conformance
import numpy as np
from collective_checker import Drawn, cost_case

import minidist as md
from minidist.comm.cost.volume import FORMULAS
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.errors import PeerLostError


def say(**content: object) -> None:
    """One write, so that lines of several ranks stay apart."""
    os.write(1, f"{json.dumps(content)}\n".encode())


def meet(world: Group) -> None:
    total = world.all_reduce(np.arange(5.0) + world.rank)
    np.testing.assert_array_equal(total, world.size * np.arange(5.0) + sum(range(world.size)))
    hosts = gather_records(world, platform.node())
    if world.rank == 0:
        say(hosts=hosts, nodes=list(world.nodes), transport=world.transport.name)


def long(world: Group) -> None:
    world.all_reduce(np.ones(3))
    say(short=world.rank)
    world.all_reduce(np.ones(1 << 17))
    say(long=world.rank)


def run_conformance(world: Group) -> None:
    """The sums over all ranks of messages and bytes are the formulas'."""
    conformance.all_peaceful(world)
    cases = list(conformance.fixed_cases(world.size, world.transport.name, every=True))
    counted = np.array(conformance.verbs(world, cases), np.int64)
    counted = world.all_reduce(counted)
    for fields, row in zip(cases, counted.tolist(), strict=True):
        case = Drawn(**fields)
        formula = FORMULAS[fields["verb"], fields["algorithm"]]
        assert row == [formula.messages_of(cost_case(case)), formula.bytes_of(cost_case(case))], (
            case,
            row,
        )
    if world.rank == 0:
        say(cases=len(cases), transport=world.transport.name)


def kill(world: Group, victim: int) -> None:
    world.barrier()
    time.sleep(0.3)  # all of them wait
    if world.rank == victim:
        say(died=time.time(), host=platform.node(), pid=os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        world.all_reduce(np.ones(3))
    except PeerLostError as error:
        say(heard=time.time(), rank=world.rank, error=str(error).splitlines()[0])
        raise


def wait(world: Group, sleeper: int) -> None:
    world.barrier()
    say(met=world.rank)
    if world.rank == sleeper:
        time.sleep(90)
    world.barrier()


def main() -> None:
    world = md.init(
        transport=os.environ.get("CLUSTER_TRANSPORT"),
        limit=float(os.environ.get("CLUSTER_LIMIT", "100")),
    )
    match sys.argv[1:]:
        case ["meet"]:
            meet(world)
        case ["long"]:
            long(world)
        case ["conformance"]:
            run_conformance(world)
        case ["kill", victim]:
            kill(world, int(victim))
        case ["wait", sleeper]:
            wait(world, int(sleeper))


if __name__ == "__main__":
    main()
