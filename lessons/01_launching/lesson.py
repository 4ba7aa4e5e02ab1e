"""Lesson 01: who am I? Ranks, machines and launchers, printed live by the ranks themselves.

mpirun -n 4 python lessons/01_launching/lesson.py
python lessons/01_launching/lesson.py --nodes 2                  # no launcher: eight threads, as on
                                                                 two machines
python lessons/01_launching/lesson.py --two-machines             # eight processes under two
                                                                 launchers
python lessons/01_launching/lesson.py --break rank-in-program    # see README.md, section 7
"""

import os
import platform
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import minidist as md
from minidist.comm.group import Group
from minidist.comm.records import gather_records
from minidist.errors import LaunchError
from minidist.launch import LAUNCHERS, detect
from minidist.launch.own_python import code_command, module_command
from minidist.lessons.page import Page
from minidist.lessons.running import Break, arguments, run_lesson


def who_am_i(group: Group, nodes: int) -> dict[str, Any]:
    """Return what this rank knows of itself; with `nodes` above 1 on one machine, as if the ranks
    were spread over `nodes`."""
    launch = detect()
    rank = group.rank
    local_rank = launch.local_rank
    node_rank = launch.node_rank
    # No launcher numbered these ranks: machines are pretended, or ranks are threads.
    if nodes > 1 or launch.world_size != group.size:
        per_node = -(-group.size // nodes)
        local_rank = rank % per_node
        node_rank = rank // per_node
    return {
        "rank": rank,
        "size": group.size,
        "local_rank": local_rank,
        "node_rank": node_rank,
        "pid": os.getpid(),
        "host": platform.node(),
        "launcher": launch.launcher,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "set": {
            name: os.environ[name]
            for one in LAUNCHERS
            for name in one.variables()
            if name in os.environ
        },
    }


def tour(group: Group, page: Page, *, nodes: int) -> None:
    """Run the lesson on every rank: each sends its numbers to rank 0."""
    ranks = gather_records(group, who_am_i(group, nodes))
    if not ranks:
        return
    page.heading(
        f"2  The job (N0:41): {started_by(ranks[0]['launcher'])}, WORLD_SIZE = {group.size}"
    )
    page.table("Machines", ["machine", "processes", "NODE_RANK", "RANK"], machines(ranks))
    page.table(
        "Ranks",
        ["machine", "device", "RANK", "LOCAL_RANK", "NODE_RANK", "process", "host"],
        [
            [
                f"node{r['node_rank']}",
                device(r),
                r["rank"],
                r["local_rank"],
                r["node_rank"],
                r["pid"],
                r["host"],
            ]
            for r in ranks
        ],
        note=pretended(ranks, nodes),
    )
    page.heading("3  Which launcher sets which variable, and what these ranks found")
    columns, rows = launcher_table()
    page.table(
        "The names differ, the facts do not",
        columns,
        rows,
        note="… stands for the prefix above; a dash: this launcher does not tell, and md.init "
        "works it out",
    )
    names = sorted({name for r in ranks for name in r["set"]})
    page.table(
        "Variables of a launcher, rank by rank",
        ["variable", *(f"rank {r['rank']}" for r in ranks)],
        [[name, *(r["set"].get(name, "-") for r in ranks)] for name in names]
        or [["none", *("-" for _ in ranks)]],
        note="without a launcher none is set: the ranks are threads of one process"
        if not names
        else "",
    )


def started_by(launcher: str) -> str:
    """Return in words which launcher started the job."""
    return "no launcher" if launcher == "alone" else f"started by {launcher}"


def machines(ranks: list[dict[str, Any]]) -> list[list[Any]]:
    """Return one row per machine: how many processes it runs, and which ranks."""
    rows = []
    for node in sorted({r["node_rank"] for r in ranks}):
        here = [r["rank"] for r in ranks if r["node_rank"] == node]
        rows.append([f"node{node}", len(here), node, ", ".join(map(str, here))])
    return rows


def device(rank: dict[str, Any]) -> str:
    """Return the GPU that a rank would take: entry LOCAL_RANK of CUDA_VISIBLE_DEVICES, or
    LOCAL_RANK if that is not set."""
    visible = [part for part in rank["visible"].split(",") if part]
    index = visible[rank["local_rank"] % len(visible)] if visible else rank["local_rank"]
    return f"GPU{index}"


def pretended(ranks: list[dict[str, Any]], nodes: int) -> str:
    """Return a note if the machines of the table are one machine, else an empty text."""
    hosts = len({r["host"] for r in ranks})
    processes = len({r["pid"] for r in ranks})
    if processes < len(ranks):
        spread = f", numbered as if on {nodes}" if nodes > 1 else ""
        return f"{len(ranks)} threads of one process on one machine{spread}"
    return f"one machine, numbered as if it were {nodes}" if nodes > hosts else ""


FACTS = {
    "rank": "rank",
    "size": "size",
    "local rank": "local_rank",
    "node rank": "node_rank",
    "meet at": "master_addr",
    "port": "master_port",
}


def launcher_table() -> tuple[list[str], list[list[str]]]:
    """Return the columns and rows of the library's table of launchers; a long common prefix stands
    in the header."""
    columns = [""]
    cells = []
    for launcher in LAUNCHERS:
        names = [getattr(launcher, field) for field in FACTS.values()]
        prefix = os.path.commonprefix(
            [name for name in names if name and not name.startswith("MASTER")]
        )
        prefix = prefix[: prefix.rfind("_") + 1]
        columns.append(launcher.name + (f"\n{prefix}…" if prefix else ""))
        short = [
            f"…{name[len(prefix) :]}" if prefix and name.startswith(prefix) else name
            for name in names
        ]
        cells.append([name or "-" for name in short])
    return columns, [[fact, *(column[row] for column in cells)] for row, fact in enumerate(FACTS)]


# --------------------------------------------------------------------------- two machines, for real


def two_machines(command: list[str], per_node: int = 4) -> int:
    """Start `command` under two launchers on this machine; each launcher acts as if it were a
    separate machine.

    On two real machines each would be `minidist launch --nnodes 2 --node-rank K --master-addr
    ADDRESS …`.
    """
    environ = {**os.environ, "MINIDIST_TOKEN": secrets.token_hex(16)}
    launch = module_command(
        "minidist",
        "launch",
        "-n",
        str(per_node),
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    )
    launchers = [
        subprocess.Popen([*launch, "--node-rank", str(node), *command], env=environ)
        for node in range(2)
    ]
    return max(launcher.wait() for launcher in launchers)


def free_port() -> int:
    """Return a port without a listener just now.

    It is below 32768: the system may hand out higher ports meanwhile.
    """
    for port in secrets.SystemRandom().sample(range(20000, 32000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise LaunchError(
        "lesson 01: none of 100 ports of 127.0.0.1 can be listened at; is there a loopback "
        "interface?"
    )


# ----------------------------------------------------------------------------------------- Break it


def rank_in_program() -> None:
    """Run N1:58 as it stands: rank 0 of 2 is written into the program, and rank 1 never starts."""
    environ = {
        **os.environ,
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    done = subprocess.run(
        code_command("import minidist as md; md.init(limit=2.0)"),
        env=environ,
        text=True,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    print(
        "one process says of itself 'rank 0 of 2'; after 2 seconds (the notes' example would "
        "wait for ever):"
    )
    said = [line for line in done.stderr.splitlines() if "Error: rank 0" in line]
    print(said[0] if said else f"it ended with status {done.returncode}: {done.stderr}")


def no_import_os() -> None:
    """Run N0:66 as it stands: os is used and never imported."""
    lines = ('local_rank = int(os.environ["LOCAL_RANK"])',)
    for line in lines:
        try:
            exec(line, {})
        except NameError as error:
            print(f"expected: a number\n>>> {line}\nNameError: {error}")


def missing_variable() -> None:
    """Detect the launcher in half an environment: RANK without WORLD_SIZE."""
    detect({"RANK": "0", "LOCAL_RANK": "0"})


def two_launchers() -> None:
    """Detect the launcher of mpirun under torchrun, where the two contradict each other."""
    detect(
        {
            "RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "PMI_RANK": "1",
            "PMI_SIZE": "4",
            "MPI_LOCALRANKID": "1",
            "MPI_LOCALNRANKS": "4",
        }
    )


def one_rank_dies() -> None:
    """Let rank 2 fail: the others must not wait for it."""
    print("expected: the job ends at once, with the error of rank 2", flush=True)

    def rank_two_fails(group: Group) -> None:
        if group.rank == 2:
            raise ZeroDivisionError("rank 2 divides by zero")
        group.barrier()

    try:
        md.run(rank_two_fails, size=4, transport="auto", limit=20.0)
    except ZeroDivisionError as error:
        notes = "; ".join(getattr(error, "__notes__", []))
        print(f"{type(error).__name__}: {error}" + (f" ({notes})" if notes else ""))


BREAKS = {
    "rank-in-program": Break(rank_in_program, says="rank 1 did not join"),
    "no-import-os": Break(no_import_os, says="name 'os' is not defined"),
    "missing-variable": Break(missing_variable, says="WORLD_SIZE is missing", error=LaunchError),
    "two-launchers": Break(
        two_launchers,
        says="torchrun says rank 0 of 2, mpich says rank 1 of 4",
        error=LaunchError,
    ),
    "one-rank-dies": Break(one_rank_dies, says="rank 2 divides by zero"),
}


def main() -> None:
    """Parse the command line, then run on the ranks that were launched, or on eight threads."""
    parser = arguments(__doc__, BREAKS)
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        metavar="N",
        help="number the ranks as if they were on N machines",
    )
    parser.add_argument(
        "--two-machines", action="store_true", help="start 2 x 4 processes under two launchers"
    )
    options = parser.parse_args()
    if options.two_machines:
        table = ["--json", options.json] if options.json else []
        raise SystemExit(two_machines([sys.executable, str(Path(__file__).resolve()), *table]))
    run_lesson(options, partial(tour, nodes=max(1, options.nodes)), BREAKS, alone=8)


if __name__ == "__main__":
    main()
