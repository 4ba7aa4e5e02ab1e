"""How each launcher starts one program as ranks on several hosts of a cluster (clusters.py)."""

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen

import pytest
from clusters import Cluster
from jobs import start

Places = Mapping[str, int]  # ranks of each host
Environment = Mapping[str, str]
TOKEN = {"MINIDIST_TOKEN": "s" * 32}


def hosts_word(places: Places) -> str:
    """As `--hosts` and Open MPI take it."""
    return ",".join(f"{host}:{ranks}" for host, ranks in places.items())


def by_hosts(
    cluster: Cluster, places: Places, program: list[str], environment: Environment
) -> list["Popen[str]"]:
    """`minidist launch --hosts` on the first host by sshd; without it on this machine, which is no
    host of the job."""
    launch = [
        sys.executable,
        "-m",
        "minidist",
        "launch",
        "--hosts",
        hosts_word(places),
        "--ssh",
        cluster.ssh,
        *program,
    ]
    return [
        start(
            cluster.on(next(iter(places)), *launch) if cluster.has_sshd else launch,
            environment,
            **cluster.environment,
        )
    ]


def by_hand(
    cluster: Cluster,
    places: Places,
    program: list[str],
    environment: Environment,
    *,
    port: str = "29500",
) -> list["Popen[str]"]:
    """`minidist launch --hosts … --node-rank K` on each host, the last host first."""
    return [
        start(
            cluster.on(
                host,
                sys.executable,
                "-m",
                "minidist",
                "launch",
                "--hosts",
                hosts_word(places),
                "--node-rank",
                str(node),
                "--master-port",
                port,
                *program,
            ),
            environment,
            **TOKEN,
        )
        for node, host in reversed(list(enumerate(places)))
    ]


def by_mpich(
    cluster: Cluster, places: Places, program: list[str], environment: Environment
) -> list["Popen[str]"]:
    """The mpirun of the wheel, on the first host."""
    mpirun = str(Path(sys.executable).parent / "mpirun")
    return [
        start(
            cluster.on(
                next(iter(places)),
                mpirun,
                "-launcher",
                "ssh",
                "-launcher-exec",
                cluster.ssh,
                "-hosts",
                hosts_word(places),
                "-n",
                str(sum(places.values())),
                sys.executable,
                *program,
            ),
            environment,
        )
    ]


def by_openmpi(
    cluster: Cluster, places: Places, program: list[str], environment: Environment
) -> list["Popen[str]"]:
    """Open MPI's mpirun, $CLUSTER_OPENMPI or /usr/bin/mpirun.openmpi, whatever MPI mpi4py has."""
    mpirun = os.environ.get("CLUSTER_OPENMPI", "/usr/bin/mpirun.openmpi")
    if not Path(mpirun).exists():
        pytest.skip(
            "Open MPI is not installed: `apt-get install openmpi-bin`, or $CLUSTER_OPENMPI "
            "names its mpirun"
        )
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=True
    ).stdout
    agent = ["--mca", "plm_rsh_agent" if " 4." in version else "plm_ssh_agent", cluster.ssh]
    more = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    first, *_ = places
    # the hosts share this machine's cores, which may be fewer than ranks: Open MPI binds no two to
    # one
    return [
        start(
            cluster.on(
                first,
                mpirun,
                "--bind-to",
                "none",
                "--host",
                hosts_word(places),
                "-n",
                str(sum(places.values())),
                *agent,
                sys.executable,
                *program,
            ),
            environment,
            **more,
        )
    ]


def by_torchrun(
    cluster: Cluster, places: Places, program: list[str], environment: Environment
) -> list["Popen[str]"]:
    """torchrun on each host, $CLUSTER_TORCHRUN or the one on the path; as many ranks on each."""
    torchrun = os.environ.get("CLUSTER_TORCHRUN", "torchrun")
    if shutil.which(shlex.split(torchrun)[0]) is None:
        pytest.skip(
            "torchrun is not installed: `pip install torch`, also in another environment: "
            "$CLUSTER_TORCHRUN"
        )
    command = [
        *shlex.split(torchrun),
        "--nnodes",
        str(len(places)),
        "--master-addr",
        next(iter(places)),
        "--master-port",
        "29400",
        "--no-python",
    ]
    return [
        start(
            cluster.on(
                host,
                *command,
                "--nproc-per-node",
                str(ranks),
                "--node-rank",
                str(node),
                sys.executable,
                *program,
            ),
            environment,
            **TOKEN,
        )
        for node, (host, ranks) in reversed(list(enumerate(places.items())))
    ]


def slurm_variables(cluster: Cluster) -> dict[str, str]:
    """Return what Slurm's commands need to find this cluster's."""
    return {"SLURM_CONF": str(cluster.folder / "slurm.conf")}


def by_srun(*options: str, in_turn: bool = False) -> Callable[..., list["Popen[str]"]]:
    """srun on the first host of a cluster on which Slurm is up (slurm.sh), with just these ranks on
    each host.

    `in_turn`: they are dealt in turn, not host by host.
    """

    def srun(
        cluster: Cluster, places: Places, program: list[str], environment: Environment
    ) -> list["Popen[str]"]:
        first, *_ = places
        listed = cluster.folder / f"hosts-{uuid.uuid4().hex}"
        seats = [
            (number if in_turn else 0, host)
            for host, ranks in places.items()
            for number in range(ranks)
        ]
        listed.write_text(
            "".join(f"{host}\n" for _, host in sorted(seats, key=lambda seat: seat[0]))
        )
        layout = [
            "-N",
            str(len(places)),
            "-n",
            str(sum(places.values())),
            "--distribution=arbitrary",
        ]
        return [
            start(
                cluster.on(first, "srun", *layout, *options, sys.executable, *program),
                environment,
                **slurm_variables(cluster),
                SLURM_HOSTFILE=str(listed),
            )
        ]

    return srun
