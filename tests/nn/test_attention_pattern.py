"""Attention patterns: what each spelling shows, by its definition; a GPT under one; what is
refused, and how."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import tiny

from minidist.autograd import ops
from minidist.autograd.ops.block_sparse import SIDE
from minidist.errors import ConfigError, ShapeError
from minidist.nn import GPT, GPTConfig
from minidist.nn.attention_pattern import (
    check_pattern,
    pattern_blocks,
    read_pattern,
    scores_computed,
    shown_pattern,
)


def pictures(pattern: str, tokens: int) -> list[str]:
    return [
        "".join("#" if shown else "." for shown in row) for row in pattern_blocks(pattern, tokens)
    ]


@pytest.mark.parametrize(
    ("pattern", "rows"),
    [
        ("local:64", ["#....", ".#...", "..#..", "...#.", "....#"]),
        ("local:128", ["#....", "##...", ".##..", "..##.", "...##"]),
        ("global:2", ["#....", "##...", "##...", "##...", "##..."]),
        ("strided:128", ["#....", ".#...", "#.#..", ".#.#.", "#.#.#"]),
        ("local:64+global:1", ["#....", "##...", "#.#..", "#..#.", "#...#"]),
        ("local:128+strided:192", ["#....", "##...", ".##..", "#.##.", ".#.##"]),
        ("rows:1/2/5/8/13", ["#....", ".#...", "#.#..", "...#.", "##..#"]),
        ("rows:1/2/5/8/10+global:1", ["#....", "##...", "#.#..", "#..#.", "#...#"]),
    ],
)
def test_what_a_spelling_shows(pattern: str, rows: list[str]) -> None:
    """Each picture is drawn by hand from the definition; a shorter sequence sees its top left
    part."""
    check_pattern(pattern, 300)
    assert pictures(pattern, 300) == rows
    assert pictures(pattern, 129) == [row[:3] for row in rows[:3]]
    side = np.array([SIDE, SIDE, SIDE, SIDE, 300 - 4 * SIDE])
    assert scores_computed(pattern, 300) == sum(
        side[i] * side[j]
        for i, row in enumerate(rows)
        for j, shown in enumerate(row)
        if shown == "#"
    )


@given(window=st.integers(1, 6), first=st.integers(1, 4), count=st.integers(1, 12))
def test_any_local_and_global(window: int, first: int, count: int) -> None:
    """By the sentence of the docstring, block by block."""
    blocks = pattern_blocks(f"local:{64 * window}+global:{first}", 64 * count)
    for i in range(count):
        for j in range(count):
            assert blocks[i, j] == (j <= i and (j > i - window or j < first))


@given(st.integers(1, 20), st.integers(0, 99))
def test_a_file_is_its_rows(count: int, seed: int) -> None:
    """Through a file and back: any causal mask, with or without what is above the diagonal."""
    mask = np.tri(count, dtype=bool) & (np.random.default_rng(seed).random((count, count)) < 0.5)
    np.fill_diagonal(mask, True)
    with pytest.MonkeyPatch.context() as patch:
        text = "\n".join(
            " ".join(str(int(shown)) for shown in row[: len(row) if seed % 2 else number + 1])
            for number, row in enumerate(mask)
        )
        patch.setattr(
            "minidist.nn.attention_pattern.read_regular",
            lambda file, *, most: f"{text}\n\n".encode(),
        )
        pattern = read_pattern("block:mask.txt")
    check_pattern(pattern, 64 * count)
    np.testing.assert_array_equal(pattern_blocks(pattern, 64 * count), mask)
    assert read_pattern(pattern) == pattern


@pytest.mark.parametrize(
    ("pattern", "says"),
    [
        ("dense", "'dense' is not a pattern; write local:N, strided:N, global:G, rows"),
        ("", "'' is not a pattern"),
        ("local:128+", "'' is not a pattern"),
        ("block:f", "'block:f' is not a pattern"),
        ("local:100", "multiple of 64; write local:128"),
        ("local:0", "write local:64"),
        ("local:x", "write local:64"),
        ("strided:-64", "write strided:64"),
        ("global:0", "a number of blocks, at least 1, for example global:2"),
        ("global:", "at least 1"),
        ("rows:1/2", "2 rows, but the context has 5 blocks of 64 tokens"),
        ("rows:1/8/4/8/8", "row 1 shows a block after block 1"),
        ("rows:1/2//8/8", "row 2 is ''"),
        ("rows:1/2/G/8/8", "row 2 is 'G'; expected a hexadecimal number"),
        ("rows:1/0/4/8/8", "block 1 of the queries attends to no block of keys"),
    ],
)
def test_what_is_refused(pattern: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        GPTConfig(vocabulary=9, context=300, layers=1, width=8, heads=2, attention_pattern=pattern)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"1\n12\n", "line 2 is '12'; use only the digits 0 and 1"),
        (b"\n \n", "the file is empty"),
        (b"\xff\n", "no text"),
        (None, "No such file or directory"),
    ],
)
def test_files_that_are_refused(content: bytes | None, says: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "mask").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        read_pattern(f"block:{tmp_path / 'mask'}")


def test_a_sequence_longer_than_the_rows() -> None:
    with pytest.raises(
        ShapeError, match="a sequence of 3 blocks of 64 tokens is longer than the 2 rows"
    ):
        pattern_blocks("rows:1/3", 130)


@pytest.mark.parametrize(
    "changes", [{}, {"positions": "rotary", "heads": 4, "kv_heads": 2}], ids=str
)
def test_a_model_is_dense_under_the_mask(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients of a GPT under a pattern are those of its twin with dense attention under
    the same mask."""
    config = tiny(
        **{"heads": 2, "width": 16, "context": 200, "layers": 2, **changes},
        attention_pattern="local:64+global:1",
    )
    ids = np.random.default_rng(0).integers(0, config.vocabulary, (2, 201))

    def gradients(of: GPTConfig) -> list[np.ndarray]:
        model = GPT(of)
        model.initialize(3)
        loss = model.loss(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return [loss.data, *(p.grad for p in model.parameters())]

    ours = gradients(config)
    whole = gradients(replace(config, attention_pattern=None))
    assert abs(ours[0] - whole[0]) > 1e-6  # the pattern changes what the model computes

    def masked(q: object, k: object, v: object, *, blocks: np.ndarray) -> object:
        heads = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        t = q.shape[2]
        k = ops.take(k, heads, dim=1)
        v = ops.take(v, heads, dim=1)
        shown = np.kron(blocks, np.ones((SIDE, SIDE)))[:t, :t] * np.tri(t) > 0
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * q.shape[-1] ** -0.5
        return ops.matmul(ops.softmax(ops.where(~shown, -np.inf, scores)), v)

    monkeypatch.setattr(ops, "sparse_attention", masked)
    for a, b in zip(ours, gradients(config), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_text_from_a_model_with_a_pattern() -> None:
    """Sequences shorter than the context, also of one token; a pattern that shows all changes
    nothing."""
    config = tiny(context=130, positions="rotary", attention_pattern="local:192")
    texts = []
    for pattern in ("local:192", None):
        model = GPT(replace(config, attention_pattern=pattern))
        model.initialize(0)
        texts.append(model.generate([1], 4, seed=1).tolist())
    assert texts[0] == texts[1] and len(texts[0]) == 5


def test_for_people_rows_are_counted() -> None:
    assert shown_pattern("rows:1/3/5+global:1") == "rows (3)+global:1"


def test_a_config_goes_through_its_dict() -> None:
    config = tiny(context=200, attention_pattern="local:64+global:1")
    assert GPTConfig(**config.as_dict()) == config
