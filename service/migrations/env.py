"""Alembic's environment: migrate over the connection that `service.database.schema` hands in."""

from __future__ import annotations

from alembic import context

from service.database.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
