"""The `minidist` command as `python -m minidist`."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # until main() takes it: there is nothing to tell yet
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys  # noqa: E402

from minidist.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
