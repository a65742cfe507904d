#!/usr/bin/env bash
# orc.runtime over a real torch_xla on the CPU. Opt-in: torch_xla needs a torch of its own version, so this makes an
# environment beside the project's (about 7 GB, minutes), checks the runtime in it and compares what the tests' torch_xla
# is held to. Never a part of `make test`.
#
#   tests/testbed/xla/up.sh           make the environment if it is not there, and check
#   tests/testbed/xla/up.sh --record  also write tests/runtime/xla/recorded.json anew
#   XLA_TESTBED_DIR=/data/xla …       elsewhere than in /tmp/xla-testbed
set -euo pipefail
cd "$(dirname "$0")/../../.."

dir=${XLA_TESTBED_DIR:-/tmp/xla-testbed}
version=${XLA_VERSION:-2.9.0}
python=$dir/venv/bin/python
recorded=tests/runtime/xla/recorded.json

if [ ! -f "$dir/installed-$version" ]; then
  mkdir -p "$dir"
  "${PYTHON:-python3.11}" -m venv --clear "$dir/venv"
  "$python" -m pip install --quiet "torch==$version" "torch_xla==$version" numpy safetensors
  touch "$dir/installed-$version"
fi
make --silent .types/orc/runtime
export PYTHONPATH=$PWD/.types

"$python" tests/testbed/xla/check.py
PJRT_DEVICE=CPU "$python" tests/testbed/xla/record.py >"$dir/recorded.json"
if [ "${1:-}" = --record ]; then
  cp "$dir/recorded.json" "$recorded"
fi
diff "$recorded" "$dir/recorded.json" && echo "ok   $recorded is what torch_xla $version takes"
