"""The first use of a term shows what it means; code, links, headings and bold words keep theirs."""

import re

from minidist.site.tips import with_tips

TEXT = """# The bubble

A **bubble** is idle time. `bubble` is code, [bubble](x.md) a link. The bubble grows.
Another bubble, and a micro-bubble.

```
bubble
```
"""


def test_a_term_is_explained_once_in_plain_words_only() -> None:
    told = with_tips(TEXT, "en")
    (tip,) = re.findall(r'<abbr title="([^"]*)">bubble</abbr>', told)
    assert tip.startswith("气泡: ")
    assert re.sub(r'<abbr title="[^"]*">([^<]*)</abbr>', r"\1", told) == TEXT
    assert "The <abbr" in told and told.startswith("# The bubble\n")


def test_a_chinese_term_has_its_english_and_its_meaning() -> None:
    told = with_tips("流水线的气泡有多大？气泡越小越好。", "zh")
    assert told.count(">气泡</abbr>") == 1
    assert re.search(r'title="bubble[^"]*：[^"]+">气泡', told)
