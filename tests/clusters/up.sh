#!/usr/bin/env bash
# Several hosts on one machine, joined by a switch. For root, on Linux with iproute2 and util-linux.
#
#     tests/clusters/up.sh a b c                    stays up until Ctrl-C, or until its input ends
#     tests/clusters/on.sh a minidist doctor        meanwhile, in another terminal: a command on host a
#
#     a 10.214.0.1     b 10.214.0.2     c 10.214.0.3
#           |                |                |
#           +-------- switch (a bridge) ------+
#
# Each host has a network, a host name, an /etc/hosts, a table of processes, a /dev/shm and a /run of its own, as a
# machine has. It shares all other files with this machine, as with a network file system. Nothing outside is changed,
# and nothing is left: the hosts are processes, which end with this script, also if it is killed.
#
#     --rate 200mbit    each host's cable carries so much each way, as tc spells it
#     --delay 1ms       each host's cable delays each packet, each way; needs a kernel with netem
#     --state DIR       what on.sh reads (default: /tmp/minidist-cluster; a cluster beside another needs its own)
#
# A host may be an awkward one: NAME:WORD, and more words after further colons.
#
#     loopback          its own name means 127.0.1.1 there, as Debian has it
#     dead              it has a second network card, whose cable leads nowhere, and its own name means that card
#     mtu=1400          its network card takes packets of so many bytes; the switch takes 1500, or --mtu of it
#
#     hole=1200         the switch loses longer packets to and from it, and does not tell: no network card knows of it
#
#     --mtu 1500        of the switch
#     --sshd            start sshd on each host: on any of them, DIR/ssh reaches the others. Needs openssh-server
#     --slurm           start Slurm: `on.sh a env SLURM_CONF=DIR/slurm.conf srun -N 2 -n 7 hostname`. Needs slurmctld,
#                       slurmd, slurm-client and munge
set -euo pipefail

NET=10.214.0 DEAD=10.215.0
state=/tmp/minidist-cluster rate='' delay='' mtu=1500 sshd='' slurm='' hosts=()
here=$(cd "$(dirname "$0")" && pwd)

fail() { echo "up.sh: $*" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --state) state=$2; shift 2 ;;
        --rate) rate=$2; shift 2 ;;
        --delay) delay=$2; shift 2 ;;
        --mtu) mtu=$2; shift 2 ;;
        --sshd) sshd=yes; shift ;;
        --slurm) slurm=yes; shift ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; exit ;;
        -*) fail "there is no option $1; see --help" ;;
        *) hosts+=("$1"); shift ;;
    esac
