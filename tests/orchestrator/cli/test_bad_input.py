"""Bad input: one clear message, a non-zero exit status, and nothing half-made left behind."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Run, tree

JobFile = Callable[..., str]

# name of the case: the job file, what the message says
CASES = {
    "unknown key": ("name: x\nscirpt: a.py\ncommand: 'true'\n", ["job.yaml:2:1", "scirpt", "script"]),
    "unknown nested key": ("name: x\ncommand: 'true'\nresources: {node: 2}\n", ["job.yaml:3:", "node", "nodes"]),
    "wrong type": ("name: x\ncommand: 'true'\nresources: {procs_per_node: many}\n", ["job.yaml:3:", "procs_per_node"]),
    "nothing to run": ("name: x\n", ["script, module, command"]),
    "two things to run": ("name: x\nmodule: m\ncommand: 'true'\n", ["only one of"]),
    "missing script": ("name: x\nscript: absent.py\n", ["job.yaml:2:", "absent.py"]),
    "script outside the workdir": ("name: x\nscript: ../outside.py\n", ["job.yaml:2:", "../outside.py", "workdir"]),
    "script that does not travel": (
        "name: x\nscript: kept.py\nworkdir: {path: ., exclude: [kept.py]}\n",
        ["kept.py", "not part of the snapshot"],
    ),
    "missing workdir": ("name: x\ncommand: 'true'\nworkdir: nowhere\n", ["job.yaml:3:", "nowhere"]),
    "unknown cluster": ("name: x\ncommand: 'true'\ncluster: moon\n", ["moon", "local"]),
    "unknown launcher": ("name: x\ncommand: 'true'\nlauncher: torchrnu\n", ["job.yaml:3:", "torchrnu", "torchrun"]),
    "impossible number of nodes": ("name: x\ncommand: 'true'\nresources: {nodes: 0}\n", ["job.yaml:3:", "nodes"]),
    "impossible range of nodes": ("name: x\ncommand: 'true'\nresources: {nodes: '4:2'}\n", ["job.yaml:3:", "nodes"]),
    "impossible memory": ("name: x\ncommand: 'true'\nresources: {memory: lots}\n", ["job.yaml:3:", "lots"]),
    "impossible time": ("name: x\ncommand: 'true'\nresources: {time: 0}\n", ["job.yaml:3:", "time"]),
    "unknown runtime value": ("name: x\ncommand: 'true'\nruntime: {mixed_precision: f16}\n", ["job.yaml:3:", "f16"]),
    "secret that is not set": ("name: x\ncommand: 'true'\nlauncher: python\nsecrets: [NOT_SET]\n", ["NOT_SET"]),
    "variable that is not set": ("name: x\ncommand: 'true'\nenv: {A: '${env:NOT_SET}'}\n", ["job.yaml:3:", "NOT_SET"]),
    "broken YAML": ("name: x\ncommand: [true\n", ["job.yaml:"]),
    "tabs": ("name: x\n\tcommand: 'true'\n", ["job.yaml:2:"]),
    "not a mapping": ("- name\n", ["job.yaml"]),
    "nothing at all": ("", ["job.yaml"]),
}
AFTER_RENDER = {"secret that is not set"}  # values are looked up when the job is sent


@pytest.fixture(autouse=True)
def used_state(orc: Run, orc_home: Path) -> Iterator[None]:
    """A state directory that has been used; afterwards it holds no job and nothing unfinished."""
    assert orc("list").code == 0
    before = _names(orc_home)
    yield
    assert _names(orc_home) == before
    if not (orc_home / "state" / "ledger.db").read_bytes().startswith(b"rubbish"):
        assert orc("list", "--json").json == {"jobs": []}
        checks = orc("doctor", "--deep", "--json").json["checks"]
        assert [check for check in checks if check["name"] == "snapshots" and check["level"] != "ok"] == []


def _names(home: Path) -> set[str]:
    # Complete snapshots may stay: their names are their contents. Directories of the store, its lock and SQLite's side
    # files come and go; nothing else may, and the store's staging area must be empty.
    complete = tuple(f"state/store/{name}" for name in ("cas/", "trees/", "manifests/", "scan-cache", "lock"))
    names = {name for name in tree(home) if not name.startswith(complete) and not name.endswith(("-wal", "-shm"))}
    return names - {"state/store", "state/store/cas", "state/store/trees", "state/store/manifests", "state/store/tmp"}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("command", ["submit", "render"])
def test_a_bad_job_file_is_refused_with_one_clear_message(
    command: str, case: str, orc: Run, job_file: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "render" and case in AFTER_RENDER:
        assert orc("render", job_file(CASES[case][0])).code == 0
        return
    text, said = CASES[case]
    path = job_file(text)
    Path(path).with_name("kept.py").write_text("")
    monkeypatch.chdir(Path(path).parent)
    result = orc(command, "job.yaml")
    assert (result.code, result.out) == (2, "")
    assert result.err.count("error: ") == 1
    for part in said:
        assert part in result.err
    as_json = orc(command, "job.yaml", "--json")
    assert as_json.err == ""
    assert as_json.error["what"]


@pytest.mark.parametrize(
    "arguments",
    [["wait", "x", "--timeout"], ["cancel", "x", "--grace"], ["launch", "--grace"]],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_time_that_is_none_is_refused(arguments: list[str], value: str, orc: Run) -> None:
    result = orc(*arguments, value, *(["x.py"] if arguments[0] == "launch" else []))
    assert result.code == 2
    assert value in result.err


@pytest.mark.parametrize("command", ["submit", "render"])
def test_a_job_file_that_cannot_be_read_is_named(command: str, orc: Run, place: Path) -> None:
    (place / "folder").mkdir()
    (place / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.yaml", "folder", "binary"):
        result = orc(command, name)
        assert result.code == 2
        assert name in result.err


def test_a_workdir_that_cannot_be_read_is_named(job_file: JobFile, orc_home: Path) -> None:
    path = job_file()
    hidden = Path(path).parent / "hidden"
    hidden.mkdir()
    (hidden / "secret.txt").write_text("x")
    hidden.chmod(0)
    code, err = _without_privileges("submit", path)
    assert code == 2
    assert "hidden" in err
    Path(path).parent.chmod(0o311)
    code, err = _without_privileges("submit", path)
    Path(path).parent.chmod(0o755)
    assert code == 2
    assert "cannot be read" in err or "cannot read" in err


def _without_privileges(*arguments: str) -> tuple[int, str]:
    # Root reads everything because of two capabilities; everything else stays as it is.
    prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "orc.orchestrator.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_a_full_disk_while_bundling_leaves_no_snapshot(orc: Run, orc_home: Path, job_file: JobFile) -> None:
    path = job_file()
    Path(path).with_name("big.bin").write_bytes(os.urandom(1 << 20))
    # A limit on file sizes fails writes in the same place as a full disk, needs no mount, and holds in the child only.
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, 1 << 19))\n"
        "from orc.orchestrator.cli.main import main\n"
        f"sys.exit(main(['submit', {path!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert not list((orc_home / "state" / "store" / "trees").iterdir())


@pytest.mark.parametrize("arguments", [["list"], ["submit"], ["status", "x"], ["wait", "x"], ["cancel", "x"]])
def test_a_damaged_ledger_is_named_and_left_alone(
    arguments: list[str], orc: Run, orc_home: Path, job_file: JobFile
) -> None:
    ledger = orc_home / "state" / "ledger.db"
    for side in ("-wal", "-shm"):
        ledger.with_name(ledger.name + side).unlink(missing_ok=True)
    ledger.write_bytes(b"rubbish" * 1000)
    arguments = [*arguments, job_file()] if arguments == ["submit"] else arguments
    result = orc(*arguments)
    assert result.code == 2
    assert str(ledger) in result.err
    assert "backup" in result.err
    assert ledger.read_bytes() == b"rubbish" * 1000
    assert orc(*arguments, "--json").error["kind"] == "LedgerError"


def test_json_errors_list_the_problems_with_their_places(orc: Run, job_file: Callable[..., str]) -> None:
    path = job_file("name: x\nresorces: {}\ncluster: nowhere\ncommand: 'true'\n")
    first, second = orc("render", path, "--json").error["problems"]
    assert first == {
        "file": path,
        "line": 2,
        "column": 1,
        "key": "",
        "message": "unknown key 'resorces', did you mean 'resources'?",
        "hint": "",
    }
    assert (second["line"], second["column"]) == (3, 10)
    assert "known clusters: local" in second["hint"]
    (alone,) = orc("status", "nobody", "--json").error["problems"]
    assert (alone["file"], alone["line"], alone["column"]) == (None, None, None)


_VERB = re.compile(r"(is|has|was|does|needs|must|cannot|are|takes|wants|may|lies|belongs|names|should)\b")


def _first_words(call: ast.Call) -> str:
    text = call.args[0] if call.args else None
    if isinstance(text, ast.JoinedStr):
        text = text.values[0]
    return text.value if isinstance(text, ast.Constant) and isinstance(text.value, str) else ""


def test_no_error_begins_with_a_verb_without_its_subject() -> None:
    """On a terminal the place stands in a line of its own: `error: is empty` says nothing."""
    rooms = Path(__file__).parents[3]
    raised = [
        (path, node)
        for room in ("launchers", "orchestrator")
        for path in (rooms / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id.endswith("Error")
        # `ValueError` of a key is told with the key's name in front
        and node.func.id not in ("ValueError", "TypeError", "PydanticCustomError")
    ]
    assert len(raised) > 300
    bare = [(path.name, node.lineno, _first_words(node)) for path, node in raised if _VERB.match(_first_words(node))]
    assert [found for found in bare if not found[2].startswith("cannot ")] == []
    assert [found for found in bare if found[2].startswith("cannot be ")] == []
