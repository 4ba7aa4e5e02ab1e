"""Chapter 24 · Names of clusters as a user writes them: in any case, and nearly right."""

from collections.abc import Iterable

from minidist.console import meant


def known_name(word: str, known: Iterable[str]) -> str | None:
    """Return the name that a word is, in upper or lower case; None if it is none."""
    names = list(known)
    if word in names:
        return word
    return next((name for name in names if name.lower() == word.lower()), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return '; did you mean X or Y?' with the names that begin with a word, else the nearest.

    Names that begin with another letter are no suggestion: an A100 is no V100.
    """
    word = word.lower()
    names = [name for name in known if name[:1].lower() == word[:1]]
    longer = [name for name in names if name.lower().startswith(word)]
    return f"; did you mean {' or '.join(longer)}?" if longer else meant(word, names)
