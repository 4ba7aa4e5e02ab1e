"""minidist launch --hosts, over a stand-in for ssh that stays on this machine; tests/clusters/ has
real hosts."""

import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
from jobs import JOB, finish, start
from leftovers import nothing_left

from minidist.cli import main
from minidist.errors import LaunchError
from minidist.launch import hosts as hosts_module
from minidist.launch.host_launcher import MARK
from minidist.launch.hosts import HostRanks, hosts_of, spawn_on_hosts
from minidist.launch.own_python import module_command

HERE = platform.node()


@pytest.fixture
def ssh(tmp_path):
    """A program that does as ssh: the host's name, then one word for a shell, which begins in
    another folder."""

    def write(before=""):
        path = tmp_path / "ssh.sh"
        path.write_text(f'#!/bin/sh\n{before}\nshift; cd /; exec sh -c "$*"\n')
        path.chmod(0o755)
        return str(path)

    return write


def launch(environment, ssh, hosts, *program):
    return start(
        [sys.executable, "-m", "minidist", "launch", "--hosts", hosts, "--ssh", ssh, *program],
        environment,
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a", [("a", 2)]),
        ("a,b:4", [("a", 2), ("b", 4)]),
        ("gpu[01-03]:8", [(f"gpu0{n}", 8) for n in (1, 2, 3)]),
        ("me@a.lan:1,b-2", [("me@a.lan", 1), ("b-2", 2)]),
        ("127.0.0.1:3,127.0.0.2", [("127.0.0.1", 3), ("127.0.0.2", 2)]),
        (
            "[fd00::1]:3,me@[::1],gpu[1,3]:4",
            [("fd00::1", 3), ("me@::1", 2), ("gpu1", 4), ("gpu3", 4)],
        ),
    ],
)
def test_hosts_and_their_ranks(text, found):
    assert [(host.name, host.ranks) for host in hosts_of(text, 2)] == found


