"""Where secret values come from, and that they never show."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from orc.launchers.errors import SpecError
from orc.launchers.secrets import redact, resolve_secrets


def _keep(directory: Path, name: str, content: bytes, mode: int = 0o600) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.fixture
def directory(orc_home: Path) -> Path:
    """The default place of secret files."""
    return orc_home / "config" / "secrets"


def test_the_environment_comes_before_the_file(directory: Path) -> None:
    _keep(directory, "A", b"from file\n")
    _keep(directory, "B", b"from file\n")
    assert resolve_secrets(["A", "B"], {"A": "from environment"}) == {"A": "from environment", "B": "from file"}


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "x")
    assert resolve_secrets(["SOME_TOKEN"]) == {"SOME_TOKEN": "x"}


def test_one_line_end_is_cut_and_nothing_else(tmp_path: Path) -> None:
    for name, content in {"A": b" a \n", "B": b"b", "C": b"c\r\n", "D": b"d\n\n", "F": "ü".encode()}.items():
        _keep(tmp_path, name, content)
    values = resolve_secrets("ABCDF", {}, tmp_path)
    assert values == {"A": " a ", "B": "b", "C": "c", "D": "d\n", "F": "ü"}


def test_an_empty_value_counts_as_missing(directory: Path) -> None:
    _keep(directory, "A", b"from file")
    _keep(directory, "B", b"\n")
    assert resolve_secrets(["A"], {"A": ""}) == {"A": "from file"}
    with pytest.raises(SpecError, match=r"the secret B has no value\n.*/B with mode 0600"):
        resolve_secrets(["B"], {"B": ""})


def test_stricter_files_are_fine(tmp_path: Path) -> None:
    _keep(tmp_path, "A", b"x", 0o400)
    assert resolve_secrets(["A"], {}, tmp_path) == {"A": "x"}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o601, 0o700])
def test_files_that_others_could_use_are_refused(mode: int, tmp_path: Path) -> None:
    path = _keep(tmp_path, "TOKEN", b"s3cr3t", mode)
    with pytest.raises(SpecError) as caught:
        resolve_secrets(["TOKEN"], {}, tmp_path)
    assert f"{mode:04o}" in str(caught.value)
    assert str(caught.value).endswith(f"chmod 600 {path}")
    assert "s3cr3t" not in str(caught.value)


def test_files_of_other_users_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _keep(tmp_path, "TOKEN", b"x")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(SpecError, match="belongs to another user"):
        resolve_secrets(["TOKEN"], {}, tmp_path)


@pytest.mark.parametrize("content", [b"a\0b", b"\xff\xfe", b"x" * (64 * 1024 + 1)])
def test_what_no_variable_can_hold_is_refused(content: bytes, tmp_path: Path) -> None:
    _keep(tmp_path, "TOKEN", content)
    with pytest.raises(SpecError, match=r"is not text|is larger"):
        resolve_secrets(["TOKEN"], {}, tmp_path)


def test_directories_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "A").mkdir()
    os.mkfifo(tmp_path / "B", 0o600)
    for name in "AB":
        with pytest.raises(SpecError, match="is not a plain file"):
            resolve_secrets([name], {}, tmp_path)


def test_all_missing_names_come_in_one_error(directory: Path) -> None:
    _keep(directory, "HERE", b"s3cr3t")
    with pytest.raises(SpecError) as caught:
        resolve_secrets(["ONE", "HERE", "TWO"], {})
    assert str(caught.value) == (
        "the secrets ONE, TWO have no value\n"
        f"  set the environment variable, or write the value to {directory}/NAME with mode 0600"
    )


class _KeyringError(Exception):
    pass


class _NoKeyringError(_KeyringError):
    pass


@pytest.fixture
def keyring(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A stand-in for the package `keyring`, which is optional and talks to a desktop service."""
    module, errors = types.ModuleType("keyring"), types.ModuleType("keyring.errors")
    module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    stored = {("orc", "TOKEN"): "from keyring"}
    module.get_password = lambda service, name: stored.get((service, name))  # type: ignore[attr-defined]
    errors.KeyringError, errors.NoKeyringError = _KeyringError, _NoKeyringError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "keyring", module)
    monkeypatch.setitem(sys.modules, "keyring.errors", errors)
    return module


@pytest.mark.usefixtures("keyring")
def test_the_keyring_is_asked_last(directory: Path) -> None:
    assert resolve_secrets(["TOKEN"], {}) == {"TOKEN": "from keyring"}
    _keep(directory, "TOKEN", b"from file")
    assert resolve_secrets(["TOKEN"], {}) == {"TOKEN": "from file"}
    with pytest.raises(SpecError, match="or run: keyring set orc OTHER"):
        resolve_secrets(["OTHER"], {})


def test_a_machine_without_a_keyring_service_has_no_value(keyring: types.ModuleType) -> None:
    def fail(service: str, name: str) -> str:
        raise _NoKeyringError

    keyring.get_password = fail  # type: ignore[attr-defined]
    with pytest.raises(SpecError, match="the secret TOKEN has no value"):
        resolve_secrets(["TOKEN"], {})


def test_a_locked_keyring_is_an_error(keyring: types.ModuleType) -> None:
    def fail(service: str, name: str) -> str:
        raise _KeyringError("s3cr3t")

    keyring.get_password = fail  # type: ignore[attr-defined]
    with pytest.raises(SpecError) as caught:
        resolve_secrets(["TOKEN"], {})
    assert str(caught.value) == "the keyring did not give the secret TOKEN: _KeyringError"


def test_redaction_leaves_no_part_of_a_longer_value() -> None:
    assert redact("key=abc, long=abcdef, none", ["abc", "abcdef", ""]) == "key=***, long=***, none"
