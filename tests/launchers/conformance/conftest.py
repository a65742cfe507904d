"""The backends that must behave the same, and the jobs that show whether they do.

A backend joins with a fixture ``<kind>_backend`` that returns a ready `Backend` and one more entry in `BACKENDS`. Where
its attempts do not lie on a file system of this machine, it joins with a `View` of them too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

import pytest
from hosts_testbed import USER, HostsTestbed
from kubernetes_testbed import KubernetesTestbed
from sagemaker_testbed import SagemakerTestbed, in_containers
from tpu_testbed import Pods

from orc.launchers.backends import open_backend
from orc.launchers.backends.base import (
    Backend,
)
from orc.launchers.backends.sagemaker.names import training_job_name
from orc.launchers.backends.slurm import SlurmBackend
from orc.launchers.backends.ssh import SshBackend
from orc.launchers.backends.tpu import TpuBackend
from orc.launchers.plan import Plan
from orc.launchers.spec.clusters import Cluster, builtin_local
from orc.launchers.testing.fixtures import LAUNCHERS, launcher, make_job, run
from orc.launchers.testing.jobs import View

BACKENDS = [
    "local",
    pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.xdist_group("slurm")]),
    pytest.param("slurm-ssh", marks=[pytest.mark.slurm, pytest.mark.xdist_group("slurm")]),
    pytest.param("ssh", marks=[pytest.mark.hosts, pytest.mark.xdist_group("hosts")]),
    pytest.param("sagemaker", marks=[pytest.mark.xdist_group("sagemaker")]),
    "toy",
    "kubernetes",
    pytest.param("tpu", marks=[pytest.mark.hosts, pytest.mark.xdist_group("hosts")]),
]
# Behind a login node only the way to Slurm is another one: these show everything that goes that way.
REPRESENTATIVE = {
    "slurm-ssh": {
        "test_nothing_is_found_before_the_submission_and_the_attempt_after_it",
        "test_two_submissions_at_the_same_time_run_the_job_once",
        "test_the_job_outlives_the_process_that_submitted_it",
        "test_cancelling_lets_the_ranks_save[slurm-ssh-python]",
        "test_the_next_attempt_finds_the_files_of_the_one_before",
        "test_the_first_failing_rank_is_named_with_its_status_and_traceback[slurm-ssh-python]",
        "test_a_failing_setup_is_a_failed_launch_and_the_script_never_runs",
        "test_arguments_environment_and_secrets_arrive_verbatim[slurm-ssh-python]",
        "test_a_secret_is_in_no_file_once_the_attempt_is_over",
        "test_logs_are_read_by_rank_from_a_byte_offset_and_followed",
        "test_many_attempts_are_polled_in_one_look",
        "test_a_file_of_the_job_is_read_as_the_first_node_has_it_from_any_byte_on",
    },
    # Every test starts containers; what only concerns the agents is shown elsewhere.
    "sagemaker": {
        "test_nothing_is_found_before_the_submission_and_the_attempt_after_it",
        "test_submitting_twice_runs_the_job_once",
        "test_the_job_outlives_the_process_that_submitted_it",
        "test_cancelling_lets_the_ranks_save[sagemaker-torchrun]",
        "test_all_ranks_of_two_nodes_see_who_they_are[sagemaker-python]",
        "test_the_first_failing_rank_is_named_with_its_status_and_traceback[sagemaker-python]",
        "test_a_failing_setup_is_a_failed_launch_and_the_script_never_runs",
        "test_ranks_that_exit_75_were_preempted_and_want_to_run_again[sagemaker-python]",
        "test_arguments_environment_and_secrets_arrive_verbatim[sagemaker-python]",
        "test_a_secret_is_in_no_file_once_the_attempt_is_over",
        "test_logs_are_read_by_rank_from_a_byte_offset_and_followed",
        "test_many_attempts_are_polled_in_one_look",
        "test_progress_that_a_rank_reports_is_seen",
        "test_a_file_of_the_job_is_read_as_the_first_node_has_it_from_any_byte_on",
    },
    # The backend of docs/how-to/add-a-backend.md, from a package of its own: what a backend itself has a part in.
    "toy": {
        "test_nothing_is_found_before_the_submission_and_the_attempt_after_it",
        "test_submitting_twice_runs_the_job_once",
        "test_two_submissions_at_the_same_time_run_the_job_once",
        "test_the_job_outlives_the_process_that_submitted_it",
        "test_cancelling_lets_the_ranks_save[toy-python]",
        "test_cancelling_what_has_ended_changes_nothing",
        "test_a_job_can_be_cancelled_during_its_setup",
        "test_the_next_attempt_finds_the_files_of_the_one_before",
        "test_all_ranks_of_two_nodes_see_who_they_are[toy-python]",
        "test_the_first_failing_rank_is_named_with_its_status_and_traceback[toy-python]",
        "test_a_failing_setup_is_a_failed_launch_and_the_script_never_runs",
        "test_the_time_limit_ends_the_attempt",
        "test_ranks_that_exit_75_were_preempted_and_want_to_run_again[toy-python]",
        "test_arguments_environment_and_secrets_arrive_verbatim[toy-python]",
        "test_a_secret_is_in_no_file_once_the_attempt_is_over",
        "test_logs_are_read_by_rank_from_a_byte_offset_and_followed",
        "test_many_attempts_are_polled_in_one_look",
        "test_a_file_of_the_job_is_read_as_the_first_node_has_it_from_any_byte_on",
    },
    # Its pods share a directory, as the nodes of Slurm do: what the way there has a part in, and what pods are.
    "kubernetes": {
        "test_nothing_is_found_before_the_submission_and_the_attempt_after_it",
        "test_two_submissions_at_the_same_time_run_the_job_once",
        "test_cancelling_lets_the_ranks_save[kubernetes-python]",
        "test_all_ranks_of_two_nodes_see_who_they_are[kubernetes-python]",
        "test_the_first_failing_rank_is_named_with_its_status_and_traceback[kubernetes-python]",
        "test_a_secret_is_in_no_file_once_the_attempt_is_over",
        "test_a_file_of_the_job_is_read_as_the_first_node_has_it_from_any_byte_on",
    },
    # On the workers everything is as on SSH hosts: these show how a job gets there, and back.
    "tpu": {
        "test_nothing_is_found_before_the_submission_and_the_attempt_after_it",
        "test_submitting_twice_runs_the_job_once",
        "test_two_submissions_at_the_same_time_run_the_job_once",
        "test_the_job_outlives_the_process_that_submitted_it",
        "test_cancelling_lets_the_ranks_save[tpu-python]",
        "test_cancelling_what_has_ended_changes_nothing",
        "test_all_ranks_of_two_nodes_see_who_they_are[tpu-python]",
        "test_processes_of_xla_are_told_which_part_of_the_tpu_is_theirs",
        "test_the_first_failing_rank_is_named_with_its_status_and_traceback[tpu-python]",
        "test_a_failing_setup_is_a_failed_launch_and_the_script_never_runs",
        "test_ranks_that_exit_75_were_preempted_and_want_to_run_again[tpu-python]",
        "test_arguments_environment_and_secrets_arrive_verbatim[tpu-python]",
        "test_a_secret_is_in_no_file_once_the_attempt_is_over",
        "test_logs_are_read_by_rank_from_a_byte_offset_and_followed",
        "test_many_attempts_are_polled_in_one_look",
        "test_a_file_of_the_job_is_read_as_the_first_node_has_it_from_any_byte_on",
    },
}
# `local` shows each behaviour with each launcher. On clusters ranks start and meet with each of them (and train, in
# tests/e2e), and the rest is shown with one: both backends and launchers differ in how they start and end ranks, not
# in pairs.
LAUNCHER_ON_CLUSTERS = {
    "test_four_ranks_on_two_nodes_reduce_a_tensor_together": "mpirun",
    "test_cancelling_lets_the_ranks_save": "mpirun",
    "test_cancelling_kills_what_ignores_the_signal_when_the_grace_is_over": "torchrun",
    "test_the_first_failing_rank_is_named_with_its_status_and_traceback": "mpirun",
    "test_a_rank_killed_by_a_signal_is_named_with_the_signal": "torchrun",
    "test_a_program_that_does_not_exist_is_a_failed_launch_or_crash_that_names_it": "mpirun",
    "test_ranks_that_exit_75_were_preempted_and_want_to_run_again": "python",
    "test_the_rank_that_failed_is_named_not_the_ones_that_lost_their_connection_to_it": "torchrun",
    "test_arguments_environment_and_secrets_arrive_verbatim": "mpirun",
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a backend that has them, only the representative tests."""
    kept = [item for item in items if _wanted(item)]
    left_out = [item for item in items if not _wanted(item)]
    if left_out:
        items[:] = kept
        config.hook.pytest_deselected(items=left_out)


