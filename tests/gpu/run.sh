#!/usr/bin/env bash
# run.sh [PYTEST ARGS]   the tests of tests/gpu, in at most 8 minutes, with $PYTHON, which has torch and pytest
#
# Without a CUDA device it says so and succeeds. ORC_GPU_TESTS_ON=cpu runs what has a meaning there, to check the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
for package in torch pytest; do
  "$python" -c "import $package" 2>/dev/null || { echo "test-gpu: $python has no $package, which these tests need" >&2; exit 1; }
done
if [ "${ORC_GPU_TESTS_ON:-cuda}" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo "test-gpu: SKIPPED: torch sees no CUDA device here"
  exit 0
fi
export PYTHONPATH="$PWD/.types${PYTHONPATH:+:$PYTHONPATH}"
exec timeout --kill-after=10 480 "$python" -m pytest -c tests/gpu/pytest.ini --rootdir=tests/gpu --confcutdir=tests/gpu tests/gpu "$@"
