"""minidist calibrate: a file of runs in, a profile and how well it fits out."""

import json

from minidist.cli import main
from minidist.simulate.rates import CostProfile

HEAD = "layers,width,heads,sequence,vocab,devices,batch,plan,seconds\n"


def test_runs_in_profile_out(tmp_path, capsys):
    runs = tmp_path / "runs.csv"
    out = tmp_path / "profile.json"
    told = tmp_path / "fit.json"
    runs.write_text(
        HEAD + "2,256,4,128,512,1,8,dp=1,0.0006\n2,1024,4,128,512,1,8,dp=1,0.0011\n"
        "2,1024,4,128,512,2,16,dp=2,0.0013\n"
    )
    assert (
        main(
            [
                "calibrate",
                "--from",
                str(runs),
                "--cluster",
                "h100",
                "--fit",
                "matmul_share,host",
                "--out",
                str(out),
                "--json",
                str(told),
            ]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "2 x 1024 dp=2" in printed
    assert "of a run left out" in printed
    assert "known to by this profile: seconds within a factor of" in printed
    profile = CostProfile.load(out)
    assert profile.fit["runs"] == 3
    assert profile.fit["fitted_mean"] < profile.fit["default_mean"]
    assert json.loads(told.read_text())["runs"][2]["seconds"] == 0.0013


def test_mistakes_are_one_line_and_status_2(tmp_path, capsys):
    runs = tmp_path / "runs.csv"
    runs.write_text(HEAD + "2,256,4,128,512,1,8,dp=1,0.0006\n")
    for words, message in (
        (["--cluster", "h10"], "did you mean h100"),
        (["--cluster", "h100"], "give two or more"),
    ):
        assert main(["calibrate", "--from", str(runs), *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
