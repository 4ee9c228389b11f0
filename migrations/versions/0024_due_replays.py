"""Replays of the detectors that late data made due, which are computed outside the writer."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = '0024'
down_revision = '0023'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'due_replays',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('from_step', sa.BigInteger(), nullable=False),
        sa.Column('changes', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_due_replays_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', name=op.f('pk_due_replays')),
    )


def downgrade() -> None:
    op.drop_table('due_replays')
