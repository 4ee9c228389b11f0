"""The failed tries of removed runs, so that a counter does not decrease."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0045'
down_revision = '0044'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'removed_failures',
        sa.Column('project', sa.String(), nullable=False),
        sa.Column('accelerator', sa.String(), nullable=False),
        sa.Column('tries', sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint('project', 'accelerator', name=op.f('pk_removed_failures')),
    )


def downgrade() -> None:
    op.drop_table('removed_failures')
