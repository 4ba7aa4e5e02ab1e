"""launch/own_python.py: no process of ours runs a module of the current folder; a user's program
finds its own."""

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import finish, start
from leftovers import nothing_left

from minidist.launch.own_python import code_command, module_command

ROOT = Path(__file__).parents[2]
OTHERS = ("numpy", "psutil", "msgpack", "mpi4py", "rich", "threadpoolctl", "torch", "cupy")
FROZEN = (
    "os",
    "site",
    "runpy",
    "codecs",
    "abc",
    "io",
    "stat",
    "zipimport",
    "genericpath",
    "posixpath",
)
STARTED_BY_MINIDIST = {
    "minidist/launch/own_python.py",
    "minidist/cli/launch.py",
    "minidist/cli/lesson.py",
    "lessons/02_collectives/family.py",
    "lessons/01_launching/lesson.py",
    "lessons/01_launching/figure.py",
    "lessons/drawn.py",
    "lessons/printed.py",
}


@pytest.fixture
def shadows(tmp_path):
    """A folder with a file for every module of Python and of our libraries; one that is run says so
    in `log`."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *OTHERS} - {*FROZEN, *sys.builtin_module_names}:
        (folder / f"{name}.py").write_text(
            # append, create, write
            f"import posix\nfile = posix.open({str(tmp_path / 'log')!r}, 1089, 0o600)\n"
            f"posix.write(file, b'{name} ')\nraise ImportError('the {name} of the current "
            "folder')\n"
        )
    return folder


def ran(folder):
    """The modules of the folder that were run."""
    log = folder.parent / "log"
    return sorted({*log.read_text().split()}) if log.exists() else []


def needed_by_dash_m(folder):
    """Return the modules that `python -m` looks for in the current folder before any line of ours."""
    (folder / "probe.py").write_text("import sys\nprint(*sys.modules)")
    found = subprocess.run(
        [sys.executable, "-m", "probe"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    return found.stdout.split()


def test_the_folder_shadows_what_python_itself_starts(shadows):
    subprocess.run(
        [sys.executable, "-c", "import random"], cwd=shadows, stderr=subprocess.DEVNULL, timeout=60
    )
    assert ran(shadows) == (
        ["random"] if sys.version_info < (3, 13) else ["linecache", "traceback"]
    )


def test_neither_code_nor_a_module_of_ours_runs_a_file_of_the_current_folder(shadows):
    code = "import random, copy, select, numpy, sys; print(sys.argv[1:])"
    done = subprocess.run(
        code_command(code, "a b", options=("-W", "ignore")),
        cwd=shadows,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr, ran(shadows)) == ("['a b']\n", "", [])
    done = subprocess.run(
        module_command("minidist", "--version"),
        cwd=shadows,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout[:9], done.stderr, ran(shadows)) == ("minidist ", "", [])


@pytest.mark.parametrize("own", ["random.py", "copy.py", "select.py"])
def test_neither_does_our_command_as_a_user_spells_it(own, tmp_path):
    (tmp_path / own).write_text("raise SystemExit('shadow')")
    for words in (
        ["-m", "minidist"],
        ["-um", "minidist"],
        [
            "-c",
            "import sys; sys.argv[0] = '-m'; "
            "sys.orig_argv[1:] = ['-m', 'minidist']; import minidist, random, copy, select",
        ],
    ):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, ""), words


def test_a_users_package_that_imports_minidist_keeps_its_folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "__init__.py").write_text("import minidist")
    (tmp_path / "mine" / "__main__.py").write_text("import beside")
    (tmp_path / "beside.py").write_text("print('beside')")
    done = subprocess.run(
        [sys.executable, "-m", "mine"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "beside\n", done.stderr


SMALL = [
    "--layers=1",
    "--width=16",
    "--heads=2",
    "--batch=4",
    "--context=8",
    "--steps=1",
    "--quiet",
]
MINIDIST = str(Path(sys.executable).parent / "minidist")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([MINIDIST, "train", "-n2"], id="train"),
        pytest.param(
            [MINIDIST, "launch", "-n2", "-m", "minidist", "train"],
            id="launch",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            ["mpirun", "-n", "2", sys.executable, "-m", "minidist", "train"],
            id="mpirun",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_no_process_of_a_training_runs_a_file_of_the_current_folder(command, shadows, tmp_path):
    if sys.executable in command:
        for name in needed_by_dash_m(tmp_path):
            (shadows / f"{name}.py").unlink(missing_ok=True)
    book = tmp_path / "book.txt"
    book.write_text("a text of a few words, again and again. " * 60)
    with nothing_left() as environment:
        done = finish(
            start(
                [
                    "sh",
                    "-c",
                    f'cd {shadows} && exec "$@"',
                    "sh",
                    *command,
                    *SMALL,
                    f"--data={book}",
                    f"--out={tmp_path}/run",
                ],
                environment,
            )
        )
    assert (done.returncode, done.stderr, ran(shadows)) == (0, "", [])


def test_no_rank_of_an_mpirun_of_ours_does(shadows, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import minidist as md\ndef rank(world):\n    return world.rank\n"
        "if __name__ == '__main__':\n    print(md.run(rank, size=2, transport='mpi'))\n"
    )
    with nothing_left() as environment:
        done = finish(
            start(
                ["sh", "-c", f'cd {shadows} && exec "$@"', "sh", sys.executable, str(program)],
                environment,
            )
        )
    assert (done.stdout, done.stderr, ran(shadows)) == ("[0, 1]\n", "", [])


def test_a_users_program_finds_what_lies_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    (tmp_path / "program.py").write_text("import beside; print(beside.NAME)")
    with nothing_left() as environment:
        for words in (["program.py"], ["-m", "program"]):
            line = f'cd {tmp_path} && exec "$@"'
            done = finish(start(["sh", "-c", line, "sh", MINIDIST, "launch", *words], environment))
            assert (done.stdout, done.stderr) == ("beside\n", "")


def test_every_python_that_we_start_is_started_by_own_python():
    """`sys.executable` stands where a script of a user or of a lesson is started, and nowhere
    else."""
    found = set()
    for room in ("minidist", "benchmarks", "kernels", "lessons"):
        for file in (ROOT / room).rglob("*.py"):
            if "[sys.executable" in file.read_text() or ", sys.executable" in file.read_text():
                found.add(file.relative_to(ROOT).as_posix())
    # whose docstring shows a user's program
    assert found == STARTED_BY_MINIDIST | {"minidist/launch/__init__.py"}
    modules = [file for file in found if '"-m"' in (ROOT / file).read_text()]
    assert sorted(modules) == ["minidist/cli/launch.py"]
