#!/bin/sh
# The tests drive the real kubectl, a real btrfs, and a real XFS in the kernel of a guest. Where they are missing and we
# may install them, do; elsewhere those tests say why they skip. Debian's own kubectl, which is years older, is unpacked
# beside it: it asks a server for other things.
set -u
cd "$(dirname "$0")/.." || exit 0
command -v apt-get >/dev/null || exit 0
missing=
command -v kubectl >/dev/null || missing="kubernetes-client"
command -v mkfs.btrfs >/dev/null || missing="$missing btrfs-progs"
command -v mkfs.xfs >/dev/null || missing="$missing xfsprogs"
command -v linux.uml >/dev/null || missing="$missing user-mode-linux"
if [ -n "$missing" ] && [ "$(id -u)" = 0 ]; then
    # shellcheck disable=SC2086
    apt-get update -qq && apt-get install -y -qq $missing >/dev/null
fi
if [ ! -x .tools/kubectl-debian/usr/bin/kubectl ] && command -v dpkg >/dev/null; then
    place=$(mktemp -d)
    # Where the package lists are missing and we may not fetch them, there is none.
    (cd "$place" && { apt-get download -qq kubernetes-client || { apt-get update -qq && apt-get download -qq kubernetes-client; }; }) >/dev/null 2>&1
    for package in "$place"/*.deb; do
        [ -e "$package" ] && mkdir -p .tools/kubectl-debian && dpkg -x "$package" .tools/kubectl-debian
    done
    rm -rf "$place"
fi
exit 0
