"""Every command works through a service, or says in one error why not, or is about the machine it runs on."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from served_ledger import Served

from orc.launchers.spec import LoadedJob
from orc.orchestrator.cli.main import COMMANDS, HIDDEN, load, main
from orc.orchestrator.clients import logins

Project = Callable[..., LoadedJob]
Run = Callable[..., tuple[int, str, str]]

# How each command is asked; JOB is a job that has ended, FILE a job file.
THROUGH: dict[str, tuple[str, ...]] = {
    "submit": ("FILE", "--json"),
    "resubmit": ("JOB", "--set", "env.LR=3", "--follow"),
    "cancel": ("JOB",),
    "status": ("JOB",),
    "list": ("--limit", "2"),
    "logs": ("JOB",),
    "metrics": ("JOB",),
    "diff": ("JOB", "JOB"),
    "tag": ("JOB", "best=yes"),
    "cost": ("JOB",),
    "wait": ("JOB",),
    "events": ("JOB",),
    "notifications": ("list",),
    "whoami": (),
    "sweep": ("submit", "SWEEP"),
    "array": ("list",),
    "pipeline": ("list",),
    "schedule": ("create", "0 3 * * *", "FILE"),
}
LEDGER: dict[str, tuple[str, ...]] = {
    "top": ("--job", "JOB", "--once"),
    "stacks": ("JOB",),
    "exec": ("JOB", "--", "true"),
    "ssh": ("JOB",),
    "sync": ("--cluster", "local"),
    "gc": (),
    "adopt": (),
    "prune": (),
    "export": ("history.jsonl",),
    "import": ("history.jsonl",),
    "tick": ("--job", "JOB"),
}
MACHINE = {
    *("render", "launch", "run", "init", "config", "merge-weights", "to-fsdp2", "login", "logout", "serve", "token"),
    *("quota", "estimate-memory", "clusters", "hosts", "tpu-config", "test", "env", "doctor", "completion", "schema"),
    *("version", "reconcile"),
}


@pytest.fixture
def orc(served: Served, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """`orc ARGS...` of a shell that is logged in to the service, without a ledger of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(logins.URL_VARIABLE, served.url)
    monkeypatch.setenv(logins.TOKEN_VARIABLE, served.tokens["grace"])

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def ended(served: Served, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that has ended, of grace."""
    from orc.launchers.spec import load_job

    directory = tmp_path_factory.mktemp("ended")
    (directory / "train.py").write_text(
        "import json, os\nprint('hello', flush=True)\n"
        "with open(os.environ['ORC_JOB_DIR'] + '/metrics.jsonl', 'w') as file:\n"
        "    print(json.dumps({'at': 1.0, 'step': 1, 'loss': 2.0, 'attempt': 1}), file=file)\n"
    )
    (directory / "job.yaml").write_text("name: ended\nscript: train.py\nlauncher: python\nenv: {LR: '1'}\n")
    with served.client() as client, pytest.MonkeyPatch.context() as patched:
        patched.setenv("ORC_STATE_DIR", str(directory / "state"))
        made = client.submit(load_job(directory / "job.yaml"))
        (done,) = client.wait([made.id], timeout_s=120)
        assert done.state == "SUCCEEDED", done.reason
    return made.id


def test_no_command_takes_the_ledger_of_this_machine_where_a_service_is_meant() -> None:
    known = {*THROUGH, "queue", *LEDGER, *MACHINE}
    assert known <= set(COMMANDS)
    assert set(HIDDEN) <= {*LEDGER, *MACHINE}
    # A command that is not tried below opens its client with `open_client` or `open_ledger`, which know of services.
    for name in COMMANDS.keys() - known:
        source = inspect.getsource(sys.modules[load(name).callback.__module__])
        assert " import Client" not in source, name
        assert "open_client" in source or "open_ledger" in source, f"name {name} in this file"


@pytest.mark.parametrize("name", THROUGH)
def test_a_command_works_through_the_service(orc: Run, ended: str, project: Project, orc_home: Path, name: str) -> None:
    file = project(env={"LR": "1"}).source_path
    sweep = file.with_name("sweep.yaml")
    sweep.write_text(file.read_text() + "sweep: {grid: {env.LR: [1, 2]}}\n")
    meant = {"JOB": ended, "FILE": str(file), "SWEEP": str(sweep)}
    code, out, err = orc(name, *(meant.get(word, word) for word in THROUGH[name]))
    assert code == 0, out + err
    assert not (orc_home / "state" / "ledger.db").exists()
    if name in ("status", "list", "logs", "events"):
        assert out


def test_groups_and_schedules_are_looked_at_and_changed_through_the_service(
    orc: Run, project: Project, orc_home: Path
) -> None:
    file = project("raise SystemExit(1)\n", name="wide", array="2").source_path
    group = json.loads(orc("array", "submit", str(file), "--json")[1])["id"]
    assert orc("wait", group, "--timeout", "120")[0] == 1
    assert f"array {group}: 2 jobs; 2 FAILED" in orc("array", "status", group[:-1])[1]
    assert "was measured by none of them" in orc("array", "best", group)[2]
    again = json.loads(orc("resubmit", group, "--json")[1])
    assert [member["submissions"] for member in again["members"]] == [2, 2]
    assert json.loads(orc("array", "cancel", group, "--json")[1])["id"] == group
    assert group in orc("array", "list")[1]
    single = project(name="nightly").source_path
    schedule = json.loads(orc("schedule", "create", "0 3 * * *", str(single), "--json")[1])
    assert (schedule["owner"], schedule["enabled"]) == ("grace", True)
    assert json.loads(orc("schedule", "pause", "nightly", "--json")[1])["next_at"] is None
    assert "paused" in orc("schedule", "list")[1]
    assert orc("schedule", "delete", schedule["id"][:-1])[1] == f"deleted {schedule['id']}\n"
    assert not (orc_home / "state" / "ledger.db").exists()


def test_a_queue_is_asked_for_by_the_service(orc: Run) -> None:
    code, _, err = orc("queue", "--cluster", "local")
    assert code == 2
    assert "clusters of kind local have no queue of their own" in err


@pytest.mark.parametrize("name", LEDGER)
def test_a_command_that_cannot_says_why_and_where_it_can(
    orc: Run, served: Served, ended: str, orc_home: Path, name: str
) -> None:
    code, out, err = orc(name, *(ended if word == "JOB" else word for word in LEDGER[name]))
    assert code == 2, out + err
    assert served.url in err
    assert "ORC_SERVICE_URL=local" in err
    assert not (orc_home / "state" / "ledger.db").exists()


def test_a_login_is_kept_for_the_user_alone_until_logout(
    served: Served, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = tmp_path / "token"
    secret.write_text(served.tokens["alan"] + "\n")
    assert main(["login", served.url, "--token-file", str(secret)]) == 2  # others can read it
    secret.chmod(0o600)
    assert main(["login", served.url + "/", "--token-file", str(secret)]) == 0
    assert logins.file().stat().st_mode & 0o777 == 0o600
    capfd.readouterr()
    assert main(["whoami", "--json"]) == 0
    out, err = capfd.readouterr()
    assert json.loads(out) == {"service": served.url, "user": "alan", "role": "user"}
    assert main(["logout"]) == 0
    assert main(["whoami", "--json"]) == 0
    out, more = capfd.readouterr()
    assert '"service": null' in out
    assert served.tokens["alan"] not in out + err + more + logins.file().read_text()
    assert main(["logout"]) == 2


def test_a_token_that_does_not_count_is_not_stored(served: Served, tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("orc_wrong")
    wrong.chmod(0o600)
    assert main(["login", served.url, "--token-file", str(wrong)]) == 2
    assert not logins.file().exists()


@pytest.mark.parametrize("url", ["http://orc.example.org", "http://10.0.0.7:8770", "http://localhost.example.org"])
def test_a_token_does_not_travel_in_the_clear(url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["login", url, "--token-file", str(tmp_path / "none")]) == 2
    assert "the token would travel unencrypted" in capfd.readouterr().err


@pytest.mark.parametrize(
    "url", ["", "orc.example.org", "ftp://orc", "https://ada:pw@orc", "https://orc?x=1", "https://[::1"]
)
def test_what_is_no_url_of_a_service_is_refused(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["login", url]) == 2
    assert "not the URL of a service" in capfd.readouterr().err


def test_a_service_that_is_not_there_is_one_clear_error(
    orc: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(logins.URL_VARIABLE, "http://127.0.0.1:9")
    code, _, err = orc("list")
    assert code == 5
    assert "the service cannot be reached" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["list", "status"])
def test_a_look_through_a_service_is_as_light_as_one_at_the_ledger(
    command: str, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORC_SERVICE_URL", served.url)
    monkeypatch.setenv("ORC_TOKEN", served.tokens["grace"])
    code = f"import sys; from orc.orchestrator.cli.main import main; main([{command!r}]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"asyncio", "httpx", "pydantic", "rich", "sqlalchemy"}
