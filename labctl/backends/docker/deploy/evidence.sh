# what a host saw of a run
# shellcheck shell=sh
# LAB SINCE PATTERN [TOOL...]; what a command of the lab was given is in no event here.
lab=$1 since=$2 pattern=$3
shift 3
echo "# containers"
docker ps --all --filter "label=labctl.lab=$lab" --format '{{.Names}}: {{.Status}}'
docker ps --all --quiet --filter "label=labctl.lab=$lab" | xargs -r docker inspect \
    --format '{{.Name}}: {{.State.Status}}, exit code {{.State.ExitCode}}, out of memory {{.State.OOMKilled}}'
echo "# container events"
code='{{with index .Actor.Attributes "exitCode"}}, exit code {{.}}{{end}}'
docker events --since "$since" --until "$(date +%s.%N)" --filter "label=labctl.lab=$lab" --filter event=die \
    --filter event=oom --filter event=kill --filter event=stop --filter event=start --filter event=restart \
    --filter event=pause --filter event=unpause --filter event=health_status \
    --format "{{.Time}} {{.Actor.Attributes.name}}: {{.Action}}$code" | tail -n 200
echo "# kernel messages"
{ dmesg --time-format iso 2>&1 || dmesg 2>&1; } | grep -E "$pattern" | tail -n 200
[ $# = 0 ] || { echo "# devices: $*"; command -v "$1" > /dev/null && timeout 3 "$@" 2>&1; }
:
