"""What a job that has not ended waits for: no state stands alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orc.orchestrator.cli.ui.jobtext import headline, situation
from orc.orchestrator.views import AttemptView, JobView

ATTEMPT = AttemptView(1, "orc-d-a1", "PREPARED", None, "", None, (), None, None, None, 0, {}, None)
JOB = JobView("d", "d", "lab", "ssh", "PREPARED", "", 0.0, 0.0, None, None, None, {}, {}, {}, "", (ATTEMPT,))


@pytest.mark.parametrize(
    ("state", "reason", "attempt", "said"),
    [
        ("PREPARED", "", {}, "about to be sent to lab"),
        ("PREPARED", "waiting for n1: no answer", {}, "waiting for n1: no answer"),
        ("SUBMITTING", "", {"state": "SUBMITTING", "submitted_at": 0.0}, "being sent to lab"),
        ("SUBMITTING", "", {"state": "SUBMITTING", "submitted_at": 86400.0}, "being sent to lab since 1970-01-0"),
        ("SUBMITTING", "", {"state": "AMBIGUOUS"}, "being looked for on lab: its submission was cut off"),
        ("PENDING", "", {}, "lab has it and has not started it yet"),
        ("PENDING", "", {"reason": "Priority"}, "Priority"),
        ("RUNNING", "", {"progress": {"step": 3}}, "step 3"),
        ("RUNNING", "cannot reach lab: no answer", {}, "cannot reach lab: no answer"),
    ],
)
def test_a_job_that_has_not_ended_says_what_it_waits_for(state, reason, attempt, said):
    job = replace(JOB, state=state, reason=reason, attempts=(replace(ATTEMPT, **attempt),))
    assert situation(job).startswith(said)
    assert headline(job).startswith(f"d  {state}  {said}")


def test_a_retry_says_when_it_runs_again_and_a_headline_which_attempt_it_is():
    job = replace(JOB, state="QUEUED", reason="waiting to run again after boom", next_attempt_at=86400.0)
    assert situation(job).startswith("waiting to run again after boom, at 1970-01-0")
    assert headline(replace(job, attempts=(ATTEMPT, replace(ATTEMPT, number=2)))).startswith("d  QUEUED  attempt 2  ")
