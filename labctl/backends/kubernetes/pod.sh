#!/bin/bash
# What the pods of a job start: pod.sh worker, or pod.sh launcher COMMAND... Written by labctl.
# The operator has mounted the job's keys below $LABCTL_KEYS (id_rsa, authorized_keys) and, in the launcher, the hostfile.
set -euo pipefail
umask 022
port=2222
mkdir -p ~/.ssh
chmod 700 ~/.ssh
# The directory of a run that is recorded is on the claim, if there is one: what a pod writes outlives it.
on_claim=
if [[ -v LABCTL_STORAGE && -v LABCTL_KEPT ]]; then
    on_claim=$LABCTL_STORAGE/runs/${LABCTL_RUN_DIR##*/}
    mkdir -p "$on_claim/ranks" "${LABCTL_RUN_DIR%/*}"
    ln -sfn "$on_claim" "$LABCTL_RUN_DIR"
else
    mkdir -p "$LABCTL_RUN_DIR/ranks"
fi
# The run's own files and the workload's: ranks may change them, so they get a copy. On the claim one pod writes them.
code=/etc/labctl/files/code.tar.gz
for file in /etc/labctl/files/*; do
    [[ $file == "$code" || ($on_claim && $file == */outputs) ]] || cp -r --dereference "$file" "$PROJECT_PATH/"
done
if [[ $on_claim && $1 == launcher ]]; then
    cp -r --dereference "/etc/labctl/files/outputs/${LABCTL_RUN_DIR##*/}/." "$on_claim/"
fi
# A project comes packed, on the claim if it is too large for the other files' place.
if [[ -v LABCTL_CODE ]]; then
    code=$LABCTL_CODE
    [[ -e $code ]] || { echo "labctl: $code is not on the claim: it has been removed" >&2; exit 1; }
fi
if [[ -e $code && (! $on_claim || $1 == launcher) ]]; then
    tar -C "$LABCTL_RUN_DIR" --touch -xzf "$code"
fi
if [[ -r /run/secrets/environment ]]; then
    # shellcheck disable=SC1091
    . /run/secrets/environment
fi

worker() {
    # Sessions get this container's environment; what the launcher sends them stays. Bash reads it through BASH_ENV, but
    # some distributions' in a session of sshd from ~/.bashrc alone.
    local name
    for name in $(compgen -e); do
        case $name in
        PATH) printf 'export PATH=%q\n' "$PATH" ;;
        _ | HOME | HOSTNAME | OLDPWD | PWD | SHLVL | SHELL | TERM | USER) ;;
        *) printf '[[ -v %s ]] || export %s=%q\n' "$name" "$name" "${!name}" ;;
        esac
    done > ~/.lab-env
    echo '. ~/.lab-env' > ~/.bashrc
    # shellcheck disable=SC2153 # it is another variable than LABCTL_KEPT
    install -m 600 "$LABCTL_KEYS/authorized_keys" ~/.ssh/authorized_keys
    # A key of this pod alone, which nobody knows before.
    rm -f ~/.ssh/host_key
    ssh-keygen -q -t ed25519 -N '' -f ~/.ssh/host_key
    # The home is a volume, which anyone in the pod may write to: sshd would refuse keys in it.
    cat > ~/.ssh/sshd_config <<CONFIG
Port $port
HostKey $HOME/.ssh/host_key
PidFile none
AuthorizedKeysFile $HOME/.ssh/authorized_keys
AuthenticationMethods publickey
StrictModes no
UsePAM no
UseDNS no
DisableForwarding yes
LogLevel ${LAB_SSHD_LOG_LEVEL:-ERROR}
$(grep -E '^(AcceptEnv|ClientAlive|Max(Sessions|Startups)|Print)' /etc/labctl/start/sshd_config)
SetEnv BASH_ENV=$HOME/.lab-env
CONFIG
    exec "$(command -v sshd || echo /usr/sbin/sshd)" -D -e -f ~/.ssh/sshd_config
}

