#!/usr/bin/env bash
# Install kubectl from Debian, where there is none.
set -euo pipefail

command -v kubectl >/dev/null && exit 0
[ "$(id -u)" = 0 ] || { echo "missing: kubectl (as root: apt-get install kubernetes-client)" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "missing: kubectl, and there is no apt-get" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
install() {
  apt-get install -qq -y --no-install-recommends kubernetes-client >/dev/null
}
install || { apt-get update -qq && install; }
