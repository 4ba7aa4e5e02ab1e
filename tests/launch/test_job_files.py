"""The job files in docs/howto: their commands run here, on the variables that Kubernetes, the MPI
operator and Slurm set."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import File, parts
from imports import ROOT
from jobs import finish, start

from minidist.comm.health.failure import AGAIN

FILES = ROOT / "docs/howto/kubernetes"
SMALL = "--steps 2 --batch 8 --context 16 --width 32 --validate 8 --quiet"


@pytest.fixture
def environment() -> dict[str, str]:
    """Return an environment whose PATH begins with this Python's commands."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def documents_of(name: str) -> list[dict]:
    return list(yaml.safe_load_all((FILES / name).read_text(encoding="utf-8")))


def diagnosed(folder: Path) -> str:
    """Return the status and the words of `minidist diagnose`."""
    done = subprocess.run(
        [sys.executable, "-m", "minidist", "diagnose", folder],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return f"{done.returncode} {done.stdout}"


def test_the_pods_of_the_indexed_job_meet_and_train(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    service, job = documents_of("indexed-job.yaml")
    pod = job["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [line] = container["args"]
    name = job["metadata"]["name"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    address = f"{name}-0.{pod['subdomain']}"
    assert f"--nnodes {job['spec']['completions']} " in line and f" {address} " in line
    line = line.replace(address, "127.0.0.1").replace("/work/run", str(tmp_path / "run"))
    line = line.replace("--steps 100", SMALL)
    pods = [
        start([*container["command"], line], {**environment, "JOB_COMPLETION_INDEX": str(index)})
        for index in range(job["spec"]["completions"])
    ]
    ended = [finish(one) for one in pods]
    assert [one.returncode for one in ended] == [0, 0], ended
    assert diagnosed(tmp_path / "run").startswith("0 ")


def test_the_mpi_job_trains_on_the_hosts_that_its_operator_lists(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    [job] = documents_of("mpijob.yaml")
    replicas = job["spec"]["mpiReplicaSpecs"]
    [launcher] = replicas["Launcher"]["template"]["spec"]["containers"]
    slots = job["spec"]["slotsPerWorker"] * replicas["Worker"]["replicas"]
    command = [*launcher["command"], *launcher["args"]]
    assert job["spec"]["mpiImplementation"] == "MPICH"
    assert command[:3] == ["mpirun", "-n", str(slots)]
    hosts = tmp_path / "hostfile"
    hosts.write_text(f"localhost:{slots}\n")
    words = " ".join(command).replace("/work/run", str(tmp_path / "run"))
    words = words.replace("--steps 100", SMALL)
    ended = finish(start(words.split(), {**environment, "HYDRA_HOST_FILE": str(hosts)}))
    assert ended.returncode == 0, ended
    assert diagnosed(tmp_path / "run").startswith("0 ")


@pytest.mark.parametrize("status", [0, 1, AGAIN])
def test_the_slurm_job_goes_back_into_the_queue_if_it_was_stopped(
    tmp_path: Path, status: int
) -> None:
    page = (ROOT / "docs/howto/slurm.md").read_text(encoding="utf-8")
    [job] = [part for part in parts(page) if isinstance(part, File) and part.name == "job.sh"]
    assert re.search(r"^#SBATCH .*--requeue.*--signal=USR1@\d+$", job.text, re.MULTILINE)
    for name, does in {"srun": f"exit {status}", "scontrol": 'echo "scontrol $*"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", job.text],
        env={"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    requeued = "scontrol requeue 7\n" if status == AGAIN else ""
    assert (done.returncode, done.stdout) == (status, requeued)
