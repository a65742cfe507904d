#!/usr/bin/env bash
# Install the Chromium of Debian, which the tests of the web page drive.
set -euo pipefail

if command -v chromium >/dev/null; then exit 0; fi
[ "$(id -u)" = 0 ] || { echo "missing: chromium (as root: apt-get install chromium)" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "missing: chromium, and there is no apt-get" >&2; exit 1; }

export DEBIAN_FRONTEND=noninteractive
install() { apt-get install -qq -y --no-install-recommends chromium fonts-liberation >/dev/null; }
install || { apt-get update -qq && install; }
