"""The service: the ledger over HTTP, for a team. Needs the extra ``service`` (fastapi, uvicorn)."""
