"""One meaning per failure of a Slurm command, shown with programs that answer the way Slurm does."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from slurm_testbed import eventually

from orc.launchers.backends.slurm.backend import SlurmBackend
from orc.launchers.backends.slurm.client import SlurmClient
from orc.launchers.backends.slurm.options import SlurmSettings
from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable
from orc.launchers.remote import transport
from orc.launchers.remote.transport import LocalTransport
from orc.launchers.spec.clusters import Cluster


class Programs:
    """A directory of stand-ins for sbatch, squeue and so on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.calls = directory / "calls"

    def say(self, name: str, *, out: str = "", err: str = "", status: int = 0, before: str = "") -> None:
        path = self.directory / name
        lines = [
            "#!/bin/sh",
            f'echo "{name} $*" >>{self.calls}',
            before,
            f'cat <<"OUT"\n{out}\nOUT',
            f'cat >&2 <<"ERR"\n{err}\nERR',
            f"exit {status}\n",
        ]
        path.write_text("\n".join(lines))
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def called(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path)


@pytest.fixture
def client(programs: Programs) -> SlurmClient:
    return SlurmClient(LocalTransport(), SlurmSettings(bin=str(programs.directory)), where="cluster hpc")


@pytest.fixture
def impatient(programs: Programs) -> SlurmClient:
    """For programs that do not answer; those that do may be late on a busy machine."""
    settings = SlurmSettings(bin=str(programs.directory), query_timeout=1.0, submit_timeout=1.0)
    return SlurmClient(LocalTransport(), settings, where="cluster hpc")


def living(group: int) -> list[int]:
    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def sbatch(programs: Programs) -> tuple[str, ...]:
    return (f"{programs.directory}/sbatch", "--parsable", "/a/job.sbatch")


@pytest.mark.parametrize("out", ["123", "123;other-cluster", "123\n"])
def test_the_job_id_is_read(programs: Programs, client: SlurmClient, out: str) -> None:
    programs.say("sbatch", out=out)
    assert client.submit(sbatch(programs)) == "123"


@pytest.mark.parametrize(
    ("said", "what", "hint"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "invalid partition specified: nope; Invalid partition name specified",
            "`sinfo` lists the partitions",
        ),
        (
            "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: "
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "AssocMaxSubmitJobLimit",
            "choose another `account` or `qos`",
        ),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "Invalid qos", "set `qos`"),
        ("sbatch: unrecognized option '--bogus'", "unrecognized option '--bogus'", "under `extra`"),
        ("", "exit status 1 and no message", ""),
    ],
)
def test_a_refusal_is_passed_on_in_slurm_s_words_with_a_hint(
    programs: Programs, client: SlurmClient, said: str, what: str, hint: str
) -> None:
    programs.say("sbatch", err=said, status=1)
    with pytest.raises(BackendError) as caught:
        client.submit(sbatch(programs))
    assert type(caught.value) is BackendError
    assert what in caught.value.what
    assert hint in caught.value.hint
    assert caught.value.where == "cluster hpc"


