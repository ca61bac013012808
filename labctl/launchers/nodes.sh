# The nodes whose sshd takes a connection, in order; horovodrun asks each second. Written by labctl.
# shellcheck shell=bash disable=SC2016,SC2154 # another bash reads its words; horovod.py sets the port and the nodes, NAME:SLOTS
has() {
    ! timeout 2 bash -c ': < "/dev/tcp/$0/$1"' "${1%:*}" "$port" 2> /dev/null || echo "$2 $1"
}
{
    for number in "${!nodes[@]}"; do
        has "${nodes[number]}" "$number" &
    done
    wait
} | sort -n | cut -d ' ' -f 2
