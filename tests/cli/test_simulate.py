"""`minidist simulate`: its report, its files, its exit status, and one line for what cannot be."""

import json
from pathlib import Path

import pytest

from minidist.cli import main
from minidist.cli.simulate import DOES_NOT_FIT, SIZES

SMALL = (
    "--layers",
    "2",
    "--width",
    "64",
    "--heads",
    "4",
    "--sequence",
    "64",
    "--vocab",
    "256",
    "--batch",
    "8",
)
JOB = ("simulate", "--cluster", "h100:1x4", "--plan", "dp=2,pp=2", "--microbatches", "2", *SMALL)


def said(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    captured = capsys.readouterr()
    assert not captured.err
    return captured.out


def test_the_report_fits_a_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("step.json", "trace.json", "step.svg")]
    out = said(
        capsys,
        *JOB,
        "--tokens",
        "1e9",
        "--zero",
        "1",
        "--json",
        str(files[0]),
        "--trace",
        str(files[1]),
        "--figure",
        str(files[2]),
    )
    assert max(map(len, out.splitlines())) <= 80
    for words in (
        "h100:1x4, 4 ranks: dp=2,pp=2, bf16, ZeRO-1, 1f1b of 2 microbatches",
        "s a step",
        "MFU",
        "forward",
        "waits for others",
        "computes: with the time in which the device waits for its host",
        "optimizer",
        "fits",
        "kWh",
        "1e+09 tokens: 1,953,125 steps",
    ):
        assert words in out
    record = json.loads(files[0].read_text())
    axes = record["axes"]
    assert axes["control"]["seconds"] == axes["control"]["exposed"] == 0
    # the seconds of its calls are under their groups
    assert any(use["seconds"] > 0 and not use["nbytes"] for use in axes.values())
    (row,) = (line for line in out.splitlines() if "control" in line)
    assert [cell.strip() for cell in row.split("│")][-3:-1] == ["-", "-"]
    assert (
        record["plan"]["dp"] == 2
        and record["axes"]["dp"]["nbytes"] > 0
        and record["memory"]["fits"]
    )
    assert record["step_seconds"] == pytest.approx(sum(record["critical_path"].values()))
    assert json.loads(files[1].read_text())["traceEvents"]
    assert files[2].read_text().startswith("<?xml")


def test_a_plan_that_does_not_fit_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, *JOB, "--device-memory", "100KiB", status=DOES_NOT_FIT)
    assert "DOES NOT FIT" in out and "times the memory of its device" in out
    assert DOES_NOT_FIT == 3


def test_a_pattern_saves_time_and_plan_repeats_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = (
        "--cluster",
        "h100:1x1",
        "--layers",
        "2",
        "--width",
        "512",
        "--heads",
        "4",
        "--sequence",
        "16384",
        "--vocab",
        "256",
        "--batch",
        "2",
    )
    pattern = ("--attention-pattern", "local:256+global:1")
    seconds = []
    files = tmp_path / "step.json"
    for words in ((), pattern):
        said(capsys, "simulate", *model, *words, "--json", str(files))
        seconds.append(json.loads(files.read_text())["step_seconds"])
    assert seconds[1] < 0.8 * seconds[0]
    said(capsys, "plan", *model, *pattern, "--experts", "4", "--top", "1", "--json", str(files))
    assert json.loads(files.read_text())["config"]["attention_pattern"] == "local:256+global:1"
    told = " ".join(said(capsys, "plan", *model, *pattern, "--experts", "4", "--top", "1").split())
    assert "--attention-pattern local:256+global:1 --experts 4 --batch 2 --plan dp=1" in told


