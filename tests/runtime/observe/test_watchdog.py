"""Stalls: what counts as one, who is named, and what is left behind."""

import json
import os
import runpy
import signal
import sys
import textwrap
import threading
import time
import traceback

import pytest
import torch

from orc.runtime.core.config import resolve
from orc.runtime.observe.flight_recorder import LastCollective, behind, flight_record, last_collectives
from orc.runtime.observe.watch import StallRules
from orc.runtime.observe.watchdog import Beat, holding_up, late_ranks, summarize, table
from orc.runtime.observe.whereabouts import CallSite, call_site_of, main_call_site

BACKWARD = CallSite("train.py:9 in main", "loss.backward()", "Tensor.backward", "backward")
SYNCHRONIZING = CallSite("train.py:7 in main", "log(loss.item())", "", "synchronize")
READING = CallSite("train.py:5 in main", "x = read()", "", "script")


def beat(rank, position, idle_s=1.0, step_s=0.1, place=BACKWARD):
    return Beat(rank, position[0], position, idle_s, step_s, place)


# ---- decisions


def test_a_rank_is_late_when_it_is_behind_for_many_steps():
    fast, slow = beat(0, (10, 12), idle_s=9), beat(1, (10, 11), idle_s=9)
    assert late_ranks([fast, slow], factor=20) == [1]
    assert late_ranks([fast, slow], factor=100) == []  # 9 s are not 100 steps of 0.1 s


def test_nobody_is_late_while_all_are_at_the_same_place():
    """An evaluation, say: long, but the same for everybody."""
    assert late_ranks([beat(0, (10, 11), idle_s=900), beat(1, (10, 11), idle_s=900)], factor=2) == []


def test_a_few_seconds_are_never_late():
    beats = [beat(0, (10, 12), idle_s=2, step_s=1e-4), beat(1, (10, 11), idle_s=2, step_s=1e-4)]
    assert late_ranks(beats, factor=2) == []
    assert late_ranks(beats, factor=2, floor_s=1) == [1]


def test_lateness_needs_to_know_how_long_a_step_takes():
    assert late_ranks([beat(0, (2, 2), 90, None), beat(1, (1, 1), 90, None)], factor=2) == []


@pytest.mark.parametrize(
    ("beats", "expected"),
    [
        ({0: beat(0, (5, 6)), 1: None}, [1]),
        ({0: beat(0, (5, 7)), 1: beat(1, (5, 6)), 2: beat(2, (5, 7))}, [1]),
        ({0: beat(0, (5, 6)), 1: beat(1, (5, 6), place=READING)}, [1]),
        ({0: beat(0, (5, 6)), 1: beat(1, (5, 6))}, []),
        ({0: beat(0, (5, 6), place=READING), 1: beat(1, (5, 6), place=READING)}, []),
        ({0: beat(0, (5, 6), place=SYNCHRONIZING), 1: beat(1, (5, 6), place=READING)}, [1]),
        ({0: None, 1: None}, []),
    ],
    ids=["silent", "behind", "not waiting", "all wait", "all busy", "others wait for their device", "all silent"],
)
def test_the_rank_that_holds_the_others_up_is_told_from_the_rest(beats, expected):
    assert holding_up(beats) == expected


def issued(*groups):
    return {f"nccl group {name} [0, 1, 2]": LastCollective(number, "all_reduce", done) for name, number, done in groups}


def waiting(rank, collectives, position=(5, 6)):
    return Beat(rank, position[0], position, 60.0, 0.1, SYNCHRONIZING, collectives)


def test_of_ranks_that_all_wait_for_their_device_the_one_with_the_fewest_collectives_is_named():
    beats = {rank: waiting(rank, issued(("0", 41 if rank == 1 else 42, rank == 1))) for rank in range(3)}
    assert holding_up(beats) == [1]
    said = summarize("stalled", 60, beats)
    assert said.count("; rank") == 1
    assert said.endswith("(synchronize), having issued 41 collectives of nccl group 0 [0, 1, 2] where others have 42")
    lines = table(beats)
    assert "collective 42 of nccl group 0 [0, 1, 2] (all_reduce, not done)" in lines[0]
    assert "collective 41 of nccl group 0 [0, 1, 2] (all_reduce)   <- the others wait" in lines[1]


