#!/usr/bin/env bash
# Install the PostgreSQL server from Debian, without the cluster that the package would make and start.
set -euo pipefail

programs=(/usr/lib/postgresql/*/bin/postgres)
if [ -x "${programs[0]}" ]; then exit 0; fi
[ "$(id -u)" = 0 ] || { echo "missing: postgresql (as root: apt-get install postgresql)" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "missing: postgresql, and there is no apt-get" >&2; exit 1; }

mkdir -p /etc/postgresql-common
[ -e /etc/postgresql-common/createcluster.conf ] ||
  echo 'create_main_cluster = false' > /etc/postgresql-common/createcluster.conf
made=
if [ ! -e /usr/sbin/policy-rc.d ]; then
  made=1
  printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
  chmod 755 /usr/sbin/policy-rc.d
fi
trap '[ -z "$made" ] || rm -f /usr/sbin/policy-rc.d' EXIT
export DEBIAN_FRONTEND=noninteractive
install() {
  apt-get install -qq -y --no-install-recommends -o Dpkg::Options::=--force-confold postgresql >/dev/null
}
install || { apt-get update -qq && install; }
