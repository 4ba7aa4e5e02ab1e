"""Processes that a template forks: they are the launcher's children, and end as any other."""

import signal
import subprocess
import sys
import threading

import pytest
from leftovers import nothing_left

from minidist.launch.limits import Limits
from minidist.launch.starter import Starter
from minidist.launch.template import Orphan, fork_template, start_template

PROGRAM = """
import os, signal, sys
from minidist.launch.template import fork_on_demand

fork_on_demand()
number = int(os.environ["MINIDIST_PROCESS"])
print("here is", number, sys.stdin.fileno() == 0 and sys.stdin.read(), file=sys.stderr, flush=True)
if number == 2:
    signal.pause()
if number == 3:
    raise ArithmeticError("on purpose")
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
sys.exit(number)
"""


@pytest.fixture
def template():
    with nothing_left() as environment:
        made = start_template(
            [sys.executable, "-c", PROGRAM], {**environment, "MINIDIST_PROCESS": "0"}
        )
        while not made.wait(0.05):
            pass
        assert made.ready
        yield made
        made.close()


def test_each_process_has_its_number_its_stderr_and_its_exit_code(template):
    five = template.fork(5)
    stopped = template.fork(2)
    failed = template.fork(3)
    assert (five.wait(20), five.poll(), five.stderr.read()) == (5, 5, b"here is 5 \n")
    assert (failed.wait(20), b"ArithmeticError: on purpose" in failed.stderr.read()) == (1, True)
    with pytest.raises(subprocess.TimeoutExpired):
        stopped.wait(0.05)
    stopped.send_signal(signal.SIGKILL)
    assert (stopped.wait(20), stopped.stderr.read()) == (-signal.SIGKILL, b"here is 2 \n")
    stopped.send_signal(signal.SIGKILL)  # it has ended: nothing
    for process in (five, stopped, failed):
        process.stderr.close()


def test_a_template_that_is_lost_forks_nothing(template):
    template._process.kill()
    template._process.wait()
    assert (template.fork(7), template.ready) == (None, False)
    assert template.fork(8) is None
    assert template.wait(0.0)


def test_a_signal_to_a_process_that_another_thread_has_just_reaped_does_nothing(monkeypatch):
    sent = []

    def kill(pid, number):
        sent.append((pid, number))
        raise ProcessLookupError

    monkeypatch.setattr("minidist.launch.template.os.kill", kill)
    process = Orphan(12345, None)
    monkeypatch.setattr(process, "poll", lambda: None)
    process.send_signal(signal.SIGKILL)
    assert sent == [(12345, signal.SIGKILL)]


FORKED = """
import atexit, os, signal, sys
from minidist.launch.template import fork_on_demand, fork_template
print("loaded", flush=True)
os.environ["RANK"] = "9"
template = fork_template()
if template is None:
    fork_on_demand()
    number = int(os.environ["MINIDIST_PROCESS"])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    atexit.register(print, number, "ends", os.environ["COLOUR"], os.environ.get("RANK"), flush=True)
    sys.exit(number)
while not template.wait(0.05): pass
os.kill(template.pid, signal.SIGINT)
print([template.fork(number, {"COLOUR": colour}).wait(20) for number, colour in ((3, "red"), (4, "blue"))], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_forks_its_template_which_ends_with_it():
    """What it has loaded is loaded once; each copy ends as a program does, without the launcher's
    own variables."""
    with nothing_left() as environment:
        done = subprocess.run(
            [sys.executable, "-c", FORKED],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (-signal.SIGKILL, "")
    assert done.stdout == "loaded\n3 ends red None\n4 ends blue None\n[3, 4]\n"


def test_a_process_with_threads_is_not_copied():
    """The copy would lack them, and wait for what they hold."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    with nothing_left(), pytest.raises(OSError, match="another thread of this process runs"):
        fork_template()
    end.set()
    thread.join()


@pytest.mark.parametrize("way", ["SIGSTOP", "SIGKILL"])
def test_a_template_that_is_stopped_or_killed_at_its_start_is_done_without(way, capfd, monkeypatch):
    monkeypatch.setattr("minidist.launch.starter.PATIENCE", 0.3)
    program = f"""import os, signal, sys
if "MINIDIST_TEMPLATE" in os.environ: os.kill(os.getpid(), signal.{way})
sys.exit(7)"""
    with nothing_left():
        starter = Starter(
            [sys.executable, "-c", program], b"token", Limits(), ("127.0.0.1", 1), str
        )
        starter.start_template(lambda: False)
        assert starter.start(0).wait(20) == 7
        starter.close()
    assert "minidist: the job's template" in capfd.readouterr().err
