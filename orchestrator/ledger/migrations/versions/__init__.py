"""Revisions, a module each, named after it; the newest one is `orc.orchestrator.ledger.database.HEAD`."""
