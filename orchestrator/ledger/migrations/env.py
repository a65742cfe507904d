"""Environment of alembic's migrations: always the connection that `upgrade` hands over, in its transaction."""

from __future__ import annotations

from alembic import context

from orc.orchestrator.ledger.schema import metadata

connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=connection.dialect.name == "sqlite",
)
context.run_migrations()
