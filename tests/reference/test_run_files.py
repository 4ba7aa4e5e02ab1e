"""The page of a run's files has each file and each key of a run."""

import json
import subprocess
import sys

import msgspec

from minidist.observe.step_log import STEP_LOG, StepState, _LogLine
from minidist.reference.run_files import FILES, KEYS, STEP_KEYS, file_of

ALWAYS = {each.path for each in FILES if not each.when}


def test_a_run_has_the_files_and_keys_of_the_page(tmp_path) -> None:
    run = tmp_path / "run"
    options = "-n 2 --steps 3 --batch 4 --context 16 --width 32 --layers 1 --validate 4 --quiet"
    options += " --why --verify --save-every 2 --experts 2"
    command = [sys.executable, "-m", "minidist"]
    for words in (["train", *options.split(), "--out", str(run)], ["report", str(run)]):
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    there = [str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()]
    assert [path for path in there if file_of(path) is None] == []
    found = {each.path for each in map(file_of, there) if each}
    assert found >= ALWAYS
    assert {"why.png", "report.html", "step-N/manifest.json"} <= found
    metrics = json.loads((run / "metrics.json").read_text(encoding="utf-8"))
    assert set(metrics) - set(KEYS) == set()
    only = {"activation_choice", "adapt", "elastic", "generation", "generations"}
    assert set(KEYS) - set(metrics) == only
    line = json.loads((run / STEP_LOG).read_text(encoding="utf-8").splitlines()[0])
    assert list(line) == list(STEP_KEYS)


def test_the_keys_of_a_line_are_those_of_the_code() -> None:
    fields = {field.name for field in msgspec.structs.fields(_LogLine)}
    assert fields == set(STEP_KEYS)
    state = StepState(1, 2, 0.5, 0.1, 10.0, {}, {}, 1.0, "estimate")
    assert set(json.loads(state.line(0.0))) == set(STEP_KEYS)


def test_an_unknown_file_is_found() -> None:
    assert file_of("steps/00012.jsonl") is not None
    assert file_of("steps/one.jsonl") is None
    assert file_of("core.123") is None
