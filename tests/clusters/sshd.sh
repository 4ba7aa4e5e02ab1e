#!/usr/bin/env bash
# For up.sh --sshd: sshd on each host, with keys of this cluster alone. STATE/ssh is the ssh that knows them.
set -euo pipefail
state=$1 here=$(cd "$(dirname "$0")" && pwd)

ssh-keygen -q -t ed25519 -N '' -f "$state/key"
ssh-keygen -q -t ed25519 -N '' -f "$state/host_key"
cat > "$state/sshd_config" <<END
HostKey $state/host_key
AuthorizedKeysFile $state/key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
MaxStartups 100
END
cat > "$state/ssh_config" <<END
Host *
    User root
    IdentityFile $state/key
    IdentitiesOnly yes
    UserKnownHostsFile $state/known_hosts
    BatchMode yes
    LogLevel ERROR
END
echo "$(cut -d ' ' -f 1,2 --output-delimiter , < "$state/hosts" | paste -sd ,) $(cut -d ' ' -f 1,2 "$state/host_key.pub")" \
    > "$state/known_hosts"
printf '#!/bin/sh\nexec ssh -F %s "$@"\n' "$state/ssh_config" > "$state/ssh"
chmod +x "$state/ssh"
while read -r host _; do
    "$here/on.sh" --state "$state" "$host" sh -c "mkdir -p /run/sshd && /usr/sbin/sshd -f $state/sshd_config"
done < "$state/hosts"
