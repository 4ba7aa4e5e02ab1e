#!/usr/bin/env bash
# A command on a host of up.sh: on.sh [--state DIR] HOST COMMAND ARGUMENT ...
#
# It runs in this folder, with this environment. It is told to end (SIGTERM) when this process is killed.
set -euo pipefail
state=/tmp/minidist-cluster
if [ "${1-}" = --state ]; then state=$2; shift 2; fi
[ $# -ge 2 ] || { echo "on.sh: on.sh [--state DIR] HOST COMMAND ARGUMENT ..." >&2; exit 2; }
[ -e "$state/$1.pid" ] || { echo "on.sh: no host $1 is up (up.sh keeps hosts below $state)" >&2; exit 2; }
host=$(cat "$state/$1.pid")
shift
exec nsenter -t "$host" -m -u -i -n -p setpriv --pdeathsig TERM sh -c 'cd "$0" && exec "$@"' "$PWD" "$@"
