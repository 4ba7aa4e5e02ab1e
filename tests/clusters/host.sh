#!/usr/bin/env bash
# The first process of a host of up.sh, in its new namespaces: host.sh NAME STATE. It takes in orphans, and never ends.
set -euo pipefail
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run
mount --bind "$2/$1.hosts" /etc/hosts
echo "$1" > /proc/sys/kernel/hostname
touch "$2/$1.up"
trap '' INT TERM HUP
while true; do
    sleep 3600 &
    wait $! || true
done
