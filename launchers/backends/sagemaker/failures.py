"""Errors of AWS as people read them: one sentence, and what to do. Pure, but for the types of the SDK's errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from orc.launchers.errors import BackendError, BackendUnreachable, LaunchError

_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired")
_UNKNOWN_KEY = (
    *("UnrecognizedClientException", "InvalidClientTokenId", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    *("InvalidSignatureException", "AuthFailure", "IncompleteSignature", "MissingAuthenticationToken"),
)
_DENIED = ("AccessDeniedException", "AccessDenied", "UnauthorizedOperation", "403", "Forbidden")
_THROTTLED = (
    *("Throttling", "ThrottlingException", "ThrottledException", "RequestThrottled", "TooManyRequestsException"),
    *("RequestLimitExceeded", "SlowDown", "LimitExceededException"),
)
_AWAY = ("InternalFailure", "InternalServerError", "InternalError", "ServiceUnavailable", "503", "500", "502", "504")
_GET_CREDENTIALS = (
    "Run `aws sso login`, or give credentials in the environment or in a profile (`profile` of the cluster)."
)


def aws_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of requests to AWS; for ``except``, so that they are imported only after a failure."""
    try:
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError
    except ModuleNotFoundError:  # then there was no request
        return ()
    return BotoCoreError, ClientError, Boto3Error


def code_of(error: Exception) -> str:
    """AWS's word for the error; empty for others."""
    response: Mapping[str, Any] = getattr(error, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def message_of(error: Exception) -> str:
    """AWS's sentence, in one line."""
    response: Mapping[str, Any] = getattr(error, "response", None) or {}
    text = str(response.get("Error", {}).get("Message") or error)
    return " ".join(text.split())


def explain(
    error: Exception, where: str, *, asked: str = "", instance_type: str = "", regions: Collection[str] = ()
) -> LaunchError:
    """Return the error for people that *error* stands for.

    *asked* is what was asked for, like ``sagemaker:CreateTrainingJob``; *regions* are all that are known, when the one
    that was asked is not among them.
    """
    from botocore import exceptions as boto

    kind: type[BackendError] = BackendUnreachable
    what, hint = f"{type(error).__name__}: {error}", ""
    if isinstance(error, boto.ClientError):
        kind, what, hint = _refusal(code_of(error), message_of(error), asked or "the request", instance_type)
    elif isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        what, hint = "there are no AWS credentials", _GET_CREDENTIALS
    elif isinstance(error, (boto.TokenRetrievalError, boto.SSOError, boto.CredentialRetrievalError)):
        what, hint = f"the AWS credentials cannot be used: {error}", _GET_CREDENTIALS
    elif isinstance(error, boto.ProfileNotFound):
        kind, what, hint = BackendError, str(error), "Correct `profile`; `aws configure list-profiles` lists them."
    elif isinstance(error, boto.EndpointConnectionError):
        what, hint = f"nobody answers: {error}", "Is `region` right, and the network up?"
        if regions:
            hint = f"No region of that name is known. SageMaker is in {', '.join(regions)}."
    elif isinstance(error, (boto.ConnectTimeoutError, boto.ProxyConnectionError, boto.SSLError)):
        what = f"no connection: {error}"
    elif not isinstance(error, boto.BotoCoreError):
        kind = BackendError
    return kind(what, where=where, hint=hint)


def _refusal(code: str, message: str, asked: str, instance_type: str) -> tuple[type[BackendError], str, str]:
    """Return the error for an answer with *code*, what it says, and what to do."""
    if code in _EXPIRED:
        return BackendUnreachable, "the AWS credentials have expired", _GET_CREDENTIALS
    if code in _UNKNOWN_KEY:
        hint = f"Are they of another account, or of another part of AWS? {_GET_CREDENTIALS}"
        return BackendUnreachable, "AWS does not accept the credentials", hint
    if code in _DENIED:
        hint = "Add the permission to the user, or choose another profile."
        return BackendError, f"not allowed: {asked}: {message}", hint
    if code in _THROTTLED:
        return BackendUnreachable, f"AWS is asked too often ({code})", ""
    if code == "ResourceLimitExceeded":
        hint = "Ask for more under Service Quotas (Amazon SageMaker, `<type> for training job usage`), or wait."
        return (
            BackendError,
            f"the account's quota for {instance_type or 'this instance type'} is used up: {message}",
            hint,
        )
    if code in _AWAY:
        return BackendUnreachable, f"AWS cannot answer now ({code}): {message}", ""
    if code in ("ValidationException", "ValidationError"):
        hint = next((hint for pattern, hint in _HINTS if re.search(pattern, message, re.IGNORECASE)), "")
        return BackendError, f"SageMaker refuses the request: {message}", hint
    return BackendError, f"{code}: {message}", ""


# What SageMaker says of a request that it does not take, and what to do.
_HINTS = (
    (r"(?=.*role).*(assume|trust)", "The role's trust policy must allow sagemaker.amazonaws.com to assume it."),
    (r"instance ?type", "Does the region have this instance type? `instance_type` names it."),
    (r"could not find model data|s3", "Does the location exist, and may the execution role read it?"),
    (r"image|ecr", "Does the image exist in ECR in this region, and may the execution role pull it?"),
)


def ambiguous(error: Exception) -> bool:
    """Return True when a request that failed like this may have had its effect."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return code_of(error) in _AWAY
    lost = (boto.ReadTimeoutError, boto.ConnectionClosedError, boto.ResponseStreamingError, boto.IncompleteReadError)
    return isinstance(error, lost)


_KIND = re.compile(r"^(?P<kind>[A-Za-z]+(?:Error|Exception))\s*:\s*(?P<rest>.*)$", re.DOTALL)
_LAST = re.compile(r",?\s*exit code:?\s*\d+\s*$", re.IGNORECASE)  # what SageMaker puts at the end
_EXIT = re.compile(r"exit code:?\s*(?P<code>\d+)", re.IGNORECASE)


def split_reason(text: str) -> tuple[str, str]:
    """``AlgorithmError: text, exit code: 1`` as its kind and the first line of the text."""
    match = _KIND.match(text.strip())
    kind, rest = (match["kind"], match["rest"]) if match else ("", text)
    lines = [found for line in rest.splitlines() if (found := _LAST.sub("", line.strip()).strip(" ,"))]
    return kind, lines[0] if lines else ""


def exit_code(text: str) -> int | None:
    """The exit code that a failure reason speaks of."""
    found = list(_EXIT.finditer(text))
    return int(found[-1]["code"]) if found else None
