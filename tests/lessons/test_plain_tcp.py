"""A page of the documents reads plain_tcp.py line by line: what it quotes is its code."""

import re
import socket
import textwrap
import traceback
from pathlib import Path

import numpy as np
import pytest

import minidist as md
from minidist.comm.transports import plain_tcp

PAGE = Path(__file__).parents[2] / "docs/concepts/path-of-a-message.md"


@pytest.mark.parametrize(
    ("title", "blocks"),
    [("## How ranks meet and connect", 4), ("## From a collective to the kernel", 5)],
)
def test_the_page_quotes_the_transport_as_it_is(title: str, blocks: int) -> None:
    text = PAGE.read_text(encoding="utf-8")
    section = re.split(r"^##+ ", text.split(title)[1], flags=re.MULTILINE)[0]
    quotes = [
        textwrap.dedent(block).rstrip() + "\n"
        for block in re.findall(r"(?:^    .*\n?)+", section, flags=re.MULTILINE)
    ]
    assert len(quotes) == blocks
    with open(plain_tcp.__file__, encoding="utf-8") as file:
        code = file.read()
    for quote in quotes:
        indents = [textwrap.indent(quote, " " * depth) for depth in range(0, 20, 4)]
        assert any(indented in code for indented in indents), quote


def path_of_a_message(world) -> list[list[str]]:
    """[function, file] of minidist from all_reduce to sendmsg, of this rank's first message."""
    stacks: list[traceback.StackSummary] = []
    send = socket.socket.sendmsg

    def sendmsg(sock, *arguments):
        stacks.append(traceback.extract_stack()[:-1])
        return send(sock, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "sendmsg", sendmsg)
        world.all_reduce(np.ones(100), algorithm="ring")
    inside = [[frame.name, frame.filename.partition("minidist/comm/")[2]] for frame in stacks[0]]
    return [frame for frame in inside if frame[1]]


def test_the_page_names_every_function_on_the_path_of_a_message() -> None:
    text = PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", text, re.MULTILINE)
    assert md.run(path_of_a_message, size=2, transport="tcp")[0] == [list(row) for row in rows]
