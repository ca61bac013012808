#!/bin/sh
# Lists the packages of the image that it runs in: lines of KIND, DISTRIBUTION, NAME and VERSION, separated by tabs.
# shellcheck disable=SC1091 # it is the image's
distribution=$(. /etc/os-release 2>/dev/null && echo "${ID:-linux}")
if command -v dpkg-query >/dev/null; then
    dpkg-query --show --showformat "deb\t$distribution\t\${Package}\t\${Version}\n"
elif command -v rpm >/dev/null; then
    rpm --query --all --queryformat "rpm\t$distribution\t%{NAME}\t%{VERSION}-%{RELEASE}\n"
fi
command -v python3 >/dev/null || exit 0
exec python3 -c '
from importlib.metadata import distributions
for one in distributions():
    print("pypi", "", one.metadata["Name"], one.version, sep="\t")'
