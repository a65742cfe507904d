"""Which files make a snapshot: git's view, ignore files, links, odd files, and what it costs to look again."""

from __future__ import annotations

import ast
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pathspec  # noqa: F401 - a child that gives up its rights may not be able to read it any more
import pytest

from orc.launchers.errors import BundleError
from orc.launchers.snapshot import hashing
from orc.launchers.snapshot import scan as bundle
from orc.launchers.snapshot.manifest import EXECUTABLE, FILE
from orc.launchers.snapshot.runtime_tree import runtime_bundle, runtime_files
from orc.launchers.snapshot.scan import SourceTree, scan


def git(directory: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "init.defaultBranch=main", *words], cwd=directory, check=True, capture_output=True)


def write(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")


def paths(tree: SourceTree) -> list[str]:
    return [entry.path for entry in tree.bundle.entries]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    root = tmp_path / "plain"
    root.mkdir()
    return root


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    root.mkdir()
    git(root, "init", "-q")
    return root


def test_git_runs_nothing_that_a_repository_asks_for(repository: Path, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {ran}\n")
    program.chmod(0o755)
    write(repository, "train.py", "sub/data.py")
    git(repository, "add", "train.py")
    hooks = repository / ".git" / "hooks"
    for name in ("post-index-change", "pre-commit", "fsmonitor-watchman"):
        (hooks / name).write_text(program.read_text())
        (hooks / name).chmod(0o755)
    for key in ("core.fsmonitor", "core.sshCommand", "core.pager", "remote.origin.uploadpack"):
        git(repository, "config", key, str(program))
    git(repository, "config", "core.untrackedCache", "true")
    assert paths(scan(repository)) == ["sub/data.py", "train.py"]
    assert not ran.exists()


def test_git_that_waits_for_a_pipe_is_given_up(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(repository, "train.py")
    os.mkfifo(repository.parent / "ignored")
    git(repository, "config", "core.excludesFile", str(repository.parent / "ignored"))
    monkeypatch.setattr("orc.launchers.snapshot.listing._GIT_S", 0.3)
    with pytest.raises(BundleError, match="git has not listed the working tree within") as caught:
        scan(repository)
    assert "core.excludesFile" in caught.value.hint


_KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (".env", ""),
        ("sub/.env.production", ""),
        ("keys/id_ed25519", ""),
        ("deploy.pem", f"# ours\n{_KEY}"),
        ("tls.key", "-----BEGIN RSA PRIVATE KEY-----"),
        ("my-service-account.json", '{"private_key": "-----BEGIN PRIVATE KEY-----"}'),
        (".aws/credentials", ""),
        ("store.p12", ""),
        ("ada.token", ""),
    ],
)
def test_files_with_credentials_are_named(plain: Path, name: str, content: str) -> None:
    write(plain, "train.py", name)
    (plain / name).write_text(content)
    (finding,) = scan(plain).findings
    assert (finding.level, finding.what) == ("warning", f"the snapshot holds what looks like credentials: {name}")
    assert "workdir.exclude" in finding.hint
    assert scan(plain, [name]).findings == ()


def test_what_only_sounds_like_credentials_is_not_named(plain: Path) -> None:
    names = (".env.example", "environment.py", "id_rsa.pub", "ca.pem", "key.py", "sub/.envrc.md", "credentials.json")
    write(plain, *names)
    (plain / "ca.pem").write_text("-----BEGIN CERTIFICATE-----\n")
    assert scan(plain).findings == ()


def test_many_files_with_credentials_are_counted(plain: Path) -> None:
    write(plain, *(f"{number}/.env" for number in range(7)))
    (finding,) = scan(plain).findings
    assert finding.what.endswith("0/.env, 1/.env, 2/.env, 3/.env, 4/.env and 2 more")


@pytest.fixture(params=["with git", "without git"])
def either(request: pytest.FixtureRequest, plain: Path) -> Path:
    """The same rules must hold in a repository and in a plain directory."""
    if request.param == "with git":
        git(plain, "init", "-q")
    return plain


def test_git_sees_committed_changed_staged_and_untracked_files(repository: Path) -> None:
    write(repository, "committed.py", "changed.py", "deleted.py", "pkg/mod.py")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "first")
    before = scan(repository)
    (repository / "changed.py").write_text("uncommitted\n")
    (repository / "deleted.py").unlink()
    write(repository, "untracked.py", "staged.py")
    git(repository, "add", "staged.py")
    after = scan(repository)
    assert paths(after) == ["changed.py", "committed.py", "pkg/mod.py", "staged.py", "untracked.py"]
    assert after.bundle.by_path["changed.py"] != before.bundle.by_path["changed.py"]
    assert after.bundle.by_path["committed.py"] == before.bundle.by_path["committed.py"]


