"""The options --cores and --memory-limit of the commands that start ranks."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minidist.console import core_list, fail, number_of_bytes, size_text
from minidist.device.cores import VARIABLE, deal, keep_to
from minidist.launch import Launch
from minidist.launch.limits import Limits, MemoryLimit


def add_limits(add: Callable[..., Any], where: str) -> None:
    """Add both options; `where` says whose ranks they are for."""
    add(
        "--cores",
        type=core_list,
        metavar="LIST",
        help=f"cores for the ranks {where}, as 0-1 or 0,2, dealt over them: each has its own, or "
        "all share them if there are fewer (default: all)",
    )
    add(
        "--memory-limit",
        type=number_of_bytes,
        metavar="SIZE",
        help=f"memory of all ranks {where} together, as 2GiB, by a control group (cgroup): a "
        "rank that needs more is killed; one line says so where no group can be made "
        "(default: no limit)",
    )


def keep_to_cores(args: Namespace, launch: Launch) -> None:
    """Bind this process to its cores, if it is a rank itself or runs ranks as threads."""
    if args.cores:
        keep_to(deal(args.cores, launch.local_size)[launch.local_rank])
        os.environ[VARIABLE] = str(len(args.cores))


def require_own_ranks(args: Namespace, launch: Launch, *, as_threads: bool) -> None:
    """Raise ConfigError if a memory limit is given and no launcher of ours can set it and survive a
    killed rank."""
    if args.memory_limit is None:
        return
    if args.memory_limit == 0:
        fail("--memory-limit: no rank can live with 0 B; write 2GiB")
    if as_threads:
        fail(
            "--memory-limit: is for ranks that are processes; leave out --transport "
            + args.transport
        )
    if launch.launcher != "alone":
        fail(
            f"--memory-limit: {launch.launcher} started the ranks; give the limit to it, or "
            "start them here with -n"
        )


def limits_of(args: Namespace, folder: Path | None = None) -> Limits:
    """Return the Limits of the two options, with the run folder that is locked for the ranks."""
    nbytes = args.memory_limit
    return Limits(
        args.cores or (), None if nbytes is None else MemoryLimit(nbytes, size_text(nbytes)), folder
    )
