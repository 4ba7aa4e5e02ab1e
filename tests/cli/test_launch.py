"""minidist launch: what the command line says is what starts; what cannot start is one line."""

import json
import sys

import pytest
from jobs import JOB, finish, free_port, start
from leftovers import nothing_left

from minidist.cli import launch as launch_module
from minidist.cli import main
from minidist.cli.launch import program
from minidist.errors import ConfigError
from minidist.launch import spawning
from minidist.launch.spawning import Nodes


def launch(environment, *arguments):
    return finish(start([sys.executable, "-m", "minidist", "launch", *arguments], environment))


def test_a_script_with_its_arguments_and_a_report(tmp_path):
    file = tmp_path / "report.json"
    with nothing_left() as environment:
        done = launch(environment, "--json", str(file), "-n", "2", JOB, "ok", "shm")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        *(f"goodbye from {rank}" for rank in range(2)),
        *(f"hello from {rank} of 2 over shm" for rank in range(2)),
    ]
    assert json.loads(file.read_text()) == {
        "command": [sys.executable, JOB, "ok", "shm"],
        "size": 2,
        "exit_status": 0,
    }


def test_options_after_the_program_are_the_programs(tmp_path):
    script = tmp_path / "show.py"
    script.write_text("import sys; print(sys.argv[1:])")
    with nothing_left() as environment:
        done = launch(environment, str(script), "-n", "7", "--json", "-m")
    assert done.stdout == "['-n', '7', '--json', '-m']\n"


def test_a_module_and_a_command():
    with nothing_left() as environment:
        assert launch(environment, "-m", "platform").stdout.strip()
        assert launch(environment, "-n", "2", "sh", "-c", "exit $RANK").returncode == 1


def test_output_keeps_apart_who_said_it():
    code = "import os; os.write(1, b'out\\n'); os.write(2, b'err\\rprogress\\n')"
    with nothing_left() as environment:
        done = launch(environment, "-n", "2", sys.executable, "-c", code)
    assert done.stdout == "out\nout\n"
    said = sorted(done.stderr.replace("\r", "\n").splitlines())
    assert said == ["[rank 1] err", "[rank 1] progress", "err", "progress"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["no-such-command"], "there is no command 'no-such-command'"),
        (["--node-rank", "2", "--nnodes", "2", "true"], "--node-rank 2 is not one of 2 nodes"),
        (["--master-port", "70000", "true"], "70000 is not a port"),
        (["--nnodes", "2", "true"], "--nnodes above 1 needs --master-addr"),
        (["--nnodes", "2", "--master-addr", "10.0.0.1", "true"], "one secret for all nodes"),
        (["--token-file", "/nowhere/token", "true"], "--token-file /nowhere/token: No such file"),
        (["--master-addr", "192.0.2.1", "true"], "cannot listen on 192.0.2.1"),
        ([], "the following arguments are required: program"),
    ],
)
def test_what_cannot_start_is_one_line(arguments, says, capsys):
    assert main(["launch", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("minidist launch: ")
    assert says in captured.err
    assert captured.err.count("\n") == 1


def test_two_nodes_of_one_machine_need_neither_a_port_nor_a_secret(monkeypatch, tmp_path):
    """Use torchrun's port by default; node 0 leaves the secret in a private file."""
    told = []
    monkeypatch.setattr(
        launch_module, "spawn", lambda command, size, **rest: told.append(rest["nodes"]) or 0
    )
    assert main(["launch", "--nnodes", "2", "--master-addr", "127.0.0.1", "true"]) == 0
    assert (
        main(
            [
                "launch",
                "--nnodes",
                "2",
                "--master-addr",
                "localhost",
                "--master-port",
                "29600",
                "true",
            ]
        )
        == 0
    )
    assert main(["launch", "true"]) == 0
    assert told == [Nodes(2, 0, "127.0.0.1", 29500), Nodes(2, 0, "127.0.0.1", 29600), Nodes()]
    with nothing_left() as environment:
        words = [
            sys.executable,
            "-m",
            "minidist",
            "launch",
            "--nnodes",
            "2",
            "--master-addr",
            "localhost",
            "--master-port",
            free_port(),
            "--node-rank",
        ]
        nodes = [
            start([*words, rank, JOB, "ok"], environment, XDG_CACHE_HOME=str(tmp_path))
            for rank in "10"
        ]
        done = [finish(node) for node in nodes]
    assert [(node.returncode, node.stderr) for node in done] == [(0, "")] * 2
    assert "hello from 1 of 2 over tcp" in done[0].stdout
    assert [*(tmp_path / "minidist").iterdir()] == []


def test_a_node_whose_machine_has_no_node_0_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(spawning, "MEET_LIMIT", 0.1)
    words = [
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "29500",
        "true",
    ]
    assert main(["launch", *words]) == 2
    assert (
        "node 0 of the job at 127.0.0.1:29500 did not answer within 0.1 s"
        in capsys.readouterr().err
    )


def test_a_secret_from_a_file(tmp_path, capsys):
    file = tmp_path / "token"
    file.write_text("short\n")
    assert main(["launch", "--token-file", str(file), "true"]) == 2
    assert "fewer than 16" in capsys.readouterr().err
    file.write_text("long enough for a secret\n")
    script = tmp_path / "show.py"
    script.write_text(
        "import os, pathlib; pathlib.Path('seen').write_text(os.environ['MINIDIST_TOKEN'])"
    )
    with nothing_left() as environment:
        command = f"cd {tmp_path} && {sys.executable} -m minidist launch --token-file token show.py"
        assert finish(start(["sh", "-c", command], environment)).returncode == 0
    assert (tmp_path / "seen").read_text() == "long enough for a secret"


def test_programs():
    assert program("pydoc", ["os"], module=True) == [sys.executable, "-m", "pydoc", "os"]
    with pytest.raises(ConfigError):
        program("x.py", [], module=False)
