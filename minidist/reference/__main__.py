"""`python -m minidist.reference`: write the pages of docs/reference and docs/measured again."""

import sys

from minidist.errors import ConfigError
from minidist.reference.pages import written_pages


def main() -> int:
    """Write all pages, and print the names of those that changed."""
    try:
        changed = written_pages()
    except ConfigError as error:
        print(f"minidist.reference: {error}", file=sys.stderr)
        return 2
    for page in changed:
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
