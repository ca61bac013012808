# processes of runs
# shellcheck shell=sh disable=SC2013 # paths without blanks
# Prints RUN_ID COMMAND: every process of a run has its id in the environment.
for path in $(grep -slaF LABCTL_RUN_ID= /proc/[0-9]*/environ); do
    id=$(tr '\0' '\n' <"$path" | sed -n 's/^LABCTL_RUN_ID=//p')
    printf '%s %s\n' "$id" "$(tr '\0' ' ' <"${path%environ}cmdline" | head -c 100)"
done
