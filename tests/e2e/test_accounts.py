"""Two users whose jobs run as two accounts of the operating system, behind a real sshd and on a real Slurm."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts_testbed import HostsTestbed
from login_node import LoginNode
from slurm_testbed import SlurmTestbed, eventually

from orc.launchers.attempts.records import LogSelector
from orc.launchers.snapshot.gc import GcReport, GcRequest
from orc.launchers.spec import load_job
from orc.launchers.spec.groups import load_jobs
from orc.orchestrator.client import Client
from orc.orchestrator.clients import groups
from orc.orchestrator.engine.cleanup import collect_at
from orc.orchestrator.views import JobView

SCRIPT = """
import os, pathlib, time
mine = pathlib.Path(os.environ["ORC_JOB_DIR"])
print(os.getuid(), flush=True)
try:
    print(os.listdir(os.environ["OTHER"]), flush=True)
except PermissionError:
    print("refused", flush=True)
while not (mine / "go").exists():
    time.sleep(0.05)
"""
PASSED_ON = """
name: passed
cluster: lab
launcher: python
jobs:
  prepare:
    command: echo 42 > answer
    outputs: {answer: answer}
  use:
    command: cat "$ORC_INPUT_ANSWER"
    resources: {options: {ssh: {hosts: [node2]}}}
    inputs: {answer: prepare.answer}
"""
ARRAY = """
name: many
cluster: lab
launcher: python
command: echo "$ORC_ARRAY_TASK_ID"
array: 1-2
"""


@dataclass
class Account:
    """Account of a user: login, number, and the root of orc's files there."""

    login: str
    uid: int
    root: str


@contextmanager
def described(cluster: dict[str, Any], accounts: dict[str, Account]) -> Iterator[Client]:
    """A client of the cluster ``lab``, on which these users have these accounts."""
    run_as = {user: {"user": one.login, "root": one.root} for user, one in accounts.items()}
    lab = {**cluster, "python": "/usr/bin/python3", "run_as": run_as}
    config = Path(os.environ["ORC_CONFIG_DIR"])
    config.mkdir(parents=True)
    (config / "clusters.yaml").write_text(yaml.safe_dump({"lab": lab}))
    with Client(reconciler=False) as client:
        yield client
        for user in accounts:
            client.workspace.backend_of_user("lab", user).close()


def log(client: Client, job: str) -> str:
    client.refresh([job])
    return b"".join(chunk.data for chunk in client.read_log(job, LogSelector(rank=0))).decode()


def ended(client: Client, job: str) -> JobView:
    """The job once it has ended. `Client.wait` would open connections of its own."""

    def view() -> JobView | None:
        client.refresh()
        return now if (now := client.job(job)).ended else None

    found = eventually(view, timeout_s=120)
    assert found is not None
    return found


def check_that_they_live_apart(client: Client, accounts: dict[str, Account], directory: Path, run: Any) -> None:
    """Run a job of each user; *run* runs a command as an account."""
    directory.mkdir()
    (directory / "train.py").write_text(SCRIPT)
    jobs: dict[str, str] = {}
    other = "/"
    for user, account in accounts.items():
        job = {"name": user, "script": "train.py", "launcher": "python", "cluster": "lab", "env": {"OTHER": other}}
        (directory / "job.yaml").write_text(yaml.safe_dump({**job, "grace": 1}))
        client.workspace.user = user
        jobs[user] = client.submit(load_job(directory / "job.yaml")).id
        eventually(lambda job=jobs[user]: client.refresh([job]) and client.job(job).state == "RUNNING")
        said = eventually(lambda job=jobs[user]: len(lines := log(client, job).split("\n")) > 2 and lines)
        assert int(said[0]) == account.uid
        other = f"{account.root}/jobs/{jobs[user]}"
    assert said[1] == "refused", "the second user cannot look into a job of the first"
    first, second = jobs
    client.cancel([jobs[second]], grace_s=1)
    run(accounts[first], "touch", f"{accounts[first].root}/jobs/{jobs[first]}/go")
    assert [ended(client, job).state for job in jobs.values()] == ["SUCCEEDED", "CANCELLED"]
    for account in accounts.values():
        run(account, "find", account.root, "-exec", "touch", "-h", "-d", "30 days ago", "{}", "+")
    request = GcRequest("", 86400, work=True, ended=frozenset(jobs.values()))
    collected = collect_at(client.workspace, "lab", request)
    removed: dict[str, list[str]] = {}
    for (_, user), found in collected.items():
        if user:
            assert isinstance(found, GcReport)
            removed.setdefault(user, []).extend(found.work)
    assert removed == {user: [job] for user, job in jobs.items()}, "of each account its own jobs"


