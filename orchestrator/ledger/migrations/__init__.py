"""Schema migrations, run by `orc.orchestrator.ledger.upgrade`. Ledgers are only ever upgraded."""
