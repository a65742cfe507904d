"""Routes of the calls of the API: FastAPI registers what a call's function and types say, and nothing beside."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter as Argument
from inspect import Signature
from typing import Annotated, Any, Literal, Union

from fastapi import APIRouter, Body, Header, Path, Query, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field, create_model

from orc.launchers.errors import SpecError
from orc.orchestrator.api.call import SAFE_METHODS, Bounds, Call, Parameter, Principal, shows
from orc.orchestrator.api.session import Caller
from orc.orchestrator.service.audit import note_subject
from orc.orchestrator.service.auth import PrincipalDep, needs_role
from orc.orchestrator.service.context import Service, ServiceDep
from orc.orchestrator.service.request_limits import asks_clusters
from orc.orchestrator.views import decode, encode

_PLACES = {"path": Path, "query": Query, "header": Header}


def add_routes(router: APIRouter, calls: Sequence[Call[Any, Any]]) -> None:
    """Register the routes of *calls* with *router*."""
    for call in calls:
        router.add_api_route(
            call.path,
            _endpoint(call),
            methods=[call.method],
            response_model=call.result,
            status_code=call.status,
            tags=[call.path.split("/")[1]],
        )


def _endpoint(call: Call[Any, Any]) -> Any:
    """Return the function that answers the requests of *call*; FastAPI reads its signature."""
    body = [parameter for parameter in call.parameters if parameter.place == "body"]

    def endpoint(request: Request, service: Service, principal: Principal, **given: Any) -> JSONResponse:
        sent = given.pop("body", None)
        given = {name: value for name, value in given.items() if value is not None}  # what the request brings
        if body:
            given |= {call.whole_body: sent} if call.whole_body else sent.model_dump(exclude_unset=True)
        try:
            kinds = {parameter.name: parameter.kind for parameter in call.parameters}
            arguments = {name: decode(kinds[name], value) for name, value in given.items()}
        except (TypeError, ValueError, KeyError) as error:  # what the bounds let through has the types that they say
            raise SpecError("an argument has another form", where=str(error)[:200]) from None
        with service.clients.client(writes=call.writes) as client:
            session = client.session.on_behalf_of(_caller(request, service, principal))
            result = call.function(session, **arguments)
        return JSONResponse(encode(result), call.status)

    signature = [
        Argument("request", Argument.KEYWORD_ONLY, annotation=Request),
        Argument("service", Argument.KEYWORD_ONLY, annotation=ServiceDep),
        Argument("principal", Argument.KEYWORD_ONLY, annotation=PrincipalDep),
        *(_argument(parameter) for parameter in call.parameters if parameter.place != "body"),
    ]
    if call.whole_body:
        signature.append(Argument("body", Argument.KEYWORD_ONLY, annotation=Annotated[_typed(body[0].kind), Body()]))
    elif body:
        signature.append(Argument("body", Argument.KEYWORD_ONLY, annotation=_model(call, body)))
    endpoint.__name__, endpoint.__doc__ = call.name, call.function.__doc__
    endpoint.__dict__["__signature__"] = Signature(signature)
    waits = call.asks_clusters and call.method in SAFE_METHODS
    return needs_role(call.role)(
        shows(*call.shows, parts=call.parts, of=call.of)(asks_clusters(endpoint) if waits else endpoint)
    )


def _caller(request: Request, service: Service, principal: Principal) -> Caller:
    def note(subject: str, **data: Any) -> None:
        note_subject(request, subject, **data)

    return Caller(**vars(principal), note=note, max_upload=service.settings.max_upload)


def _argument(parameter: Parameter) -> Argument:
    """Return a parameter of the path, the query or a header as FastAPI reads it."""
    bounds = parameter.bounds
    place = _PLACES[parameter.place](
        alias=bounds.header or None, description=bounds.description or None, **bounds.limits
    )
    kind = _typed(_plain(parameter.kind))
    default = parameter.default
    if parameter.place == "header":  # which need not be sent
        kind, default = kind | None, None
    if isinstance(default, tuple):
        default = list(default)
    return Argument(parameter.name, Argument.KEYWORD_ONLY, annotation=Annotated[kind, place], default=default)


def _model(call: Call[Any, Any], body: Sequence[Parameter]) -> type[BaseModel]:
    """Return the model of a body with these keys and no others."""
    name = "".join(part.capitalize() for part in call.name.split("_"))
    return _object(name, None, [(one.name, one.kind, one.default) for one in body])


def _object(name: str, text: str | None, keys: Sequence[tuple[str, Any, Any]]) -> type[BaseModel]:
    made: dict[str, Any] = {}
    for key, kind, default in keys:
        bounds = Parameter(key, kind, default, "body").bounds
        given = {} if default is Argument.empty else {"default": default}
        made[key] = (_typed(_plain(kind)), Field(description=bounds.description or None, **bounds.limits, **given))
    return create_model(name, __config__=ConfigDict(extra="forbid", hide_input_in_errors=True), __doc__=text, **made)


def _plain(kind: Any) -> Any:
    """Return a type without the limits and the text of its own bounds, which a field has beside it."""
    bounds = next((one for one in getattr(kind, "__metadata__", ()) if isinstance(one, Bounds)), None)
    if bounds is None:
        return kind
    return Literal[bounds.choices] if bounds.choices else typing.get_args(kind)[0]


def _typed(kind: Any) -> Any:
    """Return a type of ours as pydantic checks it: with bounds, and with models for dataclasses."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return kind
    if origin is Annotated:
        bounds = next((one for one in kind.__metadata__ if isinstance(one, Bounds)), Bounds())
        return Annotated[_typed(_plain(kind)), Field(description=bounds.description or None, **bounds.limits)]
    if origin in (Union, types.UnionType):
        return Union[tuple(_typed(one) for one in inner)]  # noqa: UP007 - of a number that is known here alone
    if origin is not None and issubclass(origin, Mapping):
        return dict[tuple(_typed(one) for one in inner)]  # type: ignore[misc]
    if origin is not None and issubclass(origin, Sequence):
        return list[_typed(inner[0])]  # type: ignore[misc]
    if is_dataclass(kind):
        return _model_of(kind)
    return kind


def _model_of(kind: Any) -> type[BaseModel]:
    if kind not in _models:
        hints = typing.get_type_hints(kind, include_extras=True)
        keys = []
        for field in fields(kind):
            default = field.default
            if field.default_factory is not MISSING:
                default = field.default_factory()
            keys.append((field.name, hints[field.name], Argument.empty if default is MISSING else default))
        _models[kind] = _object(kind.__name__, kind.__doc__, keys)
    return _models[kind]


_models: dict[Any, type[BaseModel]] = {}
