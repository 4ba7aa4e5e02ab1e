"""Weights under the published names of GPT-2 and Llama: the same logits as the formulas and PyTorch
give, out again with the same bytes, and one line for each file that is no such model."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from published import (
    CONTEXT,
    GPT2_CONFIG,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    LAYERS,
    LLAMA3,
    LLAMA_CONFIG,
    VOCABULARY,
    WIDTH,
    gpt2_logits,
    gpt2_weights,
    llama_biases,
    llama_logits,
    llama_weights,
    write_gpt2,
    write_llama,
    write_shards,
)
from safetensors.numpy import load_file, save_file

from minidist.errors import ConfigError, DataError, MinidistError
from minidist.nn import GPT, GPTConfig, MixtureConfig, RopeScaling
from minidist.nn.published_weights import (
    Published,
    load_published,
    published_weights,
    write_published,
)

IDS = np.random.default_rng(1).integers(0, VOCABULARY, (3, CONTEXT))


def logits(model: GPT) -> np.ndarray:
    with model.evaluating():
        found: np.ndarray = model(IDS).data
    return found


# ---------------------------------------------------------------------------------------- the same


def test_the_logits_are_those_of_gpt2s_formulas(tmp_path: Path) -> None:
    """In float64, so that the two agree to rounding."""
    weights = gpt2_weights("float64")
    model = load_published(write_gpt2(tmp_path, weights))
    expected = gpt2_logits(weights, IDS)
    assert expected.std() > 1
    np.testing.assert_allclose(logits(model), expected, rtol=1e-11, atol=1e-11)


def test_another_epsilon_of_gpt2_is_computed(tmp_path: Path) -> None:
    weights = gpt2_weights("float64")
    model = load_published(write_gpt2(tmp_path, weights, layer_norm_epsilon=0.25))
    expected = gpt2_logits(weights, IDS, eps=0.25)
    assert abs(expected - gpt2_logits(weights, IDS)).max() > 1e-3
    np.testing.assert_allclose(logits(model), expected, rtol=1e-11, atol=1e-11)


def test_the_logits_are_pytorchs(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    from torch.nn import functional

    weights = gpt2_weights("float64")
    w = {name: torch.from_numpy(array) for name, array in weights.items()}

    def norm(x: Any, name: str) -> Any:
        return functional.layer_norm(x, (WIDTH,), w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)

    def conv1d(x: Any, name: str) -> Any:
        return torch.addmm(w[f"{name}.bias"], x.flatten(0, 1), w[f"{name}.weight"]).unflatten(
            0, x.shape[:2]
        )

    x = functional.embedding(torch.from_numpy(IDS), w["wte.weight"]) + w["wpe.weight"]
    for layer in range(LAYERS):
        qkv = conv1d(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").split(WIDTH, dim=2)
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in qkv)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + conv1d(y.transpose(1, 2).flatten(2), f"h.{layer}.attn.c_proj")
        inner = conv1d(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        inner = functional.gelu(inner, approximate="tanh")
        x = x + conv1d(inner, f"h.{layer}.mlp.c_proj")
    expected = functional.linear(norm(x, "ln_f"), w["wte.weight"]).numpy()
    model = load_published(write_gpt2(tmp_path, weights))
    np.testing.assert_allclose(logits(model), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    "swap",
    [
        ("h.0.attn.c_attn.bias", "h.1.attn.c_attn.bias"),
        ("h.0.ln_1.weight", "h.0.ln_2.weight"),
        ("ln_f.bias", "h.1.ln_2.bias"),
        ("h.0.mlp.c_proj.bias", "h.0.attn.c_proj.bias"),
    ],
)
def test_weights_in_each_others_place_are_found(tmp_path: Path, swap: tuple[str, str]) -> None:
    weights = gpt2_weights("float64")
    first, second = swap
    other = weights | {first: weights[second], second: weights[first]}
    model = load_published(write_gpt2(tmp_path, other))
    assert abs(logits(model) - gpt2_logits(weights, IDS)).max() > 1e-3


def test_the_config_is_that_of_the_shapes(tmp_path: Path) -> None:
    assert Published(write_gpt2(tmp_path)).config == GPTConfig(
        vocabulary=VOCABULARY,
        context=CONTEXT,
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        tied=True,
    )


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_two_bytes_become_float32_exactly(tmp_path: Path, kind: str) -> None:
    rounded = {
        name: array.astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
        for name, array in gpt2_weights().items()
    }
    found = Published(write_gpt2(tmp_path, rounded))
    assert found.config.dtype == "float32"
    assert found.state_dict()["positions.weight"].dtype == np.float32
    expected = rounded["wpe.weight"].astype(np.float32)
    assert np.array_equal(found.state_dict()["positions.weight"], expected)


def test_prefix_masks_and_a_copied_output_change_nothing(tmp_path: Path) -> None:
    plain = gpt2_weights()
    longer = {f"transformer.{name}": array for name, array in plain.items()}
    longer["lm_head.weight"] = plain["wte.weight"].copy()
    longer["transformer.h.0.attn.bias"] = np.tril(np.ones((1, 1, CONTEXT, CONTEXT), np.uint8))
    longer["transformer.h.0.attn.masked_bias"] = np.array(-1e4, np.float32)
    first = Published(write_gpt2(tmp_path / "plain", plain))
    second = Published(write_gpt2(tmp_path / "longer", longer))
    assert first.config == second.config
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(
        np.array_equal(first.state_dict()[name], second.state_dict()[name])
        for name in first.state_dict()
    )


def test_an_output_of_its_own_is_loaded_transposed(tmp_path: Path) -> None:
    weights = gpt2_weights("float64")
    head = np.random.default_rng(2).normal(size=(VOCABULARY, WIDTH))
    both = weights | {"lm_head.weight": head}
    model = load_published(write_gpt2(tmp_path, both, tie_word_embeddings=False))
    assert not model.config.tied
    tied = gpt2_logits(weights, IDS)
    # the hidden state from the tied logits: the token table has full rank
    hidden = tied @ np.linalg.pinv(weights["wte.weight"].T)
    np.testing.assert_allclose(logits(model), hidden @ head.T, rtol=1e-8, atol=1e-8)


def test_without_config_json_the_caller_gives_the_heads(tmp_path: Path) -> None:
    file = write_gpt2(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        ConfigError, match="no weight gives the number of heads, and there is no config.json"
    ):
        Published(file)
    assert Published(file, heads=HEADS).config.heads == HEADS
    with pytest.raises(ConfigError, match="width 24 is not divisible by 5 heads"):
        Published(file, heads=5)


# ------------------------------------------------------------------------------------------- Llama


def test_the_logits_are_those_of_llamas_formulas(tmp_path: Path) -> None:
    weights = llama_weights("float64")
    model = load_published(write_llama(tmp_path, weights))
    expected = llama_logits(weights, IDS)
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(model), expected, rtol=1e-11, atol=1e-11)
    assert model.config == GPTConfig(
        vocabulary=VOCABULARY,
        context=CONTEXT,
        layers=LAYERS,
        width=WIDTH,
        heads=HEADS,
        kv_heads=KEY_HEADS,
        mlp_width=HIDDEN,
        positions="rotary",
        norm="rms",
        activation="silu",
        dtype="float64",
    )


LLAMA_3_1 = {name: value for name, value in LLAMA3.items() if name != "rope_type"}
SETTINGS: dict[str, dict[str, Any]] = {
    "Llama 2": {"rms_norm_eps": 1e-6},
    "Llama 3": {"rope_theta": 500000.0},
    "Llama 3.1": {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
    "all": {"rms_norm_eps": 0.25, "rope_theta": 50.0, "rope_scaling": LLAMA3},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_epsilon_and_rotary_settings_of_llama_are_computed(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    weights = llama_weights("float64")
    model = load_published(write_llama(tmp_path, weights, **settings))
    given = {
        "eps": settings.get("rms_norm_eps", 1e-5),
        "theta": settings.get("rope_theta", 10000.0),
        "scaling": settings.get("rope_scaling"),
    }
    expected = llama_logits(weights, IDS, **given)
    np.testing.assert_allclose(logits(model), expected, rtol=1e-11, atol=1e-11)
    for name, default in (("eps", 1e-5), ("theta", 10000.0), ("scaling", None)):
        if given[name] != default:
            other = llama_logits(weights, IDS, **{**given, name: default})
            assert abs(expected - other).max() > 1e-7, name


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_newer_files_have_rope_parameters(tmp_path: Path, theta: float) -> None:
    for parameters, scaling in (
        ({"rope_type": "default", "rope_theta": theta}, None),
        ({**LLAMA3, "rope_theta": theta}, RopeScaling(**LLAMA_3_1)),
    ):
        file = write_llama(tmp_path, rope_theta=None, rope_parameters=parameters)
        config = Published(file).config
        assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


def test_numbers_that_are_missing_are_those_of_the_published_program(tmp_path: Path) -> None:
    llama = Published(write_llama(tmp_path / "llama", rms_norm_eps=None, rope_theta=None)).config
    assert (llama.norm_eps, llama.rope_theta, llama.rope_scaling) == (1e-6, 10000.0, None)
    assert Published(write_gpt2(tmp_path / "gpt2", layer_norm_epsilon=None)).config.norm_eps == 1e-5


@pytest.mark.parametrize("settings", [{}, *SETTINGS.values()], ids=["Llama", *SETTINGS])
def test_llamas_logits_are_pytorchs(tmp_path: Path, settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch: the extra `bench`")
    from torch.nn import functional

    weights = llama_weights("float64")
    w = {name: torch.from_numpy(array) for name, array in weights.items()}
    each = WIDTH // HEADS
    speeds = settings.get("rope_theta", 10000.0) ** (
        -torch.arange(0, each, 2, dtype=torch.float64) / each
    )
    if "rope_scaling" in settings:
        length = 2 * torch.pi / speeds
        original = LLAMA3["original_max_position_embeddings"]
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        smooth = (original / length - low) / (high - low)
        slow = speeds / LLAMA3["factor"]
        between = torch.where(length > original / low, slow, (1 - smooth) * slow + smooth * speeds)
        speeds = torch.where(length < original / high, speeds, between)
    angles = torch.outer(torch.arange(CONTEXT, dtype=torch.float64), speeds).repeat(1, 2)

    def turned(x: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()

    def norm(x: Any, name: str) -> Any:
        return functional.rms_norm(x, (WIDTH,), w[name], settings.get("rms_norm_eps", 1e-5))

    x = functional.embedding(torch.from_numpy(IDS), w["model.embed_tokens.weight"])
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        y = norm(x, f"{at}.input_layernorm.weight")
        q, k, v = (
            functional.linear(y, w[f"{at}.self_attn.{part}_proj.weight"])
            .unflatten(2, (-1, WIDTH // HEADS))
            .transpose(1, 2)
            for part in "qkv"
        )
        y = functional.scaled_dot_product_attention(
            turned(q), turned(k), v, is_causal=True, enable_gqa=True
        )
        y = y.transpose(1, 2).flatten(2)
        x = x + functional.linear(y, w[f"{at}.self_attn.o_proj.weight"])
        y = norm(x, f"{at}.post_attention_layernorm.weight")
        gate, up = (
            functional.linear(y, w[f"{at}.mlp.{part}_proj.weight"]) for part in ("gate", "up")
        )
        y = functional.silu(gate) * up
        x = x + functional.linear(y, w[f"{at}.mlp.down_proj.weight"])
    expected = functional.linear(norm(x, "model.norm.weight"), w["lm_head.weight"]).numpy()
    model = load_published(write_llama(tmp_path, weights, **settings))
    np.testing.assert_allclose(logits(model), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("numbers", [{}, SETTINGS["all"]], ids=["plain", "all"])
def test_llama_out_again_has_the_same_bytes(
    tmp_path: Path, biased: bool, tied: bool, numbers: dict[str, Any]
) -> None:
    weights = llama_weights()
    settings: dict[str, Any] = {"tie_word_embeddings": tied, **numbers}
    if tied:
        del weights["lm_head.weight"]
    if biased:
        settings |= {"attention_bias": True, "mlp_bias": True}
        weights |= llama_biases(weights)
    first = Published(write_llama(tmp_path / "in", weights, **settings))
    assert first.config.tied is tied
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "model.safetensors"
    write_published(file, "llama", first.config, first.state_dict())
    written = load_file(file)
    assert written.keys() == weights.keys()
    assert all(np.array_equal(array, weights[name]) for name, array in written.items())
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["attention_bias"] is about["mlp_bias"] is biased
    for setting, value in (LLAMA_CONFIG | settings).items():
        assert about.get(setting) == value, setting
    again = Published(file)
    assert again.config == first.config
    for name, array in again.state_dict().items():
        assert np.array_equal(array, first.state_dict()[name])


def test_llamas_biases_are_zero_unless_config_json_says_so(tmp_path: Path) -> None:
    weights = llama_weights()
    found = Published(write_llama(tmp_path, weights)).state_dict()
    assert not found["blocks.1.attention.qkv.bias"].any()
    assert found["blocks.1.attention.qkv.bias"].shape == (WIDTH + 2 * KEY_HEADS * WIDTH // HEADS,)
    with pytest.raises(DataError, match="layers.0.self_attn.q_proj.bias is missing"):
        Published(write_llama(tmp_path, weights, attention_bias=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_theta": 0}, "rope_theta is 0; it must be a finite number above 0"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; it must be a finite number above 0"),
        ({"rms_norm_eps": float("nan")}, "norm_eps is nan; it must be a finite number above 0"),
        ({"rms_norm_eps": float("inf")}, "norm_eps is inf"),
        ({"rms_norm_eps": -1e-6}, "norm_eps is -1e-06"),
        ({"rms_norm_eps": 10**400}, "norm_eps is "),
        ({"rms_norm_eps": True}, "norm_eps is True"),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling is {.factor.: 8.0}; .* null"),
        ({"rope_scaling": [8.0]}, r"rope_scaling is \[8.0\]; .* null"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, '"linear", .* or with rope_type "ll'),
        ({"rope_scaling": {"rope_type": "yarn"}}, 'rope_scaling is {"rope_type": "yarn"}'),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            '"factor": 8.0}; .*low_freq_fac',
        ),
        ({"rope_scaling": {**LLAMA3, "mscale": 1.0}}, "rope_scaling is .*; a GPT here"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "rope_scaling: factor is 0; it must be a fin"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 0.5}}, "low_freq_factor 0.5 is not below"),
        (
            {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8.5}},
            "original_max_position_embeddings is 8.5; it must be a whole number",
        ),
        ({"rope_parameters": {"rope_theta": 5e5}}, "rope_parameters has another rope_theta"),
        (
            {"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 10000.0}},
            "rope_scaling and rope_parameters differ; keep one",
        ),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"model_type": "mistral"}, 'model_type is "mistral"'),
        ({"head_dim": 8}, "says head_dim=8, but the weights have 6"),
        (
            {"num_key_value_heads": 4},
            r"k_proj.weight has shape \(12, 24\), but a Llama of width 24",
        ),
        (
            {"num_key_value_heads": 3},
            "4 heads cannot be divided equally among 3 key and value heads",
        ),
        ({"num_hidden_layers": 3}, "says num_hidden_layers=3, but the weights have 2"),
        (
            {"max_position_embeddings": None},
            "needs config.json in the same folder, with max_position_emb",
        ),
        ({"num_attention_heads": None}, "no weight gives the number of heads"),
        ({"tie_word_embeddings": True}, "=true, but lm_head.weight differs"),
    ],
)
def test_a_llama_that_computes_otherwise_is_told(
    tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(MinidistError, match=message) as told:
        Published(write_llama(tmp_path, **settings))
    assert "\n" not in str(told.value)


def test_llamas_weights_that_are_missing_are_told(tmp_path: Path) -> None:
    for name in ("lm_head.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"):
        weights = {other: array for other, array in llama_weights().items() if other != name}
        with pytest.raises(DataError, match=rf"{name.removeprefix('model.')} is missing"):
            Published(write_llama(tmp_path, weights))


# ---------------------------------------------------------------------------------- several files


@pytest.mark.parametrize("place", ["index", "folder"])
def test_a_model_in_two_files_is_that_of_one(tmp_path: Path, place: str) -> None:
    weights = llama_weights()
    index = write_shards(tmp_path / "two", weights)
    one = Published(write_llama(tmp_path / "one", weights))
    two = Published(index if place == "index" else index.parent)
    assert two.path == index
    assert two.config == one.config
    for name, array in one.state_dict().items():
        assert np.array_equal(two.read(name), array)


def test_a_folder_with_one_file_or_none(tmp_path: Path) -> None:
    file = write_llama(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("not read")
    assert Published(tmp_path).path == file
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="none: holds neither model.safetensors nor model.safet"):
        Published(tmp_path / "none")


SECOND = "model-00002-of-00002.safetensors"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("[]", "index.json: is no index of safetensors files"),
        ("{", "index.json: is no index of safetensors files"),
        ('{"weight_map": {}}', "is no index of safetensors files"),
        ('{"weight_map": {"a": 1}}', "is no index of safetensors files"),
        ("[" * 100 + "]" * 100, "is no index of safetensors files"),
        ("../" + SECOND, "names the file '../model.*; a file lies beside the index"),
        ("/etc/" + SECOND, "names the file '/etc/model"),
        ("a\\" + SECOND, "names the file 'a"),
        ("a\x00.safetensors", "names the file 'a.x00.safetensors'"),
        ("\ud800.safetensors", "names the file '.ud800.safetensors'"),
        ("config.json", "names the file 'config.json'; .* its name ends in .safetensors"),
        ("a" * 300 + ".safetensors", "which is not beside it"),
        (
            "model-00003-of-00002.safetensors",
            "names model-00003.*, which is not beside it; add that",
        ),
        ("model-00001-of-00002.safetensors", "says that model-00001.* holds '.*'; it does not"),
    ],
)
def test_an_index_that_cannot_be_used_is_told(tmp_path: Path, change: str, message: str) -> None:
    index = write_shards(tmp_path, llama_weights())
    if change[0] in "[{":
        index.write_text(change)
    else:
        index.write_text(json.dumps(json.loads(index.read_text().replace(SECOND, "SECOND"))))
        index.write_text(index.read_text().replace('"SECOND"', json.dumps(change)))
    with pytest.raises(DataError, match=message) as told:
        Published(index)
    assert "\n" not in str(told.value)


def test_a_file_of_several_that_is_gone_or_no_file_or_has_more(tmp_path: Path) -> None:
    index = write_shards(tmp_path, llama_weights())
    second = tmp_path / SECOND
    held = load_file(second)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(DataError, match=f"{SECOND}: .* is incomplete"):
        Published(index)
    save_file({**held, "model.more": np.ones(1)}, second)
    with pytest.raises(DataError, match="holds 'model.more', and the index does not say so"):
        Published(index)
    second.unlink()
    with pytest.raises(DataError, match=f"names {SECOND}, which is not beside it; add that file"):
        Published(index)
    os.mkfifo(second)
    with pytest.raises(DataError, match=f"{SECOND}: "):
        Published(index)


# -------------------------------------------------------------------------------------- out again


@pytest.mark.parametrize("tied", [True, False])
def test_out_again_has_the_same_bytes(tmp_path: Path, tied: bool) -> None:
    weights = gpt2_weights()
    if not tied:
        weights["lm_head.weight"] = np.ones((VOCABULARY, WIDTH), np.float32)
    first = Published(write_gpt2(tmp_path / "in", weights, tie_word_embeddings=tied))
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "model.safetensors"
    write_published(file, "gpt2", first.config, first.state_dict())
    written = load_file(file)
    assert {name.removeprefix("transformer.") for name in written} == weights.keys()
    for name, array in written.items():
        assert np.array_equal(array, weights[name.removeprefix("transformer.")])
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["tie_word_embeddings"] is tied
    assert {name: about[name] for name in GPT2_CONFIG if name in about} == {
        name: value for name, value in GPT2_CONFIG.items() if name in about
    }
    again = Published(file)
    assert again.config == first.config
    write_published(file, "gpt2", again.config, again.state_dict())  # over itself


def test_another_models_config_json_is_not_overwritten(tmp_path: Path) -> None:
    file = write_gpt2(tmp_path, n_ctx=None)
    found = Published(file)
    before = file.read_bytes()
    with pytest.raises(ConfigError, match="config.json: exists and describes another model"):
        write_published(file, "gpt2", found.config, found.state_dict())
    assert file.read_bytes() == before


SMALL = GPTConfig(vocabulary=8, context=4, layers=1, width=8, heads=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "rotary"}, "has positions rotary, but a GPT-2 does not"),
        ({"norm": "rms"}, "has norm rms"),
        ({"activation": "silu"}, "has activation silu"),
        ({"kv_heads": 1}, "has 1 key heads for 2 heads"),
        ({"mixture": MixtureConfig(experts=2)}, "has experts"),
        ({"attention_pattern": "local:64", "context": 128}, "has attention pattern local:64"),
    ],
)
def test_what_gpt2_cannot_compute_has_no_such_names(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        published_weights("gpt2", replace(SMALL, **changes), {})
    with pytest.raises(ConfigError, match="choose gpt2 or llama"):
        published_weights("gpt3", SMALL, {})


# ----------------------------------------------------------------------------------------- refused


def without(*names: str) -> dict[str, np.ndarray]:
    return {name: array for name, array in gpt2_weights().items() if name not in names}


def changed(**shapes: Any) -> dict[str, np.ndarray]:
    return gpt2_weights() | {
        name.replace("__", "."): np.ones(shape, np.float32) for name, shape in shapes.items()
    }


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (None, {"activation_function": "gelu"}, 'activation_function is "gelu"; .*"gelu_new"'),
        (None, {"activation_function": "relu"}, 'activation_function is "relu"'),
        (None, {"layer_norm_epsilon": 0.0}, "norm_eps is 0.0; it must be a finite number above 0"),
        (None, {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx is true"),
        (None, {"scale_attn_weights": False}, "scale_attn_weights is false"),
        (None, {"model_type": "llama"}, 'model_type is "llama"'),
        (None, {"n_layer": 3}, "says n_layer=3, but the weights have 2"),
        (None, {"n_embd": 25}, "says n_embd=25, but the weights have 24"),
        (None, {"vocab_size": 51}, "says vocab_size=51, but the weights have 50"),
        (None, {"n_positions": 8}, "says n_positions=8, but the weights have 16"),
        (None, {"n_head": 5}, "width 24 is not divisible by 5 heads"),
        (None, {"n_head": "4"}, "heads is '4'; it must be a whole number"),
        (None, {"tie_word_embeddings": False}, "says tie_word_embeddings=false, but lm_head"),
        (changed(lm_head__weight=(VOCABULARY, WIDTH)), {}, "=true, but lm_head.weight differs"),
        (
            without("wte.weight"),
            {},
            r"has neither transformer.wte.weight \(GPT-2\) nor model.embed_tokens.weight \(Llama\)",
        ),
        (without("h.1.ln_2.bias"), {}, r"h.1.ln_2.bias is missing \(1 in all\)"),
        (changed(h__7__ln_1__bias=(WIDTH,)), {"n_layer": 8}, "weights of 3 blocks, .* is h.7"),
        (changed(h__999999__ln_1__bias=(1,)), {"n_layer": None}, "of 3 blocks"),
        (
            changed(h__0__attn__c_attn__weight=(3 * WIDTH, WIDTH)),
            {},
            r"h.0.attn.c_attn.weight has shape \(72, 24\), but a GPT-2 of width 24 needs \(24, 72\)",
        ),
        (changed(score__weight=(2, WIDTH)), {}, "'score.weight' is not a weight of a GPT-2"),
        (changed(transformer__ln_f__bias=(WIDTH,)), {}, "has one weight twice"),
        (gpt2_weights() | {"ln_f.bias": np.ones(WIDTH, np.int8)}, {}, "ln_f.bias has dtype int8"),
        ({"blocks.0.norm_mlp.bias": np.ones(3)}, {}, "so it has the weights of neither model"),
    ],
)
def test_a_file_that_is_no_such_model_is_told(
    tmp_path: Path, weights: Any, config: dict[str, Any], message: str
) -> None:
    about = {name: value for name, value in config.items() if value is not None}
    file = write_gpt2(
        tmp_path,
        weights,
        **({"n_layer": None} if "n_layer" in config else {}),
        **{name: value for name, value in about.items() if name != "n_layer"},
    )
    if "n_layer" in about:
        place = tmp_path / "config.json"
        place.write_text(json.dumps(json.loads(place.read_text()) | about))
    with pytest.raises(MinidistError, match=message) as told:
        Published(file)
    assert "\n" not in str(told.value)


def test_a_file_that_is_cut_off_or_none_is_told(tmp_path: Path) -> None:
    file = write_gpt2(tmp_path)
    content = file.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    for damaged in (
        b"",
        content[:5],
        content[: head - 3],
        content[:-1],
        b"\xff" * 64,
        content[:8] + b"[" * (head - 8) + content[head:],
        content.replace(b'"F32"', b'"F99"', 1),
        content.replace(b'"shape":[', b'"shape":[-', 1),
        content.replace(b'"shape":[16,', b'"shape":[17,', 1),
    ):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="model.safetensors: ") as told:
            Published(file)
        assert "\n" not in str(told.value)
    with pytest.raises(DataError, match="No such file"):
        Published(tmp_path / "none")
    with pytest.raises(DataError, match="config.json: "):
        save_file(gpt2_weights(), file)
        (tmp_path / "config.json").write_text("{")
        Published(file)
