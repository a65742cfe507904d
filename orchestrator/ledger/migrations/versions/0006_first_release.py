"""The first release: the tables as `orc.orchestrator.ledger.schema` has them, from which new ledgers are made."""

revision = "0006"
down_revision = None
