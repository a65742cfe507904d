"""What a backend gets from the contract, and what is refused by its name because it does not have it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from orc.launchers.backends.base import Backend, Handle, require_secrets
from orc.launchers.errors import BackendError
from orc.launchers.ids import AttemptId
from orc.launchers.plan import Plan
from orc.launchers.plugins import BACKENDS, COMMANDS
from orc.launchers.snapshot.manifest import Snapshot
from orc.launchers.spec.clusters import Cluster

HANDLE = Handle("moon", "lunar", "orc-x-k3f9a2-a1", "7")


class Lunar(Backend):
    """A platform that says nothing beyond what it must."""

    kind = "lunar"
    root = "/crater/orc"  # type: ignore[assignment]

    def _never(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("not part of this test")

    render = preflight = submit = find = poll = cancel = _never


@pytest.fixture
def lunar() -> Lunar:
    return Lunar(Cluster(name="moon", kind="lunar"))


def test_a_class_that_lacks_a_part_of_the_contract_cannot_be_opened() -> None:
    class Half(Backend):
        kind = "half"

    with pytest.raises(TypeError, match=r"root.*submit"):
        Half(Cluster(name="x", kind="half"))  # type: ignore[abstract]


def test_stores_that_a_platform_does_not_have_are_refused_by_its_name_and_never_those_of_this_machine(
    lunar: Lunar,
) -> None:
    with pytest.raises(BackendError, match="clusters of kind lunar have no snapshot stores"):
        lunar.stores()
    with pytest.raises(BackendError, match="clusters of kind lunar have no snapshot stores"):
        lunar.stage(Snapshot(None, None))  # type: ignore[arg-type]


def test_logs_and_files_need_a_directory(lunar: Lunar) -> None:
    with pytest.raises(BackendError, match="attempts on clusters of kind lunar have no directory"):
        lunar.read_file(HANDLE, "metrics.jsonl")


@pytest.mark.parametrize(
    ("given", "place"),
    [
        (None, "/crater/orc/jobs/x-k3f9a2/checkpoints"),
        ("saved", "/crater/orc/jobs/x-k3f9a2/saved"),
        ("/scratch/saved", "/scratch/saved"),
        ("s3://bucket/saved", "s3://bucket/saved"),
    ],
)
def test_checkpoints_lie_below_the_root_unless_the_job_says_where(lunar: Lunar, given: str | None, place: str) -> None:
    assert lunar.checkpoint_dir({"checkpoint": {"dir": given}}, "x-k3f9a2") == place


def test_a_secret_without_a_value_is_named_and_the_others_are_left_out() -> None:
    plan = Plan(AttemptId("x-k3f9a2", 1), "moon", "lunar", (), (), {}, {}, ("TOKEN", "KEY"))
    with pytest.raises(BackendError, match="no value for the secret KEY"):
        require_secrets(plan, {"TOKEN": "t"})
    values: Mapping[str, str] = {"TOKEN": "t", "KEY": "k", "OTHER": "o"}
    assert require_secrets(plan, values) == {"TOKEN": "t", "KEY": "k"}


@pytest.mark.parametrize(("kind", "options"), [("local", {}), ("ssh", {"hosts": ["a"]})])
def test_opening_a_backend_imports_nothing_heavy(kind: str, options: dict[str, Any]) -> None:
    program = f"""
import sys
from orc.launchers.backends import open_backend
from orc.launchers.spec.clusters import Cluster
from orc.launchers.spec import JobSpec
open_backend(Cluster(name="lab", kind={kind!r}, options={options!r}))
heavy = {{"torch", "sqlalchemy", "jinja2", "rich", "paramiko", "fabric", "psutil", "subprocess", "asyncio"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_shared_modules_are_no_kinds() -> None:
    assert not any(BACKENDS.has(kind) for kind in ("base", "reports", "verdict", "local.backend", "__init__", "../x"))
    assert not any(COMMANDS.has(kind) for kind in ("base", "options", "program"))
    assert {"local", "slurm", "ssh"} <= set(BACKENDS.kinds())