done
[ ${#hosts[@]} -gt 0 ] && [ ${#hosts[@]} -le 250 ] || fail "name 1 to 250 hosts: up.sh a b c"
[ "$(id -u)" = 0 ] || fail "network namespaces are made by root"
for tool in ip tc unshare nsenter setpriv; do
    command -v $tool > /dev/null || fail "$tool is not installed (iproute2 and util-linux have it)"
done
for host in "${hosts[@]}"; do
    [[ $host =~ ^[a-z][a-z0-9-]*(:loopback|:dead|:mtu=[0-9]+|:hole=[0-9]+)*$ ]] || fail "$host is no host; see --help"
done
[ -z "$sshd" ] || [ -x /usr/sbin/sshd ] || fail "--sshd needs openssh-server (\`apt-get install openssh-server\`)"
[ -z "$slurm" ] || { for tool in slurmctld slurmd srun munged; do command -v $tool > /dev/null ||
    fail "--slurm needs $tool (\`apt-get install slurmctld slurmd slurm-client munge\`)"; done; }
mkdir -m 700 "$state" 2> /dev/null || fail "$state is there already: another cluster, or a killed one's; choose --state"

end() { # the processes that hold the namespaces end, and with them all others inside, and all cables
    trap '' EXIT INT TERM HUP
    for holder in ${holders[@]+"${holders[@]}"}; do kill -KILL "$holder" 2> /dev/null || true; done
    rm -rf "$state"
}
holders=()
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

hold() { # hold WORDS...: a process in new namespaces, which dies with this script. Its pid: $holder
    setpriv --pdeathsig KILL unshare --fork --kill-child "$@" < /dev/null &
    holders+=($!)
    local parent=$! tries
    disown $!
    for tries in $(seq 200); do
        holder=$(tr -d ' ' < "/proc/$parent/task/$parent/children" 2> /dev/null) || true
        [ -z "$holder" ] || return 0
        [ -d "/proc/$parent" ] || break
        sleep 0.01
    done
    fail "unshare does not start here; is this a container without CAP_SYS_ADMIN?"
}

until_there() { # until_there FILE
    local tries
    for tries in $(seq 300); do [ ! -e "$1" ] || return 0; sleep 0.01; done
    fail "a host did not start within 3 s"
}

shape() { # shape NETNS-PID DEVICE: the rate and the delay of what leaves there
    local tc=(nsenter -t "$1" -n tc qdisc add dev "$2")
    [ -z "$delay" ] || "${tc[@]}" root handle 1: netem delay "$delay" limit 100000 2> /dev/null ||
        fail "this kernel has no netem, which delays packets; leave out --delay"
    [ -z "$rate" ] || "${tc[@]}" ${delay:+parent 1:} ${delay:-root} handle 2: tbf rate "$rate" burst 256kb latency 100ms
}

hold --net sleep infinity
switch=$holder
echo "$switch" > "$state/switch.pid"
nsenter -t "$switch" -n ip link add switch mtu "$mtu" type bridge
nsenter -t "$switch" -n ip link set switch up

names=''
for i in "${!hosts[@]}"; do names+="$NET.$((i + 1)) ${hosts[i]%%:*}"$'\n'; done

for i in "${!hosts[@]}"; do
    name=${hosts[i]%%:*} words=${hosts[i]}: address=$NET.$((i + 1)) number=$((i + 1)) own=''
    [[ $words != *:dead:* ]] || own=$DEAD.$number
    [[ $words != *:loopback:* ]] || own=127.0.1.1
    { echo "127.0.0.1 localhost"
      if [ -n "$own" ]; then grep -v " $name\$" <<< "$names"; echo "$own $name"; else echo "$names"; fi
    } | grep . > "$state/$name.hosts"
    hold --net --uts --ipc --pid --mount --mount-proc "$here/host.sh" "$name" "$state"
    until_there "$state/$name.up"
    echo "$holder" > "$state/$name.pid"
    nsenter -t "$switch" -n ip link add "port$number" mtu "$mtu" type veth peer name eth0 mtu "$mtu" netns "$holder"
    nsenter -t "$switch" -n ip link set "port$number" master switch up
    in_host=(nsenter -t "$holder" -n)
    "${in_host[@]}" ip link set lo up
    "${in_host[@]}" ip address add "$address/24" dev eth0
    if [[ $words =~ :mtu=([0-9]+): ]]; then  # and no packets longer than that pass as one, as they may between veths
        "${in_host[@]}" ip link set eth0 mtu "${BASH_REMATCH[1]}" gso_max_segs 1
    fi
    if [[ ${hosts[*]} == *:hole=* ]]; then  # on all hosts: else packets pass as one that could still be cut
        "${in_host[@]}" ip link set eth0 gso_max_segs 1
    fi
    if [[ $words =~ :hole=([0-9]+): ]]; then
        nsenter -t "$switch" -n ip link set "port$number" mtu "${BASH_REMATCH[1]}"
    fi
    "${in_host[@]}" ip link set eth0 up
    if [[ $words == *:dead:* ]]; then
        nsenter -t "$switch" -n ip link add "nowhere$number" type veth peer name dead0 netns "$holder"
        nsenter -t "$switch" -n ip link set "nowhere$number" up
        "${in_host[@]}" ip address add "$DEAD.$number/24" dev dead0
        "${in_host[@]}" ip link set dead0 up
    fi
    shape "$holder" eth0
    shape "$switch" "port$number"
    echo "$name $address $holder" >> "$state/hosts"
done

[ -z "$sshd" ] || "$here/sshd.sh" "$state"
[ -z "$slurm" ] || "$here/slurm.sh" "$state"

echo "up: $(cut -d ' ' -f 1,2 < "$state/hosts" | paste -sd , | sed 's/,/, /g')"
echo "a command on a host: $here/on.sh --state $state ${hosts[0]%%:*} hostname"
cat > /dev/null || true  # until the input ends
