"""Where a training process listens."""

import os
import signal
import socket
import time

import pytest

from orc.runtime import Accelerator
from orc.runtime.core.context import current_context
from orc.runtime.launch import listening as listening_module
from orc.runtime.launch.listening import own_address


def listening():
    """The local addresses of this process's listening TCP sockets."""
    inodes = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{fd}").removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = []
    for family, path in ((socket.AF_INET, "/proc/self/net/tcp"), (socket.AF_INET6, "/proc/self/net/tcp6")):
        with open(path) as file:
            for line in file.readlines()[1:]:
                (
                    _,
                    where,
                    _,
                    state,
                    *_,
                ) = fields = line.split()
                if state == "0A" and fields[9] in inodes:
                    raw = bytes.fromhex(where.partition(":")[0])
                    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                    found.append(socket.inet_ntop(family, words))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_ranks_on_one_machine_listen_on_loopback_alone(run_ranks, address):
    def train():
        import torch
        import torch.distributed as dist

        accelerator = Accelerator()
        model = accelerator.prepare(torch.nn.Linear(2, 2))
        accelerator.backward(model(torch.ones(1, 2)).sum())
        dist.new_group(backend="gloo")
        return listening()

    for addresses in run_ranks(2, train, env={"MASTER_ADDR": address}):
        assert addresses
        assert {address for address in addresses if not address.startswith(("127.", "::1"))} == set()


@pytest.mark.distributed
def test_ranks_that_a_script_has_brought_together_by_itself_meet_where_it_said(run_ranks):
    """Without the variables of a launch, the address that the script gave is all that is known of rank 0's host."""

    def train():
        import torch.distributed as dist

        rank, port = int(os.environ.pop("RANK")), os.environ["MASTER_PORT"]
        for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.2:{port}", rank=rank, world_size=2)
        store = Accelerator().ctx.store
        store.add("here", 1)
        return getattr(store, "host", None)

    assert run_ranks(2, train) == [None, "127.0.0.2"]


@pytest.mark.distributed
def test_what_is_written_into_the_store_of_torch_stops_nobody(run_ranks):
    """Anybody who reaches its port may write there."""

    def train():
        from orc.runtime.preemption.preemption import Preemption

        context = current_context()
        preemption = Preemption(context, poll_s=0.01)
        preemption.install()
        if context.rank == 0:  # who connects to the port can write the same
            from torch.distributed.distributed_c10d import _get_default_store

            _get_default_store().clone().set("orc/preemption/notice", '{"rank": 1, "signal": "SIGTERM"}')
        for _ in range(50):
            time.sleep(0.01)
            if preemption.tick():
                return "stopped"
        context.barrier()
        os.kill(os.getpid(), signal.SIGTERM)  # a real notice still does
        for _ in range(1000):
            time.sleep(0.01)
            if preemption.tick():
                preemption.close()
                return "went on"
        return "was not stopped"

    assert run_ranks(2, train) == ["went on", "went on"]


def test_a_name_of_this_machine_is_resolved_to_what_others_know_it_by(monkeypatch):
    def answers(*addresses):
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in addresses]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    assert [own_address(host) for host in ("127.0.0.1", "localhost", "::1")] == ["127.0.0.1", "127.0.0.1", "::1"]
    answers("127.0.1.1")
    assert own_address("node-7") == ""  # Debian: what node 7 calls itself is no use to the others
    answers("192.0.2.77")
    assert own_address("gateway") == ""  # an address of somebody else, behind which this machine is


def test_on_several_nodes_gloo_listens_where_the_master_is_reached(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    interfaces = {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.4.7"], "ib0": ["10.1.0.7"]}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(interfaces)))
    monkeypatch.setattr(listening_module, "_addresses_of", interfaces.get)
    monkeypatch.setattr(listening_module, "_address_towards", {"10.1.0.1": "10.1.0.7"}.get)
    listening_module.face_master("10.1.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    listening_module.face_master("elsewhere")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0", "what is given stays"


def test_the_interface_of_an_address_is_the_kernels():
    assert listening_module._interface_of("127.0.0.1") == "lo"
    assert listening_module._interface_of("::1") in ("lo", None)
    assert listening_module._interface_of("203.0.113.9") is None
    assert listening_module._interface_of("") is None


def test_a_machine_that_calls_itself_127_0_1_1_faces_its_default_route(monkeypatch):
    asked = []
    looked_up = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: asked.append(host) or looked_up("127.0.1.1", *a, **k)
    )
    assert listening_module._address_towards("node0") == ""
    assert asked == ["node0", "192.0.2.1"]
