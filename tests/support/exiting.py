"""A module of a program that has sys.exit under a name of its own, from before md.init."""

from sys import exit as leave  # noqa: F401 - job.py ends by it
