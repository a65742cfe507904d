"""Calls of the API, each written once: its name, route, arguments with their bounds, result, and what it does.

A call is a function over an open ledger (`orc.orchestrator.api.session.LedgerSession`) with the decorator `call`.
From it come the route of the service and its OpenAPI description (`orc.orchestrator.service.routing`), the request of
its client (`orc.orchestrator.clients.http_session`), and the way without a service: the function itself.
docs/how-to/add-a-route.md adds one.
"""