def test_ignored_files_stay_out_unless_git_tracks_them(repository: Path) -> None:
    write(repository, "train.py", "out/log.txt", "forced.log", "stray.log")
    (repository / ".gitignore").write_text("*.log\n/out/\n")
    git(repository, "add", "-f", "forced.log")
    assert paths(scan(repository)) == [".gitignore", "forced.log", "train.py"]


def test_a_subdirectory_of_a_repository_obeys_the_rules_above_it(repository: Path) -> None:
    (repository / ".gitignore").write_text("*.ckpt\n")
    write(repository, "elsewhere.py", "exp/train.py", "exp/model.ckpt", "exp/lib/net.py")
    assert paths(scan(repository / "exp")) == ["lib/net.py", "train.py"]


def test_a_directory_that_a_repository_further_up_ignores_is_taken_whole(repository: Path) -> None:
    # A home directory under git, with everything ignored, is common; the job's directory was named on purpose.
    (repository / ".gitignore").write_text("*\n")
    write(repository, "project/train.py", "project/sub/net.py")
    assert paths(scan(repository / "project")) == ["sub/net.py", "train.py"]


def test_files_of_submodules_and_nested_repositories_are_included(tmp_path: Path, repository: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    write(library, "lib.py", "junk.log")
    (library / ".gitignore").write_text("*.log\n")
    git(library, "add", ".")
    git(library, "commit", "-qm", "first")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "third/lib")
    write(repository, "train.py")
    write(repository / "third/lib", "uncommitted.py", "more.log")
    shutil.copytree(library, repository / "cloned")
    assert paths(scan(repository)) == [
        ".gitmodules",
        "cloned/.gitignore",
        "cloned/lib.py",
        "third/lib/.gitignore",
        "third/lib/lib.py",
        "third/lib/uncommitted.py",
        "train.py",
    ]


def test_a_submodule_that_is_not_checked_out_is_reported(tmp_path: Path, repository: Path) -> None:
    library = tmp_path / "library"
    library.mkdir()
    git(library, "init", "-q")
    write(library, "lib.py")
    git(library, "add", ".")
    git(library, "commit", "-qm", "first")
    git(repository, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "lib")
    git(repository, "commit", "-qm", "with a submodule")
    git(tmp_path, "clone", "-q", str(repository), "fresh")
    (finding,) = scan(tmp_path / "fresh").findings
    assert (finding.level, finding.where) == ("warning", "lib")
    assert "git submodule update --init" in finding.hint


def test_a_repository_inside_a_plain_directory_keeps_its_own_rules(plain: Path) -> None:
    write(plain, "train.py", "lib/net.py", "lib/build/x.o")
    git(plain / "lib", "init", "-q")
    (plain / "lib/.git/info/exclude").write_text("build/\n")
    assert paths(scan(plain)) == ["lib/net.py", "train.py"]


def test_another_repository_named_in_the_environment_has_no_say(
    tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, "train.py")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "other.git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "index"))
    assert paths(scan(repository)) == ["train.py"]


