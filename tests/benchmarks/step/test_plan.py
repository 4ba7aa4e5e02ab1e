"""minidist bench step --plan: ours beside one rank's and beside PyTorch's, which must do the same
work."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest

from minidist.bench.step import command
from minidist.bench.step import plan as plan_bench
from minidist.bench.step.plan import Plan, PlanRow, lacks, peer_of, words
from minidist.bench.step.ranks import Answers, Model
from minidist.cli import main
from minidist.errors import LaunchError, PeerLostError

TINY = [
    "--rounds",
    "1",
    "--steps",
    "1",
    "--layers",
    "2",
    "--width",
    "8",
    "--heads",
    "2",
    "--context",
    "8",
    "--batch",
    "2",
    "--vocab",
    "16",
]


def plan(axes, **options):
    return replace(Plan.parse(axes), **options)


@pytest.mark.soak
def test_a_plan_is_measured(tmp_path, monkeypatch, capsys):
    """Ours alone, where PyTorch is not installed: tokens/s are batch × context × ranks over the
    median step."""
    monkeypatch.setattr(plan_bench.importlib.util, "find_spec", lambda name: None)
    file = tmp_path / "step.json"
    assert (
        main(["bench", "step", "--plan", "pp=2", "--microbatches", "2", *TINY, "--json", str(file)])
        == 0
    )
    rows = json.loads(file.read_text())["rows"]
    assert [(row["cut"], row["name"], row["ranks"]) for row in rows] == [
        ("pp=2, 1f1b × 2", "minidist", 2),
        (None, "minidist", 1),
        (None, "separate", 2),
    ]
    assert all(
        row["tokens_per_second"] == pytest.approx(2 * 8 * row["ranks"] / row["step_seconds"])
        for row in rows
    )
    assert "PyTorch was left out" in capsys.readouterr().out


def test_each_plan_is_shown_beside_its_own_contenders(tmp_path, monkeypatch, capsys):
    """Two plans of made-up speeds: ours twice its one rank's and half of PyTorch's, then four times
    and equal."""

    def measure(axes, plan, model, rounds, steps, transport, progress):
        speed = 200.0 * plan.size - 200
        cells = (
            ("minidist", words(plan), plan.size, speed),
            ("minidist", None, 1, 100.0),
            ("PyTorch", None, 1, 100.0),
            ("PyTorch", peer_of(plan), plan.size, {200.0: 400.0}.get(speed, speed)),
        )
        return [
            PlanRow(words(plan), name, cut, ranks, 1 / fast, fast)
            for name, cut, ranks, fast in cells
        ], ["why"]

    monkeypatch.setattr(command, "measure_plan", measure)
    picture = tmp_path / "step.png"
    assert (
        main(["bench", "step", "--plan", "pp=2", "--plan", "tp=3", "--figure", str(picture)]) == 0
    )
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
        if "minidist " in line or "PyTorch " in line
    ]
    assert [(*row[:3], *row[5:]) for row in cells if len(row) == 7] == [
        ("pp=2, 1f1b × 8", "minidist", "2", "2.00×", ""),
        ("", "minidist", "1", "", "2.00×"),
        ("", "PyTorch", "1", "", "2.00×"),
        ("", "PyTorch 1F1B", "2", "4.00×", "0.50×"),
        ("tp=3", "minidist", "3", "4.00×", ""),
        ("", "minidist", "1", "", "4.00×"),
        ("", "PyTorch", "1", "", "4.00×"),
        ("", "PyTorch DTensor", "3", "4.00×", "1.00×"),
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_was_measured_before_an_interruption_has_been_shown(monkeypatch, capsys):
    def measure(axes, plan, *rest):
        if axes == "tp=3":
            raise KeyboardInterrupt
        cells = (
            ("minidist", words(plan), 2, 0.25),
            ("minidist", None, 1, 0.5),
            ("PyTorch", peer_of(plan), 2, 0.125),
        )
        return [
            PlanRow(words(plan), name, cut, ranks, seconds, 256 / seconds)
            for name, cut, ranks, seconds in cells
        ], []

    monkeypatch.setattr(command, "measure_plan", measure)
    with suppress(KeyboardInterrupt):
        main(["bench", "step", "--plan", "pp=2", "--plan", "tp=3"])
    assert capsys.readouterr().out.splitlines() == [
        "pp=2, 1f1b × 8: minidist on 2 250.0 ms a step, 1,024 tokens/s; minidist on 1 500.0 ms "
        "a step, 512 tokens/s; PyTorch 1F1B on 2 125.0 ms a step, 2,048 tokens/s"
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--plan", "pp=2,pq=2"], "'pq=2' is not AXIS=SIZE"),
        (["--plan", "pp=1"], "one rank is what each plan stands beside"),
        (["--plan", "pp=2", "--plan", "pp=9"], "and the model 4 layers"),
        (["--plan", "tp=5"], "use dp=5, or at least 5 heads"),
        (["--plan", "pp=2", "-n", "4"], "leave -n out"),
        (["--plan", "tp=2", "--zero", "1"], "leave --zero out"),
        (["--plan", "tp=2", "--microbatches", "4"], "a pipeline's; add --plan pp=2"),
        (["--plan", "pp=2", "--schedule", "1f1"], "did you mean 1f1b?"),
    ],
)
def test_a_plan_that_cannot_be_measured_is_one_line_and_status_2(
    options, expected, capsys, monkeypatch
):
    """Before anything starts, also where it stands behind a good one."""
    monkeypatch.setattr(plan_bench, "start_job", None)
    assert main(["bench", "step", *options]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("axes", "options", "peer", "name"),
    [
        ("pp=2", {}, "1F1B", "pp=2, 1f1b × 8"),
        ("tp=4", {}, "DTensor", "tp=4"),
        ("dp=2", {}, "DDP", "dp=2"),
        ("dp=2,pp=2", {"microbatches": 3}, "DDP + 1F1B", "dp=2,pp=2, 1f1b × 3"),
        ("dp=2,pp=2", {"schedule": "gpipe"}, "FSDP2 keep + GPipe", "dp=2,pp=2, gpipe × 8"),
        ("dp=2,pp=2,tp=2", {}, "FSDP2 keep + 1F1B + DTensor", "dp=2,pp=2,tp=2, 1f1b × 8"),
    ],
)
def test_what_pytorch_has_for_a_plan(axes, options, peer, name):
    assert (peer_of(plan(axes, **options)), words(plan(axes, **options))) == (peer, name)


@pytest.mark.parametrize(
    ("axes", "options", "why"),
    [
        ("pp=2", {"microbatches": 16}, None),
        ("pp=2", {"microbatches": 5}, "16 rows are not 5 equal parts"),
        ("pp=2", {"schedule": "zb-h1"}, "under the schedules gpipe, 1f1b, interleaved"),
        ("dp=2,tp=3", {}, "4 heads are not 3 equal parts"),
        ("dp=2", {}, None),
    ],
)
def test_what_pytorch_cannot_take_is_told(axes, options, why):
    told = lacks(plan(axes, **options), Model())
    assert told == why if why is None else why in told


class Answering:
    """A job that has answered; `losses`: each rank's."""

    def __init__(self, *losses):
        self.losses = losses
        self.closed = False

    def ask(self, steps):
        if self.losses == ("died",):
            raise PeerLostError(
                "bench: rank 1 of PyTorch ended: Traceback\nRuntimeError: lightning", 1
            )
        return [{"losses": losses} for losses in self.losses]

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([[None] * 3, [4.0, 3.0, 2.0]], None),  # the last stage alone knows it
        ([[4.5, 3.5, 2.5], [3.5, 2.5, 1.5]], None),  # each replica its own rows'
        ([[4.0, 3.0, 2.0001]], "are not ours, [4.0, 3.0, 2.0]: other work"),
        ([[4.0, 3.0, float("nan")]], "other work"),
        ([[4.0, 3.0]], "other work"),
        (["died"], "RuntimeError: lightning"),
    ],
)
def test_a_peer_is_timed_only_if_its_losses_are_ours(losses, why, monkeypatch):
    theirs = Answering(*losses)
    ours = Answering([4.0, 3.0, 2.0], [4.0, 3.0, 2.0])
    monkeypatch.setattr(plan_bench, "start_job", lambda *arguments: theirs)
    job, told = plan_bench._start_peer(ours, plan("tp=2"), "tp=2", Model(), "tcp")
    assert (job, theirs.closed) == ((theirs, False) if why is None else (None, True))
    assert told is None if why is None else why in told


