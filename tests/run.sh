#!/usr/bin/env bash
# run.sh [PYTEST ARGS]   all tests, in five lanes: processes beside each other, each of which runs one part after the other
#
# COVERAGE=1 measures which lines they run, and takes about a fifth longer.
#
# What runs side by side takes little longer than the longest of it, as most tests on testbeds wait. What a lane beside the
# part `main` prints comes in one piece after the others'.
#
# Five at a time on two cores disturb each other. So when all have ended, up to three tests that failed are run once more, by
# themselves: those that fail again fail the run; those that pass are named as UNSTEADY, for each of them is a defect of
# the test or of orc that somebody has to look for.
#
# What was not running before is not running afterwards, however this ends: Slurm is started by the first test that needs
# it. What a SIGKILL leaves behind, `make testbeds-down` ends.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=.venv/bin/python
most_again=3
output=$(mktemp -d)
declare -A beside=()
slurm=tests/testbed/slurm

slurm_is_up() {
  local pid
  { read -r pid _ <"${SLURM_TESTBED_DIR:-/tmp/slurm-testbed}/run/slurmctld.pid"; } 2>/dev/null && kill -0 "$pid" 2>/dev/null
}
lives() { # lives PGID: one of its processes has not ended; orphans stay zombies where whoever inherits them does not reap
  local file line state group
  for file in /proc/[0-9]*/stat; do
    { read -r line <"$file"; } 2>/dev/null || continue
    read -r state _ group _ <<<"${line##*) }"
    [ "$group" != "$1" ] || [ "$state" = Z ] || return 0
  done
  return 1
}
end_group() { # end_group PGID: let it clear up after itself, then insist
  local signal tries
  for signal in INT TERM KILL; do
    kill -"$signal" -- -"$1" 2>/dev/null || return 0
    for ((tries = 0; tries < 300; tries++)); do
      lives "$1" || return 0
      sleep 0.1
    done
  done
}
finish() {
  local group
  trap '' HUP INT TERM # clearing up is not interrupted by an impatient second Ctrl-C
  for group in "${beside[@]}"; do end_group "$group"; done
  [ -n "$slurm_was_up" ] || ! slurm_is_up || "$slurm/down.sh" >/dev/null || echo "Slurm could not be stopped: make testbeds-down" >&2
  rm -rf "$output"
}
slurm_was_up=
! slurm_is_up || slurm_was_up=1
trap finish EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

part() { # part NAME COVERAGE [PYTEST ARGS]
  local command=("$python" -m pytest)
  case $1 in # --part: which tests that is, is written in conftest.py
    hosts) command=(tests/testbed/hosts/pytest.sh) ;;
    hosts-e2e) command=(env HOSTS_TESTBED_DIR="${HOSTS_TESTBED_DIR:-/tmp/hosts-testbed}-e2e" tests/testbed/hosts/pytest.sh) ;;
  esac
  [ -z "${COVERAGE:-}" ] || command+=(--cov --cov-report=)
  COVERAGE_FILE=.coverage.$2 "${command[@]}" --part="$1" -o cache_dir="$output/cache-$1" "${@:3}"
}
lane() { # lane "NAME..." [PYTEST ARGS]: these parts one after the other; how each ends is kept
  local name status
  trap - EXIT
  for name in $1; do
    status=0
    part "$name" "$name" "${@:2}" >"$output/$name" 2>&1 || status=$?
    echo "$status" >"$output/ended-$name"
  done
}
fine() { # fine STATUS; 5: none of the tests that were asked for is in this part
  [ "$1" = 0 ] || { [ "$1" = 5 ] && [ "${ORC_REQUIRE_TESTBEDS:-}" != 1 ]; }
}
failures() { # failures NAME: the tests of this part that failed, a line each
  "$python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
    "$output/cache-$1/v/cache/lastfailed" 2>/dev/null || true
}

rm -f .coverage .coverage.*
lanes=("hosts-e2e e2e checkpoint" "hosts runtime" "slurm runtime-parallel" "orchestrator kubernetes") # beside main: about as long as it
set -m # a process group each, so that it can be ended as a whole
for parts in "${lanes[@]}"; do
  lane "$parts" "$@" &
  beside[$parts]=$!
done
set +m

declare -A ended=([main]=0)
part main main "$@" || ended[main]=$?
for parts in "${lanes[@]}"; do
  wait "${beside[$parts]}" || true
  unset "beside[$parts]"
  for name in $parts; do
    ended[$name]=1 # read, not $(…): bash misreads a trap that it runs while it reads a substitution
    [ ! -f "$output/ended-$name" ] || read -r "ended[$name]" <"$output/ended-$name"
    printf '\nTests of the part `%s`:\n' "$name"
    cat "$output/$name"
  done
done

unsteady=()
few=$(for name in "${!ended[@]}"; do failures "$name"; done | awk -v most="$most_again" 'END { print NR <= most }')
for name in "${!ended[@]}"; do
  [ "${ended[$name]}" = 1 ] && [ "$few" = 1 ] || continue # 1: tests failed; anything else is no matter of steadiness
  mapfile -t failed_first < <(failures "$name")
  printf '\nOnce more, by themselves: %s\n' "${failed_first[*]}"
  if part "$name" "again-$name" "$@" --last-failed --last-failed-no-failures=none; then
    ended[$name]=0
    unsteady+=("${failed_first[@]}")
  fi
done

if [ -n "${COVERAGE:-}" ]; then
  "$python" -m coverage combine -q || true
  "$python" -m coverage report || true
fi
for test in "${unsteady[@]}"; do echo "UNSTEADY: $test failed beside the others and passed by itself" >&2; done
status=0
for name in "${!ended[@]}"; do
  fine "${ended[$name]}" || { echo "FAILED: the tests of the part \`$name\`" >&2; status=1; }
done
exit "$status"
