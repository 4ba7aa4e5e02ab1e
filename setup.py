"""The description that a package index shows: README.md, with links that work there.

Everything else is in setup.cfg.
"""

import re
from pathlib import Path

ADDRESS = ""
"""Where the repository can be read, as https://…/blob/main; empty as long as it is nowhere."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)]*)\)")


def for_an_index(text: str, address: str = ADDRESS) -> str:
    """Return a document with its relative links led to `address`; without one they become text, and
    pictures go."""

    def changed(link: "re.Match[str]") -> str:
        picture, words, path = link.groups()
        if address:
            return f"{picture}[{words}]({address}/{path})"
        return "" if picture else words

    return LINK.sub(changed, text)


if __name__ == "__main__":
    from setuptools import setup

    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(
        long_description=for_an_index(readme),
        project_urls={"Source": ADDRESS.partition("/blob/")[0]} if ADDRESS else {},
    )