def test_without_the_git_program_gitignore_still_holds(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(repository, "train.py", "junk.log", "sub/keep.log")
    (repository / ".gitignore").write_text("*.log\n")
    (repository / "sub/.gitignore").write_text("!keep.log\n")
    with_git = scan(repository)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert scan(repository).bundle == with_git.bundle
    assert paths(with_git) == [".gitignore", "sub/.gitignore", "sub/keep.log", "train.py"]


def test_a_repository_of_another_user_is_walked_without_git_and_reported(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, "train.py", "junk.log")
    (repository / ".gitignore").write_text("*.log\n")
    trusted = scan(repository)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    tree = scan(repository)
    assert tree.bundle == trusted.bundle
    (finding,) = tree.findings
    assert finding.level == "warning"
    assert finding.hint == f"git config --global --add safe.directory {repository}"


def test_a_damaged_repository_is_an_error_not_a_guess(repository: Path) -> None:
    write(repository, "train.py")
    git(repository, "add", ".")
    (repository / ".git/index").write_bytes(b"garbage")
    with pytest.raises(BundleError, match="git cannot list the working tree") as caught:
        scan(repository)
    assert caught.value.where == str(repository)


def test_a_tracked_directory_replaced_by_a_link_or_a_file_is_what_it_is_now(repository: Path, tmp_path: Path) -> None:
    write(repository, "a/x.py", "b/y.py", "real/x.py", "c")
    git(repository, "add", ".")
    shutil.rmtree(repository / "a")
    shutil.rmtree(repository / "b")
    (repository / "c").unlink()
    (repository / "a").symlink_to("real")
    write(repository, "b", "c/z.py")
    assert paths(scan(repository)) == ["a", "b", "c/z.py", "real/x.py"]


def test_merge_conflicts_do_not_list_a_file_twice(repository: Path) -> None:
    write(repository, "train.py")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "base")
    git(repository, "checkout", "-qb", "other")
    (repository / "train.py").write_text("theirs\n")
    git(repository, "commit", "-qam", "theirs")
    git(repository, "checkout", "-q", "main")
    (repository / "train.py").write_text("ours\n")
    git(repository, "commit", "-qam", "ours")
    assert subprocess.run(["git", "merge", "other"], cwd=repository, capture_output=True).returncode == 1
    assert paths(scan(repository)) == ["train.py"]


def test_orcignore_excludes_tracked_files_at_any_depth(either: Path) -> None:
    write(either, "train.py", "data/a.bin", "data/keep.bin", "notes/x.md", "sub/data/b.bin", "sub/deep/c.tmp")
    if (either / ".git").exists():
        git(either, "add", ".")
    (either / ".orcignore").write_text("# comment\n\ndata/*\n!data/keep.bin\nnotes/\r\n")
    (either / "sub/.orcignore").write_text("*.tmp\n")
    assert paths(scan(either)) == [".orcignore", "data/keep.bin", "sub/.orcignore", "sub/data/b.bin", "train.py"]


def test_exclude_patterns_win_over_ignore_files(either: Path) -> None:
    write(either, "train.py", "a.csv", "b.csv", "big/c.csv", "big/d.py")
    (either / ".orcignore").write_text("*.csv\n.orcignore\n")
    assert paths(scan(either)) == ["big/d.py", "train.py"]
    assert paths(scan(either, ["!a.csv", "/big"])) == ["a.csv", "train.py"]


def test_nothing_below_an_excluded_directory_comes_back(either: Path) -> None:
    write(either, "a/b/c.py", "train.py")
    (either / ".orcignore").write_text("a/\n!a/b/c.py\n.orcignore\n")
    assert paths(scan(either)) == ["train.py"]


@pytest.mark.parametrize("pattern", ["!", "trailing\\", "[z-a]"])
def test_a_line_that_is_no_pattern_is_named(either: Path, pattern: str) -> None:
    (either / ".orcignore").write_text(f"*.log\n{pattern}\n")
    write(either, "train.py")
    with pytest.raises(BundleError, match="not an ignore pattern") as caught:
        scan(either)
    assert caught.value.where == f"{either / '.orcignore'}:2"
    (either / ".orcignore").unlink()
    with pytest.raises(BundleError, match="not an ignore pattern") as caught:
        scan(either, ["*.log", pattern])
    assert caught.value.where == "workdir.exclude:2"


