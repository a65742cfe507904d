"""The program in a container, as far as it decides things: which incarnation it is, what it says of a failure."""

from __future__ import annotations

import json
import os
import socket
import stat
import tarfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.agent.link.channel import tls_context
from orc.launchers.attempts.confidential import new_link_token
from orc.launchers.containers import program

OWNER = "here:orc-job-abc-a1"


# --- failures


def write(path: Path, **record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def test_the_failure_names_the_rank_that_failed_first_on_every_host(tmp_path: Path) -> None:
    first = {"rank": 3, "host": "algo-2", "exit_code": 42, "signal": None, "log_tail": "Traceback\nValueError: nan"}
    write(tmp_path / "node-0/exit.json", restart=0, reason="stopped because of node 1", first_failure=None)
    write(tmp_path / "stop-r0.json", reason="rank 3 exited with 42", first_failure=first)
    expected = "rank 3 on algo-2 exited with 42\nTraceback\nValueError: nan"
    assert program.failure_text(str(tmp_path), 0, 0, 1) == expected


def test_the_failure_of_a_setup_is_its_reason_and_none_is_said_to_be_none(tmp_path: Path) -> None:
    write(tmp_path / "node-0/exit.json", restart=2, reason="setup on node 0 failed", first_failure=None)
    assert program.failure_text(str(tmp_path), 0, 2, 77) == "setup on node 0 failed"
    assert "left no record" in program.failure_text(str(tmp_path), 0, 3, 77)  # that one is older


def test_a_failure_fits_into_what_is_shown_and_keeps_the_end(tmp_path: Path) -> None:
    tail = "\n".join(f"line {n} ä" for n in range(500)) + "\nValueError: nan"
    text = program.shortened("rank 3 on algo-2 exited with 1", tail)
    assert len(text.encode()) <= 1024
    assert text.startswith("rank 3 on algo-2 exited with 1\nline ")
    assert text.endswith("ValueError: nan")
    assert len(program.shortened("ä" * 3000, "tail").encode()) <= 1024


# --- incarnations


def test_the_restart_is_the_one_after_all_that_the_records_know_of(tmp_path: Path) -> None:
    assert program.restored_restart(str(tmp_path / "nothing")) == 0
    write(tmp_path / "agent.json", restart=7)
    (tmp_path / "node-1").mkdir()
    (tmp_path / "node-1/lease.json").write_text('{"resta')  # half of an upload
    assert program.restored_restart(str(tmp_path)) == 0
    write(tmp_path / "node-0/lease.json", restart=0)
    write(tmp_path / "node-1/heartbeat.json", restart=1)
    assert program.restored_restart(str(tmp_path)) == 2


def test_what_has_succeeded_on_every_node_is_not_run_again(tmp_path: Path) -> None:
    config = {"nnodes": 2, "attempt_dir": str(tmp_path)}
    assert not program.finished_before(config, OWNER)
    write(tmp_path / "node-0/exit.json", outcome="succeeded", owner=OWNER)
    assert not program.finished_before(config, OWNER)
    write(tmp_path / "node-1/exit.json", outcome="preempted", owner=OWNER)
    assert not program.finished_before(config, OWNER)
    write(tmp_path / "node-1/exit.json", outcome="succeeded", owner=OWNER)
    assert program.finished_before(config, OWNER)
    assert not program.finished_before(config, "here:another")


def test_a_host_learns_its_restart_from_node_0_and_from_nobody_else() -> None:
    token = new_link_token()
    ours, others = (tls_context(one, server=True) for one in (token, new_link_token()))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for context, said in ((others, b'{"restart": 7}\n'), (ours, b"[]\n"), (ours, b'{"restart": 3}\n')):
                sock, _ = server.accept()
                with suppress(OSError), context.wrap_socket(sock, server_side=True) as line:
                    for byte in said:
                        line.sendall(bytes([byte]))

        thread = threading.Thread(target=answer)
        thread.start()
        tls = tls_context(token, server=False)
        assert program.restart_of_server(["127.0.0.1"], server.getsockname()[1], tls) == 3
        thread.join()


def test_a_node_0_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "HUB_TIMEOUT_S", 0.0)  # it is asked once all the same
    with socket.socket() as held:  # and listens not
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(
            program.Failure, match=rf"node 0 does not answer within 0 s: 127.0.0.1 port {port}: .*refused"
        ):
            program.restart_of_server(["127.0.0.1"], port, tls_context(new_link_token(), server=False))


