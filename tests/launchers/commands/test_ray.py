"""Command ray: what the nodes are told."""

from __future__ import annotations

import pytest


def start(command, role: str) -> str:
    """The line that starts Ray on the nodes of that role."""
    service = next(each for each in command.services if each.role == role)
    return next(line for line in service.argv[2].splitlines() if "scripts start" in line)


def test_the_token_is_in_the_environment_and_on_no_command_line(build) -> None:
    command = build("ray")
    assert command.env["RAY_AUTH_TOKEN"] == "{service_token}"
    words = [*command.ready, *(word for each in command.services for word in each.argv)]
    assert not any("token" in word for word in words)


def test_what_a_node_has_follows_from_the_resources_unless_it_is_given(build) -> None:
    resources = {"gpus_per_node": 4, "cpus_per_proc": 3}
    assert "--num-gpus=4 --num-cpus=12" in start(build("ray", resources=resources), "Ray worker")
    words = start(build("ray", {"num_gpus": 1, "num_cpus": 2}, resources=resources), "Ray worker")
    assert "--num-gpus=1 --num-cpus=2" in words
    words = start(build("ray", {"object_store_memory": "1.5GiB", "resources": {"it's": 2}}), "Ray head")
    assert f"--object-store-memory={3 << 29}" in words
    assert """'--resources={"it'"'"'s": 2}'""" in words


@pytest.mark.parametrize(
    ("options", "resources", "reason"),
    [
        ({"num_cpu": 1}, {}, "unknown option 'num_cpu', did you mean 'num_cpus'?"),
        ({"address": "a:1"}, {}, "option address cannot be given: node 0 publishes it for every attempt"),
        ({"dashboard_host": "0.0.0.0"}, {}, "option dashboard_host cannot be given: the dashboard is off"),
        ({"num_cpus": -1}, {}, "option num_cpus = -1: expected at least 0"),
        ({"object_store_memory": "much"}, {}, "option object_store_memory = 'much': "),
        ({"min_worker_port": 10002}, {}, "options min_worker_port and max_worker_port belong together"),
        ({}, {"procs_per_node": 2}, "the program runs once, as Ray's driver, and resources.procs_per_node is 2"),
    ],
)
def test_options_that_are_refused(refusal, options, resources, reason) -> None:
    assert refusal("ray", options, resources=resources).startswith(reason)
