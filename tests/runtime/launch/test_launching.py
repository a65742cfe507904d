"""Real processes, started as platforms start them: meeting, leaving without a word, and clear errors."""

import contextlib
import hashlib
import io
import os
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orc.runtime.core.environment import LaunchEnvironment
from orc.runtime.core.errors import LaunchError
from orc.runtime.launch.device import _cuda_index, collective_backend, process_group_backend
from orc.runtime.launch.process_group import settle

SCRIPT = """
    import torch
    from orc.runtime import Accelerator
    accelerator = Accelerator()
    total = accelerator.reduce(torch.tensor([accelerator.process_index + 1.0]), "sum")
    accelerator.gather(accelerator.pad_across_processes({"x": torch.ones(accelerator.process_index + 1)}))
    accelerator.check_trigger()
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.wait_for_everyone()
    print(accelerator.ctx.env.platform, accelerator.num_processes, total.item(), flush=True)
"""


def environment(**variables):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ORC_", "ACCELERATE_", "SLURM_", "OMPI_"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1"} | variables


def start(code, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def leave_the_launch():
    """Let this rank be a process that nobody has launched."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]


def outcome(process):
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


@pytest.fixture
def port(free_port):
    """For the processes of this test to meet at."""
    return str(free_port())


@pytest.mark.distributed
def test_processes_meet_and_leave_without_a_word(port):
    ranks = [
        start(SCRIPT, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)
    ]
    for status, out, err in map(outcome, ranks):
        assert (status, out, err) == (0, "torchrun 2 3.0\n", "")


SLURM = {
    "SLURM_PROCID": "{rank}",
    "SLURM_LOCALID": "{rank}",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "localhost",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.mark.distributed
@pytest.mark.parametrize(("platform", "variables"), [("slurm", SLURM), ("openmpi", OPENMPI)])
def test_processes_of_other_platforms_meet(run_ranks, platform, variables):
    def body(variables):
        from orc.runtime import Accelerator

        os.environ.update({name: value.format(rank=os.environ["RANK"]) for name, value in variables.items()})
        leave_the_launch()
        accelerator = Accelerator()
        ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        return accelerator.ctx.env.platform, ranks, accelerator.ctx.local_world_size

    assert run_ranks(2, body, variables) == [(platform, [0, 1], 2)] * 2


def test_one_process_needs_no_process_group(run_ranks):
    def alone():
        leave_the_launch()
        with redirect_stdout(io.StringIO()) as out:
            exec(textwrap.dedent(SCRIPT), {"__name__": "__main__"})
        return out.getvalue(), torch.distributed.is_initialized()

    assert run_ranks(1, alone) == [("single 1 1.0\n", False)]


def test_peers_that_never_come_are_reported_in_time(run_ranks, port):
    def body(port):
        from orc.runtime import Accelerator, InitProcessGroupKwargs

        os.environ.update(WORLD_SIZE="2", MASTER_PORT=port)
        with pytest.raises(LaunchError) as caught:
            Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
        return str(caught.value)

    # By default they are waited for much longer than `run_ranks` waits.
    [said] = run_ranks(1, body, port)
    assert f"rank 0 of 2 could not join its peers at 127.0.0.1:{port} (gloo)" in said


@pytest.mark.distributed
def test_a_failing_rank_ends_at_once_although_its_peer_waits(port):
    code = """
        import torch
        from orc.runtime import Accelerator
        accelerator = Accelerator()
        if accelerator.process_index == 0:
            raise ValueError("no data")
        accelerator.wait_for_everyone()
    """
    ranks = [start(code, RANK=str(r), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for r in range(2)]
    status, _, err = outcome(ranks[0])
    assert status == 1
    assert err.rstrip().endswith("ValueError: no data")
    assert outcome(ranks[1])[0] != 0, "the peer notices that its connection is gone"


@pytest.mark.distributed
def test_a_script_may_end_with_a_collective(port):
    code = """
        import sys, torch
        from orc.runtime import Accelerator
        from orc.runtime.launch import process_group
        settle = process_group.settle
        process_group.settle = lambda: (settle(), print("settled", flush=True))
        sys.setswitchinterval(100)  # gloo's threads get the interpreter's lock late
        accelerator = Accelerator()
        for _ in range(3):
            gathered = accelerator.gather(torch.ones(1000))
    """
    ranks = [start(code, RANK=str(r), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for r in range(2)]
    assert [outcome(rank) for rank in ranks] == [(0, "settled\n", "")] * 2


def compute():
    hashlib.pbkdf2_hmac("sha256", b"any", b"salt", 1_000_000)  # without the interpreter's lock


def come_and_go():
    """As one that is woken for the interpreter's lock and comes too late."""
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        time.sleep(0.0002)


@pytest.mark.parametrize("work", [compute, come_and_go])
def test_the_end_waits_for_threads_of_gloo_that_are_at_work(work):
    began, ended, leave = threading.Event(), threading.Event(), threading.Event()

    def live():
        Path("/proc/thread-self/comm").write_text("pt_gloo_runloop")
        began.set()
        work()
        ended.set()
        leave.wait()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        began.wait()
        settle(limit_s=60)
        assert ended.is_set()
        started = time.monotonic()
        settle(limit_s=60)
        assert time.monotonic() - started < 30, "an idle thread is not waited for"
    finally:
        leave.set()
        thread.join()


def test_gpus_are_dealt_by_local_rank():
    def place(rank, count, local=4):
        return _cuda_index(LaunchEnvironment("test", rank, 4, rank % local, local), count)

    assert [place(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert place(3, 1) == 0, "each process sees its own GPU only"
    with pytest.raises(LaunchError, match="local rank 2 of 4 processes on this machine has no GPU: 2 are visible"):
        place(2, 2)


def test_backends():
    assert collective_backend(torch.device("cuda", 0)) == "nccl"
    assert collective_backend(torch.device("cpu")) == "gloo"
    assert process_group_backend("nccl") == "cpu:gloo,cuda:nccl"
    assert process_group_backend("gloo") == "gloo"


def test_the_examples_of_the_reference_run(run_ranks):
    page = (Path(__file__).parents[3] / "docs/reference/runtime.md").read_text()
    blocks = [block.split("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) > 1

    def said(block):
        leave_the_launch()
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            exec(compile(block, "runtime.md", "exec"), {"__name__": "__main__"})
        return out.getvalue(), err.getvalue()

    first, *others = [run_ranks(1, said, block)[0] for block in blocks]
    assert [err for _, err in (first, *others)] == [""] * len(blocks)
    losses = [float(line.rsplit(" ", 1)[1]) for line in first[0].splitlines()]
    assert len(losses) == 3
    assert losses[-1] < losses[0]


@pytest.mark.distributed
def test_ranks_with_a_gpu_each_go_on_to_their_group_over_the_store_in_which_they_noted_it(run_ranks):
    def meet():
        import torch.distributed as dist

        from orc.runtime.launch import process_group
        from orc.runtime.launch.device import claim_gpu
        from orc.runtime.launch.environment import detect

        launch = detect(os.environ)
        store = process_group._store_at("env://", launch, None)
        claim_gpu(store, launch, torch.device("cuda", 0), f"uuid-{launch.rank}")
        dist.init_process_group("gloo", store=store, rank=launch.rank, world_size=launch.world_size)
        total = torch.ones(1)
        dist.all_reduce(total)
        return total.item()

    assert run_ranks(2, meet) == [2.0, 2.0]


@pytest.mark.distributed
@pytest.mark.parametrize(("setting", "expected"), [(None, 1800.0), ("77", 77.0)])
def test_the_time_out_of_collectives_is_torchs_own_unless_it_is_set(setting, expected, run_ranks):
    def limit():
        from orc.runtime.core.context import current_context
        from orc.runtime.core.timeouts import collectives_end_after_s

        if setting is not None:
            os.environ["ORC_TIMEOUT_S"] = setting
        context = current_context(cpu=True)
        return collectives_end_after_s(context.group, context.device)

    assert run_ranks(2, limit) == [expected] * 2


class Backend:
    def __init__(self, name, given):
        self.name = lambda: name
        self._set_default_timeout = given.append


class Group:
    """A group of all ranks with a backend for each kind of device."""

    def __init__(self, **backends):
        self._device_types, self._backends = list(backends), backends

    def _get_backend(self, device):
        return self._backends[device]


@contextlib.contextmanager
def all_ranks_in(group):
    """A block in which *group* is that of all ranks."""
    torch.distributed.group.WORLD = group
    try:
        yield
    finally:
        torch.distributed.group.WORLD = None


def test_nccl_beside_gloo_keeps_its_own_time_out_unless_one_is_asked_for(monkeypatch):
    from torch.distributed import constants

    from orc.runtime.core import timeouts

    monkeypatch.setattr(constants, "default_pg_nccl_timeout", timedelta(minutes=10))
    for asked, of_nccl, of_gloo in (
        (None, [timedelta(minutes=10)], []),
        (timedelta(minutes=10), [timedelta(minutes=10)], [timedelta(minutes=10)]),  # which is not taken for a default
        (timedelta(seconds=77), [timedelta(seconds=77)], [timedelta(seconds=77)]),
    ):
        nccl, gloo = [], []
        group = Group(cuda=Backend("nccl", nccl), cpu=Backend("gloo", gloo))
        wrapped = Group(cuda=SimpleNamespace(name=lambda: "nccl"))  # as torch does with TORCH_DISTRIBUTED_DEBUG=DETAIL
        with all_ranks_in(group):
            timeouts.note_timeout(group, asked)
            timeouts.keep_timeout([wrapped])
            assert (nccl, gloo, timeouts.asked_timeout()) == (of_nccl, of_gloo, asked)


def test_groups_beside_one_of_the_script_keep_torchs_defaults():
    from orc.runtime.core import timeouts

    given = []
    with all_ranks_in(Group()):
        timeouts.keep_timeout([Group(cuda=Backend("nccl", given))])
    assert given == []


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ({"TORCH_FR_BUFFER_SIZE": "9"}, {"TORCH_FR_BUFFER_SIZE": "9"}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}),
    ],
)
def test_collectives_of_nccl_are_recorded_unless_the_environment_says_how_many(given, recorded, monkeypatch):
    from orc.runtime.launch.device import record_collectives

    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is set here does not stay
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None, raising=False)
    os.environ.update(given)
    record_collectives()
    assert {name: os.environ[name] for name in names if name in os.environ} == recorded
