"""Schema migrations, run by `orc.orchestrator.ledger.opening`. Ledgers are only ever upgraded."""