def test_collectives_count_more_than_steps_which_a_rank_takes_before_its_device_has():
    """Rank 0 prints nothing, so it has run ahead of its device; 1 and 2 wait for the loss of a step that 2 has left."""
    beats = {
        0: waiting(0, issued(("0", 50, False)), (7, 8)),
        1: waiting(1, issued(("0", 42, False))),
        2: waiting(2, issued(("0", 41, True))),
    }
    assert holding_up(beats) == [2]


def test_a_rank_that_waits_in_one_group_is_not_blamed_for_its_other_groups():
    members = {0: issued(("tp", 9, False), ("dp", 4, True)), 1: issued(("tp", 8, True)), 2: issued(("dp", 5, False))}
    assert list(behind(members)) == [1]
    both = {0: issued(("dp", 4, False)), 1: issued(("dp", 5, False))}
    assert behind(both) == {0: ("nccl group dp [0, 1, 2]", 4, 5)}  # it is all that there is to say


DUMP = {
    "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}},
    "entries": [
        {"process_group": ["0", "default_pg"], "collective_seq_id": 6, "is_p2p": False, "state": "completed",
         "retired": True, "profiling_name": "nccl:broadcast"},
        {"process_group": ["0", "default_pg"], "collective_seq_id": 7, "is_p2p": False, "state": "scheduled",
         "retired": False, "profiling_name": "nccl:all_reduce"},
        {"process_group": ["0", "default_pg"], "collective_seq_id": 7, "is_p2p": True, "state": "scheduled",
         "retired": False, "profiling_name": "nccl:send 0->1"},
    ],
}  # fmt: skip


def test_the_last_collective_of_a_group_is_that_of_its_members():
    assert last_collectives(DUMP) == {"nccl group 0 [0, 1]": LastCollective(7, "all_reduce", False)}
    assert last_collectives(None) == {}


def test_collectives_of_nccl_and_of_gloo_are_counted_apart_though_they_have_one_group(monkeypatch):
    beside = {**DUMP["entries"][0], "profiling_name": "gloo:barrier", "collective_seq_id": 3, "time_created_ns": 5}
    for name, entries in (("nccl", DUMP["entries"]), ("fr", [beside])):
        dump = json.dumps({**DUMP, "entries": entries})
        monkeypatch.setattr(
            torch._C._distributed_c10d, f"_dump_{name}_trace_json", lambda dump=dump: dump, raising=False
        )
    assert last_collectives(flight_record()) == {
        "nccl group 0 [0, 1]": LastCollective(7, "all_reduce", False),
        "gloo group 0 [0, 1]": LastCollective(3, "barrier", True),
    }
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", lambda: "{}")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", lambda: '{"entries": []}')
    assert flight_record() is None


def test_the_summary_names_step_rank_and_line():
    beats = {0: beat(0, (5, 6)), 1: beat(1, (5, 6), place=READING)}
    assert summarize("stalled", 60.2, beats) == (
        "stalled: no step for 60 s at step 5; rank 1 is at train.py:5 in main: x = read()"
    )
    beats[1] = None
    assert "rank 1 gives no answer" in summarize("stalled", 60, beats)


def test_an_answer_survives_its_way_through_the_store():
    for one in (beat(3, (5, 6, 0)), waiting(3, issued(("0", 7, False)))):
        assert Beat.from_json(one.to_json()) == one


@pytest.mark.parametrize(
    ("settings", "in_job", "expected"),
    [
        ({}, False, (None, None, False)),
        ({}, True, (1800.0, None, False)),
        ({"stall_timeout_s": 60}, False, (60.0, None, True)),
        ({"stall_timeout_s": 60, "stall_action": "warn"}, True, (60.0, None, False)),
        ({"stall_timeout_s": 0}, True, (None, None, True)),
        ({"stall_factor": 20}, False, (None, 20.0, False)),
    ],
)
def test_rules_follow_from_the_configuration(settings, in_job, expected):
    rules = StallRules.of(resolve(settings, {}), in_job)
    assert (rules.timeout_s, rules.factor, rules.ends) == expected


