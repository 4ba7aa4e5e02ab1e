"""Test how far it is from a verb to the system call: the functions and files of minidist on the
stack at sendmsg, and the functions that a rank enters before its first one."""

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from linked import KINDS, linked

import minidist
from minidist.comm.group import Group
from minidist.comm.ledger import Ledger

FUNCTIONS = 8
FILES = 6
ENTERED = 30
PACKAGE = str(Path(minidist.__file__).parent)


def stack_of(frame):
    """(file, function) of minidist's frames, the verb first."""
    found = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(
                (
                    Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix(),
                    frame.f_code.co_name,
                )
            )
        frame = frame.f_back
    return found[::-1]


@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree"])
def test_a_reader_walks_few_functions_to_the_wire(algorithm, monkeypatch):
    stacks = []
    send = socket.socket.sendmsg

    def sendmsg(sock, *arguments):
        stacks.append(stack_of(sys._getframe(1)))
        return send(sock, *arguments)

    with linked(KINDS[0]) as transports:
        groups = [
            Group(transport, Ledger(rank), range(2)) for rank, transport in enumerate(transports)
        ]
        monkeypatch.setattr(socket.socket, "sendmsg", sendmsg)
        with ThreadPoolExecutor(2) as pool:
            totals = list(
                pool.map(
                    lambda group: group.all_reduce(np.arange(64.0), algorithm=algorithm), groups
                )
            )
        monkeypatch.undo()
        for group in groups:
            group.close()
    assert all((total == 2 * np.arange(64.0)).all() for total in totals)
    assert len(stacks) >= 2, "the patch sees what is sent"
    for stack in stacks:
        assert stack[0] == ("comm/group.py", "all_reduce"), stack
        assert len(stack) <= FUNCTIONS, stack
        assert len({file for file, _ in stack}) <= FILES, stack


def entered_before_sendmsg(call):
    """Return the code objects of minidist that this thread enters in `call`, up to its first
    sendmsg, in their order."""
    entered = {}
    reached = False

    def profile(frame, event, function):
        nonlocal reached
        reached = reached or (event == "c_call" and function.__name__ == "sendmsg")
        if not reached and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            entered.setdefault(frame.f_code)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    assert reached, "the profiler sees what is sent"
    return list(entered)


def functions_of_a_call(world):
    """Return the functions that this rank enters before the first message of an all_reduce, by
    name; of the third call on the fewest. To wake the helper thread is left out: whether it sleeps
    depends on the machine's load."""
    calls = []
    for _ in range(30):  # the first two fill what is remembered of a call
        calls.append(
            entered_before_sendmsg(lambda: world.all_reduce(np.arange(64.0), algorithm="ring"))
        )
    return [
        f"{Path(code.co_filename).relative_to(PACKAGE).as_posix()}:{code.co_firstlineno} "
        f"{code.co_name}"
        for code in min(calls[2:], key=len)
        if code.co_name != "_call_helper"
    ]


def test_few_functions_run_before_the_first_message():
    for rank, names in enumerate(minidist.run(functions_of_a_call, size=2, transport="tcp")):
        print(f"\nrank {rank}: {len(names)} functions before the first sendmsg", *names, sep="\n")
        assert len(names) <= ENTERED, names