def test_a_silent_sbatch_is_ambiguous_and_does_not_live_on(
    programs: Programs, impatient: SlurmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = transport._start

    def remember(*words: Any) -> subprocess.Popen[bytes]:
        started.append(start(*words))
        return started[-1]

    monkeypatch.setattr(transport, "_start", remember)
    programs.say("sbatch", before="sleep 600", out="123")
    with pytest.raises(AmbiguousSubmit, match="did not answer within 1 s"):
        impatient.submit(sbatch(programs))
    (group,) = (process.pid for process in started)
    eventually(lambda: living(group) == [])


@pytest.mark.parametrize("out", ["", "Submitted batch job"])
def test_success_without_a_job_id_is_ambiguous(programs: Programs, client: SlurmClient, out: str) -> None:
    programs.say("sbatch", out=out)
    with pytest.raises(AmbiguousSubmit):
        client.submit(sbatch(programs))


def test_a_killed_sbatch_is_ambiguous(programs: Programs, client: SlurmClient) -> None:
    programs.say("sbatch", before="kill -9 $$")
    with pytest.raises(AmbiguousSubmit):
        client.submit(sbatch(programs))


def test_no_slurm_here_is_said(client: SlurmClient, programs: Programs) -> None:
    with pytest.raises(BackendError, match="command not found") as caught:
        client.submit(sbatch(programs))
    assert "login node" in caught.value.hint
    assert not isinstance(caught.value, BackendUnreachable)


def test_a_silent_controller_is_unreachable(programs: Programs, impatient: SlurmClient) -> None:
    programs.say("squeue", before="sleep 600")
    with pytest.raises(BackendUnreachable, match="squeue did not answer within 1 s"):
        impatient.queue(["1"])


def test_a_job_that_the_controller_has_forgotten_is_not_an_error(programs: Programs, client: SlurmClient) -> None:
    programs.say("squeue", err="slurm_load_jobs error: Invalid job id specified", status=1)
    assert client.queue(["99"]) == []


def test_many_jobs_are_asked_for_at_once(programs: Programs, client: SlurmClient) -> None:
    rows = (f"{n}|orc-{n}-a1|RUNNING|1|1|1|30:00|node1|cpu|1|None" for n in range(1, 1001))
    programs.say("squeue", out="\n".join(rows))
    assert len(client.queue(str(n) for n in range(1, 1001))) == 1000
    assert len(programs.called()) == 1


@pytest.mark.parametrize("trouble", [{"status": 1, "err": "sacct: error: Connection refused"}, {"before": "sleep 600"}])
def test_accounting_that_cannot_be_asked_is_none(
    programs: Programs, impatient: SlurmClient, trouble: dict[str, str]
) -> None:
    programs.say("sacct", **trouble)  # type: ignore[arg-type]
    assert impatient.accounted(["1"]) is None


def test_without_sacct_there_is_no_accounting(client: SlurmClient) -> None:
    assert client.accounted(["1"]) is None


def test_accounting_that_is_off_is_not_asked(programs: Programs) -> None:
    programs.say("sacct", out="1|orc-x-a1|COMPLETED|1|1|1|00:30:00|node1|0:0|None assigned")
    client = SlurmClient(LocalTransport(), SlurmSettings(bin=str(programs.directory), accounting=False))
    assert client.accounted(["1"]) is None
    assert programs.called() == []


@pytest.mark.parametrize("said", ["scancel: error: Kill job error on job id 9: Invalid job id specified", ""])
@pytest.mark.parametrize("status", [0, 1, 229])  # with --quiet it exits so and says nothing
def test_cancelling_what_is_gone_is_fine(programs: Programs, client: SlurmClient, said: str, status: int) -> None:
    programs.say("scancel", err=said, status=status)
    client.cancel(["9"])


def test_a_cancellation_that_is_refused_or_dies_is_said(programs: Programs, client: SlurmClient) -> None:
    programs.say("scancel", err="scancel: error: Kill job error on job id 9: Access/permission denied", status=1)
    with pytest.raises(BackendError, match="Access/permission denied"):
        client.cancel(["9"])
    programs.say("scancel", before="kill -9 $$")
    with pytest.raises(BackendError, match="scancel failed"):
        client.cancel(["9"])


def test_cancelling_against_a_dead_controller_is_unreachable(programs: Programs, client: SlurmClient) -> None:
    programs.say("scancel", err="scancel: error: Unable to contact slurm controller (connect failure)", status=1)
    with pytest.raises(BackendUnreachable):
        client.cancel(["9"])


def test_the_user_s_own_slurm_variables_do_not_reach_the_commands(
    programs: Programs, client: SlurmClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SQUEUE_FORMAT", "SBATCH_PARTITION", "SLURM_JOB_ID", "SACCT_FORMAT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm/slurm.conf")
    programs.say("squeue", before=f"env >{programs.directory}/env")
    client.queue(["1"])
    seen = dict(line.split("=", 1) for line in (programs.directory / "env").read_text().splitlines() if "=" in line)
    assert {name for name in seen if name.startswith(("SQUEUE_", "SBATCH_", "SLURM_", "SACCT_"))} == {
        "SLURM_CONF",
        "SLURM_TIME_FORMAT",
    }
    assert seen["SLURM_TIME_FORMAT"] == "%s"


def test_slurm_is_asked_once_how_many_elements_an_array_may_have(programs: Programs) -> None:
    programs.say("scontrol", out="MaxArraySize            = 1001\nMaxJobCount             = 10000")
    backend = SlurmBackend(Cluster(name="hpc", kind="slurm", options={"bin": str(programs.directory)}))
    assert [backend.most_elements() for _ in range(2)] == [1001, 1001]
    assert programs.called() == ["scontrol show config"]
