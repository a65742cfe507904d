"""A notice to leave: all ranks stop after the same step, whoever was told."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from orc.runtime import Accelerator
from orc.runtime.checkpoint.format.layout import read_manifest
from orc.runtime.core.context import current_context, reset_default
from orc.runtime.core.store import LocalStore, StoreTimeout
from orc.runtime.preemption.preemption import Preempted, Preemption, PreemptionError

pytestmark = pytest.mark.distributed


STEPS = 2000  # ten seconds at least; an agreement takes one


def train(root, signalled, at=20, uneven=0.0, steps=STEPS):
    """Train until the notice stops the run; the steps done and how it ended. The ranks *signalled* get SIGTERM."""
    os.environ.update(ORC_CHECKPOINT_DIR=root, ORC_ATTEMPT_DIR=root)
    os.makedirs(os.path.join(root, "node-0"), exist_ok=True)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(steps * 2, 3))
    accelerator = Accelerator()
    model = torch.nn.Linear(3, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), DataLoader(data, batch_size=1)
    )
    done = 0
    try:
        for (x,) in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == at and accelerator.process_index in signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005 + uneven * accelerator.process_index)
    except SystemExit as end:
        return done, end.code, str(end)
    return done, None, ""


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)])
def test_all_ranks_save_and_leave_after_the_same_step(tmp_path, run_ranks, signalled):
    ends = run_ranks(2, train, str(tmp_path), signalled)
    (done, code, message), other = ends
    assert other[:2] == (done, code)
    assert code == 75
    assert 20 <= done < STEPS
    assert message == f"preempted after step {done}, saved to {tmp_path}/checkpoint_0"
    manifest = read_manifest(tmp_path / "checkpoint_0")
    assert (manifest.step, manifest.offset) == (done, 2 * done)


def test_ranks_of_different_speed_agree_without_collectives(run_ranks):
    """No all-reduce holds these ranks together, so they are far apart when the notice comes."""

    def tick():
        context = current_context()
        preemption = Preemption(context, poll_s=0.01)
        preemption.install()
        pace = (0.001, 0.004, 0.0005)[context.rank]
        for count in range(1, 100_000):
            if preemption.tick():
                preemption.close()
                return count
            if count == 50 and context.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(pace)
        return None

    stops = run_ranks(3, tick)
    assert len(set(stops)) == 1
    assert stops[0] is not None


def test_a_rank_that_asks_gets_the_same_answer_in_the_same_step(run_ranks):
    def ask():
        context = current_context()
        preemption = Preemption(context, poll_s=0.01)
        preemption.install()
        answers = []
        for count in range(1, 10_000):
            if count == 30 and context.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            answers.append(preemption.due())
            time.sleep(0.005 * (1 + context.rank))  # the notice comes while the answer is acted upon
            stop = preemption.tick()
            assert stop == answers[-1]
            if stop:
                preemption.close()
                return count, answers.index(True)
        return None

    first, second = run_ranks(2, ask)
    assert first is not None
    assert first == second


class Group:
    """The process group of one rank."""


class BusyStore(LocalStore):
    """Of a rank 0 whose interpreter is busy with something else at the first questions."""

    busy = 3

    def check(self, keys):
        if self.busy:
            self.busy -= 1
            raise StoreTimeout("rank 0 has not answered for 60 s")
        return super().check(keys)


def test_a_rank_0_that_was_busy_for_long_is_asked_again():
    store, stops = BusyStore(), {}

    def tick(preemption):
        while not preemption.tick():
            time.sleep(0.005)
        stops[preemption.rank] = preemption.ticks

    env = SimpleNamespace(job=SimpleNamespace(attempt_dir=None))
    contexts = [SimpleNamespace(rank=rank, world_size=2, store=store, env=env, group=Group()) for rank in range(2)]
    both = [Preemption(context, poll_s=0.01, patience_s=20) for context in contexts]
    try:
        for preemption in both:
            preemption.install()
        deadline = time.monotonic() + 20
        while store.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        both[1].signal = signal.SIGTERM
        threads = [threading.Thread(target=tick, args=(preemption,), daemon=True) for preemption in both]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        for preemption in both:
            preemption.close()
    assert len(stops) == 2
    assert len(set(stops.values())) == 1


def test_a_rank_that_is_gone_does_not_hold_the_others_for_ever(run_ranks):
    def stop():
        context = current_context()
        if context.rank == 1:
            return "gone"  # never answers
        preemption = Preemption(context, poll_s=0.01, patience_s=0.5)
        preemption.install()
        preemption.tick()
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            while not preemption.tick():
                time.sleep(0.01)
        except PreemptionError as error:
            preemption.close()
            return str(error)

    assert "waited 0.5 s for the other ranks" in run_ranks(2, stop)[0]


def test_a_run_that_ends_before_the_stop_ends_normally(tmp_path, run_ranks):
    ends = run_ranks(2, train, str(tmp_path), (0,), 40, 0.0, 40)
    assert [(done, code) for done, code, _ in ends] == [(40, None)] * 2


def one_process(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "ORC_ATTEMPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", str(tmp_path))
    reset_default()
    accelerator = Accelerator()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    return accelerator, *accelerator.prepare(model, optimizer, DataLoader(torch.randn(40, 3)))


def test_gradients_that_accumulate_are_finished_first(tmp_path, monkeypatch):
    accelerator, model, optimizer, loader = one_process(tmp_path, monkeypatch)
    accelerator.gradient_accumulation_steps = 4
    previous = signal.getsignal(signal.SIGUSR1)
    batches = 0

    def train():
        nonlocal batches
        for x in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
            batches += 1
            if batches == 9:
                os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Preempted) as end:
        train()
    accelerator._watching.boundary._preemption.close()
    reset_default()
    assert batches == 12
    assert end.value.code == 75
    assert read_manifest(tmp_path / "checkpoint_0").step == 3
    # A launcher that signals the rest when the first rank leaves does not spoil the exit status of this one.
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGUSR1, previous)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_evaluation_is_not_interrupted(tmp_path, monkeypatch):
    accelerator, model, optimizer, loader = one_process(tmp_path, monkeypatch)
    evaluation = accelerator.prepare(DataLoader(torch.randn(6, 3)))
    for count, x in enumerate(loader):
        accelerator.backward(model(x).mean())
        optimizer.step()
        if count == 1:
            break
    os.kill(os.getpid(), signal.SIGTERM)
    assert len(list(evaluation)) == 6
    for x in loader:  # and one that runs within a training step
        accelerator.backward(model(x).mean())
        optimizer.step()
        assert len(list(evaluation)) == 6
        break
    assert accelerator.preempted
    accelerator._watching.boundary._preemption.close()
    reset_default()


def test_earlier_handlers_are_called_too(tmp_path, monkeypatch):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        accelerator, *_ = one_process(tmp_path, monkeypatch)
        preemption = accelerator._watching.boundary._preemption
        preemption.tick()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        assert preemption.signal == signal.SIGTERM
        preemption.close()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)
        reset_default()


def test_a_script_that_is_not_training_ends_as_it_was_asked(run_ranks):
    def leave():
        pid = os.fork()
        if pid == 0:
            preemption = Preemption(current_context())
            preemption.install()
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert run_ranks(1, leave) == [-signal.SIGTERM]


def test_worker_processes_outlive_a_signal_to_the_whole_group(tmp_path, monkeypatch):
    monkeypatch.setenv("ORC_CHECKPOINT_DIR", str(tmp_path))
    gc.collect()  # workers of loaders that other tests have dropped
    others = workers()
    accelerator, model, optimizer, _ = one_process(tmp_path, monkeypatch)
    loader = accelerator.prepare(DataLoader(torch.randn(40, 3), num_workers=1))
    done = 0

    def train():
        nonlocal done
        for x in loader:
            accelerator.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done == 3:
                for pid in workers() - others:
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGUSR1)
                time.sleep(0.1)
            if done == 20:
                assert len(workers() - others) == 1
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Preempted):
        train()
    accelerator._watching.boundary._preemption.close()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    reset_default()
    assert done == 20


def workers():
    import multiprocessing

    return {process.pid for process in multiprocessing.active_children()}


def test_the_watcher_ends_with_the_process(run_ranks):
    def close():
        preemption = Preemption.of(current_context())
        assert Preemption.of(current_context()) is preemption
        names = [thread.name for thread in threading.enumerate()]
        preemption.close()
        return names.count("orc-preemption"), [t.name for t in threading.enumerate()].count("orc-preemption")

    assert run_ranks(2, close) == [(1, 0), (1, 0)]


QUIET = """
import os, sys, time, torch
from torch.utils.data import DataLoader
from orc.runtime import Accelerator
accelerator = Accelerator()
loader = accelerator.prepare(DataLoader(torch.zeros(4)))
list(loader)
accelerator.wait_for_everyone()
if accelerator.process_index == 1:
    time.sleep(1.5)  # the store goes with rank 0
