"""Every platform's variables make the right ranks and addresses; half-made launches are refused."""

import pytest

from orc.runtime.core.errors import LaunchError
from orc.runtime.launch.environment import detect
from orc.runtime.launch.environment.slurm import first_host, task_counts

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}


def place(env):
    found = detect(env)
    return (
        found.platform,
        (found.rank, found.world_size, found.local_rank, found.local_world_size, found.node_rank),
        (found.master_addr, found.master_port),
    )


def test_an_orc_agent_adds_the_job():
    env = TORCHRUN | {
        "ORC_MARKER": "orc-digits-k3f9a2-a2",
        "ORC_JOB_ID": "digits-k3f9a2",
        "ORC_ATTEMPT": "2",
        "ORC_RESTART": "1",
        "ORC_NODE_RANK": "1",
        "ORC_ATTEMPT_DIR": "/jobs/a2",
    }
    found = detect(env)
    assert found.platform == "orc"
    assert (found.job.id, found.job.attempt, found.job.restart) == ("digits-k3f9a2", 2, 1)
    assert found.job.attempt_dir == "/jobs/a2"
    assert found.node_rank == 1


def test_the_job_is_known_where_another_launcher_started_the_ranks():
    env = {
        "ORC_MARKER": "orc-x-abcdef-a1",
        "ORC_JOB_ID": "x-abcdef",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "1",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    }
    assert (detect(env).platform, detect(env).job.id) == ("openmpi", "x-abcdef")


SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
}


def test_a_slurm_step_derives_the_address_from_its_nodes():
    platform, ranks, (address, port) = place(SLURM)
    assert (platform, ranks, address) == ("slurm", (5, 7, 1, 2, 2), "gpu07")
    assert 20000 <= port < 30000
    other_rank = SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert place(other_rank)[2] == (address, port), "all tasks of the step must agree"
    assert place(SLURM | {"SLURM_STEP_ID": "1"})[2][1] != port, "steps of one job must not meet"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[01,07]-ib,m", "n01-ib"), ("rack1-n[10]", "rack1-n10")],
)
def test_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_a_node_list_that_is_not_understood_asks_for_an_address():
    with pytest.raises(LaunchError, match="set MASTER_ADDR"):
        first_host("")


def test_tasks_per_node():
    assert task_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(LaunchError, match="not understood"):
        task_counts("2*3")


OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "4242",
}


def test_open_mpi_on_one_machine_needs_nothing_else():
    platform, ranks, (address, port) = place(OPENMPI)
    assert (platform, ranks, address) == ("openmpi", (1, 2, 1, 2, 0), "127.0.0.1")
    assert place(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"})[2] == (address, port)


def test_open_mpi_on_several_machines_needs_an_address():
    env = OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(LaunchError, match="-x MASTER_ADDR"):
        detect(env)
    assert place(env | {"MASTER_ADDR": "h0"})[:2] == ("openmpi", (1, 2, 0, 1, 1))


NO_LOCAL_RANK = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
ALONE = (0, 1, 0, 1, 0)


@pytest.mark.parametrize(
    ("env", "platform", "ranks", "address"),
    [
        ({}, "single", ALONE, (None, None)),
        ({"WORLD_SIZE": "1"}, "single", ALONE, (None, None)),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},
            "single",
            ALONE,
            (None, None),
        ),  # a batch script
        ({"RANK": "0", "WORLD_SIZE": "1"}, "torchrun", ALONE, (None, None)),
        (TORCHRUN, "torchrun", (3, 8, 1, 2, 1), ("node-a", 29500)),
        (SLURM | TORCHRUN, "torchrun", (3, 8, 1, 2, 1), ("node-a", 29500)),  # the inner launcher's
        (NO_LOCAL_RANK | {"MASTER_ADDR": "127.0.0.1"}, "torchrun", (1, 2, 1, 2, 0), ("127.0.0.1", 1)),  # one machine
        (NO_LOCAL_RANK | {"MASTER_ADDR": "node-a"}, "torchrun", (1, 2, 0, 1, 1), ("node-a", 1)),
        (SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}, "slurm", (5, 7, 1, 2, 2), ("10.0.0.1", 7)),
    ],
)
def test_a_process_has_the_place_that_its_launcher_gave_it(env, platform, ranks, address):
    assert place(env) == (platform, ranks, address)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"WORLD_SIZE": "2"}, "(?s)WORLD_SIZE=2 is set but RANK is not.*orc launch -n N script.py"),
        ({"RANK": "0"}, "RANK=0 is set but WORLD_SIZE is not"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT is not set"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x' is not a whole number"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 is not below the number of processes, 8"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "local rank 2 is not below the number of processes, 2"),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, "a world of 0 processes"),
        ({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}, "LOCAL_RANK is not set"),
        ({k: v for k, v in SLURM.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID is not set"),
    ],
)
def test_a_half_made_launch_is_refused_by_name(env, message):
    with pytest.raises(LaunchError, match=message):
        detect(env)


def test_the_mpirun_of_intel_mpi_and_mpich():
    env = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "MASTER_ADDR": "node0"}
    assert place(env) == ("hydra", (5, 8, 1, 4, 1), ("node0", 29500))
    with pytest.raises(LaunchError, match="MASTER_ADDR is not set"):
        detect({**env, "MASTER_ADDR": ""})
    # what it starts its helpers with says nothing about the ranks
    slurm = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    assert detect({**env, **slurm}).platform == "hydra"
    one = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    platform, _, (address, port) = place(one)
    assert (platform, address, port) == ("hydra", "127.0.0.1", detect(one | {"PMI_RANK": "0"}).master_port)