def test_the_address_of_a_host_is_its_name_without_the_user():
    assert HostRanks("me@a.lan", 1).address == "a.lan"
    assert (
        HostRanks(HERE, 1).is_here
        and HostRanks("localhost", 1).is_here
        and not HostRanks("a", 1).is_here
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "'' names no host"),
        ("a:0", "'a:0' is not a host"),
        ("-oProxyCommand=x", "is not a host"),
        ("a;b", "is not a host"),
        ("fd00::1:3,b", "as [fd00::1]:3"),
        ("[fe80::1]:2", "link-local"),
        ("[fd00::1]:0", "is not a host"),
        ("a:1,b,a:2", "host a is named twice"),
        ("localhost,b", "'localhost' is another host on each of them"),
        ("-Fx@b:1", "'-Fx@b:1' is not a host"),
        ("a[1-9999999999999]", "names 9999999999999 hosts or more"),
        ("a[x]", "'x' is neither a number"),
        ("a:²", "'a:²' is not a host"),
    ],
)
def test_what_names_no_hosts_is_one_line(text, says):
    with pytest.raises(LaunchError, match=re.escape(says)) as caught:
        hosts_of(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hosts", "a,b", "--nnodes", "3", "true"], "--hosts names 2 hosts, --nnodes says 3"),
        (["--hosts", "a,b", "--node-rank", "2", "true"], "--node-rank 2 is not one of 2 nodes"),
        (["--ssh", "ssh", "true"], "--ssh is for --hosts"),
        (["--hosts", "a:", "true"], "'a:' is not a host"),
        (["--hosts", "127.0.0.1:2,b:2", "true"], "'127.0.0.1' is another host on each of them"),
        (["--hosts", "a,b", "--ssh", "ssh 'x", "true"], '--ssh "ssh \'x": no closing quotation'),
        (["--hosts", "a,b", "--ssh", " ", "true"], "--ssh ' ': names no command"),
        (["--hosts", "-Fx@b:1", "true"], "argument --hosts: expected one argument"),
        (["--hosts=-Fx@b:1", "true"], "'-Fx@b:1' is not a host"),
        (["--hosts=a[1-9999999999999]", "true"], "names 9999999999999 hosts or more"),
        (["--flight", "", "true"], "argument --flight: '' is not a value"),
        (["--hosts", "a,b", "--node-rank", "0", "true"], "one secret for all nodes"),
    ],
)
def test_contradictions_are_one_line(arguments, says, capsys):
    assert main(["launch", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("minidist launch: ") and says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "answer",
    [
        "[]",
        "1",
        "null",
        '"hello"',
        "{",
        "{}x",
        '{"hello": 1}',
        '{"hello": "b"}',
        '{"hello": "b", "version": 3}',
        '{"port": "x"}',
        '{"port": 65536}',
        '{"port": true}',
        '{"problem": []}',
        '{"other": 1}',
        "[" * 5000,
    ],
)
def test_what_a_host_answers_is_understood_or_its_problem(answer):
    told = hosts_module.news_of(f"{MARK}{answer}\n".encode())
    assert (
        told["problem"].startswith("what it answers cannot be understood: ")
        and len(told["problem"]) < 120
    )
    assert hosts_module.news_of(f'{MARK}{{"hello": "b", "version": "1"}}\n'.encode()) == {
        "hello": "b",
        "version": "1",
    }


@pytest.mark.parametrize("order", ["{}", "[]", "1", "null", "{", '{"folder": []}', "[" * 5000])
def test_an_order_that_is_none_is_told_by_the_host(order):
    done = subprocess.run(
        module_command("minidist.launch.host_launcher"),
        input=f"{order}\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    told = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (2, "")
    assert told[1]["problem"].startswith("the order cannot be understood (")


def test_hosts_with_different_numbers_of_ranks(ssh, tmp_path):
    """The second host's ranks start in this folder, with this environment, and no secret stands on
    a command line."""
    file = tmp_path / "report.json"
    with nothing_left() as environment:
        noted = ssh(f"printf '%s\\n' \"$@\" >> {tmp_path}/words")
        done = finish(
            start(
                [
                    sys.executable,
                    "-m",
                    "minidist",
                    "launch",
                    "--hosts",
                    f"{HERE}:1,127.0.0.2:2",
                    "--ssh",
                    noted,
                    "--json",
                    str(file),
                    JOB,
                    "ok",
                ],
                environment,
                OMP_NUM_THREADS="1",
            )
        )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    for rank in range(3):
        assert f"hello from {rank} of 3 over shm+tcp\n" in done.stdout
    assert json.loads(file.read_text()) == {
        "command": [sys.executable, JOB, "ok"],
        "size": 3,
        "exit_status": 0,
    }
    words = (tmp_path / "words").read_text().splitlines()
    assert words == [
        "127.0.0.2",
        f"exec {shlex.join(module_command('minidist.launch.host_launcher'))}",
    ]


def test_a_rank_that_dies_is_named_once_and_its_status_is_the_jobs(ssh):
    with nothing_left() as environment:
        done = finish(
            launch(
                environment,
                ssh(),
                f"{HERE},127.0.0.2:2",
                "sh",
                "-c",
                "if [ $RANK = 2 ]; then kill -9 $$; fi; exec sleep 1",
            )
        )
    assert done.returncode == 137
    assert re.fullmatch(
        r"minidist: rank 2 \(process \d+ on \S+\) was killed by SIGKILL; the job ends\n",
        done.stderr,
    )


@pytest.mark.soak
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_told_to_stop_or_killed_it_leaves_no_rank_on_any_host(ssh, number, status):
    with nothing_left(limit=8) as environment:
        job = launch(
            environment, ssh(), f"{HERE},127.0.0.2", "sh", "-c", "echo there; exec sleep 60"
        )
        for _ in range(2):
            assert job.stdout.readline() == "there\n"
        started = time.monotonic()
        job.send_signal(number)
        done = finish(job)
        assert time.monotonic() - started < 5
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize(
    ("before", "says"),
    [
        (
            "echo no route >&2; exit 255",
            r"host 127.0.0.2: ssh ended with 255 \(no route\); try `\S+ 127.0.0.2 true`",
        ),
        (
            "exit 127",
            "host 127.0.0.2: ssh ended with 127 .it said nothing.; is minidist installed there, "
            "at ",
        ),
        (
            """echo 'minidist host: {"hello": "b", "version": "0.0.9"}'""",
            "host 127.0.0.2 has minidist 0.0.9, this host",
        ),
        ("exec sleep 60", "host 127.0.0.2 did not answer within 1 s; try"),
    ],
)
def test_a_host_that_cannot_is_named_in_one_line_and_nothing_runs(
    ssh, before, says, capfd, monkeypatch
):
    monkeypatch.setattr(hosts_module, "HELLO_LIMIT", 1)
    monkeypatch.setattr(hosts_module, "ENDING", 1)
    with nothing_left() as environment:
        monkeypatch.setattr(os, "environ", environment)
        with pytest.raises(LaunchError, match=says) as caught:
            spawn_on_hosts(["echo", "ran"], [HostRanks("127.0.0.2", 1)], ssh=ssh(before))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_folder_that_a_host_lacks_is_named(ssh, tmp_path, monkeypatch):
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.chdir(away)
    with (
        nothing_left(),
        pytest.raises(LaunchError, match=f"host 127.0.0.2: No such file or directory: {away}"),
    ):
        spawn_on_hosts(["echo", "ran"], [HostRanks("127.0.0.2", 1)], ssh=ssh(f"rmdir {away}"))


@pytest.mark.soak
def test_a_host_whose_ssh_is_lost_ends_its_ranks_and_is_named(ssh, tmp_path, monkeypatch, capfd):
    """The ssh stand-in ends by itself; the launcher behind it sees that its input ends."""
    monkeypatch.setattr(hosts_module, "ENDING", 2)
    path = tmp_path / "ssh.sh"
    path.write_text(
        f"#!/bin/sh\nshift; cd /; exec 3<&0\ncat <&3 > {tmp_path}/pipe & cat=$!\n"
        f'sh -c "$*" 3<&- < {tmp_path}/pipe &\nsleep 1; kill $cat; exit 255\n'
    )
    path.chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    with nothing_left(limit=8) as environment:
        monkeypatch.setattr(os, "environ", environment)
        status = spawn_on_hosts(["sleep", "60"], [HostRanks("127.0.0.2", 1)], ssh=str(path))
    assert status == 1
    assert "minidist: the connection to host 127.0.0.2 ended" in capfd.readouterr().err
