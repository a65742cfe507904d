"""`orc cancel` says what has happened: who was told, and who was not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from orc.orchestrator.client import Client

from ..conftest import Run


def test_a_job_whose_cluster_is_silent_is_not_called_asked(orc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def job(name: str, cluster: str) -> SimpleNamespace:
        return SimpleNamespace(
            id=name, state="RUNNING", cluster=cluster, ended=False, reason="", attempts=[], to_dict=dict
        )

    def cancel(_client: Client, ids, *, grace_s, on_unreachable):
        on_unreachable({"hpc": "scancel did not answer within 30 s"})
        return [job("far", "hpc"), job("near", "local")]

    monkeypatch.setattr(Client, "resolve", lambda self, given: given)
    monkeypatch.setattr(Client, "cancel", cancel)
    shown = orc("cancel", "far", "near")
    assert shown.out.splitlines() == [
        "far  RUNNING  to be stopped, not told yet; `orc wait` waits for the end",
        "near  RUNNING  asked to stop; `orc wait` waits for the end",
    ]
    assert "scancel did not answer within 30 s" in shown.err
    assert "the wish is kept" in shown.err
