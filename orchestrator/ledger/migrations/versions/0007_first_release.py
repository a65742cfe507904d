"""The first release: the tables as `orc.orchestrator.ledger.schema` has them, from which new ledgers are made."""

revision = "0007"
down_revision = None
