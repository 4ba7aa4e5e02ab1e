"""A document and its Chinese twin say the same, section by section; a fault of each kind is found."""

import re

import pytest

from minidist import lessons
from minidist.lessons import twins

ENGLISH = """# 10 · A lesson

> 按层拆分 (N0:213)
>
> *Scenario 3: cut by layers.*

## 1 The loop

Each rank sends 2 arrays, 1,024 bytes, by `group.send`. Its bubble is 75 % ([lesson 11](../11_pipeline/README.md)).

![One step](figure.png)

<!-- printed by: python lesson.py; N2:166 -->
| | layers | has |
| --- | --- | --- |
| GPU 0 | 1-8 | 1.75 billion |

<details><summary>What came out</summary>

It is shorter.

</details>

## 2 Run it

```
python lesson.py
```
"""
CHINESE = """# 10 · 一课

> 按层拆分 (N0:213)

## 1 循环

每个 rank 用 `group.send` 发 2 个数组，1,024 字节。气泡占 75 % ([第 11 课](../11_pipeline/README.zh.md))。

![一步](figure.png)

<!-- printed by: python lesson.py; N2:166 -->
| | layers | has |
| --- | --- | --- |
| GPU 0 | 1-8 | 1.75 billion |

<details><summary>结果</summary>

变短了。

</details>

## 2 运行

```
python lesson.py
```
"""


def test_a_pair_that_says_the_same_has_no_difference() -> None:
    assert [*twins.differences(ENGLISH, CHINESE)] == []


@pytest.mark.parametrize(
    ("now", "planted", "found"),
    [
        ("## 2 运行", "## 3 运行", "sections 0, 1, 2 beside 0, 1, 3"),
        ("python lesson.py\n```", "python lessen.py\n```", "section 2, code"),
        ("; N2:166 -->", "; N2:167 -->", "section 1, comments"),
        ("11_pipeline/README.zh.md", "12_tensor/README.zh.md", "section 1, links"),
        ("figure.png", "figures.png", "section 1, links"),
        ("</details>", "", "section 1, folds"),
        ("`group.send`", "`group.recv`", "section 1, code in lines"),
        ("| GPU 0 | 1-8 | 1.75 billion |", "| GPU 0 | 1-8 1.75 billion |", "section 1, rows"),
        ("1.75 billion", "1.57 billion", "section 1, numbers"),
        ("1,024", "1,042", "section 1, numbers"),
        ("气泡", "泡沫", "section 1: bubble without 气泡"),
        ("气泡占", "**气泡。**占", "section 1: stars that do not close: "),
    ],
)
def test_a_planted_fault_is_found(now: str, planted: str, found: str) -> None:
    assert now in CHINESE
    told = [*twins.differences(ENGLISH, CHINESE.replace(now, planted, 1))]
    assert any(line.startswith(found) for line in told), told


@pytest.mark.parametrize(
    ("english", "chinese", "found"),
    [
        ("It is longer.", "变短了。", ["section 1: English changed since both were read"]),
        ("It is shorter.", "变长了。", ["section 1: Chinese changed since both were read"]),
        (
            "It is longer.",
            "变长了。",
            ["section 1: English and Chinese changed since both were read"],
        ),
        ("It is\nshorter.", "变短了。", []),  # only a line end
    ],
)
def test_a_section_that_changed_must_be_read_again(
    english: str, chinese: str, found: list[str]
) -> None:
    kept = twins.stamps_of(ENGLISH, CHINESE)
    texts = (ENGLISH.replace("It is shorter.", english), CHINESE.replace("变短了。", chinese))
    assert [*twins.old(*texts, kept)] == found


PLAIN = """# A page

[中文](page.zh.md)

## Begin

<a id="here"></a>Install it.

<!-- made by: python -m minidist.lessons.table -->
- 7 lessons, and their bubble
<!-- end -->

```sh
# once
pip install -e .    # needs a network
```

## Look

It has 2 tables.
"""
PLAIN_CHINESE = """# 一页

[English](page.md)

## 开始

<a id="here"></a>安装。

<!-- made by: python -m minidist.lessons.table -->
- 七课
<!-- end -->

```sh
# 只要一次
pip install -e .  # 需要网络
```

## 查看

有 2 张表。
"""


def test_sections_without_numbers_are_compared_by_their_place() -> None:
    assert [*twins.sections(PLAIN)] == ["0", "1", "2"]
    assert [*twins.differences(PLAIN, PLAIN_CHINESE)] == []


@pytest.mark.parametrize(
    ("now", "planted", "found"),
    [
        ("## 查看\n", "", "sections 0, 1, 2 beside 0, 1"),
        ("2 张", "3 张", "section 2, numbers"),
        ("-e .", ".", "section 1, code"),
        ("  # 需要网络", "", "section 1, code"),
        ('id="here"', 'id="there"', "section 1, anchors"),
        ("(page.md)", "(pages.md)", "section 0, links"),
    ],
)
def test_a_fault_in_a_page_without_numbers_is_found(now: str, planted: str, found: str) -> None:
    assert now in PLAIN_CHINESE
    told = [*twins.differences(PLAIN, PLAIN_CHINESE.replace(now, planted, 1))]
    assert any(line.startswith(found) for line in told), told


def test_what_is_made_needs_no_new_stamp() -> None:
    kept = twins.stamps_of(PLAIN, PLAIN_CHINESE)
    assert [*twins.old(PLAIN.replace("7 lessons", "8 lessons"), PLAIN_CHINESE, kept)] == []


@pytest.mark.parametrize(
    ("names", "stamped"),
    [
        (["README.md"], ["README.md"]),
        (["docs"], ["docs/page.md"]),
        (["10", "docs/page.md"], ["docs/page.md", "lessons/10_a/README.md"]),
        ([], []),
    ],
)
def test_a_document_is_chosen_by_its_path_or_a_part_of_it(
    names: list[str], stamped: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = [twins.ROOT / name for name in ("README.md", "docs/page.md", "lessons/10_a/README.md")]
    monkeypatch.setattr(twins, "pairs", lambda: there)
    assert [twins.label(document) for document in twins.chosen(names)] == stamped


def test_a_section_without_a_stamp_must_be_read() -> None:
    assert len([*twins.old(ENGLISH, CHINESE, {})]) == 3


def test_every_lesson_has_its_twin() -> None:
    stories = [lesson.part("README.md") for lesson in lessons.every_lesson()]
    assert [*map(twins.label, stories)] == [
        name for name in map(twins.label, twins.pairs()) if re.match(r"lessons/\d\d_", name)
    ]


@pytest.mark.parametrize("document", twins.pairs(), ids=twins.label)
def test_a_pair_says_the_same(document) -> None:
    english, chinese = (
        path.read_text(encoding="utf-8") for path in (document, twins.twin_of(document))
    )
    assert [*twins.differences(english, chinese)] == []
    kept = twins.read_stamps().get(twins.label(document), {})
    assert [*twins.old(english, chinese, kept)] == [], (
        "read both languages, then: python -m minidist.lessons.twins --same "
        f"{twins.label(document)}"
    )