def test_repository_metadata_and_byte_code_never_travel(either: Path) -> None:
    write(either, "train.py", "pkg/__pycache__/m.cpython-311.pyc", "stray.pyc", "sub/.git/config", ".github/ci.yml")
    if (either / ".git").exists():
        shutil.rmtree(either / "sub")
        git(either, "add", "-f", "stray.pyc")
    assert [p for p in paths(scan(either)) if not p.startswith("sub/")] == [".github/ci.yml", "train.py"]
    assert not [p for p in paths(scan(either)) if ".git/" in p]


def test_modes_are_reduced_to_executable_or_not(either: Path) -> None:
    write(either, "private.py", "shared.py", "run.sh")
    (either / "private.py").chmod(0o600)
    (either / "shared.py").chmod(0o664)
    (either / "run.sh").chmod(0o700)
    modes = {entry.path: entry.mode for entry in scan(either).bundle.entries}
    assert modes == {"private.py": FILE, "shared.py": FILE, "run.sh": EXECUTABLE}


def test_the_digest_ignores_times_and_place(either: Path, tmp_path: Path) -> None:
    write(either, "train.py", "pkg/a.py")
    digest = scan(either).digest
    copied = tmp_path / "elsewhere"
    copied.mkdir()
    for name in ("train.py", "pkg/a.py"):
        write(copied, name)
    os.utime(copied / "train.py", (1, 1))
    assert scan(copied).digest == digest


def test_links_inside_the_tree_are_kept_as_links(either: Path) -> None:
    write(either, "runs/1/model.py")
    (either / "latest").symlink_to("runs/1")
    (either / "runs/self").symlink_to("../runs/1/model.py")
    tree = scan(either)
    assert {e.path: e.target for e in tree.bundle.entries if e.target} == {
        "latest": "runs/1",
        "runs/self": "../runs/1/model.py",
    }
    assert not tree.findings


@pytest.mark.parametrize("target", ["/etc/hostname", "../outside"])
def test_a_link_out_of_the_tree_is_refused_with_advice_unless_excluded(either: Path, target: str) -> None:
    write(either, "train.py")
    write(either.parent, "outside")
    (either / "data").symlink_to(target)
    with pytest.raises(BundleError, match="outside the working directory") as caught:
        scan(either)
    assert caught.value.where == "data"
    assert ".orcignore" in caught.value.hint
    assert paths(scan(either, ["/data"])) == ["train.py"]


def test_a_link_to_something_left_out_is_kept_and_reported(either: Path) -> None:
    write(either, "big/data.bin")
    (either / "link").symlink_to("big/data.bin")
    tree = scan(either, ["big/"])
    assert paths(tree) == ["link"]
    (finding,) = tree.findings
    assert (finding.where, finding.level) == ("link", "warning")


def test_a_working_directory_that_is_a_link_is_followed(either: Path, tmp_path: Path) -> None:
    write(either, "train.py")
    (tmp_path / "alias").symlink_to(either)
    assert scan(tmp_path / "alias") == scan(either)


