"""What other users could have written is not believed, here and on hosts."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from orc.launchers.backends.ssh import host_program
from orc.launchers.backends.ssh.settings import read_hostfile
from orc.launchers.errors import BundleError, LaunchError, SpecError
from orc.launchers.paths import state_dir
from orc.launchers.remote.ssh.routes import read_config
from orc.launchers.snapshot.content_store import ContentStore
from orc.launchers.snapshot.scan import scan
from orc.launchers.spec.clusters import get_cluster, load_clusters
from orc.launchers.strict_modes import VARIABLE, Untrusted, check, check_root

OTHERS = 0o777, 0o757, 0o722


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir(mode=0o755)
    return path


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs as somebody who owns nothing here, and all of it is somebody else's."""
    real = os.lstat

    def lstat(path: str) -> object:
        found = real(path)
        own = found.st_uid == os.getuid() and not path.count("/") < 2
        return SimpleNamespace(st_uid=4242 if own else 0, st_gid=found.st_gid, st_mode=found.st_mode)

    monkeypatch.setattr(os, "lstat", lstat)


def test_what_is_ones_own_or_not_there_is_believed(root: Path) -> None:
    (root / "file").touch(mode=0o644)
    for path in (root, root / "file", root / "not" / "there", Path(os.devnull)):
        check(path)


@pytest.mark.parametrize("mode", OTHERS)
def test_what_others_can_write_is_not_believed(root: Path, mode: int) -> None:
    inner = root / "store" / "trees"
    inner.mkdir(parents=True)
    for place in (root, root / "store", inner):
        place.chmod(mode)
        with pytest.raises(Untrusted, match=rf"others can write to it \(mode {mode:04o}\): chmod go-w it") as caught:
            check_root(str(root))
        assert caught.value.filename == str(place)
        assert f"{VARIABLE}=" in str(caught.value)
        place.chmod(0o755)
    check_root(str(root))


def test_a_directory_above_may_be_sticky_and_the_last_may_not(root: Path) -> None:
    root.chmod(0o1777)
    check(root / "mine")
    with pytest.raises(Untrusted, match="mode 1777"):
        check(root)


@pytest.mark.usefixtures("stranger")
def test_what_belongs_to_another_user_is_not_believed(root: Path) -> None:
    with pytest.raises(Untrusted, match="it belongs to user 4242: use a directory or file of your own"):
        check(root)


def test_a_link_of_another_user_is_not_followed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(root)
    check(link)
    real = os.lstat

    def lstat(path: str) -> object:
        found = real(path)
        changed = SimpleNamespace(st_uid=4242, st_gid=found.st_gid, st_mode=found.st_mode)
        return changed if path == str(link) else found

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(Untrusted, match="belongs to user 4242"):
        check(link / "store")


@pytest.mark.parametrize(("name", "members", "private"), [("me", [], True), ("me", ["you"], False), ("lab", [], False)])
def test_a_group_of_ones_own_is_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, name: str, members: list[str], private: bool
) -> None:
    gid = root.stat().st_gid
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_gid=gid))
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name=name, gr_mem=members))
    root.chmod(0o775)
    if private:
        check(root)
    else:
        with pytest.raises(Untrusted):
            check(root)


def test_a_path_that_is_named_is_believed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root.chmod(0o777)
    monkeypatch.setenv(VARIABLE, f"/no/such:{root}/")
    check(root)
    check(root / "store")
    monkeypatch.setenv(VARIABLE, f"{root}/store")
    with pytest.raises(Untrusted):
        check(root)


def test_the_state_directory_is_checked_and_made_private(orc_home: Path) -> None:
    before = os.umask(0o002)
    try:
        path = state_dir()
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o7777 == 0o700
    path.chmod(0o777)
    for create in (True, False):
        with pytest.raises(LaunchError, match=r"the state directory .* is not to be trusted") as caught:
            state_dir(create=create)
        assert "chmod go-w" in caught.value.hint


def test_a_root_that_others_prepared_runs_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").touch()
    store = ContentStore(root / "store")
    bundle = store.ingest(scan(tmp_path / "code"))
    assert store.use(bundle.digest)
    for place in (root, root / "store", root / "store" / "trees"):
        before = place.stat().st_mode & 0o7777
        place.chmod(0o777)
        with pytest.raises(BundleError, match="is not to be trusted") as caught:
            store.use(bundle.digest)
        with pytest.raises(BundleError, match="is not to be trusted"):
            store.ingest(scan(tmp_path / "code"))
        assert caught.value.where == str(place)
        place.chmod(before)


def test_files_that_name_machines_and_programs_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("lab: {kind: local}\n")
    monkeypatch.setenv("ORC_CLUSTERS", str(file))
    assert "lab" in load_clusters()
    file.chmod(0o666)
    with pytest.raises(SpecError, match=r"the clusters file .* is not to be trusted"):
        load_clusters()
    with pytest.raises(SpecError, match=r"the clusters file .* is not to be trusted"):
        get_cluster("lab")
    file.write_text("node1\n")
    with pytest.raises(SpecError, match=r"the hostfile .* is not to be trusted"):
        read_hostfile(str(file), "")
    with pytest.raises(SpecError, match=r"the SSH configuration .* is not to be trusted"):
        read_config([str(file)])


@pytest.mark.parametrize("place", ["root", "root/jobs", "root/jobs/x"])
def test_a_host_takes_no_orders_from_a_directory_of_others(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "root" / "jobs" / "x" / "a1"
    directory.mkdir(parents=True)
    (tmp_path / place).chmod(0o777)
    request = {"directory": str(directory), "host": "a", "node": 0, "agent": "{}", "argv": ["python3", str(directory)]}
    for operation in (host_program.prepare, host_program.start):
        with pytest.raises(Untrusted) as caught:
            operation(request)
        assert caught.value.filename == str(tmp_path / place)
    with pytest.raises(Untrusted):
        host_program.end(str(directory))
