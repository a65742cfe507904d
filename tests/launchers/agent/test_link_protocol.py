"""What the link accepts and from whom; and that one node 0 is enough for 256."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import time

import pytest
from polling import until

from orc.launchers.agent.link import channel
from orc.launchers.agent.link.channel import (
    MESSAGE_BYTES,
    VERSION,
    Channel,
    PeerDisconnected,
    concerns,
    is_record,
    may_send,
    tls_context,
)
from orc.launchers.agent.link.client import LinkClient
from orc.launchers.agent.link.server import LinkServer
from orc.launchers.agent.records import read_json
from orc.launchers.attempts.confidential import new_link_token

from .conftest import TOKEN, Linked
from .test_link import IDLE


async def pair(hub_token=TOKEN, joiner_token=TOKEN):
    """The two ends of one connection; raises what the joiner's end does."""
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    port = listener.getsockname()[1]

    async def accept():
        sock, _ = await asyncio.get_running_loop().sock_accept(listener)
        return await Channel.accepted(sock, tls_context(hub_token, server=True))

    accepting = asyncio.ensure_future(accept())
    try:
        joiner = await Channel.connected("127.0.0.1", port, tls_context(joiner_token, server=False))
        return await accepting, joiner
    finally:
        listener.close()
        await asyncio.gather(accepting, return_exceptions=True)


def test_the_hub_of_another_attempt_does_not_get_past_the_handshake():
    with pytest.raises(PeerDisconnected, match="does not know the attempt's token"):
        asyncio.run(pair(hub_token=new_link_token()))


@pytest.mark.parametrize("shows", ["nothing", "a certificate of its own"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_does_not_hold_the_token_is_never_heard_by_the_hub(shows, version):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if shows != "nothing":
        context = tls_context(new_link_token(), server=False)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # it does not mind whom it talks to
    context.minimum_version = context.maximum_version = version

    async def check():
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]

        def stranger():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as sock:
                context.wrap_socket(sock).sendall(b'{"node": 1}\n')

        strange = asyncio.get_running_loop().run_in_executor(None, stranger)
        sock, _ = listener.accept()
        listener.close()
        with pytest.raises(ssl.SSLError):
            await Channel.accepted(sock, tls_context(TOKEN, server=True))
        await strange

    asyncio.run(check())


def test_tls_before_1_2_is_refused_on_both_sides():
    for hub in (True, False):
        context = tls_context(TOKEN, server=hub)
        assert context.minimum_version == ssl.TLSVersion.TLSv1_2
        assert (context.verify_mode, context.cert_store_stats()["x509"]) == (ssl.CERT_REQUIRED, 1)


def test_the_key_is_left_in_no_file(tmp_path, monkeypatch):
    monkeypatch.setattr(channel, "_MEMORY", str(tmp_path))
    tls_context(TOKEN, server=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "data",
    [b'"' + b"x" * (MESSAGE_BYTES + 10) + b'"\n', b"[" * 4000 + b"\n", b"{}{\n", b"[]\n", b"\xff\n"],
    ids=["too long", "nested without end", "no JSON", "no object", "no text"],
)
def test_what_is_no_message_ends_the_connection(data):
    async def check():
        hub, joiner = await pair()
        joiner.writer.write(data)
        await hub.receive()

    with pytest.raises(PeerDisconnected, match="does not speak"):
        asyncio.run(check())


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_a_connection_that_the_other_host_has_closed_is_told_from_one_that_was_cut(how):
    async def check():
        hub, joiner = await pair()
        if how == "closed":
            joiner.writer.close()
        else:  # the kernel closes it, without a word of TLS
            joiner.writer.get_extra_info("socket")._sock.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerDisconnected) as ended:
            await hub.receive()
        return ended.value.closed

    assert asyncio.run(check())


def test_a_message_that_was_changed_on_the_way_ends_the_connection():
    async def check():
        hub, joiner = await pair()
        raw = socket.socket(fileno=os.dup(joiner.writer.get_extra_info("socket").fileno()))
        joiner.send({"number": 0})
        assert await hub.receive() == {"number": 0}
        raw.setblocking(True)
        raw.sendall(b"\x17\x03\x03\x00\x20" + b"\0" * 32)  # a record that the key has not made
        raw.close()
        with pytest.raises(PeerDisconnected):
            await hub.receive()

    asyncio.run(check())


@pytest.mark.parametrize(
    "name",
    [
        "node-1/../../../etc/passwd.json",
        "node-1/secrets.json",
        "node-1/pids.json",
        "secrets.json",
        "link.json",
        "agent.json",
        "calls/../stop-r0.json",
        "calls/a.b.json",
        "/etc/cron.d/x.json",
        "stacks/a.node-1.json.x",
        "heartbeat.json\n",
    ],
)
def test_only_records_travel(name):
    assert not is_record(name)
    assert not may_send(1, name)


