"""Runs that log scalars only: the step that is still open, and the names that a run declares."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0027'
down_revision = '0026'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'scalar_tails',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), nullable=False),
        sa.Column('step', sa.BigInteger(), nullable=False),
        sa.Column('received_at_us', sa.BigInteger(), nullable=False),
        sa.Column('closed', sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_scalar_tails_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', name=op.f('pk_scalar_tails')),
    )
    op.add_column('runs', sa.Column('scalar_names', sa.JSON().with_variant(postgresql.JSONB(), 'postgresql'), nullable=True))


def downgrade() -> None:
    op.drop_column('runs', 'scalar_names')
    op.drop_table('scalar_tails')
