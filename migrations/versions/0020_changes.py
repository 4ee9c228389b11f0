"""Setups that shards name, and changes that a trainer announces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = '0020'
down_revision = '0019'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'run_setups',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('number', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('digest', sa.String(), nullable=False),
        sa.Column('setup', sa.String(), nullable=False),
        sa.ForeignKeyConstraint(['run_id'], ['runs.id'], name=op.f('fk_run_setups_run_id_runs')),
        sa.PrimaryKeyConstraint('run_id', 'number', name=op.f('pk_run_setups')),
        sa.UniqueConstraint('run_id', 'digest', name=op.f('uq_run_setups_run_id_digest')),
    )
    op.create_table(
        'announced_changes',
        sa.Column('run_id', sa.String(), nullable=False),
        sa.Column('attempt', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('step', sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column('kind', sa.String(), nullable=False),
        sa.Column('note', sa.String(), nullable=True),
        sa.Column('values', sa.JSON().with_variant(postgresql.JSONB(), 'postgresql'), nullable=False),
        sa.Column('announced_at_us', sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ['run_id', 'attempt'],
            ['attempts.run_id', 'attempts.attempt'],
            name=op.f('fk_announced_changes_run_id_attempt_attempts'),
        ),
        sa.PrimaryKeyConstraint('run_id', 'attempt', 'step', 'kind', name=op.f('pk_announced_changes')),
    )
    op.add_column('steps', sa.Column('setups', sa.String(), nullable=True))


def downgrade() -> None:
    op.drop_column('steps', 'setups')
    op.drop_table('announced_changes')
    op.drop_table('run_setups')