def _wanted(item: pytest.Item) -> bool:
    params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    backend, test = params.get("backend_under_test"), getattr(item, "originalname", "")
    if backend in ("ssh", "slurm"):
        return params.get("launcher") in (None, LAUNCHER_ON_CLUSTERS.get(test, params.get("launcher")))
    chosen = REPRESENTATIVE.get(backend)
    return chosen is None or bool(chosen & {item.name, test})


@pytest.fixture
def local_backend() -> Backend:
    return open_backend(builtin_local())


@pytest.fixture
def slurm_backend(slurm_cluster: Cluster) -> Backend:
    # Slurm itself would run a preempted attempt again; its own tests show that.
    options = {**slurm_cluster.options, "requeue": False}
    return open_backend(slurm_cluster.model_copy(update={"options": options}))


@pytest.fixture
def slurm_ssh_backend(login_cluster: Cluster) -> Iterator[Backend]:
    options = {**login_cluster.options, "requeue": False}
    backend = SlurmBackend(login_cluster.model_copy(update={"options": options}))
    yield backend
    backend.close()


@pytest.fixture
def ssh_backend(hosts: HostsTestbed) -> Iterator[Backend]:
    backend = SshBackend(hosts.cluster(slots=8, connect_timeout=30, peer_timeout=60))
    yield backend
    backend.close()


