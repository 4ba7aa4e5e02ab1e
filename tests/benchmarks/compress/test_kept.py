"""--resume: an interrupted measurement goes on where it stopped, with other options it is
refused."""

import json

import pytest
from shaped_ranks import PLAIN_STEP, SIGN_STEP, ShapedRanks

from minidist.bench.compress import check
from minidist.bench.compress.kept import KeptMeasurements
from minidist.bench.compress.links import bandwidths
from minidist.bench.compress.time_to_loss import Links, measure
from minidist.bench.compress.ways import way_of
from minidist.cli import main
from minidist.errors import ConfigError

SETTING = {"steps": 100, "lr": 0.1, "bandwidths": [1.25e7]}
LOSSES = {"none": 0.010, "sign": 0.009, "adaptive": 0.010}


class InterruptedRanks(ShapedRanks):
    """Answer so many questions, and then are interrupted."""

    def __init__(self, most: float) -> None:
        super().__init__({"none": PLAIN_STEP, "sign": SIGN_STEP, "adaptive": PLAIN_STEP}, LOSSES)
        self.most = most

    def ask(self, what: str, **question):
        self.most -= 1
        if self.most < 0:
            raise KeyboardInterrupt
        return super().ask(what, **question)


def measured(ranks, kept):
    return measure(
        ranks,
        [way_of(name, 100) for name in ("none", "sign", "adaptive")],
        Links(50e-6, bandwidths("100Mbit,1Gbit")),
        steps=100,
        every=5,
        rounds=2,
        target=None,
        through=1.25e7,
        progress=lambda line: None,
        keep=lambda line: None,
        kept=kept,
    )


def test_interrupted_again_and_again_it_ends_with_the_same(tmp_path):
    """Interrupted after each 60 questions, and what a run has kept is not asked again."""
    whole = json.loads(json.dumps(measured(InterruptedRanks(1e9), KeptMeasurements())))
    runs = 0
    path = str(tmp_path / "kept")
    while True:
        runs += 1
        try:
            result = measured(InterruptedRanks(60), KeptMeasurements(path, SETTING))
            break
        except KeyboardInterrupt:
            assert runs < 20
    assert runs > 3
    assert json.loads(json.dumps(result)) == whole
    assert (
        json.loads(json.dumps(measured(InterruptedRanks(0), KeptMeasurements(path, SETTING))))
        == whole
    )


@pytest.mark.parametrize("text", ["a text of one line", "{", '{"setting": {"steps": 7'])
def test_a_file_of_one_line_that_is_not_ours_stays_as_it_is(text, tmp_path):
    path = tmp_path / "mine"
    path.write_text(text)
    if text == "{":  # as our own first line begins
        KeptMeasurements(str(path), SETTING)
        return
    with pytest.raises(ConfigError, match="it does not begin as such a file"):
        KeptMeasurements(str(path), SETTING)
    assert path.read_text() == text


def test_a_line_cut_short_is_measured_again(tmp_path):
    path = tmp_path / "kept"
    kept = KeptMeasurements(str(path), SETTING)
    kept.once("a", lambda: 1)
    path.write_text(path.read_text() + '{"name": "b", "val')
    kept = KeptMeasurements(str(path), SETTING)
    assert [kept.once("a", lambda: 2), kept.once("b", lambda: 2)] == [1, 2]
    kept = KeptMeasurements(str(path), SETTING)
    assert [kept.once("a", lambda: 3), kept.once("b", lambda: 3)] == [1, 2]


def test_advice_too(tmp_path):
    links = Links(50e-6, bandwidths("100Mbit"))
    ways = [way_of("none", 100), way_of("sign", 100)]

    def advise(ranks):
        return check.advise(
            ranks,
            2,
            ways,
            links,
            rounds=1,
            check=True,
            progress=lambda line: None,
            kept=KeptMeasurements(str(tmp_path / "kept"), SETTING),
        )

    assert advise(InterruptedRanks(1e9)) == advise(InterruptedRanks(0))


def test_other_options_are_refused(tmp_path):
    path = str(tmp_path / "kept")
    KeptMeasurements(path, SETTING)
    with pytest.raises(
        ConfigError, match=r"with other options \(lr: 0.1, now 0.2\); give the same, or name a new"
    ):
        KeptMeasurements(path, {**SETTING, "lr": 0.2})


@pytest.mark.parametrize(
    "text",
    ["no JSON\n", "[1]\n", '{"setting": 3}\n', '{"setting": {}}\n{"name": "x"}\n', "\xff\xfe"],
)
def test_another_file_is_refused(text, tmp_path):
    (tmp_path / "kept").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match="name a new file"):
        KeptMeasurements(str(tmp_path / "kept"), SETTING)


def test_a_file_that_cannot_be_written_is_an_error_line(tmp_path, capsys):
    assert main(["bench", "compress", "--resume", str(tmp_path / "missing" / "kept")]) == 2
    assert "cannot be written" in capsys.readouterr().err
