"""``orc launch``: ranks in the foreground of this machine."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polling import until

from orc.launchers.agent.procfs import process_start
from orc.launchers.errors import LaunchError
from orc.launchers.foreground.launch import LocalLaunch, launch

DRIVER = """
import json, sys
from pathlib import Path
from orc.launchers.foreground.launch import LocalLaunch, launch
options = json.loads(sys.argv[1])
if options.get("log_dir"):
    options["log_dir"] = Path(options["log_dir"])
status = launch(LocalLaunch(sys.argv[2:], **options))
assert not {"torch", "subprocess", "asyncio"} & set(sys.modules), "the launcher stays small"
sys.exit(status)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    monkeypatch.chdir(tmp_path)

    def write(source: str) -> str:
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        return "train.py"

    return write


def start(*program: str, environ: dict[str, str] | None = None, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(options), *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environ or {})},
    )


def run(*program: str, **options: Any) -> subprocess.CompletedProcess[str]:
    process = start(*program, **options)
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(program, process.returncode, out, err)


def test_ranks_see_who_they_are_and_arguments_pass_untouched(script):
    done = run(
        script(
            """
            import json, os, sys
            names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT ORC_RESTART".split()
            os.write(1, (json.dumps([sys.argv[1:], {n: os.environ[n] for n in names}, os.getcwd()]) + "\\n").encode())
            """
        ),
        "--lr",
        "0.1",
        "$X 'y'\n",
        nprocs=3,
    )
    assert done.returncode == 0, done.stderr
    lines = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda line: line[1]["RANK"])
    assert [line[1]["RANK"] for line in lines] == ["0", "1", "2"]
    assert [line[1]["LOCAL_RANK"] for line in lines] == ["0", "1", "2"]
    assert {line[1]["WORLD_SIZE"] for line in lines} == {"3"}
    assert {line[1]["MASTER_ADDR"] for line in lines} == {"127.0.0.1"}
    assert all(line[0] == ["--lr", "0.1", "$X 'y'\n"] for line in lines)
    assert {line[2] for line in lines} == {os.getcwd()}
    assert done.stderr == ""


