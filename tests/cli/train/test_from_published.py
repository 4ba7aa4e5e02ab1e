"""minidist train --from: a run begins with a published model's weights, under every plan, and ends
as one process does; ids or a tokenizer's text are its data."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from helpers import run
from published import (
    CONTEXT,
    LLAMA3,
    VOCABULARY,
    gpt2_logits,
    gpt2_weights,
    llama_weights,
    write_gpt2,
    write_llama,
    write_shards,
)
from safetensors.numpy import load_file

from minidist.cli import main
from minidist.data import text
from minidist.data.id_text import load_tokens
from minidist.errors import CheckpointError, MismatchError
from minidist.nn.published_weights import Published, load_published
from minidist.parallel.hybrid.hybrid import Plan, Trainer


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model.safetensors, config.json and ids.npy; the current one."""
    write_gpt2(tmp_path, gpt2_weights("float64"))
    np.save(tmp_path / "ids.npy", np.random.default_rng(3).integers(0, VOCABULARY, 3000))
    monkeypatch.chdir(tmp_path)
    return tmp_path


FROM = "--from model.safetensors --data ids.npy --steps 2 --batch 4"


def train(*options: str, out: str = "run") -> Path:
    """Train two steps from the published weights, and return the run folder."""
    words = f"train --quiet {FROM} --validate 4 --optimizer sgd --lr 0.1 --out {out}"
    assert main([*words.split(), *options]) == 0
    return Path(out)


# ------------------------------------------------------------------------------------ the weights


def test_the_first_loss_is_that_of_the_published_model(here: Path) -> None:
    out = train()
    data = load_tokens("ids.npy")
    inputs, targets = text.batch(data.train, 0, batch=4, context=CONTEXT, seed=0)
    logits = gpt2_logits(gpt2_weights("float64"), inputs)
    logits -= logits.max(-1, keepdims=True)
    likely = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = -np.take_along_axis(likely, targets[..., None], -1).mean()
    metrics = json.loads((out / "metrics.json").read_text())
    assert abs(metrics["losses"][0] - expected) < 1e-12
    assert abs(expected - np.log(VOCABULARY)) > 0.3
    assert metrics["config"]["positions"] == "learned"
    assert metrics["config"]["tied"] is True
    assert metrics["options"]["layers"] == 2


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize(
    "options",
    [
        "-n 2",
        "-n 2 --zero 1",
        "-n 2 --zero 2",
        "-n 2 --zero 3",
        "-n 2 --plan tp=2",
        "-n 2 --plan pp=2",
        "-n 2 --plan cp=2",
        "-n 4 --plan dp=2,tp=2 --zero 3",
        "-n 3 --strategy parameter-server",
        "-n 2 --zero 1 --offload optimizer",
        "-n 2 --offload all",
    ],
)
def test_every_plan_begins_with_the_weights_and_ends_as_one_process(
    here: Path, options: str
) -> None:
    alone = load_file(train(out="alone") / "model.safetensors")
    several = train("--transport", "threads", *options.split(), out="several")
    found = load_file(several / "model.safetensors")
    assert found.keys() == alone.keys()
    begun = Published("model.safetensors").state_dict()
    for name, array in found.items():
        np.testing.assert_allclose(array, alone[name], rtol=0, atol=1e-12)
        assert abs(array - begun[name]).max() > 0


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("options", ["-n 2 --plan tp=2", "-n 2 --zero 3", "-n 2 --plan cp=2"])
def test_a_llama_is_trained_under_every_plan_and_written_again(here: Path, options: str) -> None:
    write_llama(here, llama_weights("float64"))
    alone = load_file(train(out="alone") / "model.safetensors")
    out = train("--transport", "threads", "--save-every", "2", *options.split())
    found = load_file(out / "model.safetensors")
    for name, array in found.items():
        np.testing.assert_allclose(array, alone[name], rtol=0, atol=1e-12)
    (here / "llama").mkdir()
    words = ["checkpoint", str(out), "--export", "llama/model.safetensors", "--names", "llama"]
    assert main(words) == 0
    again = Published("llama/model.safetensors").state_dict()
    assert all(np.array_equal(again[name], found[name]) for name in found)
    assert found["blocks.0.mlp.up.bias"].any()  # trained, so config.json says mlp_bias


def test_llama_3_1_in_two_files_is_trained_and_written_with_its_settings(here: Path) -> None:
    settings = {"rms_norm_eps": 0.01, "rope_theta": 500.0, "rope_scaling": LLAMA3}
    write_shards(here / "two", llama_weights("float64"), **settings)
    alone = load_file(train("--from", "two", out="alone") / "model.safetensors")
    out = train(
        *[
            "--from",
            "two",
            "-n",
            "4",
            "--plan",
            "tp=2,cp=2",
            "--transport",
            "threads",
            "--save-every",
            "2",
        ]
    )
    found = load_file(out / "model.safetensors")
    write_llama(here, llama_weights("float64"))
    other = load_file(train(out="other") / "model.safetensors")
    for name, array in found.items():
        np.testing.assert_allclose(array, alone[name], rtol=0, atol=1e-12)
    assert max(abs(found[name] - other[name]).max() for name in found) > 1e-4
    (here / "llama").mkdir()
    words = ["checkpoint", str(out), "--export", "llama/model.safetensors", "--names", "llama"]
    assert main(words) == 0
    about = json.loads(Path("llama/config.json").read_text())
    assert {name: about[name] for name in settings} == settings
    assert main(["train", "--quiet", "--resume", str(out), "--steps", "3", "--out", "again"]) == 0
    metrics = json.loads((here / "again" / "metrics.json").read_text())
    assert metrics["config"]["rope_scaling"]["factor"] == LLAMA3["factor"]


