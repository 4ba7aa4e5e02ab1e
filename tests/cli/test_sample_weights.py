"""minidist sample --weights: a published model continues ids, and text by a tokenizer; minidist
checkpoint --names writes weights under its names."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from published import (
    VOCABULARY,
    WIDTH,
    gpt2_logits,
    gpt2_weights,
    llama_weights,
    write_gpt2,
    write_llama,
    write_shards,
)
from safetensors.numpy import load_file

from minidist.cli import main
from minidist.nn.published_weights import load_published


def likeliest(first: list[int], count: int) -> list[int]:
    """Return ids and their likeliest continuation, by GPT-2's formulas."""
    ids = list(first)
    for _ in range(count):
        ids.append(int(gpt2_logits(gpt2_weights(), np.array([ids]))[0, -1].argmax()))
    return ids


def test_ids_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gpt2(tmp_path)
    common = ["sample", "--weights", str(file), "--ids", "3,1,4", "--tokens", "6"]
    assert main([*common, "--temperature", "0", "--json", str(tmp_path / "out.json")]) == 0
    expected = likeliest([3, 1, 4], 6)
    assert len(set(expected)) > 3
    assert capsys.readouterr().out == " ".join(map(str, expected)) + "\n"
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["ids"] == expected
    assert written["text"] is None
    assert main([*common, "--seed", "1"]) == main([*common, "--seed", "1"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second


def test_a_model_in_several_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = llama_weights()
    file = write_llama(tmp_path / "one", weights)
    index = write_shards(tmp_path / "two", weights)
    for place in (file, file.parent, index, index.parent):
        options = ["--ids", "3,1,4", "--tokens", "6", "--temperature", "0"]
        assert main(["sample", "--weights", str(place), *options]) == 0
    assert len(set(capsys.readouterr().out.splitlines())) == 1
    (index.parent / "model-00002-of-00002.safetensors").unlink()
    assert main(["sample", "--weights", str(index.parent), "--ids", "3"]) == 2
    said = capsys.readouterr().err
    assert "names model-00002-of-00002.safetensors, which is not beside it; add that file" in said
    assert said.count("\n") == 1


class FakeTokenizer:
    """A `tokenizers.Tokenizer` of one id per word: "w7" is 7."""

    size = VOCABULARY

    @classmethod
    def from_str(cls, text: str) -> "FakeTokenizer":
        if text != "{}":
            raise Exception("expected value\nat line 1")  # the library's class of errors
        return cls()

    def get_vocab_size(self) -> int:
        return self.size

    def encode(self, text: str, add_special_tokens: bool) -> Any:
        assert not add_special_tokens
        found = ModuleType("encoding")
        found.ids = [int(word[1:]) for word in text.split()]  # type: ignore[attr-defined]
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return " ".join(f"w{i}" for i in ids)


@pytest.fixture
def tokenizers(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("tokenizers")
    module.Tokenizer = FakeTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", module)


@pytest.mark.usefixtures("tokenizers")
def test_text_in_and_out_by_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_gpt2(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    common = ["sample", "--weights", str(file), "--tokenizer", str(tmp_path / "tokenizer.json")]
    common += ["--tokens", "4", "--temperature", "0"]
    assert main([*common, "--prompt", "w3 w1"]) == 0
    assert main([*common, "--ids", "3,1"]) == 0
    expected = " ".join(f"w{i}" for i in likeliest([3, 1], 4))
    assert capsys.readouterr().out == f"{expected}\n{expected}\n"


def test_a_tokenizer_json_of_the_library_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = pytest.importorskip("tokenizers", reason="needs the extra `tokenizer`")
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = library.Tokenizer(library.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = library.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    common = ["sample", "--weights", str(write_gpt2(tmp_path)), "--tokens", "4"]
    common += ["--temperature", "0", "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([*common, "--prompt", "w3 w1"]) == 0
    assert capsys.readouterr().out == " ".join(f"w{i}" for i in likeliest([3, 1], 4)) + "\n"


@pytest.mark.usefixtures("tokenizers")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give the beginning, by --ids I,J,… or by --prompt TEXT with --tokenizer"),
        (["--prompt", "a"], "a model of ids needs --tokenizer tokenizer.json for text"),
        (["--ids", "1", "--prompt", "a"], "give the beginning, by --ids"),
        (["--ids", "1,50"], "--ids: needs one id or more, each below 50, the vocabulary of"),
        (["--ids", "1,-2"], "ids are whole numbers with commas: '-2'"),
        (["--ids", "1", "--heads", "2"], "config.json says n_head=4, not 2"),
        (["--ids", "1", "--tokenizer", "NONE"], "No such file"),
        (["--ids", "1", "--tokenizer", "BAD"], "BAD: is not a tokenizer.json: expected value"),
        (["--prompt", "w99", "--tokenizer", "GOOD"], "--prompt: needs one id or more, each below"),
        (["RUN", "--ids", "1"], "RUN: a run folder and --weights exclude each other"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    file = write_gpt2(tmp_path)
    (tmp_path / "BAD").write_text("not JSON")
    (tmp_path / "GOOD").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert main(["sample", "--weights", file.name, *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_options_of_weights_need_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", "RUN", "--heads", "2"]) == 2
    assert "--heads: is for --weights FILE" in capsys.readouterr().err
    assert main(["sample"]) == 2
    assert "name a run folder of minidist train, or --weights FILE" in capsys.readouterr().err


def test_a_tokenizer_of_a_larger_vocabulary_and_none_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_gpt2(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    command = ["sample", "--weights", str(file), "--ids", "1"]
    command += ["--tokenizer", str(tmp_path / "tokenizer.json")]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(command) == 2
    assert 'pip install "minidist[tokenizer]"; or give ids' in capsys.readouterr().err
    module = ModuleType("tokenizers")
    module.Tokenizer = FakeTokenizer  # type: ignore[attr-defined]
    monkeypatch.setattr(FakeTokenizer, "size", VOCABULARY + 1)
    monkeypatch.setitem(sys.modules, "tokenizers", module)
    assert main(command) == 2
    assert "has 51 ids, the model 50; name the tokenizer of this" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- checkpoint


def trained(folder: Path, *options: str) -> Path:
    """Return the folder of a run of one step with a checkpoint."""
    (folder / "book.txt").write_text("a quick brown fox jumps over the lazy dog. " * 60)
    sizes = "--layers 1 --width 24 --heads 2 --context 8 --batch 4 --steps 1 --save-every 1 --validate 8"
    command = ["train", "--quiet", "--data", str(folder / "book.txt"), *sizes.split(), *options]
    assert main([*command, "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_a_checkpoint_is_exported_under_gpt2s_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, "--positions", "learned")
    (tmp_path / "gpt2").mkdir()
    file = tmp_path / "gpt2" / "model.safetensors"
    assert main(["checkpoint", str(run), "--export", str(file), "--names", "gpt2"]) == 0
    plain = load_file(run / "model.safetensors")
    again = load_published(file).state_dict()
    assert again.keys() == plain.keys()
    assert all(np.array_equal(again[name], plain[name]) for name in plain)
    assert load_file(file)["transformer.h.0.attn.c_attn.weight"].shape == (WIDTH, 3 * WIDTH)
    (tmp_path / "config.json").write_text("{}")
    capsys.readouterr()
    beside = str(tmp_path / "model.safetensors")
    assert main(["checkpoint", str(run), "--export", beside, "--names", "gpt2"]) == 2
    assert "describes another model; write to another folder" in capsys.readouterr().err
    assert main(["checkpoint", str(run), "--names", "gpt2"]) == 2
    assert "--names: is for --export FILE" in capsys.readouterr().err


def test_another_model_is_not_exported_under_gpt2s_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path)
    capsys.readouterr()
    for options in (["--ids", "1"], ["--tokenizer", "t"]):
        assert main(["sample", str(run), *options]) == 2
        assert f"{options[0]}: this run learned symbols, not ids" in capsys.readouterr().err
    file = tmp_path / "model.safetensors"
    assert main(["checkpoint", str(run), "--export", str(file), "--names", "gpt2"]) == 2
    assert (
        "--names gpt2: this model has positions rotary, but a GPT-2 does not"
        in capsys.readouterr().err
    )
    assert not file.exists()