def test_the_runtime_is_importable_and_site_packages_shadows_nothing(script):
    source = """
    import os, sys, orc.runtime
    first = os.environ["PYTHONPATH"].split(os.pathsep)
    print(sorted(os.listdir(first[0])), os.listdir(first[0] + "/orc"), first[1:])
    """
    done = run(script(source), environ={"PYTHONPATH": "/elsewhere", "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "['orc', 'sitecustomize.py'] ['runtime'] ['/elsewhere']\n"


def test_a_bare_interpreter_finds_the_runtime_too(script):
    bare = str(Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}"))
    source = "import sys, orc.runtime.core.config as c; print(sys.prefix == sys.base_prefix, c.KEYS['seed'].name)"
    done = run(script(source), python=bare)
    assert done.stdout == "True seed\n", done.stderr


def test_modules_and_other_programs_can_be_launched(script, tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/__init__.py").touch()
    (tmp_path / "pkg/tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run("pkg.tool", "-m", "x", module=True).stdout == "__main__ ['-m', 'x']\n"
    assert run("sh", "-c", 'echo "$RANK of $WORLD_SIZE $0"', "me", no_python=True).stdout == "0 of 1 me\n"


@pytest.mark.parametrize("nprocs", [1, 3])
def test_the_first_failing_rank_is_named_and_its_status_returned(script, nprocs):
    source = """
    import os, sys, time
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        raise SystemExit(42)
    time.sleep(600)
    """
    done = run(script(source), nprocs=nprocs)
    assert done.returncode == 42
    assert done.stderr == f"orc launch: rank {nprocs - 1} exited with 42\n"


def test_the_first_of_several_ranks_that_fail_while_the_launcher_sleeps_is_named(script, tmp_path):
    source = """
    import os, sys, time
    rank = os.environ["RANK"]
    os.write(1, f"{rank} {os.getpid()}\\n".encode())
    while not os.path.exists(f"go-{rank}"):
        time.sleep(0.01)
    sys.exit(40 + int(rank))
    """
    process = start(script(source), nprocs=2)
    pids = dict(process.stdout.readline().split() for _ in range(2))
    process.send_signal(signal.SIGSTOP)
    for rank in ("1", "0"):
        (tmp_path / f"go-{rank}").touch()
        until(lambda rank=rank: process_start(int(pids[rank])) is None)
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (41, "orc launch: rank 1 exited with 41\n")


def test_a_rank_killed_by_a_signal_gives_128_plus_its_number(script):
    done = run(script("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"))
    assert done.returncode == 128 + signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault")
    assert 'train.py", line 1 in <module>' in done.stderr
    assert done.stderr.endswith("\norc launch: rank 0 was killed by SIGSEGV\n")


def test_the_traceback_is_pythons_own(script):
    source = "def f():\n    raise ValueError('no')\nf()\n"
    path = script(source)
    plain = subprocess.run([sys.executable, path], capture_output=True, text=True)
    done = run(path)
    assert done.stderr == plain.stderr + "orc launch: rank 0 exited with 1\n"


def test_hanging_peers_of_a_failed_rank_are_killed(script):
    source = """
    import os, signal, sys, time
    if os.environ["RANK"] == "1":
        while not os.path.exists("deaf"):
            time.sleep(0.02)
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("deaf", "w").close()
    time.sleep(600)
    """
    assert run(script(source), nprocs=2, grace_s=0.5).returncode == 3  # `run` does not wait for ten minutes


def test_what_the_ranks_put_into_the_background_ends_with_them(script, tmp_path):
    source = """
    import os, subprocess
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    open("pid", "w").write(str(child.pid))
    """
    assert run(script(source)).returncode == 0
    assert process_start(int((tmp_path / "pid").read_text())) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_launcher_reaches_every_rank(script, number):
    source = f"""
    import os, signal, sys, time
    def told(*_):
        os.write(1, b"told\\n")
        sys.exit(9)
    signal.signal({int(number)}, told)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(0.1)
    """
    process = start(script(source), nprocs=2)
    assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert out == "told\n" * 2
    assert process.returncode == 9
    assert err == f"orc launch: stopped by {number.name}\n"


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace(script):
    source = """
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"ready\\n")
    time.sleep(600)
    """
    process = start(script(source), grace_s=0.3)
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


def test_ranks_die_with_a_killed_launcher(script):
    process = start(script("import os, time; os.write(1, b'%d\\n' % os.getpid()); time.sleep(600)"), nprocs=2)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    until(lambda: all(process_start(pid) is None for pid in pids))
    process.communicate()


def test_ctrl_c_interrupts_each_rank_once(script):
    source = """
    import os, time
    try:
        os.write(1, b"ready\\n")
        time.sleep(600)
    except KeyboardInterrupt:
        os.write(1, b"interrupted\\n")
        time.sleep(0.5)
        raise SystemExit(4)
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", DRIVER, json.dumps({"nprocs": 2}), script(source)])
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while data := os.read(terminal, 4096):
            seen += data
    except OSError:  # the terminal is closed with its last process
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert seen.count(b"interrupted") == 2
    assert os.waitstatus_to_exitcode(status) == 4


def test_rank_0_has_the_standard_input_and_the_others_have_none(script):
    source = "import os, sys; os.write(1, (os.environ['RANK'] + repr(sys.stdin.read()) + '\\n').encode())"
    process = start(script(source), nprocs=2)
    out, _ = process.communicate("typed", timeout=60)
    assert sorted(out.splitlines()) == ["0'typed'", "1''"]


def test_with_a_log_directory_output_goes_to_both_places(script, tmp_path):
    source = """
    import os, sys
    os.write(1, b"out of %s\\n" % os.environ["RANK"].encode())
    os.write(2, b"err of %s\\n" % os.environ["RANK"].encode())
    """
    done = run(script(source), nprocs=2, log_dir=str(tmp_path / "logs"))
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["out of 0", "out of 1"]
    assert sorted(done.stderr.splitlines()) == ["err of 0", "err of 1"]
    for rank in range(2):
        text = (tmp_path / f"logs/rank-{rank}.log").read_text()
        assert sorted(text.splitlines()) == [f"err of {rank}", f"out of {rank}"]


def test_failed_ranks_are_all_started_again_as_often_as_allowed(script):
    source = """
    import os
    os.write(1, os.environ["ORC_RESTART"].encode() + b"\\n")
    raise SystemExit(5 if int(os.environ["ORC_RESTART"]) < {} else 0)
    """
    done = run(script(source.format(2)), max_restarts=3)
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "2"])
    assert re.findall(r"restart (\d of \d)", done.stderr) == ["1 of 3", "2 of 3"]
    assert run(script(source.format(9)), max_restarts=1).returncode == 5


def test_variables_of_the_request_win_over_the_environment(script):
    source = "import os; print(os.environ['A'], os.environ['RANK'])"
    done = run(script(source), env={"A": "inner"}, environ={"A": "outer", "RANK": "7"})
    assert done.stdout == "inner 0\n"


def test_each_rank_sees_its_own_of_several_mig_devices(script):
    source = "import os; os.write(1, f\"{os.environ['LOCAL_RANK']}: {os.environ['CUDA_VISIBLE_DEVICES']}\\n\".encode())"
    done = run(script(source), nprocs=2, env={"CUDA_VISIBLE_DEVICES": "MIG-b1,MIG-b2"})
    assert sorted(done.stdout.splitlines()) == ["0: MIG-b1", "1: MIG-b2"]


@pytest.mark.parametrize(("nprocs", "given", "threads"), [(1, None, "all"), (2, None, "1"), (2, "3", "3")])
def test_several_ranks_get_one_thread_each_unless_told_otherwise(script, monkeypatch, nprocs, given, threads):
    monkeypatch.delenv("OMP_NUM_THREADS")
    source = "import os; os.write(1, os.environ.get('OMP_NUM_THREADS', 'all').encode() + b' ')"
    done = run(script(source), nprocs=nprocs, env={"OMP_NUM_THREADS": given} if given else {})
    assert done.stdout.split() == [threads] * nprocs


def test_lines_of_several_ranks_are_not_mixed(script):
    done = run(script("for i in range(3000): print('one', 'two', 'three', i, 'end')"), nprocs=2)
    assert sorted(done.stdout.splitlines()) == sorted([f"one two three {i} end" for i in range(3000)] * 2)


def test_a_script_that_is_missing_together_with_the_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchError, match=r"no such script: x\.py"):
        launch(LocalLaunch(["x.py"]))


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (LocalLaunch(["no-such-script.py"]), "no such script: no-such-script.py"),
        (LocalLaunch([]), "nothing to run"),
        (LocalLaunch(["x"], nprocs=0), "at least one process"),
        (LocalLaunch(["no-such-program"], no_python=True), "cannot start no-such-program"),
        (LocalLaunch(["x"], no_python=True, log_dir=Path("/proc/nowhere")), "log directory"),
    ],
)
def test_what_cannot_be_launched_is_one_clear_error(request_, complaint):
    with pytest.raises(LaunchError, match=complaint):
        launch(request_)


@pytest.mark.distributed
def test_two_ranks_reduce_a_tensor_together(script):
    source = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    os.write(1, b"sum %d\\n" % int(x))
    dist.destroy_process_group()
    """
    done = run(script(source), nprocs=2)
    assert (done.returncode, done.stdout) == (0, "sum 2\n" * 2), done.stderr