def test_pipes_and_sockets_are_left_out_and_reported(plain: Path) -> None:
    write(plain, "train.py")
    os.mkfifo(plain / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(plain)  # a socket's path is limited to 108 bytes
        try:
            server.bind("sock")
        finally:
            os.chdir(here)
        tree = scan(plain)
    assert paths(tree) == ["train.py"]
    assert {f.where: f.what for f in tree.findings} == {
        "pipe": "left out: it is a named pipe, not a file",
        "sock": "left out: it is a socket, not a file",
    }


def test_a_name_with_control_characters_is_refused_unless_excluded(either: Path) -> None:
    write(either, "train.py", "new\nline.py")
    with pytest.raises(BundleError, match="printable characters") as caught:
        scan(either)
    assert caught.value.where == r"'new\nline.py'"
    assert paths(scan(either, ["new*"])) == ["train.py"]


def test_unicode_spaces_and_signs_in_names_survive(either: Path) -> None:
    names = ["daten/größe 1.py", "日本語.py", "back\\slash.py", "-rf", "a'b\"c$d.py"]
    write(either, *names)
    tree = scan(either)
    assert paths(tree) == sorted(names)
    assert Path(os.fsdecode(tree.sources["日本語.py"])).read_text() == "content of 日本語.py\n"


def test_a_name_that_is_not_utf8_is_refused_unless_excluded(either: Path) -> None:
    write(either, "train.py")
    with open(os.path.join(os.fsencode(either), b"caf\xe9.txt"), "wb"):
        pass
    with pytest.raises(BundleError, match="not UTF-8") as caught:
        scan(either)
    assert r"caf\xe9.txt" in caught.value.where
    assert paths(scan(either, ["*.txt"])) == ["train.py"]


def as_nobody(work: Callable[[], object]) -> str:
    """Run *work* in a child without root's right to read everything; what it returns comes back as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            text = str(work())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that another user can reach, which pytest's own temporary directories are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_an_unreadable_file_is_named(open_to_all: Path) -> None:
    root = open_to_all / "tree"
    write(root, "train.py", "secret.pem")
    root.chmod(0o755)
    (root / "secret.pem").chmod(0)
    said = as_nobody(lambda: scan(root))
    assert said.startswith(f"BundleError: {root / 'secret.pem'}: cannot read: Permission denied")
    assert ".orcignore" in said
    assert "train.py" in as_nobody(lambda: paths(scan(root, ["*.pem"])))


def test_an_unreadable_directory_is_named(open_to_all: Path) -> None:
    root = open_to_all / "tree"
    write(root, "train.py", "private/x.py")
    root.chmod(0o755)
    (root / "private").chmod(0)
    assert as_nobody(lambda: scan(root)).startswith(f"BundleError: {root / 'private'}: cannot read: Permission denied")
    (root / "private").chmod(0o755)
    root.chmod(0)
    assert "BundleError" in as_nobody(lambda: scan(root))
    root.chmod(0o755)


@pytest.mark.parametrize("kind", ["missing", "a file"])
def test_a_working_directory_that_is_none_is_refused(tmp_path: Path, kind: str) -> None:
    if kind == "a file":
        write(tmp_path, "dir")
    with pytest.raises(BundleError, match="director") as caught:
        scan(tmp_path / "dir")
    assert caught.value.where == str(tmp_path / "dir")


def test_a_file_that_never_holds_still_is_refused(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(plain, "log.txt")
    real = os.read

    def read_while_written(fd: int, size: int) -> bytes:
        with open(plain / "log.txt", "a") as log:
            log.write("more\n")
        return real(fd, size)

    monkeypatch.setattr(hashing.os, "read", read_while_written)
    with pytest.raises(BundleError, match="changes while it is read") as caught:
        scan(plain)
    assert caught.value.where == str(plain / "log.txt")


def test_a_file_that_changes_once_while_it_is_read_is_read_again(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(plain, "log.txt")
    real, pending = os.read, ["late\n"]

    def read_while_written(fd: int, size: int) -> bytes:
        if pending:
            (plain / "log.txt").write_text(pending.pop())
        return real(fd, size)

    monkeypatch.setattr(hashing.os, "read", read_while_written)
    changed = scan(plain)
    monkeypatch.undo()
    assert changed.bundle == scan(plain).bundle


def test_a_file_that_vanishes_during_the_scan_is_left_out(either: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(either, "train.py", "editor.tmp")
    real = bundle.Listing

    def list_and_delete(*args: Any) -> Any:
        listing = real(*args)
        (either / "editor.tmp").unlink()
        return listing

    monkeypatch.setattr(bundle, "Listing", list_and_delete)
    assert paths(scan(either)) == ["train.py"]


# --- the stat cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose contents were read."""
    names: list[str] = []
    real = hashing.hash_file

    def counted(path: bytes, *rest: object) -> tuple[str, os.stat_result]:
        names.append(os.path.basename(os.fsdecode(path)))
        return real(path, *rest)

    monkeypatch.setattr(hashing, "hash_file", counted)
    return names


def age(*files: Path) -> None:
    """Wait until the files' change times are out of the racy window (made short for the test)."""
    newest = max(max(f.stat().st_mtime_ns, f.stat().st_ctime_ns) for f in files)
    while time.time_ns() - newest <= hashing.RACY_NS:
        time.sleep(0.005)


@pytest.fixture
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "RACY_NS", 20_000_000)


