"""minidist bench: contenders measured in turn, figures that mean what they say, bad input refused in one line."""

import json
import sys

import pytest

from minidist.cli import bench_all_reduce, main
from minidist.cli.bench_jobs import Job
from minidist.errors import LaunchError, PeerLostError


def test_all_reduce_table_figure_and_json(tmp_path, capsys):
    """Ours over sockets and shm at two sizes: every contender has a time for every size, and a picture is drawn."""
    file, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    status = main(["bench", "all-reduce", "--only", "sockets,shm", "-n", "2", "--sizes", "1KiB,8KiB", "--rounds", "1",
                   "--json", str(file), "--figure", str(picture)])
    assert status == 0
    result = json.loads(file.read_text())
    assert set(result["seconds"]["2"]) == {"sockets", "shm"}
    assert all(set(times) == {"1024", "8192"} for times in result["seconds"]["2"].values())
    assert all(seconds > 0 for times in result["seconds"]["2"].values() for seconds in times.values())
    assert result["machine"]["command"].startswith("minidist") and result["machine"]["date"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "bus bandwidth" in capsys.readouterr().out


def test_step_measures_ours(tmp_path):
    """A tiny model: tokens/s are batch × context × ranks over the median step."""
    file = tmp_path / "step.json"
    tiny = ["--layers", "1", "--width", "8", "--heads", "2", "--context", "8", "--batch", "2", "--vocab", "16"]
    assert main(["bench", "step", "-n", "2", "--rounds", "1", "--steps", "2", *tiny, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    ours = next(row for row in rows if row["name"] == "minidist")
    assert ours["ranks"] == 2
    assert ours["tokens_per_second"] == pytest.approx(2 * 8 * 2 / ours["step_seconds"])


@pytest.mark.parametrize(("options", "expected"), [
    (["all-reduce", "--only", "glooo"], "no contender 'glooo'"),
    (["all-reduce", "--sizes", "3B"], "multiples of 4"),
    (["all-reduce", "--sizes", "many"], "is not a size"),
    (["all-reduce", "-n", "1"], "one rank sends nothing"),
    (["step", "--heads", "3"], "heads"),
    (["nonsense"], "invalid choice"),
])
def test_bad_input_is_one_line_and_status_2(options, expected, capsys):
    assert main(["bench", *options]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


def test_bus_bandwidth_is_what_a_ring_link_carries():
    """1 MiB over 4 ranks in 1 ms: each link carries 2·3/4 MiB in that time."""
    assert bench_all_reduce.bus_bandwidth(1 << 20, 1e-3, 4) == 1.5 * 2**20 / 1e-3


def test_a_job_that_does_not_start_says_what_it_printed():
    with pytest.raises(LaunchError, match="started 0 of 1 ranks.*no such wind"):
        Job("sail", 1, [sys.executable, "-c", "raise SystemExit('no such wind')"])


def test_a_rank_that_dies_is_named(tmp_path):
    program = tmp_path / "mortal.py"
    program.write_text("import sys\nfrom minidist.cli.bench_jobs import answer\n"
                       "answer(sys.argv[2], 0, lambda: sys.exit('struck by lightning'))\n")
    job = Job("mortal", 1, [sys.executable, str(program)])
    try:
        with pytest.raises(PeerLostError, match="rank 0 of mortal ended.*lightning"):
            job.ask()
    finally:
        job.close()
