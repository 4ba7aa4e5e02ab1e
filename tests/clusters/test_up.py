"""up.sh makes hosts that see each other by name, each with its own view, and leaves nothing,
however it ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from clusters import SCRIPTS, hosts_up


def interfaces():
    return sorted(os.listdir("/sys/class/net"))


def alive(pid):
    return (
        Path(f"/proc/{pid}").is_dir()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    )


def gone(pids, limit=10):
    deadline = time.monotonic() + limit
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_hosts_have_names_addresses_and_processes_of_their_own():
    before = interfaces()
    with hosts_up("a:loopback", "b:dead", "c:mtu=1400") as cluster:
        shown = cluster.ask(
            "a", "sh", "-c", "hostname; cat /etc/hosts; ls /dev/shm; cat /proc/1/cmdline"
        )
        *lines, first = shown.splitlines()
        assert lines == ["a", "127.0.0.1 localhost", "10.214.0.2 b", "10.214.0.3 c", "127.0.1.1 a"]
        assert "host.sh" in first
        assert (
            cluster.ask("b", "grep", "-w", "[ab]$", "/etc/hosts") == "10.214.0.1 a\n10.215.0.2 b\n"
        )
        # /sys is this machine's
        assert " mtu 1400 " in cluster.ask("c", "ip", "link", "show", "eth0")
        assert " mtu 1500 " in cluster.ask("a", "ip", "link", "show", "eth0")
        assert cluster.ask("a", "pwd").strip() == os.getcwd()
        listener = subprocess.Popen(
            cluster.on(
                "b",
                "python3",
                "-c",
                (
                    "import socket; s = socket.create_server(('', 4711)); print('there', "
                    "flush=True); print(s.accept()[0].getpeername()[0])"
                ),
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert listener.stdout.readline() == "there\n"
        cluster.ask("c", "python3", "-c", "import socket; socket.create_connection(('b', 4711), 5)")
        assert listener.communicate(timeout=10)[0] == "10.214.0.3\n"
        pids = [cluster.pid(host) for host in "abc"]
        assert interfaces() == before  # nothing of it is seen outside
    assert gone(pids) and not cluster.folder.exists() and interfaces() == before


def test_a_killed_up_leaves_no_host(tmp_path):
    with hosts_up("a"):
        pass  # skips where this machine cannot
    up = subprocess.Popen(
        [str(SCRIPTS / "up.sh"), "--state", str(tmp_path / "state"), "a", "b"],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    up.stdout.readline()
    pids = [int((tmp_path / "state" / f"{name}.pid").read_text()) for name in ("a", "b", "switch")]
    inside = subprocess.Popen(
        [str(SCRIPTS / "on.sh"), "--state", str(tmp_path / "state"), "a", "sleep", "60"]
    )
    up.send_signal(signal.SIGKILL)
    up.communicate()
    assert gone(pids)
    assert inside.wait(10) != 0  # what ran on a host ended with it


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name 1 to 250 hosts"),
        (["A!"], "A! is no host"),
        (["--fast", "a"], "there is no option --fast"),
        (["a:lost"], "a:lost is no host"),
        (["--state", "/proc/x", "a"], "/proc/x is there already"),
    ],
)
def test_what_is_no_cluster_is_one_line(arguments, says):
    done = subprocess.run(
        [str(SCRIPTS / "up.sh"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    if "network namespaces are made by root" in done.stderr and "name 1" not in says:
        pytest.skip("not root")
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.count("\n") == 1
