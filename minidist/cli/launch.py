"""`minidist launch -n 4 script.py …`: start a program several times, as the ranks of one job.

On several machines, name them, each with its number of ranks. The command reaches them by ssh,
which must ask no question:

    minidist launch --hosts a:8,b:8 script.py

Without ssh, run the same line on each, with its own --node-rank, and one secret for all:

    export MINIDIST_TOKEN=...                          # or --token-file, a file on each node
    minidist launch -n 8 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --master-port 29500
    script.py
    minidist launch -n 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500
    script.py

With --hosts and --node-rank the machines may have different numbers of ranks: --hosts a:3,b:4
--node-rank 1.

As under torchrun, every rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK,
MASTER_ADDR, MASTER_PORT. Ranks above 0 have `[rank 2]` before each line of their stderr.
"""

import argparse
import os
import shutil
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from minidist.cli.limits import add_limits, limits_of
from minidist.comm.health.acceptor import is_loopback, plain_address
from minidist.comm.health.process_state import PATIENCE
from minidist.console import fail, positive_number, rank_count, shown, whole_number, write_json
from minidist.files import check_writable, read_file_or_pipe
from minidist.launch.hosts import SSH, HostRanks, hosts_of, own_name, spawn_on_hosts
from minidist.launch.joining import checked_token, token_from_environment
from minidist.launch.launchers import check_host
from minidist.launch.own_python import is_own, module_command
from minidist.launch.spawning import Nodes, spawn, token_on_this_machine

MOST_NODES = 4096
TORCHRUN_PORT = 29500  # the default of its --master-port
MOST_TOKEN_BYTES = 1 << 20  # of --token-file


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `minidist launch`; all words after the program belong to the program."""
    parser.add_argument(
        "-n",
        "--ranks",
        type=rank_count,
        default=1,
        metavar="N",
        help="ranks on this node (default 1)",
    )
    parser.add_argument(
        "--nnodes",
        type=whole_number(1, MOST_NODES),
        default=1,
        metavar="M",
        help="nodes of the job (default 1)",
    )
    parser.add_argument(
        "--node-rank",
        type=whole_number(0, MOST_NODES - 1),
        metavar="K",
        help="which node this is, 0 to M-1",
    )
    parser.add_argument(
        "--hosts",
        metavar="LIST",
        help="a:3,b:4, gpu[01-16]:8 or [fd00::1]:8: the hosts of the job and the ranks of each (-n "
        "where none are given), started from here by ssh; with --node-rank this is "
        "one of them, and no ssh is used",
    )
    parser.add_argument(
        "--ssh", metavar="COMMAND", help=f"how --hosts reaches a host (default: {SSH})"
    )
    parser.add_argument(
        "--master-addr",
        metavar="ADDRESS",
        help="node 0's address, IPv4 or IPv6; it listens there, and only there; given a name, "
        "at all addresses it has (default: the first of --hosts, else loopback)",
    )
    parser.add_argument(
        "--master-port",
        type=whole_number(0, 10**9),
        default=0,
        metavar="PORT",
        help=f"its port (default: any free one; {TORCHRUN_PORT}, as of torchrun, where each node "
        "is started by itself)",
    )
    parser.add_argument(
        "--patience",
        type=positive_number,
        default=PATIENCE,
        metavar="SECONDS",
        help="how long a rank's process may be stopped before it is lost; node 0's counts "
        "(default: %(default)s)",
    )
    add_limits(parser.add_argument, "on this node")
    parser.add_argument(
        "--flight",
        metavar="DIR",
        help="keep each rank's flight recorder there, as a file, for `minidist diagnose DIR` "
        "(default: in memory)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="the job's secret, the same on every node"
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write command, size and exit status as JSON"
    )
    parser.add_argument(
        "-m", dest="module", action="store_true", help="the program is a module, as in python -m"
    )
    parser.add_argument("program", help="a Python script, a module with -m, or any command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Run the job. Returns: the exit status of the first rank that failed, or 0.

    Raises: ConfigError for numbers that contradict each other, a missing program, or a port that is
            taken.
    """
    check_writable("--json", args.json)
    token = _token(args.token_file)
    if args.flight == "":
        fail("--flight: '' is not a folder; name one, or leave the option out")
    limits = replace(limits_of(args), flight=args.flight and Path(args.flight))
    hosts = hosts_of(args.hosts, args.ranks) if args.hosts is not None else []
    nodes = _nodes(args, hosts)
    command = program(args.program, args.arguments, module=args.module)
    limited = {}
    if hosts and args.node_rank is None:
        status = spawn_on_hosts(
            command,
            hosts,
            ssh=SSH if args.ssh is None else args.ssh,
            port=nodes.master_port,
            address=plain_address(args.master_addr or ""),
            token=token or token_from_environment(),
            patience=args.patience,
            limits=limits,
        )
    else:
        ranks = hosts[nodes.rank].ranks if hosts else args.ranks
        token = token or token_from_environment()
        with token_on_this_machine(nodes) if token is None else nullcontext(token) as secret:
            status = spawn(
                command, ranks, nodes=nodes, token=secret, patience=args.patience, limits=limits
            )
        limited = limits.record()
    if args.json:
        write_json(
            args.json,
            {
                "command": command,
                "size": nodes.world_size(args.ranks),
                "exit_status": status,
                **limited,
            },
        )
    return status