@pytest.fixture
def sagemaker_backend(sagemaker: SagemakerTestbed) -> Iterator[Backend]:
    # Its programs get arguments as the test gives them, named or not.
    options = sagemaker.options(arguments="plain", instance_type="ml.c5.2xlarge")
    backend = open_backend(Cluster(name="sagemaker", kind="sagemaker", options=options))
    yield backend
    backend.close()


@pytest.fixture
def tpu_backend(tpu_pods: Pods) -> Iterator[Backend]:
    # Kept, so that a test can look at the workers' files afterwards.
    backend = TpuBackend(tpu_pods.cluster(on_finish="keep"))
    yield backend
    backend.close()


@pytest.fixture
def kubernetes_backend(kubernetes_testbed: KubernetesTestbed) -> Iterator[Backend]:
    backend = open_backend(kubernetes_testbed.cluster())
    yield backend
    backend.close()


@pytest.fixture
def toy_backend(install_page: Callable[[str], Path], tmp_path: Path) -> Backend:
    install_page("add-a-backend")
    return open_backend(Cluster(name="bench", kind="toy", root=str(tmp_path / "toy")))


@pytest.fixture(params=BACKENDS)
def backend_under_test(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.getfixturevalue(f"{request.param.replace('-', '_')}_backend")
    return backend


@pytest.fixture
def view(backend_under_test: Backend, request: pytest.FixtureRequest) -> View:
    if backend_under_test.kind == "sagemaker":
        jobs: Path = request.getfixturevalue("sagemaker").directory / "jobs"
        return lambda plan, path: in_containers(jobs / training_job_name(plan.attempt), path)
    if backend_under_test.kind == "tpu":
        pods: Pods = request.getfixturevalue("tpu_pods")
        return lambda plan, path: [home / path.relative_to(f"/home/{USER}") for home in pods.homes(plan.marker)]
    if backend_under_test.kind == "kubernetes":
        testbed: KubernetesTestbed = request.getfixturevalue("kubernetes_testbed")
        return lambda plan, path: [testbed.here(path)]
    if backend_under_test.kind != "ssh":
        return lambda plan, path: [Path(path)]
    hosts: HostsTestbed = request.getfixturevalue("hosts")

    def on_hosts(plan: Plan, path: PurePosixPath) -> Sequence[Path]:
        names = [command.host for command in plan.commands if command.host]
        return [hosts.home(name) / path.relative_to(f"/home/{USER}") for name in names]

    return on_hosts


@pytest.fixture(autouse=True)
def _small_stores(bare_runtime: None) -> None:
    """Leave the modules of the runtime out of the stores: no job here uses them, and each brings them to new hosts."""


__all__ = ["BACKENDS", "LAUNCHERS", "launcher", "make_job", "run"]
