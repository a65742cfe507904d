"""The ledger: jobs, attempts and their append-only events in a SQL database.

`orc.orchestrator.ledger.opening.open_database` opens its database, `orc.orchestrator.ledger.store.Ledger` reads and writes it.
"""
