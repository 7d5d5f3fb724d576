#!/bin/sh
# The tests drive the real kubectl, and a real btrfs. Where they are missing and we may install them, do; elsewhere those
# tests say why they skip.
missing=
command -v kubectl >/dev/null || missing="kubernetes-client"
command -v mkfs.btrfs >/dev/null || missing="$missing btrfs-progs"
if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    # shellcheck disable=SC2086
    apt-get update -qq && apt-get install -y -qq $missing >/dev/null
fi
exit 0
