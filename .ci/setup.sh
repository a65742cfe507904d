#!/usr/bin/env bash
# setup.sh demo|all: make .venv with what the demo needs, or with what the tests need besides. Called by the Makefile; safe
# to run again: what is there stays.
#
#   PYTHON      interpreter to use (default: the first Python >= 3.11 found)
#   PIP_FLAGS   more arguments for pip install, e.g. --extra-index-url https://download.pytorch.org/whl/cpu
set -euo pipefail
cd "$(dirname "$0")/.."
case "${1:-}" in
  demo) extras=runtime,examples what="what the demo needs" takes="about a minute" ;;
  all) extras=dev,runtime,ssh,client,slurm,aws,gcp,k8s,service,examples,docs,programs what="what the tests need" takes="two to three minutes" ;;
  *) echo "usage: $0 demo|all" >&2; exit 2 ;;
esac

say() { printf '[setup] %s\n' "$*"; }
die() { printf '[setup] ERROR: %s\n' "$*" >&2; exit 1; }

suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if command -v "$candidate" >/dev/null && suitable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

apt_install() {
  [ "$(id -u)" = 0 ] || die "missing: $* (as root: apt-get install $*)"
  command -v apt-get >/dev/null || die "missing: $*, and there is no apt-get to install it with"
  say "installing $*"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq -y --no-install-recommends "$@" >/dev/null
}

if ! python=$(find_python); then
  [ -z "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python 3.11 or newer"
  apt_install python3 python3-venv
  python=$(find_python) || die "this system has no Python 3.11 or newer; install one and run: make PYTHON=/path/to/python3"
fi

# An environment of another machine or of a removed Python is of no use.
if [ -e .venv ] && ! suitable .venv/bin/python; then
  say "the Python of .venv is gone or too old, making it anew"
  rm -rf .venv
fi
if [ ! -x .venv/bin/pip ]; then
  # Debian keeps ensurepip, which venv needs, in a package of its own.
  "$python" -c 'import ensurepip, venv' 2>/dev/null || apt_install "python$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv"
  say "making .venv with $python ($("$python" -V))"
  rm -rf .venv
  "$python" -m venv .venv
fi
say "installing orc and $what, in the tested versions ($takes with a fast network)"
failed() { die "a package could not be installed; the lines above say which. Run make again when that is mended: what is there stays"; }
pip=(.venv/bin/python -m pip install -q --disable-pip-version-check)
# torch comes by pip alone, whose settings say from where (the index decides between CPU and CUDA wheels).
# shellcheck disable=SC2086  # PIP_FLAGS is a list of words
"${pip[@]}" ${PIP_FLAGS:-} -c .ci/constraints.txt torch || failed
# uv takes a third of pip's time for hundreds of packages. Its own settings are those of other projects.
if [ -z "${PIP_FLAGS:-}" ] && [ "$1" = all ] && "${pip[@]}" -c .ci/constraints.txt uv; then
  .venv/bin/uv --no-config pip install -q --python .venv/bin/python --compile-bytecode -c .ci/constraints.txt -e ".[$extras]" || failed
else
  # shellcheck disable=SC2086
  "${pip[@]}" ${PIP_FLAGS:-} -c .ci/constraints.txt -e ".[$extras]" || failed
fi
# Byte code now, so that the first commands are as fast as the later ones, also where PYTHONDONTWRITEBYTECODE is set.
.venv/bin/python -m compileall -q launchers orchestrator runtime templates
touch ".venv/.orc-installed-$1" .venv/.orc-installed-demo
say "done"
