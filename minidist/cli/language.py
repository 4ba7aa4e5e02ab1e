"""The language in which the course speaks in a terminal: --language, otherwise the locale's."""

import argparse
import os

LANGUAGES = ("en", "zh")


def add_language_argument(parser: argparse.ArgumentParser) -> None:
    """Add --language to the parser."""
    parser.add_argument(
        "--language",
        choices=LANGUAGES,
        help="en English, zh Chinese (default: zh if LC_ALL, LC_MESSAGES or LANG says so, else en)",
    )


def language(args: argparse.Namespace) -> str:
    """Return the language that the options or the locale ask for, one of LANGUAGES."""
    if args.language is not None:
        return str(args.language)
    names = (os.environ.get(name, "") for name in ("LC_ALL", "LC_MESSAGES", "LANG"))
    return "zh" if next(filter(None, names), "").startswith("zh") else "en"