def test_a_peer_that_does_not_start_leaves_the_others(monkeypatch):
    def start(contender, *arguments):
        if contender == "PyTorch":
            raise LaunchError(
                "bench: PyTorch started 0 of 2 ranks: Traceback\nImportError: no pipelining"
            )
        return job

    job = Answering()
    turn = Answers([1.0], [1.0], 0)
    job.name = "minidist"
    job.size = 2
    monkeypatch.setattr(plan_bench.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(plan_bench, "start_job", start)
    monkeypatch.setattr(plan_bench, "start_ranks", lambda *arguments: job)
    monkeypatch.setattr(plan_bench, "take_turns", lambda jobs, *rest: [turn for _ in jobs])
    rows, left_out = plan_bench.measure_plan("pp=2", plan("pp=2"), Model(), 1, 1, "tcp", print)
    assert left_out == ["PyTorch 1F1B beside pp=2, 1f1b × 8: ImportError: no pipelining"]
    assert [row.cut for row in rows] == ["pp=2, 1f1b × 8", None, None, None]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("axes", "schedule"),
    [
        ("tp=2", "1f1b"),
        ("pp=2", "gpipe"),
        ("pp=2", "1f1b"),
        ("pp=2", "interleaved"),
        ("dp=2,pp=2", "gpipe"),
        ("dp=2,pp=2", "1f1b"),
        ("dp=2,pp=2", "interleaved"),
        ("dp=2,tp=2", "1f1b"),
        ("pp=2,tp=2", "1f1b"),
        ("pp=4", "1f1b"),
        ("tp=4", "1f1b"),
        ("dp=2", "1f1b"),
    ],
)
def test_pytorchs_losses_are_ours_under_every_plan(axes, schedule, tmp_path):
    """Real ranks of both: a peer with other losses would be left out."""
    pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    file = tmp_path / "step.json"
    options = ["--schedule", schedule] if "pp" in axes else []
    assert (
        main(
            [
                "bench",
                "step",
                "--plan",
                axes,
                *options,
                *TINY,
                "--heads",
                "4",
                "--batch",
                "8",
                "--json",
                str(file),
            ]
        )
        == 0
    )
    result = json.loads(file.read_text())
    assert result["left_out"] == []
    chosen = plan(axes, schedule=schedule)
    assert [row["cut"] for row in result["rows"]] == [
        words(chosen),
        None,
        None,
        None,
        peer_of(chosen),
    ]