@pytest.mark.parametrize(("limit", "expected"), [(600.0, 540.0), (7200.0, 1800.0), (None, 1800.0)])
def test_a_stall_is_reported_before_the_collectives_time_out(limit, expected):
    assert StallRules.of(resolve({}, {}), True, limit).timeout_s == expected
    assert StallRules.of(resolve({"stall_timeout_s": 700}, {}), True, limit).timeout_s == 700.0
    assert StallRules.of(resolve({}, {}), False, limit).timeout_s is None


def test_where_a_process_is_names_the_script_s_line():
    place = main_call_site()
    assert place.where.startswith(f"{__file__}:")
    assert place.line == "place = main_call_site()"
    assert place.activity == "script"


@pytest.mark.parametrize(
    ("line", "activity"),
    [
        ("loss.item()", "synchronize"),
        ("print(1 + loss.item(), str(loss))", "synchronize"),
        ("loss.synchronize(\n    *(),\n)", "synchronize"),
        ("if loss: pass", "synchronize"),
        ("loss.read()", "script"),
        ("loss.read(int(True), float(-1))", "script"),
    ],
)
def test_a_call_into_c_that_waits_for_the_device_is_told_from_others(line, activity, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"def main(loss):\n{textwrap.indent(line, '    ')}\n")
    names = {}
    exec(compile(script.read_text(), script, "exec"), names)
    lock, deadline = threading.Lock(), time.monotonic() + 30
    lock.acquire()  # a method in C: Python has no frame for it
    loss = type("Loss", (), dict.fromkeys(("item", "synchronize", "read", "__bool__"), lock.acquire))()
    thread = threading.Thread(target=names["main"], args=(loss,))
    thread.start()
    try:
        while (frame := sys._current_frames()[thread.ident]).f_code.co_name != "main":
            pass
        place = call_site_of(frame)
        while place.activity != activity and time.monotonic() < deadline:  # the thread is on its way into the call
            place = call_site_of(sys._current_frames()[thread.ident])
        assert place.activity == activity
        assert place.where == f"{script}:2 in main"
    finally:
        lock.release()
        thread.join()


# ---- whole processes

# Limits on stalls are of seconds, far above what a busy machine takes away from a process that is getting on.
SCRIPT = """
    import os, signal, sys, time
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from orc.runtime import Accelerator

    def until(*ranks):  # have reported where they are
        folder = os.path.join(os.environ["ORC_ATTEMPT_DIR"], "node-0")
        while not all(os.path.exists(os.path.join(folder, f"stall-{rank}.json")) for rank in ranks):
            time.sleep(0.05)

    def first_step():  # it imports much, which is no stall
        parameter = torch.ones(1, requires_grad=True)
        parameter.sum().backward()
        torch.optim.SGD([parameter]).step()

    first_step()
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(3, 1)
    data = DataLoader(TensorDataset(torch.randn(400, 3)), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), data)
    for index, (x,) in enumerate(loader):
        accelerator.backward(model(x).mean())
        optimizer.step()
        if index < 20:
            time.sleep(PACE)
        if index == 20 and accelerator.process_index == CULPRIT % accelerator.num_processes:
            HANG
    accelerator.end_training()
    print("the end")
"""


def run_script(script, env, errors):
    """The life of a process that `python script` would start, after its imports; never returns."""
    import atexit
    import threading

    status = 1
    try:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        for name in [name for name in os.environ if name.startswith(("ORC_", "ACCELERATE_"))]:
            del os.environ[name]
        os.environ.update(env)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(status)


