"""The program in the container, as far as it decides things: who it is, what it prints, what it says of a failure."""

from __future__ import annotations

import ast
import json
import os
import socket
import stat
import sys
import tarfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orc.launchers.agent.link.channel import tls_context
from orc.launchers.attempts.link_token import new_link_token
from orc.launchers.backends.sagemaker import entry

RESOURCES = {
    "current_host": "algo-2",
    "current_instance_type": "ml.p4d.24xlarge",
    "current_group_name": "homogeneousCluster",
    "hosts": ["algo-1", "algo-10", "algo-2"],
    "network_interface_name": "eth0",
}
OWNER = "sagemaker:orc-job-abc-a1"


def test_it_runs_under_any_python_from_3_9_on_with_nothing_but_the_standard_library() -> None:
    tree = ast.parse(Path(entry.__file__).read_text(), feature_version=(3, 9))
    tree_of_the_agent = "orc.launchers.agent.link.channel"  # read from what it has unpacked
    imported = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    } | {
        str(node.module).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module not in ("collections.abc", tree_of_the_agent)
    }
    assert imported <= sys.stdlib_module_names


def test_hosts_are_counted_by_their_numbers() -> None:
    assert entry.host_order(RESOURCES["hosts"]) == ["algo-1", "algo-2", "algo-10"]  # type: ignore[arg-type]


def test_the_documented_variables_are_derived_from_the_files_of_the_container() -> None:
    hyperparameters = {"epochs": "3", "lr": "0.1", "use-cuda": "true", "name": "a b", "tags": '["x"]'}
    found = entry.sagemaker_variables(RESOURCES, {"train": {}, "my-data": {}}, hyperparameters)
    expected = {
        "SM_CURRENT_HOST": "algo-2",
        "SM_CURRENT_HOST_RANK": "1",
        "SM_HOST_COUNT": "3",
        "SM_HOSTS": '["algo-1", "algo-2", "algo-10"]',
        "SM_MASTER_ADDR": "algo-1",
        "SM_NETWORK_INTERFACE_NAME": "eth0",
        "SM_CURRENT_INSTANCE_TYPE": "ml.p4d.24xlarge",
        "SM_CHANNELS": '["my-data", "train"]',
        "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train",
        "SM_CHANNEL_MY_DATA": "/opt/ml/input/data/my-data",
        "SM_MODEL_DIR": "/opt/ml/model",
        "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
        "SM_HP_EPOCHS": "3",
        "SM_HP_USE_CUDA": "true",
        "SM_HP_NAME": "a b",
        "SM_HP_TAGS": '["x"]',
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
    }
    assert {name: found[name] for name in expected} == expected
    assert json.loads(found["SM_HPS"]) == {"epochs": 3, "lr": 0.1, "use-cuda": True, "name": "a b", "tags": ["x"]}
    assert json.loads(found["SM_USER_ARGS"])[:4] == ["--epochs", "3", "--lr", "0.1"]
    assert json.loads(found["SM_TRAINING_ENV"])["channel_input_dirs"]["train"] == "/opt/ml/input/data/train"


# --- logs


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "rank-3.log"
    path.touch()
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_every_line_of_a_rank_says_whose_it_is(log: Path) -> None:
    tail = entry.Tail(str(log), 3)
    append(log, b"one\n\n  two\r\n[rank 0] three\n")
    assert tail.read() == ["[rank 3] one\n", "[rank 3] \n", "[rank 3]   two\r\n", "[rank 3] [rank 0] three\n"]
    assert tail.read() == []