def test_stragglers_links_and_clocks(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(
        capsys,
        *JOB,
        "--slow-rank",
        "3:4",
        "--slow-link",
        "node0.out*:8",
        "--order",
        "pp,dp",
        "--unfolded",
        "--fail",
        "1:1e-5",
    )
    assert "4 clocks" in out and "rank 1 fails" in out


@pytest.mark.parametrize("cluster", ["tpu-v4:4", "tpu-v5p:4", "mi300x:4", "v100:4"])
def test_a_cluster_of_each_maker(capsys: pytest.CaptureFixture[str], cluster: str) -> None:
    """No source states the bandwidth of the memory of a TPU's host: only a plan that offloads needs
    it."""
    precision = ("--precision", "fp16") if cluster == "v100:4" else ()
    out = said(capsys, *JOB, "--cluster", cluster, *precision)
    assert "s a step" in out
    # a TPU runs a step as one program
    assert ("waits for its host" in out) == (not cluster.startswith("tpu"))
    if cluster == "v100:4":
        assert main([*JOB, "--cluster", cluster]) == 2
        assert "no rate for bfloat16; use --precision fp32 or fp16" in capsys.readouterr().err


def test_a_price_below_a_cent_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "kWh, $0.00\n" not in said(capsys, *JOB)


def test_it_is_told_why_bytes_gain_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    words = "fp8: training widens the bytes before each product"
    assert words in said(capsys, *JOB, "--precision", "fp8")
    assert words not in said(capsys, *JOB)


def test_what_bytes_would_gain_is_told_as_a_question(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Products of bytes are sooner there, rounding stays, and the next simulation widens again."""
    results = []
    for asked in ((), ("--multiply-bytes",), ()):
        file = tmp_path / "step.json"
        out = said(capsys, *JOB, "--precision", "fp8", "--json", str(file), *asked)
        assert ("what if: products of fp8 multiply the bytes." in out) == bool(asked)
        results.append(json.loads(file.read_text()))
    widened, multiplied, again = results
    assert multiplied.pop("multiply_bytes") is True
    assert widened == again
    assert multiplied["step_seconds"] < widened["step_seconds"]
    assert main([*JOB, "--multiply-bytes"]) == 2
    assert "--multiply-bytes asks about fp8 on a GPU" in capsys.readouterr().err


def test_a_model_without_a_name_is_gpt2(capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "simulate", "--cluster", "h100:1x1", "--batch", "1", "--layers", "1")
    assert f"{SIZES['sequence']:,}" == "1,024" and "1 rank: dp=1, bf16" in out


@pytest.mark.parametrize(
    "words, told",
    [
        (
            ("--plan", "dp=3,pp=2"),
            "dp=3 × pp=2 are 6 ranks, h100:1x4 has 4 devices; choose dp=2, or the cluster h100:6",
        ),
        (("--cluster", "h10:1x4"), "no cluster 'h10'; did you mean h100 or "),
        (("--model", "llama3-70c"), "the nearest name is llama3-70b"),
        (
            ("--slow-rank", "one:2"),
            "--slow-rank 'one:2': write the name and how many times slower it is, as 3:2.0",
        ),
        (("--fail", "1"), "--fail '1': write the name and when it fails, in seconds, as 3:2.0"),
        (("--fail", "9:2"), "no rank 9 can fail: the plan has 4 ranks; choose one below 4"),
        (("--fail", "1:2e9"), "rank 1 cannot fail after 2e+09 s: the step takes "),
        (("--slow-link", "node0"), "--slow-link 'node0': write the name"),
        (("--slow-link", "wire9:3"), "no link is called 'wire9'"),
        (("--order", "tp,xp"), "order tp,xp: name different axes of dp, pp, ep, cp, tp"),
        (("--heads", "5"), "width 64 is not divisible by 5 heads"),
        (("--precision", "bf61"), "did you mean bf16"),
        (
            ("--plan", "dp=2,pp=2", "--microbatches", "8"),
            "a batch of 8 sequences for 2 data ranks of 8 microbatches",
        ),
        (("--tokens", "many"), "is not a number above 0"),
        (("--json", "/nowhere/at/all.json"), "--json /nowhere/at/all.json: "),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main([*JOB, *words]) == 2
    captured = capsys.readouterr()
    assert told in captured.err and captured.err.count("\n") == 1 and not captured.out
