"""macOS, by a stand-in that takes away what Linux alone has (tests/support/no_linux). Windows: one
line."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import JOB
from leftovers import nothing_left

import minidist

SUPPORT = Path(__file__).parents[1] / "support"
STAND_IN = SUPPORT / "no_linux"
TINY = [
    "--quiet",
    "--steps",
    "2",
    "--batch",
    "4",
    "--layers",
    "1",
    "--width",
    "16",
    "--heads",
    "2",
    "--context",
    "16",
]
GUARDED = {
    "sched_setaffinity": "only of cores that usable() has named, which needs sched_getaffinity",
    "pidfd_open": "after a look into /proc, which raises OSError elsewhere",
    "CLOCK_BOOTTIME": "AttributeError is caught",
}
"""Names of Linux that stand in a function without a question whether they are there, and why they
may."""


def elsewhere(
    environment: dict[str, str], *words: str, limit: float = 90.0
) -> subprocess.CompletedProcess[str]:
    """`python …`, and all that it starts, where Linux's own things are missing."""
    path = os.pathsep.join([str(STAND_IN), str(SUPPORT), str(Path(minidist.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, *words],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def taken_names() -> dict[str, set[str]]:
    """{module: the names that the stand-in takes from it}, read from its table."""
    tree = ast.parse((STAND_IN / "sitecustomize.py").read_text())
    table = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0]) == "NAMES"
    )
    assert isinstance(table, ast.Dict)
    return {
        ast.unparse(key): set(ast.literal_eval(value))
        for key, value in zip(table.keys, table.values, strict=True)
        if key is not None
    }


def unguarded(text: str, taken: dict[str, set[str]]) -> list[str]:
    """The names of Linux in a module that stand in a function, or at its top, that does not ask for
    them."""
    tree = ast.parse(text)
    found = []
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.attr in taken.get(node.value.id, ())
        ):
            around = [
                each for each in functions if each.lineno <= node.lineno <= (each.end_lineno or 0)
            ]
            source = ast.unparse(max(around, key=lambda each: each.lineno) if around else tree)
            if not re.search(rf"(has|get)attr\({node.value.id}, '{node.attr}'", source):
                found.append(node.attr)
    return found


def test_the_scan_sees_a_name_without_a_question() -> None:
    taken = taken_names()
    assert {"sched_getaffinity", "posix_fallocate"} <= taken["os"] and "MSG_NOSIGNAL" in taken[
        "socket"
    ]
    assert unguarded("import os\ndef f():\n    return os.memfd_create('x')\n", taken) == [
        "memfd_create"
    ]
    assert not unguarded(
        "import os\ndef f():\n    return os.memfd_create('x') if hasattr(os, 'memfd_create') "
        "else 0\n",
        taken,
    )


def test_no_module_takes_a_name_of_linux_unasked() -> None:
    root = Path(minidist.__file__).parents[1]
    taken = taken_names()
    files = 0
    for folder in ("minidist", "benchmarks", "kernels", "lessons"):
        for file in sorted((root / folder).rglob("*.py")):
            files = files + 1
            text = file.read_text(encoding="utf-8")
            names = {name for names in taken.values() for name in names if f".{name}" in text} - {
                *GUARDED
            }
            left = [name for name in unguarded(text, taken) if name in names] if names else []
            assert not left, (
                f"{file}: {left}: ask hasattr first, and say what is left out without it"
            )
    assert files > 400