@pytest.fixture
def colleague(hosts: HostsTestbed) -> Iterator[Account]:
    """A second account on the first two hosts."""
    account = Account("colleague", 7701, "/var/tmp/colleague/orc")
    for name in hosts.names[:2]:
        hosts.run_on(
            name, "useradd", "-u", "7701", "-m", "-d", "/var/tmp/colleague", "-s", "/bin/bash", "-p", "*", "colleague"
        )
        hosts.run_on(name, "cp", "/etc/ssh/authorized_keys/trainer", "/etc/ssh/authorized_keys/colleague")
    yield account
    for name in hosts.names[:2]:
        hosts.run_on(name, "rm", "-f", "/etc/ssh/authorized_keys/colleague")
        hosts.run_on(name, "userdel", "-r", "-f", "colleague", check=False)


def test_jobs_of_two_users_run_as_two_accounts_of_a_host(
    hosts: HostsTestbed, colleague: Account, tmp_path: Path
) -> None:
    accounts = {"ada": Account("trainer", 7700, "/home/trainer/orc"), "grace": colleague}
    options = {"hosts": list(hosts.names[:2]), "slots": 2, "ssh_config": str(hosts.ssh_config)}

    def run(account: Account, *argv: str) -> None:
        hosts.run_on(hosts.names[0], "runuser", "-u", account.login, "--", *argv)

    with described({"kind": "ssh", "options": options}, accounts) as client:
        check_that_they_live_apart(client, accounts, tmp_path / "job", run)
        check_that_files_are_passed_on(client, tmp_path / "job")


def check_that_files_are_passed_on(client: Client, directory: Path) -> None:
    """Run a pipeline, whose first job leaves what its second one takes."""
    (directory / "pipeline.yaml").write_text(PASSED_ON)
    made = groups.submit(client.session, load_jobs(directory / "pipeline.yaml"))
    for member in made.members:
        view = ended(client, member.job.id)
        assert view.state == "SUCCEEDED", view.reason
    assert log(client, made.members[1].job.id) == "42\n"


class SharedLoginNode(LoginNode):
    """A login node on which the account ``nobody`` may log in: it has a shell there."""

    def argv(self, sshd: str) -> list[str]:
        passwd = self.directory / "passwd"
        lines = Path("/etc/passwd").read_text().splitlines()
        mine = [line.rpartition(":")[0] + ":/bin/sh" if line.startswith("nobody:") else line for line in lines]
        passwd.write_text("\n".join(mine) + "\n")
        script = 'mount --bind "$0" /etc/passwd && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(passwd), *super().argv(sshd)]


@pytest.fixture
def shared_login_node(slurm_testbed: SlurmTestbed) -> Iterator[SharedLoginNode]:
    directory = Path(tempfile.mkdtemp(prefix="orc-login-"))  # pytest's are closed to other accounts
    directory.chmod(0o755)
    node = SharedLoginNode(directory)
    node.start()
    yield node
    node.stop()
    node.held.close()
    shutil.rmtree(directory)


def test_jobs_of_two_users_run_as_two_accounts_of_slurm(
    slurm: SlurmTestbed, shared_login_node: SharedLoginNode, tmp_path: Path
) -> None:
    accounts = {}
    for user, (login, uid) in {"ada": ("nobody", 65534), "grace": ("root", 0)}.items():
        home = shared_login_node.directory / login
        home.mkdir(mode=0o700)
        os.chown(home, uid, -1)
        accounts[user] = Account(login, uid, str(home / "orc"))
    accounts = dict(reversed(accounts.items()))  # the second one is not root, who may look everywhere
    options = slurm.cluster_options(query_timeout=20, submit_timeout=30, **shared_login_node.options())

    def run(account: Account, *argv: str) -> None:
        subprocess.run(["setpriv", f"--reuid={account.uid}", "--clear-groups", *argv], check=True)

    with described({"kind": "slurm", "options": options}, accounts) as client:
        check_that_they_live_apart(client, accounts, tmp_path / "job", run)
        check_that_files_are_passed_on(client, tmp_path / "job")
        (tmp_path / "job" / "array.yaml").write_text(ARRAY)
        members = groups.submit(client.session, load_jobs(tmp_path / "job" / "array.yaml")).members
        views = [ended(client, member.job.id) for member in members]
        assert [(view.state, log(client, view.id)) for view in views] == [("SUCCEEDED", "1\n"), ("SUCCEEDED", "2\n")]
        assert len({str(view.attempts[0].native_id).partition("_")[0] for view in views}) == 1, "one array of Slurm"
