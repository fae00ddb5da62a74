#!/usr/bin/env bash
# Install Debian or Ubuntu packages where that needs no question: as root, with apt-get.
#
#     scripts/apt.sh PACKAGE...
#
# Exit status 0: they are installed. 1: not root, no apt-get, no network, or no such package; nothing is printed,
# the caller says what follows from it. MKREF_APT=no switches it off.
set -euo pipefail

[ "${MKREF_APT:-yes}" != no ] || exit 1
[ "$(id -u)" = 0 ] || exit 1
command -v apt-get >/dev/null || exit 1

export DEBIAN_FRONTEND=noninteractive
install() {
  timeout 600 apt-get install -y -q --no-install-recommends "$@" </dev/null >/dev/null 2>&1
}
# The package list of a fresh container is empty: fetch it only when the first try fails.
install "$@" && exit 0
timeout 120 apt-get update -q </dev/null >/dev/null 2>&1 || exit 1
install "$@" || exit 1
