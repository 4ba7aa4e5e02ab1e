"""benchmarks/gpu.sh without a GPU: what it lists, how it goes on where it stopped, its table, its
rehearsal."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from imports import ROOT

from minidist.cli import main

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
_spec = importlib.util.spec_from_file_location("gpu_table", ROOT / "benchmarks" / "gpu_table.py")
gpu_table = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(gpu_table)
GPU = {
    "date": "2026-01-02T03:04:05+00:00",
    "device": "some GPU",
    "driver": "1.2",
    "cuda": 13000,
    "nccl": 22707,
    "cupy": "14.2.0",
    "torch": "2.11.0",
    "python": "3.12.3",
    "why": "",
}

# In place of python3: it answers for `minidist bench`, with the status in the file `status`, and
# passes on the rest.
ANSWERS = """#!/bin/bash
case "$1 $2 $3" in
"-m minidist bench")
    while [ "$1" != --json ]; do shift; done
    echo '{"what": "step", "rows": [], "left_out": ["nothing"]}' >"$2"
    echo "the bench's last words"
    exit "$(cat "$(dirname "$0")/status")" ;;
*) exec %s "$@" ;;
esac
"""


def gpu_sh(*words, path="", **options):
    """The script's run; `path`: a folder of programs that come first."""
    environ = {name: value for name, value in os.environ.items() if name != "OUT"}
    folders = [path, Path(sys.executable).parent, os.environ["PATH"]]
    environ["PATH"] = os.pathsep.join(str(folder) for folder in folders if folder)
    return subprocess.run(
        [str(SCRIPT), *map(str, words)], capture_output=True, text=True, env=environ, **options
    )


def listed(*words):
    """Sections by name: their limit, expected time and commands."""
    text = gpu_sh("--list", *words, check=True).stdout
    heads = re.findall(
        r"^(\S+): .*\n  at most (\d+) s, about (\d+) s .*\n((?:    .*\n)+)", text, re.MULTILINE
    )
    return {
        name: SimpleNamespace(
            limit=int(limit), about=int(about), commands=lines.strip().splitlines()
        )
        for name, limit, about, lines in heads
    }


@pytest.fixture(scope="module")
def sections():
    return listed()


def test_every_section_fits_nine_minutes_and_all_fit_half_an_hour(sections):
    assert {
        "machine",
        "conformance",
        "step",
        "step-graph",
        "nccl",
        "memcheck",
        "kernels-rows",
    } <= sections.keys()
    assert all(0 < each.about < each.limit <= 540 for each in sections.values())
    assert sum(each.about for each in sections.values()) <= 1860


def test_what_commands_name_is_there(sections):
    lines = [line.replace(";", " ;") for each in sections.values() for line in each.commands]
    words = [word for line in lines for word in shlex.split(line)]
    named = [word for word in words if word.startswith(str(ROOT))]
    assert len(named) >= 20 and all(Path(word).exists() for word in named)


def test_every_test_for_a_gpu_is_in_a_section(sections):
    named = [
        Path(word)
        for each in sections.values()
        for line in each.commands
        if "-m pytest" in line
        for word in shlex.split(line.replace(";", " ;"))
        if word.startswith(str(ROOT / "tests"))
    ]
    marked = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
        and re.search(r"mark\.gpu|@on_each_device", path.read_text(encoding="utf-8"))
    ]
    assert len(marked) > 20
    assert [
        path for path in marked if not any(path == one or one in path.parents for one in named)
    ] == []


def test_every_kernel_is_measured_by_one_section(sections):
    from minidist.bench.kernels.timing import CASES, chosen

    names = [
        word
        for each in sections.values()
        for line in each.commands
        if " bench kernels " in line
        for word in line.split(" bench kernels ")[1].split(" --")[0].split()
    ]
    assert sorted(case.name for name in names for case in chosen([name])) == sorted(
        case.name for case in CASES
    )