# --- files


def test_an_old_copy_of_another_nodes_records_does_not_stay(tmp_path: Path) -> None:
    config = {"attempt_dir": str(tmp_path), "nnodes": 2}
    for name in ("node-0/exit.json", "node-1/exit.json", "calls/a.json"):
        write(tmp_path / name, restart=0)
    path = program.place_config(config, 1)
    assert json.loads(Path(path).read_text()) == config
    assert sorted(each.name for each in tmp_path.iterdir()) == ["agent.json", "node-1"]


def test_the_working_copy_gets_the_place_of_what_an_image_has_there(tmp_path: Path) -> None:
    work = tmp_path / "code"
    program.make_room(str(work))
    work.mkdir()
    program.make_room(str(work))
    assert not work.exists()
    write(work / "of-the-image.json")
    program.make_room(str(work))
    assert not work.exists()
    assert (tmp_path / "code.image/of-the-image.json").exists()


def container(inputs: Path, **more: Any) -> program.Container:
    return program.Container(platform="here", hosts=["a"], node=0, inputs=str(inputs), archive="", **more)


def test_secrets_are_private_and_those_of_a_container_before_are_gone(tmp_path: Path) -> None:
    source, private = tmp_path / "channel", tmp_path / "private"
    write(private / "secrets.json", OLD="old")
    write(source / "link.json", token="t")
    program.place_private(container(source), str(private), {})
    assert [path.name for path in private.iterdir()] == ["link.json"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "link.json").stat().st_mode) == 0o600
    kept = container(source, secrets=lambda config: json.dumps({"TOKEN": config["t"]}).encode())
    program.place_private(kept, str(private), {"t": "from the platform"})
    assert json.loads((private / "secrets.json").read_text()) == {"TOKEN": "from the platform"}


def test_a_broken_archive_is_a_clear_failure(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(b"not an archive")
    with pytest.raises(program.Failure, match=r"source.tar.gz cannot be unpacked"):
        program.unpack(str(archive), str(tmp_path / "root"))


def _member(name: str, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = (tarfile.SYMTYPE, link) if link else (tarfile.REGTYPE, "")
    return info


@pytest.fixture(params=["a Python with filters", "an older one"])
def _filters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "an older one":
        monkeypatch.delattr(tarfile, "data_filter")


@pytest.mark.usefixtures("_filters")
@pytest.mark.parametrize(
    "members",
    [
        [_member("../outside")],
        [_member("code/out", "../.."), _member("code/out/outside")],
        [_member("here", "."), _member("up", "here/.."), _member("up/outside")],
    ],
    ids=["by its name", "by a link", "by a link through a link"],
)
def test_an_archive_cannot_reach_out_of_its_place(tmp_path: Path, members: list[tarfile.TarInfo]) -> None:
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for member in members:
            tar.addfile(member)
    with pytest.raises(program.Failure, match="cannot be unpacked"):
        program.unpack(str(archive), str(tmp_path / "root"))
    assert not os.path.exists(tmp_path / "outside")


@pytest.mark.usefixtures("_filters")
def test_links_within_an_archive_stay(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for member in (_member("code/data/set"), _member("code/newest", "data/set"), _member("code/data/up", "..")):
            tar.addfile(member)
    program.unpack(str(archive), str(tmp_path / "root"))
    assert (tmp_path / "root/code/newest").samefile(tmp_path / "root/code/data/up/data/set")
