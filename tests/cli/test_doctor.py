"""minidist doctor: it tries what it reports, and what is missing comes with what to do."""

import json
import os
import re
from types import SimpleNamespace

import pytest

from minidist.cli import doctor, main
from minidist.comm.cost.link_model import LinkCost, Profile, profile_path, save_profile
from minidist.comm.transports.shm import process_vm_read
from minidist.errors import LaunchError, MinidistError
from minidist.launch import mpirun
from minidist.observe.machine import machine


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine may take longer than a user would wait."""
    monkeypatch.setattr(doctor, "TRY_LIMIT", 100.0)


def test_the_table_and_its_json_agree(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    findings = {finding["what"]: finding for finding in json.loads(file.read_text())["findings"]}
    shown = capsys.readouterr().out
    for what in (
        "Python",
        "NumPy",
        "cores",
        "memory",
        "mpirun",
        "GPU",
        "C++ compiler",
        "torch",
        "pytest",
        *(f"transport {name}" for name in ("threads", "tcp", "shm", "mpi")),
    ):
        assert what.split()[-1] in shown
        assert findings[what]["state"] in ("ok", "optional")
    for name in ("threads", "tcp", "shm", "mpi"):
        assert findings[f"transport {name}"]["found"].startswith("2 ranks add 1 MiB in ")
    assert "belongs to it" in findings["mpirun"]["found"]
    assert "socket 0: " in shown and json.loads(file.read_text())["machine"]["sockets"][0]["cores"]


def test_a_missing_mpirun_says_how_to_get_one(monkeypatch):
    def missing():
        raise LaunchError("there is no mpirun")

    monkeypatch.setattr(mpirun, "find_mpirun", missing)
    finding = doctor._mpi()
    assert finding.state == "optional"
    assert "pip install mpich" in finding.advice


@pytest.mark.parametrize(("mebibytes", "state"), [(1, "optional"), (64 << 10, "ok")])
def test_a_small_dev_shm_is_a_matter_of_mpirun_alone(monkeypatch, mebibytes, state):
    usage = SimpleNamespace(free=mebibytes << 20)
    monkeypatch.setattr(doctor.cores, "usable", lambda: [0, 1])
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    finding = next(found for found in doctor._hardware() if found.what == "shared memory")
    assert finding.state == state and "where mpirun (MPICH) needs 1 MiB a rank" in finding.found
    assert finding.found.endswith("room for 0") == (state == "optional")
    assert ("transport shm does without" in finding.advice) == (state == "optional")


def test_an_mpirun_without_room_is_not_tried(monkeypatch):
    monkeypatch.setattr(doctor, "shortage", lambda ranks: f"no room for {ranks}")
    monkeypatch.setattr(doctor, "_try_mpirun", lambda mpirun: pytest.fail("it was started"))
    finding = doctor._mpi()
    assert finding.state == "broken" and finding.found.endswith("; no room for 2")


def test_lines_of_mpis_own_libraries_are_no_answer(monkeypatch):
    """UCX prints to stdout in a container without /sys."""
    printed = (
        "[vm:10 :0] tcp_iface.c:984 UCX ERROR scandir failed\n2 MPICH Version: 5.0.2\n2 MPICH\n"
    )
    tried = SimpleNamespace(stdout=printed, stderr="", returncode=0)
    monkeypatch.setattr(doctor, "_try_mpirun", lambda mpirun: tried)
    assert doctor._mpi().state == "ok"


@pytest.fixture
def open_mpi(tmp_path):
    """A folder with an mpirun that says it is Open MPI's, and starts its first rank."""
    fake = tmp_path / "bin" / "mpirun"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.5' && exit\nshift 3\n"
        "export OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
        'OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=0 PMIX_NAMESPACE=test\nexec "$@"\n'
    )
    fake.chmod(0o755)
    return fake


def test_the_mpirun_that_the_shell_finds_first_is_looked_at(monkeypatch, open_mpi):
    """Open MPI's, where mpi4py has MPICH: beside the one that md.run takes, or alone."""
    assert list(doctor._mpi_on_path()) == []
    taken = mpirun.find_mpirun()
    monkeypatch.setenv("PATH", f"{open_mpi.parent}:{os.environ['PATH']}")
    (finding,) = doctor._mpi_on_path()
    assert (finding.state, finding.advice) == ("optional", f"for MPI: {taken.path}")
    assert re.fullmatch(
        rf"openmpi 5.0.5 at {open_mpi}, the first on the path; mpi4py has MPICH.*: its ranks cannot "
        "use transport mpi",
        finding.found,
    )
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: mpirun.mpirun_at(str(open_mpi)))
    finding = doctor._mpi()
    assert finding.state == "broken" and "but mpi4py has MPICH" in finding.found
    assert "PMI" not in finding.found and "pip install mpich" in finding.advice
    assert list(doctor._mpi_on_path()) == []


def test_an_mpirun_that_does_not_run_says_why(monkeypatch, tmp_path):
    """The first on the path, beside the one that md.run takes, or alone."""
    taken = mpirun.find_mpirun()
    fake = tmp_path / "mpirun"
    fake.write_text(
        "#!/bin/sh\necho 'loading' >&2\necho 'mpirun: cannot open libopen-rte.so.40' >&2\nexit "
        "127\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (finding,) = doctor._mpi_on_path()
    why = f"{fake} does not run (mpirun: cannot open libopen-rte.so.40)"
    assert (finding.state, finding.advice) == ("optional", f"for MPI: {taken.path}")
    assert finding.found == f"the first on the path: {why}"
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: mpirun.mpirun_at(str(fake)))
    assert (doctor._mpi().found, doctor._mpi().advice) == (why, mpirun.INSTALL)
    fake.write_text("#!/bin/sh\n")
    assert "it said nothing and ended with 0" in doctor._mpi().found


