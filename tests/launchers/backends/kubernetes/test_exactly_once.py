"""A submission that is cut off at any point: what is found afterwards, and that nothing runs twice or stays behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes_testbed import NAMESPACE, KubernetesTestbed

from orc.launchers.backends.base import Phase
from orc.launchers.backends.kubernetes import KubernetesBackend
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable
from orc.launchers.ids import AttemptId
from orc.launchers.testing.jobs import Job, MakeJob

ONCE = """
import os
fd = os.open(os.path.join(os.environ["ORC_JOB_DIR"], "ran"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
os.write(fd, b"x")
"""


class Killed(BaseException):
    """The process that submits is gone."""


def faults(testbed: KubernetesTestbed, *given: tuple[str, str, str]) -> None:
    """Let the first request of each method and end of its path meet a fault."""
    left = list(given)

    def fault(method: str, path: str) -> str:
        for each in left:
            if method == each[0] and path.partition("?")[0].endswith(each[1]):
                left.remove(each)
                return each[2]
        return ""

    testbed.server.fault = fault


def names(testbed: KubernetesTestbed, resource: str) -> list[str]:
    return [item["metadata"]["name"] for item in testbed.store.list(resource, NAMESPACE)]


@pytest.fixture
def unsent(render: Callable[..., Any], backend_under_test: KubernetesBackend, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job with a secret whose pods have nothing to run: what is sent is all that matters."""
    plan = render({"namespace": NAMESPACE, "image": "orc/python:3"}, secrets=["TOKEN"])
    monkeypatch.setattr(backend_under_test.transport, "write", lambda *_, **__: None)
    return Job(backend_under_test, plan, lambda plan, path: [], {"TOKEN": "geheim"})


def test_an_answer_that_is_lost_is_no_reason_to_start_it_again(
    make_job: MakeJob, kubernetes_testbed: KubernetesTestbed
) -> None:
    job = make_job(ONCE)
    faults(kubernetes_testbed, ("POST", "/jobs", "after"))
    job.submit()
    assert job.submit().wait().phase is Phase.SUCCEEDED
    assert job.read("ran") == b"x"
    sent = [
        body for method, path, body in kubernetes_testbed.server.requests if (method, path[-5:]) == ("POST", "/jobs")
    ]
    assert sent == [job.plan.files[1].content.encode()]  # what `render` shows, byte for byte


@pytest.mark.parametrize("fault", ["before", "500"])
def test_a_request_of_which_nothing_is_known_is_ambiguous_and_can_be_made_again(
    unsent, kubernetes_testbed, fault
) -> None:
    faults(kubernetes_testbed, ("POST", "/jobs", fault))
    with pytest.raises(AmbiguousSubmit):
        unsent.submit()
    assert unsent.backend.find(unsent.plan.marker) is None
    unsent.submit()
    assert unsent.backend.find(unsent.plan.marker) == unsent.handle
    assert names(kubernetes_testbed, "jobs") == names(kubernetes_testbed, "secrets") == [unsent.plan.marker]


def test_nothing_answers_neither_afterwards(unsent, kubernetes_testbed) -> None:
    faults(
        kubernetes_testbed,
        ("POST", "/jobs", "after"),
        ("GET", f"/jobs/{unsent.plan.marker}", ""),
        ("GET", f"/jobs/{unsent.plan.marker}", "503"),
    )
    with pytest.raises(AmbiguousSubmit):
        unsent.submit()
    assert unsent.backend.find(unsent.plan.marker) is not None


def test_killed_between_the_secret_and_the_job_nothing_is_found_and_the_secret_goes_if_it_is_cancelled(
    unsent, kubernetes_testbed, monkeypatch
) -> None:
    backend, create = unsent.backend, unsent.backend.api.create

    def killed(resource: str, body: Any) -> Any:
        if resource == "jobs":
            raise Killed
        return create(resource, body)

    with monkeypatch.context() as patched:
        patched.setattr(backend.api, "create", killed)
        with pytest.raises(Killed):
            unsent.submit()
    assert names(kubernetes_testbed, "secrets") == [unsent.plan.marker]
    assert backend.find(unsent.plan.marker) is None  # it will be submitted again
    assert names(kubernetes_testbed, "secrets") == [unsent.plan.marker]
    assert backend.find(unsent.plan.marker, complete=False) is None
    assert names(kubernetes_testbed, "secrets") == []
    unsent.submit()
    assert names(kubernetes_testbed, "secrets") == names(kubernetes_testbed, "jobs") == [unsent.plan.marker]


def test_killed_after_the_job_it_is_found_and_its_secret_goes_with_it(unsent, kubernetes_testbed, monkeypatch) -> None:
    backend = unsent.backend
    with monkeypatch.context() as patched:
        patched.setattr(
            backend, "_adopt", lambda marker, seen=[]: None if not seen and not seen.append(1) else killed()
        )
        with pytest.raises(Killed):
            unsent.submit()
    assert "ownerReferences" not in kubernetes_testbed.store.get("secrets", NAMESPACE, unsent.plan.marker)["metadata"]
    assert backend.find(unsent.plan.marker) is not None
    backend.api.delete("jobs", unsent.plan.marker)
    assert names(kubernetes_testbed, "secrets") == []


def killed() -> None:
    raise Killed


def test_a_job_of_that_name_that_is_not_this_attempts_is_left_alone(unsent, kubernetes_testbed) -> None:
    unsent.submit()
    change = {"metadata": {"annotations": {"orc-launch/marker": "orc-other-a1"}}}
    kubernetes_testbed.store.patch("jobs", NAMESPACE, unsent.plan.marker, change)
    with pytest.raises(BackendError, match="not this attempt's"):
        unsent.submit()
    assert names(kubernetes_testbed, "jobs") == [unsent.plan.marker]


@pytest.mark.parametrize("verb", ["jobs", "secrets"])
def test_a_request_that_is_refused_leaves_nothing_behind(unsent, kubernetes_testbed, verb) -> None:
    kubernetes_testbed.server.forbidden.add(("create", verb))
    with pytest.raises(BackendError, match=f'cannot create resource "{verb}"') as error:
        unsent.submit()
    assert not isinstance(error.value, (AmbiguousSubmit, BackendUnreachable))
    assert "kind: Role" in error.value.hint
    assert "resources: [jobs], verbs: [create, get, list, delete]" in error.value.hint
    assert names(kubernetes_testbed, "jobs") == names(kubernetes_testbed, "secrets") == []


def test_a_quota_that_is_used_up_leaves_nothing_behind(unsent, kubernetes_testbed) -> None:
    kubernetes_testbed.server.quota["count/jobs.batch"] = 0
    with pytest.raises(
        BackendError, match=r"exceeded quota: compute, requested: count/jobs\.batch=1, used: .*=0, limited"
    ) as e:
        unsent.submit()
    assert "wait until other jobs" in e.value.hint
    assert names(kubernetes_testbed, "secrets") == []
    (finding,) = unsent.backend.preflight(unsent.plan)
    assert finding.level == "error"
    assert "exceeded quota" in finding.what


def test_what_no_live_attempt_needs_is_found_and_removed_and_nothing_else(
    unsent, kubernetes_testbed, monkeypatch
) -> None:
    backend, store = unsent.backend, kubernetes_testbed.store
    unsent.submit()
    for name, labels in (("orc-lone-a1", {"orc-launch/attempt": "orc-lone-a1"}), ("users-own", {})):
        meta = {"name": name, "labels": labels, "annotations": {"orc-launch/marker": name}}
        store.create("secrets", NAMESPACE, {"apiVersion": "v1", "kind": "Secret", "metadata": meta})
    marker = unsent.plan.marker
    assert [(each.native_id, each.why) for each in backend.leftovers({marker}, {"orc-lone-a1"})] == [
        ("secrets/orc-lone-a1", "over")
    ]
    found = backend.leftovers((), {marker, "orc-lone-a1"})
    assert [(each.native_id, each.why) for each in found] == [
        (f"jobs/{marker}", "over"),
        ("secrets/orc-lone-a1", "over"),
    ]
    for each in found:
        backend.sweep(each)
    assert names(kubernetes_testbed, "jobs") == []
    assert names(kubernetes_testbed, "secrets") == ["users-own"]
    assert AttemptId.from_marker(marker).number == 1
