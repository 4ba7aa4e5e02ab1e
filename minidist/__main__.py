"""`python -m minidist` is the `minidist` command."""

import sys

from minidist.cli import main

if __name__ == "__main__":
    sys.exit(main())
