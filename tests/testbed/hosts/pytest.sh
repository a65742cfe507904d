#!/usr/bin/env bash
# pytest.sh [PYTEST ARGS]   run the tests marked `hosts` on the laptop of the hosts testbed
#
# Brings the hosts up with the project's .venv visible to all of them, and takes
# them down again unless they were up before. Without root it says so and
# succeeds; with ORC_REQUIRE_TESTBEDS=1 that is a failure, and so is a run in
# which no test was selected.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
project=$(cd "$here/../../.." && pwd)
export HOSTS_TESTBED_DIR=${HOSTS_TESTBED_DIR:-/tmp/hosts-testbed}
export HOSTS_VENV=${HOSTS_VENV:-$project/.venv}

if [ "$(id -u)" != 0 ]; then
  echo "hosts-testbed: the tests on SSH hosts need root: not run" >&2
  [ "${ORC_REQUIRE_TESTBEDS:-}" != 1 ]
  exit
fi

was_up=; [ ! -d "$HOSTS_TESTBED_DIR/pids" ] || was_up=1
"$here/up.sh" || {
  status=$?
  for log in "$HOSTS_TESTBED_DIR"/log/*; do [ ! -f "$log" ] || { echo "==> $log"; tail -n 20 "$log"; }; done >&2
  [ -n "$was_up" ] || "$here/down.sh"
  [ "${ORC_REQUIRE_TESTBEDS:-}" = 1 ] || { echo "hosts-testbed: did not come up: its tests were not run" >&2; exit 0; }
  exit "$status"
}
[ -n "$was_up" ] || trap '"$here/down.sh"' EXIT

cd "$project"
status=0
HOSTS_LAPTOP=$HOSTS_TESTBED_DIR "$here/enter.sh" laptop "$HOSTS_VENV/bin/python" -m pytest -m hosts "$@" || status=$?
# 5: none of the tests that were asked for needs hosts
[ "$status" != 5 ] || [ "${ORC_REQUIRE_TESTBEDS:-}" = 1 ] || status=0
exit "$status"
