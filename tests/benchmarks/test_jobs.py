"""Jobs of minidist bench: failures are named, with the output of the processes."""

import sys

import pytest

from minidist.bench.jobs import Job
from minidist.errors import LaunchError, PeerLostError


def test_a_job_that_does_not_start_says_what_it_printed():
    with pytest.raises(LaunchError, match="started 0 of 1 ranks.*no such wind"):
        Job("sail", 1, [sys.executable, "-c", "raise SystemExit('no such wind')"])


def test_a_rank_that_dies_is_named(tmp_path):
    program = tmp_path / "mortal.py"
    program.write_text(
        "import sys\nfrom minidist.bench.jobs import answer\n"
        "answer(sys.argv[2], 0, lambda: sys.exit('struck by lightning'))\n"
    )
    job = Job("mortal", 1, [sys.executable, str(program)])
    try:
        with pytest.raises(PeerLostError, match="rank 0 of mortal ended.*lightning"):
            job.ask()
    finally:
        job.close()