def test_a_node_speaks_for_itself_alone():
    own = ["node-1/lease.json", "node-1/heartbeat.json", "node-1/exit.json", "stacks/1.node-1.json"]
    common = ["stop-r0.json", "cancel.json", "calls/1-2-3.json", "calls/1-2-3.done.json", "stacks/1.json"]
    assert all(is_record(name) and may_send(1, name) for name in own + common)
    assert not any(may_send(2, name) for name in own)
    assert not may_send(1, "rendezvous-r0.json")


def test_records_go_to_those_whom_they_concern():
    call = {"node": 2, "from": 1}
    told = {
        name: [node for node in (1, 2, 3) if concerns(node, name, call)]
        for name in (
            "node-0/heartbeat.json",
            "node-1/heartbeat.json",
            "node-1/exit.json",
            "rendezvous-r0.json",
            "calls/x.json",
            "calls/x.end.json",
            "calls/x.done.json",
            "stacks/x.json",
            "stacks/x.node-1.json",
        )
    }
    assert list(told.values()) == [[1, 2, 3], [], [], [1, 2, 3], [2], [2], [1], [1, 2, 3], []]


def test_noise_on_the_port_disturbs_nobody(linked):
    both = linked(IDLE)
    both.start(0)
    noise = []
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, os.urandom(70000), b""):
        sock = socket.create_connection(("127.0.0.1", both.hub["port"]))
        sock.sendall(data)
        noise.append(sock)
    assert both.start(1)["state"] == "held"
    both.until_ready()
    for sock in noise:
        sock.close()
    os.kill(both.lease(0)["pid"], signal.SIGTERM)
    both.until_over()


def test_a_crowd_of_strangers_keeps_nobody_out(linked):
    both = linked(IDLE)
    both.start(0)
    crowd = [socket.create_connection(("127.0.0.1", both.hub["port"])) for _ in range(560)]
    assert both.start(1)["state"] == "held"
    both.until_ready()
    for sock in crowd:
        sock.close()
    os.kill(both.lease(0)["pid"], signal.SIGTERM)
    both.until_over()


@pytest.mark.parametrize("told", [False, True])
def test_a_hub_that_goes_after_its_last_record_has_that_of_the_joiner_though_it_did_not_say_so(tmp_path, told):
    settings = {
        "node": 1,
        "restart": 0,
        "marker": "m",
        "token": TOKEN,
        "heartbeat_s": 1,
        "peer_timeout_s": 9,
        "nnodes": 2,
    }

    async def check():
        joiner = LinkClient({**settings, "attempt_dir": str(tmp_path), "hub": {"port": 1, "addresses": []}})
        joiner.agent = -1  # else its parent is told, as its agent is: here that is whatever runs the tests
        joiner.wake = asyncio.Event()
        hub, channel = await pair()
        joiner.joined = channel
        serving = asyncio.ensure_future(joiner.serve(channel))
        joiner.publish("node-1/exit.json", {"restart": 0})
        assert (await hub.receive())["name"] == "node-1/exit.json"
        if told:
            joiner.on_record(channel, "node-0/exit.json", {"restart": 0})
        hub.writer.close()
        await serving
        return joiner.state()["handed_over"]

    assert asyncio.run(check()) is told


def test_a_heartbeat_that_says_nothing_new_costs_neither_an_answer_nor_a_look_of_the_agent(tmp_path):
    settings = {"node": 0, "restart": 0, "marker": "m", "token": TOKEN, "heartbeat_s": 60, "peer_timeout_s": 360}

    async def check():
        hub = LinkServer({**settings, "nnodes": 1000, "attempt_dir": str(tmp_path)}, socket.socket())
        hub.wake, looks, answers = asyncio.Event(), [], []
        hub.notify_agent = lambda: looks.append(len(hub.states))
        channel, joiner = await pair()
        channel.node = 5
        serving = asyncio.ensure_future(hub.serve(channel))
        looks.clear()  # for the state of the link
        send = channel.send
        channel.send = lambda message: (answers.append(message), send(message))
        for number in range(20):
            state = "waiting" if number < 10 else "running"
            beat = {"restart": 0, "state": state, "at": number}
            joiner.send({"name": "node-5/heartbeat.json", "record": beat})
        joiner.send({"name": "node-5/lease.json", "record": {"restart": 0}})
        while not answers:
            await asyncio.sleep(0.01)
        joiner.writer.close()
        await serving
        return answers, len(looks), read_json(str(tmp_path / "node-5/heartbeat.json"))["at"]

    assert asyncio.run(asyncio.wait_for(check(), 20)) == ([{"stored": 21}], 3, 19)


