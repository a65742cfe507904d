"""Errors of AWS as people read them: one sentence, and what to do. Pure, but for the types of the SDK's errors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from orc.launchers.errors import AmbiguousSubmit, BackendError, BackendUnreachable, LaunchError

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

    if isinstance(error, LaunchError):
        return error
    if isinstance(error, boto.ClientError):
        return _client_error(error, where, asked, instance_type)
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError)):
        return BackendUnreachable("there are no AWS credentials", where=where, hint=_GET_CREDENTIALS)
    if isinstance(error, (boto.TokenRetrievalError, boto.SSOError, boto.CredentialRetrievalError)):
        return BackendUnreachable(f"the AWS credentials cannot be used: {error}", where=where, hint=_GET_CREDENTIALS)
    if isinstance(error, boto.ProfileNotFound):
        return BackendError(
            str(error), where=where, hint="Correct `profile`; `aws configure list-profiles` lists them."
        )
    if isinstance(error, boto.NoRegionError):
        return BackendError("no region is given", where=where, hint="Set `region` in the cluster's options.")
    if isinstance(error, boto.EndpointConnectionError):
        hint = "Is `region` right, and the network up?"
        if regions:
            hint = f"No region of that name is known. SageMaker is in {', '.join(regions)}."
        return BackendUnreachable(f"nobody answers: {error}", where=where, hint=hint)
    if isinstance(error, (boto.ConnectTimeoutError, boto.ProxyConnectionError, boto.SSLError)):
        return BackendUnreachable(f"no connection: {error}", where=where)
    if isinstance(error, (boto.HTTPClientError, boto.BotoCoreError)):
        return BackendUnreachable(f"{type(error).__name__}: {error}", where=where)
    return BackendError(f"{type(error).__name__}: {error}", where=where)


def _client_error(error: Exception, where: str, asked: str, instance_type: str) -> LaunchError:
    code, message = code_of(error), message_of(error)
    if code in _EXPIRED:
        return BackendUnreachable("the AWS credentials have expired", where=where, hint=_GET_CREDENTIALS)
    if code in _UNKNOWN_KEY:
        hint = f"Are they of another account, or of another part of AWS? {_GET_CREDENTIALS}"
        return BackendUnreachable("AWS does not accept the credentials", where=where, hint=hint)
    if code in _DENIED:
        what = f"not allowed: {asked or 'the request'}: {message}"
        return BackendError(what, where=where, hint="Add the permission to the user, or choose another profile.")
    if code in _THROTTLED:
        return BackendUnreachable(f"AWS is asked too often ({code})", where=where)
    if code == "ResourceLimitExceeded":
        name = instance_type or "this instance type"
        return BackendError(
            f"the account's quota for {name} is used up: {message}",
            where=where,
            hint="Ask for more under Service Quotas (Amazon SageMaker, `<type> for training job usage`), or wait.",
        )
    if code in _AWAY:
        return BackendUnreachable(f"AWS cannot answer now ({code}): {message}", where=where)
    if code in ("ValidationException", "ValidationError"):
        return BackendError(f"SageMaker refuses the request: {message}", where=where, hint=_validation_hint(message))
    return BackendError(f"{code}: {message}", where=where)


def _validation_hint(message: str) -> str:
    low = message.lower()
    if "role" in low and ("assume" in low or "trust" in low):
        return "The role's trust policy must allow sagemaker.amazonaws.com to assume it."
    if "instancetype" in low or "instance type" in low:
        return "Does the region have this instance type? `instance_type` names it."
    if "could not find model data" in low or "no s3 objects found" in low or "s3" in low:
        return "Does the location exist, and may the execution role read it?"
    if "image" in low or "ecr" in low:
        return "Does the image exist in ECR in this region, and may the execution role pull it?"
    return ""


def ambiguous(error: Exception, where: str) -> bool:
    """Return True when a request that failed like this may have had its effect."""
    from botocore import exceptions as boto

    if isinstance(error, boto.ClientError):
        return code_of(error) in _AWAY
    lost = (boto.ReadTimeoutError, boto.ConnectionClosedError, boto.ResponseStreamingError, boto.IncompleteReadError)
    return isinstance(error, lost)


def ambiguous_submit(error: Exception, where: str) -> AmbiguousSubmit:
    """Return the error of a creation whose outcome is unknown."""
    return AmbiguousSubmit(f"the answer was lost: {message_of(error)}", where=where)


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
