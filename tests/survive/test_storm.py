"""Storms: the figures are those of the log, and a training survives a short one."""

import json
import random
import socket
import subprocess
import sys
import time

import pytest

from minidist.survive.storm import cut_connection, events, spans, summary


def told(*rows):
    """Events of these (seconds, generation, event, further)."""
    return [{"seconds": seconds, "time": 1000.0 + seconds, "generation": generation, "event": event, **further}
            for seconds, generation, event, further in rows]


LOG = told((1.0, 1, "forming", {"processes": [0, 1], "pids": [7, 8]}), (2.0, 1, "formed", {"step": 0}),
           (3.0, 1, "stepped", {"step": 1}), (6.0, 1, "broken", {"rank": 1}), (6.5, 1, "reached", {"step": 5}),
           (6.5, 2, "forming", {"processes": [0], "pids": [7]}), (7.0, 2, "formed", {"step": 4}),
           (7.5, 2, "stepped", {"step": 5}), (10.0, 2, "left", {"step": 8}), (10.0, 2, "reached", {"step": 8}),
           (10.0, 3, "forming", {"processes": [0, 2], "pids": [7, 9]}), (11.0, 3, "formed", {"step": 8}),
           (11.5, 3, "stepped", {"step": 9}), (12.0, 3, "done", {}))


def test_the_figures_of_a_storm():
    faults = [{"kind": "kill", "pid": 8, "time": 1005.8}, {"kind": "cut", "pid": 7, "time": 1011.9}]
    figures = summary(LOG, faults, 2)
    assert (figures["faults"], figures["recovered"]) == (2, 2)          # the cut came too late to be noticed
    assert figures["seconds"] == {"kill": [pytest.approx(1.7)]}
    assert (figures["steps_made"], figures["steps_again"], figures["kept"]) == (10, 1, 0.9)
    assert figures["participation"] == pytest.approx((4 * 2 + 3 * 1 + 1 * 2) / (10 * 2))
    assert spans(LOG) == [(2.0, 6.0, 2, 1), (7.0, 10.0, 1, 2), (11.0, 12.0, 2, 3)]


def test_a_stop_counts_from_its_detection_and_a_loss_without_a_step_is_no_recovery():
    stop = [{"kind": "stop", "pid": 8, "time": 1004.0}]
    assert summary(LOG, stop, 2)["seconds"] == {"stop": [pytest.approx(1.5)]}
    assert summary(LOG[:5], stop, 2)["recovered"] == 0
    assert summary([], [], 2)["participation"] is None


def test_a_line_that_is_being_written_is_not_yet_an_event(tmp_path):
    log = tmp_path / "log"
    assert events(log) == []
    log.write_text('{"event": "formed"}\n{"event": "st')
    assert events(log) == [{"event": "formed"}]


def test_a_connection_of_another_process_is_cut():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        child = subprocess.Popen([sys.executable, "-c", "import socket, sys; sock = socket.create_connection("
                                  f"('127.0.0.1', {port})); sys.exit(len(sock.recv(1)))"])
        connection, _ = server.accept()
        with connection:
            time.sleep(0.05)
            try:
                cut_connection(child.pid, random.Random(0))
            except PermissionError:
                child.kill()
                child.wait()
                pytest.skip("this system does not let a process take another's files")
            assert (child.wait(10), connection.recv(1)) == (0, b"")
    with pytest.raises(OSError, match="No such|no TCP"):
        cut_connection(child.pid, random.Random(0))


@pytest.mark.soak
@pytest.mark.parametrize("transport", ["tcp", "auto"])
def test_a_training_survives_a_short_storm(transport, tmp_path):
    file = tmp_path / "storm.json"
    done = subprocess.run([sys.executable, "-m", "minidist", "storm", "-n4", "--minutes=0.3", "--every=4", "--out",
                           str(tmp_path / "run"), "--json", str(file), f"--transport={transport}", "--", "--zero=1",
                           "--layers=1", "--width=16", "--context=16"], capture_output=True, text=True, timeout=600,
                          check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(file.read_text())
    assert figures["faults"] == figures["recovered"] >= 3
    assert (tmp_path / "run" / "storm.png").exists()
    assert len(json.loads((tmp_path / "run" / "metrics.json").read_text())["losses"]) == figures["steps"]