def test_a_node_0_that_is_slow_to_answer_keeps_the_first_connection_though_it_has_many_addresses(tmp_path):
    settings = {"restart": 0, "marker": "m", "token": TOKEN, "heartbeat_s": 1, "peer_timeout_s": 9, "nnodes": 2}

    class SlowHub(LinkServer):
        async def shake_hands(self, channel):
            receive = channel.receive

            async def late():
                message = await receive()
                await asyncio.sleep(0.3)  # six times as long as until the next address is tried
                return message

            channel.receive = late
            try:
                await super().shake_hands(channel)
            finally:
                channel.receive = receive

    async def check():
        listener = socket.create_server(("", 0))
        hub = SlowHub({**settings, "node": 0, "attempt_dir": str(tmp_path / "0")}, listener)
        addresses = [f"127.0.0.{number}" for number in range(1, 17)]
        where = {"port": listener.getsockname()[1], "addresses": addresses}
        joiner = LinkClient({**settings, "node": 1, "attempt_dir": str(tmp_path / "1"), "hub": where})
        ended = []
        for end in (hub, joiner):
            end.agent, end.wake = -1, asyncio.Event()
            end.on_disconnected = lambda channel, why, by_peer: ended.append(why)
        listening = asyncio.ensure_future(hub.connect())
        joining = asyncio.ensure_future(joiner.connect())
        while joiner.joined is None:
            await asyncio.sleep(0.01)
        first = joiner.joined
        await asyncio.sleep(0.8)  # as long as all the other addresses would take to be tried
        joining.cancel()
        listening.cancel()
        return [*ended], [channel.node for channel in hub.channels], joiner.joined is first

    assert asyncio.run(asyncio.wait_for(check(), 20)) == ([], [1], True)


class Many:
    """Joiners in one process, as small as can be: they say that they wait, and take what comes."""

    def __init__(self, port, count):
        self.loop = asyncio.new_event_loop()
        self.context = tls_context(TOKEN, server=False)
        self.got = {node: set() for node in range(1, count + 1)}
        self.channels = {}
        self.tasks = [self.loop.create_task(self.join(node, port)) for node in self.got]

    async def join(self, node, port):
        channel = await Channel.connected("127.0.0.1", port, self.context)
        assert (await channel.receive())["orc-link"] == VERSION
        channel.send({"node": node, "marker": "orc-job-1-a1", "restart": 0})
        await channel.receive()
        self.channels[node] = channel
        now = time.time()
        self.send(channel, f"node-{node}/lease.json", {"restart": 0, "host": f"h{node}", "at": now})
        self.send(channel, f"node-{node}/heartbeat.json", {"restart": 0, "state": "waiting", "at": now})
        try:
            while True:
                message = await channel.receive()
                if "name" in message:
                    channel.received += 1
                    self.got[node].add(message["name"])
                channel.send({"stored": channel.received})
        except PeerDisconnected:  # node 0 has ended
            channel.writer.close()

    def close(self):
        for task in self.tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*self.tasks, return_exceptions=True))
        self.loop.close()

    def step(self):
        self.loop.run_until_complete(asyncio.sleep(0.05))

    def send(self, channel, name, record):
        channel.sent += 1
        channel.send({"name": name, "record": record})

    def until_all_have(self, name, timeout_s=60):
        deadline = time.monotonic() + timeout_s
        while not all(name in names for names in self.got.values()):
            assert time.monotonic() < deadline, (
                f"{sum(name not in names for names in self.got.values())} without {name}"
            )
            self.step()


def test_256_nodes_meet_and_stop_over_one_node(attempt):
    job = attempt(IDLE, nnodes=256, link=True, peer_timeout_s=60.0)
    first = Linked([job])
    first.start(0)
    began = time.monotonic()
    many = Many(first.hub["port"], 255)
    try:
        many.until_all_have("rendezvous-r0.json")
        met = time.monotonic() - began
        job.until_log("ready")
        memory = resident(first.process_of_link(0))
        (job.directory / "cancel.json").write_text('{"grace_s": 0}')
        many.until_all_have("cancel.json")
        assert met < 20, "seconds"
        assert memory < 60 << 20, "bytes"
        for node, channel in many.channels.items():
            many.send(channel, f"node-{node}/exit.json", {"restart": 0, "outcome": "cancelled", "exit_status": 143})
        many.until_all_have("node-0/exit.json")
        for _ in range(3):
            many.step()
        # It makes 255 records durable before.
        until(lambda: first.over(0), timeout_s=120, what="the end of node 0")
        assert read_json(str(job.directory / "node-255/exit.json"))["outcome"] == "cancelled"
    finally:
        many.close()
        if not first.over(0):
            os.kill(first.lease(0)["pid"], signal.SIGKILL)


def resident(pid):
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS:"))
