"""What `import orc.runtime` adds to `import torch`, in processes of their own. Budget: 5 ms.

python tests/benchmarks/bench_import.py
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from harness import Row, report

PROGRAM = """
import time
import torch
began = time.perf_counter()
import orc.runtime
flat = time.perf_counter() - began
from orc.runtime import Accelerator
print(flat, time.perf_counter() - began)
"""


def main() -> None:
    """Measure and print."""
    # Byte code is compiled once, as in an installation.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    runs = []
    for _ in range(6):
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, check=True, stdout=subprocess.PIPE, text=True)
        runs.append([float(word) * 1e3 for word in done.stdout.split()])
    flat, accelerator = (statistics.median(column) for column in zip(*runs[1:], strict=True))
    report(
        [
            Row("import orc.runtime", "import torch", flat, None, "ms", None, 5, "ours"),
            Row("from orc.runtime import Accelerator", "import torch", accelerator, None, "ms", None, None),
        ]
    )


if __name__ == "__main__":
    main()
