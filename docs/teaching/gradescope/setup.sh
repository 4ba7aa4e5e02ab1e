#!/usr/bin/env bash
# Gradescope runs this once, when it builds the image. Zip three things, not the folder around them:
# setup.sh, run_autograder, and minidist/ (a clone, or the unpacked source distribution).
set -e
apt-get update
apt-get install -y python3 python3-venv
python3 -m venv /autograder/python
/autograder/python/bin/pip install /autograder/source/minidist
