"""Run a function on ranks that a new mpirun starts; each rank runs this module with the name of a
FOLDER.

The caller runs the monitor, so it learns at once which rank was lost. The function is passed by
name; its arguments and results go through files in a private folder, packed (comm/wire.py), never
pickled.
"""

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from minidist.comm import wire
from minidist.comm.health.monitor import Monitor
from minidist.comm.health.process_state import PATIENCE, exit_of
from minidist.errors import LaunchError
from minidist.files import scratch
from minidist.launch import failures
from minidist.launch.children import Children
from minidist.launch.joining import MonitorAddress
from minidist.launch.launchers import clean_environment
from minidist.launch.own_python import module_command

GRACE = 2.0  # seconds mpirun gets to end after a rank was lost
INSTALL = "`pip install mpich` brings one that needs no set-up"


@dataclass(frozen=True)
class Mpirun:
    """The mpirun that a job on this host would use."""

    path: str
    flavour: str  # "mpich" | "openmpi" | "unknown"
    version: str

    def command(self, size: int, *, patient: bool = False) -> list[str]:
        """Return the command that starts `size` ranks here, even if that is more than cores.

        `patient`: the caller ends the job. Without it, MPICH's mpirun kills every rank shortly
        after one has ended without MPI_Finalize, before the others can report it; after a signal it
        does so in any case (5.0).
        """
        options = {
            "openmpi": ["--oversubscribe"],
            "mpich": ["-disable-auto-cleanup"] if patient else [],
        }
        return [self.path, *options.get(self.flavour, []), "-n", str(size)]

    def environment(self) -> dict[str, str]:
        """Return this process's environment without the variables of its own launcher."""
        names = (
            ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
            if self.flavour == "openmpi"
            else ()
        )
        return {**clean_environment(os.environ), **dict.fromkeys(names, "1")}


def find_mpirun() -> Mpirun:
    """Return the mpirun in the folder of this Python, else the first on the path.

    Raises: LaunchError if there is none.
    """
    beside = Path(sys.executable).parent / "mpirun"
    path = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    if path is None:
        raise LaunchError(
            f"there is no mpirun in the folder of {sys.executable} or on the path; {INSTALL}"
        )
    return mpirun_at(path)


def mpirun_at(path: str) -> Mpirun:
    """Return the mpirun in this file.

    Raises: LaunchError, which says why, if it does not run.
    """
    try:
        asked = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} does not run ({error}); {INSTALL}") from error
    text = asked.stdout
    if asked.returncode or not text.strip():
        said = asked.stderr.strip().splitlines() or [
            f"it said nothing and ended with {asked.returncode}"
        ]
        raise LaunchError(f"{path} does not run ({said[-1][:200]}); {INSTALL}")
    words = text.split()
    if "HYDRA" in text:
        return Mpirun(
            path, "mpich", words[words.index("Version:") + 1] if "Version:" in words else ""
        )
    if "Open MPI" in text:
        return Mpirun(
            path, "openmpi", words[-1 if "Report" not in words else words.index("Report") - 1]
        )
    return Mpirun(path, "unknown", text.splitlines()[0] if text else "")


