"""Submission through a service: one job for one key, whose it is, and secrets that nobody reads back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served_ledger import Served

from orc.launchers.attempts.records import LogSelector
from orc.launchers.errors import LaunchError, RenderError, SpecError
from orc.launchers.snapshot import runtime_tree
from orc.launchers.spec import LoadedJob
from orc.orchestrator.api.call import Digests
from orc.orchestrator.api.jobs import cancel_job, resubmit_job, submit_job
from orc.orchestrator.clients.errors import JobNotFound, NotAllowed, NotLoggedIn, SnapshotMissing
from orc.orchestrator.clients.http_session import Request, new_key, request_of
from orc.orchestrator.clients.service import ServiceClient
from orc.orchestrator.engine import job_secrets
from orc.orchestrator.ledger import groups
from orc.orchestrator.ledger.groups import GroupRecord

Project = Callable[..., LoadedJob]
SECRET = "hunter2-in-the-clear"


def _request(client: ServiceClient, loaded: LoadedJob, key: str) -> Request:
    view = client.submit(loaded)  # brings the code along
    return request_of(
        submit_job, loaded.spec.model_dump(mode="json"), Digests(view.digests["code"]), "job.yaml", {}, key
    )


def test_the_same_key_is_the_same_job_however_often_and_at_once(served: Served, project: Project) -> None:
    with served.client() as client, served.client() as another, served.client("alan") as alan:
        request = _request(client, project(), "a-key-of-its-own")
        with ThreadPoolExecutor(4) as pool:
            views = list(pool.map(lambda one: one.ask(request), [client, another] * 4))
        assert len({view.id for view in views}) == 1
        assert views[0].owner == "grace"
        alan.submit(project())  # code goes by digest to those who have it
        theirs = alan.ask(request)
        assert (theirs.owner, theirs.id == views[0].id) == ("alan", False)
        other = submit_job(
            client.session, request.body["spec"], Digests(request.body["digests"]["code"]), "", {}, "another-key"
        )
        assert other.id not in (views[0].id, theirs.id)
        client.wait([views[0].id, other.id], timeout_s=120)
        assert client.ask(request).state == "SUCCEEDED"


def test_a_service_reads_its_own_files_for_the_first_job_alone(
    served: Served, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, bundle = [], runtime_tree.runtime_bundle
    monkeypatch.setattr(runtime_tree, "runtime_bundle", lambda **named: reads.append(named) or bundle(**named))
    with served.client() as client:
        jobs = [client.submit(project()) for _ in range(3)]
        assert len({job.digests["runtime"] for job in jobs}) == 1
        client.wait([job.id for job in jobs], timeout_s=120)
    assert len(reads) < 3


def test_a_secret_reaches_its_job_and_nothing_else(
    served: Served, project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("API_KEY", SECRET)
    script = "import os, time\nprint(len(os.environ['API_KEY']), flush=True)\ntime.sleep(600)\n"
    with served.client() as client:
        made = client.submit(project(script, secrets=["API_KEY"]))
        for chunk in client.follow_log(made.id, LogSelector(rank=0)):
            if chunk.data:
                assert chunk.data == f"{len(SECRET)}\n".encode()
                break
        with served.ledger() as ledger, ledger.workspace.ledger.database.read() as connection:
            ((sealed,),) = connection.tuples("SELECT sealed FROM sealed_secrets WHERE job_id = :id", {"id": made.id})
        assert job_secrets.decrypt(served.state_dir, made.id, sealed) == {"API_KEY": SECRET}
        with pytest.raises(job_secrets.DecryptionError):
            job_secrets.decrypt(served.state_dir, "another-aaaaaa", sealed)
        assert (served.state_dir / job_secrets.FILE).stat().st_mode & 0o777 == 0o600
        shown = str(client.job(made.id)) + str(client.events(made.id))
        client.cancel([made.id], grace_s=0)
        (done,) = client.wait([made.id], timeout_s=120)
        shown += str(done) + str(client.events(made.id))
        for again in (client, served.client("ada")):  # no copy of the job has what was sent for the first
            with pytest.raises(SpecError, match="no value was sent for the secret API_KEY"):
                resubmit_job(again.session, made.id, [], {}, new_key())
    assert SECRET not in shown + caplog.text
    database = next(served.state_dir.glob("*.db"), served.state_dir / "ledger.sqlite")
    dump = "\n".join(sqlite3.connect(f"file:{database}?mode=ro", uri=True).iterdump())
    assert made.id in dump
    assert SECRET not in dump
    assert sealed not in dump  # the job has ended
    assert not any(made.id in path.name for path in (served.state_dir / "job-secrets").glob("*"))


def test_what_the_service_itself_knows_is_nobodys_secret(
    served: Served, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with served.client() as client:
        view = client.submit(project())
        spec = {**view.spec, "secrets": ["SERVICES_OWN"]}
        monkeypatch.setenv("SERVICES_OWN", "of the service")  # which runs in this process
        for sent in ({}, {"SERVICES_OWN": ""}):
            with pytest.raises(SpecError, match="no value was sent for the secret SERVICES_OWN"):
                submit_job(client.session, spec, Digests(view.digests["code"]), "", sent, new_key())
        with pytest.raises(SpecError, match="is no secret of the job"):
            submit_job(client.session, view.spec, Digests(view.digests["code"]), "", {"PATH": "x"}, "k" * 8)


def test_keys_rotate_and_a_lost_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cryptography.fernet import Fernet

    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    monkeypatch.setenv(job_secrets.VARIABLE, old)
    sealed = job_secrets.encrypt(tmp_path, "digits-aaaaaa", {"A": SECRET})
    assert SECRET not in sealed
    monkeypatch.setenv(job_secrets.VARIABLE, f"{new},{old}")
    assert job_secrets.decrypt(tmp_path, "digits-aaaaaa", sealed) == {"A": SECRET}
    monkeypatch.setenv(job_secrets.VARIABLE, new)
    with pytest.raises(job_secrets.DecryptionError, match="encrypted with another key"):
        job_secrets.decrypt(tmp_path, "digits-aaaaaa", sealed)
    monkeypatch.delenv(job_secrets.VARIABLE)
    with pytest.raises(job_secrets.DecryptionError, match="no usable key"):
        job_secrets.decrypt(tmp_path, "digits-aaaaaa", sealed)


def test_no_text_of_a_job_is_read_by_a_shell(served: Served, project: Project, tmp_path: Path) -> None:
    evil = f"x'\"; touch {tmp_path}/pwned; $(touch {tmp_path}/pwned) `touch {tmp_path}/pwned` | & > {tmp_path}/pwned \\"
    script = "import os, sys, json\nprint(json.dumps([sys.argv[1:], os.environ['EVIL']]), flush=True)\n"
    with served.client() as client:
        texts = {"args": [evil, "-c", "*"], "env": {"EVIL": evil}, "tags": {"evil": evil}}
        made = client.submit(project(script, **texts))
        (done,) = client.wait([made.id], timeout_s=120)
        assert done.state == "SUCCEEDED", done.reason
        (line,) = b"".join(chunk.data for chunk in client.read_log(made.id, LogSelector(rank=0))).splitlines()
        assert json.loads(line) == [[evil, "-c", "*"], evil]
        assert client.job(made.id).tags == {"evil": evil}
        for wrong in ({"name": evil}, {"cluster": evil}, {"script": f"{evil}.py"}, {"secrets": [evil]}):
            with pytest.raises(LaunchError):
                submit_job(client.session, {**made.spec, **wrong}, Digests(made.digests["code"]), "", {}, "k" * 9)
    assert not (tmp_path / "pwned").exists()


def test_jobs_are_changed_by_their_owner_and_by_admins(served: Served, project: Project) -> None:
    with served.client() as grace, served.client("alan") as alan, served.client("eve") as eve:
        made = grace.submit(project("import time\ntime.sleep(600)\n"))
        with served.ledger() as ledger, ledger.workspace.ledger.transaction() as tx:
            groups.create(tx.connection, GroupRecord("of-alan", "pipeline", "of-alan", "alan", tx.now, None, {}))
            tx.connection.execute("UPDATE jobs SET group_id = 'of-alan' WHERE id = :id", {"id": made.id})  # not his
        for change in (
            lambda client: client.cancel([made.id]),
            lambda client: client.resubmit(made.id),
            lambda client: client.set_tags(made.id, {"a": "b"}),
        ):
            with pytest.raises(NotAllowed):
                change(alan)
            with pytest.raises(NotAllowed):
                change(eve)
        for other in (made.id[:-1], "@last", "of-alan"):  # nothing but the id of a job names one to change
            with pytest.raises(JobNotFound):
                cancel_job(alan.session, other)
        assert eve.job(made.id).owner == "grace"
        with pytest.raises(NotAllowed, match="role user"):
            eve.submit(project())
        with pytest.raises(NotLoggedIn):
            ServiceClient(served.url, "orc_stolen").jobs()
        with served.client("ada") as ada:
            ada.cancel([made.id], grace_s=0)


def test_artefacts_are_taken_by_their_owner_and_by_admins(served: Served, project: Project) -> None:
    leave = "import os, pathlib\npathlib.Path(os.environ['ORC_OUTPUT_MODEL']).write_text(os.environ['TEXT'])\n"
    show = "import os, pathlib\nprint(pathlib.Path(os.environ['ORC_INPUT_DATA']).read_text(), flush=True)\n"

    def shown(client: ServiceClient, job_id: str) -> bytes:
        (done,) = client.wait([job_id], timeout_s=120)
        assert done.state == "SUCCEEDED", done.reason
        return b"".join(chunk.data for chunk in client.read_log(job_id, LogSelector(rank=0)))

    with served.client() as grace, served.client("alan") as alan, served.client("ada") as ada:
        hers, his = (
            one.submit(project(leave, env={"TEXT": text}, outputs={"model": "model.txt"}))
            for one, text in ((grace, "of grace"), (alan, "of alan"))
        )
        refused = f"inputs.data: {hers.id} belongs to grace"
        for named in (hers.id, hers.id[:-1]):
            with pytest.raises(NotAllowed, match=refused):
                alan.submit(project(show, inputs={"data": f"{named}.model"}))
        with pytest.raises(LaunchError) as caught:
            alan.submit(project(show, inputs={"data": "nothing.model"}))
        assert (caught.value.what, caught.value.where) == ("no such job: nothing", "inputs.data")
        own = alan.submit(project(show, inputs={"data": f"{his.id[:-1]}.model"}))  # the start of an id is enough
        assert own.spec["inputs"] == {"data": f"{his.id}.model"}
        assert shown(alan, own.id) == b"of alan\n"
        with pytest.raises(NotAllowed, match=refused):
            alan.resubmit(own.id, overrides=[f"inputs.data={hers.id}.model"])
        with pytest.raises(NotAllowed):
            grace.resubmit(own.id)  # takes what it has taken, too
        assert shown(alan, alan.resubmit(own.id).id) == b"of alan\n"
        admins = ada.resubmit(own.id, overrides=[f"inputs.data={hers.id}.model"])
        assert shown(ada, admins.id) == b"of grace\n"  # not what the first job had collected
        artefact = ada.job(admins.id).digests["input:data"]  # which everybody sees
        taken = {**own.spec, "inputs": {}, "script": None, "command": ["cat", "model.txt"]}
        ask_for = request_of(submit_job, taken, Digests(artefact), "", {}, new_key())
        with pytest.raises(SnapshotMissing) as asked:
            alan.ask(ask_for)
        assert list(asked.value.digests) == [artefact]
        assert shown(ada, ada.ask(ask_for).id) == b"of grace"  # who has collected it, has it
        after = alan.submit(project(depends_on=[hers.id]))
        assert shown(alan, after.id) == b"hello\n"


def test_what_signs_the_functions_of_the_services_account_goes_to_nobody_else(served: Served, project: Project) -> None:
    from orc.orchestrator.functions import calls
    from orc.orchestrator.functions.node import KEY_VARIABLE

    with served.client() as client:
        view = client.submit(project("print('code that is known by its digest')\n"))
        (key,) = calls.new_key(served.state_dir, view.digests["code"]).values()
        with pytest.raises(SpecError, match=f"no value was sent for the secret {KEY_VARIABLE}"):
            resubmit_job(client.session, view.id, [f"secrets=[{KEY_VARIABLE}]"], {}, new_key())
    assert len(key) == 64


def test_a_cluster_that_lends_no_account_refuses_others_jobs(served: Served, project: Project) -> None:
    with (
        served.client() as client,
        pytest.raises(RenderError, match="jobs of grace have no account on the cluster ours"),
    ):
        client.submit(project(cluster="ours"))
    assert "ours" not in {row.cluster for row in served.client().jobs(limit=None)}
