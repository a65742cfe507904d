"""The self-test of ranks: a check that fails on one rank is told with that rank, and the others are still made."""

from __future__ import annotations

import json
import sys


def test_a_check_that_fails_on_one_rank_fails_the_whole(run_ranks, tmp_path):
    def run():
        from orc.runtime import self_test

        def broken(accelerator):
            if accelerator.process_index == 1:
                raise ValueError("lost a sample")
            return "fine here"

        self_test.CHECKS = {"broken": broken, "collectives": self_test.check_collectives}
        sys.argv = ["self_test", "--result", str(tmp_path / "result.json")]
        return self_test.main()

    assert run_ranks(2, run) == [1, 1]
    told = json.loads((tmp_path / "result.json").read_text())
    assert told["ok"] is False
    assert [(check["check"], check["ok"]) for check in told["checks"]] == [
        ("start", True),
        ("broken", False),
        ("collectives", True),
    ]
    assert told["checks"][1]["what"] == "rank 1: ValueError: lost a sample"
