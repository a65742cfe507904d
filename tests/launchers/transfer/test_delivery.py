"""Bringing snapshots to hosts: what arrives, how little is sent, and what one host's trouble means to the others."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from polling import until

from orc.launchers.errors import BackendError, BackendUnreachable, BundleError
from orc.launchers.remote import programs
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.manifest import EXECUTABLE, FILE, Bundle, Entry
from orc.launchers.snapshot.runtime_tree import runtime_bundle
from orc.launchers.transfer import delivery
from orc.launchers.transfer.delivery import SyncReport, compare, lacking, raise_first, sync
from orc.launchers.transfer.wire import pack_manifests, send_contents

from .conftest import Host, state_of, targets

Lab = Callable[[int], dict[str, Host]]


def good(reports: dict[str, SyncReport]) -> dict[str, SyncReport]:
    for report in reports.values():
        assert report.error is None, report
    return reports


def sources(reports: dict[str, SyncReport]) -> list[str]:
    return sorted(report.source.split()[0] for report in reports.values() if report.source)


def test_a_host_gets_exactly_what_a_copy_of_the_store_would_hold(
    code: Bundle, store: ContentStore, lab: Lab, tmp_path: Path
) -> None:
    hosts, copy = lab(3), ContentStore(tmp_path / "copy/store")
    store.copy_to(copy, code.digest)
    good(sync([code], store, targets(hosts)))
    for host in hosts.values():
        assert host.store.verify(code.digest) == []
        assert host.store.load(code.digest) == code
        assert state_of(host.store) == state_of(copy)


def test_an_unchanged_snapshot_costs_one_short_exchange_and_writes_nothing(
    code: Bundle, store: ContentStore, lab: Lab
) -> None:
    hosts = lab(2)
    runtime = store.ingest(runtime_bundle())
    good(sync([code, runtime], store, targets(hosts)))
    before = {h: {p: p.lstat().st_mtime_ns for p in hosts[h].root.rglob("*")} for h in hosts}
    turns: list[str] = []
    hosts["node1"].started.clear()
    hosts["node1"].watch = lambda direction, _: None if turns[-1:] == [direction] else turns.append(direction)
    reports = good(sync([code, runtime], store, targets(hosts)))
    assert turns == ["to", "from"]
    assert hosts["node1"].started == []  # nothing but the one question
    assert all(report.sent < 1_000 and not report.new for report in reports.values())
    assert before == {h: {p: p.lstat().st_mtime_ns for p in hosts[h].root.rglob("*")} for h in hosts}


def test_every_host_gets_each_content_once_from_the_laptop(code: Bundle, store: ContentStore, lab: Lab) -> None:
    reports = good(sync([code], store, targets(lab(4))))
    assert sources(reports) == ["laptop"] * 4
    assert all(700_000 < report.sent < 1_000_000 for report in reports.values())
    assert all(report.contents == len({e.sha256 for e in code.entries if not e.target}) for report in reports.values())


def test_what_many_hosts_lack_is_packed_once(
    code: Bundle, store: ContentStore, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []

    def send(contents: Any, *rest: Any, **options: Any) -> None:
        packed.append(len(contents))
        send_contents(contents, *rest, **options)

    monkeypatch.setattr(delivery, "send_contents", send)
    reports = good(sync([code], store, targets(lab(4))))
    assert len(packed) == 1
    assert len({report.sent for report in reports.values()}) == 1


def test_only_what_is_missing_is_sent(tree: Path, code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(1)
    sync([code], store, targets(hosts))
    (tree / "train.py").write_text("print('changed')\n")
    (tree / "new.py").write_text("print('new')\n")
    changed = store.snapshot(tree).bundle
    report = good(sync([code, changed], store, targets(hosts)))["node1"]
    assert (report.contents, report.new) == (2, (changed.digest,))
    assert report.sent < 100_000
    assert hosts["node1"].store.verify(changed.digest) == []


def test_contents_that_two_snapshots_share_are_sent_once(
    tree: Path, code: Bundle, store: ContentStore, lab: Lab
) -> None:
    (tree / "train.py").write_text("print('changed')\n")
    changed = store.snapshot(tree).bundle
    report = good(sync([code, changed], store, targets(lab(1))))["node1"]
    assert report.sent < 1.5 * 700_000
    assert set(report.new) == {code.digest, changed.digest}


def test_progress_is_told_for_each_host(code: Bundle, store: ContentStore, lab: Lab) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    sync(
        [code], store, targets(lab(3)), on_progress=lambda h, done, total: seen.setdefault(h, []).append((done, total))
    )
    assert set(seen) == {"node1", "node2", "node3"}
    assert all(steps[-1][0] == steps[-1][1] > 700_000 for steps in seen.values())


def test_a_dry_run_says_what_would_be_sent_and_changes_nothing(code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(2)
    sync([code], store, targets({"node1": hosts["node1"]}))
    before = state_of(hosts["node1"].store)
    reports = good(sync([code], store, targets(hosts), dry_run=True))
    assert reports["node1"].missing == frozenset()
    assert reports["node2"].missing == {e.sha256 for e in code.entries if not e.target}
    assert not hosts["node2"].root.exists()
    assert state_of(hosts["node1"].store) == before


def test_a_content_damaged_on_the_host_is_sent_again(tree: Path, code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(1)
    sync([code], store, targets(hosts))
    victim = hosts["node1"].store.tree_path(code.digest) / "train.py"
    victim.chmod(0o600)
    victim.write_text("print('evil!')\n")
    (tree / "new.py").touch()
    changed = store.snapshot(tree).bundle
    report = good(sync([changed], store, targets(hosts)))["node1"]
    assert report.contents == 1
    assert hosts["node1"].store.verify(changed.digest) == []


def test_a_content_damaged_here_is_named_and_nothing_appears(code: Bundle, store: ContentStore, lab: Lab) -> None:
    victim = store.tree_path(code.digest) / "train.py"
    victim.chmod(0o600)
    victim.write_text("print('evil!')\n")
    hosts = lab(2)
    reports = sync([code], store, targets(hosts))
    for name, report in reports.items():
        assert isinstance(report.error, BundleError)
        assert "train.py" in report.error.what
        assert not hosts[name].store.has(code.digest)
        assert os.listdir(hosts[name].root / "store/tmp") == []


# --- hosts in trouble -------------------------------------------------------------------------------------------------


class Unreachable(Host):
    def stream(self, *_: Any, **__: Any) -> Any:
        raise BackendUnreachable("no route to host", where=self.name)


def test_an_unreachable_host_is_named_and_the_others_get_theirs(code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(4)
    hosts["node2"] = Unreachable("node2", hosts["node2"].root)
    reports = sync([code], store, targets(hosts))
    assert isinstance(reports["node2"].error, BackendUnreachable)
    assert [name for name, report in reports.items() if report.error] == ["node2"]
    assert all(hosts[name].store.has(code.digest) for name in ("node1", "node3", "node4"))
    with pytest.raises(BackendUnreachable, match="no route to host") as caught:
        raise_first(reports)
    assert "node2" in str(caught.value)


def test_a_python_that_is_not_there_is_named(code: Bundle, store: ContentStore, lab: Lab) -> None:
    report = sync([code], store, targets(lab(1)), pythons={"node1": "/no/python"})["node1"]
    assert isinstance(report.error, BackendError)
    assert "/no/python: command not found" in report.error.what
    assert "node1" in str(report.error)


def wrapper(directory: Path, text: str) -> str:
    path = directory / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_python_that_is_too_old_is_named(code: Bundle, store: ContentStore, lab: Lab, tmp_path: Path) -> None:
    old = wrapper(tmp_path, 'exec python3 -I -S -c "import sys; sys.version_info = (3, 6, 8)\n$4" "$5" "$6"')
    report = sync([code], store, targets(lab(1)), pythons={"node1": old})["node1"]
    assert "is too old: Python 3.6.8" in str(report.error)


def test_what_a_login_shell_prints_first_does_no_harm(
    code: Bundle, store: ContentStore, lab: Lab, tmp_path: Path
) -> None:
    chatty = wrapper(tmp_path, 'echo "Welcome to the cluster"; exec python3 "$@"')
    good(sync([code], store, targets(lab(1)), pythons={"node1": chatty}))


def test_a_root_that_cannot_be_made_is_named(code: Bundle, store: ContentStore, lab: Lab, tmp_path: Path) -> None:
    hosts = lab(2)
    hosts["node1"].root = tmp_path / "file/orc"
    (tmp_path / "file").touch()
    reports = sync([code], store, targets(hosts))
    assert "node1" in str(reports["node1"].error)
    assert str(tmp_path / "file") in str(reports["node1"].error)
    assert reports["node2"].error is None


def test_a_full_disk_is_named_with_what_is_missing_and_the_others_get_theirs(
    code: Bundle, store: ContentStore, lab: Lab, small_disk: Path
) -> None:
    hosts = lab(3)
    hosts["node2"].root = small_disk / "orc"
    reports = sync([code], store, targets(hosts))
    assert [name for name, report in reports.items() if report.error] == ["node2"]
    error = reports["node2"].error
    assert isinstance(error, BundleError)
    assert "no space for the snapshot: it needs" in error.what
    assert error.where == f"node2: {small_disk}/orc/store"
    assert os.listdir(small_disk / "orc/store/tmp") == os.listdir(small_disk / "orc/store/cas") == []


def test_a_disk_that_fills_up_on_the_way_is_named(
    code: Bundle, store: ContentStore, lab: Lab, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when somebody else fills it meanwhile: the look at the free space before it was good."""
    alter_program(monkeypatch, "if needed > free:", "if False:")
    hosts = lab(1)
    hosts["node1"].root = small_disk / "orc"
    error = sync([code], store, targets(hosts))["node1"].error
    assert isinstance(error, BundleError)
    assert "No space left on device" in error.what
    assert "still missing" in error.what
    assert os.listdir(small_disk / "orc/store/tmp") == os.listdir(small_disk / "orc/store/cas") == []