def run_mpi(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    size: int,
    limit: float,
    transport: str = "mpi",
    patience: float = PATIENCE,
) -> list[Any]:
    """Run `fn(world, *args)` on the ranks of a new mpirun, over mpi or another transport.

    Return the results in rank order.

    Raises: as md.run; LaunchError if there is no mpirun, or another process cannot find `fn` by
            name.
    """
    mpirun = find_mpirun()
    where = _name_of(fn, transport)
    token = wire.new_token()
    monitor = Monitor(size, token, how=lambda seat: exit_of(seat.pid), patience=patience)
    with scratch(prefix="minidist-run-") as folder, open(Path(folder, "stderr"), "w+b") as said:
        Path(folder, "task").write_bytes(
            wire.pack(
                {
                    **where,
                    "args": list(args),
                    "path": sys.path,
                    "limit": limit,
                    "transport": transport,
                }
            )
        )
        monitor.start()
        command = [
            *mpirun.command(size, patient=True),
            *module_command("minidist.launch.mpirun", str(folder)),
        ]
        environment = {
            **mpirun.environment(),
            **MonitorAddress(*monitor.address, token).variables(),
        }
        try:
            process = subprocess.Popen(
                command, stderr=said, stdin=subprocess.DEVNULL, env=environment
            )
        except OSError as error:
            monitor.close()
            raise LaunchError(f"{mpirun.path} cannot be started: {error.strerror}") from error
        starter = Children({0: process})
        try:
            in_time = starter.wait(limit, hurry=lambda: monitor.loss is not None)
            if monitor.loss is not None:
                starter.wait(GRACE)
            outcomes = {
                rank: wire.unpack(path.read_bytes())
                for rank in range(size)
                if (path := Path(folder, f"outcome-{rank}")).exists()
            }
            if monitor.loss is not None:
                raise failures.first_failure(monitor.loss, outcomes)
            late = sorted(set(range(size)) - set(outcomes))
            if late and not in_time:
                raise failures.late(late, size, limit, monitor.table())
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            if late or process.returncode:  # it may fail even after every rank's goodbye
                what = f"rank {late[0]} without result" if late else "after every rank's result"
                raise LaunchError(f"mpirun ended with {process.returncode}, {what}: {text}")
            if text:
                print(text, file=sys.stderr)
            return [outcomes[rank]["result"] for rank in range(size)]
        finally:
            process.terminate()  # unless it has ended; it passes SIGTERM on to its ranks
            starter.end(GRACE)
            monitor.close()


def _name_of(fn: Callable[..., Any], transport: str) -> dict[str, str]:
    """Return module, name and file of a function that another process can import."""
    module = getattr(fn, "__module__", None)
    name = getattr(fn, "__qualname__", "")
    code = getattr(fn, "__code__", None)
    if module is None or code is None or "<" in name or not os.path.isfile(code.co_filename):
        raise LaunchError(
            f"run(transport={transport!r}): {fn!r} cannot be found by name from another process; "
            "give a function defined at the top of a module or script, not in a notebook or "
            "python -c"
        )
    return {"module": module, "name": name, "file": os.path.abspath(code.co_filename)}


# --- a rank
# ----------------------------------------------------------------------------------------------------------


def _load(module: str, name: str, file: str) -> Callable[..., Any]:
    """Return the function from its module; if that is a script or a test, from its file."""
    try:
        if module == "__main__":
            raise ImportError("a script has no module name")
        home = importlib.import_module(module)
        if os.path.abspath(home.__file__ or "") != file:
            raise ImportError(f"{module} is another file")
    except ImportError:
        spec = importlib.util.spec_from_file_location("minidist_run_target", file)
        assert spec is not None and spec.loader is not None
        home = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = home
        spec.loader.exec_module(home)
    return attrgetter(name)(home)  # type: ignore[no-any-return]


def _rank_main(folder: Path) -> None:
    """Join, call the function, write the outcome to a file.

    Raise exceptions again so that the job ends.
    """
    from minidist.launch import membership

    task = wire.unpack((folder / "task").read_bytes())
    sys.path[:] = task["path"]
    world = membership.init(transport=task["transport"], limit=task["limit"])
    member = membership.current()
    assert member is not None
    member.quiet = True  # the caller raises our errors
    packed = b""
    draft = folder / f"draft-{world.rank}"
    try:
        member.importing = task["file"]
        function = _load(task["module"], task["name"], task["file"])
        member.importing = ""
        result = function(world, *task["args"])
        world.close()
        packed = wire.pack({"result": result})
    except BaseException as error:
        if isinstance(error, SystemExit):
            member.fail(error)  # it reaches no hook, and its status may be 0
        elif not isinstance(error, KeyboardInterrupt):
            packed = wire.pack({"error": failures.encode(error)})
        raise
    finally:
        if packed:  # otherwise the program exits without an outcome
            draft.write_bytes(packed)
            draft.replace(folder / f"outcome-{world.rank}")


if __name__ == "__main__":
    _rank_main(Path(sys.argv[1]))
