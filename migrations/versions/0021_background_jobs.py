"""The background jobs of several processes: who does one, and how its last run went."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0021'
down_revision = '0020'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'background_jobs',
        sa.Column('name', sa.String(), nullable=False),
        sa.Column('holder', sa.String(), nullable=False),
        sa.Column('leased_until_us', sa.BigInteger(), nullable=False),
        sa.Column('started_at_us', sa.BigInteger(), nullable=False),
        sa.Column('finished_at_us', sa.BigInteger(), nullable=True),
        sa.Column('runs', sa.BigInteger(), nullable=False),
        sa.Column('error', sa.String(), nullable=True),
        sa.PrimaryKeyConstraint('name', name=op.f('pk_background_jobs')),
    )


def downgrade() -> None:
    op.drop_table('background_jobs')
