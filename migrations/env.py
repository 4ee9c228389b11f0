"""Alembic's environment: migrate over the connection that `foreshock_service.platform.database.opening` passes."""

from __future__ import annotations

from typing import Any, Literal

from alembic import context
from alembic.autogenerate.api import AutogenContext

from foreshock_service.platform.database.tables import Base
from foreshock_service.platform.database.tables.base import CompressedBytes, CompressedJson, JsonColumn


def render_item(kind: str, item: Any, autogenerate: AutogenContext) -> str | Literal[False]:
    """Return the text of one of our column types in a drafted migration; False: Alembic renders the type."""
    if kind == "type" and item is JsonColumn:
        autogenerate.imports.add("from sqlalchemy.dialects import postgresql")
        return 'sa.JSON().with_variant(postgresql.JSONB(), "postgresql")'
    if kind == "type" and isinstance(item, CompressedBytes | CompressedJson):
        return "sa.LargeBinary()"
    return False


context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    render_item=render_item,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
