"""Whatever keeps ranks waiting ends with an error that names it: on every transport, within a second."""

import re
import time

import pytest
from hanging import WAYS, hang
from helpers import THREADS, run

from minidist import errors

CI = ("group", "one rank in a message", "one rank in a message, the others in started calls", "one rank not calling",
      "a ring of receives", "a ring of sends", "a receive from oneself", "order")
"""What no message shows, and one that a message does."""


def ways():
    for transport in (*THREADS, "sockets", "shm", "mpi"):
        for way in WAYS:
            quick = transport in THREADS or (way in CI and transport != "mpi") or way in ("group", "a ring of receives")
            yield pytest.param(transport, way, marks=() if quick else pytest.mark.soak)


@pytest.mark.parametrize(("transport", "way"), list(ways()))
def test_ranks_that_wait_in_vain_learn_why(transport, way):
    if way == "a ring of sends" and transport == "threads":
        run(hang, way, size=3, transport=transport)         # its sends are buffered, and complete at once
        return
    started = time.monotonic()
    with pytest.raises(getattr(errors, WAYS[way].error)) as caught:
        run(hang, way, size=3, transport=transport)
    assert re.search(WAYS[way].says, str(caught.value)), str(caught.value)
    assert time.monotonic() - started < (10 if transport == "mpi" else 5)
