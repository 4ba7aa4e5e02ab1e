#!/usr/bin/env bash
# For up.sh --slurm: slurmctld on the first host, slurmd on all, with munge. SLURM_CONF=STATE/slurm.conf is for srun.
#
# Needs Debian's slurmctld, slurmd, slurm-client and munge. Each host has 8 processors, whatever this machine has.
set -euo pipefail
state=$1 here=$(cd "$(dirname "$0")" && pwd)
on() { "$here/on.sh" --state "$state" "$@"; }

read -r first address _ < "$state/hosts"
all=$(cut -d ' ' -f 1 < "$state/hosts" | paste -sd ,)
cat > "$state/slurm.conf" <<END
ClusterName=minidist
SlurmctldHost=$first($address)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd
TmpFS=/run
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd-%h.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SchedulerType=sched/builtin
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=10
END
while read -r host address _; do echo "NodeName=$host NodeAddr=$address CPUs=8" >> "$state/slurm.conf"; done \
    < "$state/hosts"
echo "PartitionName=all Nodes=$all Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES" >> "$state/slurm.conf"

(umask 277; head -c 128 /dev/urandom > "$state/munge.key")
export SLURM_CONF=$state/slurm.conf
while read -r host _; do
    on "$host" sh -c "mkdir -p /run/munge /run/slurmd /run/slurmctld &&
        munged --force --key-file=$state/munge.key --seed-file=/run/munge/seed --log-file=/run/munge/log \
            --pid-file=/run/munge/pid 2> /dev/null"
done < "$state/hosts"
on "$first" slurmctld
while read -r host _; do on "$host" slurmd; done < "$state/hosts"
for _ in $(seq 100); do
    [ "$(on "$first" sinfo -h -t idle -o %D 2> /dev/null)" != "$(wc -l < "$state/hosts")" ] || exit 0
    sleep 0.1
done
echo "up.sh: slurmd did not come up on every host; see $state/slurmctld.log and the others beside it" >&2
sleep 0.1
exit 1