@pytest.mark.soak
@pytest.mark.parametrize(
    "transport",
    [
        "auto",
        pytest.param("tcp", marks=pytest.mark.soak),
        pytest.param("threads", marks=pytest.mark.soak),
    ],
)
def test_a_run_gives_the_same_weights(transport: str, tmp_path: Path) -> None:
    words = ["-m", "minidist", "train", *TINY, "-n", "2", "--transport", transport]
    with nothing_left() as environment:
        done = elsewhere(environment, *words, "--out", str(tmp_path / "there"))
        assert (done.returncode, done.stderr) == (0, "")
    here = subprocess.run(
        [sys.executable, *words, "--out", str(tmp_path / "here")], timeout=90, check=False
    )
    assert here.returncode == 0
    runs = [
        json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("there", "here")
    ]
    assert (
        runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
        and runs[0]["losses"] == runs[1]["losses"]
    )
    assert runs[0]["transport"] == {"auto": "shm"}.get(transport, transport)
    assert [rank["cores"] for rank in runs[0]["ranks"]] == [None, None]


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [
        ["--save-every", "1"],
        ["--zero", "3", "--offload", "all"],
        ["--why"],
        ["--strategy", "parameter-server"],
        ["--elastic", "1:2", "--spares", "1", "--max-restarts", "1"],
        ["--zero", "1", "--save-every", "1", "--save-async"],
    ],
)
def test_options_that_use_the_system(options: list[str], tmp_path: Path) -> None:
    with nothing_left() as environment:
        done = elsewhere(
            environment,
            "-m",
            "minidist",
            "train",
            *TINY,
            "-n",
            "2",
            *options,
            "--out",
            str(tmp_path / "run"),
        )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soak
@pytest.mark.parametrize(
    "words",
    [
        [
            "bench",
            "step",
            "--rounds",
            "1",
            "--steps",
            "1",
            "--layers",
            "1",
            "--width",
            "16",
            "-n",
            "2",
        ],
        [
            "bench",
            "save",
            "--rounds",
            "1",
            "--saves",
            "1",
            "--layers",
            "1",
            "--width",
            "16",
            "-n",
            "2",
        ],
        ["bench", "all-reduce", "--rounds", "1", "--sizes", "4KiB", "-n", "2"],
        ["lesson", "01", "-n", "2"],
        ["lesson", "20", "-n", "2"],
    ],
)
def test_commands_that_look_at_the_system(words: list[str]) -> None:
    with nothing_left() as environment:
        done = elsewhere(environment, "-m", "minidist", *words)
    assert done.returncode == 0 and "Traceback" not in done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("raise", "failed with ValueError: boom"),
        ("kill", "was killed by SIGKILL"),
        ("exit", "exited with status 3"),
    ],
)
def test_a_lost_rank_is_named(mode: str, says: str, transport: str) -> None:
    with nothing_left() as environment:
        done = elsewhere(environment, "-m", "minidist", "launch", "-n", "3", JOB, mode, transport)
    assert done.returncode != 0 and re.search(
        rf"rank 0 stops: PeerLostError: rank 2 .*{says}", done.stderr
    )


@pytest.mark.soak  # the next test starts a command and two ranks of it there
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cores", "1"], "this system does not let a process choose its cores"),
        (["--memory-limit", "1GiB"], "--memory-limit 1 GiB is not enforced"),
    ],
)
def test_what_is_left_out_is_said(options: list[str], says: str, tmp_path: Path) -> None:
    done = elsewhere(
        {**os.environ},
        "-m",
        "minidist",
        "train",
        *TINY,
        "-n",
        "2",
        *options,
        "--out",
        str(tmp_path),
    )
    assert says in done.stderr and "Traceback" not in done.stderr


SHM_ALONE = """import sys
from minidist.cli import doctor, main

try_one = doctor._transport
doctor._transport = lambda name: try_one(name if name == "shm" else "threads")
doctor._mpi = lambda: try_one("threads")
sys.exit(main(sys.argv[1:]))
"""
"""minidist, whose doctor tries no transport of processes but shm."""


def test_doctor_says_what_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    done = elsewhere({**os.environ}, "-c", SHM_ALONE, "doctor", "--json", str(file))
    found = {finding["what"]: finding for finding in json.loads(file.read_text())["findings"]}
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert found["system"]["state"] == "optional"
    assert (
        found["system"]["found"].startswith("Darwin ")
        and "not bound to cores" in found["system"]["found"]
    )
    assert found["transport shm"]["state"] == "ok" and found["transport shm"]["advice"] == ""


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("script.py", ImportError),
        (r"C:\Python\Scripts\minidist.exe", SystemExit),
        ("-m", SystemExit),
    ],
)
def test_windows_is_told_of_wsl_in_one_line(
    program: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(
        error, match=r"^minidist runs on Linux and macOS; on Windows use WSL, .*wsl --install.*it$"
    ):
        exec(
            compile(Path(minidist.__file__).read_text(), minidist.__file__, "exec"),
            {"__name__": "minidist"},
        )
