"""run over a new mpirun: functions found by name, failures with their rank and type, nothing left
over."""

import os
import sys

import numpy as np
import pytest
from jobs import finish, start
from leftovers import nothing_left
from mpirun_calls import end, work

import minidist as md
from minidist.errors import LaunchError, PeerLostError, TimeoutError
from minidist.launch import mpirun


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


@pytest.mark.soak  # tests/parallel/test_over_mpi.py has results of four ranks
def test_results_come_in_rank_order():
    for rank, result in enumerate(md.run(work, [1.0, 2.0], size=3, transport="mpi", limit=30)):
        assert result[0] == rank
        np.testing.assert_array_equal(result[1], [6.0, 12.0])
        assert result[2] == "mpi"


# test_conformance.py has functions of a module; below is a script that md.run refuses
@pytest.mark.soak
def test_a_function_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import minidist as md\ndef f(world, x): return world.rank + x\n"
        "if __name__ == '__main__': print(md.run(f, 10, size=2, transport='mpi'))\n"
    )
    with nothing_left() as environment:
        done = finish(start([sys.executable, str(script)], environment))
    assert (done.stdout, done.stderr) == ("[10, 11]\n", "")


def test_an_exception_keeps_its_type_and_names_its_rank():
    with pytest.raises(ValueError, match="rank 1: invalid literal") as caught:
        md.run(end, "raise", size=2, transport="mpi", limit=30)
    assert "in end" in str(caught.value.__cause__)


@pytest.mark.soak  # test_membership.py kills under mpirun; the test above has a failure of md.run
@pytest.mark.parametrize(
    ("how", "says"),
    [("kill", "was killed"), ("exit", "exited with status 256"), ("leave", "exited with status 1")],
)
def test_a_rank_that_dies_is_named(how, says, capfd):
    with pytest.raises(PeerLostError, match=rf"^rank 1 \(process \d+ on .*\) .*{says}"):
        md.run(end, how, size=2, transport="mpi", limit=30)
    assert capfd.readouterr().err == ""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("mute", r"rank 1: .*Mute: <its str\(\) raised OSError>"),
        ("surrogate", r"rank 1: \\ud800"),
        ("start", "rank . calls all_reduce"),
    ],
)
def test_an_odd_exception_keeps_its_traceback(how, says):
    with pytest.raises(Exception, match=says) as caught:
        md.run(end, how, size=3, transport="mpi", limit=30)
    assert "the traceback of rank" in str(caught.value.__cause__)


@pytest.mark.soak
def test_the_limit_names_who_had_not_ended():
    with pytest.raises(TimeoutError, match=r"1 of 2 ranks had not ended after 4 s: rank 1"):
        md.run(end, "sleep", size=2, transport="mpi", limit=4)


def test_a_function_without_a_name_is_refused():
    with pytest.raises(LaunchError, match="cannot be found by name"):
        md.run(lambda world: 1, size=2, transport="mpi")


def test_a_function_of_a_notebook_is_refused_before_anything_starts(monkeypatch):
    """A function of `python -c` is refused too: its module is __main__, and there is no file that
    another process could import."""
    cell: dict = {"__name__": "__main__"}
    exec(compile("def work(world): return 1", "/tmp/ipykernel_1/2.py", "exec"), cell)
    with pytest.raises(LaunchError, match="at the top of a module or script, not in a notebook"):
        mpirun._name_of(cell["work"], "mpi")


def test_no_mpirun_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="`pip install mpich`") as caught:
        md.run(work, [1.0], size=2, transport="mpi")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("says", "flavour", "version"),
    [
        (
            "HYDRA build details:\n    Version:                                 5.0.2\n    "
            "Release Date: x",
            "mpich",
            "5.0.2",
        ),
        (
            "mpirun (Open MPI) 5.0.5\n\nReport bugs to https://www.open-mpi.org/community/help/",
            "openmpi",
            "5.0.5",
        ),
        ("something else 1.0", "unknown", "something else 1.0"),
    ],
)
def test_which_mpirun(monkeypatch, tmp_path, says, flavour, version):
    fake = tmp_path / "mpirun"
    fake.write_text(f"#!/bin/sh\necho '{says}'\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = mpirun.find_mpirun()
    assert (found.flavour, found.version) == (flavour, version)
    assert (
        ("--oversubscribe" in found.command(2))
        == ("OMPI_ALLOW_RUN_AS_ROOT" in found.environment())
        == (flavour == "openmpi")
    )


def test_open_mpis_mpirun_with_mpichs_library_is_one_line(monkeypatch, tmp_path):
    """A stand-in that starts one rank with Open MPI's variables."""
    fake = tmp_path / "mpirun"
    fake.write_text(
        "#!/bin/sh\nshift 3\nexport OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 "
        "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_RANK=0 PMIX_NAMESPACE=t\n"
        'exec "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: mpirun.Mpirun(str(fake), "openmpi", "5"))
    with pytest.raises(
        LaunchError,
        match="transport 'mpi': Open MPI's mpirun started these 2 ranks, but mpi4py has M",
    ):
        md.run(work, [1.0], size=2, transport="mpi", limit=20)


def test_an_mpirun_that_fails_shows_what_it_said(monkeypatch, tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho 'HYDRA Version: 1'\necho 'no such fabric' >&2\nexit 7\n")
    fake.chmod(0o755)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: mpirun.Mpirun(str(fake), "mpich", "1"))
    with pytest.raises(LaunchError, match="(?s)ended with 7.*no such fabric"):
        md.run(work, [1.0], size=2, transport="mpi", limit=10)


def test_a_script_that_runs_when_imported_is_told_so_and_starts_no_jobs_of_jobs(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import minidist as md\n\ndef rank(world):\n    return world.rank\n\n"
        "print(md.run(rank, size=2, transport='mpi', limit=20))\n"
    )
    done = finish(start([sys.executable, str(script)], os.environ))
    assert done.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in done.stderr.splitlines()[-1]
