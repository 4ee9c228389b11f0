"""Shards that arrive as statistics, with some of their rollouts in full."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0015'
down_revision = '0014'
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ('steps', 'shards'):
        for name in ('full_rollouts', 'full_tokens'):
            op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for table in ('steps', 'shards'):
        with op.batch_alter_table(table) as altered:
            for name in ('full_rollouts', 'full_tokens'):
                altered.drop_column(name)
