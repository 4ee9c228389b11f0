"""Indexes by which the steps that every answer with curves names are found: incomplete, and sent as statistics."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0026'
down_revision = '0025'
branch_labels = None
depends_on = None

INCOMPLETE = sa.text("closed_at_us IS NOT NULL AND received_shards < expected_shards")
SENT_AS_STATISTICS = sa.text("full_rollouts IS NOT NULL")


def upgrade() -> None:
    for name, where in (("ix_steps_incomplete", INCOMPLETE), ("ix_steps_sent_as_statistics", SENT_AS_STATISTICS)):
        op.create_index(name, "steps", ["run_id", "attempt", "step"], sqlite_where=where, postgresql_where=where)


def downgrade() -> None:
    op.drop_index("ix_steps_sent_as_statistics", table_name="steps")
    op.drop_index("ix_steps_incomplete", table_name="steps")