def alter_program(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Change one line of what runs on the hosts."""
    receiver = delivery.RECEIVER
    texts = {name: programs.source(name) for name in (receiver.module, *receiver.others)}
    assert sum(text.count(old) for text in texts.values()) == 1
    read = programs.source
    monkeypatch.setattr(programs, "source", lambda name: read(name).replace(old, new))
    monkeypatch.setattr(delivery, "RECEIVER", programs.Program(receiver.module, receiver.others))


# --- shared file systems ----------------------------------------------------------------------------------------------


def test_hosts_that_share_a_file_system_are_synced_once(code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(4)
    for name in ("node2", "node3"):
        hosts[name].root = hosts["node1"].root
    reports = good(sync([code], store, targets(hosts)))
    assert reports["node4"].source == "laptop"
    found = sorted(reports[name].source for name in ("node1", "node2", "node3"))
    # Nothing at all for one that came so late that it missed nothing any more.
    assert found.count("laptop") == 1
    assert set(found) <= {"laptop", "shared", ""}


def test_hosts_made_from_one_image_do_not_pass_for_shared(
    tree: Path, code: Bundle, store: ContentStore, lab: Lab
) -> None:
    hosts = lab(2)
    sync([code], store, targets({"node1": hosts["node1"]}))
    shutil.copytree(hosts["node1"].root, hosts["node2"].root, symlinks=True)
    (tree / "new.py").touch()
    changed = store.snapshot(tree).bundle
    good(sync([changed], store, targets(hosts)))
    assert all(host.store.verify(changed.digest) == [] for host in hosts.values())


def test_hosts_said_to_share_are_not_all_asked(code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(3)
    hosts["node1"] = Unreachable("node1", hosts["node1"].root)
    reports = sync([code], store, targets(hosts), shared=True)
    assert reports["node1"].error is not None
    assert (reports["node2"].source, reports["node3"].source) == ("laptop", "shared with node2")
    assert hosts["node3"].started == []


# --- interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [{}, {"have": 5, "clean": True}, {"have": [[]], "clean": True}])
def test_a_host_that_answers_nonsense_at_first_gets_everything(
    code: Bundle, store: ContentStore, lab: Lab, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any]
) -> None:
    hosts = lab(1)
    ask = hosts["node1"].ask_program
    monkeypatch.setattr(hosts["node1"], "ask_program", lambda *args, **more: (answer, ask(*args, **more)[1]))
    report = good(sync([code], store, targets(hosts)))["node1"]
    assert report.new == (code.digest,)
    assert hosts["node1"].store.verify(code.digest) == []


class Cut(Exception):
    """Somebody pulled the plug."""


@pytest.mark.parametrize(
    ("direction", "after"),
    [
        *(("to", size) for size in (1, 17_000, 21_000, 200_000, 760_000)),
        ("from", 1),
        ("from", 60_000),
        ("from", 500_000),
    ],
)
def test_cut_anywhere_leaves_nothing_partial_and_the_next_sync_mends(
    code: Bundle, store: ContentStore, lab: Lab, direction: str, after: int
) -> None:
    hosts = lab(1)
    host = hosts["node1"]
    went = {"to": 0, "from": 0}

    def watch(way: str, size: int) -> None:
        went[way] += size
        if went[direction] >= (after if direction == "to" else after / 100):
            raise BackendUnreachable("the plug was pulled")

    host.watch = watch
    report = sync([code], store, targets(hosts))["node1"]
    if host.root.exists() and (host.root / "store/trees").exists():
        for path in (host.root / "store/trees").glob("*.json"):
            assert host.store.verify(path.stem) == []
    host.watch = lambda *_: None
    good(sync([code], store, targets(hosts)))
    assert report.error is not None or went[direction] < after
    assert host.store.verify(code.digest) == []
    assert os.listdir(host.root / "store/tmp") == []


def test_a_host_that_hears_nothing_more_gives_up_and_cleans_up(
    code: Bundle, store: ContentStore, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut link closes no connection: the program there must notice by itself."""
    alter_program(monkeypatch, "SILENCE_S = 20.0", "SILENCE_S = 2.0")
    host = lab(1)["node1"]
    with delivery.ReceiverSession(host, "node1", sys.executable) as talk:
        answer = talk.request(
            root=str(host.root), trusted="", dry_run=False, manifests=pack_manifests([code.to_dict()])
        )
        assert answer["new"] == [code.digest]
        assert os.listdir(host.root / "store/tmp") != []
        ended = talk._process.wait()
    assert "fell silent" in ended.stderr
    assert os.listdir(host.root / "store/tmp") == []


def test_a_host_that_waits_for_its_turn_ends_when_the_laptop_goes_away(
    code: Bundle, store: ContentStore, lab: Lab
) -> None:
    first, second = (Host(name, lab(1)["node1"].root) for name in ("first", "second"))
    request = {"trusted": "", "dry_run": False, "manifests": pack_manifests([code.to_dict()])}
    with delivery.ReceiverSession(first, "first", sys.executable) as holder:
        holder.request(root=str(first.root), **request)
        with delivery.ReceiverSession(second, "second", sys.executable) as waiting:
            waiting.write(delivery.encode_message({"root": str(second.root), **request}))
            until(lambda: len(os.listdir(first.root / "store/tmp")) == 2)
        until(lambda: len(os.listdir(first.root / "store/tmp")) == 1)
    until(lambda: os.listdir(first.root / "store/tmp") == [])


def test_a_host_that_asks_for_what_is_in_no_snapshot_is_refused(
    code: Bundle, store: ContentStore, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter_program(monkeypatch, '"missing": list(self._missing), "size"', '"missing": ["e" * 64], "size"')
    report = sync([code], store, targets(lab(1)))["node1"]
    assert isinstance(report.error, BackendError)
    assert "which is in no snapshot" in report.error.what


def test_a_python_in_the_home_directory_is_that_of_the_host(
    code: Bundle, store: ContentStore, lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "python of mine").symlink_to(sys.executable)
    hosts = lab(1)
    raise_first(sync([code], store, targets(hosts), pythons={"node1": "~/python of mine"}))
    assert hosts["node1"].store.has(code.digest)


def test_what_a_killed_sync_left_goes_even_when_the_next_has_nothing_to_send(
    code: Bundle, store: ContentStore, lab: Lab
) -> None:
    hosts = lab(1)
    sync([code], store, targets(hosts))
    child = os.fork()
    if not child:
        with hosts["node1"].store.staging("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert os.listdir(hosts["node1"].root / "store/tmp") != []
    good(sync([code], store, targets(hosts)))
    assert os.listdir(hosts["node1"].root / "store/tmp") == []


def test_several_syncs_to_one_host_at_once_are_safe(code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(1)
    found: list[SyncReport] = []
    threads = [
        threading.Thread(target=lambda: found.extend(sync([code], store, targets(hosts)).values())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [report.error for report in found] == [None] * 4
    assert hosts["node1"].store.verify(code.digest) == []
    assert os.listdir(hosts["node1"].root / "store/tmp") == []


def test_ctrl_c_ends_the_programs_on_all_hosts(code: Bundle, store: ContentStore, lab: Lab) -> None:
    hosts = lab(2)
    processes: list[Any] = []
    stream = Host.stream

    def remember(self: Host, *args: Any, **options: Any) -> Any:
        processes.append(stream(self, *args, **options))
        return processes[-1]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "stream", remember)
        with pytest.raises(KeyboardInterrupt):
            sync([code], store, targets(hosts), on_progress=interrupt)
    until(lambda: all(process._popen.poll() is not None for process in processes))


# --- how two snapshots differ ----------------------------------------------------------------------------------------


def file(path: str, text: str, mode: int = FILE) -> Entry:
    return Entry(path, mode, hashlib.sha256(text.encode()).hexdigest(), len(text))


OLD = Bundle.of([file("a", "1"), file("b", "2"), file("c", "3"), Entry.link("l", "a"), file("same", "s")])
NEW = Bundle.of(
    [file("a", "changed"), file("b", "2", EXECUTABLE), file("d", "3"), Entry.link("l", "b"), file("same", "s")]
)


def test_contents_modes_and_targets_count_as_changes() -> None:
    found = compare(OLD, NEW)
    assert [entry.path for entry in found.new] == ["d"]
    assert [entry.path for entry in found.changed] == ["a", "b", "l"]
    assert [entry.path for entry in found.removed] == ["c"]
    assert found.unchanged == 1


def test_without_an_earlier_snapshot_everything_is_new() -> None:
    found = compare(None, NEW)
    assert (len(found.new), found.unchanged) == (5, 0)


def test_a_file_is_lacking_when_its_content_is() -> None:
    missing = {hashlib.sha256(b"changed").hexdigest()}
    assert [entry.path for entry in lacking(NEW, missing)] == ["a"]
    assert lacking(NEW, ()) == []