def _nodes(args: argparse.Namespace, hosts: list[HostRanks]) -> Nodes:
    """Return the nodes of the job, and the number of this one.

    Raises: ConfigError for numbers that contradict each other.
    """
    count = len(hosts) or args.nnodes
    rank = args.node_rank or 0
    if hosts and args.nnodes not in (1, count):
        fail(f"--hosts names {count} hosts, --nnodes says {args.nnodes}; leave out --nnodes")
    if args.ssh is not None and (not hosts or args.node_rank is not None):
        fail("--ssh is for --hosts without --node-rank")
    if rank >= count:
        fail(f"--node-rank {rank} is not one of {count} nodes; they count from 0")
    if args.master_port >= 65536:
        fail(f"--master-port {args.master_port} is not a port; choose one between 1024 and 65535")
    if count > 1 and not hosts and not args.master_addr:
        fail(
            "--nnodes above 1 needs --master-addr: the address under which the other nodes "
            "reach node 0"
        )
    address = plain_address(
        args.master_addr or (hosts[0].address if len(hosts) > 1 else "127.0.0.1")
    )
    check_host("--master-addr", address)
    if (
        not args.master_addr
        and is_loopback(address)
        and not all(is_loopback(host.address) for host in hosts)
    ):
        raise own_name(address)
    by_ssh = hosts and args.node_rank is None
    port = args.master_port or (TORCHRUN_PORT if count > 1 and not by_ssh else 0)
    return Nodes(
        count,
        rank,
        "127.0.0.1" if address == "localhost" else address,
        port,
        tuple(host.ranks for host in hosts),
    )


def program(name: str, arguments: list[str], *, module: bool) -> list[str]:
    """Return the argument list that starts the program once.

    Raises: ConfigError if there is no such script or command.
    """
    if module and is_own(name):
        return module_command(name, *arguments)
    if module:
        return [sys.executable, "-m", name, *arguments]
    if name.endswith(".py"):
        if not os.path.isfile(name):
            fail(f"there is no script {shown(name)[1:-1]}")
        return [sys.executable, name, *arguments]
    found = shutil.which(name)
    if found is None:
        fail(
            f"there is no command {shown(name)} on the path; a Python script's name ends in .py, "
            "a module needs -m"
        )
    return [found, *arguments]


def _token(file: str | None) -> bytes | None:
    if file is None:
        return None
    try:
        token = read_file_or_pipe(file, most=MOST_TOKEN_BYTES)
    except OSError as error:
        fail(f"--token-file {shown(file)[1:-1]}: {error.strerror}")
    return checked_token(token, f"--token-file {shown(file)[1:-1]}")
