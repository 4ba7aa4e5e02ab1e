#!/usr/bin/env bash
# In ssh's place, for launchers that start others by ssh: ssh.sh [options] HOST WORDS ... runs the words in a shell there.
#
# The state folder of up.sh is $MINIDIST_CLUSTER. As under ssh, the words begin in the home folder and outlive this
# process: they see that their input ends.
set -euo pipefail
while [[ ${1-} == -* ]]; do
    case $1 in
        -o | -p | -i | -F | -l) shift 2 ;;
        *) shift ;;
    esac
done
state=${MINIDIST_CLUSTER:-/tmp/minidist-cluster} host=$1
shift
[ -e "$state/$host.pid" ] || { echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255; }
exec nsenter -t "$(cat "$state/$host.pid")" -m -u -i -n -p sh -c 'cd && exec sh -c "$0"' "$*"