def test_a_line_without_an_end_waits_and_is_then_marked(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tail = entry.Tail(str(log), 3)
    append(log, b"50 %")
    assert tail.read() == []
    monkeypatch.setattr(entry, "PATIENCE_S", -1.0)
    assert tail.read() == ["[rank 3~] 50 %\n"]
    append(log, b" 60 %\nend")
    assert tail.read(final=True) == ["[rank 3]  60 %\n", "[rank 3~] end\n"]


def test_a_very_long_line_comes_in_pieces(log: Path) -> None:
    text = "x" * (2 * entry.PIECE_BYTES + 5)
    append(log, text.encode() + b"\n")
    lines = entry.Tail(str(log), 3).read()
    assert [line.startswith("[rank 3~] ") for line in lines] == [True, True, False]
    assert "".join(line.rstrip("\n").partition("] ")[2] for line in lines) == text


def test_characters_that_are_cut_between_two_looks_stay_whole_and_bad_bytes_are_replaced(log: Path) -> None:
    tail = entry.Tail(str(log), 3)
    word = "ä✓".encode()
    for byte in word:
        append(log, bytes([byte]))
        assert tail.read() == []
    append(log, b"\xff\n")
    assert tail.read() == ["[rank 3] ä✓\N{REPLACEMENT CHARACTER}\n"]
    append(log, b"\xc3")
    assert tail.read(final=True) == ["[rank 3~] \N{REPLACEMENT CHARACTER}\n"]


def test_a_line_of_the_node_is_never_taken_for_a_ranks(tmp_path: Path) -> None:
    path = tmp_path / "node-0.log"
    path.write_text("setup: hello\n[rank 1] says who?\n")
    assert entry.Tail(str(path), None).read() == ["setup: hello\n", " [rank 1] says who?\n"]


# --- failures


def write(path: Path, **record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def test_the_failure_names_the_rank_that_failed_first_on_every_host(tmp_path: Path) -> None:
    first = {"rank": 3, "host": "algo-2", "exit_code": 42, "signal": None, "log_tail": "Traceback\nValueError: nan"}
    write(tmp_path / "node-0/exit.json", restart=0, reason="stopped because of node 1", first_failure=None)
    write(tmp_path / "stop-r0.json", reason="rank 3 exited with 42", first_failure=first)
    expected = "rank 3 on algo-2 exited with 42\nTraceback\nValueError: nan"
    assert entry.failure_text(str(tmp_path), 0, 0, 1) == expected


def test_the_failure_of_a_setup_is_its_reason_and_none_is_said_to_be_none(tmp_path: Path) -> None:
    write(tmp_path / "node-0/exit.json", restart=2, reason="setup on node 0 failed", first_failure=None)
    assert entry.failure_text(str(tmp_path), 0, 2, 77) == "setup on node 0 failed"
    assert "left no record" in entry.failure_text(str(tmp_path), 0, 3, 77)  # that one is older


def test_a_failure_fits_into_what_is_shown_and_keeps_the_end(tmp_path: Path) -> None:
    tail = "\n".join(f"line {n} ä" for n in range(500)) + "\nValueError: nan"
    text = entry.shortened("rank 3 on algo-2 exited with 1", tail)
    assert len(text.encode()) <= 1024
    assert text.startswith("rank 3 on algo-2 exited with 1\nline ")
    assert text.endswith("ValueError: nan")
    assert len(entry.shortened("ä" * 3000, "tail").encode()) <= 1024


# --- incarnations


def test_the_restart_is_the_one_after_all_that_the_records_know_of(tmp_path: Path) -> None:
    assert entry.restored_restart(str(tmp_path / "nothing")) == 0
    write(tmp_path / "agent.json", restart=7)
    (tmp_path / "node-1").mkdir()
    (tmp_path / "node-1/lease.json").write_text('{"resta')  # half of an upload
    assert entry.restored_restart(str(tmp_path)) == 0
    write(tmp_path / "node-0/lease.json", restart=0)
    write(tmp_path / "node-1/heartbeat.json", restart=1)
    assert entry.restored_restart(str(tmp_path)) == 2


def test_what_has_succeeded_on_every_node_is_not_run_again(tmp_path: Path) -> None:
    config = {"nnodes": 2, "attempt_dir": str(tmp_path)}
    assert not entry.finished_before(config, OWNER)
    write(tmp_path / "node-0/exit.json", outcome="succeeded", owner=OWNER)
    assert not entry.finished_before(config, OWNER)
    write(tmp_path / "node-1/exit.json", outcome="preempted", owner=OWNER)
    assert not entry.finished_before(config, OWNER)
    write(tmp_path / "node-1/exit.json", outcome="succeeded", owner=OWNER)
    assert entry.finished_before(config, OWNER)
    assert not entry.finished_before(config, "sagemaker:another")


def test_a_host_learns_its_restart_from_node_0_and_from_nobody_else() -> None:
    token = new_link_token()
    ours, others = (tls_context(one, hub=True) for one in (token, new_link_token()))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for context, said in ((others, b'{"restart": 7}\n'), (ours, b"[]\n"), (ours, b'{"restart": 3}\n')):
                sock, _ = server.accept()
                with suppress(OSError), context.wrap_socket(sock, server_side=True) as line:
                    for byte in said:
                        line.sendall(bytes([byte]))

        thread = threading.Thread(target=answer)
        thread.start()
        tls = tls_context(token, hub=False)
        assert entry.restart_of_hub(["127.0.0.1"], server.getsockname()[1], tls) == 3
        thread.join()


def test_a_node_0_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "HUB_TIMEOUT_S", 0.0)  # it is asked once all the same
    with socket.socket() as held:  # and listens not
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        with pytest.raises(
            entry.Failure, match=rf"node 0 does not answer within 0 s: 127.0.0.1 port {port}: .*refused"
        ):
            entry.restart_of_hub(["127.0.0.1"], port, tls_context(new_link_token(), hub=False))


# --- files


def test_an_old_copy_of_another_nodes_records_does_not_stay(tmp_path: Path) -> None:
    config = {"attempt_dir": str(tmp_path), "nnodes": 2}
    for name in ("node-0/exit.json", "node-1/exit.json", "calls/a.json"):
        write(tmp_path / name, restart=0)
    path = entry.place_config(config, 1)
    assert json.loads(Path(path).read_text()) == config
    assert sorted(each.name for each in tmp_path.iterdir()) == ["agent.json", "node-1"]


def test_the_working_copy_gets_the_place_of_what_an_image_has_there(tmp_path: Path) -> None:
    work = tmp_path / "code"
    entry.make_room(str(work))
    work.mkdir()
    entry.make_room(str(work))
    assert not work.exists()
    write(work / "of-the-image.json")
    entry.make_room(str(work))
    assert not work.exists()
    assert (tmp_path / "code.image/of-the-image.json").exists()


def test_secrets_are_private_and_those_of_a_container_before_are_gone(tmp_path: Path) -> None:
    source, private = tmp_path / "channel", tmp_path / "private"
    write(private / "secrets.json", OLD="old")
    write(source / "link.json", token="t")
    entry.place_private(str(source), str(private), {})
    assert [path.name for path in private.iterdir()] == ["link.json"]
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert stat.S_IMODE((private / "link.json").stat().st_mode) == 0o600


def test_without_boto3_in_the_image_secrets_of_secrets_manager_are_a_clear_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "boto3.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    config = {"backend": {"secrets": {"from": "secretsmanager", "id": "orc/x", "region": "us-east-1"}}}
    with pytest.raises(entry.Failure, match="the image has no boto3"):
        entry.place_private(str(tmp_path), str(tmp_path / "private"), config)


def test_a_broken_archive_is_a_clear_failure(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    archive.write_bytes(b"not an archive")
    with pytest.raises(entry.Failure, match=r"source.tar.gz cannot be unpacked"):
        entry.unpack(str(archive), str(tmp_path / "root"))


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
    with pytest.raises(entry.Failure, match="cannot be unpacked"):
        entry.unpack(str(archive), str(tmp_path / "root"))
    assert not os.path.exists(tmp_path / "outside")


@pytest.mark.usefixtures("_filters")
def test_links_within_an_archive_stay(tmp_path: Path) -> None:
    archive = tmp_path / "source.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for member in (_member("code/data/set"), _member("code/newest", "data/set"), _member("code/data/up", "..")):
            tar.addfile(member)
    entry.unpack(str(archive), str(tmp_path / "root"))
    assert (tmp_path / "root/code/newest").samefile(tmp_path / "root/code/data/up/data/set")