def run_scripts(script, envs, errors, culprit, kills_it):
    """Statuses of as many processes, of which *culprit* hangs."""
    pids = []
    for env, file in zip(envs, errors, strict=True):
        pid = os.fork()
        if pid == 0:
            run_script(script, env, file)
        pids.append(pid)
    hanging = pids[culprit]
    statuses = {}
    for pid in [pid for pid in pids if pid != hanging] + [hanging]:
        if kills_it and pid == hanging:
            os.kill(pid, signal.SIGKILL)
        statuses[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [statuses[pid] for pid in pids]


@pytest.fixture
def launch(tmp_path, run_ranks):
    """``launch(hang, world_size, **env)`` runs the script in a simulated job; per rank (status, stderr).

    The last rank hangs, or *culprit*. With *kills_it* that one is killed when the others have ended. All are forked
    from a process that has imported torch.
    """
    (tmp_path / "a1" / "node-0").mkdir(parents=True)

    def run(hang, world_size=1, port=0, pace=0, culprit=-1, kills_it=False, **env):
        script = tmp_path / "train.py"
        source = textwrap.dedent(SCRIPT).replace("HANG", hang).replace("PACE", str(pace))
        script.write_text(source.replace("CULPRIT", str(culprit)))
        base = {"ORC_JOB_DIR": str(tmp_path), "ORC_ATTEMPT_DIR": str(tmp_path / "a1"), **env}
        own = [
            {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            for rank in range(world_size)
        ]
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        envs = [base | meeting | {name: str(value) for name, value in one.items()} for one in own]
        errors = [tmp_path / f"rank-{rank}.err" for rank in range(world_size)]
        words = [str(script), envs, [str(file) for file in errors], culprit, kills_it]
        [statuses] = run_ranks(1, run_scripts, *words, timeout=150)
        return [(status, file.read_text()) for status, file in zip(statuses, errors, strict=True)]

    return run


def stall_file(tmp_path, rank):
    return json.loads((tmp_path / "a1" / "node-0" / f"stall-{rank}.json").read_text())


@pytest.mark.distributed
def test_every_rank_says_which_rank_is_where_and_ends(launch, tmp_path, free_port):
    ends = launch("time.sleep(600)", 2, free_port(), ORC_STALL_TIMEOUT_S="6")
    assert ends[1][0] == 79
    assert ends[0][0] in (79, 1)  # it ends later, or its collective fails when the other one has gone
    for rank, (_, errors) in enumerate(ends):
        assert f"orc: rank {rank}: stalled: no step for" in errors
        held, culprit = (next(line for line in errors.splitlines() if f"  rank {r}:" in line) for r in (0, 1))
        assert "step 21" in held
        assert "backward" in held
        assert "time.sleep(600)" in culprit
        assert culprit.endswith("   <- the others wait for this one")
        assert f"orc: all threads of rank {rank}:" in errors
        assert 'train.py", line' in errors  # faulthandler
        report = stall_file(tmp_path, rank)
        assert report["waiting_for"] == [1]
        assert "rank 1 is at" in report["summary"]
        assert any("train.py" in frame for stack in report["stacks"] for frame in stack["frames"])


@pytest.mark.distributed
def test_the_rank_without_a_collective_that_the_others_have_issued_is_named_and_all_are_on_record(
    launch, tmp_path, free_port
):
    """As under NCCL: the call has returned, and the others wait for their device, in C, at the same step."""
    hang = (
        "from threading import Lock; lock = Lock(); lock.acquire(); lock.acquire()\n"
        "    elif index == 20:\n"
        "        torch.distributed.all_reduce(torch.ones(1), async_op=True)\n"
        "        from threading import Lock; item = Lock().acquire; item(); item()"
    )
    launch(hang, 2, free_port(), ORC_STALL_TIMEOUT_S="6")
    for rank in range(2):
        report = stall_file(tmp_path, rank)
        assert report["waiting_for"] == [1]
        assert "having issued" in report["summary"]
        answers = [entry["answer"]["collectives"] for entry in report["ranks"]]
        numbers = [next(iter(issued.values()))["number"] for issued in answers]
        assert numbers[0] == numbers[1] + 1
        last = report["flight_recorder"]["entries"][-1]
        assert (last["collective_seq_id"], last["retired"]) == (numbers[rank], rank == 1)
        assert any("train.py" in frame for stack in report["stacks"] for frame in stack["frames"])


@pytest.mark.distributed
def test_a_rank_that_gives_no_answer_is_named_and_the_others_end_with_their_own_status(launch, tmp_path, free_port):
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    (status, _), _ = launch(stopped, 2, free_port(), kills_it=True, ORC_STALL_TIMEOUT_S="4")
    assert status == 79  # although it waited for an answer longer than a blocked interpreter is waited for
    assert "rank 1 gives no answer" in stall_file(tmp_path, 0)["summary"]


@pytest.mark.distributed
def test_rank_0_that_serves_the_store_is_named_when_it_gives_no_answer(launch, tmp_path, free_port):
    stopped = "os.kill(os.getpid(), signal.SIGSTOP)"
    _, (status, _) = launch(stopped, 2, free_port(), culprit=0, kills_it=True, ORC_STALL_TIMEOUT_S="4")
    assert status == 79
    assert "rank 0 gives no answer" in stall_file(tmp_path, 1)["summary"]


def test_a_single_process_that_hangs_ends_with_its_own_status(launch, tmp_path):
    [(status, errors)] = launch("time.sleep(600)", ORC_STALL_TIMEOUT_S="5")
    assert status == 79
    assert "time.sleep(600)" in stall_file(tmp_path, 0)["summary"]
    assert errors.rstrip().splitlines()[-1].startswith("orc: rank 0 ends with status 79: stalled: no step for")


def test_a_warning_lets_the_run_go_on_and_is_taken_back(launch, tmp_path):
    [(status, errors)] = launch("until(0)", ORC_STALL_TIMEOUT_S="3", ORC_STALL_ACTION="warn")
    assert status == 0
    assert errors.count("stalled: no step") == 1
    assert "orc: rank 0 goes on at step" in errors
    assert not (tmp_path / "a1" / "node-0" / "stall-0.json").exists()


def test_a_warning_is_taken_back_also_when_the_run_ends_before_the_next_look(launch, tmp_path):
    blind = "from orc.runtime.observe import watch; next(iter(watch._known.values()))._poll_s = 600"
    hang = f"until(0); {blind}; time.sleep(1.5)"  # the look that is under way finds nothing new
    [(status, errors)] = launch(hang, ORC_STALL_TIMEOUT_S="3", ORC_STALL_ACTION="warn")
    assert status == 0
    assert errors.count("stalled: no step") == 1
    assert "orc: rank 0 goes on at step" in errors
    assert not (tmp_path / "a1" / "node-0" / "stall-0.json").exists()


def test_an_interpreter_that_is_blocked_is_dumped_and_ended(launch):
    """Code in C that keeps the interpreter's lock stops every thread of Python, the watch included."""
    hang = "import ctypes; ctypes.PyDLL(None).sleep(600)"
    [(status, errors)] = launch(hang, ORC_STALL_TIMEOUT_S="1")
    assert status == 1
    assert "Timeout (0:00:00" in errors
    assert "train.py" in errors


def test_work_between_steps_counts_as_progress(launch):
    """Batches of a loader that is not trained on, saving: none of it is a stall."""
    hang = "[time.sleep(0.02) for _ in zip(range(300), accelerator.prepare(DataLoader(range(300))))]"
    [(status, errors)] = launch(hang, ORC_STALL_TIMEOUT_S="4", ORC_STALL_ACTION="warn")
    assert (status, "stalled" in errors) == (0, False)


@pytest.mark.distributed
def test_a_late_rank_is_reported_and_the_run_goes_on(launch, free_port):
    ends = launch("until(0, 1)", 2, free_port(), pace=0.25, ORC_STALL_FACTOR="3", ORC_METRICS="no")
    assert [status for status, _ in ends] == [0, 0]
    for _, errors in ends:
        assert errors.count("late: no step on some ranks") == 1
        assert "rank 1 is at" in errors


def test_nothing_runs_where_nothing_is_configured(monkeypatch):
    import threading

    from torch import nn, optim
    from torch.utils.data import DataLoader

    from orc.runtime import Accelerator
    from orc.runtime.core.context import reset_default

    for name in ("RANK", "WORLD_SIZE", "ORC_ATTEMPT_DIR", "ORC_JOB_DIR"):
        monkeypatch.delenv(name, raising=False)
    reset_default()
    before = set(threading.enumerate())
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 1)
    _, _, loader = accelerator.prepare(model, optim.SGD(model.parameters()), DataLoader(range(3)))
    started = set(threading.enumerate()) - before
    assert not [thread for thread in started if thread.name in ("orc-watch", "orc-notices")]
    assert loader.meter is None
    events = accelerator.events
    assert (events.on_backward, events.on_clip, events.before_step, events.on_step) == ((), (), (), ())
