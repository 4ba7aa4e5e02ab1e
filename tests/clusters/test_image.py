"""docs/howto/kubernetes/Dockerfile without Docker: its steps in a new Debian, then what the job files
run in it. Needs debootstrap and a network."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from imports import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

FILE = ROOT / "docs/howto/kubernetes/Dockerfile"
DEBIAN = {"debian:12-slim": "bookworm"}
MPI_JOB = """
mkdir -p /root/.ssh
test -f /root/.ssh/id_rsa || ssh-keygen -q -t rsa -N '' -f /root/.ssh/id_rsa
cp /root/.ssh/id_rsa.pub /root/.ssh/authorized_keys
chmod 644 /root/.ssh/authorized_keys
echo '127.0.0.2 worker' >> /etc/hosts
/usr/sbin/sshd -De 2> /tmp/sshd &
sleep 1
echo worker:2 > /tmp/hostfile
HYDRA_HOST_FILE=/tmp/hostfile mpirun -n 2 minidist train --steps 2 --batch 8 --out /work/by-ssh
status=$?
kill $!
exit $status
"""


def instructions() -> list[tuple[str, str]]:
    """Return the Dockerfile as [(instruction, the rest of its line)]."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(words[0], words[1]) for line in lines if (words := line.split(None, 1))]


class Image:
    """A folder that is made as the Dockerfile says.

    Attributes: environment  what ENV and ARG have set
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {"HOME": "/root", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        self.working = "/"

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the image, with processes, mounts and a network of its own."""
        inside = 'ip link set lo up; mount -t proc proc "$0/proc"; mount -t sysfs sys "$0/sys"; '
        inside += 'mount -t tmpfs tmpfs "$0/dev/shm"; dir=$1; shift; '
        inside += 'exec chroot "$0" sh -c \'cd "$0" && exec "$@"\' "$dir" "$@"'
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child"]
            + ["sh", "-c", inside, str(self.folder), self.working, *command],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def build(self, instruction: str, rest: str) -> None:
        """Follow one instruction; RUN may reach the network."""
        if instruction == "FROM":
            bare = ["debootstrap", "--variant=minbase", DEBIAN[rest], str(self.folder)]
            subprocess.run(bare, check=True, capture_output=True, timeout=600)
            for name in ("resolv.conf", "hosts"):
                shutil.copy(f"/etc/{name}", self.folder / "etc" / name)
        elif instruction == "RUN":
            done = subprocess.run(
                ["chroot", str(self.folder), "sh", "-ec", rest],
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=900,
            )
            assert done.returncode == 0, f"RUN {rest}\n{done.stdout[-800:]}{done.stderr[-2000:]}"
        elif instruction == "COPY":
            source, target = rest.split()
            left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
            ignore = shutil.ignore_patterns(*(name.rpartition("/")[2] for name in left_out))
            shutil.copytree(ROOT / source, f"{self.folder}{target}", ignore=ignore, symlinks=True)
        elif instruction in ("ARG", "ENV"):
            name, _, value = rest.partition("=")
            self.environment[name] = value.strip('"')
        elif instruction == "WORKDIR":
            Path(f"{self.folder}{rest}").mkdir(parents=True, exist_ok=True)
            self.working = rest
        else:
            assert instruction == "CMD"


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    """Return the image; its packages of Python were downloaded by this Python."""
    for tool in ("debootstrap", "unshare", "ip"):
        assert shutil.which(tool), f"{tool} is not installed"
    folder = tmp_path_factory.mktemp("image")
    wheels = tmp_path_factory.mktemp("wheels")
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels)]
    subprocess.run([*download, str(ROOT), "setuptools", "wheel"], check=True, timeout=600)
    image = Image(folder)
    for instruction, rest in instructions():
        image.build(instruction, rest)
        if instruction == "FROM":
            shutil.copytree(wheels, folder / "wheels")
            image.environment |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
    yield image
    shutil.rmtree(folder)


def test_the_image_has_what_doctor_looks_for_and_trains(image: Image) -> None:
    doctor = image.run("minidist", "doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    for start in (["minidist", "train", "-n", "2"], ["mpirun", "-n", "2", "minidist", "train"]):
        trained = image.run(*start, "--steps", "2", "--batch", "8", "--out", f"/work/{start[0]}")
        assert trained.returncode == 0, trained.stdout + trained.stderr


def test_mpirun_reaches_a_worker_of_the_image_by_ssh(image: Image) -> None:
    trained = image.run("sh", "-c", MPI_JOB)
    assert trained.returncode == 0, trained.stdout + trained.stderr
