"""The ledger: jobs, attempts and their append-only events in a SQL database.

`orc.orchestrator.ledger.opening.open_database` opens the database, `orc.orchestrator.ledger.store.Ledger` reads and
writes the ledger in it.
"""
