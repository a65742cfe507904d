#!/usr/bin/env bash
# run.sh [PYTEST ARGS]   all tests with coverage: those on SSH hosts and those on Slurm beside the others
#
# Most tests wait for something, so the three parts together take little longer than the longest one. What a part beside
# prints comes in one piece after the others'. Fails when one of them fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
output=$(mktemp -d)
declare -A beside=()
finish() {
  local group
  for group in "${beside[@]}"; do kill -- -"$group" 2>/dev/null || true; done
  rm -rf "$output"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

fine() { # fine STATUS; 5: none of the tests that were asked for is in this part
  [ "$1" = 0 ] || { [ "$1" = 5 ] && [ "${ORC_REQUIRE_TESTBEDS:-}" != 1 ]; }
}
start() { # start NAME COMMAND...
  COVERAGE_FILE=.coverage.$1 "${@:2}" --cov --cov-report= -p no:cacheprovider >"$output/$1" 2>&1 &
  beside[$1]=$!
}

rm -f .coverage .coverage.*
set -m # a process group each, so that it can be ended as a whole
start hosts tests/testbed/hosts/pytest.sh "$@"
start slurm "$python" -m pytest -m "slurm and not hosts" "$@"
set +m

failed=()
status=0
COVERAGE_FILE=.coverage.main "$python" -m pytest --cov --cov-report= -m "not hosts and not slurm" "$@" || status=$?
fine "$status" || failed+=("the tests that need no testbed")
for name in slurm hosts; do
  status=0
  wait "${beside[$name]}" || status=$?
  unset "beside[$name]"
  printf '\nTests on %s:\n' "$name"
  cat "$output/$name"
  fine "$status" || failed+=("the tests on $name")
done

"$python" -m coverage combine -q || true
"$python" -m coverage report || true
for part in "${failed[@]}"; do echo "FAILED: $part" >&2; done
[ ${#failed[@]} = 0 ]