@pytest.mark.usefixtures("short_window")
def test_unchanged_files_are_not_read_again(plain: Path, tmp_path: Path, reads: list[str]) -> None:
    write(plain, "a.py", "b.py")
    age(plain / "a.py", plain / "b.py")
    first = scan(plain, cache=tmp_path / "cache")
    assert sorted(reads) == ["a.py", "b.py"]
    assert scan(plain, cache=tmp_path / "cache") == first
    assert len(reads) == 2


@pytest.mark.usefixtures("short_window")
def test_a_change_that_keeps_size_and_modification_time_is_seen(plain: Path, tmp_path: Path) -> None:
    write(plain, "a.py")
    before = (plain / "a.py").stat()
    age(plain / "a.py")
    first = scan(plain, cache=tmp_path / "cache")
    (plain / "a.py").write_text("content of b.py\n")
    os.utime(plain / "a.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scan(plain, cache=tmp_path / "cache").digest != first.digest


def test_a_file_too_young_to_trust_its_times_is_read_again(
    plain: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashing, "RACY_NS", 600 * 10**9)  # so young, however slow this test is
    write(plain, "a.py")
    scan(plain, cache=tmp_path / "cache")
    scan(plain, cache=tmp_path / "cache")
    assert reads == ["a.py", "a.py"]


@pytest.mark.usefixtures("short_window")
@pytest.mark.parametrize("damage", [b"", b"not json", b"[]", b'{"format":1,"files":{"a.py":[1]}}', b'{"format":9}'])
def test_a_damaged_cache_costs_time_only(plain: Path, tmp_path: Path, damage: bytes, reads: list[str]) -> None:
    write(plain, "a.py")
    age(plain / "a.py")
    first = scan(plain, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(damage)
    assert scan(plain, cache=tmp_path / "cache") == first
    assert reads == ["a.py", "a.py"]
    scan(plain, cache=tmp_path / "cache")
    assert len(reads) == 2


def test_a_cache_that_cannot_be_written_does_not_stop_a_scan(plain: Path, tmp_path: Path) -> None:
    write(plain, "a.py")
    write(tmp_path, "cache")  # a file where a directory should be
    assert paths(scan(plain, cache=tmp_path / "cache")) == ["a.py"]


# --- the runtime ------------------------------------------------------------------------------------------------------


def test_the_runtime_travels_with_its_agent_and_nothing_else(tmp_path: Path) -> None:
    tree = runtime_bundle(cache=tmp_path)
    names = paths(tree)
    own = {"__main__.py", "sitecustomize.py"}
    shipped = {"orc/runtime/__init__.py", "orc/runtime/core/config.py", "lib/orc/launchers/agent/node.py"}
    assert own | shipped <= set(names)
    rooms = ("orc/runtime/", "lib/orc/launchers/agent/", "lib/orc/launchers/environments/")
    assert all(n in own or (n.startswith(rooms) and n.endswith(".py")) for n in names)
    # Namespace packages on the nodes too: what is installed there stays to be found.
    assert not [n for n in names if n == "orc/__init__.py" or n.startswith("orc/launchers")]
    assert runtime_bundle(cache=tmp_path) == tree
    assert runtime_bundle() == tree


def test_what_travels_imports_the_standard_library_and_what_travels(tmp_path: Path) -> None:
    files = {path: source for path, source in runtime_files().items() if path.startswith("lib/orc/launchers/")}
    for path, source in files.items():
        tree = ast.parse(Path(os.fsdecode(source)).read_bytes(), feature_version=(3, 9))
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                module = f"lib/{name.replace('.', '/')}"
                own = f"{module}.py" in files or f"{module}/__init__.py" in files
                assert own or name.partition(".")[0] in sys.stdlib_module_names, f"{path} imports {name}"