"""


def two_ranks(code, port):
    """Exit status and output of each of two processes."""
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "ORC_USE_CPU": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150)[0] for rank in ranks]
    return list(zip([rank.returncode for rank in ranks], said, strict=True))


def test_ranks_that_outlive_the_store_say_nothing(free_port):
    assert two_ranks(QUIET, free_port()) == [(0, "")] * 2


SLOW_TO_HEAR = """
import os, signal, time, torch
from orc.runtime import Accelerator
from orc.runtime.preemption.preemption import Preemption
from torch.utils.data import DataLoader

agree = Preemption._agree

class Slow:  # an answer of the store takes longer than the other process needs to end
    def __init__(self, store):
        self.set, self.multi_get, self._check = store.set, store.multi_get, store.check
    def check(self, keys):
        time.sleep(5)
        return self._check(keys)

accelerator = Accelerator()
if accelerator.process_index == 1:
    Preemption._agree = lambda self, store: agree(self, Slow(store))
optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
optimizer, loader = accelerator.prepare(optimizer, DataLoader(torch.zeros(20000)))
for index, _ in enumerate(loader):  # nothing holds the ranks together
    optimizer.step()
    time.sleep(0.005)
    if index == 20:
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_the_rank_with_the_store_does_not_leave_before_all_know_where_to_stop(free_port):
    (first, said), (second, more) = two_ranks(SLOW_TO_HEAR, free_port())
    assert (first, second) == (75, 75), said + more
    assert "nothing was saved" in said
