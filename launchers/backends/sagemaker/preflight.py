"""Looking before leaping: who we are at AWS, the bucket, the role, the image's Python. Changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from orc.launchers.backends.sagemaker.images import is_pending, pending, python_of
from orc.launchers.backends.sagemaker.names import ACCOUNT, is_default_bucket, split_uri
from orc.launchers.backends.sagemaker.rendering import request_of
from orc.launchers.errors import LaunchError
from orc.launchers.findings import Finding
from orc.launchers.oldest_python import python_problem

if TYPE_CHECKING:
    from orc.launchers.backends.sagemaker.aws import AwsService
    from orc.launchers.plan import Plan


def check(service: AwsService, plan: Plan, cluster: str) -> list[Finding]:
    """Return the findings about *plan*: what stands in its way, and what may surprise."""
    findings: list[Finding] = []
    request = request_of(plan)
    try:
        account, identity = service.account(), service.identity()
    except LaunchError as error:
        return [Finding.of(error, cluster)]
    if account != identity:
        what = f"the credentials are of the account {identity}, the cluster's account is {account}"
        return [Finding("error", what, cluster, "Choose another profile, or correct `account`.")]
    bucket = split_uri(plan.files[0].path)[0]
    try:
        if not service.has_bucket(bucket.replace(ACCOUNT, account)):
            findings.append(_no_bucket(bucket.replace(ACCOUNT, account), cluster, default=is_default_bucket(bucket)))
    except LaunchError as error:
        findings.append(Finding.of(error, cluster))
    if problem := service.role_problem(str(request["RoleArn"]).replace(ACCOUNT, account)):
        findings.append(Finding("error", problem, cluster, "Correct `role`, the execution role of training jobs."))
    image = str(request["AlgorithmSpecification"]["TrainingImage"])
    if is_pending(image):
        try:
            image = service.image(pending(image))
            findings.append(Finding("info", f"the SDK knows the image: {image}", cluster))
        except LaunchError as error:
            findings.append(Finding.of(error, cluster))
    orders = json.loads(plan.files[0].content)
    if request["EnableNetworkIsolation"] and any("pip install" in line for line in orders["setup"]):
        what = "enable_network_isolation: without a network the job cannot install its requirements"
        hint = "Put them into an image (`image_uri`), and set install_requirements: false."
        findings.append(Finding("warning", what, cluster, hint))
    return [*findings, *_python(image, cluster)]


def _python(image: str, cluster: str) -> Iterator[Finding]:
    """An image in which no agent can start."""
    python = python_of(image)
    if python is not None and (problem := python_problem(python)):
        yield Finding(
            "error",
            f"the image has {problem}",
            cluster,
            "Ask for a later pytorch_version or transformers_version, or give an image_uri.",
        )


def _no_bucket(bucket: str, cluster: str, *, default: bool) -> Finding:
    if default:
        return Finding("info", f"the bucket {bucket} will be made", cluster)
    return Finding("error", f"there is no bucket {bucket}", cluster, "Create it, or correct `bucket`.")
