"""One module per revision, named after it; the newest one is `orc.orchestrator.ledger.version.HEAD`."""
