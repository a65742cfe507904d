"""Where orc keeps things."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from orc.launchers.errors import LaunchError
from orc.launchers.paths import clusters_file, config_dir, state_dir


def test_variables_move_every_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORC_STATE_DIR", str(tmp_path / "s"))
    monkeypatch.setenv("ORC_CONFIG_DIR", str(tmp_path / "c"))
    assert (state_dir(), config_dir()) == (tmp_path / "s", tmp_path / "c")
    assert clusters_file() == tmp_path / "c" / "clusters.yaml"
    monkeypatch.setenv("ORC_CLUSTERS", str(tmp_path / "x.yaml"))
    assert clusters_file() == tmp_path / "x.yaml"


def test_defaults_are_the_users_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ORC_STATE_DIR", "ORC_CONFIG_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    assert state_dir() == tmp_path / ".local" / "state" / "orc"
    assert config_dir() == tmp_path / "xdg" / "orc"


def test_paths_are_absolute_and_know_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("ORC_CONFIG_DIR", "~/c")
    monkeypatch.setenv("ORC_STATE_DIR", "s")
    assert (config_dir(), state_dir()) == (Path("/home/ada/c"), tmp_path / "s")


def test_the_state_directory_is_private_and_made_once(orc_home: Path) -> None:
    assert not state_dir(create=False).exists()
    old = os.umask(0)
    try:
        path = state_dir()
    finally:
        os.umask(old)
    assert path == orc_home / "state"
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert state_dir() == path


def test_a_place_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORC_STATE_DIR", str(tmp_path / "file" / "state"))
    with pytest.raises(LaunchError) as caught:
        state_dir()
    assert str(caught.value) == (
        f"{tmp_path}/file/state: the state directory cannot be created: a file is in the way\n"
        "  set ORC_STATE_DIR to a directory you can write to"
    )
