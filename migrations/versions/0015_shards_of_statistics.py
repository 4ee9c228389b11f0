"""Shards that arrive as statistics, with some of their rollouts in full."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0015'
down_revision = '0014'
branch_labels = None
depends_on = None

COLUMNS = {
    'steps': ('full_rollouts', 'full_tokens'),
    'shards': ('full_rollouts', 'full_tokens', 'sampled_rollouts'),
}


def upgrade() -> None:
    for table, columns in COLUMNS.items():
        for name in columns:
            op.add_column(table, sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for table, columns in COLUMNS.items():
        for name in columns:
            op.drop_column(table, name)
