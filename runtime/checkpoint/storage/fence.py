"""The fence of a job, seen from a rank: a run that a newer one has replaced commits no checkpoint.

The agent ends such ranks (docs/explanation/agent.md, "Only the newest run trains"). This covers the moment between
their waking up, after the whole machine was stopped, and that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from orc.runtime.checkpoint.errors import CheckpointError
from orc.runtime.launch.environment.orc import job_facts


def refuse_superseded(env: Mapping[str, str] = os.environ) -> None:
    """Raise `CheckpointError` when a newer attempt or restart owns the job of *env*; outside a job, do nothing."""
    job = job_facts(env)
    if job.job_dir is None:
        return
    path = Path(job.job_dir) / "fence.json"
    try:
        owner = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):  # not shared with this machine; or lost by one that crashed
        return
    newest = int(owner.get("attempt", 0)), int(owner.get("restart", 0))
    if newest > (job.attempt, job.restart):
        raise CheckpointError(
            f"attempt {newest[0]}, restart {newest[1]} on {owner.get('host')} owns the job now ({path}); "
            f"this is attempt {job.attempt}, restart {job.restart}, and its checkpoint is not committed"
        )
