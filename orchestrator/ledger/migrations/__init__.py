"""Schema migrations, run by `orc.orchestrator.ledger.engine`. Ledgers are only ever upgraded."""