def test_a_system_without_core_masks_has_cores(monkeypatch):
    """macOS: there is no sched_getaffinity."""
    monkeypatch.delattr(os, "sched_getaffinity")
    found = {finding.what: finding for finding in doctor._hardware()}
    assert found["cores"].found.startswith(f"{os.cpu_count()} usable of {os.cpu_count()}")


def test_standard_input_is_left_to_the_shell(monkeypatch, tmp_path):
    """A script that is piped into a shell keeps its lines behind `minidist doctor`."""
    fake = tmp_path / "mpirun"
    taken = tmp_path / "taken"
    fake.write_text(f"#!/bin/sh\ncat > {taken}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: mpirun.Mpirun(str(fake), "mpich", "9.9"))
    read, write = os.pipe()
    kept = os.dup(0)
    _ = os.write(write, b"the next line\n")
    os.close(write)
    os.dup2(read, 0)
    try:
        doctor._mpi()
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(read)
    assert taken.read_text() == ""


def test_a_foreign_mpirun_is_found_out(monkeypatch, tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\nshift 2\n"$@" & "$@"\nwait\n')  # starts two worlds of one
    fake.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: mpirun.Mpirun(str(fake), "mpich", "9.9"))
    finding = doctor._mpi()
    assert finding.state == "broken"
    assert "each rank is alone" in finding.found


@pytest.mark.parametrize(("name", "state"), [("tcp", "broken"), ("mpi", "optional")])
def test_a_transport_that_fails_is_a_finding(monkeypatch, name, state):
    def fail(*args, **options):
        raise MinidistError("no way\nmore")

    monkeypatch.setattr("minidist.launch.run", fail)
    assert doctor._transport(name) == doctor.Finding(
        f"transport {name}", state, "no way", "see mpirun above" if name == "mpi" else ""
    )


def test_where_ranks_may_not_read_each_others_memory_it_says_how_to_let_them(monkeypatch):
    monkeypatch.setattr(process_vm_read, "_readv", None)
    finding = doctor._transport("shm")
    assert finding.state == "ok" and "long arrays are copied twice" in finding.found
    assert "ptrace_scope" in finding.advice


def test_what_reaches_other_hosts(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: f"/usr/bin/{tool}")
    monkeypatch.setattr(doctor.os, "geteuid", lambda: 0)
    ssh, here = doctor._several_hosts()
    assert (ssh.state, ssh.found) == ("ok", "by /usr/bin/ssh: minidist launch --hosts a:4,b:4")
    assert here.state == "ok"
    assert here.found == "as namespaces: lesson 04; in the repository tests/clusters/up.sh"
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None)
    ssh, here = doctor._several_hosts()
    assert (ssh.state, ssh.found) == ("optional", "no ssh, which minidist launch --hosts needs")
    assert "--node-rank" in ssh.advice
    assert (here.state, here.found) == (
        "optional",
        "ip and tc and unshare of iproute2 and util-linux not installed",
    )


def test_the_profile_that_auto_goes_by(monkeypatch, tmp_path):
    """None; one of this machine; one of another; one that cannot be read."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    finding = doctor._profile()
    assert (finding.state, finding.advice) == ("optional", "minidist bench calibrate")
    assert "auto goes by its defaults" in finding.found
    links = [LinkCost("shm", ranks, 1e-6, 0, 0, 0, 0) for ranks in (2, 4)]
    save_profile(Profile(links, machine()), profile_path())
    finding = doctor._profile()
    assert finding.state == "ok"
    assert "shm among 2, 4 ranks, of 20" in finding.found
    save_profile(Profile(links, {**machine(), "processor": "abacus"}), profile_path())
    finding = doctor._profile()
    assert finding.state == "optional"
    assert finding.found.endswith("measured on another machine")
    save_profile(
        Profile([*links, LinkCost("tcp", 2, 1e-6, 0, 0, 0, 1.99)], machine()), profile_path()
    )
    finding = doctor._profile()
    assert (finding.state, finding.advice) == (
        "optional",
        "minidist bench calibrate, while nothing else runs",
    )
    assert finding.found.endswith("it misses a measured time: tcp among 2 ranks by 199%")
    profile_path().write_text("[]")
    finding = doctor._profile()
    assert finding.state == "broken"
    assert "cannot be used" in finding.found


def test_something_that_every_job_needs_is_status_1(monkeypatch, capsys):
    finding = doctor.Finding("transport tcp", "broken", "[closed]", "open it")
    monkeypatch.setattr(doctor, "examine", lambda: [finding])
    assert main(["doctor"]) == 1
    assert "[closed]" in capsys.readouterr().out


def test_a_missing_extra_says_how_to_get_it():
    finding = doctor._extra("no_such_module_at_all", "digits")
    assert (finding.state, finding.advice) == ("optional", 'pip install "minidist[digits]"')


def test_a_library_that_does_not_load_is_a_finding(monkeypatch):
    def load():
        raise ImportError("libcuda.so.1: cannot open")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # CuPy is installed
    monkeypatch.setattr(doctor, "_cupy", load)
    finding = doctor._gpu()
    assert (finding.state, finding.found) == ("broken", "libcuda.so.1: cannot open")
    assert "pip install" in finding.advice


def test_a_missing_compiler_says_how_to_get_one(monkeypatch):
    monkeypatch.setattr("minidist.kernels.on_cpu.compiler", lambda: None)
    finding = doctor._compiler()
    assert (finding.state, finding.found) == ("optional", "no g++")
    assert "apt install g++" in finding.advice