launcher() {
    # In one pipe, of which the last line is that of how the command ended.
    exec 2>&1
    install -m 600 "$LABCTL_KEYS/id_rsa" ~/.ssh/id_rsa
    cat > ~/.ssh/config <<CONFIG
Host *
    Port $port
    IdentityFile ~/.ssh/id_rsa
    IdentitiesOnly yes
    StrictHostKeyChecking yes
    LogLevel ERROR
    ConnectTimeout 10
    SendEnv LABCTL_RUN_ID
CONFIG
    chmod 600 ~/.ssh/config
    cp /etc/mpi/hostfile "$LABCTL_RUN_DIR/hostfile"
    # Workers have the keys for this job that they have now. A queue that admits a job starts them with the launcher, and
    # the cluster's DNS may know them later.
    local hosts left=$LABCTL_PATIENCE
    hosts=$(cut -d ' ' -f 1 /etc/mpi/hostfile)
    until ssh-keyscan -p "$port" -T 10 -t ed25519 -f - <<< "$hosts" > ~/.ssh/known_hosts 2> ~/.ssh/unreached &&
        [[ $(wc -l < ~/.ssh/known_hosts) == "$(wc -l <<< "$hosts")" ]]; do
        if ((SECONDS > left)); then
            printf 'labctl: workers were not reached within %s s:\n' "$left" >&2
            grep -v '^#' ~/.ssh/unreached >&2 || true
            exit 1
        fi
        sleep 1
    done
    cd "$LABCTL_RUN_DIR"
    find_runner
    "${runner[@]}" "$@" &
    command=$!
    echo "$command" > ~/.command
    trap 'LABCTL_KEPT=0; kill -TERM "$command" 2> /dev/null || true' TERM
    # A signal ends a wait before the command; one that has ended at once is waited for all the same.
    while wait "$command" && code=0 || code=$?; kill -0 "$command" 2> /dev/null; do :; done
    # Who submitted the run fetches its results: it stays for that, unless its pod is to go.
    : "${LABCTL_KEPT:=0}"
    [[ $LABCTL_KEPT == 0 ]] || gather
    local how
    how=$(sed 's/^/ /' ~/.ended 2> /dev/null) || true
    [[ $how == *\;* ]] || how+=$(sed 's/^/; /' ~/.stopped 2> /dev/null) || true
    # The mark is one that the agent lets no program print.
    printf '\x01!\x02labctl: the launcher ended with exit code %s\n' "$code$how"
    for ((second = 0; second < LABCTL_KEPT; second++)); do
        [[ ! -e ~/.fetched ]] || break
        sleep 1
    done
    # Who fetches them has this locked.
    timeout 3600 flock ~/.fetching true || true
    exit "$code"
}

# What runs the launch command: the agent, which keeps the run's limits, or nothing but its environment. No other process of the
# pods has the run's id, by which the agent ends what is left of the run.
find_runner() {
    local python
    for python in /usr/bin/python3 "$(command -v python3)"; do
        if "$python" -IS -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2> /dev/null; then
            runner=("$python" -I /etc/labctl/start/labnode.py pod /etc/labctl/start/job.json)
            return
        fi
    done
    runner=(env "LABCTL_RUN_ID=${LABCTL_RUN_DIR##*/}")
    echo "labctl: the image has no python3: a crashed rank or a stall ends the run only when its launcher does"
}

# What the workers have written, if it is not on the claim; of files that several wrote the first one's stands.
gather() {
    local node
    [[ ! $on_claim ]] || return 0
    while read -r node _; do
        # With 1 ends a tar whose files change meanwhile.
        { timeout 1800 ssh -n "$node" tar -C "$LABCTL_RUN_DIR" -cf - . || [[ $? == 1 ]]; } |
            tar -xf - --skip-old-files || echo "labctl: not all files of $node were gathered"
    done < hostfile
} 2> /dev/null

"$@"