def test_mixed_precision_begins_with_the_weights_as_masters(here: Path) -> None:
    write_gpt2(here, gpt2_weights("float32"))
    options = ["--precision", "bf16", "--lr", "1e-30", "--transport", "threads", "-n", "2"]
    found = load_file(train(*options) / "model.safetensors")
    for name, array in Published("model.safetensors").state_dict().items():
        assert np.array_equal(found[name], array)


def test_a_rank_that_reads_other_weights_is_told(here: Path) -> None:
    published = Published("model.safetensors")

    def ranks(world: Any) -> None:
        trainer = Trainer(Plan(dp=2), published.config, world)

        def read(name: str) -> np.ndarray:
            return published.read(name) + (world.rank if name == "norm.bias" else 0)

        with pytest.raises(
            MismatchError, match=r"after set_weights, the weights of ranks \[1\] differ"
        ):
            trainer.set_weights(read)
        trainer.close()

    run(ranks, size=2)


def test_ranks_with_weights_of_their_own_take_none(here: Path) -> None:
    published = Published("model.safetensors")

    def ranks(world: Any) -> None:
        trainer = Trainer(Plan(dp=2, local_steps=2), published.config, world, clip=None)
        with pytest.raises(CheckpointError, match="local steps have weights of their own"):
            trainer.set_weights(published.read)
        trainer.close()

    run(ranks, size=2)


# ----------------------------------------------------------------------------- resume, sample, out


def test_a_run_continues_without_the_file_and_is_sampled_and_exported(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("--steps", "4", out="whole")
    out = train("--steps", "4", "--save-every", "2", "--keep", "9")
    Path("model.safetensors").unlink()
    assert main(["train", "--quiet", "--resume", str(out / "step-000002"), "--out", "again"]) == 0
    first = load_file(Path("whole") / "model.safetensors")
    second = load_file(Path("again") / "model.safetensors")
    assert all(np.array_equal(first[name], second[name]) for name in first)
    capsys.readouterr()
    for place in (out, out / "step-000002"):
        common = ["sample", str(place), "--ids", "3,1,4", "--tokens", "2", "--temperature", "0"]
        assert main(common) == 0
        assert capsys.readouterr().out.startswith("3 1 4 ")
        assert main(["sample", str(place)]) == 2
        assert "give the beginning, by --ids" in capsys.readouterr().err
    (here / "gpt2").mkdir()
    words = ["checkpoint", str(out), "--export", "gpt2/model.safetensors", "--names", "gpt2"]
    assert main(words) == 0
    exported = load_published("gpt2/model.safetensors").state_dict()
    assert all(np.array_equal(exported[name], first[name]) for name in first)


# ----------------------------------------------------------------------------------------- the data


class WordTokenizer:
    """A `tokenizers.Tokenizer`: the id of a word is its length."""

    @classmethod
    def from_str(cls, text: str) -> "WordTokenizer":
        return cls()

    def get_vocab_size(self) -> int:
        return VOCABULARY

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        found = ModuleType("encoding")
        found.ids = [len(word) for word in text.split()]  # type: ignore[attr-defined]
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return " ".join("x" * i for i in ids)


def test_a_text_is_learned_through_a_tokenizer(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("tokenizers")
    module.Tokenizer = WordTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    Path("tokenizer.json").write_text("{}")
    Path("book.txt").write_text("a quick brown fox jumps over the lazy dog " * 50)
    data = load_tokens("book.txt", "tokenizer.json")
    assert data.train[:9].tolist() == [1, 5, 5, 3, 5, 4, 3, 4, 3]
    assert len(data.train) == 405
    assert len(data.validation) == 45
    assert data.different == 4
    book = "--data book.txt --tokenizer tokenizer.json"
    assert main(f"train {FROM} {book} --validate 4 --out run".split()) == 0
    said = capsys.readouterr().out
    assert "405 tokens to learn from, 45 held out, 4 different" in said
    assert f"weights of {here / 'model.safetensors'}" in said
    assert "minidist sample run --ids 1,2,3" in said


# ----------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--layers 3", "--layers 3: MODEL has 2; leave the option out, its model is the file's"),
        ("--width 32", "--width 32: MODEL has 24"),
        ("--heads 2", "config.json says n_head=4, not 2"),
        ("--positions rotary", "--positions rotary: MODEL has learned"),
        ("--dtype float32", "--dtype float32: MODEL has float64"),
        ("--vocab 60", "--vocab 60: MODEL has 50"),
        ("--context 17", "--context 17: MODEL has positions for 16 tokens; give at most so many"),
        ("--experts 4", "--experts: a published model has no experts; leave out --from, or"),
        ("--attention-pattern local:64", "--attention-pattern: a published model's queries"),
        ("--local-steps 2", "--local-steps: each rank would need weights of its own"),
        ("--verify", "--verify: the run of one process begins with drawn weights"),
        ("--data python", "give its tokenizer with --tokenizer tokenizer.json, or a .npy file"),
        ("--from none.safetensors", "none.safetensors: No such file or directory"),
        ("--from ids.npy", "ids.npy: is not a safetensors file"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    here: Path, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    assert main(f"train {FROM} {options}".split()) == 2
    said = capsys.readouterr().err
    assert message.replace("MODEL", str(here / "model.safetensors")) in said
    assert said.count("\n") == 1
    assert not Path("runs").exists()


def test_a_tokenizer_needs_a_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--tokenizer", "tokenizer.json"]) == 2
    assert "--tokenizer: is for --from FILE; add it, or leave this out" in capsys.readouterr().err


def test_shorter_sequences_than_the_models_context(here: Path) -> None:
    out = train("--context", "8")
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["config"]["context"] == CONTEXT
    assert metrics["options"]["context"] == 8
