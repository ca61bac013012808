# Lists or fills the cache on a host: FOLDER list|unpack; the folder is below the home unless it begins with /.
# shellcheck shell=sh
umask 077
cd && mkdir -p "$1" && cd "$1" || exit 1
if [ "$2" = list ]; then
    find . -name '.labctl-coming.*' -prune -o ! -type d -print
    exit
fi
# Hosts may share the cache: each unpacks a tar archive in a directory of its own, removed on exit. Killed ones leave
# it; it is removed two days after the last write.
find . -maxdepth 1 -name '.labctl-coming.*' -mtime +1 -exec rm -rf {} +
coming=$(mktemp -d ./.labctl-coming.XXXXXX) || exit 1
cache=$PWD
trap 'cd "$cache" && rm -rf "$coming"' EXIT
trap 'exit 1' HUP INT PIPE TERM
tar -xf - -C "$coming" && cd "$coming" || exit 1
# shellcheck disable=SC2016 # expanded by the inner shell
find . -type d -exec sh -c '
for one; do
    if [ -L "../$one" ]; then echo "${one#./} is a link" >&2; exit 1; fi
    mkdir -p "../$one" || exit 1
done' sh {} + || exit 1
# shellcheck disable=SC2016
find . ! -type d -exec sh -c 'for one; do mv -f "$one" "../$one" || exit 1; done' sh {} + || exit 1
