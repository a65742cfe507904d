"""Options of a cluster of TPUs and of its jobs: what is taken, and how mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from orc.launchers.backends.tpu.settings import JOB_KEYS, Options, for_job, read_settings
from orc.launchers.errors import SpecError
from orc.launchers.spec import JobSpec
from orc.launchers.spec.clusters import Cluster, load_clusters

Make = Callable[..., Cluster]
MakeJob = Callable[..., JobSpec]
RESERVATION = "projects/demo-project/locations/us-central2-b/reservations/r"


def test_the_smallest_cluster_names_project_zone_and_type(cluster: Make) -> None:
    settings = read_settings(cluster())
    assert settings.options.zones == ("us-central2-b",)
    assert (settings.options.queued, settings.options.on_finish, settings.options.spot) == (True, "delete", False)
    assert settings.root == "~/.local/state/orc"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"project": None}, "the key 'project' is required"),
        ({"zones": []}, "zones: name at least one zone"),
        ({"zones": ["us-central2-b", "us-central2-b"]}, "a zone is listed twice"),
        ({"zones": "us-central2"}, "'us-central2' is not a zone"),
        ({"accelerator_type": "v4-4"}, "there is no v4-4; the sizes of v4 are"),
        ({"project": "Demo"}, "'Demo' is not a project id"),
        ({"insecure": True}, "only for an `endpoint` of your own"),
        ({"spot": True, "reserved": True}, "spot or reserved, not both"),
        ({"queued": False, "valid_until": "1h"}, "valid_until: only queued resources have this"),
        ({"queued": False, "reservation": RESERVATION}, "reservation: only queued resources have this"),
        ({"reservation": "r"}, "'r' is not a reservation; write for example projects/P/locations/Z/reservations/R"),
        ({"reservation": RESERVATION.replace("us-", "eu-")}, "it is in eu-central2-b, not in us-central2-b"),
        ({"reservation": RESERVATION, "zones": ["us-central2-b", "us-east1-d"]}, "name its zone alone"),
        ({"external_ips": False, "internal": True}, "there are no other addresses"),
        ({"labels": {"Team": "x"}}, "labels.Team: labels are lower-case letters"),
        ({"labels": {"orc-marker": "x"}}, "labels that begin with orc- are orc's own"),
        ({"metadata": {"ssh-keys": "x"}}, "use the option ssh_key"),
        ({"metadata": {"a key": "x"}}, "metadata.a key: keys of metadata are letters, digits"),
        ({"metadata": {"startup-script": "x"}}, "use the option startup_script"),
        ({"startup_script": "x" * 300_000}, "300000 bytes are more than the 262144"),
        ({"data_disks": ["disk"]}, "'disk' is not a disk"),
        ({"service_account": "nobody"}, "'nobody' is not an address"),
        ({"on_finish": "burn"}, "on_finish: "),
        ({"idle_timeout": "1s"}, "expected 60 to"),
        ({"valid_until": "5s"}, "expected 60 to"),
        ({"port": 0}, "port: "),
        ({"ssh_key": "~/a%h", "user": "me"}, "ssh_key: ssh gives % in a path a meaning"),
        ({"endpoint": "https://x"}, "is not an endpoint"),
        ({"name": "My_TPU"}, "'My_TPU' is not the name of a TPU"),
        ({"acclerator_type": "v4-8"}, "unknown key 'acclerator_type', did you mean 'accelerator_type'?"),
        ({"os_login": True, "ssh_key": "~/.ssh/key", "user": "me"}, "with OS Login no key goes to the workers"),
    ],
)
def test_what_cannot_be_is_refused_by_name(cluster: Make, options: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_settings(cluster(**options))
    assert says in str(caught.value)


def test_mistakes_are_named_by_file_line_and_column(tmp_path: Path) -> None:
    file = tmp_path / "clusters.yaml"
    file.write_text(
        "pod:\n  kind: tpu\n  options:\n    project: demo-project\n    zones: us-central2-b\n"
        "    accelerator_type: v4-9\n    spots: true\n"
    )
    with pytest.raises(SpecError) as caught:
        read_settings(load_clusters(file)["pod"])
    assert f"{file}:6:23: accelerator_type: there is no v4-9" in str(caught.value)
    assert f"{file}:7:5: unknown key 'spots', did you mean 'spot'?" in str(caught.value)


def test_the_public_half_of_the_key_is_read(cluster: Make, tmp_path: Path) -> None:
    key = tmp_path / "key"
    with pytest.raises(SpecError, match=r"key\.pub cannot be read: No such file") as caught:
        read_settings(cluster(ssh_key=str(key), user="me"))
    assert f"ssh-keygen -t ed25519 -f {key}" in caught.value.hint
    key.with_suffix(".pub").write_text("not a key\n")
    with pytest.raises(SpecError, match="does not hold a public key"):
        read_settings(cluster(ssh_key=str(key), user="me"))
    key.with_suffix(".pub").write_text("ssh-ed25519 AAAAC3Nz me@home\n")
    with pytest.raises(SpecError, match="belongs to a user of the workers"):
        read_settings(cluster(ssh_key=str(key)))
    assert read_settings(cluster(ssh_key=str(key), user="me")).public_key == "ssh-ed25519 AAAAC3Nz me@home"


def test_a_job_may_choose_what_it_gets(cluster: Make, job: MakeJob) -> None:
    settings = read_settings(cluster(zones=["us-central2-b", "europe-west4-a"], labels={"team": "a", "cost": "x"}))
    options = for_job(job({"spot": True, "zones": "europe-west4-a", "labels": {"team": "b"}}), settings)
    assert (options.spot, options.zones, options.labels) == (True, ("europe-west4-a",), {"team": "b", "cost": "x"})
    assert options.project == "demo-project"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"project": "other-project"}, "project: is for the cluster to say"),
        ({"spott": True}, "spott: unknown option, did you mean 'spot'?"),
        ({"zones": "us-east1-d"}, "us-east1-d is none of the cluster's; they are us-central2-b"),
        ({"spot": True, "reserved": True}, "spot or reserved"),
        ({"accelerator_type": "v4-9"}, "there is no v4-9"),
    ],
)
def test_a_job_may_not_choose_what_it_cannot_have(
    cluster: Make, job: MakeJob, options: dict[str, object], says: str
) -> None:
    with pytest.raises(SpecError) as caught:
        for_job(job(options), read_settings(cluster()))
    assert says in str(caught.value)


def test_every_option_is_documented() -> None:
    text = (Path(__file__).parents[4] / "docs" / "reference" / "tpu-options.md").read_text()
    for name in Options.model_fields:
        assert f"| `{name}` |" in text, name
    for key in JOB_KEYS:
        (line,) = [line for line in text.splitlines() if line.startswith(f"| `{key}` |")]
        assert "| yes |" in line, line