@pytest.mark.parametrize("rehearsed", [(), ("--rehearse",)], ids=["", "rehearsed"])
def test_minidist_takes_the_options(rehearsed, monkeypatch, tmp_path, sections):
    """Each `minidist …` is parsed by the command itself, and ends at the device that is not
    here."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.chdir(tmp_path)
    lines = [
        line.replace("$OUT", str(tmp_path))
        for each in (listed(*rehearsed) if rehearsed else sections).values()
        for line in each.commands
        if "-m minidist bench" in line or "-m minidist train" in line
    ]
    assert len(lines) == 10
    for line in lines:
        words = shlex.split(line.split("-m minidist ")[1])
        assert main(words) == 2, words


@pytest.mark.soak
def test_it_goes_on_where_it_stopped(tmp_path):
    """A failed section is told, gives status 1 and runs again; a done one does not."""
    out = tmp_path / "a folder"
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text(ANSWERS % sys.executable)
    (programs / "python3").chmod(0o755)
    (programs / "status").write_text("3")
    words = ("--rehearse", "--out", out, "--only", "machine", "step")
    first = gpu_sh(*words, path=programs)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "step: failed (exit 3)" in first.stdout and "the bench's last words" in first.stdout
    assert (out / "machine" / "done").exists() and not (out / "step" / "done").exists()
    (programs / "status").write_text("0")
    second = gpu_sh(*words, path=programs)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "machine: done before" in second.stdout and "step: done, " in second.stdout
    result, held = (
        json.loads((out / "step" / name).read_text()) for name in ("result.json", "step.json")
    )
    assert (
        result["state"] == "done"
        and result["rehearsal"]
        and result["figures"] == ["left out: nothing"]
    )
    assert held["run"]["device"] == result["device"] == "a stand-in, no GPU"
    assert held["run"]["commands"][0].endswith("--vocab 64 --rounds 1 --steps 1")
    assert str(tmp_path) not in (out / "step" / "result.json").read_text()
    assert (out / "table.md").read_text().startswith("A rehearsal") and (
        out / "results.tar.gz"
    ).exists()


def test_what_cannot_run_says_why(tmp_path):
    done = gpu_sh("--out", tmp_path, "--only", "step")
    assert done.returncode == 0
    assert "step: cannot run: missing: a GPU with CuPy (" in done.stdout and "--site" in done.stdout
    assert not (tmp_path / "step" / "done").exists()
    assert "| step | cannot run: " in (tmp_path / "table.md").read_text()


def test_no_section_begins_that_would_not_end(tmp_path):
    assert (
        "step: no time left for it; run again"
        in gpu_sh("--out", tmp_path, "--within", 5, "--only", "step").stdout
    )


def test_an_unknown_word_is_told():
    done = gpu_sh("--only", "stepp")
    assert (
        done.returncode == 2 and "no section stepp; choose from machine conformance" in done.stderr
    )
    assert gpu_sh("--fast").returncode == 2


# -------------------------------------------------------------------------------------------- table


def test_missing_packages_and_tools_are_named():
    assert gpu_table.missing(["cupy", "numpy", "cupy.cuda.nccl"], GPU) == []
    none = {**GPU, "device": None, "why": "no driver"}
    lacking = gpu_table.missing(["cupy", "no_such_module", "tool:no-such-tool"], none)
    assert lacking == ["a GPU with CuPy (no driver)", "no_such_module", "no-such-tool"]
    assert "device  some GPU" in gpu_table.shown(GPU)


def test_a_result_names_no_path_of_this_machine(tmp_path):
    (tmp_path / "step").mkdir()
    path = tmp_path / "step" / "step.json"
    path.write_text(json.dumps({"command": f"minidist bench step --json {path}"}))
    args = {
        "out": str(tmp_path),
        "section": "step",
        "rehearsal": False,
        "commands": "",
        "state": "done",
        "seconds": 1,
    }
    gpu_table.record(SimpleNamespace(**args), GPU)
    assert (
        json.loads(path.read_text())["command"] == "minidist bench step --json $OUT/step/step.json"
    )


def test_figures_of_each_kind(tmp_path):
    row = {
        "name": "minidist",
        "step_seconds": 0.025,
        "tokens_per_second": 327680.0,
        "utilisation": 0.4,
        "of_floor": 0.5,
    }
    rung = {"kernel": "softmax", "contender": "v3", "verdict": "met", "seconds": 1e-5}
    kernels = [
        {**rung, "contender": "v1", "verdict": ""},
        rung,
        {**rung, "kernel": "matmul", "verdict": "40%", "seconds": None},
    ]
    for name, held in {
        "step": {"what": "step", "rows": [row], "left_out": ["torch.compile"]},
        "kernels": {"what": "kernels", "rows": kernels, "left_out": []},
        "shm": {"losses": [4.5, 4.25]},
        "result": {"what": "step"},
    }.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(held))
    (tmp_path / "core.xml").write_text(
        '<all><testsuite tests="9" failures="1" errors="1" skipped="2"/></all>'
    )
    (tmp_path / "log").write_text(
        "$ a command\n========= ERROR SUMMARY: 0 errors\ntcp, 2 ranks: mixed right, 1.0 s\n"
    )
    assert gpu_table.figures(tmp_path) == [
        "core: 5 passed, 2 failed, 2 skipped",
        "1 of 2 kernels meet their aim; no time: matmul v3",
        "shm: loss 4.5000 to 4.2500",
        "minidist: 25.00 ms, 327,680 tokens/s, 40% of the products' rate, 50% of the floor",
        "left out: torch.compile",
        "ERROR SUMMARY: 0 errors",
        "tcp, 2 ranks: mixed right, 1.0 s",
    ]


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["done", "cannot run: missing: NCCL"], 0),
        (["done", "out of time"], 1),
        (["failed (exit 1)"], 1),
    ],
)
def test_the_table_holds_every_section(states, status, tmp_path, capsys):
    for number, state in enumerate(states):
        folder = tmp_path / f"section-{number}"
        folder.mkdir()
        result = {
            **GPU,
            "section": folder.name,
            "state": state,
            "seconds": 12,
            "figures": ["5 passed"],
        }
        (folder / "result.json").write_text(json.dumps(result))
    assert gpu_table.table(tmp_path, rehearsal=False) == status
    text = (tmp_path / "table.md").read_text()
    assert text.startswith(
        "some GPU, driver 1.2, CUDA 13000, NCCL 22707, CuPy 14.2.0, PyTorch 2.11.0, Python 3.12.3, "
        "2026-01-02\n"
    )
    assert all(
        f"| section-{number} | {state} | 12 | 5 passed |" in text
        for number, state in enumerate(states)
    )
    assert [row["state"] for row in json.loads((tmp_path / "table.json").read_text())] == states
    assert "section-0    12 s  " in capsys.readouterr().out


# ---------------------------------------------------------------------------------------- rehearsal


@pytest.mark.soak
def test_the_whole_rehearsal(tmp_path):
    """Every section over the stand-ins, from an environment in which minidist need not be
    installed."""
    done = gpu_sh("--rehearse", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    states = {
        path.parent.name: json.loads(path.read_text())["state"]
        for path in tmp_path.glob("*/result.json")
    }
    assert states == dict.fromkeys(listed(), "done"), done.stdout
