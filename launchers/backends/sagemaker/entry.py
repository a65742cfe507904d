"""Entry point of every container of a SageMaker training job, for `containers.program`.

Standard library only, Python >= 3.9. SageMaker tells a container who it is through files below ``/opt/ml`` and reads
what it prints, its exit status and ``/opt/ml/output/failure``; docs/explanation/sagemaker-container.md describes both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

from orc.launchers.containers.program import Container, Failure, main, read_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

ML = "/opt/ml"

_FETCH_SECRETS = """
import sys
try:
    import boto3
except ImportError:
    sys.exit("the image has no boto3, which reads the job's secrets from AWS Secrets Manager")
client = boto3.client("secretsmanager", region_name=sys.argv[2] or None)
try:
    text = client.get_secret_value(SecretId=sys.argv[1])["SecretString"]
except Exception as error:
    sys.exit(f"the secret {sys.argv[1]} cannot be read: {error}")
sys.stdout.write(text)
"""


def host_order(hosts: Sequence[str]) -> list[str]:
    """Hosts in the order of their numbers: ``algo-2`` before ``algo-10``."""
    return sorted(hosts, key=lambda host: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", host)])


def sagemaker_variables(
    resources: Mapping[str, Any], channels: Mapping[str, Any], hyperparameters: Mapping[str, str]
) -> dict[str, str]:
    """The documented ``SM_*`` variables, which SageMaker's own toolkit would set; everything but text is JSON."""
    hosts = host_order([str(host) for host in resources["hosts"]])
    current = str(resources["current_host"])
    interface = str(resources.get("network_interface_name") or "")
    given = {name: _value(text) for name, text in hyperparameters.items()}
    inputs = {name: f"{ML}/input/data/{name}" for name in channels}
    words = [word for name, text in hyperparameters.items() for word in (f"--{name}", str(text))]
    cpus = len(os.sched_getaffinity(0))
    gpus = sum(bool(re.fullmatch(r"nvidia[0-9]+", name)) for name in os.listdir("/dev"))
    values: dict[str, Any] = {
        "SM_MODEL_DIR": f"{ML}/model",
        "SM_INPUT_DIR": f"{ML}/input",
        "SM_INPUT_DATA_DIR": f"{ML}/input/data",
        "SM_INPUT_CONFIG_DIR": f"{ML}/input/config",
        "SM_OUTPUT_DIR": f"{ML}/output",
        "SM_OUTPUT_DATA_DIR": f"{ML}/output/data",
        "SM_OUTPUT_FAILURE": f"{ML}/output/failure",
        "SM_CHANNELS": sorted(channels),
        **{f"SM_CHANNEL_{_variable(name)}": path for name, path in inputs.items()},
        "SM_HPS": given,
        **{f"SM_HP_{_variable(name)}": value for name, value in given.items()},
        "SM_USER_ARGS": words,
        "SM_HOSTS": hosts,
        "SM_HOST_COUNT": len(hosts),
        "SM_CURRENT_HOST": current,
        "SM_CURRENT_HOST_RANK": hosts.index(current),
        "SM_CURRENT_INSTANCE_TYPE": resources.get("current_instance_type") or "",
        "SM_CURRENT_INSTANCE_GROUP": resources.get("current_group_name") or "",
        "SM_MASTER_ADDR": hosts[0],
        "SM_NETWORK_INTERFACE_NAME": interface,
        "SM_NUM_CPUS": cpus,
        "SM_NUM_GPUS": gpus,
        "SM_NUM_NEURONS": 0,
        "SM_RESOURCE_CONFIG": dict(resources),
        "SM_INPUT_DATA_CONFIG": dict(channels),
        "SM_TRAINING_ENV": {
            "channel_input_dirs": inputs,
            "current_host": current,
            "current_instance_type": resources.get("current_instance_type") or "",
            "hosts": hosts,
            "master_hostname": hosts[0],
            "hyperparameters": given,
            "input_config_dir": f"{ML}/input/config",
            "input_data_config": dict(channels),
            "input_dir": f"{ML}/input",
            "job_name": os.environ.get("TRAINING_JOB_NAME", ""),
            "model_dir": f"{ML}/model",
            "network_interface_name": interface,
            "num_cpus": cpus,
            "num_gpus": gpus,
            "output_data_dir": f"{ML}/output/data",
            "resource_config": dict(resources),
        },
    }
    variables = {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    if interface:
        variables.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    return variables


def _variable(name: str) -> str:
    return re.sub(r"[^A-Z0-9_]", "_", name.upper())


def _value(text: Any) -> Any:
    """A hyperparameter as it was before it became text; SageMaker keeps text alone."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


def secrets(config: Mapping[str, Any]) -> bytes | None:
    """Return the secrets that Secrets Manager keeps; `None` where they come by a channel. Raises `Failure`."""
    place = (config.get("backend") or {}).get("secrets") or {}
    if place.get("from") != "secretsmanager":
        return None
    # Not in this process: it has no site-packages.
    argv = [sys.executable, "-c", _FETCH_SECRETS, str(place["id"]), str(place.get("region") or "")]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode:
        raise Failure(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1])
    return done.stdout


def describe() -> Container:
    """Return this container, from the files of SageMaker."""
    resources = read_json(f"{ML}/input/config/resourceconfig.json")
    channels = _optional(f"{ML}/input/config/inputdataconfig.json")
    hyperparameters = _optional(f"{ML}/input/config/hyperparameters.json")
    hosts = host_order([str(host) for host in resources["hosts"]])
    return Container(
        platform="sagemaker",
        hosts=hosts,
        node=hosts.index(str(resources["current_host"])),
        inputs=f"{ML}/input/data/orc-attempt",
        archive=f"{ML}/input/data/orc/source.tar.gz",
        variables=sagemaker_variables(resources, channels, hyperparameters),
        directories=(f"{ML}/model", f"{ML}/output/data"),
        secrets=secrets,
    )


def _optional(path: str) -> dict[str, Any]:
    return read_json(path) if os.path.exists(path) else {}


if __name__ == "__main__":
    sys.exit(main(describe, failure=f"{ML}/output/failure"))
